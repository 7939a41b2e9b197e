/* Typed reading of JSON members. */
#include "fields.h"

#include <math.h>
#include <string.h>

const char *ka_text_of(const json_t *object, const char *name, const char *otherwise)
{
    const char *text = json_string_value(json_object_get(object, name));
    return text ? text : otherwise;
}

bool ka_is_text(const json_t *object, const char *name, const char *text)
{
    const char *found = json_string_value(json_object_get(object, name));
    return found && strcmp(found, text) == 0;
}

bool ka_has_text(const json_t *list, const char *text)
{
    for (size_t i = 0; text && i < json_array_size(list); i++) {
        const char *item = json_string_value(json_array_get(list, i));
        if (item && strcmp(item, text) == 0)
            return true;
    }
    return false;
}

double ka_number_of(const json_t *object, const char *name, double otherwise)
{
    const json_t *value = json_object_get(object, name);
    return json_is_number(value) && isfinite(json_number_value(value)) ? json_number_value(value) : otherwise;
}

void ka_number_add(json_t *object, const char *name, json_int_t more)
{
    json_object_set_new(object, name, json_integer(json_integer_value(json_object_get(object, name)) + more));
}

char *ka_text_of_value(const json_t *value, size_t flags)
{
    char *text = json_dumps(value, flags | JSON_ENCODE_ANY | JSON_REAL_PRECISION(15));
    json_auto_t *same = text ? json_loads(text, JSON_DECODE_ANY, NULL) : NULL;
    if (!text || json_equal(same, value))
        return text;
    free(text);
    return json_dumps(value, flags | JSON_ENCODE_ANY);
}
