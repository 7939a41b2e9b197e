/* The pass rule for one tensor. Knows nothing of cases, shapes of a sweep, or who made the tensors. */
#include "compare.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "compare_internal.h"

#define MOVED_MAX 0.01   /* the most that sensitivity to rounding is believed, */
#define MOVED_COARSE 0.1 /* and where little is held to it (1 - h^2 of a saturated h that was stored) */
#define TIED_SHARE 5e-3
#define COARSE 0.05         /* norm-relative */
#define LOOSEST 0.02        /* likewise */
#define SHORT_RANGE 1e6     /* float16's: there terms overflow of which the sum does not */
#define LOOSE 100           /* floors of the dtype */
#define UNSTABLE 0.25       /* what rounding of the inputs moves by so much says nothing */
#define MOVED_ZERO_TIMES 4  /* so many times what rounding moves a zero by may be left of it, */
#define MOVED_ZERO_MAX 0.05 /* and no more than this, per unit of upstream */
#define CANCELLED_TIMES 16  /* so many times what rounding moves it, what cancelling leaves may be off */

struct ka_tolerance ka_tolerance_of(enum ka_dtype dtype)
{
    static const struct ka_tolerance tolerances[] = {
        [KA_F64] = {.floor = 1e-10, .atol = 1e-7, .rtol = 1e-7, .local = 1e-9, .grain = 1e-11},
        [KA_F32] =
            {.floor = 1e-5, .atol = 1e-3, .rtol = 1e-3, .off_share = 1e-5, .local = 1e-4, .grain = 0x1p-21},
        [KA_F16] =
            {.floor = 3e-4, .atol = 1e-2, .rtol = 1e-2, .off_share = 1e-3, .local = 1e-2, .grain = 0x1p-8},
        [KA_BF16] =
            {.floor = 2.4e-3, .atol = 5e-2, .rtol = 5e-2, .off_share = 1e-3, .local = 8e-2, .grain = 0x1p-5},
        [KA_BOOL] = {0}, /* and the other integers */
    };
    static const double cancelled[] = {
        [KA_F64] = 1e-9, [KA_F32] = 1e-5, [KA_F16] = 2e-3, [KA_BF16] = 6e-3, [KA_BOOL] = 0};
    struct ka_tolerance tol = tolerances[dtype];
    bool half = dtype == KA_F16 || dtype == KA_BF16;
    tol.off_few = half ? 4 : 0;
    tol.few = half ? 1024 : 64;
    tol.units = dtype == KA_F16 ? 0x1p-8 : dtype == KA_BF16 ? 0x1p-5 : 0x1p-21;
    tol.cancelled = cancelled[dtype];
    tol.dtype = dtype;
    tol.factor = 2;
    return tol;
}

void ka_tolerance_tf32(struct ka_tolerance *tol)
{
    if (tol->dtype != KA_F32)
        return;
    *tol = ka_tolerance_of(KA_F16);
    tol->dtype = KA_F32;
}

void ka_tolerance_coarsen(struct ka_tolerance *tol)
{
    tol->floor = fmax(tol->floor, COARSE);
    tol->coarse = true;
    tol->off_share = 1;
    tol->local = 0;
}

void ka_tolerance_loosen(struct ka_tolerance *tol)
{
    double floor = tol->coarse ? tol->floor : fmax(tol->floor, fmin(LOOSE * tol->floor, LOOSEST));
    ka_tolerance_coarsen(tol);
    tol->floor = floor;
}

void ka_tolerance_ties(struct ka_tolerance *tol)
{
    if (tol->dtype == KA_F16 || tol->dtype == KA_BF16)
        tol->off_share = fmax(tol->off_share, TIED_SHARE);
}

struct ka_tolerance ka_tolerance_oracle(void)
{
    return (struct ka_tolerance){.dtype = KA_F64, .factor = 2, .floor = 1e-6, .atol = 1e-5, .rtol = 1e-5};
}

