/* The candidate's tensors of one case against the oracle's, and what else the case asks: the backward again,
 * its linearity, its spread, kernels that do nothing. The words are the verdict's; the rule for one tensor is
 * sandbox/compare.h. */
#include "judge.h"

#include <errno.h>
#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/core/conduct.h"
#include "agent/core/fields.h"
#include "agent/core/kinds.h"
#include "base/threads.h"
#include "cases.h"
#include "sandbox/compare.h"

#define POWER_ROOM 8               /* what is in between may be so much larger than the gradient */
#define LINEAR_LIMITS 3            /* three gradients, each as far off as one may be */
#define NAMED_MAX 8                /* items of one list */
#define NOOP_SHARE (1 / 16.0)      /* of a gradient that may be there by chance without its kernels */
#define DOUBT_TIMES 16             /* a few draws of rounding may be so far from what it can be */
#define SAME_RUN ((size_t)1 << 20) /* elements that one thread looks at in turn */
#define ZERO_FLOORS                                                                                          \
    100.0 /* a zero gradient may keep rounding of so many floors of the dtype, per unit of upstream, */
#define ZERO_MAX 0.02    /* and never more than this; */
#define ZERO_COARSE 0.05 /* rows of 16 times what is usual, beside a softmax that saturates, leave more */

/* One gradient of the case. */
struct gradient {
    const char *name; /* borrowed from the oracle's result */
    struct ka_tolerance tolerance;
    struct ka_tolerance first; /* what it was before the closer look */
    struct ka_diff diff;       /* of the candidate's `grad` */
};

/* Gradients that are off. */
struct doubts {
    bool little, other; /* of this case, of the other one, by little; */
    bool much;          /* of either */
};

struct judging {
    const struct ka_judged_case *of;
    const struct ka_tensors *expected, *found;
    const struct ka_tensors *closer; /* NULL: nobody has looked */
    struct gradient *grads;          /* those that the case wants */
    size_t count;
    bool is_other;         /* it is the other case of the one that is judged */
    struct doubts *doubts; /* NULL: of no use any more */
};

/* More draws of base's rounding, where the oracle made them. */
static int take_nearby(struct ka_tolerance *tolerance, const struct ka_tensors *expected, const char *name)
{
    int rc = 0;
    for (int draw = 0; rc == 0; draw++) {
        char base[32], want[32];
        snprintf(base, sizeof(base), "near_base/%d", draw);
        snprintf(want, sizeof(want), "near/%d", draw);
        if (!ka_tensors_find_part(expected, base, name))
            break;
        rc = ka_tolerance_near(tolerance, ka_tensors_find_part(expected, base, name),
                               ka_tensors_find_part(expected, want, name), NULL);
    }
    return rc;
}

/* What a closer look found: more draws of base's rounding, and of the gradient at inputs moved by it. */
static int take_closer(struct gradient *g, const struct ka_tensors *closer, const struct ka_tensor *want)
{
    int rc = take_nearby(&g->tolerance, closer, g->name);
    for (int draw = 0; rc == 0; draw++) {
        char part[32];
        snprintf(part, sizeof(part), "moved/%d", draw);
        const struct ka_tensor *moved = ka_tensors_find_part(closer, part, g->name);
        if (!moved)
            break;
        rc = ka_tolerance_widen(&g->tolerance, moved, want, NULL);
    }
    return rc;
}

/* What the oracle says of its rounding: the same for all that is compared with this gradient. Returns -EINVAL
 * if the oracle is unusable. */
static int settle_tolerance(const struct judging *j, struct gradient *g)
{
    const struct ka_judged_case *one = j->of;
    const struct ka_tensor *want = ka_tensors_find_part(j->expected, "grad", g->name);
    const struct ka_tensor *base = ka_tensors_find_part(j->expected, "base", g->name);
    if (!want)
        return -EINVAL;
    enum ka_dtype dtype = base ? base->dtype : KA_F32;
    g->tolerance = ka_case_tolerance(one->oracle, one->plan, "grad", g->name, dtype);
    g->tolerance.upstream_norm = ka_case_upstream_norm(j->expected, one->oracle, one->plan);
    g->tolerance.zero_norm =
        fmin(ZERO_FLOORS * ka_case_tolerance(one->oracle, NULL, "grad", g->name, dtype).floor,
             g->tolerance.coarse ? ZERO_COARSE : ZERO_MAX) *
        g->tolerance.upstream_norm;
    int rc =
        ka_tolerance_widen(&g->tolerance, ka_tensors_find_part(j->expected, "jitter", g->name), want, NULL);
    rc = rc ? rc : take_nearby(&g->tolerance, j->expected, g->name);
    g->first = g->tolerance;
    return rc || !j->closer ? rc : take_closer(g, j->closer, want);
}

