/* The pass rule and the explanations: every wrong gradient here is one that a backward kernel really
 * produces. */
#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "sandbox/compare.h"
#include "tensor_fixture.h"

#define ROWS 50
#define COLS 40
#define COUNT (ROWS * COLS)

/* want holds noise, got starts as want; a test spoils got and compares. */
struct pair {
    double want[COUNT], got[COUNT], base[COUNT];
};

static struct pair *fresh(void)
{
    struct pair *p = ka_calloc(1, sizeof(*p));
    for (size_t i = 0; i < COUNT; i++) {
        p->want[i] = noise(i) * 1e-9; /* small: an absolute tolerance would pass zeros */
        p->got[i] = p->base[i] = p->want[i] * (1 + 1e-7 * noise(i + COUNT));
    }
    return p;
}

static struct ka_diff compare_as(struct pair *p, const char *dtype, const char *shape, size_t count)
{
    struct ka_tensors *got = make_set(dtype, shape, p->got, count),
                      *want = make_set("F64", shape, p->want, count),
                      *base = make_set(dtype, shape, p->base, count);
    struct ka_tolerance tol = ka_tolerance_of(strcmp(dtype, "F64") ? KA_F32 : KA_F64);
    struct ka_diff diff;
    assert_int_equal(ka_compare(ka_tensors_get(got, 0), ka_tensors_get(want, 0), ka_tensors_get(base, 0),
                                &tol, NULL, 0, &diff, NULL),
                     0);
    ka_tensors_free(got);
    ka_tensors_free(want);
    ka_tensors_free(base);
    return diff;
}

static struct ka_diff compare(struct pair *p)
{
    struct ka_diff diff = compare_as(p, "F32", "[50,40]", COUNT);
    free(p);
    return diff;
}

static const struct ka_pattern *pattern(const struct ka_diff *diff, enum ka_pattern_kind kind)
{
    for (size_t i = 0; i < diff->pattern_count; i++)
        if (diff->patterns[i].kind == kind)
            return &diff->patterns[i];
    fail_msg("pattern %d is not among the %zu found", kind, diff->pattern_count);
    return NULL;
}

static void assert_says(const struct ka_diff *diff, enum ka_describe how, const char *words)
{
    struct ka_buf text = {0};
    assert_int_equal(ka_diff_describe(diff, "the gradient of x", how, &text), 0);
    if (!strstr(text.data, words))
        fail_msg("'%s' does not say '%s'", text.data, words);
    ka_buf_free(&text);
}

static bool passes_coarsely(const struct pair *p)
{
    struct ka_tensors *got = make_set("F32", "[50,40]", p->got, COUNT),
                      *want = make_set("F64", "[50,40]", p->want, COUNT);
    struct ka_tolerance tol = ka_tolerance_of(KA_F32);
    struct ka_diff diff;
    ka_tolerance_coarsen(&tol);
    assert_int_equal(
        ka_compare(ka_tensors_get(got, 0), ka_tensors_get(want, 0), NULL, &tol, NULL, 0, &diff, NULL), 0);
    ka_tensors_free(got);
    ka_tensors_free(want);
    return diff.pass;
}

static void compare__coarse__forgives_rounding_and_no_more(void **state)
{
    (void)state;
    struct pair *p = fresh();
    for (size_t i = 0; i < COUNT; i++)
        p->got[i] = p->want[i] * (1 + 5e-3 * noise(i));
    assert_true(passes_coarsely(p));
    p->got[7] = NAN;
    assert_false(passes_coarsely(p));
    for (size_t i = 0; i < COUNT; i++)
        p->got[i] = p->want[i] * 1.1;
    assert_false(passes_coarsely(p));
    for (size_t i = 0; i < COUNT; i++)
        p->got[i] = 0;
    assert_false(passes_coarsely(p));
    free(p);
}

static void compare__right_values__pass(void **state)
{
    (void)state;
    struct ka_diff diff = compare(fresh());
    assert_true(diff.pass);
    assert_false(diff.vacuous);
    assert_true(diff.error < 1e-6 && diff.error > 0);
    assert_int_equal(diff.off, 0);
    assert_says(&diff, KA_DESCRIBE_FULL, "is right");
}

static void compare__error_within_twice_the_baseline__passes_and_beyond_fails(void **state)
{
    (void)state;
    for (int beyond = 0; beyond < 2; beyond++) {
        struct pair *p = fresh();
        for (size_t i = 0; i < COUNT; i++) {
            p->base[i] = p->want[i] * (1 + 3e-4);
            p->got[i] = p->want[i] * (1 - (beyond ? 6.5e-4 : 5.5e-4));
        }
        struct ka_diff diff = compare(p);
        assert_int_equal(diff.reason, beyond ? KA_DIFF_NORM : KA_DIFF_OK);
    }
}

static void compare__tiny_gradient_returned_as_zero__fails(void **state)
{
    (void)state;
    struct pair *p = fresh();
    memset(p->got, 0, sizeof(p->got));
    struct ka_diff diff = compare(p);
    assert_int_equal(diff.reason, KA_DIFF_ZERO);
    assert_says(&diff, KA_DESCRIBE_FULL, "zero everywhere");
}

