/* What of a pair is worth showing beside its backward: the docstring, and what the backward uses of the
 * forward. Pure. */
#ifndef KA_EXCERPT_H
#define KA_EXCERPT_H

#include "pair.h"

/* Append the module docstring without quotes and without the lines that the store reads ("op: ..."). Nothing
 * where there is none. */
void ka_excerpt_docstring(const struct ka_pair *pair, struct ka_buf *out);

/* Append the backward part, and above it the functions, classes and constants of the forward that it names,
 * and what those name in turn; never the stub, which is the forward itself. */
void ka_excerpt_code(const struct ka_pair *pair, struct ka_buf *out);

#endif
