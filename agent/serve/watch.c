/* Looks at files every so often, and submits those that changed. Knows no HTTP. */
#include "watch.h"

#include <errno.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "agent/core/fields.h"
#include "agent/core/submission.h"
#include "agent/io/loop.h"
#include "agent/io/work.h"
#include "base/each.h"
#include "base/files.h"
#include "base/log.h"
#include "queue.h"
#include "rag/build.h"

#define EVERY_MS 1000
#define FILES_MAX 10000

struct ka_watch {
    struct ka_loop *loop;
    struct ka_queue *queue;
    char *dir;
    struct ka_soon *next;
    bool looking, stopped;
    size_t pending; /* submissions that wait for the disk */
    json_t *again;  /* paths of files that were not taken on: they are looked at anew */
    json_t *files;  /* path -> {"stamp", "done": of that stamp, "text": to be submitted, "hash": of what was};
                      the thread's while it looks */
};

/* ---- the thread ---- */

static json_t *stamp_of(const char *path)
{
    struct stat st;
    if (stat(path, &st) != 0)
        return json_null();
    return json_sprintf("%lld.%09ld %lld %llu", (long long)st.st_mtim.tv_sec, st.st_mtim.tv_nsec,
                        (long long)st.st_size, (unsigned long long)st.st_ino);
}

static int look_at(void *arg, const char *path, struct ka_err *err)
{
    struct ka_watch *watch = arg;
    KA_AUTO_BUF struct ka_buf text = {0};
    json_t *file = json_object_get(watch->files, path);
    json_t *stamp = stamp_of(path);
    (void)err;
    if (!file && json_object_size(watch->files) < FILES_MAX) {
        file = json_object();
        json_object_set_new(watch->files, path, file);
    }
    bool same = file && json_equal(json_object_get(file, "stamp"), stamp);
    if (file && same && !json_is_true(json_object_get(file, "done"))) {
        json_object_set_new(file, "done", json_true());
        if (ka_file_read(path, KA_SUBMISSION_MAX, &text, NULL) == 0 &&
            strstr(ka_buf_str(&text), "@autodiff") && strstr(ka_buf_str(&text), "SWEEP"))
            json_object_set_new(file, "text", json_stringn(ka_buf_str(&text), text.len));
    } else if (file && !same) {
        json_object_set(file, "stamp", stamp);
        json_object_set_new(file, "done", json_false());
    }
    json_decref(stamp);
    return 0;
}

static void look(void *arg)
{
    struct ka_watch *watch = arg;
    ka_build_walk(watch->dir, look_at, watch, NULL); /* what cannot be read now may be later */
}

/* ---- the loop ---- */

static void watch_free(struct ka_watch *watch)
{
    if (watch->looking || watch->pending)
        return; /* when these have ended */
    json_decref(watch->files);
    json_decref(watch->again);
    free(watch->dir);
    free(watch);
}

/* A submission that waits for the disk. */
struct pending {
    struct ka_watch *watch;
    char *path;
};

/* What is wrong with the file stays so; what is wrong with the disk or the queue passes. */
static void refuse(struct ka_watch *watch, const char *path, int rc, const struct ka_err *err)
{
    ka_log(KA_LOG_ERROR, "--watch: %s is not taken on: %s", path, err->msg);
    if (rc != -EINVAL)
        json_array_append_new(watch->again, json_string(path));
}

static void on_submitted(void *arg, int rc, const struct ka_entry *entry, const struct ka_err *err)
{
    struct pending *pending = arg;
    struct ka_watch *watch = pending->watch;
    watch->pending--;
    if (rc && !watch->stopped)
        refuse(watch, pending->path, rc, err);
    else if (rc == 0)
        ka_log(KA_LOG_INFO, "--watch: %s is the run %s (%s)", entry->name, entry->id,
               ka_entry_state_name(entry->state));
    free(pending->path);
    free(pending);
    if (watch->stopped)
        watch_free(watch);
}

static void on_cancelled(void *arg, int rc, const struct ka_entry *entry, const struct ka_err *err)
{
    (void)arg;
    (void)rc;
    (void)entry;
    (void)err;
}

/* What is queued of the text that the file had before. */
static void cancel_queued(struct ka_watch *watch, const json_t *file)
{
    const char *hash = ka_text_of(file, "hash", "");
    for (size_t i = ka_queue_count(watch->queue); i-- > 0;) {
        const struct ka_entry *entry = ka_queue_at(watch->queue, i);
        struct ka_err err;
        if (entry && entry->state == KA_ENTRY_QUEUED && strcmp(entry->hash, hash) == 0)
            ka_queue_cancel(watch->queue, entry->id, on_cancelled, NULL, &err);
    }
}

static void submit(struct ka_watch *watch, const char *path, json_t *file)
{
    struct ka_submission submission;
    struct ka_err err;
    const char *slash = strrchr(path, '/');
    json_auto_t *doc = json_pack("{s:O, s:s}", "source", json_object_get(file, "text"), "name", slash + 1);
    KA_AUTO_FREE char *body = doc ? json_dumps(doc, JSON_COMPACT) : NULL;
    json_object_del(file, "text");
    int rc = body ? ka_submission_parse(body, strlen(body), &submission, &err)
                  : ka_fail(&err, -EINVAL, "not UTF-8");
    if (rc == 0) {
        char hash[KA_HASH_HEX];
        cancel_queued(watch, file);
        ka_entry_hash(submission.source, submission.options, hash);
        json_object_set_new(file, "hash", json_string(hash));
        struct pending *pending = ka_calloc(1, sizeof(*pending));
        *pending = (struct pending){.watch = watch, .path = ka_strdup(path)};
        watch->pending++;
        rc = ka_queue_submit(watch->queue, &submission, on_submitted, pending, &err);
        ka_submission_free(&submission);
        if (rc)
            on_submitted(pending, rc, NULL, &err);
    } else {
        refuse(watch, path, rc, &err);
    }
}

static void on_time(void *arg);

static void on_looked(void *arg)
{
    struct ka_watch *watch = arg;
    watch->looking = false;
    if (watch->stopped) {
        watch_free(watch);
        return;
    }
    KA_EACH_MEMBER(watch->files, path, file)
        if (json_object_get(file, "text"))
            submit(watch, path, file);
    watch->next = ka_loop_later(watch->loop, EVERY_MS, on_time, watch);
}

static void on_time(void *arg)
{
    struct ka_watch *watch = arg;
    watch->next = NULL;
    KA_EACH(watch->again, i, path)
        json_object_set_new(json_object_get(watch->files, json_string_value(path)), "done", json_false());
    json_array_clear(watch->again);
    watch->looking = true;
    ka_work_start(watch->loop, look, on_looked, watch);
}

int ka_watch_start(struct ka_loop *loop, struct ka_queue *queue, const char *dir, struct ka_watch **out,
                   struct ka_err *err)
{
    char *real = ka_path_real(dir, err);
    if (!real)
        return -ENOENT;
    struct ka_watch *watch = ka_calloc(1, sizeof(*watch));
    *watch = (struct ka_watch){
        .loop = loop, .queue = queue, .dir = real, .files = json_object(), .again = json_array()};
    on_time(watch);
    *out = watch;
    return 0;
}

void ka_watch_stop(struct ka_watch *watch)
{
    if (!watch)
        return;
    ka_soon_cancel(watch->next);
    watch->stopped = true;
    watch_free(watch);
}
