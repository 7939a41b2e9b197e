/* Scores of rows, by OpenBLAS or by the loop that stands in for it: the same numbers. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <cmocka.h>
#include <math.h>

/* both ways, whatever this processor takes */
#include "rag/product.c"

static void fill(float *numbers, size_t count)
{
    for (size_t i = 0; i < count; i++)
        numbers[i] = sinf((float)i * 0.7f);
}

static void check(void (*product)(const float *, size_t, size_t, const float *, float *), size_t rows,
                  size_t dim)
{
    float *matrix = calloc(rows * dim + 1, sizeof(float)), *vector = calloc(dim, sizeof(float));
    float *scores = calloc(rows, sizeof(float));
    fill(matrix, rows * dim);
    fill(vector, dim);
    product(matrix, rows, dim, vector, scores);
    for (size_t i = 0; i < rows; i++) {
        double sum = 0;
        for (size_t k = 0; k < dim; k++)
            sum += (double)matrix[i * dim + k] * (double)vector[k];
        assert_float_equal(scores[i], (float)sum, 1e-4f);
    }
    free(matrix);
    free(vector);
    free(scores);
}

static const size_t dims[] = {1, 7, 8, 31, 32, 33, 64, 100, 256};

static void product__chosen_way__gives_the_sums(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof(dims) / sizeof(*dims); i++)
        check(ka_product, 5, dims[i]);
}

static void product__own_loop__gives_the_sums(void **state)
{
    (void)state;
#if defined(__x86_64__)
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma"))
        skip();
    for (size_t i = 0; i < sizeof(dims) / sizeof(*dims); i++)
        check(own_product, 5, dims[i]);
#else
    skip();
#endif
}

static void product__no_rows__touches_nothing(void **state)
{
    (void)state;
    ka_product(NULL, 0, 256, NULL, NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(product__chosen_way__gives_the_sums),
        cmocka_unit_test(product__own_loop__gives_the_sums),
        cmocka_unit_test(product__no_rows__touches_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
