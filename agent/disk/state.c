/* The run's SQLite file. Knows the tables, not what the documents mean. */
#include "state.h"

#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <math.h>
#include <sqlite3.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "agent/io/work.h"
#include "base/hash.h"

#define SCHEMA_VERSION 1

static const char schema[] =
    "CREATE TABLE doc(name TEXT PRIMARY KEY, body TEXT NOT NULL);"
    "CREATE TABLE snapshot(id INTEGER PRIMARY KEY, parent INTEGER NOT NULL, hash TEXT NOT NULL, phase TEXT "
    "NOT NULL,"
    " origin TEXT NOT NULL, note TEXT NOT NULL, backward TEXT NOT NULL, verdict TEXT, facts TEXT, cost REAL,"
    " UNIQUE(hash, phase, parent));"
    "PRAGMA user_version=1;";

struct ka_state {
    sqlite3 *db;
    char *path;
    int failed; /* a write was lost: nothing may be committed any more */
    struct ka_err why;

    /* With a loop: a thread has the disk take what was committed. */
    struct ka_loop *loop;
    int file, log;       /* the database and its write-ahead log; -1: not open yet */
    int sync_rc;         /* of the thread */
    bool syncing, again; /* a thread is at it; there were commits since */
    bool closing;
};

static int db_fail(struct ka_state *state, struct ka_err *err)
{
    int code = sqlite3_errcode(state->db);
    if (code == SQLITE_BUSY || code == SQLITE_LOCKED)
        return ka_fail(err, -EBUSY, "%s: this run is open in another process", state->path);
    return ka_fail(err, -EIO, "%s: %s", state->path, sqlite3_errmsg(state->db));
}

static int run_sql(struct ka_state *state, const char *sql, struct ka_err *err)
{
    return sqlite3_exec(state->db, sql, NULL, NULL, NULL) == SQLITE_OK ? 0 : db_fail(state, err);
}

static int read_version(struct ka_state *state, int *version, struct ka_err *err)
{
    sqlite3_stmt *stmt = NULL;
    if (sqlite3_prepare_v2(state->db, "PRAGMA user_version", -1, &stmt, NULL) != SQLITE_OK)
        return db_fail(state, err);
    int rc = 0;
    if (sqlite3_step(stmt) == SQLITE_ROW)
        *version = sqlite3_column_int(stmt, 0);
    else
        rc = db_fail(state, err);
    sqlite3_finalize(stmt);
    return rc;
}

static int prepare_tables(struct ka_state *state, bool create, struct ka_err *err)
{
    /* EXCLUSIVE keeps the lock until the handle is closed: two processes cannot run one run. With it the
     * write-ahead log needs no shared memory, so that it works on network folders; a commit waits for the
     * disk once, where a rollback journal waits four times. The log is moved into the database when the
     * handle is closed: to do so takes the disk's time. */
    int rc = run_sql(state, state->loop ? "PRAGMA synchronous=OFF" : "PRAGMA synchronous=FULL", err);
    if (rc == 0)
        rc = run_sql(state,
                     "PRAGMA locking_mode=EXCLUSIVE; PRAGMA journal_mode=WAL; PRAGMA wal_autocheckpoint=0; "
                     "BEGIN EXCLUSIVE",
                     err);
    if (rc)
        return rc;
    int version = 0;
    rc = read_version(state, &version, err);
    if (rc == 0 && version == 0 && create)
        rc = run_sql(state, schema, err);
    else if (rc == 0 && version != SCHEMA_VERSION)
        rc = ka_fail(err, -EIO, "%s: not a run of this version of kernel-agent (schema %d, wanted %d)",
                     state->path, version, SCHEMA_VERSION);
    if (rc) {
        sqlite3_exec(state->db, "ROLLBACK", NULL, NULL, NULL);
        return rc;
    }
    return run_sql(state, "COMMIT", err);
}

/* ---- the disk, on a thread */

static int sync_path(const char *path)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    int rc = fd < 0 || fsync(fd) != 0 ? -errno : 0;
    if (fd >= 0)
        close(fd);
    return rc;
}

/* The first time: both files, and the folder that names them. Closing a file lets go of every lock that this
 * process has on it, SQLite's too: they stay open until SQLite has closed its own. */
static int sync_first(struct ka_state *state)
{
    struct ka_buf log = {0};
    char *folder = ka_strdup(state->path);
    ka_buf_printf(&log, "%s-wal", state->path);
    state->file = open(state->path, O_RDONLY | O_CLOEXEC);
    state->log = open(ka_buf_str(&log), O_RDONLY | O_CLOEXEC);
    int rc = state->file < 0 || state->log < 0 || fsync(state->file) != 0 ? -errno : 0;
    rc = rc ? rc : sync_path(dirname(folder));
    ka_buf_free(&log);
    free(folder);
    return rc;
}

