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
    memcpy(source, data, size);
    const struct ka_modules_req request = {
        .source = source, .file = "/nowhere/forward.py", .into = "/nowhere/copies"};
    struct ka_modules found = {.count = 1};
    if (ka_modules_freeze(&request, &found, &err) || found.count)
        abort(); /* there is nothing to be found */
    free(source);
    return 0;
}
