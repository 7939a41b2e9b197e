/* What a norm over the whole hides: rows, blocks and elements that are wrong beside larger ones; and what
 * rounding may leave in them. */
#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "sandbox/compare.h"
#include "tensor_fixture.h"

/* want; got and base each with rounding of its own. A test spoils got and compares. */
struct triple {
    size_t rows, cols;
    double *want, *got, *base;
    const char *dtype;
};

/* Half a unit in the last place of the dtype. */
static double ulp(const char *dtype)
{
    return strcmp(dtype, "F16") == 0 ? 0x1p-11 : strcmp(dtype, "F32") == 0 ? 0x1p-24 : 0x1p-53;
}

static double normal(uint64_t i)
{
    return noise(3 * i) + noise(3 * i + 1) + noise(3 * i + 2);
}

/* Rows of the size that `size` says, all rounded relative to the largest of them, as sums of many terms
 * are. */
static struct triple *fresh_of(const char *dtype, size_t rows, size_t cols, double (*size)(size_t row))
{
    struct triple *t = ka_calloc(1, sizeof(*t));
    *t = (struct triple){.rows = rows, .cols = cols, .dtype = dtype};
    double **all[] = {&t->want, &t->got, &t->base};
    for (size_t k = 0; k < KA_COUNT(all); k++)
        *all[k] = ka_calloc(rows * cols, sizeof(double));
    for (size_t i = 0; i < rows * cols; i++) {
        t->want[i] = normal(i) * (size ? size(i / cols) : 1);
        double rounding = ulp(dtype);
        t->got[i] = t->want[i] + 2 * rounding * noise(i + 7 * rows * cols);
        t->base[i] = t->want[i] + 2 * rounding * noise(i + 9 * rows * cols);
    }
    return t;
}

static struct triple *fresh(size_t rows, size_t cols)
{
    return fresh_of("F32", rows, cols, NULL);
}

static void free_triple(struct triple *t)
{
    free(t->want);
    free(t->got);
    free(t->base);
    free(t);
}

static enum ka_dtype dtype_of(const char *name)
{
    enum ka_dtype dtype = KA_F64;
    assert_int_equal(ka_dtype_parse(name, &dtype), 0);
    return dtype;
}

static struct ka_diff compare_as(const struct triple *t, const char *shape, struct ka_tolerance tol)
{
    size_t count = t->rows * t->cols;
    struct ka_tensors *got = make_set(t->dtype, shape, t->got, count),
                      *want = make_set("F64", shape, t->want, count),
                      *base = make_set(t->dtype, shape, t->base, count);
    struct ka_diff diff;
    assert_int_equal(ka_compare(ka_tensors_get(got, 0), ka_tensors_get(want, 0), ka_tensors_get(base, 0),
                                &tol, NULL, 0, &diff, NULL),
                     0);
    ka_tensors_free(got);
    ka_tensors_free(want);
    ka_tensors_free(base);
    return diff;
}

static struct ka_diff compare(const struct triple *t)
{
    char shape[64];
    snprintf(shape, sizeof(shape), "[%zu,%zu]", t->rows, t->cols);
    return compare_as(t, shape, ka_tolerance_of(dtype_of(t->dtype)));
}

static void assert_says(const struct ka_diff *diff, enum ka_describe how, const char *words)
{
    struct ka_buf text = {0};
    assert_int_equal(ka_diff_describe(diff, "the gradient of x", how, &text), 0);
    if (!strstr(text.data, words))
        fail_msg("'%s' does not say '%s'", text.data, words);
    ka_buf_free(&text);
}

static void set_row(struct triple *t, size_t row, double size, double sign)
{
    for (size_t i = row * t->cols; i < (row + 1) * t->cols; i++) {
        t->want[i] = size * normal(i);
        t->got[i] = sign * t->want[i] + ulp(t->dtype) * noise(i + 5 * t->rows * t->cols);
        t->base[i] = t->want[i] + ulp(t->dtype) * noise(i + 11 * t->rows * t->cols);
    }
}

