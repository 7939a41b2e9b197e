/* Making a store from a folder of pairs, and adding single ones. */
#ifndef KA_BUILD_H
#define KA_BUILD_H

#include "store.h"

struct ka_build_report {
    size_t pairs;
    size_t folders; /* families */
};

/* Called after each file, on the calling thread. */
typedef void (*ka_build_progress_fn)(size_t done, size_t total, const char *path, void *arg);

/* Read every .py file that ka_build_walk() finds, measure the idf over all of them, embed them, and put a new
 * store in the place of `store_path` once it is complete: readers see the old store or the new one. -EINVAL
 * naming the first file that is no pair, -EEXIST when two files have one id, -ENOENT when there is no pair at
 * all, or the errors of the store; the old store then stays as it was. `progress` may be NULL. */
int ka_build(const char *dir, const char *store_path, ka_build_progress_fn progress, void *arg,
             struct ka_build_report *out, struct ka_err *err);

/* Call `each` for every .py file below `dir`, sorted within its folder; hidden files and folders, __pycache__
 * and links are skipped. A non-zero return ends the walk and is returned; else, at its end, a negative errno
 * of a folder that could not be read. */
int ka_build_walk(const char *dir, int (*each)(void *arg, const char *path, struct ka_err *err), void *arg,
                  struct ka_err *err);

/* Embed a pair with the store's idf and put it. -EINVAL when there is nothing to compare it by. */
int ka_build_put(struct ka_store *store, const struct ka_pair *pair, struct ka_err *err);

/* The same for a pair file, replacing one of the same id. */
int ka_build_add(struct ka_store *store, const char *path, struct ka_err *err);

/* Measure the idf over all pairs of the store and embed them anew: for a store that began empty. One
 * transaction. */
int ka_build_weigh(struct ka_store *store, struct ka_err *err);

#endif
