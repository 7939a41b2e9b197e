/* The pair store in SQLite. Knows no command line and no search. */
#include "store.h"

#include "base/files.h"

#include <errno.h>
#include <sqlite3.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define SCHEMA_VERSION 1
#define APPLICATION_ID 0x6b617072 /* "kapr" */
#define BUSY_MS 10000
#define VECTOR_DIM_MAX 16384

struct ka_store {
    sqlite3 *db;
    char *path;
};

static const char SCHEMA[] =
    "CREATE TABLE pairs (id TEXT PRIMARY KEY, path TEXT NOT NULL, source TEXT NOT NULL, family TEXT NOT NULL,"
    " op TEXT NOT NULL, schedule TEXT NOT NULL, dtypes TEXT NOT NULL, license TEXT NOT NULL, title TEXT NOT "
    "NULL,"
    " stub TEXT NOT NULL, kernels TEXT NOT NULL, difficulty INTEGER NOT NULL, hash TEXT NOT NULL) STRICT;"
    "CREATE TABLE embeddings (pair TEXT NOT NULL REFERENCES pairs(id) ON DELETE CASCADE, embedder TEXT NOT "
    "NULL,"
    " version INTEGER NOT NULL, dim INTEGER NOT NULL, tokens INTEGER NOT NULL, vector BLOB NOT NULL,"
    " PRIMARY KEY (pair, embedder)) STRICT;"
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value BLOB NOT NULL) STRICT;";

#define ROW_COLUMNS                                                                                          \
    "p.id, p.path, p.family, p.op, p.schedule, p.dtypes, p.license, p.title, p.hash, p.difficulty"

/* ---- errors ---- */

static int fail_sqlite(struct ka_store *store, int rc, struct ka_err *err)
{
    const char *why = store->db ? sqlite3_errmsg(store->db) : sqlite3_errstr(rc);
    switch (rc & 0xff) {
    case SQLITE_NOTADB:
    case SQLITE_CORRUPT:
        return ka_fail(
            err, -EILSEQ,
            "%s: damaged, or no pair store (%s); make it again with `kernel-agent store build DIR`",
            store->path, why);
    case SQLITE_BUSY:
    case SQLITE_LOCKED:
        return ka_fail(err, -EBUSY, "%s: another process is writing to it; try again", store->path);
    case SQLITE_READONLY:
        return ka_fail(err, -EROFS, "%s: may not be written; choose another file with --store", store->path);
    case SQLITE_FULL:
        return ka_fail(err, -ENOSPC, "%s: the disk is full", store->path);
    default:
        return ka_fail(err, -EIO, "%s: %s", store->path, why);
    }
}

static int run_sql(struct ka_store *store, const char *sql, struct ka_err *err)
{
    int rc = sqlite3_exec(store->db, sql, NULL, NULL, NULL);
    return rc ? fail_sqlite(store, rc, err) : 0;
}

static int prepare(struct ka_store *store, const char *sql, sqlite3_stmt **out, struct ka_err *err)
{
    int rc = sqlite3_prepare_v2(store->db, sql, -1, out, NULL);
    return rc ? fail_sqlite(store, rc, err) : 0;
}

/* Run a statement that gives no rows, and finalise it. */
static int step_done(struct ka_store *store, sqlite3_stmt *stmt, struct ka_err *err)
{
    int rc = sqlite3_step(stmt);
    int result = rc == SQLITE_DONE ? 0 : fail_sqlite(store, rc, err);
    sqlite3_finalize(stmt);
    return result;
}

static int read_number(struct ka_store *store, const char *sql, int64_t *out, struct ka_err *err)
{
    sqlite3_stmt *stmt = NULL;
    int result = prepare(store, sql, &stmt, err);
    if (result)
        return result;
    int rc = sqlite3_step(stmt);
    if (rc == SQLITE_ROW)
        *out = sqlite3_column_int64(stmt, 0);
    else
        result = fail_sqlite(store, rc == SQLITE_DONE ? SQLITE_CORRUPT : rc, err);
    sqlite3_finalize(stmt);
    return result;
}

/* ---- opening ---- */