/* ---- rows */

static void part__row_of_the_wrong_sign__fails_at_any_size(void **state)
{
    (void)state;
    static const struct {
        const char *dtype;
        double least;
    } cases[] = {{"F32", 1e-6}, {"F16", 1e-2}};
    static const size_t widths[] = {16, 64, 100, 129, 700};
    for (size_t k = 0; k < KA_COUNT(cases); k++)
        for (size_t w = 0; w < KA_COUNT(widths); w++)
            for (double size = 1; size >= cases[k].least / 1.001; size /= 10) {
                struct triple *t = fresh_of(cases[k].dtype, 4096, widths[w], NULL);
                set_row(t, 1234, size, 1);
                struct ka_diff diff = compare(t);
                assert_true(diff.pass);
                set_row(t, 1234, size, -1);
                diff = compare(t);
                if (diff.pass)
                    fail_msg("%s %zu %g", cases[k].dtype, widths[w], size);
                assert_false(diff.pass);
                if (diff.reason == KA_DIFF_PART && widths[w] < 64) {
                    assert_int_equal(diff.part.kind, KA_PART_ROW);
                    assert_int_equal(diff.part.first, 1234 * widths[w]);
                    assert_true(fabs(diff.part.error - 2) < 0.5);
                    assert_says(&diff, KA_DESCRIBE_FULL, "Row [1234, :]");
                }
                free_triple(t);
            }
}

static void part__wrong_row_in_the_whole_range_of_the_norm__is_the_one_that_is_named(void **state)
{
    (void)state;
    struct triple *t = fresh(4096, 64);
    set_row(t, 4095, 1e-4, -1);
    struct ka_diff diff = compare(t);
    assert_int_equal(diff.reason, KA_DIFF_PART);
    assert_int_equal(diff.parts_off, 1);
    assert_true(diff.error < diff.limit);
    assert_says(&diff, KA_DESCRIBE_FULL, "Row [4095, :]: norm-relative error 2 there");
    assert_says(&diff, KA_DESCRIBE_FULL, "Its sign is flipped");
    free_triple(t);
}

static double falling(size_t row)
{
    return pow(0.5, (double)row);
}

static void part__small_rows_beside_one_another__are_judged_by_their_own_size(void **state)
{
    (void)state;
    struct triple *t = fresh_of("F64", 40, 64, falling); /* down to 1e-12 of the first */
    for (size_t i = 0; i < 40 * 64; i++)
        t->got[i] = t->base[i] = t->want[i] * (1 + 1e-15 * noise(i));
    assert_true(compare(t).pass);
    for (size_t i = 39 * 64; i < 40 * 64; i++)
        t->got[i] = -t->got[i];
    assert_int_equal(compare(t).reason, KA_DIFF_PART);
    free_triple(t);
}

static void part__row_off_everywhere_by_less_than_an_element_may__fails(void **state)
{
    (void)state;
    struct triple *t = fresh(64, 4096);
    for (size_t i = 9 * 4096; i < 10 * 4096; i++)
        t->got[i] = t->want[i] * (1 + 4e-5);
    assert_true(compare(t).pass); /* within the share of its norm that a row may be off by */
    for (size_t i = 9 * 4096; i < 10 * 4096; i++)
        t->got[i] = t->want[i] * (1 + 2e-4);
    t->base[0] += 1; /* eager is bad elsewhere, and the whole may be so too */
    struct ka_diff diff = compare(t);
    assert_int_equal(diff.reason, KA_DIFF_PART);
    assert_true(diff.part.first / 4096 == 9);
    free_triple(t);
}