static void sync_thread(void *arg)
{
    struct ka_state *state = arg;
    state->sync_rc = state->log < 0 ? sync_first(state) : 0;
    if (state->sync_rc == 0 && fdatasync(state->log) != 0)
        state->sync_rc = -errno;
}

static void free_state(void *arg)
{
    struct ka_state *state = arg;
    if (state->file >= 0)
        close(state->file);
    if (state->log >= 0)
        close(state->log);
    free(state->path);
    free(state);
}

static void close_thread(void *arg)
{
    struct ka_state *state = arg;
    sqlite3_exec(state->db, "PRAGMA synchronous=FULL", NULL, NULL, NULL);
    sqlite3_close(state->db);
}

static void sync_behind(struct ka_state *state);

static void on_synced(void *arg)
{
    struct ka_state *state = arg;
    state->syncing = false;
    if (state->sync_rc && !state->failed)
        state->failed = ka_fail(&state->why, -EIO, "%s: the disk does not take it: %s", state->path,
                                strerror(-state->sync_rc));
    if (state->closing)
        ka_work_start(state->loop, close_thread, free_state, state);
    else if (state->again)
        sync_behind(state);
}

static void sync_behind(struct ka_state *state)
{
    state->again = state->syncing;
    if (state->syncing)
        return;
    state->syncing = true;
    ka_work_start(state->loop, sync_thread, on_synced, state);
}

void ka_state_close(struct ka_state *state)
{
    if (!state)
        return;
    state->closing = true;
    if (!state->loop) {
        sqlite3_close(state->db);
        free_state(state);
    } else if (!state->syncing) {
        ka_work_start(state->loop, close_thread, free_state, state);
    }
}

int ka_state_open(const char *path, bool create, struct ka_loop *loop, struct ka_state **out,
                  struct ka_err *err)
{
    struct ka_state *state = ka_calloc(1, sizeof(*state));
    *state = (struct ka_state){.path = ka_strdup(path), .loop = loop, .file = -1, .log = -1};
    int flags = SQLITE_OPEN_READWRITE | (create ? SQLITE_OPEN_CREATE : 0);
    int rc;
    if (sqlite3_open_v2(path, &state->db, flags, NULL) != SQLITE_OK)
        rc = ka_fail(err, create ? -EIO : -ENOENT, "%s: cannot open the run's state: %s", path,
                     sqlite3_errmsg(state->db));
    else
        rc = prepare_tables(state, create, err);
    if (rc) {
        ka_state_close(state);
        return rc;
    }
    if (loop)
        sync_behind(state);
    *out = state;
    return 0;
}

static int prepare(struct ka_state *state, const char *sql, sqlite3_stmt **stmt, struct ka_err *err)
{
    return sqlite3_prepare_v2(state->db, sql, -1, stmt, NULL) == SQLITE_OK ? 0 : db_fail(state, err);
}

/* ---- writing */

/* What belongs together is written together or not at all: after a failed write the others of its transaction
 * are taken back, and every later one is refused with the first one's reason. */
static int lose(struct ka_state *state, struct ka_err *err)
{
    if (!state->failed)
        state->failed = db_fail(state, &state->why);
    sqlite3_exec(state->db, "ROLLBACK", NULL, NULL, NULL);
    return ka_fail(err, state->failed, "%s", state->why.msg);
}

static int prepare_write(struct ka_state *state, const char *sql, sqlite3_stmt **stmt, struct ka_err *err)
{
    if (state->failed)
        return ka_fail(err, state->failed, "%s", state->why.msg);
    if (sqlite3_get_autocommit(state->db) &&
        sqlite3_exec(state->db, "BEGIN IMMEDIATE", NULL, NULL, NULL) != SQLITE_OK)
        return lose(state, err);
    return prepare(state, sql, stmt, NULL) ? lose(state, err) : 0;
}

static int finish_write(struct ka_state *state, sqlite3_stmt *stmt, struct ka_err *err)
{
    int rc = sqlite3_step(stmt) == SQLITE_DONE ? 0 : lose(state, err);
    sqlite3_finalize(stmt);
    return rc;
}

