/* The run's SQLite file. Knows the tables, not what the documents mean. */
#include "state.h"

#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "agent/io/work.h"
#include "base/files.h"
#include "base/hash.h"
#include "base/sql.h"

#define SCHEMA_VERSION 2

static const char schema[] =
    "CREATE TABLE doc(name TEXT PRIMARY KEY, body TEXT NOT NULL);"
    "CREATE TABLE snapshot(id INTEGER PRIMARY KEY, parent INTEGER NOT NULL, hash TEXT NOT NULL, phase TEXT "
    "NOT NULL,"
    " origin TEXT NOT NULL, note TEXT NOT NULL, backward TEXT NOT NULL, verdict TEXT, facts TEXT, cost REAL,"
    " UNIQUE(hash, phase, parent));"
    "PRAGMA user_version=2;";

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

/* SQLite's code. */
static int read_number(struct ka_state *state, const char *sql, int64_t *out)
{
    KA_AUTO_STMT sqlite3_stmt *stmt = NULL;
    int rc = ka_sql_start(state->db, &stmt, sql, "");
    rc = rc ? rc : sqlite3_step(stmt);
    if (rc != SQLITE_ROW)
        return rc;
    *out = sqlite3_column_int64(stmt, 0);
    return SQLITE_OK;
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
    int64_t version = 0;
    rc = read_number(state, "PRAGMA user_version", &version) ? db_fail(state, err) : 0;
    if (rc == 0 && version == 0 && create)
        rc = run_sql(state, schema, err);
    else if (rc == 0 && version != SCHEMA_VERSION)
        rc = ka_fail(err, -EIO, "%s: not a run of this version of kernel-agent (schema %d, wanted %d)",
                     state->path, (int)version, SCHEMA_VERSION);
    if (rc) {
        sqlite3_exec(state->db, "ROLLBACK", NULL, NULL, NULL);
        return rc;
    }
    return run_sql(state, "COMMIT", err);
}

/* ---- the disk, on a thread */

/* The first time: both files, and the folder that names them. Closing a file lets go of every lock that this
 * process has on it, SQLite's too: they stay open until SQLite has closed its own. */
