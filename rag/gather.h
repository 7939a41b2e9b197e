/* `store import`: walks other people's folders and puts what can be used into a store, with a report of each
 * file.
 *
 * A file without a licence of its own, beside it or above it (up to the folder with .git, or else the folder
 * given) is not taken: nobody has allowed to copy it. */
#ifndef KA_GATHER_H
#define KA_GATHER_H

#include <jansson.h>

#include "store.h"

#define KA_GATHER_FAMILY "imported"

/* Import the file, or every .py file below the folder (hidden ones and links are skipped). `license` stands
 * for files without one; NULL: they are not taken. One transaction. The report (new reference):
 *
 *     {"files": n, "taken": [{"id", "class", "path", "license", "license_from", "sha256"}],
 *      "not_taken": [{"path", "class"?, "why"}]}
 *
 * Files that hold neither an autograd function nor a Triton kernel are only counted. -ENOENT, -EFBIG, or the
 * store's errors. */
int ka_gather(struct ka_store *store, const char *path, const char *license, json_t **report,
              struct ka_err *err);

#endif
