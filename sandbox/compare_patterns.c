/* Why a tensor is wrong: tries simple explanations of a failed comparison, the most telling first. Decides
 * nothing. */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/utf8.h"
#include "compare_internal.h"

/* Larger tensors fail without an explanation; the smaller shapes of the sweep give one. */
#define PATTERN_COUNT_MAX ((size_t)1 << 24)

static const size_t TILES[] = {16, 32, 64, 128, 256};

struct search {
    struct ka_diff *diff;
    double *got, *want;        /* values; zero in both where both are not finite */
    unsigned char *off;        /* element outside the tolerance */
    size_t *slices;            /* scratch: one number per index of an axis */
    double fit;                /* an explanation must reproduce got this well, norm-relative */
    struct ka_pattern surplus; /* takes what diff->patterns has no room for */
};

/* An axis seen as [outer, n, inner] over the flat array. */
struct axis {
    int at;
    size_t outer, n, inner;
};

static struct axis axis_of(const struct ka_diff *diff, size_t at)
{
    struct axis a = {.at = (int)at, .outer = 1, .n = diff->dims[at], .inner = 1};
    for (size_t i = 0; i < at; i++)
        a.outer *= diff->dims[i];
    for (size_t i = at + 1; i < diff->rank; i++)
        a.inner *= diff->dims[i];
    return a;
}

static struct ka_pattern *add(struct search *s, enum ka_pattern_kind kind, const struct axis *axis)
{
    struct ka_pattern *p = &s->surplus;
    if (s->diff->pattern_count < KA_PATTERNS_MAX)
        p = &s->diff->patterns[s->diff->pattern_count++];
    *p = (struct ka_pattern){.kind = kind, .axis = axis ? axis->at : -1, .dim = axis ? axis->n : 0};
    return p;
}

/* ---- explanations by value ---- */

struct misfit {
    double error2, norm2;
};

static void misfit_add(struct misfit *m, double got, double explained)
{
    m->error2 += (got - explained) * (got - explained);
    m->norm2 += explained * explained;
}

static bool fits(const struct search *s, const struct misfit *m)
{
    return m->norm2 > 0 && sqrt(m->error2) <= s->fit * sqrt(m->norm2);
}

/* Any single number is some factor times another; few factors are more likely a mistake than a chance. */
static bool is_telling(double scale, double fit)
{
    return fabs(scale + 1) <= fit || fabs(fabs(scale) - 2) <= 2 * fit || fabs(fabs(scale) - 0.5) <= fit / 2;
}

static bool find_factor(struct search *s)
{
    double gw = 0, ww = 0;
    for (size_t i = 0; i < s->diff->count; i++) {
        gw += s->got[i] * s->want[i];
        ww += s->want[i] * s->want[i];
    }
    double scale = gw / ww;
    if (!isfinite(scale) || scale == 0 || (s->diff->count == 1 && !is_telling(scale, s->fit)))
        return false;
    struct misfit m = {0};
    for (size_t i = 0; i < s->diff->count; i++)
        misfit_add(&m, s->got[i], scale * s->want[i]);
    if (!fits(s, &m))
        return false;
    struct ka_pattern *p = add(s, fabs(scale + 1) <= s->fit ? KA_PATTERN_SIGN : KA_PATTERN_FACTOR, NULL);
    p->value = scale;
    p->residual = sqrt(m.error2 / m.norm2);
    return true;
}

/* got's memory holds want with its last two axes exchanged (for square ones: got[i,j] = want[j,i]). */
static bool find_transposed(struct search *s)
{
    const struct ka_diff *d = s->diff;
    if (d->rank < 2 || d->dims[d->rank - 1] < 2 || d->dims[d->rank - 2] < 2)
        return false;
    size_t rows = d->dims[d->rank - 2], cols = d->dims[d->rank - 1];
    struct misfit m = {0};
    for (size_t batch = 0; batch < d->count; batch += rows * cols)
        for (size_t r = 0; r < rows; r++)
            for (size_t c = 0; c < cols; c++)
                misfit_add(&m, s->got[batch + c * rows + r], s->want[batch + r * cols + c]);
    if (!fits(s, &m))
        return false;
    add(s, KA_PATTERN_TRANSPOSED, NULL);
    return true;
}