static void part__block_of_a_long_row__is_found(void **state)
{
    (void)state;
    for (int flat = 0; flat < 3; flat++) {
        struct triple *t = fresh(4, 1 << 16);
        size_t first = (2 << 16) + 128 * 100;
        for (size_t i = first; i < first + 128; i++) {
            t->want[i] = t->base[i] = 1e-5 * normal(i);
            t->got[i] = -t->want[i];
        }
        const char *shape = flat == 0 ? "[4,65536]" : flat == 1 ? "[262144]" : "[262144,1]";
        struct ka_diff diff = compare_as(t, shape, ka_tolerance_of(KA_F32));
        assert_int_equal(diff.reason, KA_DIFF_PART);
        assert_int_equal(diff.part.kind, KA_PART_BLOCK);
        assert_true(diff.part.first >= first && diff.part.first < first + 128);
        assert_says(&diff, KA_DESCRIBE_FULL,
                    flat == 0   ? "Elements [2, 128"
                    : flat == 1 ? "Elements [1438"
                                : "Its sign is flipped");
        free_triple(t);
    }
}

static void part__rows_shorter_than_a_unit__are_judged_one_by_one(void **state)
{
    (void)state;
    struct triple *t = fresh(4096, 3);
    for (size_t i = 3 * 777; i < 3 * 778; i++) {
        t->want[i] = t->base[i] = 1e-4 * normal(i);
        t->got[i] = -t->want[i];
    }
    struct ka_diff diff = compare(t);
    assert_int_equal(diff.reason, KA_DIFF_PART);
    assert_int_equal(diff.part.first / 3, 777);
    free_triple(t);
}

/* ---- elements */

static void part__element_off_by_a_percent__fails(void **state)
{
    (void)state;
    static const size_t at[] = {0, 63, 64, 9999, 16383};
    for (size_t k = 0; k < KA_COUNT(at); k++) {
        struct triple *t = fresh(128, 128);
        t->got[at[k]] = t->want[at[k]] * 1.01;
        assert_false(compare(t).pass);
        struct ka_tolerance tol = ka_tolerance_of(KA_F32);
        tol.floor = tol.off_share = 1; /* whatever the whole says */
        struct ka_diff diff = compare_as(t, "[128,128]", tol);
        assert_int_equal(diff.reason, KA_DIFF_PART);
        assert_int_equal(diff.part.kind, KA_PART_ELEMENT);
        assert_int_equal(diff.part.first, at[k]);
        assert_says(&diff, KA_DESCRIBE_FULL, at[k] == 9999 ? "Element [78, 15]" : "Element [");
        free_triple(t);
    }
}

/* How far one element may be off that should be nothing. */
static double furthest(size_t rows, size_t cols, const char *shape)
{
    struct triple *t = fresh(rows, cols);
    double off = 1e-6;
    t->want[77] = t->base[77] = 0;
    do {
        off *= 1.02;
        t->got[77] = off;
    } while (compare_as(t, shape, ka_tolerance_of(KA_F32)).pass && off < 1);
    free_triple(t);
    return off;
}

static void part__element_among_more__may_lie_a_little_further_out(void **state)
{
    (void)state;
    double few = furthest(64, 128, "[64,128]"), usual = furthest(128, 128, "[128,128]"),
           more = furthest(1024, 2048, "[1024,2048]");
    assert_true(few < 1.05 * usual);
    assert_true(more > 1.1 * usual && more < 1.4 * usual);
}

static void part__elements_at_kinks__are_as_many_as_rounding_moves(void **state)
{
    (void)state;
    struct triple *t = fresh(128, 128);
    struct ka_tolerance tol = ka_tolerance_of(KA_F32);
    tol.floor = 1;
    tol.off_moved = 2; /* two kinks within rounding: four elements may be off, somewhere */
    for (size_t i = 1; i <= 4; i++)
        t->got[i * 3000] += 0.5;
    assert_true(compare_as(t, "[128,128]", tol).pass);
    t->want[100] = t->base[100] = 0.01;
    t->got[100] = 0.0104;
    assert_int_equal(compare_as(t, "[128,128]", tol).reason, KA_DIFF_PART);
    free_triple(t);
}