/* Candidate's `part` of a gradient against the oracle's. */
static int compare_within(const struct judging *j, const char *part, const struct gradient *g,
                          const struct ka_tolerance *tolerance, struct ka_diff *diff)
{
    struct ka_compare_other others[16];
    size_t count = 0, i;
    json_t *other;
    json_array_foreach(json_object_get(j->of->oracle, "grads"), i, other)
    {
        const char *text = json_string_value(other);
        const struct ka_tensor *tensor = text ? ka_tensors_find_part(j->expected, "grad", text) : NULL;
        if (tensor && strcmp(text, g->name) != 0 && count < KA_COUNT(others))
            others[count++] = (struct ka_compare_other){text, tensor};
    }
    return ka_compare(
        ka_tensors_find_part(j->found, part, g->name), ka_tensors_find_part(j->expected, "grad", g->name),
        ka_tensors_find_part(j->expected, "base", g->name), tolerance, others, count, diff, NULL);
}

/* The same, as far as anything is known of rounding. What is right by the closer look alone is remarked. */
static int compare_gradient(const struct judging *j, const char *part, const struct gradient *g,
                            struct ka_diff *diff)
{
    struct ka_diff first;
    int rc = compare_within(j, part, g, &g->tolerance, diff);
    if (rc || !j->closer || !diff->pass)
        return rc;
    rc = compare_within(j, part, g, &g->first, &first);
    if (rc == 0 && !first.pass) {
        KA_AUTO_FREE char *text = ka_format("the gradient of %s was verified after a closer look: in a case "
                                            "it was off by little more than what was known of rounding",
                                            g->name);
        ka_verdict_remark(j->of->verdict, text);
    }
    return rc;
}

/* What can only speak against a gradient is told when it does: errors are reported, and counted as evidence,
 * of the others. */
static void tell_gradient(const struct judging *j, size_t at, const struct gradient *g,
                          const struct ka_diff *diff)
{
    const struct ka_kind *kind = ka_kind_of_upstream(j->of->plan);
    bool only_against = kind && kind->only_against;
    for (size_t i = 0; (kind = ka_kind_of_input(j->of->plan, i)); i++)
        only_against = only_against || kind->only_against;
    if (!(diff->pass && only_against))
        ka_verdict_gradient(j->of->verdict, at, g->name, diff);
}

static bool is_wanted(const json_t *plan, const char *name)
{
    const json_t *needs = json_object_get(plan, "needs");
    return !needs || ka_has_text(needs, name);
}

/* What rounding leaves is known from a few draws of it: a gradient that is off by little more may be another
 * one. */
static bool is_doubtful(const struct ka_diff *diff)
{
    if (diff->reason == KA_DIFF_PART)
        return diff->part.error <= DOUBT_TIMES * diff->part.limit;
    bool whole = diff->reason == KA_DIFF_NORM || diff->reason == KA_DIFF_NOT_ZERO;
    return whole && diff->error <= DOUBT_TIMES * diff->limit;
}

static void note_doubt(const struct judging *j, const struct ka_diff *diff)
{
    struct doubts *doubts = j->doubts;
    if (diff->pass || !doubts)
        return;
    bool little = is_doubtful(diff);
    doubts->much = doubts->much || !little;
    *(j->is_other ? &doubts->other : &doubts->little) |= little;
}

/* Every gradient that the case wants, of the candidate's `part`, told as case `at` of the verdict. Of "grad"
 * what else is asked of the case looks at this. */
