/* Lessons in SQLite. Knows neither verdicts nor prompts. */
#include "lessons.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/each.h"
#include "base/files.h"
#include "base/hash.h"
#include "base/sql.h"

#define APPLICATION_ID 0x6b616c65 /* "kale" */
#define SCHEMA_VERSION 1
#define BUSY_READ_MS 500 /* on the loop; a writer takes a few */
#define BUSY_WRITE_MS 10000
#define TEXT_MAX 4000 /* bytes; longer ones are not ours */

#define TEXTS "kind, finding, change, words, device, audience, run"
static const char *const text_names[] = {"kind", "finding", "change", "words", "device", "audience", "run"};

static const char SCHEMA[] =
    "CREATE TABLE lessons (id INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT NOT NULL UNIQUE,"
    " kind TEXT NOT NULL, finding TEXT NOT NULL, change TEXT NOT NULL, words TEXT NOT NULL,"
    " device TEXT NOT NULL, audience TEXT NOT NULL, run TEXT NOT NULL,"
    " shown INTEGER NOT NULL DEFAULT 0, helped INTEGER NOT NULL DEFAULT 0, vain INTEGER NOT NULL DEFAULT 0,"
    " used INTEGER NOT NULL, version INTEGER NOT NULL, vector BLOB NOT NULL) STRICT;";

/* One open file. */
struct file {
    const char *path;
    sqlite3 *db;
};

#define AUTO_FILE __attribute__((cleanup(close_file)))

static void close_file(struct file *file)
{
    sqlite3_close(file->db); /* an open transaction is rolled back */
}

static int fail_sqlite(const struct file *file, int rc, struct ka_err *err)
{
    const char *why = file->db ? sqlite3_errmsg(file->db) : sqlite3_errstr(rc);
    switch (rc & 0xff) {
    case SQLITE_NOTADB:
    case SQLITE_CORRUPT:
        return ka_fail(err, -EILSEQ, "%s: damaged, or no file of lessons (%s); remove it to begin anew",
                       file->path, why);
    case SQLITE_BUSY:
    case SQLITE_LOCKED:
        return ka_fail(err, -EBUSY, "%s: another process is writing to it; try again", file->path);
    case SQLITE_READONLY:
    case SQLITE_CANTOPEN:
    case SQLITE_PERM:
        return ka_fail(err, -EROFS,
                       "%s: may not be opened or written (%s); make it yours, or set XDG_DATA_HOME",
                       file->path, why);
    case SQLITE_FULL:
        return ka_fail(err, -ENOSPC, "%s: the disk is full", file->path);
    default:
        return ka_fail(err, -EIO, "%s: %s", file->path, why);
    }
}

/* SQLite's code of a statement that gives no rows, as an error. */
static int done(const struct file *file, int rc, struct ka_err *err)
{
    return rc ? fail_sqlite(file, rc, err) : 0;
}

static int run_sql(const struct file *file, const char *sql, struct ka_err *err)
{
    return done(file, sqlite3_exec(file->db, sql, NULL, NULL, NULL), err);
}

/* 1: a row is there, 0: no more, or an error. */
static int step(const struct file *file, sqlite3_stmt *stmt, struct ka_err *err)
{
    int rc = sqlite3_step(stmt);
    return rc == SQLITE_ROW ? 1 : rc == SQLITE_DONE ? 0 : fail_sqlite(file, rc, err);
}

/* Prepared, bound and stepped, with the result of step(). */
#define FIRST(file, stmt, err, ...)                                                                          \
    (ka_sql_start((file)->db, stmt, __VA_ARGS__) ? fail_sqlite(file, sqlite3_errcode((file)->db), err)       \
                                                 : step(file, *(stmt), err))

static int read_number(const struct file *file, const char *sql, int64_t *out, struct ka_err *err)
{
    KA_AUTO_STMT sqlite3_stmt *stmt = NULL;
    int rc = FIRST(file, &stmt, err, sql, "");
    if (rc <= 0)
        return rc ? rc : fail_sqlite(file, SQLITE_CORRUPT, err);
    *out = sqlite3_column_int64(stmt, 0);
    return 0;
}