/* ---- what rounding leaves */

/* Columns that are sums of their own: two have much more noise than the others, and cancel in one row, where
 * base, which is one draw of it, is right by luck. */
static void part__element_of_a_noisy_column__may_be_as_far_off_as_its_column(void **state)
{
    (void)state;
    enum { ROWS = 256, COLS = 512, NOISY = 300, LUCKY = 100 };
    const double off = 20000 * ulp("F32");
    static const struct {
        bool noisy;
        size_t elements; /* that are off in one part */
        bool pass;
    } cases[] = {{true, 1, true}, {true, 2, false}, {false, 1, false}};
    for (size_t k = 0; k < KA_COUNT(cases); k++) {
        struct triple *t = fresh(ROWS, COLS);
        for (size_t i = 0; i < 2 * ROWS; i++) {
            size_t row = i / 2, at = row * COLS + NOISY + i % 2;
            bool noisy = cases[k].noisy && row != LUCKY;
            t->want[at] = t->got[at] = row == LUCKY ? 0.01 : 2;
            t->base[at] = t->want[at] + (noisy ? off : 0);
        }
        for (size_t i = 0; i < cases[k].elements; i++)
            t->got[LUCKY * COLS + NOISY + i] += off;
        struct ka_diff diff = compare(t);
        assert_int_equal(diff.base_off, 0);
        assert_int_equal(diff.pass, cases[k].pass);
        free_triple(t);
    }
}

/* Rows along which sums are carried, block by block: each block of base has one error, and that of one is
 * nothing by luck. */
static void part__stretch_of_a_carried_sum__may_be_as_far_off_as_those_beside_it(void **state)
{
    (void)state;
    enum { ROWS = 2, COLS = 65536, CARRIED = 1024, LUCKY = 20, OTHER = 50 };
    const double off = 3000 * ulp("F32");
    static const struct {
        bool carried;   /* base has errors at all */
        double times;   /* what is found, of what base has elsewhere */
        size_t stretch; /* another that is off */
        bool pass;
    } cases[] = {{true, 1, LUCKY, true},
                 {true, 1, LUCKY + 1, true},
                 {true, 1, OTHER, false},
                 {true, 40, LUCKY, false},
                 {false, 1, LUCKY, false}};
    for (size_t k = 0; k < KA_COUNT(cases); k++) {
        struct triple *t = fresh(ROWS, COLS);
        for (size_t i = 0; i < (size_t)ROWS * COLS; i++) {
            size_t block = i / CARRIED;
            bool lucky = block == LUCKY || block == cases[k].stretch;
            t->base[i] = t->want[i] + (cases[k].carried && !lucky ? off * noise(block) : 0);
            t->got[i] = t->want[i] + (lucky ? cases[k].times * off : 0);
        }
        assert_int_equal(compare(t).pass, cases[k].pass);
        free_triple(t);
    }
}

static void part__row_that_cancels__may_keep_the_rounding_of_its_terms(void **state)
{
    (void)state;
    struct triple *t = fresh(4096, 64);
    for (size_t i = 64 * 50; i < 64 * 51; i++) {
        t->want[i] = t->base[i] = 1e-7 * normal(i); /* eager is right by luck */
        t->got[i] = t->want[i] + 2e-7 * noise(i);
    }
    assert_true(compare(t).pass);
    for (size_t i = 64 * 50; i < 64 * 51; i++)
        t->got[i] = t->want[i] + 2e-5 * noise(i);
    assert_int_equal(compare(t).reason, KA_DIFF_PART);
    free_triple(t);
}

/* A row of which a causal mask leaves one element, small because terms cancel: rounding of the zeros beside
 * it is none. */
