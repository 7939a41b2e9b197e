/* What is measured between tensors: norms, the furthest element, elements off, all in one pass where that can
 * be. Knows no rule.
 *
 * A block is measured by a loop without branches, which sums unscaled squares and assumes that everything is
 * finite. Where its sums say otherwise, or where squares may have overflowed or vanished, the block is
 * measured again element by element, in units of a power of two of its own. Sums carry that power. */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/threads.h"
#include "compare_internal.h"

#define TINY 1e-100
#define SQUARES_MAX 1e290 /* of a block: any number of blocks can be added */
#define EXPONENT_MIN (-1000)
#define UNITS (BLOCK / UNIT)

/* value * 4^exponent: a sum of squares of numbers in units of 2^exponent */
struct sum {
    double value;
    int exponent;
};

static void sum_add(struct sum *sum, double value, int exponent)
{
    if (value == 0)
        return;
    if (sum->value == 0 || exponent == sum->exponent) {
        sum->value += value;
        sum->exponent = exponent;
    } else if (exponent > sum->exponent) {
        sum->value = ldexp(sum->value, 2 * (sum->exponent - exponent)) + value;
        sum->exponent = exponent;
    } else {
        sum->value += ldexp(value, 2 * (exponent - sum->exponent));
    }
}

static double sum_root(const struct sum *sum)
{
    return ldexp(sqrt(sum->value), sum->exponent);
}

/* sqrt(a / b), where neither root need be a number in range. */
static double sum_ratio(const struct sum *a, const struct sum *b)
{
    return ldexp(sqrt(a->value) / sqrt(b->value), a->exponent - b->exponent);
}

/* ---- one part of the work ---- */

struct part {
    const struct ka_triple *t;
    struct ka_unit *units; /* of the whole */
    double (*excess)[2]; /* of each block: the most that |got - want|, |base - want| exceed rtol*|want| by */
    size_t first, end;   /* blocks */
    struct sum want2, got_err2, base_err2;
    size_t nonzero;
    double furthest; /* a sixteenth of the distance, which cannot overflow; negative before the first */
    size_t furthest_at, differs_at;
    struct ka_measured m;
    double threshold, rms; /* for the second pass */
};

struct block {
    size_t first, n;
    double got[BLOCK], want[BLOCK], base[BLOCK]; /* without a base its values are want's */
};

static void load_block(const struct ka_triple *t, size_t number, struct block *b)
{
    b->first = number * BLOCK;
    b->n = t->want->count - b->first < BLOCK ? t->want->count - b->first : BLOCK;
    ka_tensor_load(t->got, b->first, b->n, b->got);
    ka_tensor_load(t->want, b->first, b->n, b->want);
    if (t->base)
        ka_tensor_load(t->base, b->first, b->n, b->base);
    else
        memcpy(b->base, b->want, b->n * sizeof(double));
}

struct sums {
    struct ka_unit units[UNITS];
    double nonzero[LANES], most_want[LANES], most_got[LANES], furthest[LANES], base_excess[LANES];
};

#define SUM(v) ((v[0] + v[1]) + (v[2] + v[3]))
#define MOST(v) larger(larger(v[0], v[1]), larger(v[2], v[3]))

static double add_up(const double *values)
{
    double sum = 0;
    for (size_t i = 0; i < LANES; i++)
        sum += values[i];
    return sum;
}

static double larger(double a, double b)
{
    return a > b ? a : b;
}

static double largest(const double *values)
{
    double most = values[0];
    for (size_t i = 1; i < LANES; i++)
        most = larger(values[i], most);
    return most;
}

static void pad(struct block *b)
{
    for (size_t i = b->n; i % LANES; i++)
        b->got[i] = b->want[i] = b->base[i] = 0;
}