/* From here on an expected value rounds to infinity. */
static double overflow_at(enum ka_dtype dtype)
{
    if (dtype == KA_F16)
        return 65520.0;
    if (dtype == KA_BF16)
        return 0x1.ffp127;
    return dtype == KA_F32 ? 0x1.ffffffp127 : INFINITY;
}

bool ka_same_nonfinite(double got, double want)
{
    if (isfinite(got) || isfinite(want))
        return isfinite(got) && isfinite(want);
    return !(isinf(got) && isinf(want)) || signbit(got) == signbit(want);
}

bool ka_is_at_the_edge(double overflow, double got, double want, double base)
{
    double size = fabs(want);
    if (size < overflow && overflow < SHORT_RANGE && !isfinite(got) && !isfinite(base))
        return true;
    if (size >= overflow)
        return size < 2 * overflow && isfinite(got) && fabs(got) >= overflow / 2 &&
               signbit(got) == signbit(want);
    return size >= overflow / 2 && !isfinite(got);
}

bool ka_element_off(const struct ka_tolerance *tol, double rms, double got, double want)
{
    if (!isfinite(want))
        return !ka_same_nonfinite(got, want);
    return !(fabs(got - want) <= tol->atol * rms + tol->rtol * fabs(want));
}

/* Elements that rounding may put on the other side of a kink, or leave nothing of. */
static double off_by_rounding(const struct ka_tolerance *tol, const struct ka_diff *diff)
{
    return tol->factor * fmax((double)diff->base_off, (double)tol->off_moved);
}

/* The norm that rounding may leave of a gradient that is zero, or rounding itself. */
static double left_of_zero(const struct ka_tolerance *tol)
{
    return fmax(tol->zero_norm,
                fmin(MOVED_ZERO_TIMES * tol->zero_moved, MOVED_ZERO_MAX * tol->upstream_norm));
}

static enum ka_diff_reason judge(const struct ka_tolerance *tol, const struct ka_measured *m,
                                 struct ka_diff *diff)
{
    if (diff->mask_differs)
        return KA_DIFF_NONFINITE;
    if (m->most_want == 0) {
        diff->vacuous = m->most_got > 0;
        return diff->error <= diff->limit ? KA_DIFF_OK : KA_DIFF_NOT_ZERO;
    }
    diff->vacuous = diff->base_error >= 0.5;
    if ((diff->vacuous || tol->coarse) && diff->error * diff->want_norm <= tol->zero_norm)
        return KA_DIFF_OK;
    if (m->most_got == 0 && !(diff->base_error >= 1))
        return KA_DIFF_ZERO;
    if (!(diff->error <= diff->limit))
        return KA_DIFF_NORM;
    double allowed = off_by_rounding(tol, diff) + tol->off_few + tol->off_share * (double)diff->count;
    return (double)diff->off <= allowed ? KA_DIFF_OK : KA_DIFF_ELEMENTS;
}

/* Whether little more than rounding is left of it where terms cancel, and it is off by no more. Of few
 * elements, or few that are not zero (of a bias, where a single one of dY is not), eager may be right by
 * luck: then by a few units in the last place of the upstream (1 - p, where p is nearly 1). */
static bool is_cancelled(const struct ka_tolerance *tol, double rms, const struct ka_diff *diff)
{
    double rounding = fmax(tol->rounding, diff->base_error), off = diff->error * diff->want_norm;
    double count = rms > 0 ? pow(diff->want_norm / rms, 2) : (double)diff->count;
    if (count < (double)tol->few + .5 && off <= tol->units * tol->upstream_norm)
        return true;
    if (tol->coarse && tol->rounding >= UNSTABLE)
        return diff->error <= CANCELLED_TIMES * tol->rounding;
    return rounding > tol->cancelled && diff->error <= CANCELLED_TIMES * rounding && off <= left_of_zero(tol);
}

