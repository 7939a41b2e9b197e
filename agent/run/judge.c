/* The candidate's tensors of one case against the oracle's, and what else the case asks: the backward again, its linearity, its
 * spread, kernels that do nothing. The words are the verdict's; the rule for one tensor is sandbox/compare.h. */
#include "judge.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "cases.h"
#include "core/conduct.h"
#include "sandbox/compare.h"

#define LINEAR_LIMITS 3 /* three gradients, each as far off as one may be */
#define ZERO_FLOORS                                                                                          \
    100.0 /* a zero gradient may keep rounding of so many floors of the dtype, per unit of upstream, */
#define ZERO_MAX 0.02 /* and never more than this */

static const struct ka_tensor *find_part(const struct ka_tensors *set, const char *part, const char *of)
{
    char name[160];
    snprintf(name, sizeof(name), "%s/%s", part, of);
    return ka_tensors_find(set, name);
}

/* More draws of base's rounding, where the oracle made them. */
static int take_nearby(struct ka_tolerance *tolerance, const struct ka_tensors *expected, const char *name)
{
    int rc = 0;
    for (int draw = 0; rc == 0; draw++) {
        char base[32], want[32];
        snprintf(base, sizeof(base), "near_base/%d", draw);
        snprintf(want, sizeof(want), "near/%d", draw);
        if (!find_part(expected, base, name))
            break;
        rc = ka_tolerance_near(tolerance, find_part(expected, base, name), find_part(expected, want, name),
                               NULL);
    }
    return rc;
}

static bool is_coarse(const struct ka_judged_case *one)
{
    const char *inputs = json_string_value(json_object_get(one->plan, "inputs"));
    return inputs && strcmp(inputs, "mixed") == 0;
}

static struct ka_tolerance tolerance_of(const struct ka_judged_case *one, enum ka_dtype dtype)
{
    struct ka_tolerance tolerance = ka_tolerance_of(dtype);
    if (is_coarse(one))
        ka_tolerance_coarsen(&tolerance);
    return tolerance;
}

/* Candidate's `part` of an input's gradient against the oracle's. Returns -EINVAL if the oracle is unusable. */
static int compare_gradient(const struct ka_judged_case *one, const char *part, const char *name,
                            struct ka_diff *diff)
{
    const struct ka_tensor *want = find_part(one->expected, "grad", name);
    const struct ka_tensor *base = find_part(one->expected, "base", name);
    const struct ka_tensor *got = find_part(one->found, part, name);
    if (!want)
        return -EINVAL;
    struct ka_compare_other others[16];
    size_t count = 0, i;
    json_t *other;
    json_array_foreach(json_object_get(one->oracle, "grads"), i, other)
    {
        const char *text = json_string_value(other);
        const struct ka_tensor *tensor = text ? find_part(one->expected, "grad", text) : NULL;
        if (tensor && strcmp(text, name) != 0 && count < KA_COUNT(others))
            others[count++] = (struct ka_compare_other){text, tensor};
    }
    struct ka_tolerance tolerance = tolerance_of(one, base ? base->dtype : KA_F32);
    tolerance.zero_norm = fmin(ZERO_FLOORS * tolerance.floor, ZERO_MAX) *
                          ka_case_upstream_norm(one->expected, one->oracle, one->plan);
    int rc = ka_tolerance_widen(&tolerance, find_part(one->expected, "jitter", name), want, NULL);
    if (rc == 0)
        rc = take_nearby(&tolerance, one->expected, name);
    return rc ? rc : ka_compare(got, want, base, &tolerance, others, count, diff, NULL);
}

/* A coarse comparison can only speak against a gradient: errors are reported, and counted as evidence, of the others. */
static int judge_gradient(const struct ka_judged_case *one, const char *part, const char *name)
{
    struct ka_diff diff;
    int rc = compare_gradient(one, part, name, &diff);
    if (rc == 0 && !(diff.pass && is_coarse(one)))
        ka_verdict_gradient(one->verdict, one->at, name, &diff);
    return rc;
}