static int create_schema(struct ka_store *store, struct ka_err *err)
{
    char pragmas[128];
    snprintf(pragmas, sizeof(pragmas), "PRAGMA application_id = %d; PRAGMA user_version = %d;",
             APPLICATION_ID, SCHEMA_VERSION);
    int rc = run_sql(store, "BEGIN IMMEDIATE;", err);
    if (rc == 0)
        rc = run_sql(store, SCHEMA, err);
    if (rc == 0)
        rc = run_sql(store, pragmas, err);
    return rc ? rc : run_sql(store, "COMMIT;", err);
}

static int check_schema(struct ka_store *store, struct ka_err *err)
{
    int64_t app = 0, version = 0;
    int rc = read_number(store, "PRAGMA application_id", &app, err);
    if (rc == 0)
        rc = read_number(store, "PRAGMA user_version", &version, err);
    if (rc)
        return rc;
    if (app != APPLICATION_ID)
        return ka_fail(err, -EILSEQ, "%s: a database, but no pair store; choose another file with --store",
                       store->path);
    if (version != SCHEMA_VERSION)
        return ka_fail(
            err, -EPROTO,
            "%s: has schema %lld, this program reads %d; make it again with `kernel-agent store build DIR`",
            store->path, (long long)version, SCHEMA_VERSION);
    return 0;
}

static bool folder_writable(const char *path)
{
    char *folder = ka_path_parent(path);
    bool writable = access(folder, W_OK) == 0;
    free(folder);
    return writable;
}

/* A URI is needed to say immutable: SQLite could not make the WAL's shared memory in a read-only folder. */
static int immutable_uri(const char *path, struct ka_buf *uri)
{
    ka_buf_puts(uri, "file:");
    for (const char *c = path; *c; c++)
        ka_buf_printf(uri, strchr("?#%", *c) ? "%%%02x" : "%c", (unsigned char)*c);
    return ka_buf_puts(uri, "?immutable=1");
}

static int open_db(struct ka_store *store, enum ka_store_mode mode, struct ka_err *err)
{
    struct ka_buf uri = {0};
    int flags = SQLITE_OPEN_NOMUTEX | SQLITE_OPEN_EXRESCODE;
    flags |= mode == KA_STORE_READ ? SQLITE_OPEN_READONLY : SQLITE_OPEN_READWRITE;
    flags |= mode == KA_STORE_CREATE ? SQLITE_OPEN_CREATE : 0;
    const char *name = store->path;
    if (mode == KA_STORE_READ && !folder_writable(store->path)) {
        if (immutable_uri(store->path, &uri))
            return ka_fail(err, -ENOMEM, "%s: no memory", store->path);
        name = uri.data;
        flags |= SQLITE_OPEN_URI;
    }
    int rc = sqlite3_open_v2(name, &store->db, flags, NULL);
    ka_buf_free(&uri);
    if (rc)
        return fail_sqlite(store, rc, err);
    sqlite3_busy_timeout(store->db, BUSY_MS);
    sqlite3_limit(store->db, SQLITE_LIMIT_ATTACHED, 0);
    rc = run_sql(store, "PRAGMA trusted_schema = OFF; PRAGMA foreign_keys = ON;", err);
    if (rc == 0 && mode == KA_STORE_WRITE)
        rc = run_sql(store, "PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL;", err);
    if (rc)
        return rc;
    return mode == KA_STORE_CREATE ? create_schema(store, err) : check_schema(store, err);
}

int ka_store_open(const char *path, enum ka_store_mode mode, struct ka_store **out, struct ka_err *err)
{
    bool exists = access(path, F_OK) == 0;
    if (mode != KA_STORE_CREATE && !exists)
        return ka_fail(err, -ENOENT, "%s: no pair store there; make one with `kernel-agent store build DIR`",
                       path);
    if (mode == KA_STORE_CREATE && exists)
        return ka_fail(err, -EEXIST, "%s: exists already", path);
    struct ka_store *store = ka_calloc(1, sizeof(*store));
    store->path = ka_strdup(path);
    int rc = open_db(store, mode, err);
    if (rc)
        ka_store_close(store);
    else
        *out = store;
    return rc;
}

void ka_store_close(struct ka_store *store)
{
    if (!store)
        return;
    sqlite3_close(store->db);
    free(store->path);
    free(store);
}

