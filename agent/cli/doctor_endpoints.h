/* What the configured endpoints say of themselves, for `kernel-agent doctor`. */
#ifndef KA_DOCTOR_ENDPOINTS_H
#define KA_DOCTOR_ENDPOINTS_H

#include <jansson.h>

#include "agent/app/endpoints.h"

/* A new array, an object for each: "url" (without what may be secret), "key" (is one sent), "models" (sorted
 * names, or null) and "has_model" (is `model` among them, or null), "why" (there is no list; or null). Asks
 * GET {url}/models of one after the other; blocks, at most some ten seconds for each. */
json_t *ka_doctor_endpoints(const struct ka_endpoints *endpoints, const char *model);

/* The same as lines on stdout. */
void ka_doctor_print_endpoints(const json_t *endpoints, const char *model);

#endif