/* Shape and dtype are right. */
static enum ka_diff_reason compare_values(const struct ka_tolerance *tol, const struct ka_measured *m,
                                          struct ka_diff *diff)
{
    bool zero = m->most_want == 0;
    diff->want_zero = zero && m->nonfinite_want == 0;
    diff->nothing = zero;
    diff->nonfinite_want = m->nonfinite_want;
    diff->nonfinite_got = m->nonfinite_got;
    diff->mask_differs = m->mask_differs;
    diff->worst = m->worst;
    diff->worst_got = m->worst_got;
    diff->worst_want = m->worst_want;
    diff->want_norm = m->want_norm;
    diff->error = m->error;
    diff->base_error = zero ? m->base_error : fmax(m->base_error, tol->near_error);
    diff->limit = tol->factor * diff->base_error + (zero ? left_of_zero(tol) : tol->floor);
    diff->off = m->off;
    diff->base_off = m->base_off > tol->near_off ? m->base_off : tol->near_off;
    return judge(tol, m, diff);
}

static int check_oracle(const struct ka_tensor *want, const struct ka_tensor *base, struct ka_err *err)
{
    if (!want || want->dtype != KA_F64)
        return ka_fail(err, -EINVAL, "the oracle gave no float64 tensor to compare with");
    if (base && !ka_tensor_same_shape(base, want))
        return ka_fail(err, -EINVAL, "oracle tensor %.80s and its eager baseline have different shapes",
                       want->name);
    return 0;
}

/* How far `got` is from `want`, without a judgement. *usable is false where that says nothing. */
static int measure(const struct ka_tolerance *tol, const struct ka_tensor *got, const struct ka_tensor *want,
                   struct ka_diff *diff, bool *usable, struct ka_err *err)
{
    struct ka_tolerance loose = *tol;
    loose.dtype = got->dtype;
    loose.factor = 0;
    loose.floor = INFINITY;
    loose.zero_norm = INFINITY;
    loose.off_share = 1;
    loose.local = 0;
    int rc = ka_compare(got, want, NULL, &loose, NULL, 0, diff, err);
    *usable = rc == 0 && diff->pass; /* finite in the same places, and of the same shape */
    return rc;
}

static void add_draw(struct ka_tolerance *tol, const struct ka_tensor *made, const struct ka_tensor *exact)
{
    if (tol->draw_count < KA_DRAWS_MAX)
        tol->draws[tol->draw_count++] = (struct ka_draw){made, exact};
}

int ka_tolerance_widen(struct ka_tolerance *tol, const struct ka_tensor *moved, const struct ka_tensor *want,
                       struct ka_err *err)
{
    struct ka_diff diff;
    bool usable = false;
    int rc = moved ? measure(tol, moved, want, &diff, &usable, err) : 0;
    if (!usable)
        return rc;
    add_draw(tol, moved, want);
    tol->zero_moved = fmax(tol->zero_moved, diff.error * (diff.want_zero ? 1 : diff.want_norm));
    tol->off_moved = diff.off > tol->off_moved ? diff.off : tol->off_moved;
    if (!isfinite(diff.error) || diff.want_zero)
        return 0;
    tol->rounding = fmax(tol->rounding, diff.error);
    double moves = fmin(diff.error, tol->coarse ? MOVED_COARSE : MOVED_MAX);
    tol->floor += tol->factor * fmax(0, moves - tol->moved);
    tol->moved = fmax(tol->moved, moves);
    return 0;
}

int ka_tolerance_near(struct ka_tolerance *tol, const struct ka_tensor *base, const struct ka_tensor *want,
                      struct ka_err *err)
{
    struct ka_diff diff;
    bool usable = false;
    int rc = base && want ? measure(tol, base, want, &diff, &usable, err) : 0;
    if (!usable)
        return rc;
    if (isfinite(diff.error) && !diff.want_zero) {
        tol->rounding = fmax(tol->rounding, diff.error);
        tol->near_error = fmax(tol->near_error, fmin(diff.error, MOVED_MAX));
    }
    add_draw(tol, base, want);
    if (diff.off > tol->near_off)
        tol->near_off = diff.off;
    return 0;
}

