/* The decision about one candidate, from results that others measured: pure, no files, no clock.
 *
 * Words: a *shape* is one set of dims: required (the sweep's), hidden (derived by the daemon, secret) or
 * optional. A *case* is one shape with one seed and one kind of upstream gradient. A shape passes when it
 * has at least one case and none of its cases failed in anything. The candidate is *verified* when every
 * required shape passes, no checked hidden shape fails, nothing failed on the whole (scan, launches), and
 * every gradient was compared at least once with values that are neither zero, nor infinite, nor rounding
 * noise. Optional shapes are reported, and block nothing; skipped shapes never count as passed, so a
 * skipped required shape blocks.
 *
 * Secrets: the dims of hidden shapes, and anything measured on them that would tell a size, appear only in
 * the private JSON. Text for an LLM says "a hidden shape" with its kind ("block + 1"). Everything given is
 * copied; text may be cut anywhere, what leaves is valid UTF-8. A verdict belongs to one thread at a time: it
 * may be handed from one to another, and takes no reference to a document. */
#ifndef KA_VERDICT_H
#define KA_VERDICT_H

#include <jansson.h>

#include "base/base.h"
#include "sandbox/compare.h"

/* The rule that a case breaks whose candidate raised, or left no result. */
#define KA_VERDICT_RAISED "raised"

enum ka_shape_kind { KA_SHAPE_REQUIRED, KA_SHAPE_HIDDEN, KA_SHAPE_OPTIONAL };

struct ka_verdict;

/* `grads`: names of the inputs whose gradients must be verified. Never NULL. */
struct ka_verdict *ka_verdict_new(const char *const *grads, size_t count);
void ka_verdict_free(struct ka_verdict *v); /* NULL is fine */

/* Cases may be judged at the same time, each telling a part of its own, which is then joined: what is joined
 * in turn reads as if it had been told in turn. Of `v` a part knows shapes and gradients, and nothing that
 * was told; meanwhile no shape may be announced. `part` is freed. */
struct ka_verdict *ka_verdict_part(const struct ka_verdict *v);
void ka_verdict_join(struct ka_verdict *v, struct ka_verdict *part);

/* Announce a shape. `dims` is an object of integers; `hint` is what may be said of a hidden shape ("a prime
 * size"), or NULL. Returns the shape's number. */
size_t ka_verdict_shape(struct ka_verdict *v, enum ka_shape_kind kind, const json_t *dims, const char *hint);

/* The shape is not judged, and why. */
void ka_verdict_skip(struct ka_verdict *v, size_t shape, const char *reason);
/* The same, for a reason that gives no dims away: it is told of a hidden shape, too. */
void ka_verdict_skip_openly(struct ka_verdict *v, size_t shape, const char *reason);

/* Begin a case of that shape. `label` is shown to the LLM ("one-hot upstream"): no seeds. Returns the case's
 * number. */
size_t ka_verdict_case(struct ka_verdict *v, size_t shape, const char *label);

/* The comparison of a gradient, or of an output with the user's forward. A gradient that is missing where
 * zero is expected is right, as in autograd, but proves nothing. */
void ka_verdict_gradient(struct ka_verdict *v, size_t at, const char *name, const struct ka_diff *diff);
void ka_verdict_output(struct ka_verdict *v, size_t at, size_t index, const struct ka_diff *diff);

/* The same backward, `runs` times on the same bytes: the largest difference of an element, and the norm of
 * the largest difference in units of what the comparison allows. Reported; decides nothing. */
void ka_verdict_repeated(struct ka_verdict *v, const char *name, size_t runs, double max_abs,
                         double of_limit);

/* The programs of that kernel are put in order by atomics: whether it waits for what it needs was not looked
 * at. Reported; decides nothing. */
void ka_verdict_ordered(struct ka_verdict *v, const char *kernel);
/* A sentence about the candidate that is held against nobody. Once each, of the first ones. */
void ka_verdict_remark(struct ka_verdict *v, const char *text);

/* Anything else that is wrong in a case: `rule` is a short name ("input_modified"), `text` the sentence for
 * the LLM. Of a hidden shape only the rule is shown, and in ka_verdict_fail_known() what may be `known` of it
 * there. */
void ka_verdict_fail(struct ka_verdict *v, size_t at, const char *rule, const char *text);
void ka_verdict_fail_known(struct ka_verdict *v, size_t at, const char *rule, const char *text,
                           const char *known);

/* Something wrong with the candidate as a whole (a scan finding): no shape needed. The first hundred are
 * kept. */
void ka_verdict_fail_whole(struct ka_verdict *v, const char *rule, const char *text);

struct ka_verdict_counts {
    size_t required, passed;
    size_t hidden, hidden_passed; /* hidden shapes that were judged */
    size_t optional, optional_passed;
    size_t skipped;
    size_t cases, cases_failed;
};

struct ka_verdict_counts ka_verdict_count(const struct ka_verdict *v);
bool ka_verdict_verified(const struct ka_verdict *v);

/* What the LLM is shown: failures on the whole, then failing shapes from the smallest up (hidden ones last),
 * at most `max_shapes` of them in detail. Empty when nothing failed. */
int ka_verdict_facts(const struct ka_verdict *v, size_t max_shapes, struct ka_buf *out);

/* {"verified", "shapes", "gradients", "per_shape", "kinds", "failures", "ordered_by_atomics"}: the first
 * three as in the result object. Errors come with the `limit` that they were held to. With `hidden` true
 * the dims and facts of hidden shapes are included: for the private record only. The caller owns it; NULL
 * without memory. */
json_t *ka_verdict_json(const struct ka_verdict *v, bool hidden);

#endif