static void compare__zero_expected__needs_zero(void **state)
{
    (void)state;
    for (int spoiled = 0; spoiled < 2; spoiled++) {
        struct pair *p = fresh();
        memset(p, 0, sizeof(*p));
        p->got[7] = spoiled ? 1e-30 : -0.0;
        struct ka_diff diff = compare(p);
        assert_int_equal(diff.reason, spoiled ? KA_DIFF_NOT_ZERO : KA_DIFF_OK);
    }
}

static void compare__one_wrong_element_in_a_loose_norm__fails_by_the_element_cap(void **state)
{
    (void)state;
    struct pair *p = fresh();
    for (size_t i = 0; i < COUNT; i++)
        p->base[i] *= 1.0009; /* eager is sloppy everywhere, but nowhere off */
    p->got[1234] = p->want[1234] + 2e-11;
    struct ka_diff diff = compare(p);
    assert_int_equal(diff.reason, KA_DIFF_ELEMENTS);
    assert_int_equal(diff.off, 1);
    assert_int_equal(diff.worst, 1234);
    assert_says(&diff, KA_DESCRIBE_FULL, "[30, 34]");
}

static void compare__elements_on_which_eager_fails_too__are_allowed(void **state)
{
    (void)state;
    struct pair *p = fresh();
    for (size_t i = 0; i < 40; i++) {
        p->base[i * 40] += 1e-11;
        p->got[i * 40 + 1] -= 1e-11;
    }
    assert_true(compare(p).pass);
}

static void compare__nan__is_no_wildcard(void **state)
{
    (void)state;
    struct pair *p = fresh();
    for (size_t i = 0; i < ROWS; i++)
        p->got[i * COLS + 39] = NAN;
    struct ka_diff diff = compare(p);
    assert_int_equal(diff.reason, KA_DIFF_NONFINITE);
    assert_int_equal(diff.mask_differs, ROWS);
    const struct ka_pattern *where = pattern(&diff, KA_PATTERN_NONFINITE);
    assert_int_equal(where->axis, 1);
    assert_int_equal(where->from, 39);
    assert_says(&diff, KA_DESCRIBE_FULL, "indices 39 to 39 of axis 1");
}

static void compare__missing_infinity__fails_and_equal_ones_pass(void **state)
{
    (void)state;
    struct pair *p = fresh();
    p->want[3] = p->got[3] = p->base[3] = -INFINITY;
    p->want[4] = p->got[4] = p->base[4] = NAN;
    assert_true(compare_as(p, "F32", "[50,40]", COUNT).pass);
    p->got[3] = INFINITY;
    assert_int_equal(compare_as(p, "F32", "[50,40]", COUNT).reason, KA_DIFF_NONFINITE);
    p->got[3] = 0;
    assert_int_equal(compare(p).reason, KA_DIFF_NONFINITE);
}

static void compare__expected_value_beyond_the_dtype__counts_as_infinite(void **state)
{
    (void)state;
    struct pair *p = fresh();
    p->want[5] = 1e39;
    p->got[5] = p->base[5] = INFINITY;
    assert_true(compare(p).pass);
}

static void compare__at_the_edge_of_the_dtype__infinite_and_finite_will_both_do(void **state)
{
    (void)state;
    const double most = 0x1.fffffep127;
    const struct {
        double want, got;
        bool pass;
    } edges[] = {{-0.99 * most, NAN, true},    {-0.99 * most, -INFINITY, true}, {1.1 * most, most, true},
                 {1.1 * most, INFINITY, true}, {1.1 * most, -most, false},      {1.1 * most, 1, false},
                 {0.45 * most, NAN, false},    {2.2 * most, most, false},       {2.2 * most, INFINITY, true}};
    for (size_t i = 0; i < KA_COUNT(edges); i++) {
        struct pair *p = fresh();
        p->want[5] = edges[i].want;
        p->got[5] = p->base[5] = edges[i].got;
        struct ka_diff diff = compare_as(p, "F32", "[50,40]", COUNT);
        assert_int_equal(diff.reason, edges[i].pass ? KA_DIFF_OK : KA_DIFF_NONFINITE);
        free(p);
    }
}

static void compare__terms_that_overflow_in_float16__may_where_eager_s_do(void **state)
{
    (void)state;
    for (int eager = 0; eager < 2; eager++) {
        struct pair *p = fresh();
        for (size_t i = 0; i < COUNT; i++)
            p->want[i] = p->got[i] = p->base[i] = (double)(i % 8) + 1; /* exact */
        p->got[5] = NAN;
        p->base[5] = eager ? INFINITY : p->want[5];
        struct ka_tensors *got = make_set("F16", "[50,40]", p->got, COUNT),
                          *want = make_set("F64", "[50,40]", p->want, COUNT),
                          *base = make_set("F16", "[50,40]", p->base, COUNT);
        struct ka_tolerance tol = ka_tolerance_of(KA_F16);
        struct ka_diff diff;
        assert_int_equal(ka_compare(ka_tensors_get(got, 0), ka_tensors_get(want, 0), ka_tensors_get(base, 0),
                                    &tol, NULL, 0, &diff, NULL),
                         0);
        assert_int_equal(diff.reason, eager ? KA_DIFF_OK : KA_DIFF_NONFINITE);
        ka_tensors_free(got);
        ka_tensors_free(want);
        ka_tensors_free(base);
        free(p);
    }
}