static int sync_first(struct ka_state *state)
{
    KA_AUTO_BUF struct ka_buf log = {0};
    KA_AUTO_FREE char *path = ka_strdup(state->path);
    KA_AUTO_CLOSE int folder = open(dirname(path), O_RDONLY | O_CLOEXEC);
    ka_buf_printf(&log, "%s-wal", state->path);
    state->file = open(state->path, O_RDONLY | O_CLOEXEC);
    state->log = open(ka_buf_str(&log), O_RDONLY | O_CLOEXEC);
    bool opened = folder >= 0 && state->file >= 0 && state->log >= 0;
    return !opened || fsync(state->file) != 0 || fsync(folder) != 0 ? -errno : 0;
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
    ka_close_at(&state->file);
    ka_close_at(&state->log);
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

/* Before a write: nothing was lost, and a transaction is open. */
static int begin(struct ka_state *state, struct ka_err *err)
{
    if (state->failed)
        return ka_fail(err, state->failed, "%s", state->why.msg);
    if (sqlite3_get_autocommit(state->db) &&
        sqlite3_exec(state->db, "BEGIN IMMEDIATE", NULL, NULL, NULL) != SQLITE_OK)
        return lose(state, err);
    return 0;
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
    int rc = begin(state, err);
    if (rc)
        return rc;
    KA_AUTO_FREE char *body = json_dumps(doc, JSON_COMPACT | JSON_ENCODE_ANY);
    return ka_sql_run(state->db, "INSERT OR REPLACE INTO doc(name, body) VALUES(?1, ?2)", "ss", name, body)
               ? lose(state, err)
               : 0;
}

static json_t *parse_column(sqlite3_stmt *stmt, int column)
{
    const char *text = (const char *)sqlite3_column_text(stmt, column);
    return text ? json_loads(text, JSON_DECODE_ANY, NULL) : NULL;
}

json_t *ka_state_get(struct ka_state *state, const char *name)
{
    KA_AUTO_STMT sqlite3_stmt *stmt = NULL;
    if (ka_sql_start(state->db, &stmt, "SELECT body FROM doc WHERE name = ?1", "s", name))
        return NULL;
    return sqlite3_step(stmt) == SQLITE_ROW ? parse_column(stmt, 0) : NULL;
}

int ka_state_save_job(struct ka_state *state, const struct ka_job *job, struct ka_err *err)
{
    json_auto_t *doc = ka_job_to_json(job);
    return ka_state_put(state, "job", doc, err);
}

int ka_state_load_job(struct ka_state *state, struct ka_job *job, struct ka_err *err)
{
    json_auto_t *doc = ka_state_get(state, "job");
    return doc ? ka_job_from_json(doc, job, err)
               : ka_fail(err, -ENOENT, "%s: holds no saved job", state->path);
}

/* ---- snapshots */

static int find_snapshot(struct ka_state *state, const char *hash, const struct ka_snapshot *wanted,
                         int64_t *id, struct ka_err *err)
{
    KA_AUTO_STMT sqlite3_stmt *stmt = NULL;
    if (ka_sql_start(state->db, &stmt,
                     "SELECT id FROM snapshot WHERE hash = ?1 AND phase = ?2 AND parent = ?3", "ssi", hash,
                     wanted->phase, wanted->parent))
        return db_fail(state, err);
    if (sqlite3_step(stmt) != SQLITE_ROW)
        return ka_fail(err, -ENOENT, "%s: the snapshot was not stored", state->path);
    *id = sqlite3_column_int64(stmt, 0);
    return 0;
}

int ka_state_snapshot_add(struct ka_state *state, const struct ka_snapshot *s, int64_t *id,
                          struct ka_err *err)
{
    char hash[KA_HASH_HEX];
    ka_hash_hex(s->backward, strlen(s->backward), hash);
    int rc = begin(state, err);
    if (rc)
        return rc;
    if (ka_sql_run(state->db,
                   "INSERT OR IGNORE INTO snapshot(parent, hash, phase, origin, note, backward) "
                   "VALUES(?1,?2,?3,?4,?5,?6)",
                   "isssss", s->parent, hash, s->phase, s->origin, s->note ? s->note : "", s->backward))
        return lose(state, err);
    return find_snapshot(state, hash, s, id, err);
}

int ka_state_snapshot_judge(struct ka_state *state, int64_t id, const json_t *verdict, const json_t *facts,
                            double cost, struct ka_err *err)
{
    int rc = begin(state, err);
    if (rc)
        return rc;
    KA_AUTO_FREE char *verdict_text = verdict ? json_dumps(verdict, JSON_COMPACT) : NULL;
    KA_AUTO_FREE char *facts_text = facts ? json_dumps(facts, JSON_COMPACT) : NULL;
    return ka_sql_run(state->db, "UPDATE snapshot SET verdict = ?2, facts = ?3, cost = ?4 WHERE id = ?1",
                      isfinite(cost) ? "issd" : "iss", id, verdict_text, facts_text, cost)
               ? lose(state, err)
               : 0;
}

static int read_snapshot(struct ka_state *state, const char *sql, int64_t id, bool judged,
                         struct ka_snapshot *out, struct ka_err *err)
{
    KA_AUTO_STMT sqlite3_stmt *stmt = NULL;
    if (ka_sql_start(state->db, &stmt, sql, "i", id))
        return db_fail(state, err);
    if (sqlite3_step(stmt) != SQLITE_ROW)
        return ka_fail(err, -ENOENT, "%s: no snapshot %lld", state->path, (long long)id);
    *out = (struct ka_snapshot){
        .parent = sqlite3_column_int64(stmt, 0),
        .hash = ka_strdup(ka_sql_text(stmt, 1)),
        .phase = ka_strdup(ka_sql_text(stmt, 2)),
        .origin = ka_strdup(ka_sql_text(stmt, 3)),
        .note = ka_strdup(ka_sql_text(stmt, 4)),
        .backward = ka_strdup(ka_sql_text(stmt, 5)),
        .cost = sqlite3_column_type(stmt, 6) == SQLITE_NULL ? INFINITY : sqlite3_column_double(stmt, 6),
        .verdict = judged ? parse_column(stmt, 7) : NULL,
        .facts = judged ? parse_column(stmt, 8) : NULL,
        .id = judged ? sqlite3_column_int64(stmt, 9) : id,
    };
    return 0;
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
    int64_t count = 0;
    read_number(state, "SELECT count(*) FROM snapshot", &count);
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