static int judge_gradients(struct judging *j, const char *part, size_t at)
{
    const json_t *names = json_object_get(j->of->oracle, "grads");
    size_t i;
    json_t *item;
    int rc = 0;
    j->grads = ka_calloc(json_array_size(names), sizeof(*j->grads));
    json_array_foreach((json_t *)names, i, item)
    {
        const char *name = json_string_value(item);
        if (rc || !name || !is_wanted(j->of->plan, name))
            continue;
        struct gradient *g = &j->grads[j->count++];
        g->name = name;
        rc = settle_tolerance(j, g);
        rc = rc ? rc : compare_gradient(j, part, g, &g->diff);
        if (rc == 0) {
            note_doubt(j, &g->diff);
            tell_gradient(j, at, g, &g->diff);
        }
    }
    return rc;
}

static int judge_outputs(const struct judging *j, const char *part, size_t at)
{
    const struct ka_judged_case *one = j->of;
    size_t i;
    json_t *output;
    json_array_foreach(json_object_get(one->oracle, "outputs"), i, output)
    {
        char index[24];
        snprintf(index, sizeof(index), "%zu", i);
        const struct ka_tensor *want = ka_tensors_find_part(j->expected, "out", index);
        const struct ka_tensor *user = ka_tensors_find_part(j->expected, "fwd", index);
        if (!want || !user)
            continue; /* not a tensor */
        struct ka_tolerance tolerance = ka_case_tolerance(one->oracle, one->plan, "out", index, user->dtype);
        struct ka_diff diff;
        int rc = ka_tolerance_near(&tolerance, user, want, NULL); /* what the user's kernels round, too */
        if (rc == 0)
            rc = ka_compare(ka_tensors_find_part(j->found, part, index), want,
                            ka_tensors_find_part(j->expected, "base_out", index), &tolerance, NULL, 0, &diff,
                            NULL);
        if (rc)
            return rc;
        ka_verdict_output(one->verdict, at, i, &diff);
    }
    return 0;
}

/* A question's answer is a case of its own, called by the question's label. */
static size_t question_case(const struct judging *j, const char *question)
{
    struct ka_buf label = {0};
    ka_kind_label(j->of->plan, &label);
    ka_buf_printf(&label, ", %s", ka_kind_find(KA_KIND_QUESTION, question)->label);
    size_t at = ka_verdict_case(j->of->verdict, j->of->shape, ka_buf_str(&label));
    ka_buf_free(&label);
    return at;
}

/* `part` once more against what is expected of this case. */
static int judge_again(const struct judging *j, const char *part, size_t at)
{
    int rc = 0;
    for (size_t i = 0; i < j->count && rc == 0; i++) {
        struct ka_diff diff;
        rc = compare_gradient(j, part, &j->grads[i], &diff);
        if (rc == 0) {
            note_doubt(j, &diff);
            tell_gradient(j, at, &j->grads[i], &diff);
        }
    }
    return rc;
}

/* NULL: nobody looked, or what that would have said is not known. */
static struct ka_tensors *open_closer(const struct ka_judged_case *one)
{
    struct ka_tensors *closer = NULL;
    if (one->closer_files && ka_case_open(one->closer_files, one->closer_id, &closer, NULL))
        closer = NULL;
    return closer;
}

/* `part` and, unless it is NULL, outputs `out` against what is expected of the other case. Without its
 * expected values nothing is judged: that case says so itself. */
static int judge_other(const struct judging *j, const char *part, const char *out, size_t at)
{
    const struct ka_judged_case *other = j->of->other;
    struct ka_tensors *expected = NULL;
    if (!other || !other->oracle || !json_is_true(json_object_get(other->oracle, "ok")) ||
        ka_case_open(other->oracle_files, other->oracle_id, &expected, NULL))
        return 0;
    struct ka_tensors *closer = open_closer(other);
    struct judging k = {.of = other,
                        .expected = expected,
                        .found = j->found,
                        .closer = closer,
                        .is_other = true,
                        .doubts = j->doubts};
    int rc = judge_gradients(&k, part, at);
    if (rc == 0 && out)
        rc = judge_outputs(&k, out, at);
    free(k.grads);
    ka_tensors_free(closer);
    ka_tensors_free(expected);
    return rc;
}

