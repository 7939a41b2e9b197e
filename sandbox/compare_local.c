/* The rule for parts of a tensor: each row of the last axis, each block of a row, each element. A norm
 * over the whole says nothing of what is small beside the rest.
 *
 * A part is held to what rounding may leave in it: a share of its own norm, and as much as rounding leaves in
 * its neighbours, with or without it: so many units in the last place of their root mean square, and a few
 * times the error that eager PyTorch has among them. The pass over the whole has left the sums of every unit
 * of 64 elements; they tell which units may hold a part that is off, and only those are read again. */
#include <math.h>
#include <string.h>

#include "compare_internal.h"

#define REACH 2         /* units on either side that are a part's neighbours */
#define NOISE_TIMES 4   /* the error of eager PyTorch: it is one draw, of few elements */
#define TAIL 8          /* one element may be so many times as far off as the root mean square of many, */
#define TAIL_OF 16384   /* in a tensor of so many; the furthest of more lies further out */
#define ZERO 1e-9       /* a part that is smaller beside its neighbours was left over where terms cancel: */
#define ZERO_WHOLE 1e-5 /* of the whole's root mean square: neighbours may be nothing as well */
/* Eager may have them cancel to nothing, and other orders of the sum do not. In attention the terms of a row
 * that sums over one are as many times as large as those of rows that sum over n as the root of n is. */
#define ZERO_TIMES 32
#define LEAST_SPREAD 5.2           /* the least of spread(n) */
#define COLUMN_REACH 16            /* rows on either side that a stray element's column is looked at in */
#define STRETCH 32                 /* units on either side that share a carried sum with a block */
#define STRAY_OF ((size_t)1 << 20) /* one element or stretch may be stray, and one more of so many */

struct local {
    const struct ka_triple *t;
    const struct ka_tolerance *tol;
    const struct ka_measured *m;
    struct ka_diff *diff;
    size_t cols, units;
    size_t next_row; /* short rows before it have been looked at */
    size_t allowed;  /* elements that may be off for which no part is to blame */
    size_t elements; /* off by themselves */
    size_t stray;    /* elements that the noise of their columns explains, and stretches that of their row */
    size_t stretch;  /* the end of the last of these */
    bool wrong;      /* a part is, whatever elements are */
    double tail;     /* see TAIL */
    double worst;    /* error / limit of what diff->part tells */
};

/* Root mean squares among a part's neighbours: of want, and of base's error. */
struct around {
    double scale, noise;
};

/* The norm of `n` elements that are each as far off as one is on average; for few of them, as far as one may
 * be. */
static double spread(size_t n)
{
    return sqrt((double)n) * (1 + (TAIL - 1) / (double)n);
}

static double bare(const struct local *l, const struct around *a)
{
    return l->tol->grain * a->scale + NOISE_TIMES * a->noise;
}

/* Whether what was looked at is enough to say that the tensor is wrong. */
static bool is_decided(const struct local *l)
{
    return l->wrong || l->elements > l->allowed;
}

static size_t unit_of(size_t element)
{
    return element / UNIT;
}

/* Elements from `from` up to `to`. */
struct range {
    size_t from, to;
};

/* The units that hold elements first .. first+n-1, and their neighbours. */
static struct range reach(const struct local *l, size_t first, size_t n)
{
    size_t low = unit_of(first), high = (unit_of(first + n - 1) + REACH + 1) * UNIT;
    return (struct range){low < REACH ? 0 : (low - REACH) * UNIT,
                          high < l->t->want->count ? high : l->t->want->count};
}

static struct around around(const struct local *l, size_t first, size_t n)
{
    struct range among = reach(l, first, n);
    double want2 = 0, base2 = 0;
    for (size_t i = unit_of(among.from); i * UNIT < among.to; i++) {
        want2 += l->m->units[i].want2;
        base2 += l->m->units[i].base2;
    }
    double count = (double)(among.to - among.from);
    return (struct around){sqrt(want2 / count), sqrt(base2 / count)};
}