int ka_store_begin(struct ka_store *store, struct ka_err *err)
{
    return run_sql(store, "BEGIN IMMEDIATE", err);
}

int ka_store_commit(struct ka_store *store, struct ka_err *err)
{
    return run_sql(store, "COMMIT", err);
}

/* ---- writing ---- */

static int put_pair(struct ka_store *store, const struct ka_pair *p, struct ka_err *err)
{
    sqlite3_stmt *stmt = NULL;
    int rc = prepare(
        store,
        "INSERT OR REPLACE INTO pairs (id, path, source, family, op, schedule, dtypes, license, title, stub,"
        " kernels, hash, difficulty) VALUES (?1,?2,?3,?4,?5,?6,?7,?8,?9,?10,?11,?12,?13)",
        &stmt, err);
    if (rc)
        return rc;
    const char *texts[] = {p->id,     p->path,    p->source, p->family, p->op,      p->schedule,
                           p->dtypes, p->license, p->title,  p->stub,   p->kernels, p->hash};
    for (size_t i = 0; i < KA_COUNT(texts); i++)
        sqlite3_bind_text(stmt, (int)i + 1, texts[i], -1, SQLITE_STATIC);
    sqlite3_bind_int(stmt, 13, p->difficulty);
    return step_done(store, stmt, err);
}

static int put_embedding(struct ka_store *store, const char *id, const struct ka_embedding *e,
                         struct ka_err *err)
{
    sqlite3_stmt *stmt = NULL;
    int rc = prepare(
        store,
        "INSERT INTO embeddings (pair, embedder, version, dim, tokens, vector) VALUES (?1,?2,?3,?4,?5,?6)",
        &stmt, err);
    if (rc)
        return rc;
    sqlite3_bind_text(stmt, 1, id, -1, SQLITE_STATIC);
    sqlite3_bind_text(stmt, 2, e->embedder, -1, SQLITE_STATIC);
    sqlite3_bind_int(stmt, 3, e->version);
    sqlite3_bind_int64(stmt, 4, (sqlite3_int64)e->dim);
    sqlite3_bind_int64(stmt, 5, (sqlite3_int64)e->tokens_hash);
    sqlite3_bind_blob64(stmt, 6, e->vector, e->dim * sizeof(float), SQLITE_STATIC);
    return step_done(store, stmt, err);
}

int ka_store_put(struct ka_store *store, const struct ka_pair *pair, const struct ka_embedding *embedding,
                 struct ka_err *err)
{
    if (embedding->dim == 0 || embedding->dim > VECTOR_DIM_MAX)
        return ka_fail(err, -EINVAL, "%s: a vector of %zu numbers is not usable", pair->id, embedding->dim);
    int rc = run_sql(store, "SAVEPOINT put", err);
    if (rc)
        return rc;
    rc = put_pair(store, pair, err);
    if (rc == 0)
        rc = put_embedding(store, pair->id, embedding, err);
    if (rc)
        sqlite3_exec(store->db, "ROLLBACK TO put", NULL, NULL, NULL);
    int released = run_sql(store, "RELEASE put", rc ? NULL : err);
    return rc ? rc : released;
}

/* ---- reading ---- */

static const char *column(sqlite3_stmt *stmt, int i)
{
    const unsigned char *text = sqlite3_column_text(stmt, i);
    return text ? (const char *)text : "";
}

int ka_store_get(struct ka_store *store, const char *id, struct ka_pair *out, struct ka_err *err)
{
    sqlite3_stmt *stmt = NULL;
    int result = prepare(store, "SELECT path, source FROM pairs WHERE id = ?1", &stmt, err);
    if (result)
        return result;
    sqlite3_bind_text(stmt, 1, id, -1, SQLITE_STATIC);
    int rc = sqlite3_step(stmt);
    if (rc == SQLITE_ROW) {
        const char *path = column(stmt, 0), *source = column(stmt, 1);
        result = ka_pair_parse(path, source, (size_t)sqlite3_column_bytes(stmt, 1), out, err);
    } else if (rc == SQLITE_DONE) {
        result = ka_fail(err, -ENOENT, "no pair named %s; `kernel-agent store list` names them", id);
    } else {
        result = fail_sqlite(store, rc, err);
    }
    sqlite3_finalize(stmt);
    return result;
}