int ka_state_commit(struct ka_state *state, struct ka_err *err)
{
    if (state->failed)
        return ka_fail(err, state->failed, "%s", state->why.msg);
    if (sqlite3_get_autocommit(state->db))
        return 0;
    if (sqlite3_exec(state->db, "COMMIT", NULL, NULL, NULL) != SQLITE_OK)
        return lose(state, err);
    if (state->loop)
        sync_behind(state);
    return 0;
}

/* ---- documents and the job */

int ka_state_put(struct ka_state *state, const char *name, const json_t *doc, struct ka_err *err)
{
    sqlite3_stmt *stmt;
    int rc = prepare_write(state, "INSERT OR REPLACE INTO doc(name, body) VALUES(?1, ?2)", &stmt, err);
    if (rc)
        return rc;
    char *body = json_dumps(doc, JSON_COMPACT | JSON_ENCODE_ANY);
    sqlite3_bind_text(stmt, 1, name, -1, SQLITE_STATIC);
    sqlite3_bind_text(stmt, 2, body, -1, SQLITE_STATIC);
    rc = finish_write(state, stmt, err);
    free(body);
    return rc;
}

static json_t *parse_column(sqlite3_stmt *stmt, int column)
{
    const char *text = (const char *)sqlite3_column_text(stmt, column);
    return text ? json_loads(text, JSON_DECODE_ANY, NULL) : NULL;
}

json_t *ka_state_get(struct ka_state *state, const char *name)
{
    sqlite3_stmt *stmt;
    if (prepare(state, "SELECT body FROM doc WHERE name = ?1", &stmt, NULL))
        return NULL;
    sqlite3_bind_text(stmt, 1, name, -1, SQLITE_STATIC);
    json_t *doc = sqlite3_step(stmt) == SQLITE_ROW ? parse_column(stmt, 0) : NULL;
    sqlite3_finalize(stmt);
    return doc;
}

int ka_state_save_job(struct ka_state *state, const struct ka_job *job, struct ka_err *err)
{
    json_t *doc = ka_job_to_json(job);
    int rc = ka_state_put(state, "job", doc, err);
    json_decref(doc);
    return rc;
}

int ka_state_load_job(struct ka_state *state, struct ka_job *job, struct ka_err *err)
{
    json_t *doc = ka_state_get(state, "job");
    if (!doc)
        return ka_fail(err, -ENOENT, "%s: holds no saved job", state->path);
    int rc = ka_job_from_json(doc, job, err);
    json_decref(doc);
    return rc;
}

/* ---- snapshots */

static int find_snapshot(struct ka_state *state, const char *hash, const struct ka_snapshot *wanted,
                         int64_t *id, struct ka_err *err)
{
    sqlite3_stmt *stmt;
    int rc =
        prepare(state, "SELECT id FROM snapshot WHERE hash = ?1 AND phase = ?2 AND parent = ?3", &stmt, err);
    if (rc)
        return rc;
    sqlite3_bind_text(stmt, 1, hash, -1, SQLITE_STATIC);
    sqlite3_bind_text(stmt, 2, wanted->phase, -1, SQLITE_STATIC);
    sqlite3_bind_int64(stmt, 3, wanted->parent);
    if (sqlite3_step(stmt) == SQLITE_ROW)
        *id = sqlite3_column_int64(stmt, 0);
    else
        rc = ka_fail(err, -ENOENT, "%s: the snapshot was not stored", state->path);
    sqlite3_finalize(stmt);
    return rc;
}

int ka_state_snapshot_add(struct ka_state *state, const struct ka_snapshot *snapshot, int64_t *id,
                          struct ka_err *err)
{
    char hash[KA_HASH_HEX];
    ka_hash_hex(snapshot->backward, strlen(snapshot->backward), hash);
    sqlite3_stmt *stmt;
    int rc = prepare_write(state,
                           "INSERT OR IGNORE INTO snapshot(parent, hash, phase, origin, note, backward) "
                           "VALUES(?1,?2,?3,?4,?5,?6)",
                           &stmt, err);
    if (rc)
        return rc;
    sqlite3_bind_int64(stmt, 1, snapshot->parent);
    sqlite3_bind_text(stmt, 2, hash, -1, SQLITE_STATIC);
    sqlite3_bind_text(stmt, 3, snapshot->phase, -1, SQLITE_STATIC);
    sqlite3_bind_text(stmt, 4, snapshot->origin, -1, SQLITE_STATIC);
    sqlite3_bind_text(stmt, 5, snapshot->note ? snapshot->note : "", -1, SQLITE_STATIC);
    sqlite3_bind_text(stmt, 6, snapshot->backward, -1, SQLITE_STATIC);
    rc = finish_write(state, stmt, err);
    return rc ? rc : find_snapshot(state, hash, snapshot, id, err);
}

