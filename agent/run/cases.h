/* Results of single cases, as the children left them: found, opened, compared. Everything read here is
 * hostile. Nothing is kept between calls: any thread may call, as long as nobody changes what it passes. */
#ifndef KA_RUN_CASES_H
#define KA_RUN_CASES_H

#include <jansson.h>

#include "agent/io/child.h"
#include "sandbox/compare.h"
#include "sandbox/tensor.h"

/* The entry of case `id` in a result's "cases"; NULL when there is none. Borrowed. */
json_t *ka_case_find(const json_t *doc, json_int_t id);

/* One sentence on why the case has no result: its error, or that it is missing. */
void ka_case_error(const json_t *entry, struct ka_err *out);

/* The tensors of case `id`. Errors as ka_tensors_read(), or -ENOENT. */
int ka_case_open(const struct ka_child_result *child, json_int_t id, struct ka_tensors **out,
                 struct ka_err *err);

/* Norm of the upstream that the case drew, as far as its plan tells (NULL: a normal one): what rounding in a
 * gradient that is zero, or cancels to zero, is measured by. */
double ka_case_upstream_norm(const struct ka_tensors *oracle, const json_t *entry, const json_t *plan);

/* The numbers that `part` ("grad", "out") of that name and dtype is held to, by the case's entry and by the
 * kinds of its plan. */
struct ka_tolerance ka_case_tolerance(const json_t *entry, const json_t *plan, const char *part,
                                      const char *name, enum ka_dtype dtype);

/* How far `sum` is from KA_KIND_LINEAR_U * u + KA_KIND_LINEAR_W * w, in units of the terms' norms; NaN where
 * something is not finite or not there (NULL). */
double ka_case_nonlinearity(const struct ka_tensor *u, const struct ka_tensor *w,
                            const struct ka_tensor *sum);

/* How far `scaled` is from factor * `plain`, in units of its norm, beyond what the smallest steps of the
 * dtype leave (float16: below 6e-5); NaN where something is not finite or not there (NULL). */
double ka_case_scaled_gap(const struct ka_tensor *plain, const struct ka_tensor *scaled, double factor);

/* The gradient `name` of the same backward, `times` more times (`repeat<i>/<name>`), against `grad/<name>`:
 * the largest difference of an element and the largest norm of a difference. -ENOENT when one is missing or
 * of another shape. */
int ka_case_spread(const struct ka_tensors *found, const char *name, size_t times, double *max_abs,
                   double *norm);

/* Does the real Triton forward equal the oracle's, on every tensor output, and do the oracles equal each
 * other, and is there a gradient where outputs are finite? 0, or -EDOM with a sentence naming what
 * differs and by how much, -ERANGE with one on a gradient that is NaN, or another error for unusable
 * tensors. */
int ka_case_agrees(const struct ka_tensors *oracle, const json_t *entry, const json_t *plan,
                   struct ka_err *err);

#endif
