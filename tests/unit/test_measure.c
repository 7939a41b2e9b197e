/* What is measured between tensors: the same sums over blocks of any magnitude, in however many parts. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "sandbox/compare_internal.h"
#include "tensor_fixture.h"

#define LARGE ((size_t)1200000) /* enough for several threads */

struct large {
    double *want;
    float *got;
    struct ka_tensor want_tensor, got_tensor;
};

static struct large large(void)
{
    struct large l = {ka_calloc(LARGE, sizeof(double)), ka_calloc(LARGE, sizeof(float)), {0}, {0}};
    for (size_t i = 0; i < LARGE; i++)
        l.got[i] = (float)(l.want[i] = noise(i));
    l.want_tensor = (struct ka_tensor){
        .dtype = KA_F64, .rank = 1, .dims = {LARGE}, .count = LARGE, .data = (unsigned char *)l.want};
    l.got_tensor = l.want_tensor;
    l.got_tensor.dtype = KA_F32;
    l.got_tensor.data = (unsigned char *)l.got;
    return l;
}

static struct ka_diff compare_large(const struct large *l, bool with_base)
{
    struct ka_tolerance tol = ka_tolerance_of(KA_F32);
    struct ka_diff diff;
    tol.off_share = 0;
    assert_int_equal(ka_compare(&l->got_tensor, &l->want_tensor, with_base ? &l->got_tensor : NULL, &tol,
                                NULL, 0, &diff, NULL),
                     0);
    return diff;
}

static void free_large(struct large *l)
{
    free(l->want);
    free(l->got);
}

static void measure__large_tensor__each_part_counts(void **state)
{
    (void)state;
    struct large l = large();
    double want2 = 0, error2 = 0;
    static const size_t spoiled[] = {3, LARGE / 2 - 1, LARGE / 2 + 7, LARGE - 2};
    for (size_t i = 0; i < KA_COUNT(spoiled); i++)
        l.got[spoiled[i]] = (float)(l.want[spoiled[i]] + 0.01 * (double)(i + 1));
    for (size_t i = 0; i < LARGE; i++) {
        double d = (double)l.got[i] - l.want[i];
        want2 += l.want[i] * l.want[i];
        error2 += d * d;
    }
    struct ka_diff diff = compare_large(&l, false), same = compare_large(&l, true);
    assert_true(fabs(diff.want_norm / sqrt(want2) - 1) < 1e-12);
    assert_true(fabs(diff.error / sqrt(error2 / want2) - 1) < 1e-9);
    assert_int_equal(diff.off, KA_COUNT(spoiled));
    assert_int_equal(diff.base_off, 0);
    struct ka_triple triple = {&l.got_tensor, &l.want_tensor, NULL, INFINITY, 1e-3, 1e-3};
    struct ka_measured m;
    assert_int_equal(ka_measure(&triple, &m, NULL), 0);
    assert_true(fabs(m.rms / sqrt(want2 / (double)LARGE) - 1) < 1e-9);
    assert_int_equal(diff.worst, LARGE - 2);
    assert_true(same.base_off == same.off && same.off == diff.off && same.base_error == same.error);
    free_large(&l);
}

static void measure__large_tensor__the_first_of_several_nans_is_named(void **state)
{
    (void)state;
    struct large l = large();
    l.got[LARGE / 2 + 1] = l.got[LARGE - 1] = NAN;
    struct ka_diff diff = compare_large(&l, false);
    assert_int_equal(diff.reason, KA_DIFF_NONFINITE);
    assert_int_equal(diff.mask_differs, 2);
    assert_int_equal(diff.worst, LARGE / 2 + 1);
    assert_true(isnan(diff.worst_got) && diff.worst_want == l.want[LARGE / 2 + 1]);
    free_large(&l);
}

/* Blocks of one tensor whose squares do not fit, or vanish, beside others. */
static void measure__blocks_of_unlike_magnitudes__are_added_up(void **state)
{
    (void)state;
    static const double scales[][2] = {{1e200, 1}, {1, 1e200}, {1e-200, 1}, {1e-200, 1e-210}, {3e152, 3e152}};
    enum { N = 4000 };
    for (size_t k = 0; k < KA_COUNT(scales); k++) {
        double want[N], got[N];
        for (size_t i = 0; i < N; i++) {
            want[i] = scales[k][i >= N / 2];
            got[i] = want[i] * 1.5;
        }
        struct ka_tensors *w = make_set("F64", "[4000]", want, N), *g = make_set("F64", "[4000]", got, N);
        struct ka_tolerance tol = ka_tolerance_of(KA_F64);
        struct ka_diff diff;
        assert_int_equal(
            ka_compare(ka_tensors_get(g, 0), ka_tensors_get(w, 0), NULL, &tol, NULL, 0, &diff, NULL), 0);
        assert_true(fabs(diff.error - 0.5) < 1e-9);
        double norm = fmax(scales[k][0], scales[k][1]) * sqrt(scales[k][0] == scales[k][1] ? N : N / 2);
        assert_true(fabs(diff.want_norm / norm - 1) < 1e-9);
        ka_tensors_free(w);
        ka_tensors_free(g);
    }
}

