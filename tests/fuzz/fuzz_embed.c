/* Any text as a forward source: what has features gives a unit vector, twice the same. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "rag/embed.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct ka_idf idf;
    struct ka_features features;
    struct ka_err err;
    if (ka_features_of((const char *)data, size, &features, &err) != 0)
        return 0;
    float once[KA_EMBED_DIM], twice[KA_EMBED_DIM];
    double norm = 0;
    if (ka_embed(&features, &idf, once, &err) == 0) {
        for (size_t i = 0; i < KA_EMBED_DIM; i++)
            norm += (double)once[i] * (double)once[i];
        if (fabs(norm - 1) > 1e-4 || ka_embed(&features, &idf, twice, &err) != 0 ||
            memcmp(once, twice, sizeof(once)) != 0)
            abort();
    }
    ka_features_free(&features);
    return 0;
}