/* `p->got` against `p->want`, where inputs moved by rounding give `factor` times that. */
static struct ka_diff compare_moved(struct pair *p, double factor, bool coarse)
{
    double moved[COUNT];
    for (size_t i = 0; i < COUNT; i++)
        moved[i] = factor * p->want[i];
    struct ka_tensors *got = make_set("F32", "[50,40]", p->got, COUNT),
                      *want = make_set("F64", "[50,40]", p->want, COUNT),
                      *near = make_set("F64", "[50,40]", moved, COUNT);
    struct ka_tolerance tol = ka_tolerance_of(KA_F32);
    struct ka_diff diff;
    if (coarse)
        ka_tolerance_coarsen(&tol);
    assert_int_equal(ka_tolerance_widen(&tol, ka_tensors_get(near, 0), ka_tensors_get(want, 0), NULL), 0);
    assert_int_equal(
        ka_compare(ka_tensors_get(got, 0), ka_tensors_get(want, 0), NULL, &tol, NULL, 0, &diff, NULL), 0);
    ka_tensors_free(got);
    ka_tensors_free(want);
    ka_tensors_free(near);
    free(p);
    return diff;
}

static void compare__of_several_draws_of_moved_inputs__the_largest_counts(void **state)
{
    (void)state;
    static const double factors[] = {1 + 1e-4, 1 + 3e-4, 1 + 1e-4};
    struct pair *p = fresh();
    struct ka_tensors *want = make_set("F64", "[50,40]", p->want, COUNT);
    struct ka_tolerance tol = ka_tolerance_of(KA_F32);
    double floor = tol.floor;
    for (size_t draw = 0; draw < KA_COUNT(factors); draw++) {
        double moved[COUNT];
        for (size_t i = 0; i < COUNT; i++)
            moved[i] = factors[draw] * p->want[i];
        struct ka_tensors *near = make_set("F64", "[50,40]", moved, COUNT);
        assert_int_equal(ka_tolerance_widen(&tol, ka_tensors_get(near, 0), ka_tensors_get(want, 0), NULL), 0);
        ka_tensors_free(near);
    }
    assert_true(fabs(tol.floor - floor - tol.factor * 3e-4) < 1e-12);
    ka_tensors_free(want);
    free(p);
}

/* Whether `kept` may be left of a gradient that is `size` everywhere, nothing or what cancelling left, and
 * that rounding of the inputs moves by `moved`. */
static bool may_be_left(double size, double moved, double upstream_norm, double kept)
{
    double exact[COUNT], near[COUNT], rounded[COUNT] = {0}, found[COUNT] = {0};
    for (size_t i = 0; i < COUNT; i++)
        near[i] = exact[i] = size;
    near[3] += moved;
    rounded[7] = 1e6 * size;
    found[5] = kept;
    struct ka_tensors *want = make_set("F64", "[50,40]", exact, COUNT),
                      *other = make_set("F64", "[50,40]", near, COUNT),
                      *base = make_set("F32", "[50,40]", rounded, COUNT),
                      *got = make_set("F32", "[50,40]", found, COUNT), *all[] = {want, other, base, got};
    struct ka_tolerance tol = ka_tolerance_of(KA_F32);
    struct ka_diff diff;
    tol.upstream_norm = upstream_norm;
    assert_int_equal(ka_tolerance_widen(&tol, ka_tensors_get(other, 0), ka_tensors_get(want, 0), NULL), 0);
    assert_int_equal(ka_compare(ka_tensors_get(got, 0), ka_tensors_get(want, 0), ka_tensors_get(base, 0),
                                &tol, NULL, 0, &diff, NULL),
                     0);
    assert_true(!diff.pass || kept == 0 || diff.vacuous);
    for (size_t i = 0; i < KA_COUNT(all); i++)
        ka_tensors_free(all[i]);
    return diff.pass;
}

static void compare__zero_expected__may_keep_what_rounding_of_the_inputs_leaves(void **state)
{
    (void)state;
    static const double sizes[] = {0, 1e-18};
    for (size_t i = 0; i < KA_COUNT(sizes); i++) {
        assert_true(may_be_left(sizes[i], 0.04, 30, 0.158));
        assert_false(may_be_left(sizes[i], 0.04, 30, 0.162)); /* four times what moves it */
        assert_true(may_be_left(sizes[i], 0.04, 2, 0.099));
        assert_false(may_be_left(sizes[i], 0.04, 2, 0.101)); /* a twentieth of the upstream */
        assert_false(may_be_left(sizes[i], 0.04, 0, 1e-8));  /* of which nothing is known */
        assert_false(may_be_left(sizes[i], 0, 30, 1e-8));
    }
}

