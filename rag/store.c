/* The pair store in SQLite. Knows no command line and no search. */
#include "store.h"

#include "prose.h"

#include "base/files.h"
#include "base/sql.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define SCHEMA_VERSION 2
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

/* 1: a row is there, 0: no more, or an error. */
static int step(struct ka_store *store, sqlite3_stmt *stmt, struct ka_err *err)
{
    int rc = sqlite3_step(stmt);
    return rc == SQLITE_ROW ? 1 : rc == SQLITE_DONE ? 0 : fail_sqlite(store, rc, err);
}

/* Prepared, bound and stepped, with the result of step(). */
#define FIRST(store, stmt, err, ...)                                                                         \
    (ka_sql_start((store)->db, stmt, __VA_ARGS__) ? fail_sqlite(store, sqlite3_errcode((store)->db), err)    \
                                                  : step(store, *(stmt), err))

static int read_number(struct ka_store *store, const char *sql, int64_t *out, struct ka_err *err)
{
    KA_AUTO_STMT sqlite3_stmt *stmt = NULL;
    int rc = FIRST(store, &stmt, err, sql, "");
    if (rc <= 0)
        return rc ? rc : fail_sqlite(store, SQLITE_CORRUPT, err);
    *out = sqlite3_column_int64(stmt, 0);
    return 0;
}

/* ---- opening ---- */

static int create_schema(struct ka_store *store, struct ka_err *err)
{
    KA_AUTO_FREE char *sql =
        ka_format("BEGIN IMMEDIATE; %s %s PRAGMA application_id = %d; PRAGMA user_version = %d; COMMIT;",
                  SCHEMA, KA_PROSE_SCHEMA, APPLICATION_ID, SCHEMA_VERSION);
    return run_sql(store, sql, err);
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
    KA_AUTO_FREE char *folder = ka_path_parent(path);
    return access(folder, W_OK) == 0;
}

/* A URI is needed to say immutable: SQLite could not make the WAL's shared memory in a read-only folder. */
static void immutable_uri(const char *path, struct ka_buf *uri)
{
    ka_buf_puts(uri, "file:");
    for (const char *c = path; *c; c++)
        ka_buf_printf(uri, strchr("?#%", *c) ? "%%%02x" : "%c", (unsigned char)*c);
    ka_buf_puts(uri, "?immutable=1");
}

