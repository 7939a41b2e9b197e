/* Which run is next, and what happens to it. Knows runs and the ledger, no HTTP and no phase. */
#include "queue.h"

#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "agent/core/fields.h"
#include "agent/disk/ledger.h"
#include "agent/io/loop.h"
#include "agent/run/run.h"
#include "allowed.h"
#include "base/files.h"
#include "base/log.h"

#define QUEUED_MAX 10000
#define STARTS_MAX 50  /* of one attempt: a run that ends the service each time is not begun for ever */
#define EAGER_MAX 3    /* starts of an attempt until which it goes on before all others */
#define YIELD_S 15.0   /* that it lets others go first after these */
#define TROUBLE_S 10.0 /* until something is tried again that the disk did not take */
#define TICK_MS 1000

/* What waits for the disk on behalf of a client. */
struct waiter {
    ka_queue_done_fn done;
    void *arg;
    struct waiter *next;
};

struct item {
    struct ka_entry *entry;
    struct ka_queue *queue;
    struct ka_run *run;     /* NULL: none in this process */
    uint64_t version;       /* of the queue, at the last change */
    struct waiter *waiters; /* for the write under way */
    json_t *before;         /* the entry before the change of a client's that is under way */
    struct ka_entry *end;   /* the entry once the disk has its end; NULL */
    double yields;          /* steady time until which others go first: it was interrupted often */
    bool new;               /* its first write is under way */
    bool starting;          /* its start is being written */
    bool going;             /* deleted, once that is written */
    bool unsaved;           /* its end is not on the disk yet */
};

struct ka_queue {
    struct ka_app *app;
    const struct ka_opts *opts;
    char *runs;
    struct ka_ledger *ledger;
    struct item **items; /* by age */
    size_t count, room;
    uint64_t version; /* microseconds when it was opened, and the changes since */
    int busy;         /* starting or running */
    struct ka_soon *tick;
    bool begun, draining;
    void (*drained)(void *arg);
    void *arg;
};

static const double retry_after[] = {5, 30, 90, 300, 600}; /* an endpoint that failed so often */

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_REALTIME, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static void fill(struct ka_queue *queue);

/* ---- the list ---- */

static struct item *add_item(struct ka_queue *queue, struct ka_entry *entry)
{
    if (queue->count == queue->room) {
        queue->room = queue->room ? queue->room * 2 : 64;
        queue->items = ka_realloc(queue->items, queue->room, sizeof(*queue->items));
    }
    struct item *item = ka_calloc(1, sizeof(*item));
    *item = (struct item){.entry = entry, .queue = queue};
    queue->items[queue->count++] = item;
    return item;
}

static void free_item(struct item *item)
{
    ka_entry_free(item->entry);
    ka_entry_free(item->end);
    free(item);
}

static void remove_item(struct item *item)
{
    struct ka_queue *queue = item->queue;
    size_t i = 0;
    while (queue->items[i] != item)
        i++;
    memmove(&queue->items[i], &queue->items[i + 1], (--queue->count - i) * sizeof(*queue->items));
    free_item(item);
}

static struct item *find_item(const struct ka_queue *queue, const char *id)
{
    for (size_t i = 0; i < queue->count; i++)
        if (strcmp(queue->items[i]->entry->id, id) == 0)
            return queue->items[i]->new || queue->items[i]->going ? NULL : queue->items[i];
    return NULL;
}

const struct ka_entry *ka_queue_find(const struct ka_queue *queue, const char *id)
{
    const struct item *item = find_item(queue, id);
    return item ? item->entry : NULL;
}

size_t ka_queue_count(const struct ka_queue *queue)
{
    return queue->count;
}

const struct ka_entry *ka_queue_at(const struct ka_queue *queue, size_t i)
{
    return queue->items[i]->new || queue->items[i]->going ? NULL : queue->items[i]->entry;
}

const char *ka_queue_folder(const struct ka_queue *queue, const char *id)
{
    const struct item *item = find_item(queue, id);
    return !item       ? NULL
           : item->run ? ka_run_dir(item->run)
           : item->end ? item->end->folder
                       : item->entry->folder;
}

uint64_t ka_queue_version(const struct ka_queue *queue)
{
    return queue->version;
}

uint64_t ka_queue_version_at(const struct ka_queue *queue, size_t i)
{
    return queue->items[i]->version;
}