static void compare__what_rounding_of_the_inputs_turns_over__proves_nothing(void **state)
{
    (void)state;
    for (int coarse = 0; coarse < 2; coarse++) {
        struct pair *p = fresh();
        for (size_t i = 0; i < COUNT; i++)
            p->got[i] = -0.5 * p->want[i];
        struct ka_diff diff = compare_moved(p, 0.4, coarse);
        assert_int_equal(diff.pass, coarse);
        assert_int_equal(diff.vacuous, coarse);
    }
}

static void compare__noise_that_no_dtype_resolves__passes_as_vacuous(void **state)
{
    (void)state;
    struct pair *p = fresh();
    for (size_t i = 0; i < COUNT; i++) {
        p->want[i] = 1e-17 * noise(i);
        p->base[i] = 1e-8 * noise(i + COUNT);
        p->got[i] = 1e-8 * noise(i + 2 * COUNT);
    }
    struct ka_diff diff = compare_as(p, "F32", "[50,40]", COUNT);
    assert_true(diff.pass && diff.vacuous);
    memset(p->got, 0, sizeof(p->got));
    assert_true(compare_as(p, "F32", "[50,40]", COUNT).pass);
    for (size_t i = 0; i < COUNT; i++)
        p->got[i] = 1e-7 * noise(i);
    assert_false(compare(p).pass);
}

static void compare__extreme_magnitudes__neither_overflow_nor_vanish(void **state)
{
    (void)state;
    const double scales[] = {1e250, 1e-250};
    for (size_t k = 0; k < KA_COUNT(scales); k++) {
        struct pair *p = fresh();
        for (size_t i = 0; i < COUNT; i++)
            p->base[i] = p->got[i] = p->want[i] *= scales[k];
        assert_true(compare_as(p, "F64", "[50,40]", COUNT).pass);
        for (size_t i = 0; i < COUNT; i++)
            p->got[i] *= 1.01;
        struct ka_diff diff = compare_as(p, "F64", "[50,40]", COUNT);
        free(p);
        assert_int_equal(diff.reason, KA_DIFF_NORM);
        assert_true(fabs(diff.error - 0.01) < 1e-6);
    }
}

static void compare__wrong_shape_dtype_or_absence__is_named(void **state)
{
    (void)state;
    struct pair *p = fresh();
    struct ka_tensors *want = make_set("F64", "[4,2]", p->want, 8),
                      *turned = make_set("F32", "[2,4]", p->got, 8),
                      *wide = make_set("F64", "[4,2]", p->got, 8);
    struct ka_tolerance tol = ka_tolerance_of(KA_F32);
    struct ka_diff diff;
    assert_int_equal(
        ka_compare(ka_tensors_get(turned, 0), ka_tensors_get(want, 0), NULL, &tol, NULL, 0, &diff, NULL), 0);
    assert_int_equal(diff.reason, KA_DIFF_SHAPE);
    assert_says(&diff, KA_DESCRIBE_FULL, "shape [2, 4], expected [4, 2]");
    assert_int_equal(
        ka_compare(ka_tensors_get(wide, 0), ka_tensors_get(want, 0), NULL, &tol, NULL, 0, &diff, NULL), 0);
    assert_int_equal(diff.reason, KA_DIFF_DTYPE);
    assert_says(&diff, KA_DESCRIBE_FULL, "dtype float64, expected float32");
    assert_int_equal(ka_compare(NULL, ka_tensors_get(want, 0), NULL, &tol, NULL, 0, &diff, NULL), 0);
    assert_int_equal(diff.reason, KA_DIFF_MISSING);
    assert_false(diff.pass || diff.want_zero);
    double zeros[2] = {0, -0.0};
    struct ka_tensors *zero = make_set("F64", "[2]", zeros, 2);
    assert_int_equal(ka_compare(NULL, ka_tensors_get(zero, 0), NULL, &tol, NULL, 0, &diff, NULL), 0);
    assert_true(diff.want_zero && !diff.pass);
    ka_tensors_free(zero);
    assert_int_equal(ka_compare(NULL, ka_tensors_get(turned, 0), NULL, &tol, NULL, 0, &diff, NULL), -EINVAL);
    ka_tensors_free(want);
    ka_tensors_free(turned);
    ka_tensors_free(wide);
    free(p);
}

static struct ka_diff scaled(double factor)
{
    struct pair *p = fresh();
    for (size_t i = 0; i < COUNT; i++)
        p->got[i] = p->want[i] * factor;
    return compare(p);
}

static void patterns__constant_factor__is_found_and_interpreted(void **state)
{
    (void)state;
    const struct {
        double factor;
        const char *words;
    } rows[] = {{2, "accumulated twice"},
                {1.01, "1.01 times"},
                {1.4426950408889634, "log2(e)"},
                {1.0 / 40, "size of axis 1"}};
    for (size_t i = 0; i < KA_COUNT(rows); i++) {
        struct ka_diff diff = scaled(rows[i].factor);
        assert_false(diff.pass);
        assert_true(fabs(pattern(&diff, KA_PATTERN_FACTOR)->value - rows[i].factor) < 1e-5);
        assert_says(&diff, KA_DESCRIBE_FULL, rows[i].words);
    }
    struct ka_diff flipped = scaled(-1);
    pattern(&flipped, KA_PATTERN_SIGN);
    assert_says(&flipped, KA_DESCRIBE_HIDDEN, "sign is flipped");
}

