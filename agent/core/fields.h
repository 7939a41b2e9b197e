/* Members of JSON objects from outside, which may be missing or of another type. Pure. */
#ifndef KA_FIELDS_H
#define KA_FIELDS_H

#include <jansson.h>

/* The text (borrowed), or `otherwise`. */
const char *ka_text_of(const json_t *object, const char *name, const char *otherwise);

/* The finite number, or `otherwise`. */
double ka_number_of(const json_t *object, const char *name, double otherwise);

#endif