/* Ours? *empty: a file in which nothing is yet, as a process that was killed leaves it. */
static int check_schema(const struct file *file, bool *empty, struct ka_err *err)
{
    int64_t app = 0, version = 0, tables = 0;
    int rc = read_number(file, "PRAGMA application_id", &app, err);
    if (rc == 0)
        rc = read_number(file, "PRAGMA user_version", &version, err);
    if (rc == 0)
        rc = read_number(file, "SELECT count(*) FROM sqlite_master", &tables, err);
    if (rc)
        return rc;
    *empty = !app && !version && !tables;
    if (*empty)
        return 0;
    if (app != APPLICATION_ID)
        return ka_fail(err, -EILSEQ, "%s: a database, but none of lessons; remove it to begin anew",
                       file->path);
    if (version != SCHEMA_VERSION)
        return ka_fail(err, -EPROTO, "%s: has schema %lld, this program reads %d; remove it to begin anew",
                       file->path, (long long)version, SCHEMA_VERSION);
    return 0;
}

static int open_db(struct file *file, bool write, struct ka_err *err)
{
    int flags = SQLITE_OPEN_NOMUTEX | SQLITE_OPEN_EXRESCODE;
    int rc = sqlite3_open_v2(file->path, &file->db,
                             flags | (write ? SQLITE_OPEN_READWRITE : SQLITE_OPEN_READONLY), NULL);
    if (rc)
        return fail_sqlite(file, rc, err);
    sqlite3_busy_timeout(file->db, write ? BUSY_WRITE_MS : BUSY_READ_MS);
    sqlite3_limit(file->db, SQLITE_LIMIT_ATTACHED, 0);
    return run_sql(file, "PRAGMA trusted_schema = OFF; PRAGMA secure_delete = ON;",
                   err); /* what goes is gone */
}

/* Close with close_file() in any case. -ENOENT: there are no lessons. */
static int open_read(struct file *file, struct ka_err *err)
{
    bool empty = false;
    int rc = access(file->path, F_OK) ? -ENOENT : open_db(file, false, err);
    if (rc == 0)
        rc = check_schema(file, &empty, err);
    if (rc == 0 && empty)
        rc = -ENOENT;
    return rc == -ENOENT ? ka_fail(err, rc, "%s: there are no lessons", file->path) : rc;
}

/* In a transaction of its own, with the table there. */
static int open_write(struct file *file, struct ka_err *err)
{
    bool empty = false;
    int rc = open_db(file, true, err);
    if (rc == 0)
        rc = run_sql(file, "BEGIN IMMEDIATE", err);
    if (rc == 0)
        rc = check_schema(file, &empty, err);
    if (rc || !empty)
        return rc;
    KA_AUTO_FREE char *sql = ka_format("%s PRAGMA application_id = %d; PRAGMA user_version = %d;", SCHEMA,
                                       APPLICATION_ID, SCHEMA_VERSION);
    return run_sql(file, sql, err);
}

static int make_file(const char *path, struct ka_err *err)
{
    KA_AUTO_FREE char *folder = ka_path_parent(path);
    int rc = ka_mkdirs(folder, err);
    if (rc)
        return rc;
    KA_AUTO_CLOSE int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    return fd >= 0
               ? 0
               : ka_fail(err, -EROFS, "%s: %s; make it yours, or set XDG_DATA_HOME", path, strerror(errno));
}

/* ---- reading ---- */

/* The texts of a row, from column `from` on; NULL for what is no lesson. */
static json_t *texts_of(sqlite3_stmt *stmt, int from)
{
    json_t *row = json_object();
    for (size_t i = 0; i < KA_COUNT(text_names); i++) {
        const char *text = ka_sql_text(stmt, from + (int)i);
        json_t *value = strlen(text) <= TEXT_MAX ? json_string(text) : NULL; /* NULL: no UTF-8 */
        if (!value) {
            json_decref(row);
            return NULL;
        }
        json_object_set_new(row, text_names[i], value);
    }
    return row;
}

static int by_similarity(const void *a, const void *b)
{
    const json_t *x = *(json_t *const *)a, *y = *(json_t *const *)b;
    double similar_x = json_number_value(json_object_get(x, "similarity")),
           similar_y = json_number_value(json_object_get(y, "similarity"));
    if (similar_x != similar_y)
        return similar_x > similar_y ? -1 : 1;
    json_int_t id_x = json_integer_value(json_object_get(x, "id")),
               id_y = json_integer_value(json_object_get(y, "id"));
    return id_x < id_y ? -1 : id_x > id_y;
}

/* The first KA_LESSONS_NEAR of each kind, in order. Steals the rows. */
static json_t *nearest(json_t **rows, size_t count)
{
    json_t *found = json_array();
    json_auto_t *kinds = json_object();
    if (count)
        qsort(rows, count, sizeof(*rows), by_similarity);
    for (size_t i = 0; i < count; i++) {
        const char *kind = json_string_value(json_object_get(rows[i], "kind"));
        json_int_t had = json_integer_value(json_object_get(kinds, kind));
        json_object_set_new(kinds, kind, json_integer(had + 1));
        if (had < KA_LESSONS_NEAR)
            json_array_append(found, rows[i]);
        json_decref(rows[i]);
    }
    return found;
}

