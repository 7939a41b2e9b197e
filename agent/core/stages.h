/* The order of preflight's parts: which may start when. Pure; a table, and what has begun and ended.
 *
 *     sweep ──┬── draft            (nobody waits for it: agent/run/draft.c takes it up)
 *             ├── hidden ── long
 *             ├── differences
 *             ├── inputs
 *             └── scalars
 *
 * Whoever drives it starts what ka_stages_next() names until there is nothing more, and again at each end. */
#ifndef KA_STAGES_H
#define KA_STAGES_H

#include "base/base.h"

enum ka_stage {
    KA_STAGE_SWEEP,       /* forward against oracle on the user's shapes */
    KA_STAGE_DRAFT,       /* the differentiator begins */
    KA_STAGE_HIDDEN,      /* forward against oracle on hidden shapes */
    KA_STAGE_LONG,        /* and on those that are long in one size */
    KA_STAGE_DIFFERENCES, /* finite differences of the forward */
    KA_STAGE_INPUTS,      /* inputs of other strides and magnitudes */
    KA_STAGE_SCALARS,     /* numbers and flags of other values */
    KA_STAGE_COUNT,
};

struct ka_stages {
    unsigned begun, ended; /* bits 1 << ka_stage */
};

/* The next part that may start, which has begun then; KA_STAGE_COUNT: none now. */
enum ka_stage ka_stages_next(struct ka_stages *stages);
/* -EINVAL, and nothing changes, for a part that is not under way. */
int ka_stages_end(struct ka_stages *stages, enum ka_stage stage);
bool ka_stages_through(const struct ka_stages *stages);

#endif
