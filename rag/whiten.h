/* Rows made round: what all of a store's vectors share counts little, what tells them apart counts. Without
 * it a few pairs that have something of everything are near to all.
 *
 * With C the mean of x x^T over the rows and L L^T = C + KA_WHITEN_RIDGE I, a vector x becomes L^-1 x, so
 * that products of vectors are x^T (C + ridge I)^-1 y. Knows no kernels. */
#ifndef KA_WHITEN_H
#define KA_WHITEN_H

#include "base/base.h"

#define KA_WHITEN_DIM 512
#define KA_WHITEN_RIDGE 0.1f /* of rows of length 1; chosen on the tune half of tests/retrieval */
#define KA_WHITEN_ROWS 4096  /* more than enough to measure C */

struct ka_whitening {
    uint32_t rows;                               /* it was measured on; 0: vectors stay as they are */
    float factor[KA_WHITEN_DIM * KA_WHITEN_DIM]; /* L, by rows; above the diagonal nothing is read */
};

/* Add a row of length 1 to what is measured, into `out` that began as zeros. Then make L of it. */
void ka_whitening_add(struct ka_whitening *out, const float row[KA_WHITEN_DIM]);
void ka_whitening_end(struct ka_whitening *out);

/* In place. */
void ka_whiten(const struct ka_whitening *whitening, float vector[KA_WHITEN_DIM]);

#endif
