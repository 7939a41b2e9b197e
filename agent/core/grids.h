/* Hidden shapes for the grids that they make: long ones that the interpreter can afford, one of many
 * programs, and sizes beyond a number of programs that does not follow them. Pure. */
#ifndef KA_GRIDS_H
#define KA_GRIDS_H

#include "base/base.h"

#include <jansson.h>

#define KA_GRIDS_MANY 300 /* programs of the shape that has many, and up to KA_GRIDS_ODD more */
#define KA_GRIDS_ODD 64
#define KA_GRIDS_MOST 4352 /* programs of a long shape, and of no second one more than */
#define KA_GRIDS_SECOND 1024

/* `probes`: of ka_shapes_long(), with the "programs" that the forward launched on each where it ran; entries
 * with a "kind" among them are ignored. Three kinds of shapes are worth a look:
 *
 * - long: each "long" one; where the grid grows with it so far that it would take minutes, one that is
 *   shorter, of KA_GRIDS_MOST programs or a few less;
 * - many_programs: as many as say KA_GRIDS_MANY, by the size that does it with the fewest elements, unless a
 *   long one has them;
 * - beyond_programs: a size with which the grid does not grow, and of which no shape of `shapes` ([{"dims"}])
 *   has twice as many as there are programs. A grid as large as the GPU has processors is such.
 *
 * The last two have at most `budget` elements; their sizes depend on `seed`. A new array of
 * {"dims", "kind"}. */
json_t *ka_grids_worth(const json_t *probes, const json_t *shapes, uint64_t budget, uint64_t seed);

#endif