static void patterns__transposed__is_found_for_square_and_other_shapes(void **state)
{
    (void)state;
    struct pair *p = fresh();
    for (size_t r = 0; r < ROWS; r++)
        for (size_t c = 0; c < COLS; c++)
            p->got[c * ROWS + r] = p->want[r * COLS + c];
    struct ka_diff diff = compare(p);
    pattern(&diff, KA_PATTERN_TRANSPOSED);
    p = fresh();
    for (size_t b = 0; b < 5; b++)
        for (size_t r = 0; r < 20; r++)
            for (size_t c = 0; c < 20; c++)
                p->got[b * 400 + c * 20 + r] = p->want[b * 400 + r * 20 + c];
    diff = compare_as(p, "F32", "[5,20,20]", COUNT);
    free(p);
    pattern(&diff, KA_PATTERN_TRANSPOSED);
}

static void patterns__swapped_gradients__name_the_other(void **state)
{
    (void)state;
    struct pair *p = fresh(), *q = fresh();
    for (size_t i = 0; i < COUNT; i++)
        q->want[i] = noise(i + 5 * COUNT), p->got[i] = (float)q->want[i];
    struct ka_tensors *got = make_set("F32", "[2000]", p->got, COUNT),
                      *want = make_set("F64", "[2000]", p->want, COUNT),
                      *other = make_set("F64", "[2000]", q->want, COUNT);
    struct ka_compare_other others[] = {{"b", NULL}, {"w", ka_tensors_get(other, 0)}};
    struct ka_tolerance tol = ka_tolerance_of(KA_F32);
    struct ka_diff diff;
    assert_int_equal(
        ka_compare(ka_tensors_get(got, 0), ka_tensors_get(want, 0), NULL, &tol, others, 2, &diff, NULL), 0);
    assert_string_equal(pattern(&diff, KA_PATTERN_OTHER)->other, "w");
    assert_says(&diff, KA_DESCRIBE_HIDDEN, "expected value of w");
    ka_tensors_free(got);
    ka_tensors_free(want);
    ka_tensors_free(other);
    free(p);
    free(q);
}

static void patterns__shift_by_one__is_found_with_its_axis_and_direction(void **state)
{
    (void)state;
    struct pair *p = fresh();
    for (size_t i = 0; i < COUNT; i++)
        p->got[i] = i % COLS ? p->want[i - 1] : 0;
    struct ka_diff diff = compare(p);
    assert_int_equal(pattern(&diff, KA_PATTERN_SHIFTED)->axis, 1);
    assert_true(pattern(&diff, KA_PATTERN_SHIFTED)->value == 1);
    p = fresh();
    for (size_t i = 0; i < COUNT; i++)
        p->got[i] = i + COLS < COUNT ? p->want[i + COLS] : 0;
    diff = compare(p);
    assert_int_equal(pattern(&diff, KA_PATTERN_SHIFTED)->axis, 0);
    assert_true(pattern(&diff, KA_PATTERN_SHIFTED)->value == -1);
}

/* got is zero where lo <= index < hi along an axis. */
static struct ka_diff cut(size_t axis, size_t lo, size_t hi, double value)
{
    struct pair *p = fresh();
    for (size_t i = 0; i < COUNT; i++) {
        size_t at = axis ? i % COLS : i / COLS;
        p->got[i] = at >= lo && at < hi ? value * noise(i + 9 * COUNT) : p->got[i];
    }
    return compare(p);
}

static void patterns__last_tile_wrong__is_found_on_its_axis(void **state)
{
    (void)state;
    struct ka_diff diff = cut(0, 48, 50, 1e-9);
    const struct ka_pattern *p = pattern(&diff, KA_PATTERN_LAST_TILE);
    assert_int_equal(p->axis, 0);
    assert_int_equal(p->tile, 16);
    assert_says(&diff, KA_DESCRIBE_FULL, "48 to 49 of axis 0 (size 50)");
    diff = cut(1, 32, 40, 1e-9);
    assert_int_equal(pattern(&diff, KA_PATTERN_LAST_TILE)->axis, 1);
    assert_int_equal(pattern(&diff, KA_PATTERN_LAST_TILE)->tile, 16);
}

static void patterns__only_first_tile_right__is_found(void **state)
{
    (void)state;
    struct ka_diff diff = cut(0, 16, 50, 1e-9);
    assert_int_equal(pattern(&diff, KA_PATTERN_FIRST_TILE)->tile, 16);
    assert_says(&diff, KA_DESCRIBE_HIDDEN, "only the first tile is right");
}

