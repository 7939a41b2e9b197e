/* What rounding leaves where little is expected, or nothing: what is let pass, and proves nothing. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "sandbox/compare.h"
#include "tensor_fixture.h"

/* A gradient of which cancelling leaves 1e-5: a draw of its rounding is off by `draw` (0: there is none),
 * base is right by luck, the candidate off by `error`. */
static struct ka_diff compare_cancelled(double error, double draw, double zero_norm)
{
    double one = 1e-5, found = 1e-5 * (1 + error), near = 2e-5, near_found = 2e-5 * (1 + draw);
    struct ka_tensors *want = make_set("F64", "[1]", &one, 1), *got = make_set("F32", "[1]", &found, 1),
                      *base = make_set("F32", "[1]", &one, 1), *close = make_set("F64", "[1]", &near, 1),
                      *rounded = make_set("F32", "[1]", &near_found, 1);
    struct ka_tolerance tol = ka_tolerance_of(KA_F32);
    tol.zero_norm = zero_norm;
    struct ka_diff diff;
    if (draw > 0)
        assert_int_equal(ka_tolerance_near(&tol, ka_tensors_get(rounded, 0), ka_tensors_get(close, 0), NULL),
                         0);
    assert_int_equal(ka_compare(ka_tensors_get(got, 0), ka_tensors_get(want, 0), ka_tensors_get(base, 0),
                                &tol, NULL, 0, &diff, NULL),
                     0);
    struct ka_tensors *all[] = {want, got, base, close, rounded};
    for (size_t i = 0; i < KA_COUNT(all); i++)
        ka_tensors_free(all[i]);
    return diff;
}

static void compare__nearly_all_cancelled__may_be_off_as_a_zero_may_and_proves_nothing(void **state)
{
    (void)state;
    struct ka_diff diff = compare_cancelled(0.015, 1e-3, 1e-5);
    assert_true(diff.pass && diff.vacuous);
    diff = compare_cancelled(0.001, 1e-3, 1e-5);
    assert_true(diff.pass && !diff.vacuous);                 /* within the limit: it proves something */
    assert_false(compare_cancelled(0.015, 0, 1e-5).pass);    /* eager is right wherever it was tried */
    assert_false(compare_cancelled(0.015, 1e-3, 1e-7).pass); /* not as small beside the upstream */
    assert_false(compare_cancelled(0.02, 1e-3, 1e-5).pass);  /* more than rounding explains */
    diff = compare_cancelled(2e-4, 2e-5, 1e-5);              /* a layer norm over two columns */
    assert_true(diff.pass && diff.vacuous);
    assert_false(compare_cancelled(1e-4, 7e-6, 1e-5).pass); /* no more than what rounding is elsewhere */
}

/* 1 - p for a p that is nearly 1: eager has it right by luck. */
static void compare__few_elements__may_be_off_by_units_of_the_upstream_and_prove_nothing(void **state)
{
    (void)state;
    double one = 1e-4, found = 1e-4 + 3e-7, more = 1e-4 + 6e-7;
    struct ka_tensors *want = make_set("F64", "[1]", &one, 1), *base = make_set("F32", "[1]", &one, 1),
                      *got = make_set("F32", "[1]", &found, 1), *off = make_set("F32", "[1]", &more, 1);
    const struct ka_tensor *w = ka_tensors_get(want, 0), *b = ka_tensors_get(base, 0);
    struct ka_tolerance tol = ka_tolerance_of(KA_F32);
    struct ka_diff unknown, near, far;
    assert_int_equal(ka_compare(ka_tensors_get(got, 0), w, b, &tol, NULL, 0, &unknown, NULL), 0);
    assert_false(unknown.pass);
    tol.upstream_norm = 1;
    assert_int_equal(ka_compare(ka_tensors_get(got, 0), w, b, &tol, NULL, 0, &near, NULL), 0);
    assert_true(near.pass && near.vacuous);
    assert_int_equal(ka_compare(ka_tensors_get(off, 0), w, b, &tol, NULL, 0, &far, NULL), 0);
    assert_false(far.pass);
    struct ka_tensors *all[] = {want, base, got, off};
    for (size_t i = 0; i < KA_COUNT(all); i++)
        ka_tensors_free(all[i]);
}

/* The gradient of a bias where a single element of the upstream is not zero, or all are: 1e-4 each. */
static struct ka_diff compare_bias(size_t nonzero)
{
    double want[128] = {0}, found[128] = {0};
    for (size_t i = 0; i < nonzero; i++) {
        want[i] = 1e-4;
        found[i] = 1e-4 + 3e-7 / sqrt((double)nonzero);
    }
    struct ka_tensors *w = make_set("F64", "[128]", want, 128), *b = make_set("F32", "[128]", want, 128),
                      *g = make_set("F32", "[128]", found, 128);
    struct ka_tolerance tol = ka_tolerance_of(KA_F32);
    struct ka_diff diff;
    tol.upstream_norm = 1;
    assert_int_equal(ka_compare(ka_tensors_get(g, 0), ka_tensors_get(w, 0), ka_tensors_get(b, 0), &tol, NULL,
                                0, &diff, NULL),
                     0);
    ka_tensors_free(w);
    ka_tensors_free(b);
    ka_tensors_free(g);
    return diff;
}

