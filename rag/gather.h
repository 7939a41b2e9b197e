/* `store import`: walks other people's folders and puts what can be used into a store, with a report of each
 * file.
 *
 * The *top* is the folder whose name begins every path that is kept: the one above with .git, else with
 * pyproject.toml, setup.py or setup.cfg, else that of the outermost package. Imports are followed and
 * licences looked for up to it. A file without a licence of its own or above it is not taken: nobody has
 * allowed to copy it. */
#ifndef KA_GATHER_H
#define KA_GATHER_H

#include <jansson.h>

#include "store.h"

#define KA_GATHER_FAMILY "imported"

struct ka_gather_req {
    const char *path;    /* a file, or a folder: every .py file below (hidden ones and links are skipped) */
    const char *license; /* for files without one; NULL: they are not taken */
    const char *top;     /* of an installed package: its folder or file; NULL: to be found */
    const char *info;    /* its .dist-info folder; NULL */
    const char *version; /* of it; NULL */
};

/* One transaction. The report (new reference):
 *
 *     {"files": n, "commit"?: hash, "version"?: text,
 *      "taken": [{"id", "class", "path", "line", "license", "license_header"?, "license_repository"?,
 *                 "license_from"?, "sha256", "files": [{"path", "sha256", "license"}]}],
 *      "not_taken": [{"path", "line", "class"?, "why"}]}
 *
 * Files that hold neither an autograd function nor a Triton kernel are only counted; so are those whose
 * kernels stand in a pair of another file. -ENOENT, -EFBIG, or the store's errors. */
int ka_gather(struct ka_store *store, const struct ka_gather_req *req, json_t **report, struct ka_err *err);

#endif