/* The same graph, differentiated again: nothing may have been used up or added to. */
static int judge_twice(const struct judging *j, const json_t *asked)
{
    (void)asked;
    return judge_again(j, "again", question_case(j, "twice"));
}

/* Two graphs alive, differentiated in both orders. */
static int judge_beside(const struct judging *j, const json_t *asked)
{
    (void)asked;
    size_t at = question_case(j, "beside");
    int rc = judge_other(j, "beside", "beside_out", at);
    rc = rc ? rc : judge_again(j, "held", at);
    return rc ? rc : judge_other(j, "after", NULL, at);
}

/* What the case had returned, as it is after other calls. */
static int judge_kept(const struct judging *j, const json_t *asked)
{
    (void)asked;
    size_t at = question_case(j, "kept");
    int rc = judge_again(j, "kept", at);
    return rc ? rc : judge_outputs(j, "kept_out", at);
}

static int judge_quiet(const struct judging *j, const json_t *asked)
{
    (void)asked;
    size_t at = question_case(j, "quiet");
    int rc = judge_outputs(j, "quiet_out", at);
    return rc ? rc : judge_outputs(j, "unwanted_out", at);
}

/* The other case's values in this one's tensors. */
static int judge_stepped(const struct judging *j, const json_t *asked)
{
    (void)asked;
    return judge_other(j, "stepped", "stepped_out", question_case(j, "stepped"));
}

/* A gradient of values of which one input's or output's were changed since has to be that of the old ones. To
 * refuse is as right: the candidate's word for it gains nothing that raising would not. */
static int judge_stale(const struct judging *j, const json_t *asked)
{
    size_t at = question_case(j, "stale"), i;
    const json_t *refused = json_object_get(j->of->candidate, "stale_refused");
    json_t *input;
    int rc = 0;
    (void)asked;
    json_array_foreach(json_object_get(j->of->oracle, "inputs"), i, input)
    {
        const char *name = json_string_value(json_object_get(input, "name"));
        char part[160];
        snprintf(part, sizeof(part), "stale.%s", name ? name : "");
        if (rc == 0 && name && !ka_has_text(refused, name))
            rc = judge_other(j, part, NULL, at);
    }
    size_t outputs = json_array_size(json_object_get(j->of->oracle, "outputs"));
    for (i = 0; i < outputs && rc == 0; i++) {
        char name[32], part[40];
        snprintf(name, sizeof(name), "out/%zu", i);
        snprintf(part, sizeof(part), "stale.%s", name);
        if (!ka_has_text(refused, name))
            rc = judge_other(j, part, NULL, at);
    }
    return rc;
}

static int judge_calls(const struct judging *j, const json_t *asked)
{
    (void)asked;
    return judge_again(j, "worn", question_case(j, "calls"));
}

/* backward(a*u + b*w) = a*backward(u) + b*backward(w), over one graph: also what was kept of an earlier call
 * shows here. A gradient that is wrong or noise by itself has nothing to add up. */
static int judge_linear(const struct judging *j, const json_t *asked)
{
    (void)asked;
    for (size_t i = 0; i < j->count; i++) {
        const char *name = j->grads[i].name;
        const struct ka_diff *diff = &j->grads[i].diff;
        if (!diff->pass || diff->want_zero || diff->vacuous || diff->nonfinite_want)
            continue;
        double off = ka_case_nonlinearity(ka_tensors_find_part(j->found, "grad", name),
                                          ka_tensors_find_part(j->found, "other", name),
                                          ka_tensors_find_part(j->found, "sum", name));
        if (off <= LINEAR_LIMITS * diff->limit)
            continue;
        char text[300];
        snprintf(text, sizeof(text),
                 "the gradient of %.100s is not linear in the upstream: backward(a*u + b*w) is not "
                 "a*backward(u) + "
                 "b*backward(w) over one graph; relative difference %.3g, allowed %.3g",
                 name, off, LINEAR_LIMITS * diff->limit);
        ka_verdict_fail(j->of->verdict, j->of->at, "not_linear", text);
    }
    return 0;
}

