/* The shared cache of compiled kernels: a folder, a file an entry, ROOT/<toolchain>/<key>.json. docs/jail.md
 * says why nobody can poison it: the key is the SHA-256 of what was compiled, and only this process writes
 * here. Knows files, not their meaning; never waits for another process.
 *
 * ka_cache_get() and ka_cache_put() may be called by several threads; the rest is the owner's alone. Several
 * daemons may share a folder: an entry appears whole or not at all, and its content follows from its name. */
#ifndef KA_CACHE_H
#define KA_CACHE_H

#include <jansson.h>

#include "base/base.h"

struct ka_cache;

/* Where it is: ka_user_cache() of this name. */
#define KA_CACHE_NAME "compiled"

/* Entries of this toolchain (a word of letters and digits). `root` is made if it is missing. -EACCES when
 * somebody else can write there. Free with ka_cache_close(). */
int ka_cache_open(const char *root, const char *toolchain, uint64_t max_bytes, struct ka_cache **out,
                  struct ka_err *err);
void ka_cache_close(struct ka_cache *cache);

/* The folder with this toolchain's entries, for those who may read them. */
const char *ka_cache_folder(const struct ka_cache *cache);

/* SHA-256 as ka_hash_hex() writes it. */
bool ka_cache_is_key(const char *text);

/* A new reference, and the entry counts as used now; NULL if there is none, or it is damaged. */
json_t *ka_cache_get(struct ka_cache *cache, const char *key);

/* Keep `entry`. The first one looks through all of `root`, and leftovers of killed processes go. When all
 * toolchains together get larger than the cap, the entries that were not used for the longest time go. */
int ka_cache_put(struct ka_cache *cache, const char *key, const json_t *entry, struct ka_err *err);

/* What lies below `root`, of all toolchains. */
void ka_cache_measure(const char *root, size_t *entries, uint64_t *bytes);

#endif
