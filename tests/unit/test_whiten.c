/* Whitening does what its formula says: products are x^T (C + ridge I)^-1 y. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "rag/whiten.h"

static double product(const float *x, const float *y)
{
    double sum = 0;
    for (size_t i = 0; i < KA_WHITEN_DIM; i++)
        sum += (double)x[i] * (double)y[i];
    return sum;
}

/* Rows e0 and e0: C = e0 e0^T, so that along e0 the square is divided by 1 + ridge, elsewhere by ridge. */
static void whiten__direction_that_all_rows_share__shrinks(void **state)
{
    (void)state;
    struct ka_whitening *w = ka_calloc(1, sizeof(*w));
    float shared[KA_WHITEN_DIM] = {1}, other[KA_WHITEN_DIM] = {0, 1}, mixed[KA_WHITEN_DIM] = {1, 1};
    ka_whitening_add(w, shared);
    ka_whitening_add(w, shared);
    ka_whitening_end(w);
    ka_whiten(w, shared);
    ka_whiten(w, other);
    ka_whiten(w, mixed);
    double ridge = (double)KA_WHITEN_RIDGE;
    assert_true(fabs(product(shared, shared) - 1 / (1 + ridge)) < 1e-5);
    assert_true(fabs(product(other, other) - 1 / ridge) < 1e-4);
    assert_true(fabs(product(mixed, shared) - 1 / (1 + ridge)) < 1e-5);
    assert_true(fabs(product(shared, other)) < 1e-6);
    free(w);
}

/* Two rows that are not orthogonal: the inverse of [[a b] [b c]] + ridge I by hand. */
static void whiten__correlated_rows__agree_with_the_inverse(void **state)
{
    (void)state;
    struct ka_whitening *w = ka_calloc(1, sizeof(*w));
    float x[KA_WHITEN_DIM] = {0.6f, 0.8f}, y[KA_WHITEN_DIM] = {0, 1};
    ka_whitening_add(w, x);
    ka_whitening_add(w, y);
    ka_whitening_end(w);
    double ridge = (double)KA_WHITEN_RIDGE, a = 0.18 + ridge, b = 0.24, c = 0.82 + ridge;
    double expected = (-b * 0.6 + a * 0.8) / (a * c - b * b);
    ka_whiten(w, x);
    ka_whiten(w, y);
    assert_true(fabs(product(x, y) - expected) < 1e-4);
    free(w);
}

static void whiten__nothing_measured__leaves_vectors_alone(void **state)
{
    (void)state;
    struct ka_whitening *w = ka_calloc(1, sizeof(*w));
    float x[KA_WHITEN_DIM] = {3, 4};
    ka_whitening_end(w);
    ka_whiten(w, x);
    assert_true(x[0] == 3 && x[1] == 4);
    free(w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(whiten__direction_that_all_rows_share__shrinks),
        cmocka_unit_test(whiten__correlated_rows__agree_with_the_inverse),
        cmocka_unit_test(whiten__nothing_measured__leaves_vectors_alone),
    };
    return cmocka_run_group_tests_name("whiten", tests, NULL, NULL);
}