static void part__element_among_zeros__may_be_as_far_off_as_one_among_others(void **state)
{
    (void)state;
    enum { COLS = 1024, AT = 2 * COLS };
    static const struct {
        size_t at; /* what is off, */
        double by;
        bool pass;
    } cases[] = {{AT, 8e-5, true}, {AT, 1e-3, false}, {AT + 5, 1e-3, false}};
    for (size_t k = 0; k < KA_COUNT(cases); k++) {
        struct triple *t = fresh(8, COLS);
        for (size_t i = AT - COLS; i < AT + 2 * (size_t)COLS; i++)
            t->want[i] = t->base[i] = t->got[i] = 0;
        t->want[AT] = t->got[AT] = 1e-4;
        t->base[AT] = 1e-4 + 6e-6;
        t->got[cases[k].at] += cases[k].by;
        assert_int_equal(compare(t).pass, cases[k].pass);
        free_triple(t);
    }
}

static void part__row_of_zeros__may_keep_a_little_more(void **state)
{
    (void)state;
    struct triple *t = fresh(4096, 64);
    for (size_t i = 64 * 50; i < 64 * 51; i++) {
        t->want[i] = t->base[i] = 0;
        t->got[i] = 1.2e-5 * noise(i); /* as of a softmax over one column */
    }
    assert_true(compare(t).pass);
    for (size_t i = 64 * 50; i < 64 * 51; i++)
        t->got[i] = 1e-4 * noise(i);
    struct ka_diff diff = compare(t);
    assert_int_equal(diff.reason, KA_DIFF_PART);
    assert_says(&diff, KA_DESCRIBE_FULL, "Row [50, :]: must be zero");
    free_triple(t);
}

static void part__what_other_draws_of_rounding_move__may_move(void **state)
{
    (void)state;
    for (int drawn = 0; drawn < 2; drawn++) {
        struct triple *t = fresh(64, 64);
        double *moved = ka_calloc(64 * 64, sizeof(double));
        for (size_t i = 0; i < 64 * 64; i++)
            moved[i] = t->want[i] + (i / 64 == 20 ? 1e-4 * noise(i) : 0);
        for (size_t i = 64 * 20; i < 64 * 21; i++)
            t->got[i] += 1e-4 * noise(i + 64 * 64);
        struct ka_tensors *exact = make_set("F64", "[64,64]", t->want, 64 * 64),
                          *near = make_set("F64", "[64,64]", moved, 64 * 64);
        struct ka_tolerance tol = ka_tolerance_of(KA_F32);
        tol.floor = 1e-3;
        if (drawn)
            assert_int_equal(
                ka_tolerance_widen(&tol, ka_tensors_get(near, 0), ka_tensors_get(exact, 0), NULL), 0);
        assert_int_equal(compare_as(t, "[64,64]", tol).pass, drawn);
        ka_tensors_free(exact);
        ka_tensors_free(near);
        free(moved);
        free_triple(t);
    }
}

static void part__nothing_around_it__is_held_to_nothing(void **state)
{
    (void)state;
    struct triple *t = fresh(256, 64);
    memset(t->want, 0, 128 * 64 * sizeof(double));
    memset(t->base, 0, 128 * 64 * sizeof(double));
    memset(t->got, 0, 128 * 64 * sizeof(double)); /* as with a one-hot upstream */
    assert_true(compare(t).pass);
    t->got[5] = 2e-4;
    struct ka_diff diff = compare(t);
    assert_int_equal(diff.reason, KA_DIFF_PART);
    assert_int_equal(diff.part.first / 64, 0);
    free_triple(t);
}

static void part__infinite_expected_values__say_nothing_of_the_rest(void **state)
{
    (void)state;
    struct triple *t = fresh(64, 64);
    t->want[3] = t->got[3] = t->base[3] = -INFINITY;
    t->want[4] = t->got[4] = t->base[4] = NAN;
    t->want[70] = 1e39; /* beyond the dtype */
    t->got[70] = t->base[70] = INFINITY;
    assert_true(compare(t).pass);
    for (size_t i = 5; i < 64; i++)
        t->got[i] = t->want[i] * 1.001;
    t->base[64 * 30] += 10;
    assert_int_equal(compare(t).reason, KA_DIFF_PART);
    free_triple(t);
}

