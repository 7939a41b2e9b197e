/* What a client of the service sends to have a run: a JSON object from outside, made a value or refused.
 *
 *     {"source": "...", "name": "softmax.py", "options": {"topk": 4}, "priority": 0, "force": false}
 *
 * Only `source` must be there. Options are spelled as on the command line, without the dashes; what they
 * mean, and which of them a client may set, is not known here. Pure. */
#ifndef KA_SUBMISSION_H
#define KA_SUBMISSION_H

#include <jansson.h>

#include "base/base.h"

#define KA_SUBMISSION_MAX ((size_t)1 << 20) /* bytes of a request */
#define KA_SUBMISSION_PRIORITY 1000         /* from minus this to this; the larger ones go first */

struct ka_submission {
    char *name;      /* letters, digits, '_', '-' and '.', ends in ".py": a file's, never a path */
    char *source;    /* the forward file's text */
    json_t *options; /* name, with dashes -> text; each once */
    int priority;
    bool force; /* also where the same was asked for before */
};

/* -EINVAL with a sentence that names the member. `out` is then untouched. */
int ka_submission_parse(const char *body, size_t len, struct ka_submission *out, struct ka_err *err);
void ka_submission_free(struct ka_submission *submission); /* the content */

#endif
