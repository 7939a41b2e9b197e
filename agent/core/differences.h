/* Finite differences of the real forward against the oracle's gradient: what they prove. Pure.
 *
 * Words: a *slope* is one input moved along one random direction, with the analytic and the numeric
 * derivative and how far the numeric one can be trusted (`noise` of rounding, `spread` over steps), as
 * docs/protocol.md has it. An *open* slope is too uncertain to tell, and counts as nothing. An input is
 * contradicted by two slopes, or by its only certain one where the others are open: a single one among others
 * that agree may be a kink that was met by chance, and more slopes are asked for. */
#ifndef KA_DIFFERENCES_H
#define KA_DIFFERENCES_H

#include <jansson.h>

#include "base/base.h"

struct ka_differences {
    size_t agree, open, disagree; /* slopes */
};

/* Judge `fd` of one case, for the inputs named in `grads`. Returns 0, or -EDOM with a sentence when an input
 * is contradicted. `out` is filled either way; a missing or malformed slope is open. */
int ka_differences_judge(const json_t *fd, const json_t *grads, struct ka_differences *out,
                         struct ka_err *err);

/* Put the slopes of an earlier answer (NULL: there was none) behind those of `fd`, input by input. */
void ka_differences_add(json_t *fd, const json_t *earlier);

#endif