/* ---- one part, read again */

static double difference2(const struct ka_tensor *a, const struct ka_tensor *b, size_t first, size_t n)
{
    double x[UNIT], y[UNIT], sum = 0;
    for (size_t at = 0; at < n; at += UNIT) {
        size_t some = n - at < UNIT ? n - at : UNIT;
        ka_tensor_load(a, first + at, some, x);
        ka_tensor_load(b, first + at, some, y);
        for (size_t i = 0; i < some; i++)
            sum += isfinite(x[i] - y[i]) ? (x[i] - y[i]) * (x[i] - y[i]) : 0;
    }
    return sum;
}

/* Root mean square of what `made` is off by in a range. */
static double noise_in(const struct ka_draw *draw, struct range among)
{
    size_t count = among.to - among.from;
    return sqrt(difference2(draw->made, draw->exact, among.from, count) / (double)count);
}

/* The other draws of rounding that there are, each in this range. */
static void add_draws(const struct local *l, struct range among, struct around *a)
{
    for (size_t k = 0; k < l->tol->draw_count; k++) {
        const struct ka_draw *draw = &l->tol->draws[k];
        if (ka_tensor_same_shape(draw->made, l->t->want) && ka_tensor_same_shape(draw->exact, l->t->want))
            a->noise = fmax(a->noise, noise_in(draw, among));
    }
}

static size_t nonzero_in(const struct ka_tensor *t, struct range among)
{
    double x[UNIT];
    size_t count = 0;
    for (size_t at = among.from; at < among.to; at += UNIT) {
        size_t some = among.to - at < UNIT ? among.to - at : UNIT;
        ka_tensor_load(t, at, some, x);
        for (size_t i = 0; i < some; i++)
            count += x[i] != 0;
    }
    return count;
}

/* Neighbours that are expected to be zero, as behind a causal mask, say nothing of how far one that is not
 * may be off. */
static void leave_out_zeros(const struct local *l, const struct ka_part *p, struct range among,
                            struct around *a)
{
    if (nonzero_in(l->t->want, (struct range){p->first, p->first + p->count}) == 0)
        return;
    double more = sqrt((double)(among.to - among.from) / (double)nonzero_in(l->t->want, among));
    a->scale *= more;
    a->noise *= more;
}

/* Elements that are off by themselves count in all2 alone. */
struct reading {
    double want2, got2, all2;
    size_t off, worst;
    double over, worst_error, worst_limit; /* of the element that is furthest beyond its limit */
};

static void read_element(const struct local *l, double got, double want, size_t at, double limit,
                         struct reading *r)
{
    double error = fabs(got - want), cap = limit + l->tol->rtol * fabs(want);
    bool off = !(error <= cap);
    r->want2 += want * want;
    r->all2 += error * error;
    r->got2 += off ? 0 : error * error;
    r->off += off;
    if (off && !(error - cap <= r->over)) {
        r->worst = at;
        r->over = error - cap;
        r->worst_error = error;
        r->worst_limit = cap;
    }
}

static struct reading read_part(const struct local *l, const struct ka_part *p, double limit)
{
    double got[UNIT], want[UNIT], base[UNIT];
    struct reading r = {0};
    for (size_t at = 0; at < p->count; at += UNIT) {
        size_t some = p->count - at < UNIT ? p->count - at : UNIT;
        ka_tensor_load(l->t->got, p->first + at, some, got);
        ka_tensor_load(l->t->want, p->first + at, some, want);
        ka_tensor_load(l->t->base ? l->t->base : l->t->want, p->first + at, some, base);
        for (size_t i = 0; i < some; i++)
            if (fabs(want[i]) < l->t->overflow &&
                !ka_is_at_the_edge(l->t->overflow, got[i], want[i], base[i]))
                read_element(l, got[i], want[i], p->first + at + i, limit, &r);
    }
    return r;
}

struct judged {
    struct reading r;
    double error, limit;
};

static bool is_off(const struct judged *j)
{
    return j->r.off > 0 || !(j->error <= j->limit);
}

