/* The models that an endpoint lists: what GET {base}/models answers. Pure; reads hostile bytes. */
#ifndef KA_MODELS_H
#define KA_MODELS_H

#include <jansson.h>

#include "base/base.h"

#define KA_MODELS_MAX 2000 /* names that are kept */

/* A new array of the names, sorted, each one line of UTF-8 of at most 200 bytes. NULL with `err` when the
 * body is no such list. */
json_t *ka_models_parse(const char *body, size_t len, struct ka_err *err);

#endif