static bool find_other(struct search *s, const struct ka_tensor *got, const struct ka_compare_other *others,
                       size_t other_count)
{
    for (size_t k = 0; k < other_count; k++) {
        if (!others[k].tensor || !ka_tensor_same_shape(others[k].tensor, got))
            continue;
        struct misfit m = {0};
        for (size_t i = 0; i < s->diff->count; i++)
            misfit_add(&m, s->got[i], ka_tensor_at(others[k].tensor, i));
        if (!fits(s, &m))
            continue;
        struct ka_pattern *p = add(s, KA_PATTERN_OTHER, NULL);
        strncpy(p->other, others[k].name, sizeof(p->other) - 1);
        ka_utf8_clean(p->other);
        return true;
    }
    return false;
}

static bool find_shift(struct search *s, const struct axis *a)
{
    for (int step = -1; step <= 1 && a->n >= 3; step += 2) {
        struct misfit m = {0};
        size_t from = step < 0 ? 1 : 0;
        for (size_t o = 0; o < a->outer; o++)
            for (size_t i = from; i + 1 < a->n + from; i++)
                for (size_t k = 0; k < a->inner; k++) {
                    size_t shifted = step < 0 ? i - 1 : i + 1;
                    misfit_add(&m, s->got[(o * a->n + shifted) * a->inner + k],
                               s->want[(o * a->n + i) * a->inner + k]);
                }
        if (fits(s, &m)) {
            add(s, KA_PATTERN_SHIFTED, a)->value = step;
            return true;
        }
    }
    return false;
}

/* So little that rounding may have added up to it. */
static bool is_small(const struct search *s)
{
    return s->diff->error <= 0.05 && s->diff->error <= 100 * s->diff->limit;
}

/* Each index of the axis has a factor of its own: what multiplies that row (upstream, statistic, scale) is
 * wrong, or was rounded too often. */
static bool find_lines(struct search *s, const struct axis *a)
{
    size_t varied = 0;
    double most = 0;
    struct misfit m = {0};
    for (size_t i = 0; i < a->n && a->n > 1 && a->outer * a->inner > 2; i++) {
        double gw = 0, ww = 0;
        for (size_t o = 0; o < a->outer; o++)
            for (size_t k = 0; k < a->inner; k++) {
                size_t at = (o * a->n + i) * a->inner + k;
                gw += s->got[at] * s->want[at];
                ww += s->want[at] * s->want[at];
            }
        double scale = ww > 0 ? gw / ww : 0;
        varied += ww > 0 && scale != 0 && fabs(scale - 1) > s->fit; /* zeros have patterns of their own */
        most = ww > 0 ? fmax(most, fabs(scale - 1)) : most;
        for (size_t o = 0; o < a->outer; o++)
            for (size_t k = 0; k < a->inner; k++) {
                size_t at = (o * a->n + i) * a->inner + k;
                misfit_add(&m, s->got[at], scale * s->want[at]);
            }
    }
    if (varied < 2 || varied * 2 < a->n || !fits(s, &m))
        return false;
    struct ka_pattern *p = add(s, KA_PATTERN_LINES, a);
    p->hits = varied;
    p->value = is_small(s) ? most : 0;
    return true;
}

static bool find_signs(struct search *s)
{
    size_t flipped = 0;
    struct misfit m = {0};
    for (size_t i = 0; i < s->diff->count; i++) {
        flipped += s->got[i] * s->want[i] < 0;
        misfit_add(&m, fabs(s->got[i]), fabs(s->want[i]));
    }
    if (flipped == 0 || s->diff->count < 4 || !fits(s, &m))
        return false;
    add(s, KA_PATTERN_SIGNS, NULL)->hits = flipped;
    return true;
}

static void find_correlation(struct search *s)
{
    double gw = 0, ww = 0, gg = 0;
    for (size_t i = 0; i < s->diff->count; i++) {
        gw += s->got[i] * s->want[i];
        ww += s->want[i] * s->want[i];
        gg += s->got[i] * s->got[i];
    }
    if (s->diff->count >= 8 && ww > 0 && gg > 0)
        add(s, KA_PATTERN_CORRELATION, NULL)->value = gw / sqrt(ww) / sqrt(gg);
}