/* The block's sums and maxima, as if all were finite and in range. */
KA_CLONES
static void measure_lanes(const struct block *b, double rtol, struct sums *out)
{
    lanes zero = {0}, nonzero = zero, one = zero + 1.0;
    lanes most_want = zero, most_got = zero, furthest = zero, base_excess = zero;
    for (size_t unit = 0; unit * UNIT < b->n; unit++) {
        lanes want2 = zero, got2 = zero, base2 = zero, got_excess = zero;
        size_t end = (unit + 1) * UNIT < b->n ? (unit + 1) * UNIT : b->n;
        for (size_t i = unit * UNIT; i < end; i += LANES) {
            lanes g, w, e;
            LOAD(g, b->got + i);
            LOAD(w, b->want + i);
            LOAD(e, b->base + i);
            lanes size = SIZE(w), found = SIZE(g), slack = size * rtol;
            g -= w;
            e -= w;
            want2 += w * w;
            got2 += g * g;
            base2 += e * e;
            nonzero += (lanes)((lane_bits)one & (w != zero));
            g = SIZE(g);
            e = SIZE(e);
            RAISE(most_want, size);
            RAISE(most_got, found);
            RAISE(furthest, g);
            g -= slack;
            e -= slack;
            RAISE(got_excess, g);
            RAISE(base_excess, e);
        }
        out->units[unit] = (struct ka_unit){SUM(got2), SUM(want2), SUM(base2), MOST(got_excess)};
    }
    STORE(out->nonzero, nonzero);
    STORE(out->most_want, most_want);
    STORE(out->most_got, most_got);
    STORE(out->furthest, furthest);
    STORE(out->base_excess, base_excess);
}

static struct ka_unit take_units(const struct sums *s, size_t elements, struct ka_unit *to)
{
    struct ka_unit all = {0};
    for (size_t i = 0; i * UNIT < elements; i++) {
        all.got2 += s->units[i].got2;
        all.want2 += s->units[i].want2;
        all.base2 += s->units[i].base2;
        all.excess = larger(s->units[i].excess, all.excess);
        to[i] = s->units[i];
    }
    return all;
}

static bool vanishes(double value)
{
    return value > 0 && value < TINY;
}

/* Take the block into the part, if the assumptions of measure_lanes() hold. */
static bool take_plain(struct part *p, const struct block *b, size_t number)
{
    struct sums s;
    measure_lanes(b, p->t->rtol, &s);
    struct ka_unit all = take_units(&s, b->n, p->units + number * UNITS);
    double want2 = all.want2, got2 = all.got2, base2 = all.base2;
    double most = largest(s.most_want), furthest = largest(s.furthest);
    double base_excess = largest(s.base_excess);
    if (!(want2 + got2 + base2 < SQUARES_MAX) || most >= p->t->overflow || vanishes(most) ||
        (most == 0 && (vanishes(furthest) || vanishes(base_excess))))
        return false;
    sum_add(&p->want2, want2, 0);
    sum_add(&p->got_err2, got2, 0);
    sum_add(&p->base_err2, base2, 0);
    p->nonzero += (size_t)add_up(s.nonzero);
    p->m.most_want = larger(most, p->m.most_want);
    p->m.most_got = larger(largest(s.most_got), p->m.most_got);
    p->excess[number][0] = all.excess;
    p->excess[number][1] = base_excess;
    if (furthest / 16 > p->furthest) {
        size_t i = 0;
        while (i + 1 < b->n && fabs(b->got[i] - b->want[i]) != furthest)
            i++;
        p->furthest = furthest / 16;
        p->furthest_at = b->first + i;
    }
    return true;
}

/* ---- blocks that hold something special */

/* Values beyond the dtype's range are infinite. At its edge rounding decides: either will do, and what is
 * infinite or has no other value proves nothing. */
static void clamp_block(const struct ka_triple *t, struct block *b)
{
    for (size_t i = 0; i < b->n; i++) {
        if (ka_is_at_the_edge(t->overflow, b->got[i], b->want[i], b->base[i]))
            b->want[i] = b->got[i];
        else if (fabs(b->want[i]) >= t->overflow)
            b->want[i] = copysign(INFINITY, b->want[i]);
    }
}

/* A power of two near the largest finite magnitude, where want is finite. */
static int exponent_of(const double *values, const double *more, const double *want, size_t n)
{
    int exponent;
    double most = 0;
    for (size_t i = 0; i < n; i++) {
        most = isfinite(want[i]) && isfinite(values[i]) ? larger(fabs(values[i]), most) : most;
        most = isfinite(want[i]) && isfinite(more[i]) ? larger(fabs(more[i]), most) : most;
    }
    frexp(most, &exponent);
    return most == 0 ? 0 : exponent < EXPONENT_MIN ? EXPONENT_MIN : exponent;
}

/* Squares of the differences that are finite, or with `less` NULL of the values; only where want is
 * finite. */
