/* What one check asks: the list of cases, from the shapes of a run and a secret seed. Pure.
 *
 * Words: a *shape* is {"dims": {...}, "class": "required" | "optional" | "hidden", "kind": "...", "grads"?:
 * [...], "tensors"?: [...], "stand_in"?: true}, where `grads` names the inputs that are tensors there (an
 * optional input may be None on some shapes), `tensors` is ka_vary_tensors()', and a *stand-in* is a small
 * version of ka_plan_smallest(), where that takes the oracle long; a *case* is a shape with a seed for the
 * inputs and an upstream gradient. Every attempt gets cases of fresh seeds, so that nothing that a candidate
 * saw or stored helps the next one. `class` and `kind` stay with the daemon: what a child is sent has
 * neither. */
#ifndef KA_PLAN_H
#define KA_PLAN_H

#include <jansson.h>

#include "base/base.h"

#define KA_PLAN_MIN_SEEDS 5    /* over the required shapes */
#define KA_PLAN_MAX_SUBSETS 40 /* cases of pairs of gradients are added up to here */

/* Cases for a check of a candidate (new reference). `grads`: names; `outputs`: how many outputs are
 * differentiable; `half`: inputs are float16, whose range holds no upstream of 65,536.
 *   - every shape once; the smallest required one again until the required ones have KA_PLAN_MIN_SEEDS seeds
 *     in sum (what another seed can show, it shows where it costs least);
 *   - a case of which only what is asked of the candidate differs from an earlier one has that one as its
 *     member "like": it takes over its seeds, and the oracle's answer to it (expected.c);
 *   - on the shape of ka_plan_variants() the other kinds of upstreams, and what else is asked of a candidate:
 *     the table of kinds (kinds.h) says which, and in which order. */
json_t *ka_plan_check(const json_t *shapes, const json_t *grads, int outputs, bool half, uint64_t secret);

/* Append one case on `shape` to `cases` for each of `variations` (vary.h). For preflight, which finds out
 * which of them the forward takes, and for the checks, with those that it does. */
void ka_plan_varied(json_t *cases, const json_t *shape, const json_t *variations, uint64_t secret);

/* The same for each of `scalars`, [{"name": "eps", "way": 0, "values"?}]: an argument that has another value
 * there, perhaps beside inputs of other values. */
void ka_plan_scalars(json_t *cases, const json_t *shape, const json_t *scalars, uint64_t secret);

/* Ask what is asked where kernels are compiled, in one plain case of the largest required shape, where
 * programs contend most. */
void ka_plan_compiled(json_t *cases);

/* One plain case a shape: to see that forward and oracle agree on it (new reference). */
json_t *ka_plan_preflight(const json_t *shapes, uint64_t secret);

/* The cases as a child may see them (new references): all that it needs to draw them, and the candidate what
 * is asked of it. */
json_t *ka_plan_for_oracle(const json_t *cases);
json_t *ka_plan_for_candidate(const json_t *cases);

/* The request of operation `facts` for a candidate: the required shapes, compiled for the target (new
 * reference). */
json_t *ka_plan_facts(const json_t *shapes, const char *entry, uint64_t secret);

#define KA_PLAN_MAX_VARIANTS 12 /* that the tuner asks for in one run */

/* The tuner's next variant {"schedule", "config"} of a draft (new reference), NULL when nothing is left to
 * try. `report`: that of operation `differentiate`; `tried`: the variants so far; `best`: the variant of the
 * best candidate. First every other schedule as it is drafted; then each configuration on offer, with the
 * best schedule found and what the best configuration says beside it. */
json_t *ka_plan_variant(const json_t *report, const json_t *tried, const json_t *best);

/* Whether it is too late for one more: of `max_seconds` (0: no end) all are over, or half where a variant is
 * ahead that is not checked yet. */
bool ka_plan_late(double seconds, int max_seconds, bool ahead);

/* Is a shape of this class? */
bool ka_plan_is(const json_t *shape, const char *class);

/* The smallest required shape (borrowed), NULL where none is; of those with the most gradients the smallest.
 */
json_t *ka_plan_cheapest(const json_t *shapes);
json_t *ka_plan_smallest(const json_t *shapes);

/* Where upstreams, inputs and subsets of gradients of other kinds are tried (borrowed): the stand-in, else
 * the smallest. */
json_t *ka_plan_variants(const json_t *shapes);

/* Of a processor, that the oracle took for one case of a shape on average; 0: not known. */
double ka_plan_seconds(const json_t *shapes);

/* Where layouts are tried (borrowed): an axis of size 1 has none. The stand-in, else of the required shapes
 * that are not too large the smallest with the fewest sizes of 1. */
json_t *ka_plan_roomy(const json_t *shapes);

/* Product of the integer dims: what "smallest" means. */
double ka_plan_size(const json_t *dims);
/* How many of the cases `order[from]` to `order[upto - 1]` have results, by the oracle, of `room` bytes
 * together, at least one; `shapes` tell it by "dims" and "bytes", others count as nothing. */
size_t ka_plan_fit(const json_t *cases, const size_t *order, size_t from, size_t upto, const json_t *shapes,
                   double room);

#endif