/* The error is one number per line along the axis: a term that is broadcast over it is missing or surplus. */
static bool find_same_along(struct search *s, const struct axis *a)
{
    double spread2 = 0, error2 = 0;
    for (size_t o = 0; o < a->outer && a->n >= 3; o++)
        for (size_t k = 0; k < a->inner; k++) {
            size_t line = o * a->n * a->inner + k;
            double mean = 0;
            for (size_t i = 0; i < a->n; i++)
                mean += (s->got[line + i * a->inner] - s->want[line + i * a->inner]) / (double)a->n;
            for (size_t i = 0; i < a->n; i++) {
                double e = s->got[line + i * a->inner] - s->want[line + i * a->inner];
                spread2 += (e - mean) * (e - mean);
                error2 += e * e;
            }
        }
    if (!(error2 > 0) || sqrt(spread2 / error2) > 0.01)
        return false;
    add(s, KA_PATTERN_SAME_ALONG, a);
    return true;
}

/* ---- explanations by place ---- */

static bool find_zero_slices(struct search *s, const struct axis *a)
{
    size_t hits = 0, from = 0, to = 0;
    for (size_t i = 0; i < a->n; i++) {
        bool got_zero = true, want_zero = true;
        for (size_t o = 0; o < a->outer && got_zero; o++)
            for (size_t k = 0; k < a->inner; k++) {
                got_zero = got_zero && s->got[(o * a->n + i) * a->inner + k] == 0;
                want_zero = want_zero && s->want[(o * a->n + i) * a->inner + k] == 0;
            }
        if (!got_zero || want_zero)
            continue;
        from = hits++ ? from : i;
        to = i;
    }
    if (hits == 0 || hits == a->n)
        return false;
    struct ka_pattern *p = add(s, KA_PATTERN_ZERO_SLICES, a);
    p->hits = hits, p->from = from, p->to = to;
    return true;
}

struct span {
    size_t from, to, hits; /* indices of the axis that hold marked elements */
};

static struct span span_of(struct search *s, const struct axis *a, const unsigned char *mask)
{
    memset(s->slices, 0, a->n * sizeof(*s->slices));
    for (size_t o = 0; o < a->outer; o++)
        for (size_t i = 0; i < a->n; i++)
            for (size_t k = 0; k < a->inner; k++)
                s->slices[i] += mask[(o * a->n + i) * a->inner + k];
    struct span span = {.from = a->n};
    for (size_t i = 0; i < a->n; i++) {
        if (!s->slices[i])
            continue;
        span.from = span.hits++ ? span.from : i;
        span.to = i;
    }
    return span;
}

/* The tile size whose last tile begins nearest below `from`; 0 when no last tile covers from..n-1. */
static size_t last_tile(size_t n, size_t from)
{
    size_t best = 0, best_start = 0;
    for (size_t t = 0; t < KA_COUNT(TILES); t++) {
        size_t start = (n - 1) / TILES[t] * TILES[t];
        if (start && start <= from && start > best_start) {
            best = TILES[t];
            best_start = start;
        }
    }
    return best;
}

static bool is_tile(size_t n)
{
    for (size_t t = 0; t < KA_COUNT(TILES); t++)
        if (TILES[t] == n)
            return true;
    return false;
}

static bool find_place(struct search *s, const struct axis *a)
{
    struct span span = span_of(s, a, s->off);
    if (span.hits == 0 || span.hits == a->n || a->n < 2)
        return false;
    enum ka_pattern_kind kind;
    size_t tile = span.to == a->n - 1 ? last_tile(a->n, span.from) : 0;
    if (tile) {
        kind = KA_PATTERN_LAST_TILE;
    } else if (is_tile(span.from) && span.hits * 10 >= (a->n - span.from) * 9) {
        kind = KA_PATTERN_FIRST_TILE;
        tile = span.from;
    } else if ((span.to - span.from + 1) * 2 <= a->n) {
        kind = KA_PATTERN_RANGE;
    } else {
        return false;
    }
    struct ka_pattern *p = add(s, kind, a);
    p->tile = tile, p->from = span.from, p->to = span.to, p->hits = span.hits;
    return true;
}