int ka_state_snapshot_judge(struct ka_state *state, int64_t id, const json_t *verdict, const json_t *facts,
                            double cost, struct ka_err *err)
{
    sqlite3_stmt *stmt;
    int rc = prepare_write(state, "UPDATE snapshot SET verdict = ?2, facts = ?3, cost = ?4 WHERE id = ?1",
                           &stmt, err);
    if (rc)
        return rc;
    char *verdict_text = verdict ? json_dumps(verdict, JSON_COMPACT) : NULL;
    char *facts_text = facts ? json_dumps(facts, JSON_COMPACT) : NULL;
    sqlite3_bind_int64(stmt, 1, id);
    sqlite3_bind_text(stmt, 2, verdict_text, -1, SQLITE_STATIC);
    sqlite3_bind_text(stmt, 3, facts_text, -1, SQLITE_STATIC);
    if (isfinite(cost))
        sqlite3_bind_double(stmt, 4, cost);
    rc = finish_write(state, stmt, err);
    free(verdict_text);
    free(facts_text);
    return rc;
}

static char *column_copy(sqlite3_stmt *stmt, int column)
{
    const char *text = (const char *)sqlite3_column_text(stmt, column);
    return ka_strdup(text ? text : "");
}

static int read_snapshot(struct ka_state *state, const char *sql, int64_t id, bool judged,
                         struct ka_snapshot *out, struct ka_err *err)
{
    sqlite3_stmt *stmt;
    int rc = prepare(state, sql, &stmt, err);
    if (rc)
        return rc;
    sqlite3_bind_int64(stmt, 1, id);
    if (sqlite3_step(stmt) == SQLITE_ROW) {
        *out = (struct ka_snapshot){
            .parent = sqlite3_column_int64(stmt, 0),
            .hash = column_copy(stmt, 1),
            .phase = column_copy(stmt, 2),
            .origin = column_copy(stmt, 3),
            .note = column_copy(stmt, 4),
            .backward = column_copy(stmt, 5),
            .cost = sqlite3_column_type(stmt, 6) == SQLITE_NULL ? INFINITY : sqlite3_column_double(stmt, 6),
            .verdict = judged ? parse_column(stmt, 7) : NULL,
            .facts = judged ? parse_column(stmt, 8) : NULL,
            .id = judged ? sqlite3_column_int64(stmt, 9) : id,
        };
    } else {
        rc = ka_fail(err, -ENOENT, "%s: no snapshot %lld", state->path, (long long)id);
    }
    sqlite3_finalize(stmt);
    return rc;
}

#define HEAD_COLUMNS "parent, hash, phase, origin, note, backward, cost"

int ka_state_snapshot_get(struct ka_state *state, int64_t id, struct ka_snapshot *out, struct ka_err *err)
{
    return read_snapshot(state, "SELECT " HEAD_COLUMNS ", verdict, facts, id FROM snapshot WHERE id = ?1", id,
                         true, out, err);
}

int ka_state_snapshot_head(struct ka_state *state, int64_t id, struct ka_snapshot *out, struct ka_err *err)
{
    return read_snapshot(state, "SELECT " HEAD_COLUMNS " FROM snapshot WHERE id = ?1", id, false, out, err);
}

int ka_state_snapshot_twin(struct ka_state *state, int64_t id, struct ka_snapshot *out, struct ka_err *err)
{
    return read_snapshot(state,
                         "SELECT " HEAD_COLUMNS
                         ", verdict, facts, id FROM snapshot WHERE verdict IS NOT NULL AND hash = (SELECT "
                         "hash FROM snapshot WHERE id = ?1) ORDER BY id LIMIT 1",
                         id, true, out, err);
}

int64_t ka_state_snapshot_count(struct ka_state *state)
{
    sqlite3_stmt *stmt;
    if (prepare(state, "SELECT count(*) FROM snapshot", &stmt, NULL))
        return 0;
    int64_t count = sqlite3_step(stmt) == SQLITE_ROW ? sqlite3_column_int64(stmt, 0) : 0;
    sqlite3_finalize(stmt);
    return count;
}

void ka_snapshot_free(struct ka_snapshot *snapshot)
{
    free(snapshot->hash);
    free(snapshot->phase);
    free(snapshot->origin);
    free(snapshot->note);
    free(snapshot->backward);
    json_decref(snapshot->verdict);
    json_decref(snapshot->facts);
    memset(snapshot, 0, sizeof(*snapshot));
}