static void add_squares(struct sum *sum, const double *values, const double *less, const double *want,
                        size_t n)
{
    int exponent = exponent_of(values, less ? less : values, want, n);
    double total = 0;
    for (size_t i = 0; i < n; i++) {
        double v = ldexp(values[i], -exponent) - (less ? ldexp(less[i], -exponent) : 0);
        total += isfinite(want[i]) && isfinite(v) ? v * v : 0;
    }
    sum_add(sum, total, exponent);
}

static void look_at(struct part *p, double got, double want, size_t at)
{
    p->m.nonfinite_want += !isfinite(want);
    p->m.nonfinite_got += !isfinite(got);
    p->m.most_want = isfinite(want) ? larger(fabs(want), p->m.most_want) : p->m.most_want;
    p->m.most_got = isfinite(got) ? larger(fabs(got), p->m.most_got) : p->m.most_got;
    if (!ka_same_nonfinite(got, want) && p->m.mask_differs++ == 0)
        p->differs_at = at;
    if (!isfinite(want))
        return;
    p->nonzero += want != 0;
    double distance = fabs(got / 16 - want / 16);
    if (isfinite(got) && distance > p->furthest) {
        p->furthest = distance;
        p->furthest_at = at;
    }
}

/* Of units in blocks like these squares may overflow or vanish: then the whole alone is judged. */
static void special_units(const struct block *b, double rtol, struct ka_unit *units)
{
    for (size_t i = 0; i < b->n; i++) {
        struct ka_unit *u = &units[i / UNIT];
        if (i % UNIT == 0)
            *u = (struct ka_unit){0};
        if (!isfinite(b->want[i]))
            continue;
        double got = b->got[i] - b->want[i], base = b->base[i] - b->want[i];
        u->got2 += got * got;
        u->want2 += b->want[i] * b->want[i];
        u->base2 += isfinite(base) ? base * base : 0;
        u->excess = larger(fabs(got) - rtol * fabs(b->want[i]), u->excess);
    }
}

static void take_special(struct part *p, struct block *b, size_t number)
{
    clamp_block(p->t, b);
    for (size_t i = 0; i < b->n; i++)
        look_at(p, b->got[i], b->want[i], b->first + i);
    add_squares(&p->want2, b->want, NULL, b->want, b->n);
    add_squares(&p->got_err2, b->got, b->want, b->want, b->n);
    add_squares(&p->base_err2, b->base, b->want, b->want, b->n);
    p->excess[number][0] = p->excess[number][1] = INFINITY;
    special_units(b, p->t->rtol, p->units + number * UNITS);
}

/* Blocks of three tensors in turn are too short a run for the processor to foresee the next. */
static void fetch(const struct ka_tensor *tensor, size_t number)
{
    size_t size = ka_dtype_size(tensor->dtype), left = tensor->count - number * BLOCK;
    const unsigned char *from = tensor->data + number * BLOCK * size;
    for (size_t i = 0; i < (left < BLOCK ? left : BLOCK) * size; i += 64)
        __builtin_prefetch(from + i);
}

static void measure_part(void *arg, size_t part)
{
    struct part *p = (struct part *)arg + part;
    struct block b;
    p->furthest = -1;
    for (size_t number = p->first; number < p->end; number++) {
        load_block(p->t, number, &b);
        pad(&b);
        if (number + 1 < p->end) {
            fetch(p->t->got, number + 1);
            fetch(p->t->want, number + 1);
            if (p->t->base)
                fetch(p->t->base, number + 1);
        }
        if (!take_plain(p, &b, number))
            take_special(p, &b, number);
    }
}

/* ---- elements off ---- */

static size_t count_off(const struct part *p, const double *values, const struct block *b, bool special)
{
    struct ka_tolerance tol = {.atol = p->t->atol, .rtol = p->t->rtol};
    double atol = tol.atol * p->rms;
    size_t off = 0;
    if (special) {
        for (size_t i = 0; i < b->n; i++)
            off += ka_element_off(&tol, p->rms, values[i], b->want[i]);
        return off;
    }
    for (size_t i = 0; i < b->n; i++)
        off += !(fabs(values[i] - b->want[i]) <= atol + tol.rtol * fabs(b->want[i]));
    return off;
}

