/* Any text as a forward source: what has features gives parts of length 1, twice the same, also where it was
 * measured itself. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "rag/embed.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static struct ka_measures none, own;

static double length(const float *part, size_t n)
{
    double norm = 0;
    for (size_t i = 0; i < n; i++)
        norm += (double)part[i] * (double)part[i];
    return norm;
}

static void check(const struct ka_features *features, const struct ka_measures *measures)
{
    float once[KA_EMBED_DIM], twice[KA_EMBED_DIM];
    struct ka_err err;
    if (ka_embed(features, measures, once, &err) != 0)
        return;
    double words = length(once + KA_EMBED_STRUCTURE, KA_EMBED_WORDS);
    if (fabs(length(once, KA_EMBED_STRUCTURE) - 1) > 1e-4 || (words > 1e-9 && fabs(words - 1) > 1e-4) ||
        ka_embed(features, measures, twice, &err) != 0 || memcmp(once, twice, sizeof(once)) != 0)
        abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct ka_features features;
    struct ka_err err;
    if (ka_features_of((const char *)data, size, &features, &err) != 0)
        return 0;
    check(&features, &none);
    if (size % 64 == 0) { /* measuring is slow beside the rest */
        memset(&own, 0, sizeof(own));
        ka_measures_count(&own, &features);
        ka_measures_add(&own, &features);
        ka_measures_end(&own);
        check(&features, &own);
    }
    ka_features_free(&features);
    return 0;
}