static struct judged judge_among(const struct local *l, const struct ka_part *p, struct around a)
{
    struct judged j = {.r = read_part(l, p, l->tail * bare(l, &a))};
    if (sqrt(j.r.want2 / (double)p->count) <= ZERO * fmax(a.scale, ZERO_WHOLE * l->m->rms)) {
        a.scale = ZERO_TIMES * fmax(a.scale, l->m->rms);
        j.r = read_part(l, p, l->tail * bare(l, &a));
    }
    j.error = sqrt(j.r.got2);
    j.limit = l->tol->local * sqrt(j.r.want2) + spread(p->count) * bare(l, &a);
    return j;
}

/* Of all that is off the worst is told. */
static void tell(struct local *l, const struct ka_part *p, double error, double limit, double want)
{
    double times = limit > 0 ? error / limit : INFINITY;
    if (!(times > l->worst))
        return;
    l->worst = times;
    l->diff->part = *p;
    l->diff->part.relative = want > 0;
    l->diff->part.error = want > 0 ? error / want : error;
    l->diff->part.limit = want > 0 ? limit / want : limit;
}

/* The error of base in the same column of the rows around. */
static double column_noise(const struct local *l, size_t element)
{
    size_t row = element / l->cols, rows = l->t->want->count / l->cols, count = 0;
    size_t from = row < COLUMN_REACH ? 0 : row - COLUMN_REACH;
    size_t to = row + COLUMN_REACH + 1 < rows ? row + COLUMN_REACH + 1 : rows;
    double sum = 0;
    for (size_t i = from; l->t->base && i < to; i++) {
        size_t at = i * l->cols + element % l->cols;
        double error = ka_tensor_at(l->t->base, at) - ka_tensor_at(l->t->want, at);
        sum += isfinite(error) ? error * error : 0;
        count += isfinite(error);
    }
    return count ? sqrt(sum / (double)count) : 0;
}

/* Where a column is a sum of its own (a scan over rows), rounding may be larger in it than in those beside
 * it, and base, which is one draw of it, near nothing at this element by luck. One element of a part, and few
 * of the whole: what is wrong is not that rare. */
static bool is_stray(struct local *l, const struct reading *r)
{
    if (r->off != 1 || l->stray > l->t->want->count / STRAY_OF ||
        !(r->worst_error <= r->worst_limit + l->tail * NOISE_TIMES * column_noise(l, r->worst)))
        return false;
    l->stray++;
    return true;
}

/* A sum that is carried along a row (a long scan) has one rounding in a whole stretch of it: all draws may be
 * nothing there by luck, and tell beside it what it may be. Few stretches: what is wrong is not that rare. */
static bool is_stray_stretch(struct local *l, const struct ka_part *p, struct around a)
{
    size_t start = p->first - p->first % l->cols, end = start + l->cols, wide = (size_t)STRETCH * UNIT;
    struct range among = {p->first - start < wide ? start : p->first - wide,
                          end - p->first < wide + p->count ? end : p->first + p->count + wide};
    if (p->kind != KA_PART_BLOCK || is_decided(l) ||
        (p->first >= l->stretch && l->stray > l->t->want->count / STRAY_OF))
        return false;
    if (l->t->base)
        a.noise = fmax(a.noise, noise_in(&(struct ka_draw){l->t->base, l->t->want}, among));
    add_draws(l, among, &a);
    struct judged j = judge_among(l, p, a);
    if (is_off(&j))
        return false;
    if (p->first >= l->stretch) {
        l->stray++;
        l->stretch = p->first + wide;
    }
    return true;
}