static void touch(struct item *item)
{
    item->version = ++item->queue->version;
}

bool ka_queue_draining(const struct ka_queue *queue)
{
    return queue->draining;
}

/* ---- what waits ---- */

static void save_end(struct item *item);

static void on_tick(void *arg);

/* Something may have to be done that no event tells of. */
static void look_again(struct ka_queue *queue, unsigned ms)
{
    if (!queue->tick)
        queue->tick = ka_loop_later(queue->app->loop, ms, on_tick, queue);
}

static void check_drained(struct ka_queue *queue)
{
    if (!queue->drained)
        return;
    if (queue->busy || !ka_ledger_idle(queue->ledger)) {
        look_again(queue, 5);
        return;
    }
    void (*drained)(void *arg) = queue->drained;
    queue->drained = NULL;
    drained(queue->arg);
}

static void on_tick(void *arg)
{
    struct ka_queue *queue = arg;
    queue->tick = NULL;
    if (queue->draining) {
        check_drained(queue);
        return;
    }
    for (size_t i = 0; i < queue->count; i++)
        if (queue->items[i]->unsaved && !queue->items[i]->going)
            save_end(queue->items[i]);
    fill(queue);
}

static void add_waiter(struct item *item, ka_queue_done_fn done, void *arg)
{
    struct waiter **last = &item->waiters, *waiter = ka_calloc(1, sizeof(*waiter));
    *waiter = (struct waiter){.done = done, .arg = arg};
    while (*last)
        last = &(*last)->next;
    *last = waiter;
}

static void tell_waiters(struct item *item, int rc, const struct ka_entry *entry, const struct ka_err *err)
{
    struct waiter *waiter = item->waiters;
    item->waiters = NULL;
    while (waiter) {
        struct waiter *next = waiter->next;
        waiter->done(waiter->arg, rc, entry, err);
        free(waiter);
        waiter = next;
    }
}

static void put(struct item *item, ka_ledger_done_fn done)
{
    json_auto_t *doc = ka_entry_json(item->end ? item->end : item->entry);
    touch(item);
    ka_ledger_put(item->queue->ledger, item->entry->id, doc, done, item);
}

/* ---- the end of a run ---- */

static void on_end_saved(void *arg, int rc, const struct ka_err *err)
{
    struct item *item = arg;
    if (rc) {
        ka_log(KA_LOG_ERROR, "%s: its end is not written: %s", item->entry->id, err->msg);
        item->unsaved = true;
        look_again(item->queue, TICK_MS);
    } else if (item->end) { /* nobody was told before */
        ka_entry_free(item->entry);
        item->entry = item->end;
        item->end = NULL;
        touch(item);
    }
}

static void save_end(struct item *item)
{
    item->unsaved = false;
    if (!item->end || !item->end->folder) {
        put(item, on_end_saved);
        return;
    }
    json_auto_t *doc = ka_entry_json(item->end);
    ka_ledger_put_after(item->queue->ledger, item->entry->id, doc, item->end->folder, on_end_saved, item);
}

static void set_text(char **text, const char *value)
{
    char *copy = ka_strdup(value);
    free(*text);
    *text = copy;
}

/* The entry as it will be at its end, to be completed. */
static struct ka_entry *begin_end(struct item *item)
{
    json_auto_t *doc = ka_entry_json(item->entry);
    item->end = ka_entry_read(item->entry->id, doc);
    return item->end;
}

static void end_item(struct item *item, enum ka_entry_state state, int exit_code, const char *reason)
{
    struct ka_entry *entry = item->end ? item->end : begin_end(item);
    entry->state = state;
    entry->exit_code = exit_code;
    entry->ended = now();
    set_text(&entry->reason, reason);
    ka_log(exit_code ? KA_LOG_WARN : KA_LOG_INFO, "%s %s: %s (exit code %d)%s%s", entry->id, entry->name,
           ka_entry_state_name(state), exit_code, reason ? ": " : "", reason ? reason : "");
    save_end(item);
}

/* Back into the queue: the same attempt goes on, or the next one begins. */
static void queue_again(struct item *item, double seconds, const char *reason)
{
    item->entry->state = KA_ENTRY_QUEUED;
    item->entry->starts -= item->entry->starts > 0; /* it was not the run that ended the service */
    item->entry->not_before = now() + seconds;
    set_text(&item->entry->reason, reason);
    ka_log(KA_LOG_WARN, "%s %s: again in %g seconds: %s", item->entry->id, item->entry->name, seconds,
           reason);
    save_end(item);
    look_again(item->queue, TICK_MS);
}