static void compare__few_elements_that_are_not_zero__may_be_off_like_a_tensor_of_few(void **state)
{
    (void)state;
    struct ka_diff one = compare_bias(1);
    assert_true(one.pass && one.vacuous);
    assert_true(compare_bias(64).pass);
    assert_false(compare_bias(65).pass);
}

static struct ka_diff compare_with_zero(double rounding, double zero_norm)
{
    double zeros[4] = {0}, found[4] = {rounding, -rounding, 0, rounding};
    struct ka_tensors *want = make_set("F64", "[4]", zeros, 4), *got = make_set("F32", "[4]", found, 4);
    struct ka_tolerance tol = ka_tolerance_of(KA_F32);
    struct ka_diff diff;
    tol.zero_norm = zero_norm;
    assert_int_equal(
        ka_compare(ka_tensors_get(got, 0), ka_tensors_get(want, 0), NULL, &tol, NULL, 0, &diff, NULL), 0);
    ka_tensors_free(want);
    ka_tensors_free(got);
    return diff;
}

static void compare__rounding_where_zero_is_expected__passes_within_zero_norm_and_proves_nothing(void **state)
{
    (void)state;
    struct ka_diff within = compare_with_zero(1e-6, 1e-3), exact = compare_with_zero(0, 1e-3);
    assert_true(within.pass && within.vacuous);
    assert_true(exact.pass && !exact.vacuous);
    assert_int_equal(compare_with_zero(1e-2, 1e-3).reason, KA_DIFF_NOT_ZERO);
    assert_int_equal(compare_with_zero(1e-6, 0).reason, KA_DIFF_NOT_ZERO);
}

/* One number that should be 1e-17, and that eager PyTorch gives as exactly 0. */
static struct ka_diff compare_with_rounding(double found, double zero_norm)
{
    double want[] = {1e-17}, base[] = {0};
    struct ka_tensors *g = make_set("F32", "[1]", &found, 1), *w = make_set("F64", "[1]", want, 1),
                      *b = make_set("F32", "[1]", base, 1);
    struct ka_tolerance tol = ka_tolerance_of(KA_F32);
    tol.zero_norm = zero_norm;
    struct ka_diff diff;
    assert_int_equal(ka_compare(ka_tensors_get(g, 0), ka_tensors_get(w, 0), ka_tensors_get(b, 0), &tol, NULL,
                                0, &diff, NULL),
                     0);
    ka_tensors_free(g);
    ka_tensors_free(w);
    ka_tensors_free(b);
    return diff;
}

static void compare__expected_value_that_is_rounding_itself__is_treated_like_a_zero(void **state)
{
    (void)state;
    struct ka_diff within = compare_with_rounding(1e-7, 1e-3);
    assert_true(within.pass && within.vacuous);
    assert_false(compare_with_rounding(1e-2, 1e-3).pass);
    assert_false(compare_with_rounding(1e-7, 0).pass);
}

/* What saturation leaves of a gradient, judged coarsely and as usual. */
static bool passes_beside_nothing(double found, bool coarse)
{
    double want[] = {1e-17, -1e-17}, got[] = {found, -found};
    struct ka_tensors *g = make_set("F32", "[2]", got, 2), *w = make_set("F64", "[2]", want, 2),
                      *b = make_set("F32", "[2]", want, 2);
    struct ka_tolerance tol = ka_tolerance_of(KA_F32);
    if (coarse)
        ka_tolerance_coarsen(&tol);
    tol.zero_norm = 1e-3;
    struct ka_diff diff;
    assert_int_equal(ka_compare(ka_tensors_get(g, 0), ka_tensors_get(w, 0), ka_tensors_get(b, 0), &tol, NULL,
                                0, &diff, NULL),
                     0);
    ka_tensors_free(g);
    ka_tensors_free(w);
    ka_tensors_free(b);
    return diff.pass;
}

static void compare__coarsely__a_gradient_may_be_off_by_rounding_of_what_made_it(void **state)
{
    (void)state;
    assert_true(passes_beside_nothing(1e-7, true));
    assert_false(passes_beside_nothing(1e-2, true));
    assert_false(passes_beside_nothing(1e-7, false)); /* eager PyTorch has it right */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(compare__nearly_all_cancelled__may_be_off_as_a_zero_may_and_proves_nothing),
        cmocka_unit_test(compare__few_elements__may_be_off_by_units_of_the_upstream_and_prove_nothing),
        cmocka_unit_test(compare__few_elements_that_are_not_zero__may_be_off_like_a_tensor_of_few),
        cmocka_unit_test(
            compare__rounding_where_zero_is_expected__passes_within_zero_norm_and_proves_nothing),
        cmocka_unit_test(compare__expected_value_that_is_rounding_itself__is_treated_like_a_zero),
        cmocka_unit_test(compare__coarsely__a_gradient_may_be_off_by_rounding_of_what_made_it),
    };
    return cmocka_run_group_tests_name("compare_rounding", tests, NULL, NULL);
}