static struct ka_store_row row_of(sqlite3_stmt *stmt)
{
    return (struct ka_store_row){.id = column(stmt, 0),
                                 .path = column(stmt, 1),
                                 .family = column(stmt, 2),
                                 .op = column(stmt, 3),
                                 .schedule = column(stmt, 4),
                                 .dtypes = column(stmt, 5),
                                 .license = column(stmt, 6),
                                 .title = column(stmt, 7),
                                 .hash = column(stmt, 8),
                                 .difficulty = sqlite3_column_int(stmt, 9)};
}

int ka_store_each(struct ka_store *store, int (*each)(const struct ka_store_row *row, void *arg), void *arg,
                  struct ka_err *err)
{
    sqlite3_stmt *stmt = NULL;
    int result = prepare(store, "SELECT " ROW_COLUMNS " FROM pairs p ORDER BY p.id", &stmt, err);
    if (result)
        return result;
    int rc;
    while ((rc = sqlite3_step(stmt)) == SQLITE_ROW && result == 0) {
        struct ka_store_row row = row_of(stmt);
        result = each(&row, arg);
    }
    if (result == 0 && rc != SQLITE_DONE)
        result = fail_sqlite(store, rc, err);
    sqlite3_finalize(stmt);
    return result;
}

/* Every pair must have the vector that is asked for, or similarities would be compared across embedders. */
static int check_embedder(struct ka_store *store, const char *embedder, int version, size_t dim,
                          struct ka_err *err)
{
    sqlite3_stmt *stmt = NULL;
    int result = prepare(
        store,
        "SELECT p.id, e.embedder, e.version, e.dim FROM pairs p LEFT JOIN embeddings e ON e.pair = p.id"
        " AND e.embedder = ?1 AND e.version = ?2 AND e.dim = ?3 WHERE e.pair IS NULL LIMIT 1",
        &stmt, err);
    if (result)
        return result;
    sqlite3_bind_text(stmt, 1, embedder, -1, SQLITE_STATIC);
    sqlite3_bind_int(stmt, 2, version);
    sqlite3_bind_int64(stmt, 3, (sqlite3_int64)dim);
    int rc = sqlite3_step(stmt);
    if (rc == SQLITE_ROW)
        result = ka_fail(
            err, -ESTALE,
            "%s: pair %s has no vector of embedder %s version %d; make the store again with `kernel-agent"
            " store build DIR`",
            store->path, column(stmt, 0), embedder, version);
    else if (rc != SQLITE_DONE)
        result = fail_sqlite(store, rc, err);
    sqlite3_finalize(stmt);
    return result;
}

int ka_store_each_vector(struct ka_store *store, const char *embedder, int version, size_t dim,
                         int (*each)(const struct ka_store_row *row, const struct ka_embedding *embedding,
                                     void *arg),
                         void *arg, struct ka_err *err)
{
    sqlite3_stmt *stmt = NULL;
    int result = check_embedder(store, embedder, version, dim, err);
    if (result == 0)
        result = prepare(store,
                         "SELECT " ROW_COLUMNS
                         ", e.tokens, e.vector FROM pairs p JOIN embeddings e ON e.pair = p.id"
                         " WHERE e.embedder = ?1 ORDER BY p.id",
                         &stmt, err);
    if (result)
        return result;
    sqlite3_bind_text(stmt, 1, embedder, -1, SQLITE_STATIC);
    float *vector = ka_calloc(dim, sizeof(float));
    int rc;
    while ((rc = sqlite3_step(stmt)) == SQLITE_ROW && result == 0) {
        struct ka_store_row row = row_of(stmt);
        const void *blob = sqlite3_column_blob(stmt, 11);
        if (!blob || (size_t)sqlite3_column_bytes(stmt, 11) != dim * sizeof(float)) {
            result = ka_fail(err, -EILSEQ, "%s: the vector of %s is damaged; make the store again",
                             store->path, row.id);
            break;
        }
        memcpy(vector, blob, dim * sizeof(float));
        struct ka_embedding e = {embedder, version, dim, vector, (uint64_t)sqlite3_column_int64(stmt, 10)};
        result = each(&row, &e, arg);
    }
    if (result == 0 && rc != SQLITE_DONE)
        result = fail_sqlite(store, rc, err);
    free(vector);
    sqlite3_finalize(stmt);
    return result;
}