static double range_of(enum ka_dtype dtype)
{
    return dtype == KA_F16 ? 65504 : dtype == KA_F64 ? 0x1p1023 : 0x1p127;
}

/* Larger upstreams are too much for eager PyTorch, too: in float16 what lies between a gradient and its
 * upstream, as one product before the next, may end its range before the gradient does. */
static bool overflows(const struct judging *j, const struct gradient *g, double factor)
{
    return factor > 1 && ka_has_text(json_object_get(j->of->oracle, "overflows"), g->name);
}

/* backward(factor*u) = factor*backward(u), where the factor is a power of two: then nothing rounds, but where
 * the range of the dtype ends. */
static int judge_powers(const struct judging *j, const json_t *asked)
{
    for (size_t i = 0; i < j->count; i++) {
        const struct gradient *g = &j->grads[i];
        if (!g->diff.pass || g->diff.want_zero || g->diff.vacuous || g->diff.nonfinite_want)
            continue;
        for (size_t k = 0; k < json_array_size(asked); k++) {
            double factor = json_number_value(json_array_get(asked, k)), most, off;
            const struct ka_tensor *plain = ka_tensors_find_part(j->found, "grad", g->name);
            char part[32];
            snprintf(part, sizeof(part), "power%zu", k);
            ka_norm_of(&(struct ka_term){1, plain}, 1, &most);
            if (POWER_ROOM * most * factor > range_of(plain->dtype) || overflows(j, g, factor))
                continue;
            off = ka_case_scaled_gap(plain, ka_tensors_find_part(j->found, part, g->name), factor);
            if (off <= g->diff.limit)
                continue;
            char text[400];
            snprintf(text, sizeof(text),
                     "the gradient of %.100s is not linear in the upstream: %g times the upstream does not "
                     "give %g times the gradient, as it must without clamps, thresholds, roundings and "
                     "overflow in between; relative difference %.3g, allowed %.3g",
                     g->name, factor, factor, off, g->diff.limit);
            ka_verdict_fail(j->of->verdict, j->of->at, "not_linear", text);
        }
    }
    return 0;
}

/* Elements of `plain` other than 0 that are numbers in `spoilt` too. */
static size_t numbers_left(const struct ka_tensor *plain, const struct ka_tensor *spoilt)
{
    double before[1024], after[1024];
    size_t left = 0;
    for (size_t first = 0; first < plain->count; first += KA_COUNT(before)) {
        size_t n = plain->count - first < KA_COUNT(before) ? plain->count - first : KA_COUNT(before);
        ka_tensor_load(plain, first, n, before);
        ka_tensor_load(spoilt, first, n, after);
        for (size_t i = 0; i < n; i++)
            left += before[i] != 0 && isfinite(before[i]) && isfinite(after[i]);
    }
    return left;
}

/* An upstream without a finite number leaves none where the gradient hangs on it: who scales losses finds out
 * by that whether the scale was too large. */
static int judge_spoilt(const struct judging *j, const json_t *asked)
{
    static const char *const by[] = {"NaN", "infinity"};
    (void)asked;
    for (size_t i = 0; i < j->count; i++) {
        const struct gradient *g = &j->grads[i];
        const struct ka_tensor *plain = ka_tensors_find_part(j->found, "grad", g->name);
        for (size_t k = 0; k < KA_COUNT(by) && g->diff.pass && !g->diff.want_zero; k++) {
            char part[32], text[400];
            snprintf(part, sizeof(part), "spoilt%zu", k);
            const struct ka_tensor *spoilt = ka_tensors_find_part(j->found, part, g->name);
            bool whole = spoilt && ka_tensor_same_shape(plain, spoilt);
            size_t left = whole ? numbers_left(plain, spoilt) : plain->count;
            if (left == 0)
                continue;
            snprintf(text, sizeof(text),
                     "the gradient of %.100s is not linear in the upstream: %s times the upstream leaves %zu "
                     "finite numbers in it, which hides that a loss scale was too large",
                     g->name, by[k], left);
            ka_verdict_fail(j->of->verdict, j->of->at, "not_linear", text);
        }
    }
    return 0;
}