/* Elements of a part as a tensor of the same axes, all of length 1 but for `axis`. */
static struct ka_tensor view_of(const struct ka_tensor *tensor, const struct ka_part *part, size_t axis)
{
    struct ka_tensor view = *tensor;
    for (size_t i = 0; i < tensor->rank; i++)
        view.dims[i] = i == axis ? part->count : 1;
    view.count = part->count;
    view.data += part->first * ka_dtype_size(tensor->dtype);
    return view;
}

/* What is wrong in a part: the rest of the tensor would hide it. */
static int explain_part(const struct ka_triple *t, const struct ka_tolerance *tol, struct ka_diff *diff,
                        struct ka_err *err)
{
    size_t axis = diff->rank; /* the last one longer than 1 */
    while (axis > 0 && diff->dims[--axis] == 1)
        continue;
    struct ka_tensor got = view_of(t->got, &diff->part, axis), want = view_of(t->want, &diff->part, axis);
    struct ka_diff there = *diff;
    size_t n = diff->rank ? diff->dims[axis] : 1, before = diff->part.first % n;
    memcpy(there.dims, want.dims, sizeof(there.dims));
    there.count = want.count;
    there.error = diff->part.error;
    there.limit = diff->part.limit;
    double norm = ka_norm_of(&(struct ka_term){1, &want}, 1, NULL);
    int rc = ka_patterns_find(&got, &want, tol, norm / sqrt((double)want.count), NULL, 0, &there, err);
    for (size_t i = 0; i < there.pattern_count; i++) {
        struct ka_pattern *p = &diff->patterns[i];
        *p = there.patterns[i];
        if (p->axis < 0)
            continue;
        p->dim = n;
        p->from += before;
        p->to += before;
    }
    diff->pattern_count = there.pattern_count;
    return rc;
}

int ka_compare(const struct ka_tensor *got, const struct ka_tensor *want, const struct ka_tensor *base,
               const struct ka_tolerance *tol, const struct ka_compare_other *others, size_t other_count,
               struct ka_diff *diff, struct ka_err *err)
{
    memset(diff, 0, sizeof(*diff));
    diff->dtype = diff->got_dtype = tol->dtype;
    diff->reason = KA_DIFF_MISSING;
    int rc = check_oracle(want, base, err);
    if (rc)
        return rc;
    diff->rank = want->rank;
    memcpy(diff->dims, want->dims, sizeof(diff->dims));
    diff->count = want->count;
    if (!got || !ka_tensor_same_shape(got, want) || got->dtype != tol->dtype)
        diff->want_zero = ka_tensor_is_zero(want); /* otherwise measured below */
    if (!got)
        return 0;
    diff->got_dtype = got->dtype;
    diff->got_rank = got->rank;
    memcpy(diff->got_dims, got->dims, sizeof(diff->got_dims));
    if (!ka_tensor_same_shape(got, want)) {
        diff->reason = KA_DIFF_SHAPE;
        return 0;
    }
    if (got->dtype != tol->dtype) {
        diff->reason = KA_DIFF_DTYPE;
        return 0;
    }
    struct ka_triple triple = {got, want, base, overflow_at(tol->dtype), tol->atol, tol->rtol};
    struct ka_measured measured;
    rc = ka_measure(&triple, &measured, err);
    if (rc)
        return rc;
    diff->reason = compare_values(tol, &measured, diff);
    bool parts = diff->reason == KA_DIFF_OK && measured.most_want > 0 && !diff->vacuous && tol->local > 0;
    if (parts && !ka_local_judge(&triple, tol, &measured, (size_t)off_by_rounding(tol, diff), diff))
        diff->reason = KA_DIFF_PART;
    free(measured.units);
    if (diff->reason >= KA_DIFF_NORM && is_cancelled(tol, measured.rms, diff)) {
        diff->reason = KA_DIFF_OK;
        diff->vacuous = true;
    }
    diff->pass = diff->reason == KA_DIFF_OK;
    if (diff->reason == KA_DIFF_PART)
        return explain_part(&triple, tol, diff, err);
    return diff->pass ? 0 : ka_patterns_find(got, want, tol, measured.rms, others, other_count, diff, err);
}