int ka_store_count(struct ka_store *store, size_t *out, struct ka_err *err)
{
    int64_t count = 0;
    int rc = read_number(store, "SELECT count(*) FROM pairs", &count, err);
    if (rc == 0)
        *out = (size_t)count;
    return rc;
}

/* ---- idf ---- */

int ka_store_save_idf(struct ka_store *store, const struct ka_idf *idf, struct ka_err *err)
{
    sqlite3_stmt *stmt = NULL;
    int rc = prepare(store, "INSERT OR REPLACE INTO meta (key, value) VALUES ('idf', ?1)", &stmt, err);
    if (rc)
        return rc;
    sqlite3_bind_blob(stmt, 1, idf, sizeof(*idf), SQLITE_STATIC);
    return step_done(store, stmt, err);
}

int ka_store_load_idf(struct ka_store *store, struct ka_idf *out, struct ka_err *err)
{
    sqlite3_stmt *stmt = NULL;
    int result = prepare(store, "SELECT value FROM meta WHERE key = 'idf'", &stmt, err);
    if (result)
        return result;
    int rc = sqlite3_step(stmt);
    if (rc == SQLITE_ROW && sqlite3_column_bytes(stmt, 0) == (int)sizeof(*out))
        memcpy(out, sqlite3_column_blob(stmt, 0), sizeof(*out));
    else if (rc == SQLITE_ROW)
        result = ka_fail(err, -EILSEQ, "%s: its word weights are damaged; make the store again", store->path);
    else if (rc == SQLITE_DONE)
        memset(out, 0, sizeof(*out));
    else
        result = fail_sqlite(store, rc, err);
    sqlite3_finalize(stmt);
    return result;
}

int ka_store_embed(struct ka_store *store, const char *source, size_t len, float out[KA_EMBED_DIM],
                   uint64_t *tokens_hash, struct ka_err *err)
{
    struct ka_idf *idf = ka_calloc(1, sizeof(*idf));
    struct ka_features features = {0};
    int rc = ka_store_load_idf(store, idf, err);
    if (rc == 0)
        rc = ka_features_of(source, len, &features, err);
    if (rc == 0)
        rc = ka_embed(&features, idf, out, err);
    if (rc == 0)
        *tokens_hash = features.tokens_hash;
    ka_features_free(&features);
    free(idf);
    return rc;
}

/* ---- checking ---- */

static int check_hashes(struct ka_store *store, struct ka_err *err)
{
    sqlite3_stmt *stmt = NULL;
    int result = prepare(store, "SELECT id, source, hash FROM pairs ORDER BY id", &stmt, err);
    if (result)
        return result;
    int rc;
    while ((rc = sqlite3_step(stmt)) == SQLITE_ROW && result == 0) {
        char hash[KA_HASH_HEX];
        const char *source = column(stmt, 1);
        ka_hash_hex(source, (size_t)sqlite3_column_bytes(stmt, 1), hash);
        if (strcmp(hash, column(stmt, 2)) != 0)
            result = ka_fail(err, -EILSEQ,
                             "%s: the source of %s is not the one that was stored; make the store again",
                             store->path, column(stmt, 0));
    }
    if (result == 0 && rc != SQLITE_DONE)
        result = fail_sqlite(store, rc, err);
    sqlite3_finalize(stmt);
    return result;
}

int ka_store_check(struct ka_store *store, struct ka_err *err)
{
    sqlite3_stmt *stmt = NULL;
    int result = prepare(store, "PRAGMA integrity_check(1)", &stmt, err);
    if (result)
        return result;
    int rc = sqlite3_step(stmt);
    if (rc != SQLITE_ROW)
        result = fail_sqlite(store, rc == SQLITE_DONE ? SQLITE_CORRUPT : rc, err);
    else if (strcmp(column(stmt, 0), "ok") != 0)
        result = ka_fail(err, -EILSEQ, "%s: damaged (%s); make it again with `kernel-agent store build DIR`",
                         store->path, column(stmt, 0));
    sqlite3_finalize(stmt);
    return result ? result : check_hashes(store, err);
}