/* No kernel has to compute it, and it is right. */
static bool is_free(const struct judging *j, const struct gradient *g)
{
    return g->diff.pass && ka_has_text(json_object_get(j->of->oracle, "free"), g->name);
}

/* Of the right shape: work on it is bounded by the oracle's tensors, whatever the file says. */
static bool is_of_shape(const struct ka_diff *diff)
{
    return diff->reason != KA_DIFF_MISSING && diff->reason != KA_DIFF_SHAPE && diff->reason != KA_DIFF_DTYPE;
}

/* How far the same backward varies on the same bytes. */
static int judge_repeats(const struct judging *j, const json_t *asked)
{
    json_int_t times = json_integer_value(asked);
    for (size_t i = 0; i < j->count && times >= 1; i++) {
        const struct ka_diff *diff = &j->grads[i].diff;
        double most, norm;
        if (!is_of_shape(diff) || ka_case_spread(j->found, j->grads[i].name, (size_t)times, &most, &norm))
            continue;
        double allowed = diff->limit * (diff->want_norm > 0 ? diff->want_norm : 1);
        ka_verdict_repeated(j->of->verdict, j->grads[i].name, (size_t)times + 1, most,
                            allowed > 0 ? norm / allowed : INFINITY);
    }
    return 0;
}

static bool same_bytes(const struct ka_tensor *a, const struct ka_tensor *b)
{
    return a->dtype == b->dtype && ka_tensor_same_shape(a, b) &&
           memcmp(a->data, b->data, a->count * ka_dtype_size(a->dtype)) == 0;
}

struct sharing {
    const struct ka_tensor *real, *idle;
    const struct ka_tensor *passed; /* of the upstream, what the gradient has to be; NULL: nothing */
    atomic_size_t numbers, same, handed_on, zeros;
};

/* Of one run of elements: how many of `real` are numbers but 0, how many of those are in `idle`, and how many
 * of these are the upstream's. And zeros of both that are not. */
static void count_same(void *arg, size_t run)
{
    struct sharing *s = arg;
    double real[512], idle[KA_COUNT(real)], passed[KA_COUNT(real)];
    size_t end = s->real->count - run * SAME_RUN < SAME_RUN ? s->real->count : (run + 1) * SAME_RUN;
    size_t numbers = 0, same = 0, handed_on = 0, zeros = 0;
    for (size_t first = run * SAME_RUN; first < end; first += KA_COUNT(real)) {
        size_t n = end - first < KA_COUNT(real) ? end - first : KA_COUNT(real);
        ka_tensor_load(s->real, first, n, real);
        ka_tensor_load(s->idle, first, n, idle);
        if (s->passed)
            ka_tensor_load(s->passed, first, n, passed);
        for (size_t i = 0; i < n; i++) {
            bool number = real[i] != 0 && isfinite(real[i]), is_same = real[i] == idle[i];
            bool is_upstream = s->passed && real[i] == passed[i];
            numbers += number;
            same += number && is_same;
            handed_on += number && is_same && is_upstream;
            zeros += real[i] == 0 && is_same && !is_upstream;
        }
    }
    atomic_fetch_add(&s->numbers, numbers);
    atomic_fetch_add(&s->same, same);
    atomic_fetch_add(&s->handed_on, handed_on);
    atomic_fetch_add(&s->zeros, zeros);
}

/* Of the elements of `real` that are numbers other than 0, the share that is the same in `idle`. The
 * upstream's own, in `passed`, do not count where they are handed on as they come. Where the host also puts
 * zeros between them it chooses, which is for kernels to do; `may_choose` leaves that open. */
static double share_of_same(const struct ka_tensor *real, const struct ka_tensor *idle,
                            const struct ka_tensor *passed, bool may_choose)
{
    bool has_part = passed && passed->dtype == real->dtype && ka_tensor_same_shape(real, passed);
    struct sharing s = {.real = real, .idle = idle, .passed = has_part ? passed : NULL};
    if (!has_part && same_bytes(real, idle))
        return 1;
    if (real->dtype != idle->dtype || !ka_tensor_same_shape(real, idle))
        return 0;
    ka_threads_run((real->count + SAME_RUN - 1) / SAME_RUN, count_same, &s);
    size_t same = s.zeros && !may_choose ? s.same : s.same - s.handed_on;
    return s.numbers ? (double)same / (double)s.numbers : 0;
}