static void patterns__zero_columns__are_counted(void **state)
{
    (void)state;
    struct ka_diff diff = cut(1, 5, 8, 0);
    const struct ka_pattern *p = pattern(&diff, KA_PATTERN_ZERO_SLICES);
    assert_int_equal(p->axis, 1);
    assert_int_equal(p->hits, 3);
    assert_int_equal(p->from, 5);
    assert_int_equal(pattern(&diff, KA_PATTERN_RANGE)->to, 7);
}

static void patterns__missing_row_term__does_not_vary_along_the_axis(void **state)
{
    (void)state;
    struct pair *p = fresh();
    for (size_t i = 0; i < COUNT; i++)
        p->got[i] += 1e-9 * noise(i / COLS + 77);
    struct ka_diff diff = compare(p);
    assert_int_equal(pattern(&diff, KA_PATTERN_SAME_ALONG)->axis, 1);
    assert_int_equal(diff.pattern_count, 1);
}

static void patterns__one_element__has_only_factors_that_tell(void **state)
{
    (void)state;
    static const struct {
        double factor;
        size_t patterns;
    } rows[] = {{2, 1}, {-1, 1}, {0.5, 1}, {1.7, 0}};
    for (size_t r = 0; r < KA_COUNT(rows); r++) {
        struct pair *p = fresh();
        p->got[0] = p->want[0] * rows[r].factor;
        struct ka_diff diff = compare_as(p, "F32", "[1]", 1);
        free(p);
        assert_false(diff.pass);
        assert_int_equal(diff.pattern_count, rows[r].patterns);
    }
}

static void patterns__a_factor_for_each_row__names_the_axis(void **state)
{
    (void)state;
    struct pair *p = fresh();
    for (size_t i = 0; i < COUNT; i++)
        p->got[i] = p->want[i] * (1 + noise(i / COLS + 7));
    struct ka_diff diff = compare(p);
    assert_int_equal(pattern(&diff, KA_PATTERN_LINES)->axis, 0);
    assert_says(&diff, KA_DESCRIBE_FULL,
                "Along axis 0 every index is right up to a factor of its own: what multiplies that row");
}

static void patterns__a_factor_for_each_row_that_is_nearly_1__may_be_rounding(void **state)
{
    (void)state;
    struct pair *p = fresh();
    for (size_t i = 0; i < COUNT; i++)
        p->got[i] = p->want[i] * (1 + 2e-5 * noise(i / COLS + 7));
    struct ka_diff diff = compare(p);
    assert_int_equal(pattern(&diff, KA_PATTERN_LINES)->axis, 0);
    assert_says(&diff, KA_DESCRIBE_FULL, "a factor of its own, which is within 2e-05 of 1: rounding that");
    assert_says(&diff, KA_DESCRIBE_HIDDEN, "a factor of its own, which is close to 1: rounding that");
}

static void patterns__lost_signs__are_counted(void **state)
{
    (void)state;
    struct pair *p = fresh();
    size_t negative = 0;
    for (size_t i = 0; i < COUNT; i++) {
        negative += p->want[i] < 0;
        p->got[i] = fabs(p->want[i]);
    }
    struct ka_diff diff = compare(p);
    assert_int_equal(pattern(&diff, KA_PATTERN_SIGNS)->hits, negative);
    assert_says(&diff, KA_DESCRIBE_FULL, "All magnitudes are right");
    assert_says(&diff, KA_DESCRIBE_HIDDEN, "signs are wrong:");
}

static void patterns__no_explanation__says_how_near_it_is(void **state)
{
    (void)state;
    static const struct {
        double share;
        const char *words;
    } rows[] = {{0.8, "mostly the right way"}, {-0.8, "mostly the opposite way"}, {0, "little to do with"}};
    for (size_t r = 0; r < KA_COUNT(rows); r++) {
        struct pair *p = fresh();
        for (size_t i = 0; i < COUNT; i++)
            p->got[i] = rows[r].share * p->want[i] + 0.5e-9 * noise(i + 3 * COUNT);
        struct ka_diff diff = compare(p);
        assert_says(&diff, KA_DESCRIBE_FULL, rows[r].words);
    }
}

static void patterns__factor_with_two_meanings__says_both(void **state)
{
    (void)state;
    struct pair *p = fresh();
    for (size_t i = 0; i < COUNT; i++)
        p->got[i] = 2 * p->want[i];
    struct ka_diff diff = compare_as(p, "F32", "[500,4]", COUNT);
    free(p);
    assert_says(&diff, KA_DESCRIBE_FULL, "accumulated twice");
    assert_says(&diff, KA_DESCRIBE_FULL, "; or the root of the size of axis 1");
}

static void patterns__narrow_accumulation__looks_like_rounding(void **state)
{
    (void)state;
    struct pair *p = fresh();
    for (size_t i = 0; i < COUNT; i++)
        p->got[i] = p->want[i] * (1 + 5e-4 * noise(i + 3 * COUNT));
    struct ka_diff diff = compare(p);
    assert_int_equal(diff.reason, KA_DIFF_NORM);
    pattern(&diff, KA_PATTERN_ROUNDING);
}

