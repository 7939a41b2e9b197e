/* Single cases of a result: found, opened, compared. */
#include "cases.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "agent/core/kinds.h"
#include "agent/ops/op.h"
#include "base/each.h"
#include "sandbox/compare.h"

#define STEPS 4           /* of the smallest, an element: it and terms of it are rounded to them */
#define ROUNDING 1e-10    /* of float64 sums, per unit of upstream */
#define OWN_HALF 8        /* so much less exact may a forward be that adds up in half precision */
#define OWN_COARSE 10     /* the same, where values are chosen so that terms cancel, */
#define REFERENCE_HALF 16 /* and so much less exactly need a reference agree with the oracle there */
#define OWN_MOST 0.05     /* but never so much less */

json_t *ka_case_find(const json_t *doc, json_int_t id)
{
    KA_EACH(json_object_get(doc, "cases"), i, entry) {
        json_t *found = json_object_get(entry, "id");
        if (json_is_integer(found) && json_integer_value(found) == id)
            return entry;
    }
    return NULL;
}

void ka_case_error(const json_t *entry, struct ka_err *out)
{
    const json_t *error = json_object_get(entry, "error");
    const char *message = json_string_value(json_object_get(error, "message"));
    if (!entry)
        ka_fail(out, 0, "the child left no result for this case");
    else if (!message)
        ka_fail(out, 0, "the child reported an error without a message");
    else
        ka_fail(out, 0, "%.900s", message);
}

int ka_case_open(const struct ka_child_result *child, json_int_t id, struct ka_tensors **out,
                 struct ka_err *err)
{
    char name[64];
    snprintf(name, sizeof(name), "case-%lld.safetensors", (long long)id);
    int fd = -1;
    int rc = ka_child_open(child, name, KA_CASE_BYTES_MAX, &fd);
    if (rc)
        return ka_fail(err, rc, "%s: %s", name, strerror(-rc));
    rc = ka_tensors_read(fd, KA_CASE_BYTES_MAX, out, err);
    close(fd);
    return rc;
}

double ka_case_upstream_norm(const struct ka_tensors *oracle, const json_t *entry, const json_t *plan)
{
    const struct ka_kind *kind = ka_kind_of_upstream(plan);
    double count = 0;
    if (kind && kind->unit)
        return 1;
    KA_EACH(json_object_get(entry, "outputs"), i, output) {
        char index[24];
        snprintf(index, sizeof(index), "%zu", i);
        const struct ka_tensor *tensor = ka_tensors_find_part(oracle, "out", index);
        count +=
            tensor && json_is_true(json_object_get(output, "differentiable")) ? (double)tensor->count : 0;
    }
    return sqrt(count);
}

/* Whether products in TF32 went into it. */
static bool in_tf32(const json_t *entry, const char *part, const char *name)
{
    KA_AUTO_BUF struct ka_buf full = {0};
    ka_buf_printf(&full, "%s/%s", part, name);
    bool seen = false;
    KA_EACH(json_object_get(entry, "tf32"), i, item) {
        const char *text = json_string_value(item);
        seen = seen || (text && strcmp(text, ka_buf_str(&full)) == 0);
    }
    return seen;
}

struct ka_tolerance ka_case_tolerance(const json_t *entry, const json_t *plan, const char *part,
                                      const char *name, enum ka_dtype dtype)
{
    struct ka_tolerance tolerance = ka_tolerance_of(dtype);
    if (in_tf32(entry, part, name))
        ka_tolerance_tf32(&tolerance);
    const struct ka_kind *kind = ka_kind_of_upstream(plan);
    if (kind && kind->tolerate)
        kind->tolerate(&tolerance);
    for (size_t i = 0; (kind = ka_kind_of_input(plan, i)); i++)
        if (kind->tolerate)
            kind->tolerate(&tolerance);
    return tolerance;
}

/* Norm of the difference of two tensors of one shape; the largest difference of an element in `most`, unless
 * it is NULL. */
static double distance(const struct ka_tensor *a, const struct ka_tensor *b, double *most)
{
    const struct ka_term terms[] = {{1, a}, {-1, b}};
    return ka_norm_of(terms, KA_COUNT(terms), most);
}

static double norm_of(const struct ka_tensor *tensor)
{
    return ka_norm_of(&(struct ka_term){1, tensor}, 1, NULL);
}