/* An outage passes; a key, a model or a request that the endpoint refuses does not. */
static bool try_later(struct item *item, int exit_code, const json_t *error)
{
    int tries = item->entry->attempt - 1;
    if (exit_code != 5 || json_is_true(json_object_get(error, "refused")) ||
        tries >= (int)KA_COUNT(retry_after))
        return false;
    item->entry->attempt++;
    item->entry->starts = 0;
    queue_again(item, retry_after[tries], ka_text_of(error, "message", NULL));
    return true;
}

static void on_run_done(struct ka_run *run, bool waiting, void *arg)
{
    struct item *item = arg;
    struct ka_queue *queue = item->queue;
    struct ka_entry *entry = item->entry;
    int code = ka_run_exit_code(run);
    json_auto_t *result = ka_run_result(run);
    const json_t *error = json_object_get(result, "error");
    const char *why = ka_text_of(error, "message", NULL);
    (void)waiting;
    item->run = NULL;
    queue->busy--;
    if (entry->state == KA_ENTRY_CANCELLED) {
        ka_log(KA_LOG_INFO, "%s %s: cancelled", entry->id, entry->name); /* whatever it came to meanwhile */
    } else if (code == 130) {
        if (!queue->draining) /* else it stays as it is on the disk: running */
            queue_again(item, TROUBLE_S, "its folder could not be written");
    } else if (!try_later(item, code, error)) {
        struct ka_entry *end = begin_end(item);
        ka_entry_spent(end, result);
        set_text(&end->verdict, ka_text_of(result, "verdict", NULL));
        set_text(&end->folder, ka_run_dir(run));
        end_item(item, code == 0 || code == 3 || code == 4 ? KA_ENTRY_DONE : KA_ENTRY_FAILED, code, why);
    }
    ka_run_free(run);
    fill(queue);
}

/* ---- the start of a run ---- */

static char *attempt_folder(const struct item *item)
{
    return ka_format("%s/%s/%d", item->queue->runs, item->entry->id, item->entry->attempt);
}

static char *source_path(const struct item *item)
{
    return ka_format("%s/%s/%s", item->queue->runs, item->entry->id, item->entry->name);
}

int ka_queue_source(const struct ka_queue *queue, const char *id, struct ka_buf *out, struct ka_err *err)
{
    const struct item *item = find_item(queue, id);
    if (!item)
        return ka_fail(err, -ENOENT, "there is no such run");
    KA_AUTO_FREE char *path = source_path(item);
    return ka_file_read(path, KA_SUBMISSION_MAX, out, err);
}

/* The run of this attempt that was begun before. It may have ended, and the service before it could say so:
 * then it only ends once more. */
static int resume(struct item *item, const struct ka_settings *settings)
{
    KA_AUTO_FREE struct dirent **found = NULL;
    struct ka_err err;
    int rc = -ENOENT, count = scandir(settings->out, &found, NULL, alphasort);
    for (int i = count - 1; i >= 0; i--) {
        if (rc && rc != -EBUSY && found[i]->d_name[0] != '.') {
            KA_AUTO_FREE char *dir = ka_path_join(settings->out, found[i]->d_name);
            rc = ka_run_resume(item->queue->app, settings, dir, on_run_done, item, &item->run, &err);
            if (rc)
                ka_log(KA_LOG_WARN, "%s %s: begun anew: %s", item->entry->id, item->entry->name, err.msg);
        }
        free(found[i]);
    }
    return rc;
}

static int begin(struct item *item, struct ka_err *err)
{
    struct ka_queue *queue = item->queue;
    struct ka_settings settings;
    int rc = ka_allowed_settings(queue->opts, queue->app, item->entry->options, &settings, err);
    if (rc)
        return rc;
    KA_AUTO_FREE char *out = attempt_folder(item), *file = source_path(item);
    ka_settings_set(&settings.out, out);
    const struct ka_run_req request = {
        .settings = &settings, .file = file, .mode = KA_RUN_COMPLETE, .done = on_run_done, .arg = item};
    rc = resume(item, &settings);
    if (rc == -EBUSY)
        rc = ka_fail(err, rc, "another process has its folder");
    else if (rc)
        rc = ka_run_start(queue->app, &request, &item->run, err);
    ka_settings_free(&settings);
    return rc;
}

