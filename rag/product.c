/* The product and the choice between its two implementations. Knows no index. */
#include "product.h"

#include <cblas.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>

static bool openblas_is_too_old(void)
{
    return strcmp(openblas_get_corename(), "Prescott") == 0 && !getenv("OPENBLAS_CORETYPE") &&
           __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

__attribute__((target("avx2,fma"))) static float sum_of(__m256 lanes)
{
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps(lanes, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

#define TIMES(k) _mm256_loadu_ps(a + i + 8 * (k)), _mm256_loadu_ps(b + i + 8 * (k))

/* Four sums hide the latency of the additions; memory is what the loop waits for. */
__attribute__((target("avx2,fma"))) static float dot(const float *a, const float *b, size_t dim)
{
    __m256 s0 = _mm256_setzero_ps(), s1 = s0, s2 = s0, s3 = s0;
    size_t i = 0;
    for (; i + 32 <= dim; i += 32) {
        s0 = _mm256_fmadd_ps(TIMES(0), s0);
        s1 = _mm256_fmadd_ps(TIMES(1), s1);
        s2 = _mm256_fmadd_ps(TIMES(2), s2);
        s3 = _mm256_fmadd_ps(TIMES(3), s3);
    }
    float sum = sum_of(_mm256_add_ps(_mm256_add_ps(s0, s1), _mm256_add_ps(s2, s3)));
    for (; i < dim; i++)
        sum += a[i] * b[i];
    return sum;
}

static void own_product(const float *matrix, size_t rows, size_t dim, const float *vector, float *scores)
{
    for (size_t i = 0; i < rows; i++)
        scores[i] = dot(matrix + i * dim, vector, dim);
}
#else
static bool openblas_is_too_old(void)
{
    return false;
}

static void own_product(const float *matrix, size_t rows, size_t dim, const float *vector, float *scores)
{
    (void)matrix, (void)rows, (void)dim, (void)vector, (void)scores;
}
#endif

void ka_product(const float *matrix, size_t rows, size_t dim, const float *vector, float *scores)
{
    if (rows == 0)
        return;
    if (openblas_is_too_old())
        own_product(matrix, rows, dim, vector, scores);
    else
        cblas_sgemv(CblasRowMajor, CblasNoTrans, (int)rows, (int)dim, 1.0f, matrix, (int)dim, vector, 1, 0.0f,
                    scores, 1);
}

const char *ka_product_name(void)
{
    static char name[64];
    snprintf(name, sizeof(name), openblas_is_too_old() ? "own AVX2 loop (OpenBLAS %.20s)" : "OpenBLAS %.20s",
             openblas_get_corename());
    return name;
}
