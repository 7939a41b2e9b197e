/* What a forward kernel is made of, independent of its names, comments and layout.
 *
 * Taken from the functions of the forward part (the stub, its helpers, the triton.jit kernels; not make_args,
 * reference, flops, setup). Each function's tokens are normalised by role: keywords, operators, tl.*, torch.*
 * and attributes stay, compile-time constants become one word, other names another. Features are: n-grams 1
 * to 3 normalised tokens of one statement structure   each tl operation with its loop and branch depth, the
 * nest of loops, values carried by a loop dataflow    operation to operation through a variable; addresses
 * computed from loaded values (gather, scatter) counts      dots, loads, stores, atomics, reductions,
 * kernels, in coarse classes A feature is a 64-bit hash with a weight: its class's weight times log(1 +
 * occurrences). */
#ifndef KA_FEATURES_H
#define KA_FEATURES_H

#include "base/base.h"

struct ka_feature {
    uint64_t hash;
    float weight;
};

struct ka_features {
    struct ka_feature *items; /* sorted by hash, no duplicates */
    size_t count;
    uint64_t tokens_hash; /* of the normalised tokens: equal for renamed or reformatted copies */
};

/* `source` may be a forward file or a pair; only the part above the marker counts. -EINVAL when there is
 * nothing to describe, -EFBIG. Free with ka_features_free(). */
int ka_features_of(const char *source, size_t len, struct ka_features *out, struct ka_err *err);
void ka_features_free(struct ka_features *features);

#endif
