/* The service's SQLite file. Knows documents by id, not what they mean.
 *
 * The handle is used by one thread at a time: the loop's at opening and closing, else that of the batch under
 * way. */
#include "ledger.h"

#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <time.h>
#include <unistd.h>

#include "agent/io/work.h"
#include "base/files.h"
#include "base/sql.h"

#define SCHEMA_VERSION 1

static const char schema[] =
    "CREATE TABLE entry(number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, doc TEXT "
    "NOT NULL); PRAGMA user_version=1;";

struct change {
    char *id, *doc;    /* no doc: the entry goes */
    char *path, *text; /* a file to be written before; without text: a folder to be removed after */
    char *synced;      /* a folder that the disk is to have before */
    ka_ledger_done_fn done;
    void *arg;
};

struct changes {
    struct change *list;
    size_t count;
};

struct ka_ledger {
    sqlite3 *db;
    char *path;
    int lock;
    struct ka_loop *loop;
    struct changes next, batch; /* gathered; with the thread */
    bool writing;
    int rc; /* of the batch */
    struct ka_err err;
};

/* ---- the thread ---- */

static int write_file(const struct change *change, struct ka_err *err)
{
    KA_AUTO_FREE char *folder = ka_path_parent(change->path);
    int rc = ka_mkdirs(folder, err);
    if (rc == 0)
        rc = ka_file_write(change->path, change->text, strlen(change->text), err);
    return rc ? rc : ka_folder_sync(folder, err);
}

/* The names of the folders that write_file() made: mostly they are in one and the same. */
static int sync_above(const struct changes *batch, struct ka_err *err)
{
    KA_AUTO_FREE char *last = NULL;
    int rc = 0;
    for (size_t i = 0; i < batch->count && rc == 0; i++) {
        if (!batch->list[i].text)
            continue;
        KA_AUTO_FREE char *folder = ka_path_parent(batch->list[i].path);
        char *above = ka_path_parent(folder);
        if (!last || strcmp(last, above) != 0)
            rc = ka_folder_sync(above, err);
        free(last);
        last = above;
    }
    return rc;
}

