/* Which child does which cases: pure.
 *
 * What a case costs is estimated by the product of its sizes, on top of what any case costs (loading,
 * compiling, launching); so is what a child costs, which small cases do not pay for. The greatest go first to
 * whoever has least, so that all end at about the same time; within a child the cheapest comes first, so that
 * what is wrong shows soon. */
#ifndef KA_DEAL_H
#define KA_DEAL_H

#include <jansson.h>

#include "base/base.h"

/* `cases`: [{"id", "dims"}]. A new array of at most `most` arrays, none of them empty; each holds some of
 * the cases (references), and each case is in one. `start`: what any case costs, `child` what any child does,
 * in elements. `together`: those of equal dims are in the same. The same input gives the same deal. */
json_t *ka_deal(const json_t *cases, size_t most, double start, double child, bool together);

#endif