static void measure__found_value_where_none_is_expected__does_not_hide_small_ones(void **state)
{
    (void)state;
    double want[] = {NAN, 1e-299, 2e-299, INFINITY}, got[] = {NAN, 2e-299, 4e-299, INFINITY},
           base[] = {1, 1.25e-299, 2.5e-299, 7};
    struct ka_tensors *w = make_set("F64", "[4]", want, 4), *g = make_set("F64", "[4]", got, 4),
                      *b = make_set("F64", "[4]", base, 4);
    struct ka_tolerance tol = ka_tolerance_of(KA_F64);
    struct ka_diff diff;
    assert_int_equal(ka_compare(ka_tensors_get(g, 0), ka_tensors_get(w, 0), ka_tensors_get(b, 0), &tol, NULL,
                                0, &diff, NULL),
                     0);
    assert_int_equal(diff.reason, KA_DIFF_NORM);
    assert_true(fabs(diff.error - 1) < 1e-9 && fabs(diff.base_error - 0.25) < 1e-9);
    ka_tensors_free(w);
    ka_tensors_free(g);
    ka_tensors_free(b);
}

static void norm__of_a_combination__is_that_of_its_sum(void **state)
{
    (void)state;
    struct large l = large();
    const struct ka_term gap[] = {{1, &l.want_tensor}, {-1, &l.got_tensor}};
    double most = -1, single = ka_norm_of(&(struct ka_term){-2, &l.want_tensor}, 1, &most);
    double squares = 0, top = 0;
    for (size_t i = 0; i < LARGE; i++) {
        squares += 4 * l.want[i] * l.want[i];
        top = fmax(top, 2 * fabs(l.want[i]));
    }
    assert_true(fabs(single / sqrt(squares) - 1) < 1e-12 && most == top);
    l.got[LARGE - 1] = (float)l.want[LARGE - 1] + 8;
    assert_true(fabs(ka_norm_of(gap, 2, &most) - 8) < 1e-3 && fabs(most - 8) < 1e-3);
    l.got[5] = NAN;
    assert_true(isnan(ka_norm_of(gap, 2, &most)) && fabs(most - 8) < 1e-3);
    free_large(&l);
}

static void half__every_number__is_converted(void **state)
{
    (void)state;
    static const struct {
        uint16_t bits;
        double value;
    } rows[] = {{0x3c00, 1},        {0xc000, -2},
                {0x0001, 0x1p-24},  {0x83ff, -1023 * 0x1p-24},
                {0x0400, 0x1p-14},  {0x7bff, 65504},
                {0x7c00, INFINITY}, {0xfc00, -INFINITY},
                {0x8000, -0.0},     {0x3555, 0.333251953125}};
    for (size_t i = 0; i < KA_COUNT(rows); i++) {
        struct ka_tensor t = {.dtype = KA_F16, .count = 1, .data = (const unsigned char *)&rows[i].bits};
        double value = ka_tensor_at(&t, 0);
        assert_true(value == rows[i].value && signbit(value) == signbit(rows[i].value));
    }
    const uint16_t nan = 0x7e01;
    struct ka_tensor t = {.dtype = KA_F16, .count = 1, .data = (const unsigned char *)&nan};
    assert_true(isnan(ka_tensor_at(&t, 0)));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(measure__large_tensor__each_part_counts),
        cmocka_unit_test(measure__large_tensor__the_first_of_several_nans_is_named),
        cmocka_unit_test(measure__blocks_of_unlike_magnitudes__are_added_up),
        cmocka_unit_test(measure__found_value_where_none_is_expected__does_not_hide_small_ones),
        cmocka_unit_test(norm__of_a_combination__is_that_of_its_sum),
        cmocka_unit_test(half__every_number__is_converted),
    };
    return cmocka_run_group_tests_name("measure", tests, NULL, NULL);
}