/* Where the non-finite masks differ; axis -1 when they differ everywhere. */
static void find_nonfinite(struct search *s, const unsigned char *mask)
{
    bool found = false;
    for (size_t at = 0; at < s->diff->rank; at++) {
        struct axis a = axis_of(s->diff, at);
        struct span span = span_of(s, &a, mask);
        if (span.hits == 0 || span.hits == a.n)
            continue;
        struct ka_pattern *p = add(s, KA_PATTERN_NONFINITE, &a);
        p->from = span.from, p->to = span.to, p->hits = s->diff->mask_differs;
        found = true;
    }
    if (!found)
        add(s, KA_PATTERN_NONFINITE, NULL)->hits = s->diff->mask_differs;
}

/* ---- the search ---- */

static void search_values(struct search *s, const struct ka_tensor *got,
                          const struct ka_compare_other *others, size_t other_count)
{
    bool explained = find_factor(s) || find_other(s, got, others, other_count) || find_transposed(s);
    for (size_t at = 0; at < s->diff->rank && !explained; at++) {
        struct axis a = axis_of(s->diff, at);
        explained = find_shift(s, &a) || find_lines(s, &a);
    }
    if (!explained)
        find_signs(s);
}

static void search_places(struct search *s)
{
    for (size_t at = 0; at < s->diff->rank; at++) {
        struct axis a = axis_of(s->diff, at);
        find_zero_slices(s, &a);
        find_place(s, &a);
    }
    if (s->diff->pattern_count)
        return;
    for (size_t at = 0; at < s->diff->rank; at++) {
        struct axis a = axis_of(s->diff, at);
        find_same_along(s, &a);
    }
    if (s->diff->pattern_count == 0 && is_small(s))
        add(s, KA_PATTERN_ROUNDING, NULL);
    if (s->diff->pattern_count == 0)
        find_correlation(s);
}

/* Values, the off mask, and the mask of non-finite differences. */
static void load(struct search *s, const struct ka_tensor *got, const struct ka_tensor *want,
                 const struct ka_tolerance *tol, double rms, unsigned char *nonfinite)
{
    ka_tensor_load(got, 0, got->count, s->got);
    ka_tensor_load(want, 0, want->count, s->want);
    for (size_t i = 0; i < got->count; i++) {
        s->off[i] = ka_element_off(tol, rms, s->got[i], s->want[i]);
        nonfinite[i] = !ka_same_nonfinite(s->got[i], s->want[i]);
        if (!isfinite(s->got[i]) || !isfinite(s->want[i]))
            s->got[i] = s->want[i] = 0;
    }
}

int ka_patterns_find(const struct ka_tensor *got, const struct ka_tensor *want,
                     const struct ka_tolerance *tol, double rms, const struct ka_compare_other *others,
                     size_t other_count, struct ka_diff *diff, struct ka_err *err)
{
    if (diff->count == 0 || diff->count > PATTERN_COUNT_MAX)
        return 0;
    struct search s = {.diff = diff};
    s.fit = fmin(fmin(0.05, fmax(4 * diff->limit, 1e-4)), 0.2 * diff->error);
    s.got = malloc(diff->count * sizeof(double));
    s.want = malloc(diff->count * sizeof(double));
    s.slices = malloc(diff->count * sizeof(size_t)); /* no axis is longer than the tensor */
    s.off = malloc(diff->count);
    unsigned char *nonfinite = malloc(diff->count);
    int rc = 0;
    if (!s.got || !s.want || !s.slices || !s.off || !nonfinite) {
        rc = ka_fail(err, -ENOMEM, "no memory to explain a difference of %zu elements", diff->count);
        goto out;
    }
    load(&s, got, want, tol, rms, nonfinite);
    if (diff->mask_differs)
        find_nonfinite(&s, nonfinite);
    else if (diff->reason != KA_DIFF_ZERO && diff->reason != KA_DIFF_NOT_ZERO)
        search_values(&s, got, others, other_count);
    if (diff->reason != KA_DIFF_ZERO && diff->pattern_count == 0)
        search_places(&s);
out:
    free(s.got);
    free(s.want);
    free(s.slices);
    free(s.off);
    free(nonfinite);
    return rc;
}
