/* What a forward is made of: what its kernels do, and the words that its names hold.
 *
 * Only what is launched counts: the triton.jit functions that the stub reaches, by way of whatever calls them
 * (where it reaches none, all of the file's). What they do is rag/kernel.h's, independent of names, comments
 * and layout; words come from all functions that are reached, cut at underscores and digits, in lower case.
 * make_args, reference, flops, setup and classes count only where the stub needs them. A feature is there or
 * not, however often: a set of 64-bit hashes. */
#ifndef KA_FEATURES_H
#define KA_FEATURES_H

#include "kernel.h"

struct ka_features {
    uint64_t *items; /* of structure; sorted, each once */
    size_t count;
    uint64_t *words; /* of names; the same */
    size_t word_count;
    bool classes[KA_CLASS_COUNT];
    uint64_t tokens_hash; /* of the normalised tokens: equal for renamed or reformatted copies */
};

/* `source` may be a forward file or a pair; only the part above the marker counts. -EINVAL when there is
 * nothing to describe, -EFBIG. Free with ka_features_free(). */
int ka_features_of(const char *source, size_t len, struct ka_features *out, struct ka_err *err);
void ka_features_free(struct ka_features *features);

#endif