/* With every launch of the backward turned into nothing, a gradient must not be there: else no kernel
 * computed it. Nor a part of it: a kernel that writes one row does not compute the others. */
static int judge_noop(const struct judging *j, const json_t *asked)
{
    (void)asked;
    for (size_t i = 0; i < j->count; i++) {
        const char *name = j->grads[i].name;
        const struct ka_tensor *real = ka_tensors_find_part(j->found, "grad", name);
        const struct ka_tensor *idle = ka_tensors_find_part(j->found, "noop", name);
        char text[400];
        const struct ka_diff *diff = &j->grads[i].diff;
        /* Where zero is right, as where a softmax is saturated, a kernel that does nothing is as right. */
        if (!idle || !is_of_shape(diff) || !real->count || diff->want_zero || is_free(j, &j->grads[i]) ||
            (diff->pass && ka_tensor_is_zero(real)))
            continue;
        /* Among values of a kind zeros may be right anywhere. */
        double share = share_of_same(real, idle, ka_tensors_find_part(j->expected, "passed", name),
                                     json_object_get(j->of->plan, "values"));
        if (share < NOOP_SHARE)
            continue;
        if (share >= 1)
            snprintf(text, sizeof(text),
                     "the gradient of %.100s is the same when the backward's kernels do nothing: they do not "
                     "compute it",
                     name);
        else
            snprintf(
                text, sizeof(text),
                "%.3g%% of the gradient of %.100s is the same when the backward's kernels do nothing: "
                "they do not compute that part. The host may hand on the upstream gradient where it is the "
                "gradient, but not choose between it and zeros",
                100 * share, name);
        ka_verdict_fail(j->of->verdict, j->of->at, "decoy_kernel", text);
    }
    return 0;
}

static bool is_empty(const json_t *plan)
{
    return ka_is_text(plan, "kind", "zero");
}

/* What the report says of where gradients come from. One that is free, or zero, may come from nowhere. */
static void judge_conduct(const struct judging *j)
{
    const struct ka_judged_case *one = j->of;
    const json_t *outputs = json_object_get(one->oracle, "outputs");
    json_auto_t *free = json_array(), *nowhere = json_array();
    for (size_t k = 0; k < j->count; k++) {
        const struct gradient *g = &j->grads[k];
        if (is_free(j, g))
            json_array_append_new(free, json_string(g->name));
        if (is_free(j, g) || g->diff.want_zero)
            json_array_append_new(nowhere, json_string(g->name));
    }
    const struct ka_conduct_of of = {.compiled = one->compiled,
                                     .place = one->place,
                                     .free = free,
                                     .empty = is_empty(one->plan) || ka_conduct_nothing_to_launch(outputs) ||
                                              (j->count && json_array_size(free) == j->count),
                                     .scales = one->by_hand && ka_conduct_may_scale(outputs)};
    if (!one->compiled)
        ka_conduct_traces(one->candidate, nowhere, one->verdict, one->at);
    ka_conduct_judge(one->candidate, &of, one->verdict, one->at);
}

/* What is compared of the answer to a question of agent/core/kinds.c, and what it is called when it is wrong.
 * `needs` has no row: it says which gradients there are. */
static const struct {
    const char *name;
    int (*judge)(const struct judging *j, const json_t *asked); /* -EINVAL if the oracle is unusable */
} QUESTIONS[] = {
    {"twice", judge_twice},   {"beside", judge_beside},   {"kept", judge_kept},
    {"quiet", judge_quiet},   {"stepped", judge_stepped}, {"stale", judge_stale},
    {"calls", judge_calls},   {"linear", judge_linear},   {"powers", judge_powers},
    {"spoilt", judge_spoilt}, {"repeats", judge_repeats}, {"noop", judge_noop},
};

static int judge_questions(const struct judging *j)
{
    int rc = 0;
    for (size_t i = 0; i < KA_COUNT(QUESTIONS) && rc == 0; i++) {
        const json_t *asked = json_object_get(j->of->plan, QUESTIONS[i].name);
        if (asked)
            rc = QUESTIONS[i].judge(j, asked);
    }
    return rc;
}