double ka_case_nonlinearity(const struct ka_tensor *u, const struct ka_tensor *w, const struct ka_tensor *sum)
{
    if (!u || !w || !sum || !ka_tensor_same_shape(u, w) || !ka_tensor_same_shape(u, sum))
        return NAN;
    const struct ka_term terms[] = {{1, sum}, {-KA_KIND_LINEAR_U, u}, {-KA_KIND_LINEAR_W, w}};
    double gap = ka_norm_of(terms, KA_COUNT(terms), NULL);
    double size = fabs(KA_KIND_LINEAR_U) * norm_of(u) + fabs(KA_KIND_LINEAR_W) * norm_of(w);
    return size > 0 ? gap / size : 0;
}

/* Between numbers next to zero. */
static double smallest_step(enum ka_dtype dtype)
{
    return dtype == KA_F16 ? 0x1p-24 : dtype == KA_BF16 ? 0x1p-133 : dtype == KA_F32 ? 0x1p-149 : 0;
}

double ka_case_scaled_gap(const struct ka_tensor *plain, const struct ka_tensor *scaled, double factor)
{
    if (!plain || !scaled || !ka_tensor_same_shape(plain, scaled))
        return NAN;
    const struct ka_term terms[] = {{1, scaled}, {-factor, plain}};
    double steps = STEPS * smallest_step(scaled->dtype) * sqrt((double)scaled->count);
    double size = fabs(factor) * norm_of(plain), gap = ka_norm_of(terms, KA_COUNT(terms), NULL);
    gap = gap < steps ? 0 : gap; /* a NaN stays one */
    return size > 0 ? gap / size : gap;
}

int ka_case_spread(const struct ka_tensors *found, const char *name, size_t times, double *max_abs,
                   double *norm)
{
    const struct ka_tensor *first = ka_tensors_find_part(found, "grad", name);
    double most = 0, largest = 0;
    for (size_t k = 0; k < times; k++) {
        char part[32];
        snprintf(part, sizeof(part), "repeat%zu", k);
        const struct ka_tensor *again = ka_tensors_find_part(found, part, name);
        if (!first || !again || !ka_tensor_same_shape(first, again))
            return -ENOENT;
        double furthest;
        largest = fmax(largest, distance(first, again, &furthest));
        most = fmax(most, furthest);
    }
    *max_abs = most;
    *norm = largest;
    return 0;
}

static int explain(const struct ka_diff *diff, const char *what, const char *name, struct ka_err *err)
{
    KA_AUTO_BUF struct ka_buf text = {0};
    ka_diff_describe(diff, name, KA_DESCRIBE_FULL, &text);
    return ka_fail(err, -EDOM, "%s: %.900s", what, ka_buf_str(&text));
}

static int compare_output(const struct ka_tensors *set, const json_t *entry, const json_t *plan,
                          const char *index, struct ka_err *err)
{
    const struct ka_tensor *forward = ka_tensors_find_part(set, "fwd", index);
    const struct ka_tensor *oracle = ka_tensors_find_part(set, "out", index);
    if (!forward || !oracle)
        return ka_fail(err, -EINVAL, "output %s is missing from the oracle's result", index);
    struct ka_diff diff;
    char name[64];
    snprintf(name, sizeof(name), "output %s", index);
    struct ka_tolerance tolerance = ka_case_tolerance(entry, plan, "out", index, forward->dtype);
    tolerance.local = 0; /* how exact the user's kernels are in each row is not ours to judge, */
    if (tolerance.coarse && tolerance.floor < OWN_MOST) /* what cancels depends on the order of their sums */
        tolerance.floor = fmin(OWN_COARSE * tolerance.floor, OWN_MOST);
    if (forward->dtype == KA_F16 || forward->dtype == KA_BF16)
        tolerance.floor *= OWN_HALF; /* nor that they add up in half precision */
    int rc = ka_compare(forward, oracle, ka_tensors_find_part(set, "base_out", index), &tolerance, NULL, 0,
                        &diff, err);
    if (rc == 0 && !diff.pass)
        rc = explain(&diff, "the Triton forward and the float64 oracle disagree", name, err);
    return rc;
}

/* The parts of a result that say the same: by the oracle, by the user's reference, by eager PyTorch. */
struct thrice {
    const char *oracle, *reference, *base;
};

