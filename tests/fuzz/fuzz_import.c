/* Any bytes as somebody's module: what is made of it must be a pair, and its text a licence or none. */
#include <stdlib.h>
#include <string.h>

#include "rag/import.h"
#include "rag/license.h"
#include "rag/pair.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char *text = ka_strndup((const char *)data, size);
    struct ka_import_units units;
    struct ka_pair pair;
    if (!memchr(data, '\0', size) && ka_import_split("repo/a.py", text, "MIT", &units, NULL) == 0) {
        for (size_t i = 0; i < units.count; i++) {
            const char *source = units.items[i].source;
            if ((source == NULL) == (units.items[i].why == NULL))
                abort();
            if (source && ka_pair_parse("repo/imported/a.py", source, strlen(source), &pair, NULL) == 0)
                ka_pair_free(&pair);
        }
        ka_import_free(&units);
    }
    ka_license_of_text(text);
    free(text);
    return 0;
}
