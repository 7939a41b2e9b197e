/* What two forwards have in common, in words that a person can check: the operations of Triton that both use
 * ("tl.dot"), and the words that the names of both's kernels hold ("softmax"). What nearly every kernel uses
 * (tl.load, tl.arange) says nothing and is left out. Pure. */
#ifndef KA_COMMON_H
#define KA_COMMON_H

#include "base/base.h"

/* Append "tl.exp, tl.max, softmax", in the order of `query`; nothing where there is no such word. Only what
 * stands above a pair's marker counts. */
void ka_common_words(const char *query, const char *other, struct ka_buf *out);

#endif
