/* Typed reading of JSON members. */
#include "fields.h"

#include <math.h>

const char *ka_text_of(const json_t *object, const char *name, const char *otherwise)
{
    const char *text = json_string_value(json_object_get(object, name));
    return text ? text : otherwise;
}

double ka_number_of(const json_t *object, const char *name, double otherwise)
{
    const json_t *value = json_object_get(object, name);
    return json_is_number(value) && isfinite(json_number_value(value)) ? json_number_value(value) : otherwise;
}
