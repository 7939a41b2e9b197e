/* The pass rule for one tensor. Knows nothing of cases, shapes of a sweep, or who made the tensors. */
#include "sandbox/compare.h"

#include <errno.h>
#include <math.h>
#include <string.h>

#include "sandbox/compare_internal.h"

#define MOVED_MAX 0.01 /* the most that sensitivity to rounding is believed */
#define BLOCK 2048     /* elements converted at a time: the comparison of a passing tensor takes no heap */
#define COARSE 0.02    /* norm-relative */

struct ka_tolerance ka_tolerance_of(enum ka_dtype dtype)
{
    struct ka_tolerance tol = {.dtype = dtype, .factor = 2};
    switch (dtype) {
    case KA_F64:
        tol.floor = 1e-10, tol.atol = tol.rtol = 1e-7;
        break;
    case KA_F32:
        tol.floor = 1e-5, tol.atol = tol.rtol = 1e-3, tol.off_share = 1e-5;
        break;
    case KA_F16:
        tol.floor = 1e-3, tol.atol = tol.rtol = 1e-2, tol.off_share = 1e-3;
        break;
    case KA_BF16:
        tol.floor = 8e-3, tol.atol = tol.rtol = 5e-2, tol.off_share = 1e-3;
        break;
    case KA_I64:
    case KA_I32:
    case KA_I16:
    case KA_I8:
    case KA_U8:
    case KA_BOOL:
        break;
    }
    return tol;
}

