/* What one kernel does, as features: its operations, how deep in loops they stand, what flows from one into
 * the next, what a loop carries, which axes are reduced, which addresses are made from loaded values.
 *
 * Names of variables and parameters, the order of independent statements, and whether an expression is
 * written in one line or in five, make no difference. One operation of many spellings is one: exp2 and
 * libdevice.exp are exp. Knows no weights and no vectors. */
#ifndef KA_KERNEL_H
#define KA_KERNEL_H

#include "lex.h"

/* The class of an operation: what a backward's schedule hangs on first. */
enum ka_class {
    KA_CLASS_PRODUCT,     /* tl.dot */
    KA_CLASS_REDUCTION,   /* over an axis */
    KA_CLASS_EXPONENTIAL, /* exp, or exp2 */
    KA_CLASS_INDIRECT,    /* an address made from a loaded value */
    KA_CLASS_COUNT,
};

/* Hashes, one each time it is found. Free `items`. */
struct ka_found {
    uint64_t *items;
    size_t count;
    bool classes[KA_CLASS_COUNT];
};

/* The function of tokens [from, to), `def` first. Appends to `out`. */
void ka_kernel_features(const struct ka_tokens *tokens, size_t from, size_t to, struct ka_found *out);

#endif
