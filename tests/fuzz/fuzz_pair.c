/* Any text as a pair file. */
#include <stdlib.h>
#include <string.h>

#include "rag/excerpt.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct ka_pair pair;
    struct ka_err err;
    if (ka_pair_parse("family/id.py", (const char *)data, size, &pair, &err) != 0)
        return 0;
    if (!*pair.stub || !*pair.kernels || pair.difficulty < 0 || pair.difficulty > 5)
        abort();
    struct ka_buf shown = {0};
    ka_excerpt_docstring(&pair, &shown);
    ka_excerpt_code(&pair, &shown);
    if (shown.len < strlen(pair.backward) - strspn(pair.backward, "\n"))
        abort();
    ka_buf_free(&shown);
    ka_pair_free(&pair);
    return 0;
}