static void describe__hidden_shape__tells_no_size_index_or_value(void **state)
{
    (void)state;
    struct ka_diff diffs[] = {scaled(1.0 / 40), cut(0, 48, 50, 1e-9), cut(0, 16, 50, 1e-9), cut(1, 5, 8, 0),
                              scaled(NAN)};
    for (size_t i = 0; i < KA_COUNT(diffs); i++) {
        diffs[i].error = diffs[i].base_error = diffs[i].limit = 0;
        struct ka_buf text = {0};
        assert_int_equal(ka_diff_describe(&diffs[i], "the gradient of x", KA_DESCRIBE_HIDDEN, &text), 0);
        for (const char *c = text.data; *c; c++)
            if (*c >= '2' && *c <= '9')
                fail_msg("'%s' tells a number", text.data);
        ka_buf_free(&text);
    }
}

static void json__nonfinite_values__are_text(void **state)
{
    (void)state;
    struct pair *p = fresh();
    p->got[0] = NAN;
    struct ka_diff diff = compare(p);
    json_t *o = ka_diff_json(&diff);
    assert_string_equal(json_string_value(json_object_get(o, "worst_found")), "nan");
    assert_string_equal(json_string_value(json_object_get(o, "reason")), "nonfinite");
    assert_int_equal(json_array_size(json_object_get(o, "patterns")), 2);
    json_decref(o);
}

static void compare__elements_that_rounding_moves_too__are_allowed(void **state)
{
    (void)state;
    struct pair *p = fresh();
    p->got[7] = -40 * p->got[7]; /* a kink crossed: one element, its whole size */
    struct ka_tensors *got = make_set("F32", "[50,40]", p->got, COUNT),
                      *want = make_set("F64", "[50,40]", p->want, COUNT);
    struct ka_tolerance tol = ka_tolerance_of(KA_F32);
    struct ka_diff strict, wide, other;
    assert_int_equal(
        ka_compare(ka_tensors_get(got, 0), ka_tensors_get(want, 0), NULL, &tol, NULL, 0, &strict, NULL), 0);
    assert_false(strict.pass);
    double moved[COUNT];
    memcpy(moved, p->want, sizeof(moved));
    moved[9] = -1.01 * moved[9] - 0.5 * moved[7];
    struct ka_tensors *near = make_set("F64", "[50,40]", moved, COUNT);
    assert_int_equal(ka_tolerance_widen(&tol, ka_tensors_get(near, 0), ka_tensors_get(want, 0), NULL), 0);
    assert_true(tol.off_moved == 1 && tol.floor > 1e-3 && tol.floor < 0.05);
    p->got[7] = -p->got[7] / 40 * 0.98;
    struct ka_tensors *close = make_set("F32", "[50,40]", p->got, COUNT);
    assert_int_equal(
        ka_compare(ka_tensors_get(close, 0), ka_tensors_get(want, 0), NULL, &tol, NULL, 0, &wide, NULL), 0);
    assert_true(wide.pass);
    for (size_t i = 0; i < COUNT; i++) /* but not a wrong factor everywhere */
        p->got[i] = p->want[i] * 1.05;
    struct ka_tensors *scaled = make_set("F32", "[50,40]", p->got, COUNT);
    assert_int_equal(
        ka_compare(ka_tensors_get(scaled, 0), ka_tensors_get(want, 0), NULL, &tol, NULL, 0, &other, NULL), 0);
    assert_false(other.pass);
    struct ka_tensors *all[] = {got, want, near, close, scaled};
    for (size_t i = 0; i < KA_COUNT(all); i++)
        ka_tensors_free(all[i]);
    free(p);
}

static void compare__what_rounding_moves_by_much__may_be_off_by_more_where_it_is_judged_coarsely(void **state)
{
    (void)state;
    for (int coarse = 0; coarse < 2; coarse++) {
        struct pair *p = fresh();
        for (size_t i = 0; i < COUNT; i++)
            p->got[i] = 1.15 * p->want[i];
        assert_int_equal(compare_moved(p, 1.2, coarse).pass, coarse);
    }
}

static void compare__eager_right_by_luck__other_draws_of_its_rounding_count(void **state)
{
    (void)state;
    double one = 1, found = 1 + 6e-5, near = 2, near_found = 2 + 8e-5;
    struct ka_tensors *want = make_set("F64", "[1]", &one, 1), *got = make_set("F32", "[1]", &found, 1),
                      *base = make_set("F32", "[1]", &one, 1), *close = make_set("F64", "[1]", &near, 1),
                      *rounded = make_set("F32", "[1]", &near_found, 1);
    struct ka_tolerance tol = ka_tolerance_of(KA_F32);
    struct ka_diff lucky, fair, wrong;
    const struct ka_tensor *w = ka_tensors_get(want, 0), *b = ka_tensors_get(base, 0);
    assert_int_equal(ka_compare(ka_tensors_get(got, 0), w, b, &tol, NULL, 0, &lucky, NULL), 0);
    assert_false(lucky.pass);
    assert_int_equal(ka_tolerance_near(&tol, ka_tensors_get(rounded, 0), ka_tensors_get(close, 0), NULL), 0);
    assert_int_equal(ka_tolerance_near(&tol, b, w, NULL), 0); /* a lucky draw takes nothing away */
    assert_int_equal(ka_compare(ka_tensors_get(got, 0), w, b, &tol, NULL, 0, &fair, NULL), 0);
    assert_true(fair.pass && fair.base_error > 3e-5 && fair.base_error < 5e-5);
    assert_int_equal(ka_compare(ka_tensors_get(rounded, 0), w, b, &tol, NULL, 0, &wrong, NULL), 0);
    assert_false(wrong.pass); /* twice the size */
    struct ka_tensors *all[] = {want, got, base, close, rounded};
    for (size_t i = 0; i < KA_COUNT(all); i++)
        ka_tensors_free(all[i]);
}