static bool is_trouble(int rc)
{
    return rc == -EBUSY || rc == -ENOSPC || rc == -EROFS || rc == -EIO || rc == -EMFILE || rc == -ENFILE ||
           rc == -EDQUOT;
}

static void on_start_saved(void *arg, int rc, const struct ka_err *saved)
{
    struct item *item = arg;
    struct ka_queue *queue = item->queue;
    struct ka_err err = *saved;
    item->starting = false;
    if (item->entry->state != KA_ENTRY_RUNNING || queue->draining) { /* cancelled meanwhile, or drained */
        queue->busy--;
        fill(queue);
        return;
    }
    if (rc == 0)
        rc = begin(item, &err);
    if (rc == 0) {
        set_text(&item->entry->gpu, ka_run_gpu(item->run));
        touch(item);
        return;
    }
    queue->busy--;
    if (is_trouble(rc))
        queue_again(item, TROUBLE_S, err.msg);
    else
        end_item(item, KA_ENTRY_FAILED, rc == -EINVAL ? 2 : 1, err.msg);
    fill(queue);
}

/* 0 goes first. Where the service is ended over and over, runs that are interrupted each time do not keep the
 * others waiting for ever; nor do they wait for ever themselves. */
static int rank_of(const struct item *item, double steady)
{
    if (item->entry->starts > 0 && item->entry->starts <= EAGER_MAX)
        return 0;
    return item->yields > steady ? 2 : 1;
}

static bool goes_before(const struct item *item, const struct item *other, double steady)
{
    int rank = rank_of(item, steady), others = rank_of(other, steady);
    if (rank != others)
        return rank < others;
    if (rank == 2 && item->entry->starts != other->entry->starts)
        return item->entry->starts < other->entry->starts;
    return item->entry->priority > other->entry->priority;
}

/* A clock that was set back does not keep a run waiting for longer than it was to wait. */
static bool may_start(const struct ka_entry *entry, double time)
{
    double wait = entry->not_before - time;
    return wait <= 0 || wait > retry_after[KA_COUNT(retry_after) - 1];
}

static struct item *next_item(struct ka_queue *queue)
{
    struct item *best = NULL;
    double time = now(), steady = ka_clock_seconds();
    for (size_t i = 0; i < queue->count; i++) {
        struct item *item = queue->items[i];
        if (item->entry->state != KA_ENTRY_QUEUED || item->new || item->starting || item->before || item->end)
            continue;
        if (!may_start(item->entry, time))
            look_again(queue, TICK_MS);
        else if (!best || goes_before(item, best, steady))
            best = item;
    }
    return best;
}

static void start_item(struct item *item)
{
    struct ka_entry *entry = item->entry;
    if (entry->starts >= STARTS_MAX) {
        end_item(item, KA_ENTRY_FAILED, 1, "the service ended too often while this run was under way");
        return;
    }
    entry->state = KA_ENTRY_RUNNING;
    entry->starts++;
    entry->started = entry->started > 0 ? entry->started : now();
    set_text(&entry->reason, NULL);
    set_text(&entry->gpu, NULL);
    item->starting = true;
    item->queue->busy++;
    put(item, on_start_saved);
}

static void fill(struct ka_queue *queue)
{
    struct item *item;
    while (queue->begun && !queue->draining && queue->busy < queue->opts->jobs && (item = next_item(queue)))
        start_item(item);
}

/* ---- what clients ask for ---- */

static void on_taken(void *arg, int rc, const struct ka_err *err)
{
    struct item *item = arg;
    struct ka_queue *queue = item->queue;
    item->new = false;
    touch(item);
    tell_waiters(item, rc, rc ? NULL : item->entry, err);
    if (rc)
        remove_item(item);
    fill(queue);
}

static struct item *find_same(const struct ka_queue *queue, const struct ka_submission *submission)
{
    char hash[KA_HASH_HEX];
    ka_entry_hash(submission->source, submission->options, hash);
    for (size_t i = queue->count; i-- > 0;) {
        struct item *item = queue->items[i];
        bool counts = item->entry->state != KA_ENTRY_FAILED && item->entry->state != KA_ENTRY_CANCELLED;
        if (counts && !item->going && strcmp(item->entry->hash, hash) == 0)
            return item;
    }
    return NULL;
}