void ka_tolerance_coarsen(struct ka_tolerance *tol)
{
    tol->floor = fmax(tol->floor, COARSE);
    tol->off_share = 1;
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

struct tensors {
    const struct ka_tensor *got, *want, *base; /* base may be NULL */
    const struct ka_tolerance *tol;
};

/* One block of the three tensors as doubles; without a base its values are want's. */
struct block {
    size_t first, n;
    double got[BLOCK], want[BLOCK], base[BLOCK];
};

static bool next_block(const struct tensors *t, struct block *b)
{
    b->first += b->n;
    b->n = t->want->count - b->first < BLOCK ? t->want->count - b->first : BLOCK;
    if (b->n == 0)
        return false;
    ka_tensor_load(t->got, b->first, b->n, b->got);
    ka_tensor_load(t->want, b->first, b->n, b->want);
    double overflow = overflow_at(t->tol->dtype);
    for (size_t i = 0; i < b->n; i++)
        if (fabs(b->want[i]) >= overflow)
            b->want[i] = copysign(INFINITY, b->want[i]);
    if (t->base)
        ka_tensor_load(t->base, b->first, b->n, b->base);
    else
        memcpy(b->base, b->want, b->n * sizeof(double));
    return true;
}

bool ka_same_nonfinite(double got, double want)
{
    if (isfinite(got) || isfinite(want))
        return isfinite(got) && isfinite(want);
    return !(isinf(got) && isinf(want)) || signbit(got) == signbit(want);
}

struct extent {
    double want, got, base; /* largest finite magnitudes */
};

static double larger(double most, double value)
{
    return isfinite(value) && fabs(value) > most ? fabs(value) : most;
}

/* Pass 1: extents, and where values are not finite. */
static struct extent measure_extent(const struct tensors *t, struct ka_diff *diff)
{
    struct extent most = {0};
    struct block b = {0};
    while (next_block(t, &b)) {
        for (size_t i = 0; i < b.n; i++) {
            most.want = larger(most.want, b.want[i]);
            most.got = larger(most.got, b.got[i]);
            most.base = larger(most.base, b.base[i]);
            diff->nonfinite_want += !isfinite(b.want[i]);
            diff->nonfinite_got += !isfinite(b.got[i]);
            if (!ka_same_nonfinite(b.got[i], b.want[i]) && diff->mask_differs++ == 0) {
                diff->worst = b.first + i;
                diff->worst_got = b.got[i];
                diff->worst_want = b.want[i];
            }
        }
    }
    return most;
}

/* Pass 2: norms over the elements that are finite in want, in units of `scale` so that squares neither
 * overflow nor vanish. Returns the root mean square of the non-zero expected elements, in the tensor's own
 * units. */
static double measure_norms(const struct tensors *t, double scale, struct ka_diff *diff)
{
    double want2 = 0, got_err2 = 0, base_err2 = 0, furthest = -1;
    size_t nonzero = 0;
    struct block b = {0};
    while (next_block(t, &b)) {
        for (size_t i = 0; i < b.n; i++) {
            if (!isfinite(b.want[i]))
                continue;
            double w = b.want[i] / scale, g = b.got[i] / scale - w, e = b.base[i] / scale - w;
            want2 += w * w;
            nonzero += w != 0;
            if (isfinite(e)) /* where eager overflows it sets no standard */
                base_err2 += e * e;
            if (!isfinite(g))
                continue; /* the mask differs, which fails on its own */
            got_err2 += g * g;
            if (fabs(g) > furthest && diff->mask_differs == 0) {
                furthest = fabs(g);
                diff->worst = b.first + i;
                diff->worst_got = b.got[i];
                diff->worst_want = b.want[i];
            }
        }
    }
    double norm = want2 > 0 ? sqrt(want2) : 1; /* all zero: errors are norms in units of scale */
    diff->want_norm = want2 > 0 ? scale * norm : 0;
    diff->error = sqrt(got_err2) / norm;
    diff->base_error = sqrt(base_err2) / norm;
    return nonzero ? scale * sqrt(want2 / (double)nonzero) : 0;
}

bool ka_element_off(const struct ka_tolerance *tol, double rms, double got, double want)
{
    if (!isfinite(want))
        return !ka_same_nonfinite(got, want);
    return !(fabs(got - want) <= tol->atol * rms + tol->rtol * fabs(want));
}

/* Pass 3: elements off. */
static void count_off(const struct tensors *t, double rms, struct ka_diff *diff)
{
    struct block b = {0};
    while (next_block(t, &b)) {
        for (size_t i = 0; i < b.n; i++) {
            diff->off += ka_element_off(t->tol, rms, b.got[i], b.want[i]);
            diff->base_off += ka_element_off(t->tol, rms, b.base[i], b.want[i]);
        }
    }
}

static enum ka_diff_reason judge(const struct tensors *t, const struct extent *most, struct ka_diff *diff)
{
    if (diff->mask_differs)
        return KA_DIFF_NONFINITE;
    if (most->want == 0) {
        diff->vacuous = most->got > 0;
        return diff->error <= diff->limit ? KA_DIFF_OK : KA_DIFF_NOT_ZERO;
    }
    diff->vacuous = diff->base_error >= 0.5;
    if (diff->vacuous && diff->error * diff->want_norm <= t->tol->zero_norm)
        return KA_DIFF_OK;
    if (most->got == 0 && !(diff->base_error >= 1))
        return KA_DIFF_ZERO;
    if (!(diff->error <= diff->limit))
        return KA_DIFF_NORM;
    double allowed = t->tol->factor * fmax((double)diff->base_off, (double)t->tol->off_moved);
    allowed += t->tol->off_share * (double)diff->count;
    return (double)diff->off <= allowed ? KA_DIFF_OK : KA_DIFF_ELEMENTS;
}

static enum ka_diff_reason compare_values(const struct tensors *t, struct ka_diff *diff, double *rms)
{
    struct extent most = measure_extent(t, diff);
    double scale = most.want > 0 ? most.want : 1;
    *rms = measure_norms(t, scale, diff);
    if (most.want > 0)
        diff->base_error = fmax(diff->base_error, t->tol->near_error);
    diff->limit = t->tol->factor * diff->base_error + (most.want > 0 ? t->tol->floor : t->tol->zero_norm);
    count_off(t, *rms, diff);
    if (diff->base_off < t->tol->near_off)
        diff->base_off = t->tol->near_off;
    return judge(t, &most, diff);
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
    loose.off_share = 1;
    int rc = ka_compare(got, want, NULL, &loose, NULL, 0, diff, err);
    *usable = rc == 0 && diff->pass; /* finite in the same places, and of the same shape */
    return rc;
}

int ka_tolerance_widen(struct ka_tolerance *tol, const struct ka_tensor *moved, const struct ka_tensor *want,
                       struct ka_err *err)
{
    struct ka_diff diff;
    bool usable = false;
    int rc = moved ? measure(tol, moved, want, &diff, &usable, err) : 0;
    if (!usable)
        return rc;
    tol->off_moved = diff.off;
    if (isfinite(diff.error) && !diff.want_zero)
        tol->floor += tol->factor * fmin(diff.error, MOVED_MAX);
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
    if (isfinite(diff.error) && !diff.want_zero)
        tol->near_error = fmax(tol->near_error, fmin(diff.error, MOVED_MAX));
    if (diff.off > tol->near_off)
        tol->near_off = diff.off;
    return 0;
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
    diff->want_zero = ka_tensor_is_zero(want);
    if (!got)
        return 0;
    diff->got_dtype = got->dtype;
    diff->got_rank = got->rank;
    memcpy(diff->got_dims, got->dims, sizeof(diff->got_dims));
    struct tensors t = {got, want, base, tol};
    double rms = 0;
    if (!ka_tensor_same_shape(got, want))
        diff->reason = KA_DIFF_SHAPE;
    else if (got->dtype != tol->dtype)
        diff->reason = KA_DIFF_DTYPE;
    else
        diff->reason = compare_values(&t, diff, &rms);
    diff->pass = diff->reason == KA_DIFF_OK;
    if (diff->pass || diff->reason == KA_DIFF_SHAPE || diff->reason == KA_DIFF_DTYPE)
        return 0;
    return ka_patterns_find(got, want, tol, rms, others, other_count, diff, err);
}
