/* What pairs say in words: SQLite's full-text index (FTS5) of their forward parts, docstring, comments and
 * names alike, beside the vectors, which know kernels.
 *
 * A pair's share of a text is its BM25 for the text's words over what those words weigh together, the sum of
 * their idf: 0 where it has none of them, about 1 where it has most, more where it repeats them. Words are
 * runs of ASCII letters and digits; those that half of the pairs have weigh nothing. All functions return
 * SQLite's codes. */
#ifndef KA_PROSE_H
#define KA_PROSE_H

#include <sqlite3.h>
#include <stddef.h>

extern const char KA_PROSE_SCHEMA[];

/* Index `text` as that of pair `id`, which has none there yet. */
int ka_prose_put(sqlite3 *db, const char *id, const char *text, size_t len);
/* Reads the whole index. */
int ka_prose_remove(sqlite3 *db, const char *id);

typedef void (*ka_prose_fn)(const char *id, double share, void *arg);

/* Call `each` for every pair that has a share of the text. */
int ka_prose_each(sqlite3 *db, const char *text, size_t len, ka_prose_fn each, void *arg);

#endif
