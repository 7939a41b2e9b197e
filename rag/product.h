/* Scores of all rows against one vector: the one product that a search is.
 *
 * It is OpenBLAS' sgemv. An OpenBLAS that is older than the processor does not know it and falls back to kernels for SSE3
 * (openblas_get_corename() says "Prescott"), which reach a third of what AVX2 does. Which kernels it takes is settled when the
 * library is loaded and cannot be changed by a caller, so there a loop of our own takes its place, unless OPENBLAS_CORETYPE in the
 * environment asks for those kernels by name. */
#ifndef KA_PRODUCT_H
#define KA_PRODUCT_H

#include <stddef.h>

/* scores[i] = dot(matrix row i, vector), in float32. Rows are `dim` numbers each, one after another. */
void ka_product(const float *matrix, size_t rows, size_t dim, const float *vector, float *scores);

/* "OpenBLAS Haswell", or "own AVX2 loop": for benchmarks and doctor. Static. */
const char *ka_product_name(void);

#endif