/* The candidate raised, or left no result. */
static void fail_raised(const struct ka_judged_case *one)
{
    const json_t *error = json_object_get(one->candidate, "error");
    KA_AUTO_BUF struct ka_buf text = {0}, known = {0};
    if (json_object_get(error, "message")) {
        ka_place_error(one->place, error, &text);
        ka_place_hidden_error(one->place, error, &known);
    } else {
        struct ka_err err;
        ka_case_error(one->candidate, &err);
        ka_buf_puts(&text, err.msg);
        ka_buf_puts(&known, "the process left no result");
    }
    ka_verdict_fail_known(one->verdict, one->at, KA_VERDICT_RAISED, ka_buf_str(&text), ka_buf_str(&known));
}

static const char BEYOND[] =
    "a kernel of the backward wants more of the GPU than a program gets at the next larger block (out of "
    "resources): it raises there";

/* A size past the block of the sweep's largest is our question, not the user's. That a kernel does not fit
 * the GPU at that block is told by Triton before it runs: nothing wrong comes of it. */
static bool is_beyond_the_gpu(const struct ka_judged_case *one)
{
    return json_is_true(json_object_get(json_object_get(one->candidate, "error"), "out_of_resources")) &&
           ka_is_text(one->plan, "kind", "past_block");
}

/* Compiled, it would be no error, or the end of the process and of all that comes after it there. */
static bool is_out_of_bounds(const json_t *entry)
{
    static const char name[] = "OutOfBounds: ";
    const char *message = ka_text_of(json_object_get(entry, "error"), "message", "");
    return strncmp(message, name, strlen(name)) == 0;
}

/* Whoever has no rows is told so by an error, and takes no wrong gradient away. */
static void skip_empty(const struct ka_judged_case *one)
{
    KA_AUTO_BUF struct ka_buf text = {0}, why = {0};
    ka_place_hidden_error(one->place, json_object_get(one->candidate, "error"), &why);
    ka_buf_printf(&text, "the forward takes inputs of no elements, the backward raises: %s",
                  ka_buf_str(&why));
    ka_verdict_skip_openly(one->verdict, one->shape, ka_buf_str(&text));
}

int ka_judge_case(struct ka_judged_case *one, json_int_t id, struct ka_err *why)
{
    struct ka_tensors *expected = NULL, *found = NULL, *closer = NULL;
    int rc = -ENODATA;
    if (!one->oracle || !json_is_true(json_object_get(one->oracle, "ok"))) {
        ka_case_error(one->oracle, why);
        return rc;
    }
    if (one->agrees) {
        *why = *one->disagreement;
        return one->agrees;
    }
    rc = ka_case_open(one->oracle_files, one->oracle_id, &expected, why);
    if (rc)
        goto out;
    struct ka_err err;
    if (!one->candidate || !json_is_true(json_object_get(one->candidate, "ok"))) {
        if (is_beyond_the_gpu(one))
            ka_verdict_skip_openly(one->verdict, one->shape, BEYOND);
        else if (is_empty(one->plan) && one->candidate && !is_out_of_bounds(one->candidate))
            skip_empty(one);
        else
            fail_raised(one);
        goto out;
    }
    if (ka_case_open(one->candidate_files, id, &found, &err)) {
        ka_verdict_fail(one->verdict, one->at, "unreadable", err.msg);
        goto out;
    }
    closer = open_closer(one);
    struct doubts doubts = {0};
    struct judging j = {.of = one,
                        .expected = expected,
                        .found = found,
                        .closer = closer,
                        .doubts = one->closer ? NULL : &doubts};
    if (judge_outputs(&j, "out", one->at) || judge_gradients(&j, "grad", one->at) || judge_questions(&j))
        rc = ka_fail(why, -EINVAL, "the oracle's tensors are unusable");
    else
        judge_conduct(&j);
    free(j.grads);
    one->doubted = doubts.little && !doubts.much;
    one->other_doubted = doubts.other && !doubts.much;
out:
    ka_tensors_free(closer);
    ka_tensors_free(expected);
    ka_tensors_free(found);
    return rc;
}
