/* UTF-8 repair of any bytes: the outcome is valid. */
#include <stdlib.h>

#include "base/utf8.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t len);

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t len)
{
    const char *text = (const char *)bytes;
    struct ka_buf valid = {0};
    if (ka_utf8_repair(text, len, &valid) != 0)
        abort();
    for (size_t at = 0, step; at < valid.len; at += step)
        if ((step = ka_utf8_sequence(valid.data + at, valid.len - at)) == 0)
            abort();
    ka_buf_free(&valid);
    return 0;
}