static void tolerance__ties__let_more_single_elements_off_in_half_precision_only(void **state)
{
    (void)state;
    struct ka_tolerance half = ka_tolerance_of(KA_F16), single = ka_tolerance_of(KA_F32);
    double floor = half.floor, share = single.off_share;
    ka_tolerance_ties(&half);
    ka_tolerance_ties(&single);
    assert_true(half.off_share > 1e-3 && half.off_share < 1.0 / 128); /* not all of a column of a head */
    assert_true(half.floor == floor && single.off_share == share);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(compare__zero_expected__may_keep_what_rounding_of_the_inputs_leaves),
        cmocka_unit_test(compare__of_several_draws_of_moved_inputs__the_largest_counts),
        cmocka_unit_test(tolerance__ties__let_more_single_elements_off_in_half_precision_only),
        cmocka_unit_test(compare__elements_that_rounding_moves_too__are_allowed),
        cmocka_unit_test(compare__coarse__forgives_rounding_and_no_more),
        cmocka_unit_test(compare__right_values__pass),
        cmocka_unit_test(compare__error_within_twice_the_baseline__passes_and_beyond_fails),
        cmocka_unit_test(compare__tiny_gradient_returned_as_zero__fails),
        cmocka_unit_test(compare__zero_expected__needs_zero),
        cmocka_unit_test(compare__one_wrong_element_in_a_loose_norm__fails_by_the_element_cap),
        cmocka_unit_test(compare__elements_on_which_eager_fails_too__are_allowed),
        cmocka_unit_test(compare__nan__is_no_wildcard),
        cmocka_unit_test(
            compare__what_rounding_moves_by_much__may_be_off_by_more_where_it_is_judged_coarsely),
        cmocka_unit_test(compare__eager_right_by_luck__other_draws_of_its_rounding_count),
        cmocka_unit_test(compare__missing_infinity__fails_and_equal_ones_pass),
        cmocka_unit_test(compare__expected_value_beyond_the_dtype__counts_as_infinite),
        cmocka_unit_test(compare__terms_that_overflow_in_float16__may_where_eager_s_do),
        cmocka_unit_test(compare__zero_expected__may_keep_what_rounding_of_the_inputs_leaves),
        cmocka_unit_test(compare__of_several_draws_of_moved_inputs__the_largest_counts),
        cmocka_unit_test(compare__what_rounding_of_the_inputs_turns_over__proves_nothing),
        cmocka_unit_test(compare__at_the_edge_of_the_dtype__infinite_and_finite_will_both_do),
        cmocka_unit_test(compare__noise_that_no_dtype_resolves__passes_as_vacuous),
        cmocka_unit_test(compare__extreme_magnitudes__neither_overflow_nor_vanish),
        cmocka_unit_test(compare__wrong_shape_dtype_or_absence__is_named),
        cmocka_unit_test(patterns__constant_factor__is_found_and_interpreted),
        cmocka_unit_test(patterns__transposed__is_found_for_square_and_other_shapes),
        cmocka_unit_test(patterns__swapped_gradients__name_the_other),
        cmocka_unit_test(patterns__shift_by_one__is_found_with_its_axis_and_direction),
        cmocka_unit_test(patterns__last_tile_wrong__is_found_on_its_axis),
        cmocka_unit_test(patterns__only_first_tile_right__is_found),
        cmocka_unit_test(patterns__zero_columns__are_counted),
        cmocka_unit_test(patterns__missing_row_term__does_not_vary_along_the_axis),
        cmocka_unit_test(patterns__one_element__has_only_factors_that_tell),
        cmocka_unit_test(patterns__a_factor_for_each_row__names_the_axis),
        cmocka_unit_test(patterns__a_factor_for_each_row_that_is_nearly_1__may_be_rounding),
        cmocka_unit_test(patterns__lost_signs__are_counted),
        cmocka_unit_test(patterns__no_explanation__says_how_near_it_is),
        cmocka_unit_test(patterns__factor_with_two_meanings__says_both),
        cmocka_unit_test(patterns__narrow_accumulation__looks_like_rounding),
        cmocka_unit_test(describe__hidden_shape__tells_no_size_index_or_value),
        cmocka_unit_test(json__nonfinite_values__are_text),
    };
    return cmocka_run_group_tests_name("compare", tests, NULL, NULL);
}
