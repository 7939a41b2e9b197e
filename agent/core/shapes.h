/* Shapes as JSON objects (name -> value), as SWEEP in a forward file has them: scaled down for the CPU
 * interpreter, and varied into hidden ones.
 *
 * Only integers above zero that name a size are changed; floats, flags, texts, lists and seeds stay as they
 * are. What a dimension is for is guessed from its name and value (B: batch, H/HQ/HKV: heads, D/HEAD_DIM:
 * head size); whether a shape really works is found out by running the forward on it. Pure and deterministic.
 */
#ifndef KA_SHAPES_H
#define KA_SHAPES_H

#include "base/base.h"

#include <jansson.h>

#define KA_SHAPES_MAX_DIMS 32
#define KA_SHAPES_BUDGET ((uint64_t)1 << 17) /* default for `budget`: the product of the sizes */
#define KA_SHAPES_MAX_HIDDEN 256

/* The `level`-th scaled-down variant, 0 the largest: the shape itself if it is within `budget`, then smaller
 * ones. Multiples of 16 stay multiples of 16 and powers of two stay powers of two (4096 -> 128 -> 64 -> 32 ->
 * 16), ragged sizes stay ragged with the same remainder by 16 (1000 -> 120 -> 56 -> 24 -> 8), sizes up to 16
 * and head sizes up to 64 are kept, batches become 2 or 1, heads too but with query heads still a multiple of
 * key heads. Larger stays larger and divisible stays divisible where that can be had.
 * `*out` is a new reference. -ERANGE: no such level; -EINVAL: `dims` is no object; -EFBIG: too many
 * dimensions. */
int ka_shapes_scale(const json_t *dims, uint64_t budget, size_t level, json_t **out);

/* How many levels there are; 0 when `dims` cannot be scaled. */
size_t ka_shapes_levels(const json_t *dims, uint64_t budget);

/* Up to `count` shapes that a candidate cannot know, from `dims` (already scaled): one size, or several, set
 * to 1, a prime, one less, one more, a block (16, 32, 64) less or more one, an odd batch; and in a third of
 * them one size just beyond the power of two that covers it, where a block of a fixed size ends. Different
 * from `dims`, from each other and from every member of `sweep` (array of dims objects, or NULL). No larger
 * than `budget` or twice `dims`. The same seed gives the same shapes. There may be fewer, or none, where
 * nothing can be varied. `*out`: a new array of {"dims": {...}, "kind": "prime"}. `kind` may be shown to a
 * model, and which dim it is about, but no value of the dims. -EINVAL, -EFBIG as above. */
int ka_shapes_hidden(const json_t *dims, const json_t *sweep, uint64_t seed, size_t count, uint64_t budget,
                     json_t **out);

/* The sizes that every dimension is to have once, as far as the forward takes them: 1, 2, and of what is no
 * batch and no number of heads a multiple of every block up to `tile`, a power of two (of a single dimension
 * up to 16 times that, of many up to what fits), and one short of such a multiple. `*out`: a new array of
 * {"dims", "kind", "wants": {"M": 2, "N": 2}}, where what is said in `wants` is that shape's purpose: all the
 * twos are one shape, and all that are one short, the rest are one each. None is larger than `budget` or
 * twice `dims`. -EINVAL, -EFBIG as above. */
int ka_shapes_cover(const json_t *dims, int64_t tile, uint64_t budget, json_t **out);

/* For each size of `wants` that no entry of `shapes` ([{"dims"}]) has, the shape `dims` with that one size,
 * as above, of `kind` (new reference). */
json_t *ka_shapes_singles(const json_t *dims, const char *kind, const json_t *wants, const json_t *shapes);

#define KA_SHAPES_BETWEEN 6

/* How large shapes may be: a size that is drawn, the product of all, and that product times the largest. */
struct ka_shapes_limits {
    int64_t most;
    uint64_t budget;
    double square; /* elements, were the largest size there twice: scores of N by N */
};

/* Is a shape within them? */
bool ka_shapes_fit(const json_t *dims, struct ka_shapes_limits limits);

/* Sizes between those that are known, as a backward may do something else for middling ones. Where two
 * neighbours among the sizes that `shapes` ([{"dims"}]) have of a dimension are a factor of two and more
 * apart, for each such factor one between them, where there is one: above 32, within the limits, as ragged as
 * in `dims`, and at most KA_SHAPES_BETWEEN of a dimension. `*out`: an array of {"dims", "kind"}, each `dims`
 * with one such size; where that makes more than KA_SHAPES_BETWEEN shapes, dimensions share them, as long as
 * those fit. The same seed gives the same sizes. -EINVAL, -EFBIG as above. */
int ka_shapes_between(const json_t *dims, const json_t *shapes, struct ka_shapes_limits limits, uint64_t seed,
                      json_t **out);

/* About: the longest that a size of ka_shapes_long() gets. whole_rows.py has it too. */
#define KA_SHAPES_LONG 8192

/* Where scaling takes a size below its value, a loop over blocks of it may have a single turn left. For each
 * size: the smallest scaled shape with that size doubled only, as a `probe` of whether the grid grows with
 * it, and, where it was scaled, the same with that one size long (its own value, or about KA_SHAPES_LONG and
 * as ragged). `*out`: a new array, empty or first {"dims": the smallest scaled shape}, then {"dims": probe,
 * "dim": "M", "long"?: {...}} for each size. None has more than `budget` elements. -EINVAL, -EFBIG as
 * above. */
int ka_shapes_long(const json_t *dims, uint64_t budget, json_t **out);

#endif
