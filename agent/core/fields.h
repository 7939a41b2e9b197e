/* Members of JSON objects from outside, which may be missing or of another type. Pure. */
#ifndef KA_FIELDS_H
#define KA_FIELDS_H

#include <jansson.h>
#include <stdbool.h>

/* The text (borrowed), or `otherwise`. */
const char *ka_text_of(const json_t *object, const char *name, const char *otherwise);

/* Is there this text? */
bool ka_is_text(const json_t *object, const char *name, const char *text);

/* Is this text among the items of a list? */
bool ka_has_text(const json_t *list, const char *text);

/* The finite number, or `otherwise`. */
double ka_number_of(const json_t *object, const char *name, double otherwise);

/* JSON text of any value as people would write it: 0.1, not 0.10000000000000001, where that is the same
 * number (free() it; NULL for NULL). */
char *ka_text_of_value(const json_t *value, size_t flags);

/* Add to a whole number; one that is missing is 0. */
void ka_number_add(json_t *object, const char *name, json_int_t more);

#endif