static bool is_wanted(const json_t *plan, const char *name)
{
    const json_t *needs = json_object_get(plan, "needs");
    size_t i;
    json_t *item;
    if (!needs)
        return true;
    json_array_foreach((json_t *)needs, i, item)
    {
        if (json_is_string(item) && strcmp(json_string_value(item), name) == 0)
            return true;
    }
    return false;
}

static int judge_gradients(const struct ka_judged_case *one, const char *part)
{
    size_t i;
    json_t *grad;
    int rc = 0;
    json_array_foreach(json_object_get(one->oracle, "grads"), i, grad)
    {
        const char *name = json_string_value(grad);
        if (rc || !name || !is_wanted(one->plan, name))
            continue;
        rc = judge_gradient(one, part, name);
    }
    return rc;
}

/* The same graph, differentiated again: nothing may have been used up or added to. */
static int judge_again(const struct ka_judged_case *one)
{
    if (!json_is_true(json_object_get(one->plan, "twice")))
        return 0;
    struct ka_judged_case again = *one;
    again.at =
        ka_verdict_case(one->verdict, one->shape, "normal upstream, second backward over the same graph");
    return judge_gradients(&again, "again");
}

/* backward(a*u + b*w) = a*backward(u) + b*backward(w), over one graph: also what was kept of an earlier call shows here. A
 * gradient that is wrong or noise by itself has nothing to add up. */
static void judge_linear(const struct ka_judged_case *one)
{
    size_t i;
    json_t *grad;
    if (!json_object_get(one->plan, "linear"))
        return;
    json_array_foreach(json_object_get(one->oracle, "grads"), i, grad)
    {
        const char *name = json_string_value(grad);
        struct ka_diff diff;
        if (!name || !is_wanted(one->plan, name) || compare_gradient(one, "grad", name, &diff) ||
            !diff.pass || diff.want_zero || diff.vacuous || diff.nonfinite_want)
            continue;
        double off =
            ka_case_nonlinearity(find_part(one->found, "grad", name), find_part(one->found, "other", name),
                                 find_part(one->found, "sum", name));
        if (off <= LINEAR_LIMITS * diff.limit)
            continue;
        char text[300];
        snprintf(text, sizeof(text),
                 "the gradient of %.100s is not linear in the upstream: backward(a*u + b*w) is not "
                 "a*backward(u) + "
                 "b*backward(w) over one graph; relative difference %.3g, allowed %.3g",
                 name, off, LINEAR_LIMITS * diff.limit);
        ka_verdict_fail(one->verdict, one->at, "not_linear", text);
    }
}

/* How far the same backward varies on the same bytes. */
static void measure_spread(const struct ka_judged_case *one)
{
    json_int_t times = json_integer_value(json_object_get(one->plan, "repeats"));
    size_t i;
    json_t *grad;
    json_array_foreach(json_object_get(one->oracle, "grads"), i, grad)
    {
        const char *name = json_string_value(grad);
        struct ka_diff diff;
        double most, norm;
        if (times < 1 || !name || compare_gradient(one, "grad", name, &diff) ||
            ka_case_spread(one->found, name, (size_t)times, &most, &norm))
            continue;
        double allowed = diff.limit * (diff.want_norm > 0 ? diff.want_norm : 1);
        ka_verdict_repeated(one->verdict, name, (size_t)times + 1, most,
                            allowed > 0 ? norm / allowed : INFINITY);
    }
}