static void count_part(void *arg, size_t part)
{
    struct part *p = (struct part *)arg + part;
    struct block b;
    for (size_t number = p->first; number < p->end; number++) {
        const double *excess = p->excess[number];
        bool got = !(excess[0] <= p->threshold), base = p->t->base && !(excess[1] <= p->threshold);
        if (!got && !base)
            continue;
        bool special = isinf(excess[0]) || isinf(excess[1]);
        load_block(p->t, number, &b);
        if (special)
            clamp_block(p->t, &b);
        p->m.off += got ? count_off(p, b.got, &b, special) : 0;
        p->m.base_off += base ? count_off(p, b.base, &b, special) : 0;
    }
}

/* ---- the whole ---- */

static void take_part(struct part *all, const struct part *p)
{
    struct ka_measured *m = &all->m;
    sum_add(&all->want2, p->want2.value, p->want2.exponent);
    sum_add(&all->got_err2, p->got_err2.value, p->got_err2.exponent);
    sum_add(&all->base_err2, p->base_err2.value, p->base_err2.exponent);
    all->nonzero += p->nonzero;
    m->most_want = larger(p->m.most_want, m->most_want);
    m->most_got = larger(p->m.most_got, m->most_got);
    m->nonfinite_want += p->m.nonfinite_want;
    m->nonfinite_got += p->m.nonfinite_got;
    if (p->m.mask_differs && m->mask_differs == 0)
        all->differs_at = p->differs_at;
    m->mask_differs += p->m.mask_differs;
    if (p->furthest > all->furthest) {
        all->furthest = p->furthest;
        all->furthest_at = p->furthest_at;
    }
}

/* From sums to norms. */
static void conclude(struct part *all)
{
    struct ka_measured *m = &all->m;
    bool zero = all->want2.value == 0;
    m->want_norm = zero ? 0 : sum_root(&all->want2);
    m->error = zero ? sum_root(&all->got_err2) : sum_ratio(&all->got_err2, &all->want2);
    m->base_error = zero ? sum_root(&all->base_err2) : sum_ratio(&all->base_err2, &all->want2);
    struct sum mean = {all->nonzero ? all->want2.value / (double)all->nonzero : 0, all->want2.exponent};
    m->rms = sum_root(&mean);
    if (!m->mask_differs && all->furthest < 0)
        return;
    m->worst = m->mask_differs ? all->differs_at : all->furthest_at;
    m->worst_got = ka_tensor_at(all->t->got, m->worst);
    m->worst_want = ka_tensor_at(all->t->want, m->worst);
    if (fabs(m->worst_want) >= all->t->overflow)
        m->worst_want = copysign(INFINITY, m->worst_want);
}

/* An excess up to here is within atol, however both were rounded. */
static double threshold_of(const struct ka_triple *t, const struct ka_measured *m)
{
    double atol = t->atol * m->rms;
    return atol - 1e-15 * (atol + t->rtol * m->most_want);
}

int ka_measure(const struct ka_triple *t, struct ka_measured *out, struct ka_err *err)
{
    struct part parts[KA_THREADS_MAX], all = {.t = t, .furthest = -1};
    size_t blocks = t->want->count / BLOCK + (t->want->count % BLOCK != 0);
    size_t count = ka_parts_of(t->want->count);
    double(*excess)[2] = malloc((blocks ? blocks : 1) * sizeof(*excess));
    struct ka_unit *units = malloc((blocks ? blocks : 1) * UNITS * sizeof(*units));
    if (!excess || !units) {
        free(excess);
        free(units);
        return ka_fail(err, -ENOMEM, "no memory to compare %zu elements", t->want->count);
    }
    for (size_t i = 0; i < count; i++)
        parts[i] = (struct part){.t = t,
                                 .units = units,
                                 .excess = excess,
                                 .first = blocks * i / count,
                                 .end = blocks * (i + 1) / count};
    ka_threads_run(count, measure_part, parts);
    for (size_t i = 0; i < count; i++)
        take_part(&all, &parts[i]);
    conclude(&all);
    for (size_t i = 0; i < count; i++) {
        parts[i].rms = all.m.rms;
        parts[i].threshold = threshold_of(t, &all.m);
    }
    ka_threads_run(count, count_part, parts);
    for (size_t i = 0; i < count; i++) {
        all.m.off += parts[i].m.off;
        all.m.base_off += parts[i].m.base_off;
    }
    free(excess);
    all.m.units = units;
    *out = all.m;
    return 0;
}