static size_t count_queued(const struct ka_queue *queue)
{
    size_t count = 0;
    for (size_t i = 0; i < queue->count; i++)
        count += queue->items[i]->entry->state == KA_ENTRY_QUEUED;
    return count;
}

bool ka_queue_knows(const struct ka_queue *queue, const struct ka_submission *submission)
{
    return !submission->force && find_same(queue, submission) != NULL;
}

int ka_queue_submit(struct ka_queue *queue, const struct ka_submission *submission, ka_queue_done_fn done,
                    void *arg, struct ka_err *err)
{
    struct ka_settings settings;
    if (queue->draining)
        return ka_fail(err, -ESHUTDOWN, "the service is about to end");
    int rc = ka_allowed_settings(queue->opts, queue->app, submission->options, &settings, err);
    if (rc)
        return rc;
    ka_settings_free(&settings);
    struct item *same = submission->force ? NULL : find_same(queue, submission);
    if (same && same->new) {
        add_waiter(same, done, arg);
        return 0;
    }
    if (same) {
        done(arg, 0, same->entry, NULL);
        return 0;
    }
    if (count_queued(queue) >= QUEUED_MAX)
        return ka_fail(err, -EAGAIN, "%d runs are queued already", QUEUED_MAX);
    struct item *item = add_item(
        queue, ka_entry_new(submission->name, submission->source, submission->options, submission->priority));
    item->entry->submitted = now();
    item->new = true;
    add_waiter(item, done, arg);
    json_auto_t *doc = ka_entry_json(item->entry);
    KA_AUTO_FREE char *path = source_path(item);
    ka_ledger_put_file(queue->ledger, item->entry->id, doc, path, submission->source, on_taken, item);
    return 0;
}

/* As it was before a change that the disk did not take. A run that has ended meanwhile is resumed, to end
 * once more. */
static void take_back(struct item *item)
{
    struct ka_entry *entry = ka_entry_read(item->entry->id, item->before);
    if (entry->state == KA_ENTRY_RUNNING && !item->run && !item->starting)
        entry->state = KA_ENTRY_QUEUED;
    ka_entry_free(item->entry);
    item->entry = entry;
    touch(item);
}

static void on_changed(void *arg, int rc, const struct ka_err *err)
{
    struct item *item = arg;
    if (rc)
        take_back(item);
    json_decref(item->before);
    item->before = NULL;
    tell_waiters(item, rc, item->entry, err);
    if (rc == 0 && item->run)
        ka_run_interrupt(item->run);
    fill(item->queue);
}

static int find_settled(const struct ka_queue *queue, const char *id, struct item **out, struct ka_err *err)
{
    struct item *item = find_item(queue, id);
    if (!item)
        return ka_fail(err, -ENOENT, "there is no run %.16s", id);
    if (item->before || item->unsaved || item->end)
        return ka_fail(err, -EBUSY, "the run %s is being changed", id);
    *out = item;
    return 0;
}

static int wrong_state(const struct item *item, const char *wanted, struct ka_err *err)
{
    return ka_fail(err, -EBUSY, "the run %s is %s; only one that %s can be", item->entry->id,
                   ka_entry_state_name(item->entry->state), wanted);
}

int ka_queue_cancel(struct ka_queue *queue, const char *id, ka_queue_done_fn done, void *arg,
                    struct ka_err *err)
{
    struct item *item = NULL;
    int rc = find_settled(queue, id, &item, err);
    if (rc)
        return rc;
    if (ka_entry_ended(item->entry))
        return wrong_state(item, "is queued or runs", err);
    item->before = ka_entry_json(item->entry);
    item->entry->state = KA_ENTRY_CANCELLED;
    item->entry->ended = now();
    if (item->run)
        set_text(&item->entry->folder, ka_run_dir(item->run));
    add_waiter(item, done, arg);
    put(item, on_changed);
    return 0;
}

