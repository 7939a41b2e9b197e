/* What a forward file imports, read from its text: names lead to no other folder. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "agent/disk/modules.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char *source = ka_calloc(size + 1, 1);
    struct ka_err err;
    size_t count = 1;
    memcpy(source, data, size);
    if (ka_modules_freeze(source, "/nowhere/forward.py", "/nowhere/copies", &count, &err) || count)
        abort(); /* there is nothing to be found */
    free(source);
    return 0;
}
