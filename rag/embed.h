/* The built-in embedder "ka-lex": a forward source as a unit vector of KA_EMBED_DIM floats, so that the dot
 * product of two is their similarity.
 *
 * Features (rag/features.h) are weighted by idf, log((1+N)/(1+df)), measured once over the pairs of a store,
 * kept with it, and constant until the store is rebuilt. Each feature's 64-bit hash seeds its row of random
 * signs; the weighted sum of rows, normalised, is the vector. The same source and idf give the same bytes on
 * every machine with IEEE floats.
 *
 * Change anything that alters vectors, and KA_EMBED_VERSION must grow: a store remembers who made its rows.
 */
#ifndef KA_EMBED_H
#define KA_EMBED_H

#include "features.h"

#define KA_EMBED_NAME "ka-lex"
#define KA_EMBED_VERSION 1
#define KA_EMBED_DIM 256
#define KA_IDF_BUCKETS 65536

/* In how many documents each bucket of feature hashes occurs. All zero: every feature weighs the same. */
struct ka_idf {
    uint32_t documents;
    uint32_t df[KA_IDF_BUCKETS];
};

void ka_idf_add(struct ka_idf *idf, const struct ka_features *features);

/* -EINVAL when the features weigh nothing. */
int ka_embed(const struct ka_features *features, const struct ka_idf *idf, float out[KA_EMBED_DIM],
             struct ka_err *err);

/* Scale to length 1; -EINVAL for a zero or non-finite vector. For any dimension. */
int ka_embed_normalise(float *vector, size_t dim);

#endif
