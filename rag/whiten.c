/* The Cholesky factor of a ridged second moment, and solving by it. */
#include "whiten.h"

#include <cblas.h>
#include <math.h>

enum { DIM = KA_WHITEN_DIM };

void ka_whitening_add(struct ka_whitening *out, const float row[KA_WHITEN_DIM])
{
    cblas_ssyr(CblasRowMajor, CblasLower, DIM, 1, row, 1, out->factor, DIM);
    out->rows++;
}

/* A diagonal is at least the ridge, up to rounding: the roots exist. */
void ka_whitening_end(struct ka_whitening *out)
{
    for (int i = 0; i < DIM && out->rows; i++) {
        float *row = out->factor + (size_t)i * DIM;
        for (int j = 0; j <= i; j++) {
            const float *other = out->factor + (size_t)j * DIM;
            float ridge = i == j ? KA_WHITEN_RIDGE : 0;
            float rest = row[j] / (float)out->rows + ridge - cblas_sdot(j, row, 1, other, 1);
            row[j] = i == j ? sqrtf(fmaxf(rest, KA_WHITEN_RIDGE / 2)) : rest / other[j];
        }
    }
}

void ka_whiten(const struct ka_whitening *whitening, float vector[KA_WHITEN_DIM])
{
    if (whitening->rows)
        cblas_strsv(CblasRowMajor, CblasLower, CblasNoTrans, CblasNonUnit, DIM, whitening->factor, DIM,
                    vector, 1);
}
