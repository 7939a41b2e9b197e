/* Nearest pairs: all vectors in one matrix, one OpenBLAS product per query, the best of the scores.
 *
 * The product is bound by memory bandwidth: a row is read once, at dim * 4 bytes. OpenBLAS splits it over
 * threads; how many is its own setting for the whole process (OPENBLAS_NUM_THREADS, or
 * openblas_set_num_threads() in main before any other thread runs). One thread is right for a store of
 * thousands of pairs, which takes well under a millisecond. An OpenBLAS older than the processor falls back
 * to SSE3, half to a fifth as fast: OPENBLAS_CORETYPE=Haswell in the environment has it use AVX2.
 *
 * Left out of the hits: pairs below min_sim, pairs whose path holds an excluded substring, and
 * near-duplicates of the query itself (products of all parts >= KA_INDEX_DUPLICATE, or the same normalised
 * tokens), which are listed apart so that a log can say which. Siblings are pairs of one forward (the same
 * normalised tokens), and those of one op whose forwards are nearly equal (KA_INDEX_SIBLING of the first
 * part): they take at most half of the hits, one of each schedule first, unless nothing else is left.
 *
 * An index belongs to one thread at a time: a search uses its scratch memory. */
#ifndef KA_INDEX_H
#define KA_INDEX_H

#include "store.h"

#define KA_INDEX_DUPLICATE 0.995
#define KA_INDEX_SIBLING 0.7
#define KA_INDEX_TOPK_MAX 1024

struct ka_index;

/* Empty index for vectors of `dim` numbers; room for `rows` is made at once. NULL without memory. */
struct ka_index *ka_index_new(size_t dim, size_t rows);
void ka_index_free(struct ka_index *index); /* NULL is fine */

struct ka_index_row {
    const char *id, *path, *op, *schedule;
    uint64_t tokens_hash;
};

size_t ka_index_count(const struct ka_index *index);
/* The row of an id, in an index whose rows were added in the order of their ids; SIZE_MAX: none. */
size_t ka_index_find(const struct ka_index *index, const char *id);

/* Copies everything; the vector has unit length, or unit parts as ka_embed() makes them. -ENOMEM. */
int ka_index_add(struct ka_index *index, const struct ka_index_row *row, const float *vector);

/* All pairs of a store, by one embedder; ours has two parts (rag/embed.h). Errors: ka_store_each_vector(). */
int ka_index_load(struct ka_store *store, const char *embedder, int version, size_t dim,
                  struct ka_index **out, struct ka_err *err);

struct ka_index_query {
    const float *vector;  /* as the rows', of the index's dim */
    const float *shares;  /* of the words, by row (rag/prose.h); NULL where vectors are all there is */
    uint64_t tokens_hash; /* 0 when not known */
    size_t topk;          /* 1 .. KA_INDEX_TOPK_MAX */
    double min_sim;
    const char *const *excludes; /* substrings of paths; empty ones are ignored */
    size_t exclude_count;
    bool keep_duplicates;
};

struct ka_hit {
    struct ka_index_row row; /* strings belong to the index */
    double similarity;
};

struct ka_hits {
    struct ka_hit *items; /* most similar first */
    size_t count;
    struct ka_hit *duplicates; /* the most similar KA_INDEX_TOPK_MAX at most */
    size_t duplicate_count;
};

/* -EINVAL for a topk out of range. No hit is no error. Free with ka_hits_free(). */
int ka_index_search(struct ka_index *index, const struct ka_index_query *query, struct ka_hits *out,
                    struct ka_err *err);
void ka_hits_free(struct ka_hits *hits);

#endif
