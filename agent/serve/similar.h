/* What the pair store has that is like a forward file, or is called by some words. */
#ifndef KA_SIMILAR_H
#define KA_SIMILAR_H

#include <jansson.h>

#include "agent/app/app.h"

struct ka_similar_query {
    const char *forward; /* its text; NULL: by `words` */
    const char *words;   /* each stands in id, operation, family, title or schedule; those in the id first */
    size_t topk;
    double min_sim;
};

/* {"hits": [{"id", "similarity" | null, "path", "op", "schedule", "both_have", "math", "backward"}],
 * "excluded": [{"id", "why"}]} (new reference). -ENOENT: there is no store; -EINVAL: nothing in the query to
 * compare. */
int ka_similar_find(const struct ka_app *app, const struct ka_similar_query *query, json_t **out,
                    struct ka_err *err);

#endif