static void judge_part(struct local *l, enum ka_part_kind kind, size_t first, size_t n)
{
    const struct ka_part part = {.kind = kind, .first = first, .count = n};
    struct around a = around(l, first, n);
    struct judged j = judge_among(l, &part, a);
    if (!is_off(&j))
        return;
    add_draws(l, reach(l, first, n), &a);
    leave_out_zeros(l, &part, reach(l, first, n), &a);
    j = judge_among(l, &part, a);
    if (is_off(&j) && is_stray_stretch(l, &part, a))
        return;
    bool wrong = !(j.error <= j.limit);
    if (!wrong && n <= UNIT && is_stray(l, &j.r))
        return;
    if (!wrong && (j.r.off == 0 || n > UNIT)) /* a long row's elements are those of its blocks */
        return;
    l->wrong = l->wrong || wrong;
    l->elements += n > UNIT ? 0 : j.r.off;
    l->diff->parts_off++;
    if (wrong || (n > 1 && j.r.off * 2 >= n)) {
        tell(l, &part, sqrt(j.r.all2), j.limit, sqrt(j.r.want2));
    } else {
        const struct ka_part one = {.kind = KA_PART_ELEMENT, .first = j.r.worst, .count = 1};
        tell(l, &one, j.r.worst_error, j.r.worst_limit, fabs(ka_tensor_at(l->t->want, one.first)));
    }
}

/* ---- which parts */

/* The rows that a unit holds any of, if they are shorter than it, else its part of each row. */
static void judge_unit(struct local *l, size_t unit)
{
    size_t first = unit * UNIT, left = l->t->want->count - first, end = first + (left < UNIT ? left : UNIT);
    size_t row = first / l->cols;
    if (l->cols < UNIT) {
        row = row > l->next_row ? row : l->next_row;
        for (; row * l->cols < end; row++)
            judge_part(l, KA_PART_ROW, row * l->cols, l->cols);
        l->next_row = row;
        return;
    }
    for (; row * l->cols < end; row++) {
        size_t from = row * l->cols > first ? row * l->cols : first;
        size_t to = (row + 1) * l->cols < end ? (row + 1) * l->cols : end;
        judge_part(l, to - from < l->cols ? KA_PART_BLOCK : KA_PART_ROW, from, to - from);
    }
}

static void judge_units(struct local *l)
{
    for (size_t i = 0; i < l->units; i++) {
        struct around a = around(l, i * UNIT, 1);
        const struct ka_unit *unit = &l->m->units[i];
        double limit = bare(l, &a);
        if (!(unit->excess <= l->tail * limit) || !(sqrt(unit->got2) <= LEAST_SPREAD * limit))
            judge_unit(l, i);
    }
}

/* Rows of several blocks, each a little off. */
static void judge_rows(struct local *l)
{
    for (size_t first = 0; first < l->t->want->count; first += l->cols) {
        double got2 = 0, want2 = 0;
        size_t from = unit_of(first), to = unit_of(first + l->cols - 1) + 1;
        struct around a = around(l, first, l->cols);
        for (size_t i = from; i < to; i++) {
            bool inside = i * UNIT >= first && (i + 1) * UNIT <= first + l->cols;
            got2 += l->m->units[i].got2;
            want2 += inside ? l->m->units[i].want2 : 0;
        }
        if (!(sqrt(got2) <= l->tol->local * sqrt(want2) + spread(l->cols) * bare(l, &a)))
            judge_part(l, KA_PART_ROW, first, l->cols);
    }
}

bool ka_local_judge(const struct ka_triple *t, const struct ka_tolerance *tol, const struct ka_measured *m,
                    size_t allowed, struct ka_diff *diff)
{
    size_t last = diff->rank ? diff->dims[diff->rank - 1] : 1;
    struct local l = {.t = t,
                      .tol = tol,
                      .m = m,
                      .diff = diff,
                      .allowed = allowed,
                      .cols = last > 1 ? last : diff->count, /* without rows the whole is one */
                      .units = (diff->count + UNIT - 1) / UNIT,
                      .tail = TAIL * fmax(1, sqrt(log((double)diff->count) / log(TAIL_OF)))};
    judge_units(&l);
    if (l.cols > UNIT && l.cols < diff->count)
        judge_rows(&l);
    if (is_decided(&l))
        return false;
    diff->parts_off = 0;
    diff->part = (struct ka_part){0};
    return true;
}
