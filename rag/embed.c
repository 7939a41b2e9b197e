/* Weights and projects features. Knows no Python and no database. */
#include "embed.h"

#include <errno.h>
#include <math.h>
#include <string.h>

static size_t bucket_of(uint64_t hash)
{
    return hash >> 48; /* 65536 buckets; the low bits are spent on table slots */
}

void ka_idf_add(struct ka_idf *idf, const struct ka_features *features)
{
    idf->documents++;
    for (size_t i = 0; i < features->count; i++) {
        size_t bucket = bucket_of(features->items[i].hash);
        /* features are sorted by hash, so those of one bucket stand together */
        if (i == 0 || bucket_of(features->items[i - 1].hash) != bucket)
            idf->df[bucket]++;
    }
}

int ka_embed_normalise(float *vector, size_t dim)
{
    double norm2 = 0;
    for (size_t i = 0; i < dim; i++)
        norm2 += (double)vector[i] * (double)vector[i];
    if (!(norm2 > 0) || !isfinite(norm2))
        return -EINVAL;
    double scale = 1 / sqrt(norm2);
    for (size_t i = 0; i < dim; i++)
        vector[i] = (float)(vector[i] * scale);
    return 0;
}

int ka_embed(const struct ka_features *features, const struct ka_idf *idf, float out[KA_EMBED_DIM],
             struct ka_err *err)
{
    double sum[KA_EMBED_DIM] = {0};
    for (size_t i = 0; i < features->count; i++) {
        const struct ka_feature *f = &features->items[i];
        /* one that is in every document still tells a little */
        double idf_weight = 0.05 + log((1.0 + idf->documents) / (1.0 + idf->df[bucket_of(f->hash)]));
        double weight = f->weight * idf_weight;
        for (size_t j = 0; j < KA_EMBED_DIM; j += 64) {
            uint64_t signs = ka_mix64(f->hash ^ (j + 1) * 0xd6e8feb86659fd93u);
            for (size_t k = 0; k < 64; k++)
                sum[j + k] += signs >> k & 1 ? weight : -weight;
        }
    }
    float vector[KA_EMBED_DIM];
    for (size_t j = 0; j < KA_EMBED_DIM; j++)
        vector[j] = (float)sum[j];
    if (ka_embed_normalise(vector, KA_EMBED_DIM))
        return ka_fail(err, -EINVAL, "the source has no features that could be compared");
    memcpy(out, vector, sizeof(vector));
    return 0;
}