static int open_db(struct ka_store *store, enum ka_store_mode mode, struct ka_err *err)
{
    KA_AUTO_BUF struct ka_buf uri = {0};
    int flags = SQLITE_OPEN_NOMUTEX | SQLITE_OPEN_EXRESCODE;
    flags |= mode == KA_STORE_READ ? SQLITE_OPEN_READONLY : SQLITE_OPEN_READWRITE;
    flags |= mode == KA_STORE_CREATE ? SQLITE_OPEN_CREATE : 0;
    if (mode == KA_STORE_READ && !folder_writable(store->path)) {
        immutable_uri(store->path, &uri);
        flags |= SQLITE_OPEN_URI;
    }
    int rc = sqlite3_open_v2(uri.len ? uri.data : store->path, &store->db, flags, NULL);
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

/* The forward part of a pair, whose words are indexed. */
static int put_prose(struct ka_store *store, const struct ka_pair *p, struct ka_err *err)
{
    size_t len = strlen(p->source);
    const char *after, *marker = ka_marker_find(p->source, len, &after);
    KA_AUTO_STMT sqlite3_stmt *stmt = NULL;
    int rc = FIRST(store, &stmt, err, "SELECT 1 FROM pairs WHERE id = ?1", "s", p->id);
    if (rc < 0)
        return rc;
    int code = rc ? ka_prose_remove(store->db, p->id) : SQLITE_OK;
    if (code == SQLITE_OK)
        code = ka_prose_put(store->db, p->id, p->source, marker ? (size_t)(marker - p->source) : len);
    return code ? fail_sqlite(store, code, err) : 0;
}

int ka_store_put(struct ka_store *store, const struct ka_pair *p, const struct ka_embedding *e,
                 struct ka_err *err)
{
    if (e->dim == 0 || e->dim > VECTOR_DIM_MAX)
        return ka_fail(err, -EINVAL, "%s: a vector of %zu numbers is not usable", p->id, e->dim);
    int rc = run_sql(store, "SAVEPOINT put", err);
    if (rc)
        return rc;
    rc = put_prose(store, p, err);
    int failed =
        rc ? 0
           : ka_sql_run(store->db,
                        "INSERT OR REPLACE INTO pairs (id, path, source, family, op, schedule, dtypes, "
                        "license, title, stub,"
                        " kernels, hash, difficulty) VALUES (?1,?2,?3,?4,?5,?6,?7,?8,?9,?10,?11,?12,?13)",
                        "ssssssssssssi", p->id, p->path, p->source, p->family, p->op, p->schedule, p->dtypes,
                        p->license, p->title, p->stub, p->kernels, p->hash, (int64_t)p->difficulty);
    if (!rc && !failed)
        failed = ka_sql_run(store->db,
                            "INSERT INTO embeddings (pair, embedder, version, dim, tokens, vector) VALUES "
                            "(?1,?2,?3,?4,?5,?6)",
                            "ssiiib", p->id, e->embedder, (int64_t)e->version, (int64_t)e->dim,
                            (int64_t)e->tokens_hash, e->vector, e->dim * sizeof(float));
    if (failed)
        rc = fail_sqlite(store, failed, err);
    if (rc)
        sqlite3_exec(store->db, "ROLLBACK TO put", NULL, NULL, NULL);
    int released = run_sql(store, "RELEASE put", rc ? NULL : err);
    return rc ? rc : released;
}

/* ---- reading ---- */

int ka_store_get(struct ka_store *store, const char *id, struct ka_pair *out, struct ka_err *err)
{
    KA_AUTO_STMT sqlite3_stmt *stmt = NULL;
    int rc = FIRST(store, &stmt, err, "SELECT path, source FROM pairs WHERE id = ?1", "s", id);
    if (rc == 0)
        return ka_fail(err, -ENOENT, "no pair named %s; `kernel-agent store list` names them", id);
    if (rc < 0)
        return rc;
    const char *path = ka_sql_text(stmt, 0), *source = ka_sql_text(stmt, 1);
    return ka_pair_parse(path, source, (size_t)sqlite3_column_bytes(stmt, 1), out, err);
}

static struct ka_store_row row_of(sqlite3_stmt *stmt)
{
    return (struct ka_store_row){.id = ka_sql_text(stmt, 0),
                                 .path = ka_sql_text(stmt, 1),
                                 .family = ka_sql_text(stmt, 2),
                                 .op = ka_sql_text(stmt, 3),
                                 .schedule = ka_sql_text(stmt, 4),
                                 .dtypes = ka_sql_text(stmt, 5),
                                 .license = ka_sql_text(stmt, 6),
                                 .title = ka_sql_text(stmt, 7),
                                 .hash = ka_sql_text(stmt, 8),
                                 .difficulty = sqlite3_column_int(stmt, 9)};
}

int ka_store_each(struct ka_store *store, int (*each)(const struct ka_store_row *row, void *arg), void *arg,
                  struct ka_err *err)
{
    KA_AUTO_STMT sqlite3_stmt *stmt = NULL;
    int rc = FIRST(store, &stmt, err, "SELECT " ROW_COLUMNS " FROM pairs p ORDER BY p.id", "");
    for (; rc == 1; rc = step(store, stmt, err)) {
        struct ka_store_row row = row_of(stmt);
        int ended = each(&row, arg);
        if (ended)
            return ended;
    }
    return rc;
}

/* Every pair must have the vector that is asked for, or similarities would be compared across embedders. */
static int check_embedder(struct ka_store *store, const char *embedder, int version, size_t dim,
                          struct ka_err *err)
{
    KA_AUTO_STMT sqlite3_stmt *stmt = NULL;
    int rc =
        FIRST(store, &stmt, err,
              "SELECT p.id, e.embedder, e.version, e.dim FROM pairs p LEFT JOIN embeddings e ON e.pair = p.id"
              " AND e.embedder = ?1 AND e.version = ?2 AND e.dim = ?3 WHERE e.pair IS NULL LIMIT 1",
              "sii", embedder, (int64_t)version, (int64_t)dim);
    if (rc == 1)
        return ka_fail(
            err, -ESTALE,
            "%s: pair %s has no vector of embedder %s version %d; make the store again with `kernel-agent"
            " store build DIR`",
            store->path, ka_sql_text(stmt, 0), embedder, version);
    return rc;
}

int ka_store_each_vector(struct ka_store *store, const char *embedder, int version, size_t dim,
                         int (*each)(const struct ka_store_row *row, const struct ka_embedding *embedding,
                                     void *arg),
                         void *arg, struct ka_err *err)
{
    KA_AUTO_STMT sqlite3_stmt *stmt = NULL;
    int rc = check_embedder(store, embedder, version, dim, err);
    if (rc)
        return rc;
    KA_AUTO_FREE float *vector = ka_calloc(dim, sizeof(float));
    rc = FIRST(store, &stmt, err,
               "SELECT " ROW_COLUMNS ", e.tokens, e.vector FROM pairs p JOIN embeddings e ON e.pair = p.id"
               " WHERE e.embedder = ?1 ORDER BY p.id",
               "s", embedder);
    for (; rc == 1; rc = step(store, stmt, err)) {
        struct ka_store_row row = row_of(stmt);
        const void *blob = sqlite3_column_blob(stmt, 11);
        if (!blob || (size_t)sqlite3_column_bytes(stmt, 11) != dim * sizeof(float))
            return ka_fail(err, -EILSEQ, "%s: the vector of %s is damaged; make the store again", store->path,
                           row.id);
        memcpy(vector, blob, dim * sizeof(float));
        struct ka_embedding e = {embedder, version, dim, vector, (uint64_t)sqlite3_column_int64(stmt, 10)};
        int ended = each(&row, &e, arg);
        if (ended)
            return ended;
    }
    return rc;
}

int ka_store_each_share(struct ka_store *store, const char *source, size_t len,
                        void (*each)(const char *id, double share, void *arg), void *arg, struct ka_err *err)
{
    const char *after, *marker = ka_marker_find(source, len, &after);
    int code = ka_prose_each(store->db, source, marker ? (size_t)(marker - source) : len, each, arg);
    return code ? fail_sqlite(store, code, err) : 0;
}

int ka_store_count(struct ka_store *store, size_t *out, struct ka_err *err)
{
    int64_t count = 0;
    int rc = read_number(store, "SELECT count(*) FROM pairs", &count, err);
    if (rc == 0)
        *out = (size_t)count;
    return rc;
}

/* ---- measures of the embedder ---- */

int ka_store_save_measures(struct ka_store *store, const struct ka_measures *measures, struct ka_err *err)
{
    int rc = ka_sql_run(store->db, "INSERT OR REPLACE INTO meta (key, value) VALUES ('measures', ?1)", "b",
                        measures, sizeof(*measures));
    return rc ? fail_sqlite(store, rc, err) : 0;
}

int ka_store_load_measures(struct ka_store *store, struct ka_measures *out, struct ka_err *err)
{
    KA_AUTO_STMT sqlite3_stmt *stmt = NULL;
    int rc = FIRST(store, &stmt, err, "SELECT value FROM meta WHERE key = 'measures'", "");
    if (rc < 0)
        return rc;
    if (rc && sqlite3_column_bytes(stmt, 0) != (int)sizeof(*out))
        return ka_fail(err, -EILSEQ, "%s: what its embedder measured is damaged; make the store again",
                       store->path);
    if (rc)
        memcpy(out, sqlite3_column_blob(stmt, 0), sizeof(*out));
    else
        memset(out, 0, sizeof(*out));
    return 0;
}

int ka_store_embed(struct ka_store *store, const char *source, size_t len, float out[KA_EMBED_DIM],
                   uint64_t *tokens_hash, struct ka_err *err)
{
    KA_AUTO_FREE struct ka_measures *measures = ka_calloc(1, sizeof(*measures));
    struct ka_features features = {0};
    int rc = ka_store_load_measures(store, measures, err);
    if (rc == 0)
        rc = ka_features_of(source, len, &features, err);
    if (rc == 0)
        rc = ka_embed(&features, measures, out, err);
    if (rc == 0)
        *tokens_hash = features.tokens_hash;
    ka_features_free(&features);
    return rc;
}

/* ---- checking ---- */

static int check_hashes(struct ka_store *store, struct ka_err *err)
{
    KA_AUTO_STMT sqlite3_stmt *stmt = NULL;
    int rc = FIRST(store, &stmt, err, "SELECT id, source, hash FROM pairs ORDER BY id", "");
    for (; rc == 1; rc = step(store, stmt, err)) {
        char hash[KA_HASH_HEX];
        const char *source = ka_sql_text(stmt, 1);
        ka_hash_hex(source, (size_t)sqlite3_column_bytes(stmt, 1), hash);
        if (strcmp(hash, ka_sql_text(stmt, 2)) != 0)
            return ka_fail(err, -EILSEQ,
                           "%s: the source of %s is not the one that was stored; make the store again",
                           store->path, ka_sql_text(stmt, 0));
    }
    return rc;
}

int ka_store_check(struct ka_store *store, struct ka_err *err)
{
    KA_AUTO_STMT sqlite3_stmt *stmt = NULL;
    int rc = FIRST(store, &stmt, err, "PRAGMA integrity_check(1)", "");
    if (rc <= 0)
        return rc ? rc : fail_sqlite(store, SQLITE_CORRUPT, err);
    if (strcmp(ka_sql_text(stmt, 0), "ok") != 0)
        return ka_fail(err, -EILSEQ, "%s: damaged (%s); make it again with `kernel-agent store build DIR`",
                       store->path, ka_sql_text(stmt, 0));
    return check_hashes(store, err);
}