/* The user's own reference against the oracle: both in float64. What cancels to rounding (softmax under an
 * upstream that is constant along the row) is equal when its distance is rounding by the measure of `scale`.
 * Kernels take scalars in float32, which moves the angle of a rotation at position 4,000 by 1e-5: the two may
 * be as far apart as float32 leaves eager PyTorch, or by what no half precision can tell. */
static int compare_reference(const struct ka_tensors *set, const json_t *entry, const struct thrice *parts,
                             const char *of, double scale, struct ka_err *err)
{
    const struct ka_tensor *oracle = ka_tensors_find_part(set, parts->oracle, of);
    const struct ka_tensor *reference = ka_tensors_find_part(set, parts->reference, of);
    const struct ka_tensor *base = ka_tensors_find_part(set, parts->base, of);
    if (!oracle || !reference)
        return 0; /* no reference(), or it has no such output */
    struct ka_diff diff;
    struct ka_tolerance tolerance = ka_tolerance_oracle();
    if (base && (base->dtype == KA_F16 || base->dtype == KA_BF16)) {
        tolerance.floor *= REFERENCE_HALF;
        tolerance.atol *= REFERENCE_HALF;
        tolerance.rtol *= REFERENCE_HALF;
    }
    bool exact = base && base->dtype == KA_F32 && !in_tf32(entry, parts->oracle, of);
    int rc = ka_compare(reference, oracle, exact ? base : NULL, &tolerance, NULL, 0, &diff, err);
    char name[160];
    snprintf(name, sizeof(name), "%s %s", strcmp(parts->oracle, "out") == 0 ? "output" : "the gradient of",
             of);
    bool rounding = rc == 0 && ka_tensor_same_shape(reference, oracle) &&
                    distance(reference, oracle, NULL) <= ROUNDING * scale;
    if (rc == 0 && !diff.pass && !rounding)
        rc = explain(&diff, "reference() and the oracle made from the forward disagree", name, err);
    return rc;
}

static bool all_finite(const struct ka_tensor *tensor)
{
    const struct ka_term term = {1, tensor};
    return isfinite(ka_norm_of(&term, 1, NULL));
}

/* A NaN in the gradient of finite outputs is no value to compare with: nothing that a backward returns there
 * would be right or wrong. */
static int require_gradient(const struct ka_tensors *set, const char *name, struct ka_err *err)
{
    const struct ka_tensor *grad = ka_tensors_find_part(set, "grad", name);
    double value[256];
    if (!grad || all_finite(grad))
        return 0;
    for (size_t first = 0; first < grad->count; first += KA_COUNT(value)) {
        size_t left = grad->count - first, n = left < KA_COUNT(value) ? left : KA_COUNT(value), i = 0;
        ka_tensor_load(grad, first, n, value);
        while (i < n && !isnan(value[i]))
            i++;
        if (i == n)
            continue;
        KA_AUTO_BUF struct ka_buf shape = {0};
        ka_tensor_shape_text(grad, &shape);
        return ka_fail(err, -ERANGE,
                       "the gradient of %.100s, of shape %.100s, is NaN at its element %zu by the float64 "
                       "oracle, where every output is finite: there is nothing to compare a backward with",
                       name, ka_buf_str(&shape), first + i);
    }
    return 0;
}

int ka_case_agrees(const struct ka_tensors *oracle, const json_t *entry, const json_t *plan,
                   struct ka_err *err)
{
    double scale = ka_case_upstream_norm(oracle, entry, plan);
    bool finite = true;
    int rc = 0;
    KA_EACH(json_object_get(entry, "outputs"), i, output) {
        const char *kind = json_string_value(json_object_get(output, "kind"));
        if (rc || !kind || strcmp(kind, "tensor") != 0)
            continue;
        char index[24];
        snprintf(index, sizeof(index), "%zu", i);
        rc = compare_output(oracle, entry, plan, index, err);
        if (rc == 0)
            rc = compare_reference(oracle, entry, &(struct thrice){"out", "ref_out", "base_out"}, index, 0,
                                   err);
        finite = finite && rc == 0 && all_finite(ka_tensors_find_part(oracle, "out", index));
    }
    KA_EACH(json_object_get(entry, "grads"), i, grad) {
        if (rc == 0 && finite && json_is_string(grad))
            rc = require_gradient(oracle, json_string_value(grad), err);
        if (rc == 0 && json_is_string(grad))
            rc = compare_reference(oracle, entry, &(struct thrice){"grad", "ref_grad", "base"},
                                   json_string_value(grad), scale, err);
    }
    return rc;
}
