/* Loops over JSON values that declare what they count and what they find. `break` and `continue` do what they
 * do in any loop; an array may grow meanwhile. NULL and values of another type have no items. */
#ifndef KA_EACH_H
#define KA_EACH_H

#include <jansson.h>

#define KA_EACH(array, i, item)                                                                              \
    for (size_t i = 0, item##_last = 0; !item##_last && i < json_array_size(array); i++)                     \
        for (json_t *item = (item##_last = 1, json_array_get(array, i)); item##_last; item##_last = 0)

/* `name`: borrowed from the object. */
#define KA_EACH_MEMBER(object, name, value)                                                                  \
    for (void *name##_at = json_object_iter((json_t *)(object)), *name##_last = NULL;                        \
         name##_at && !name##_last; name##_at = json_object_iter_next((json_t *)(object), name##_at))        \
        for (const char *name = json_object_iter_key(name##_at); name; name = NULL)                          \
            for (json_t * value                                                                              \
                     __attribute__((unused)) = (name##_last = name##_at, json_object_iter_value(name##_at)); \
                 name##_last; name##_last = NULL)

#endif
