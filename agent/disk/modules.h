/* The user's own modules that a forward file imports, found beside it and copied into the run: children read
 * the copies, so that a run sees one state of them from its first child to its last.
 *
 * What is imported is taken from the text (`import a, b.c as d`, `from a.b import c`, `from ..a import b`):
 * nothing is executed. A module is NAME.py or the folder NAME with its .py files. It is looked for in the
 * folder of the forward file, in the folder above the package that the file is in (as far up as there is an
 * __init__.py), in the folders of `path`, and in those of `installed`, in this order; for a pair that an
 * earlier run left in its folder, among that run's copies. A relative import brings the whole package, and
 * its dotted name into the file .package beside the copies: the forward is imported as a module of it. Links
 * are not followed, but for those to files in `installed`, as a strict `pip install -e` makes. Blocking. */
#ifndef KA_MODULES_H
#define KA_MODULES_H

#include <stddef.h>

#include <jansson.h>

#include "base/base.h"
#include "base/hash.h"

#define KA_MODULES_MAX 500                 /* files */
#define KA_MODULES_BYTES ((size_t)8 << 20) /* of all of them */
#define KA_MODULES_FOLDERS 16              /* to look in */

struct ka_modules_req {
    const char *source, *file; /* of the forward */
    const char *path;          /* more folders, with commas between; NULL or "": none */
    const char *into;          /* made if there is anything; NULL: nothing is copied */
    /* Where the interpreter looks besides, which children may not read: folders of packages that were
     * installed with `pip install -e` (ka_python.versions, "elsewhere"); NULL: none. */
    const json_t *installed;
};

struct ka_modules {
    size_t count;           /* files */
    char hash[KA_HASH_HEX]; /* of their names and texts; "" where there are none */
};

/* Copy what the source imports, and what that imports in turn. -EFBIG for more than the limits, with the
 * names of the two; -ENOENT for a folder of `path` that is none. */
int ka_modules_freeze(const struct ka_modules_req *req, struct ka_modules *found, struct ka_err *err);

#endif
