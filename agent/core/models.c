#include "models.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/each.h"
#include "base/utf8.h"

#define NAME_MAX_BYTES 201

static int by_name(const void *a, const void *b)
{
    return strcmp(json_string_value(*(json_t *const *)a), json_string_value(*(json_t *const *)b));
}

json_t *ka_models_parse(const char *body, size_t len, struct ka_err *err)
{
    json_error_t why;
    json_auto_t *root = json_loadb(body, len, 0, &why);
    const json_t *data = json_object_get(root, "data");
    if (!json_is_array(data)) {
        ka_fail(err, -EBADMSG, root ? "the answer holds no list of models" : "the answer is not valid JSON");
        return NULL;
    }
    KA_AUTO_FREE json_t **names = ka_calloc(KA_MODELS_MAX, sizeof(*names));
    size_t count = 0;
    KA_EACH(data, i, model) {
        char name[NAME_MAX_BYTES];
        const json_t *id = json_object_get(model, "id");
        if (!json_string_length(id) || count == KA_MODELS_MAX)
            continue;
        ka_utf8_line(json_string_value(id), json_string_length(id), name, sizeof(name));
        names[count++] = json_string(name);
    }
    qsort(names, count, sizeof(*names), by_name);
    json_t *sorted = json_array();
    for (size_t i = 0; i < count; i++)
        json_array_append_new(sorted, names[i]);
    return sorted;
}