/* False for a vector that is none of ours. */
static bool similarity_of(sqlite3_stmt *stmt, int column, const float *vector, double *out)
{
    float row[KA_EMBED_DIM], sums[2] = {0};
    const void *blob = sqlite3_column_blob(stmt, column);
    if (!blob || sqlite3_column_bytes(stmt, column) != (int)sizeof(row))
        return false;
    memcpy(row, blob, sizeof(row));
    for (size_t i = 0; i < KA_EMBED_DIM; i++)
        sums[i >= KA_EMBED_STRUCTURE] += row[i] * vector[i];
    *out = (double)ka_embed_similarity(sums[0], sums[1]);
    return fabsf(sums[0]) <= 1.01f && fabsf(sums[1]) <= 1.01f;
}

int ka_lessons_near(const char *path, const struct ka_lessons_query *query, json_t **out, struct ka_err *err)
{
    AUTO_FILE struct file file = {.path = path};
    KA_AUTO_STMT sqlite3_stmt *stmt = NULL;
    KA_AUTO_FREE json_t **rows = NULL;
    size_t count = 0;
    int rc = open_read(&file, err);
    if (rc)
        return rc;
    rc =
        FIRST(&file, &stmt, err,
              "SELECT id, vector, " TEXTS " FROM lessons WHERE device = ?1 AND audience = ?2 AND version = ?3"
              " LIMIT ?4",
              "ssii", query->device, query->audience, (int64_t)KA_EMBED_VERSION, (int64_t)2 * KA_LESSONS_MAX);
    for (; rc == 1; rc = step(&file, stmt, err)) {
        double similarity;
        json_t *row = similarity_of(stmt, 1, query->vector, &similarity) ? texts_of(stmt, 2) : NULL;
        if (!row)
            continue;
        json_object_set_new(row, "id", json_integer(sqlite3_column_int64(stmt, 0)));
        json_object_set_new(row, "similarity", json_real(similarity));
        *KA_APPEND(rows, count) = row;
    }
    json_t *found = nearest(rows, count);
    if (rc == 0)
        *out = found;
    else
        json_decref(found);
    return rc;
}

int ka_lessons_list(const char *path, json_t **out, struct ka_err *err)
{
    AUTO_FILE struct file file = {.path = path};
    KA_AUTO_STMT sqlite3_stmt *stmt = NULL;
    int rc = open_read(&file, err);
    if (rc)
        return rc;
    json_t *list = json_array();
    rc = FIRST(&file, &stmt, err, "SELECT id, shown, helped, vain, " TEXTS " FROM lessons ORDER BY id", "");
    for (; rc == 1; rc = step(&file, stmt, err)) {
        json_t *row = texts_of(stmt, 4);
        if (!row)
            continue;
        json_object_set_new(row, "id", json_integer(sqlite3_column_int64(stmt, 0)));
        json_object_set_new(row, "shown", json_integer(sqlite3_column_int64(stmt, 1)));
        json_object_set_new(row, "helped", json_integer(sqlite3_column_int64(stmt, 2)));
        json_object_set_new(row, "vain", json_integer(sqlite3_column_int64(stmt, 3)));
        json_array_append_new(list, row);
    }
    if (rc == 0)
        *out = list;
    else
        json_decref(list);
    return rc;
}

/* ---- writing ---- */

/* What became of one that was shown. An id that is gone by now is no error. */
static int put_end(const struct file *file, const json_t *told, struct ka_err *err)
{
    int64_t id = json_integer_value(json_object_get(told, "id"));
    const char *end = json_string_value(json_object_get(told, "end"));
    bool helped = end && strcmp(end, "helped") == 0, vain = end && strcmp(end, "vain") == 0;
    int rc = ka_sql_run(file->db,
                        "UPDATE lessons SET shown = shown + 1, helped = helped + ?2,"
                        " vain = CASE WHEN ?2 THEN 0 ELSE vain + ?3 END,"
                        " used = CASE WHEN ?2 THEN (SELECT max(used) + 1 FROM lessons) ELSE used END"
                        " WHERE id = ?1",
                        "iii", id, (int64_t)helped, (int64_t)vain);
    return done(file, rc, err);
}

