/* The pair store: one SQLite file with sources, metadata and one vector per pair and embedder.
 *
 * Schema 1: `pairs` holds each pair's source and the metadata that listings need; forward and backward are
 * cut from the source when it is read. `embeddings` names embedder, version and dimension with every vector
 * (float32, little-endian) and the hash of the normalised tokens. `meta` holds what the built-in embedder
 * measured over the pairs.
 *
 * A fresh store is one plain file; the first writer to open it turns WAL on, so that readers and one writer
 * may share it, also across processes, with a busy timeout. A store in a folder that may not be written is
 * opened as immutable. One handle belongs to one thread. Errors are negative errno with a sentence and a
 * remedy: -ENOENT no such store or pair, -EILSEQ damaged or no store at all, -EPROTO made by a newer program,
 * -ESTALE rows of another embedder, -EBUSY locked too long, -EROFS may not be written, -ENOSPC, -EIO anything
 * else SQLite says. */
#ifndef KA_STORE_H
#define KA_STORE_H

#include "embed.h"
#include "pair.h"

struct ka_store;

enum ka_store_mode { KA_STORE_READ, KA_STORE_WRITE, KA_STORE_CREATE }; /* CREATE: the file must not exist */

int ka_store_open(const char *path, enum ka_store_mode mode, struct ka_store **out, struct ka_err *err);
void ka_store_close(struct ka_store *store); /* NULL is fine; an open transaction is rolled back */

/* Several puts become visible together, or not at all. Outside a transaction each put is one. */
int ka_store_begin(struct ka_store *store, struct ka_err *err);
int ka_store_commit(struct ka_store *store, struct ka_err *err);

/* A vector and who made it. */
struct ka_embedding {
    const char *embedder;
    int version;
    size_t dim;
    const float *vector; /* as ka_embed() made it; of another embedder: unit length */
    uint64_t tokens_hash;
};

/* Add the pair or replace the one of the same id; older vectors of that id go, of every embedder. */
int ka_store_put(struct ka_store *store, const struct ka_pair *pair, const struct ka_embedding *embedding,
                 struct ka_err *err);

/* Free *out with ka_pair_free(). */
int ka_store_get(struct ka_store *store, const char *id, struct ka_pair *out, struct ka_err *err);

struct ka_store_row {
    const char *id, *path, *family, *op, *schedule, *dtypes, *license, *title,
        *hash; /* valid during the call */
    int difficulty;
};

/* Call `each` for every pair by id; a non-zero return ends the walk and is returned. */
int ka_store_each(struct ka_store *store, int (*each)(const struct ka_store_row *row, void *arg), void *arg,
                  struct ka_err *err);

/* The same with the vectors of one embedder. -ESTALE when pairs lack a vector of that embedder, version and
 * dimension. */
int ka_store_each_vector(struct ka_store *store, const char *embedder, int version, size_t dim,
                         int (*each)(const struct ka_store_row *row, const struct ka_embedding *embedding,
                                     void *arg),
                         void *arg, struct ka_err *err);

/* Call `each` for every pair whose forward says something of what a forward source (or a pair's) says in
 * words, with its share (rag/prose.h). */
int ka_store_each_share(struct ka_store *store, const char *source, size_t len,
                        void (*each)(const char *id, double share, void *arg), void *arg, struct ka_err *err);

int ka_store_count(struct ka_store *store, size_t *out, struct ka_err *err);

int ka_store_save_measures(struct ka_store *store, const struct ka_measures *measures, struct ka_err *err);
int ka_store_load_measures(struct ka_store *store, struct ka_measures *out,
                           struct ka_err *err); /* all zero when none are kept */

/* SQLite's integrity check, and that every pair's source has the hash it was stored with. */
int ka_store_check(struct ka_store *store, struct ka_err *err);

/* Embed a forward source (a forward file or a pair) with the built-in embedder and the store's measures. */
int ka_store_embed(struct ka_store *store, const char *source, size_t len, float out[KA_EMBED_DIM],
                   uint64_t *tokens_hash, struct ka_err *err);

#endif
