/* Weights, projects and whitens features. Knows no Python and no database. */
#include "embed.h"

#include <errno.h>
#include <math.h>
#include <string.h>

#define LEAST 0.05  /* weight of a feature that every pair has */
#define BEND 0.737f /* takes 0.5 to 0.6: from there nearly half of the hits of tests/retrieval help */
#define PROSE 0.5f  /* of a pair that says all that a file says in words, beside 1 for the same kernels */
#define PROSE_BEND 0.6f
#define UNKNOWN 0.001 /* of one that no pair has: only a source of nothing else is made of them */

/* Of the classes; chosen on the tune half of tests/retrieval. */
#define PRODUCT_SHARE 0.05
#define REDUCTION_SHARE 0.05
#define EXPONENTIAL_SHARE 0.02
#define INDIRECT_SHARE 0.01

static size_t bucket_of(uint64_t hash)
{
    return hash >> 48; /* 65536 buckets; the low bits are spent on table slots */
}

static void count(struct ka_idf *idf, const uint64_t *items, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        size_t bucket = bucket_of(items[i]);
        /* features are sorted by hash, so those of one bucket stand together */
        if (i == 0 || bucket_of(items[i - 1]) != bucket)
            idf->df[bucket]++;
    }
}

void ka_measures_count(struct ka_measures *measures, const struct ka_features *features)
{
    measures->idf.documents++;
    count(&measures->idf, features->items, features->count);
    count(&measures->idf, features->words, features->word_count);
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

/* What no pair has finds none and only shortens the rest; what every pair has still tells a little. */
static double idf_of(const struct ka_idf *idf, uint64_t hash)
{
    uint32_t df = idf->df[bucket_of(hash)];
    return df || !idf->documents ? LEAST + log((1.0 + idf->documents) / (1.0 + df)) : UNKNOWN;
}

/* -EINVAL when they weigh nothing; `out` is then all zero. */
static int project(const uint64_t *items, size_t count, const struct ka_idf *idf, float out[KA_WHITEN_DIM])
{
    double sum[KA_WHITEN_DIM] = {0};
    for (size_t i = 0; i < count; i++) {
        double weight = idf_of(idf, items[i]);
        for (size_t j = 0; j < KA_WHITEN_DIM; j += 64) {
            uint64_t signs = ka_mix64(items[i] ^ (j + 1) * 0xd6e8feb86659fd93u);
            for (size_t k = 0; k < 64; k++)
                sum[j + k] += signs >> k & 1 ? weight : -weight;
        }
    }
    for (size_t j = 0; j < KA_WHITEN_DIM; j++)
        out[j] = (float)sum[j];
    int rc = ka_embed_normalise(out, KA_WHITEN_DIM);
    if (rc)
        memset(out, 0, KA_WHITEN_DIM * sizeof(float));
    return rc;
}

void ka_measures_add(struct ka_measures *measures, const struct ka_features *features)
{
    float row[KA_WHITEN_DIM];
    project(features->items, features->count, &measures->idf, row);
    ka_whitening_add(&measures->parts[0], row);
    project(features->words, features->word_count, &measures->idf, row);
    ka_whitening_add(&measures->parts[1], row);
}

void ka_measures_end(struct ka_measures *measures)
{
    ka_whitening_end(&measures->parts[0]);
    ka_whitening_end(&measures->parts[1]);
}

/* Of the structure's squared length 1, each class has its share: the product of two loses twice that where
 * only one of them has the class. */
static void add_classes(const struct ka_features *features, float structure[KA_EMBED_STRUCTURE])
{
    static const double SHARES[KA_CLASS_COUNT] = {[KA_CLASS_PRODUCT] = PRODUCT_SHARE,
                                                  [KA_CLASS_REDUCTION] = REDUCTION_SHARE,
                                                  [KA_CLASS_EXPONENTIAL] = EXPONENTIAL_SHARE,
                                                  [KA_CLASS_INDIRECT] = INDIRECT_SHARE};
    double rest = 1;
    for (size_t i = 0; i < KA_CLASS_COUNT; i++) {
        rest -= SHARES[i];
        structure[KA_WHITEN_DIM + i] = (float)(features->classes[i] ? sqrt(SHARES[i]) : -sqrt(SHARES[i]));
    }
    for (size_t i = 0; i < KA_WHITEN_DIM; i++)
        structure[i] *= (float)sqrt(rest);
}

int ka_embed(const struct ka_features *features, const struct ka_measures *measures, float out[KA_EMBED_DIM],
             struct ka_err *err)
{
    float vector[KA_EMBED_DIM], *words = vector + KA_EMBED_STRUCTURE;
    int rc = project(features->items, features->count, &measures->idf, vector);
    if (rc == 0) {
        ka_whiten(&measures->parts[0], vector);
        rc = ka_embed_normalise(vector, KA_WHITEN_DIM);
    }
    if (rc)
        return ka_fail(err, -EINVAL, "the source has no features that could be compared");
    add_classes(features, vector);
    if (project(features->words, features->word_count, &measures->idf, words) == 0) {
        ka_whiten(&measures->parts[1], words);
        ka_embed_normalise(words, KA_EMBED_WORDS);
    }
    memcpy(out, vector, sizeof(vector));
    return 0;
}

float ka_embed_with_prose(float similarity, float share)
{
    return powf(fminf((similarity + PROSE * share) / (1 + PROSE), 1), PROSE_BEND);
}

float ka_embed_similarity(float structure, float words)
{
    float both = 1 - (1 - structure) * (1 - fmaxf(words, 0));
    return both > 0 ? powf(both, BEND) : 0;
}