/* With other numbers it is the same; what is in a name ("x2") is no number. */
static void make_key(const json_t *lesson, char key[static KA_HASH_HEX])
{
    static const char *const parts[] = {"kind", "device", "audience", "same"};
    KA_AUTO_BUF struct ka_buf text = {0};
    for (size_t i = 0; i < KA_COUNT(parts); i++) {
        const char *at = json_string_value(json_object_get(lesson, parts[i]));
        for (bool word = false, number = false; at && *at; at++) {
            bool goes_on = number && (isalnum((unsigned char)*at) || strchr(".+-", *at));
            number = goes_on || (!word && isdigit((unsigned char)*at));
            word = isalnum((unsigned char)*at) || *at == '_';
            if (!number)
                ka_buf_add(&text, at, 1);
            else if (!goes_on)
                ka_buf_puts(&text, "#");
        }
        ka_buf_add(&text, "", 1);
    }
    ka_hash_hex(text.data, text.len, key);
}

static int put_lesson(const struct file *file, const float *vector, const json_t *lesson, struct ka_err *err)
{
    const char *texts[KA_COUNT(text_names)];
    char key[KA_HASH_HEX];
    for (size_t i = 0; i < KA_COUNT(text_names); i++) {
        texts[i] = json_string_value(json_object_get(lesson, text_names[i]));
        if (!texts[i] || strlen(texts[i]) > TEXT_MAX)
            return ka_fail(err, -EINVAL, "internal: a lesson whose %s cannot be kept", text_names[i]);
    }
    make_key(lesson, key);
    int rc = ka_sql_run(
        file->db,
        "INSERT INTO lessons (key, " TEXTS ", used, version, vector) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8,"
        " (SELECT coalesce(max(used), 0) + 1 FROM lessons), ?9, ?10)"
        " ON CONFLICT (key) DO UPDATE SET finding = excluded.finding, change = excluded.change,"
        " words = excluded.words, run = excluded.run, vain = 0,"
        " version = excluded.version, vector = excluded.vector WHERE vain > 0 OR version <> excluded.version",
        "ssssssssib", key, texts[0], texts[1], texts[2], texts[3], texts[4], texts[5], texts[6],
        (int64_t)KA_EMBED_VERSION, vector, KA_EMBED_DIM * sizeof(float));
    if (rc == 0)
        rc = ka_sql_run(file->db,
                        "UPDATE lessons SET used = (SELECT max(used) + 1 FROM lessons) WHERE key = ?1", "s",
                        key);
    return done(file, rc, err);
}

/* Those that do not help, and those that there is no room for. */
static int drop(const struct file *file, struct ka_err *err)
{
    int rc = ka_sql_run(file->db, "DELETE FROM lessons WHERE vain >= ?1", "i", (int64_t)KA_LESSONS_PATIENCE);
    if (rc == 0)
        rc = ka_sql_run(file->db,
                        "DELETE FROM lessons WHERE id NOT IN"
                        " (SELECT id FROM lessons ORDER BY used DESC, id DESC LIMIT ?1)",
                        "i", (int64_t)KA_LESSONS_MAX);
    return done(file, rc, err);
}

int ka_lessons_keep(const char *path, const float *vector, const json_t *taught, struct ka_err *err)
{
    AUTO_FILE struct file file = {.path = path};
    int rc = make_file(path, err);
    if (rc == 0)
        rc = open_write(&file, err);
    KA_EACH(json_object_get(taught, "told"), i, told)
        rc = rc ? rc : put_end(&file, told, err);
    rc = rc ? rc : drop(&file, err);
    KA_EACH(json_object_get(taught, "learned"), i, lesson)
        rc = rc ? rc : put_lesson(&file, vector, lesson, err);
    rc = rc ? rc : drop(&file, err);
    return rc ? rc : run_sql(&file, "COMMIT", err);
}

int ka_lessons_forget(const char *path, int64_t id, size_t *gone, struct ka_err *err)
{
    AUTO_FILE struct file file = {.path = path};
    bool empty = false;
    if (access(path, F_OK))
        return ka_fail(err, -ENOENT, "%s: there are no lessons", path);
    int rc = open_db(&file, true, err);
    if (rc == 0)
        rc = check_schema(&file, &empty, err);
    if (rc == 0 && empty)
        return ka_fail(err, -ENOENT, "%s: there are no lessons", path);
    if (rc == 0)
        rc = done(&file, ka_sql_run(file.db, "DELETE FROM lessons WHERE id = ?1 OR ?1 = 0", "i", id), err);
    if (rc)
        return rc;
    size_t changed = (size_t)sqlite3_changes64(file.db);
    if (id && !changed)
        return ka_fail(err, -ENOENT, "no lesson %lld; `kernel-agent store lessons` lists them",
                       (long long)id);
    *gone = changed;
    return 0;
}
