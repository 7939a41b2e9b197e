/* What changed between two texts, in few lines: for people and prompts, never to be applied. Pure. */
#ifndef KA_SHORT_DIFF_H
#define KA_SHORT_DIFF_H

#include "base/base.h"

/* Append the lines that are only in one of the texts, as "-old" and "+new" in order, with ".." where equal
 * lines lie in between. At most `most` lines; how many more there are is said. Nothing for equal texts. Of
 * texts that differ over more than some thousand lines each, only the numbers are told. */
void ka_short_diff(const char *before, const char *after, size_t most, struct ka_buf *out);

#endif