static int judge_outputs(const struct ka_judged_case *one)
{
    size_t i;
    json_t *output;
    json_array_foreach(json_object_get(one->oracle, "outputs"), i, output)
    {
        char index[24];
        snprintf(index, sizeof(index), "%zu", i);
        const struct ka_tensor *want = find_part(one->expected, "out", index);
        const struct ka_tensor *user = find_part(one->expected, "fwd", index);
        if (!want || !user)
            continue; /* not a tensor */
        struct ka_tolerance tolerance = tolerance_of(one, user->dtype);
        struct ka_diff diff;
        int rc = ka_compare(find_part(one->found, "out", index), want,
                            find_part(one->expected, "base_out", index), &tolerance, NULL, 0, &diff, NULL);
        if (rc)
            return rc;
        ka_verdict_output(one->verdict, one->at, i, &diff);
    }
    return 0;
}

static bool same_bytes(const struct ka_tensor *a, const struct ka_tensor *b)
{
    return a->dtype == b->dtype && ka_tensor_same_shape(a, b) &&
           memcmp(a->data, b->data, a->count * ka_dtype_size(a->dtype)) == 0;
}

/* With every launch of the backward turned into nothing, some gradient must change: else no kernel computed it. */
static void judge_noop(const struct ka_judged_case *one)
{
    if (!json_is_true(json_object_get(one->plan, "noop")))
        return;
    size_t i;
    json_t *grad;
    json_array_foreach(json_object_get(one->oracle, "grads"), i, grad)
    {
        const char *name = json_string_value(grad);
        const struct ka_tensor *real = name ? find_part(one->found, "grad", name) : NULL;
        const struct ka_tensor *idle = name ? find_part(one->found, "noop", name) : NULL;
        const struct ka_tensor *want = name ? find_part(one->expected, "grad", name) : NULL;
        char text[256];
        if (!real || !idle || !same_bytes(real, idle) || (want && ka_tensor_is_zero(want)))
            continue; /* where zero is expected, a kernel that does nothing is as right */
        snprintf(
            text, sizeof(text),
            "the gradient of %s is the same when the backward's kernels do nothing: they do not compute it",
            name);
        ka_verdict_fail(one->verdict, one->at, "decoy_kernel", text);
    }
}

/* The candidate raised, or left no result. */
static void fail_raised(const struct ka_judged_case *one)
{
    struct ka_err err;
    ka_case_error(one->candidate, &err);
    const char *trace =
        json_string_value(json_object_get(json_object_get(one->candidate, "error"), "traceback"));
    struct ka_buf text = {0};
    ka_buf_printf(&text, "%s%s%.3000s", err.msg, trace ? "\n" : "", trace ? trace : "");
    ka_verdict_fail(one->verdict, one->at, "raised", ka_buf_str(&text));
    ka_buf_free(&text);
}

int ka_judge_case(struct ka_judged_case *one, json_int_t id, struct ka_err *why)
{
    struct ka_tensors *expected = NULL, *found = NULL;
    int rc = -ENODATA;
    if (!one->oracle || !json_is_true(json_object_get(one->oracle, "ok"))) {
        ka_case_error(one->oracle, why);
        return rc;
    }
    if (ka_case_open(one->oracle_files, one->oracle_id, &expected, why) ||
        ka_case_agrees(expected, one->oracle, one->plan, why))
        goto out;
    rc = 0;
    struct ka_err err;
    if (!one->candidate || !json_is_true(json_object_get(one->candidate, "ok"))) {
        fail_raised(one);
        goto out;
    }
    if (ka_case_open(one->candidate_files, id, &found, &err)) {
        ka_verdict_fail(one->verdict, one->at, "unreadable", err.msg);
        goto out;
    }
    one->expected = expected;
    one->found = found;
    if (judge_outputs(one) || judge_gradients(one, "grad") || judge_again(one)) {
        rc = ka_fail(why, -EINVAL, "the oracle's tensors are unusable");
    } else {
        judge_linear(one);
        measure_spread(one);
        judge_noop(one);
        ka_conduct_judge(one->candidate, one->verdict, one->at);
    }
out:
    ka_tensors_free(expected);
    ka_tensors_free(found);
    one->expected = one->found = NULL;
    return rc;
}