static int sync_one(const char *path, const struct stat *st, int type, struct FTW *where)
{
    (void)where;
    if (type != FTW_DP && (type != FTW_F || !S_ISREG(st->st_mode)))
        return 0;
    KA_AUTO_CLOSE int fd = open(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    return fd < 0 || fsync(fd) != 0 ? errno == EPERM ? -EIO : -errno : 0; /* -1 is nftw's own */
}

/* The folder, what is in it, and its name in those above it, up to the ledger's. */
static int sync_tree(const struct ka_ledger *ledger, const char *folder, struct ka_err *err)
{
    KA_AUTO_FREE char *top = ka_path_parent(ledger->path), *at = ka_strdup(folder);
    /* A folder that is gone has nothing to lose. */
    int rc = access(folder, F_OK) == 0 ? nftw(folder, sync_one, 16, FTW_PHYS | FTW_DEPTH) : 0;
    if (rc)
        return ka_fail(err, rc == -1 ? -errno : rc, "%s: %s", folder, strerror(rc == -1 ? errno : -rc));
    while (rc == 0 && ka_starts_with(at, top) && strcmp(at, top) != 0) {
        char *above = ka_path_parent(at);
        free(at);
        at = above;
        rc = access(at, F_OK) == 0 ? ka_folder_sync(at, err) : 0;
    }
    return rc;
}

static int db_fail(struct ka_ledger *ledger, struct ka_err *err)
{
    int code = sqlite3_errcode(ledger->db);
    /* A disk that has become read-only is an input or output error to SQLite. */
    bool read_only = code == SQLITE_READONLY || (access(ledger->path, W_OK) != 0 && errno == EROFS);
    int rc = code == SQLITE_FULL ? -ENOSPC : read_only ? -EROFS : -EIO;
    return ka_fail(err, rc, "%s: %s", ledger->path, sqlite3_errmsg(ledger->db));
}

static int run_sql(struct ka_ledger *ledger, const char *sql, struct ka_err *err)
{
    return sqlite3_exec(ledger->db, sql, NULL, NULL, NULL) == SQLITE_OK ? 0 : db_fail(ledger, err);
}

static int write_entry(struct ka_ledger *ledger, const struct change *change, struct ka_err *err)
{
    int code = change->doc
                   ? ka_sql_run(ledger->db,
                                "INSERT INTO entry(id, doc) VALUES(?1, ?2) ON CONFLICT(id) DO UPDATE SET "
                                "doc = excluded.doc",
                                "ss", change->id, change->doc)
                   : ka_sql_run(ledger->db, "DELETE FROM entry WHERE id = ?1", "s", change->id);
    return code ? db_fail(ledger, err) : 0;
}

static int write_batch(struct ka_ledger *ledger, struct ka_err *err)
{
    const struct changes *batch = &ledger->batch;
    int rc = 0;
    for (size_t i = 0; i < batch->count && rc == 0; i++)
        rc = batch->list[i].text     ? write_file(&batch->list[i], err)
             : batch->list[i].synced ? sync_tree(ledger, batch->list[i].synced, err)
                                     : 0;
    if (rc == 0)
        rc = sync_above(batch, err);
    if (rc == 0)
        rc = run_sql(ledger, "BEGIN IMMEDIATE", err);
    for (size_t i = 0; i < batch->count && rc == 0; i++)
        rc = write_entry(ledger, &batch->list[i], err);
    if (rc == 0)
        rc = run_sql(ledger, "COMMIT", err);
    if (rc && !sqlite3_get_autocommit(ledger->db))
        sqlite3_exec(ledger->db, "ROLLBACK", NULL, NULL, NULL);
    return rc;
}

static void on_thread(void *arg)
{
    struct ka_ledger *ledger = arg;
    const struct changes *batch = &ledger->batch;
    ledger->err.msg[0] = '\0';
    ledger->rc = write_batch(ledger, &ledger->err);
    for (size_t i = 0; i < batch->count && ledger->rc == 0; i++)
        if (batch->list[i].path && !batch->list[i].text)
            ka_rmtree(batch->list[i].path, NULL); /* what stays of it is in nobody's way */
}

static void write_next(struct ka_ledger *ledger);

static void free_change(struct change *change)
{
    free(change->id);
    free(change->doc);
    free(change->path);
    free(change->text);
    free(change->synced);
}

static void on_written(void *arg)
{
    struct ka_ledger *ledger = arg;
    struct changes batch = ledger->batch;
    int rc = ledger->rc;
    struct ka_err err = ledger->err;
    ledger->batch = (struct changes){0};
    for (size_t i = 0; i < batch.count; i++) { /* may add to the next one */
        if (batch.list[i].done)
            batch.list[i].done(batch.list[i].arg, rc, &err);
        free_change(&batch.list[i]);
    }
    free(batch.list);
    ledger->writing = false;
    write_next(ledger);
}

static void write_next(struct ka_ledger *ledger)
{
    if (ledger->writing || !ledger->next.count)
        return;
    ledger->writing = true;
    ledger->batch = ledger->next;
    ledger->next = (struct changes){0};
    ka_work_start(ledger->loop, on_thread, on_written, ledger);
}

/* ---- changes ---- */

static struct change *add(struct ka_ledger *ledger, const char *id, const json_t *doc, ka_ledger_done_fn done,
                          void *arg)
{
    struct change *change = KA_APPEND(ledger->next.list, ledger->next.count);
    *change = (struct change){
        .id = ka_strdup(id), .doc = doc ? json_dumps(doc, JSON_COMPACT) : NULL, .done = done, .arg = arg};
    return change;
}

void ka_ledger_put(struct ka_ledger *ledger, const char *id, const json_t *doc, ka_ledger_done_fn done,
                   void *arg)
{
    add(ledger, id, doc, done, arg);
    write_next(ledger);
}

void ka_ledger_put_file(struct ka_ledger *ledger, const char *id, const json_t *doc, const char *path,
                        const char *text, ka_ledger_done_fn done, void *arg)
{
    struct change *change = add(ledger, id, doc, done, arg);
    change->path = ka_strdup(path);
    change->text = ka_strdup(text);
    write_next(ledger);
}

void ka_ledger_put_after(struct ka_ledger *ledger, const char *id, const json_t *doc, const char *folder,
                         ka_ledger_done_fn done, void *arg)
{
    add(ledger, id, doc, done, arg)->synced = ka_strdup(folder);
    write_next(ledger);
}

void ka_ledger_drop(struct ka_ledger *ledger, const char *id, const char *folder, ka_ledger_done_fn done,
                    void *arg)
{
    add(ledger, id, NULL, done, arg)->path = ka_strdup(folder);
    write_next(ledger);
}

bool ka_ledger_idle(const struct ka_ledger *ledger)
{
    return !ledger->writing && !ledger->next.count;
}

/* ---- life ---- */

void ka_ledger_close(struct ka_ledger *ledger)
{
    if (!ledger)
        return;
    sqlite3_close(ledger->db);
    ka_close_at(&ledger->lock);
    free(ledger->path);
    free(ledger);
}

/* A lock of the kernel's, which ends with the process; the number in the file is for people. */
static int take_lock(struct ka_ledger *ledger, const char *folder, struct ka_err *err)
{
    KA_AUTO_FREE char *path = ka_path_join(folder, "lock");
    KA_AUTO_BUF struct ka_buf holder = {0};
    ledger->lock = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (ledger->lock < 0)
        return ka_fail(err, -errno, "%s: %s", path, strerror(errno));
    if (flock(ledger->lock, LOCK_EX | LOCK_NB) != 0) {
        ka_fd_read(ledger->lock, 32, &holder);
        return ka_fail(err, -EBUSY, "%s: another service has this state folder (process %s)", folder,
                       ka_buf_str(&holder));
    }
    KA_AUTO_FREE char *own = ka_format("%d", (int)getpid());
    if (ftruncate(ledger->lock, 0) != 0 || ka_fd_write(ledger->lock, own, strlen(own)))
        return ka_fail(err, -errno, "%s: cannot write: %s", path, strerror(errno));
    return 0;
}

/* -EILSEQ: it is damaged. */
static int open_database(struct ka_ledger *ledger, struct ka_err *err)
{
    KA_AUTO_STMT sqlite3_stmt *check = NULL, *version = NULL;
    if (sqlite3_open_v2(ledger->path, &ledger->db, SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE, NULL))
        return db_fail(ledger, err);
    sqlite3_exec(ledger->db, "PRAGMA locking_mode=EXCLUSIVE; PRAGMA journal_mode=WAL", NULL, NULL, NULL);
    int code = ka_sql_start(ledger->db, &check, "PRAGMA quick_check(1)", "");
    code = code ? code : sqlite3_step(check);
    if (code == SQLITE_CORRUPT || code == SQLITE_NOTADB ||
        (code == SQLITE_ROW && strcmp(ka_sql_text(check, 0), "ok") != 0))
        return -EILSEQ;
    if (code != SQLITE_ROW || ka_sql_start(ledger->db, &version, "PRAGMA user_version", "") ||
        sqlite3_step(version) != SQLITE_ROW)
        return db_fail(ledger, err);
    int found = sqlite3_column_int(version, 0);
    ka_sql_end(&check);
    check = NULL;
    ka_sql_end(&version);
    version = NULL;
    if (found != 0 && found != SCHEMA_VERSION)
        return ka_fail(err, -EINVAL, "%s: of another version of kernel-agent (schema %d, wanted %d)",
                       ledger->path, found, SCHEMA_VERSION);
    int rc = run_sql(ledger, "PRAGMA synchronous=FULL", err);
    return rc || found ? rc : run_sql(ledger, schema, err);
}

static int move_aside(struct ka_ledger *ledger, char **aside, struct ka_err *err)
{
    static const char *const parts[] = {"", "-wal", "-shm"};
    sqlite3_close(ledger->db);
    ledger->db = NULL;
    char *to = ka_format("%s.damaged-%lld", ledger->path, (long long)time(NULL));
    for (size_t i = 0; i < KA_COUNT(parts); i++) {
        KA_AUTO_FREE char *old = ka_format("%s%s", ledger->path, parts[i]);
        KA_AUTO_FREE char *new = ka_format("%s%s", to, parts[i]);
        if (rename(old, new) != 0 && errno != ENOENT) {
            free(to);
            return ka_fail(err, -errno, "%s is damaged and cannot be moved aside: %s", old, strerror(errno));
        }
    }
    *aside = to;
    return open_database(ledger, err);
}

static int read_all(struct ka_ledger *ledger, ka_ledger_read_fn read, void *arg, struct ka_err *err)
{
    KA_AUTO_STMT sqlite3_stmt *stmt = NULL;
    if (ka_sql_start(ledger->db, &stmt, "SELECT id, doc FROM entry ORDER BY number", ""))
        return db_fail(ledger, err);
    int code;
    while ((code = sqlite3_step(stmt)) == SQLITE_ROW) {
        json_auto_t *doc = json_loads(ka_sql_text(stmt, 1), 0, NULL);
        read(arg, ka_sql_text(stmt, 0), doc);
    }
    return code == SQLITE_DONE ? 0 : db_fail(ledger, err);
}

int ka_ledger_open(const char *folder, struct ka_loop *loop, ka_ledger_read_fn read, void *arg,
                   struct ka_ledger **out, char **aside, struct ka_err *err)
{
    struct ka_ledger *ledger = ka_calloc(1, sizeof(*ledger));
    *ledger = (struct ka_ledger){.path = ka_path_join(folder, "ledger.db"), .lock = -1, .loop = loop};
    char *moved = NULL;
    int rc = ka_mkdirs(folder, err);
    if (rc == 0)
        rc = take_lock(ledger, folder, err);
    if (rc == 0)
        rc = open_database(ledger, err);
    if (rc == -EILSEQ)
        rc = move_aside(ledger, &moved, err);
    if (rc == 0)
        rc = read_all(ledger, read, arg, err);
    if (rc) {
        free(moved);
        ka_ledger_close(ledger);
        return rc;
    }
    *out = ledger;
    *aside = moved;
    return 0;
}
