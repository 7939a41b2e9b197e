/* What a forward is made of: what its kernels do, and the words that its names hold.
 *
 * Only what is launched counts: the triton.jit functions that the stub reaches, by way of whatever calls them
 * (where it reaches none, all of the file's). What they do is rag/kernel.h's, independent of names, comments
 * and layout; words come from all functions that are reached, cut at underscores and digits, in lower case.
 * make_args, reference, flops, setup and classes count only where the stub needs them. A feature is a 64-bit
 * hash with a weight: its class's times log(1 + occurrences). */
#ifndef KA_FEATURES_H
#define KA_FEATURES_H

#include "base/base.h"

struct ka_feature {
    uint64_t hash;
    float weight;
};

struct ka_features {
    struct ka_feature *items; /* of structure; sorted by hash, no duplicates */
    size_t count;
    struct ka_feature *words; /* the same of names */
    size_t word_count;
    uint64_t tokens_hash; /* of the normalised tokens: equal for renamed or reformatted copies */
};

/* `source` may be a forward file or a pair; only the part above the marker counts. -EINVAL when there is
 * nothing to describe, -EFBIG. Free with ka_features_free(). */
int ka_features_of(const char *source, size_t len, struct ka_features *out, struct ka_err *err);
void ka_features_free(struct ka_features *features);

#endif
