/* The built-in embedder "ka-lex": a forward source as a vector of two parts, each of length 1. The first is
 * what its kernels do, the second the words of its names (all zero where there is no known one). The last
 * numbers of the first say of each class of operations whether the kernels have it (rag/kernel.h): however
 * alike two forwards are otherwise, a backward of products helps little where there are none.
 *
 * Features (rag/features.h) are weighted by idf, log((1+N)/(1+df)); each feature's 64-bit hash seeds its
 * row of random signs; the weighted sum of rows, of length 1, is whitened (rag/whiten.h) and made of length
 * 1 again. Both are measured once over the pairs of a store, kept with it, and constant until the store is
 * rebuilt. The same source and measures give the same vector up to rounding.
 *
 * The similarity of two vectors is 1 - (1 - s)(1 - w) of the products s and w of their parts, w at least 0:
 * what the kernels do is enough to be the same, and common names bring nearer. It is then bent, order kept,
 * so that of the hits of 0.6 and more at least half help to write the backward (tests/retrieval), whatever
 * features and weights an embedder has: another one needs its own bend.
 *
 * A search adds what the files say in words (rag/prose.h), which errs elsewhere: a pair whose kernels are the
 * same has 1, one that says all that a file says 0.5 more. That sum is bent anew, to the same meaning of 0.6.
 *
 * Change anything that alters vectors, and KA_EMBED_VERSION must grow: a store remembers who made its rows.
 */
#ifndef KA_EMBED_H
#define KA_EMBED_H

#include "features.h"
#include "whiten.h"

#define KA_EMBED_NAME "ka-lex"
#define KA_EMBED_VERSION 3
#define KA_EMBED_STRUCTURE (KA_WHITEN_DIM + KA_CLASS_COUNT)
#define KA_EMBED_WORDS KA_WHITEN_DIM
#define KA_EMBED_DIM (KA_EMBED_STRUCTURE + KA_EMBED_WORDS)
#define KA_IDF_BUCKETS 65536

/* In how many documents each bucket of feature hashes occurs. All zero: every feature weighs the same. */
struct ka_idf {
    uint32_t documents;
    uint32_t df[KA_IDF_BUCKETS];
};

/* What is measured over a store; all zero where nothing was. Large: for the heap. */
struct ka_measures {
    struct ka_idf idf;
    struct ka_whitening parts[2];
};

/* Count a document's features. When all are counted, measure the whitening with the same documents, one call
 * each, and end it. */
void ka_measures_count(struct ka_measures *measures, const struct ka_features *features);
void ka_measures_add(struct ka_measures *measures, const struct ka_features *features);
void ka_measures_end(struct ka_measures *measures);

/* -EINVAL when the features weigh nothing. */
int ka_embed(const struct ka_features *features, const struct ka_measures *measures, float out[KA_EMBED_DIM],
             struct ka_err *err);

/* From the products of the parts, -1 to 1 each, to the similarity, 0 to 1. */
float ka_embed_similarity(float structure, float words);

/* That similarity and a share of the words (rag/prose.h), 0 or more, to one similarity, 0 to 1; bent anew. */
float ka_embed_with_prose(float similarity, float share);

/* Scale to length 1; -EINVAL for a zero or non-finite vector. For any dimension. */
int ka_embed_normalise(float *vector, size_t dim);

#endif