static void compare__nothing_finite_but_zero__is_no_evidence(void **state)
{
    (void)state;
    for (int some = 0; some < 2; some++) {
        struct triple *t = fresh(4, 4);
        for (size_t i = 0; i < 16; i++)
            t->want[i] = t->got[i] = t->base[i] = i % 2 ? NAN : some && i == 2 ? 1 : 0;
        struct ka_diff diff = compare(t);
        assert_true(diff.pass);
        assert_int_equal(diff.nothing, !some);
        free_triple(t);
    }
}

static void part__tolerance_without_parts__judges_the_whole_alone(void **state)
{
    (void)state;
    struct triple *t = fresh(4096, 64);
    struct ka_tolerance tol = ka_tolerance_of(KA_F32);
    ka_tolerance_coarsen(&tol);
    set_row(t, 1234, 1e-3, -1);
    assert_true(compare_as(t, "[4096,64]", tol).pass);
    free_triple(t);
}

static void describe__part_of_a_hidden_shape__tells_no_place(void **state)
{
    (void)state;
    struct triple *t = fresh(4096, 64);
    set_row(t, 1234, 1e-4, -1);
    struct ka_diff diff = compare(t);
    struct ka_buf text = {0};
    ka_diff_describe(&diff, "the gradient of x", KA_DESCRIBE_HIDDEN, &text);
    assert_non_null(strstr(text.data, "Whole rows, or blocks of rows, are wrong."));
    assert_null(strstr(text.data, "1234"));
    ka_buf_free(&text);
    json_t *doc = ka_diff_json(&diff), *part = json_object_get(doc, "part");
    assert_string_equal(json_string_value(json_object_get(part, "kind")), "row");
    assert_int_equal(json_integer_value(json_object_get(part, "first")), 1234 * 64);
    json_decref(doc);
    free_triple(t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(part__row_of_the_wrong_sign__fails_at_any_size),
        cmocka_unit_test(part__wrong_row_in_the_whole_range_of_the_norm__is_the_one_that_is_named),
        cmocka_unit_test(part__small_rows_beside_one_another__are_judged_by_their_own_size),
        cmocka_unit_test(part__row_off_everywhere_by_less_than_an_element_may__fails),
        cmocka_unit_test(part__block_of_a_long_row__is_found),
        cmocka_unit_test(part__rows_shorter_than_a_unit__are_judged_one_by_one),
        cmocka_unit_test(part__element_off_by_a_percent__fails),
        cmocka_unit_test(part__element_among_more__may_lie_a_little_further_out),
        cmocka_unit_test(part__elements_at_kinks__are_as_many_as_rounding_moves),
        cmocka_unit_test(part__element_of_a_noisy_column__may_be_as_far_off_as_its_column),
        cmocka_unit_test(part__stretch_of_a_carried_sum__may_be_as_far_off_as_those_beside_it),
        cmocka_unit_test(part__row_that_cancels__may_keep_the_rounding_of_its_terms),
        cmocka_unit_test(part__element_among_zeros__may_be_as_far_off_as_one_among_others),
        cmocka_unit_test(part__row_of_zeros__may_keep_a_little_more),
        cmocka_unit_test(part__what_other_draws_of_rounding_move__may_move),
        cmocka_unit_test(part__nothing_around_it__is_held_to_nothing),
        cmocka_unit_test(part__infinite_expected_values__say_nothing_of_the_rest),
        cmocka_unit_test(compare__nothing_finite_but_zero__is_no_evidence),
        cmocka_unit_test(part__tolerance_without_parts__judges_the_whole_alone),
        cmocka_unit_test(describe__part_of_a_hidden_shape__tells_no_place),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