int ka_queue_retry(struct ka_queue *queue, const char *id, ka_queue_done_fn done, void *arg,
                   struct ka_err *err)
{
    struct item *item = NULL;
    int rc = find_settled(queue, id, &item, err);
    if (rc)
        return rc;
    struct ka_entry *entry = item->entry;
    if (!ka_entry_ended(entry) || item->run)
        return wrong_state(item, "has ended", err);
    if (queue->draining)
        return ka_fail(err, -EBUSY, "the service is about to end");
    item->before = ka_entry_json(entry);
    entry->state = KA_ENTRY_QUEUED;
    entry->attempt++;
    entry->starts = entry->exit_code = 0;
    entry->started = entry->ended = entry->not_before = 0;
    set_text(&entry->verdict, NULL);
    set_text(&entry->reason, NULL);
    set_text(&entry->folder, NULL);
    set_text(&entry->gpu, NULL);
    add_waiter(item, done, arg);
    put(item, on_changed);
    return 0;
}

static void on_deleted(void *arg, int rc, const struct ka_err *err)
{
    struct item *item = arg;
    struct ka_queue *queue = item->queue;
    item->going = rc == 0;
    tell_waiters(item, rc, rc ? item->entry : NULL, err);
    if (rc == 0)
        remove_item(item);
    fill(queue);
}

int ka_queue_delete(struct ka_queue *queue, const char *id, ka_queue_done_fn done, void *arg,
                    struct ka_err *err)
{
    struct item *item = NULL;
    int rc = find_settled(queue, id, &item, err);
    if (rc)
        return rc;
    if (!ka_entry_ended(item->entry) || item->run || item->starting)
        return wrong_state(item, "has ended", err);
    KA_AUTO_FREE char *folder = ka_path_join(queue->runs, id);
    item->going = true;
    add_waiter(item, done, arg);
    ka_ledger_drop(queue->ledger, id, folder, on_deleted, item);
    return 0;
}

/* ---- life ---- */

static void on_entry(void *arg, const char *id, json_t *doc)
{
    struct ka_queue *queue = arg;
    struct ka_entry *entry = ka_entry_read(id, doc);
    if (!entry) {
        ka_log(KA_LOG_ERROR, "the ledger's entry %.40s cannot be read; it is left out", id);
        return;
    }
    if (entry->state == KA_ENTRY_RUNNING)
        entry->state = KA_ENTRY_QUEUED; /* with its starts: it goes on */
    struct item *item = add_item(queue, entry);
    if (entry->starts > EAGER_MAX)
        item->yields = ka_clock_seconds() + YIELD_S;
    touch(item);
}

int ka_queue_open(struct ka_app *app, const struct ka_opts *opts, const char *folder, struct ka_queue **out,
                  struct ka_err *err)
{
    struct ka_queue *queue = ka_calloc(1, sizeof(*queue));
    char *aside = NULL;
    *queue = (struct ka_queue){
        .app = app, .opts = opts, .runs = ka_path_join(folder, "runs"), .version = (uint64_t)(now() * 1e6)};
    KA_AUTO_FREE char *above = ka_path_parent(folder);
    int rc = ka_ledger_open(folder, app->loop, on_entry, queue, &queue->ledger, &aside, err);
    /* What is taken on is below these: they must not go with a loss of power. */
    if (rc == 0)
        rc = ka_mkdirs(queue->runs, err);
    if (rc == 0)
        rc = ka_folder_sync(folder, err);
    if (rc == 0)
        rc = ka_folder_sync(above, err);
    if (rc) {
        ka_queue_free(queue);
        return rc;
    }
    if (aside)
        ka_log(KA_LOG_ERROR,
               "the ledger of %s was damaged: it is now %s, and the service begins with an empty one (the "
               "runs' folders are still there)",
               folder, aside);
    free(aside);
    *out = queue;
    return 0;
}

void ka_queue_begin(struct ka_queue *queue)
{
    queue->begun = true;
    fill(queue);
}

void ka_queue_drain(struct ka_queue *queue, void (*drained)(void *arg), void *arg)
{
    queue->draining = true;
    queue->drained = drained;
    queue->arg = arg;
    for (size_t i = 0; i < queue->count; i++)
        if (queue->items[i]->run)
            ka_run_interrupt(queue->items[i]->run);
    look_again(queue, 1);
}

void ka_queue_free(struct ka_queue *queue)
{
    if (!queue)
        return;
    ka_soon_cancel(queue->tick);
    ka_ledger_close(queue->ledger);
    for (size_t i = 0; i < queue->count; i++)
        free_item(queue->items[i]);
    free(queue->items);
    free(queue->runs);
    free(queue);
}
