/* Which files of a folder a batch is about. */
#ifndef KA_BATCH_FILES_H
#define KA_BATCH_FILES_H

#include "agent/app/app.h"
#include "agent/app/opts.h"
#include "base/hash.h"

struct ka_batch_file {
    char *path;
    char hash[KA_HASH_HEX]; /* of it and of what it imports */
    bool imports;           /* modules of the user's */
};

/* Forward files below `dir`, in order; of these, those that changed since --changed-since, and of these the
 * share that --part names. -ENOENT: there is none at all; -EINVAL: no such revision, no such part. */
int ka_batch_files_find(const struct ka_app *app, const struct ka_opts *opts, const char *dir,
                        struct ka_batch_file **files, size_t *count, struct ka_err *err);
void ka_batch_files_free(struct ka_batch_file *files, size_t count);

#endif
