/* Which child does which cases: pure.
 *
 * What a case costs is what the oracle took for one of its dims, where that is known, else estimated by the
 * product of its sizes, on top of what any case costs (loading, compiling, launching) and of what its
 * questions take; so is what a child costs, which small cases do not pay for. The greatest go first to
 * whoever has least with them, so that all end at about the same time; within a child the cheapest comes
 * first, so that what is wrong shows soon. */
#ifndef KA_DEAL_H
#define KA_DEAL_H

#include <jansson.h>

#include "base/base.h"

struct ka_deal_of {
    size_t most;         /* parts */
    double start, child; /* seconds that any case costs, and any child, */
    double anew;         /* and dims that are new to a child: what is compiled for them */
    double rate;         /* products of sizes that are done in a second */
    bool together;       /* cases of equal dims are in the same part */
    const json_t *known; /* [{"dims", "processor_seconds"}]; NULL: nothing is known */
};

/* `cases`: [{"id", "dims"}]. A new array of at most `most` arrays, none of them empty; each holds some of
 * the cases (references), and each case is in one. The same input gives the same deal. */
json_t *ka_deal(const json_t *cases, const struct ka_deal_of *of);

#endif
