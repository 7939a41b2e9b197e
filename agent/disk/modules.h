/* The user's own modules that a forward file imports, found beside it and copied into the run: children read
 * the copies, so that a run sees one state of them from its first child to its last.
 *
 * What is imported is taken from the text (`import a, b.c as d`, `from a.b import c`): nothing is executed.
 * A module is NAME.py or the folder NAME with its .py files, in the folder of the forward file; of a pair
 * that an earlier run left in its folder, among that run's copies. Links are not followed. Blocking. */
#ifndef KA_MODULES_H
#define KA_MODULES_H

#include <stddef.h>

#include "base/base.h"

#define KA_MODULES_MAX 500                 /* files */
#define KA_MODULES_BYTES ((size_t)8 << 20) /* of all of them */

/* Copy what `source`, the text of `file`, imports from beside it, and what that imports in turn, into `into`,
 * which is made if there is anything. `*count`: how many files. -EFBIG for more than the limits, with the
 * names of the two. */
int ka_modules_freeze(const char *source, const char *file, const char *into, size_t *count,
                      struct ka_err *err);

#endif
