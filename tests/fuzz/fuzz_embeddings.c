/* Embedding answers and UTF-8 repair on any bytes: what is accepted is complete and finite; what is repaired
 * is valid. */
#include <math.h>
#include <stdlib.h>

#include "agent/core/embeddings.h"
#include "base/utf8.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t len);

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t len)
{
    const char *text = (const char *)bytes;
    struct ka_vectors vectors;
    struct ka_err err;
    if (ka_embeddings_parse(text, len, 2, &vectors, &err) == 0) {
        if (vectors.count != 2 || vectors.dim == 0)
            abort();
        for (size_t i = 0; i < vectors.count * vectors.dim; i++)
            if (!isfinite(vectors.values[i]))
                abort();
        ka_vectors_free(&vectors);
    }
    struct ka_buf valid = {0};
    if (ka_buf_repair(&valid, text, len) != 0)
        abort();
    for (size_t at = 0, step; at < valid.len; at += step)
        if ((step = ka_utf8_sequence(valid.data + at, valid.len - at)) == 0)
            abort();
    ka_buf_free(&valid);
    return 0;
}
