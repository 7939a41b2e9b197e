/* Sources to compiled kernels, several children at a time. Knows the cache and operation compile, not who
 * asks. */
#include "compile.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/disk/cache.h"
#include "agent/io/child.h"
#include "agent/io/loop.h"
#include "agent/io/work.h"
#include "base/each.h"
#include "base/files.h"
#include "base/hash.h"
#include "base/log.h"
#include "op.h"

#define SOURCES_MAX 256
#define TASKS 8 /* children at a time; they wait for their places like all others */
#define SOURCE_BYTES_MAX ((size_t)4 << 20)

struct ka_compile {
    struct ka_app *app;
    struct ka_settings settings; /* own: the work may outlive who asked for it */
    ka_compile_done_fn done;
    void *arg;
    struct ka_soon *first; /* `done` never runs from inside start; NULL: begun */
    struct task {
        struct ka_compile *compile;
        bool busy;
        bool on_thread;   /* looks into the cache, or puts something there */
        bool again;       /* its first child died */
        struct ka_op *op; /* the child, while there is one */
        size_t at;        /* its source */
        json_t *doc;      /* the child's result, to be kept */
        json_t *found;    /* what the thread found or kept: facts and products */
        struct ka_err err;
    } tasks[TASKS];
    bool cancelled;
    bool gathering;                      /* a thread reads the sources */
    const struct ka_child_result *child; /* kept until then */
    json_t *wanted;
    json_t *sources; /* [[key, text], ...] */
    size_t at;       /* the next that nobody has */
    json_t *entries;
    struct ka_compile_counts counts;
    uint64_t began;
};

static void go_on(struct ka_compile *c);

/* ---- the end ---- */

static void compile_free(void *arg)
{
    struct ka_compile *c = arg;
    json_decref(c->wanted);
    json_decref(c->sources);
    json_decref(c->entries);
    ka_settings_free(&c->settings);
    free(c);
}

/* Goes when the last thread is done, and not under the feet of whoever called. */
static void leave(struct ka_compile *c)
{
    c->cancelled = true;
    if (c->gathering)
        return;
    for (size_t i = 0; i < TASKS; i++)
        if (c->tasks[i].on_thread)
            return;
    ka_soon_cancel(c->first);
    c->first = NULL;
    ka_loop_soon(c->app->loop, compile_free, c);
}

void ka_compile_cancel(struct ka_compile *c)
{
    for (size_t i = 0; i < TASKS; i++) {
        if (c->tasks[i].op)
            ka_op_cancel(c->tasks[i].op);
        c->tasks[i].op = NULL;
    }
    leave(c);
}

/* ---- the toolchain's cache ---- */

static void open_cache(struct ka_app *app, const char *toolchain)
{
    struct ka_err err;
    KA_AUTO_FREE char *root = ka_user_cache(KA_CACHE_NAME);
    int rc = root && toolchain ? ka_cache_open(root, toolchain, app->cache_bytes, &app->cache, &err)
                               : ka_fail(&err, -ENOENT, "no home folder, or no toolchain");
    if (rc)
        ka_log(KA_LOG_WARN, "kernels are compiled anew each time: %s", err.msg);
    app->cache_asked = true;
}

static void on_toolchain(void *arg, const struct ka_op_result *result)
{
    struct task *task = arg;
    struct ka_compile *c = task->compile;
    task->op = NULL;
    task->busy = false;
    if (!c->app->cache_asked && result->child->error != -ECANCELED)
        open_cache(c->app, json_string_value(json_object_get(result->doc, "toolchain")));
    go_on(c);
}

static int ask(struct task *task, json_t *source, ka_op_done_fn done)
{
    struct ka_compile *c = task->compile;
    struct ka_err err;
    struct ka_op_req request = {
        .operation = "compile", .file = c->app->package_dir, .settings = &c->settings};
    int rc = ka_op_start(c->app, &request, json_pack("{s:o}", "source", source), done, task, &task->op, &err);
    if (rc && rc != -ESHUTDOWN)
        ka_log(KA_LOG_WARN, "%s", err.msg);
    return rc;
}

static bool must_ask_toolchain(const struct ka_app *app)
{
    return !app->cache_asked && app->cache_bytes;
}

/* ---- one source ---- */

static const char *key_at(const struct ka_compile *c, size_t at)
{
    return json_string_value(json_array_get(json_array_get(c->sources, at), 0));
}

/* The numbers and the products; the rest of the result belongs to the request. */
static json_t *entry_of(const struct task *task)
{
    const char *key = json_string_value(json_object_get(task->doc, "key"));
    if (!key || strcmp(key, key_at(task->compile, task->at)) != 0)
        return NULL;
    return json_pack("{s:O, s:O, s:O}", "facts", json_object_get(task->doc, "facts"), "metadata",
                     json_object_get(task->doc, "metadata"), "asm", json_object_get(task->doc, "asm"));
}

static json_t *refusal(const char *kind, const char *why)
{
    return json_pack("{s:{s:s, s:s}}", "error", "kind", kind, "message", why);
}

/* The signal by which a compiler ends that finds its own state impossible, or that has none left; 0: another
 * end. What the machine does to it (SIGKILL where memory is short) says nothing of the kernel. */
static int crash_of(const struct ka_op_result *result)
{
    int by = result->status == KA_OP_DIED ? ka_child_signal(result->child) : 0;
    return by == SIGABRT || by == SIGSEGV || by == SIGBUS || by == SIGILL || by == SIGFPE ? by : 0;
}

static json_t *error_of(const struct ka_op_result *result)
{
    json_t *error = json_object_get(result->doc, "error");
    int by = crash_of(result);
    if (error)
        return json_pack("{s:O}", "error", error);
    if (by) {
        char why[200];
        snprintf(why, sizeof(why), "Triton's compiler was ended by signal %d (%s), twice", by, strsignal(by));
        return refusal("unsupported_op", why);
    }
    return refusal("internal", result->message[0] ? result->message : "compile: the child left no entry");
}

/* All sources together have the time of one child: a check that brings many slow ones must not hold up the
 * run. */
static bool is_late(const struct ka_compile *c)
{
    return (ka_clock_ns() - c->began) / 1000000000u > (uint64_t)c->settings.deadline;
}

/* ---- on a thread: an entry is megabytes of text */

static void on_thread_done(void *arg);

static void run_on_thread(struct task *task, void (*work)(void *arg))
{
    task->on_thread = true;
    ka_work_start(task->compile->app->loop, work, on_thread_done, task);
}

static void look_up(void *arg)
{
    struct task *task = arg;
    const struct ka_compile *c = task->compile;
    task->found = ka_cache_get(c->app->cache, key_at(c, task->at));
}

static void keep(void *arg)
{
    struct task *task = arg;
    const struct ka_compile *c = task->compile;
    task->found = entry_of(task);
    task->err.msg[0] = '\0';
    if (task->found && c->app->cache)
        ka_cache_put(c->app->cache, key_at(c, task->at), task->found, &task->err);
}

static void on_compiled(void *arg, const struct ka_op_result *result);

static void end_task(struct task *task)
{
    json_decref(task->doc);
    json_decref(task->found);
    task->doc = task->found = NULL;
    task->busy = false;
}

/* What became of its source; the next one. */
static void settle(struct task *task, unsigned *count, json_t *outcome)
{
    struct ka_compile *c = task->compile;
    ++*count;
    json_object_set_new(c->entries, key_at(c, task->at), outcome);
    end_task(task);
    go_on(c);
}

/* Found in the cache, or kept there; else it is compiled. */
static void on_thread_done(void *arg)
{
    struct task *task = arg;
    struct ka_compile *c = task->compile;
    bool kept = task->doc;
    task->on_thread = false;
    if (c->cancelled) {
        end_task(task);
        leave(c);
        return;
    }
    if (kept && task->err.msg[0])
        ka_log(KA_LOG_WARN, "compiled kernel not kept: %s", task->err.msg);
    json_t *facts = json_object_get(task->found, "facts");
    if (json_is_object(facts)) {
        settle(task, kept ? &c->counts.misses : &c->counts.hits, json_pack("{s:O}", "facts", facts));
        return;
    }
    json_t *source = json_array_get(json_array_get(c->sources, task->at), 1);
    const char *why = kept         ? "compile: the child left no entry"
                      : is_late(c) ? "compile: out of time (--deadline)"
                                   : "compile: no child";
    if (kept || is_late(c) || ask(task, json_incref(source), on_compiled) != 0)
        settle(task, &c->counts.failed, refusal("internal", why));
}

/* Failures are not kept: they may be due to a deadline or to memory. */
static void on_compiled(void *arg, const struct ka_op_result *result)
{
    struct task *task = arg;
    task->op = NULL;
    if (result->status == KA_OP_OK) {
        task->again = false;
        task->doc = json_incref(result->doc);
        run_on_thread(task, keep);
        return;
    }
    bool again = crash_of(result) && !task->again;
    task->again = again;
    json_t *source = json_array_get(json_array_get(task->compile->sources, task->at), 1);
    if (again && ask(task, json_incref(source), on_compiled) == 0)
        return;
    settle(task, &task->compile->counts.failed, error_of(result));
}

/* The first that is busy, or that is not; NULL: none. */
static struct task *find_task(struct ka_compile *c, bool busy)
{
    for (size_t i = 0; i < TASKS; i++)
        if (c->tasks[i].busy == busy)
            return &c->tasks[i];
    return NULL;
}

static void go_on(struct ka_compile *c)
{
    struct task *task = &c->tasks[0];
    if (c->cancelled)
        return;
    if (!find_task(c, true) && must_ask_toolchain(c->app) && ask(task, json_null(), on_toolchain) == 0) {
        task->busy = true;
        return;
    }
    while (c->at < json_array_size(c->sources) && (task = find_task(c, false))) {
        task->at = c->at++;
        task->busy = true;
        if (c->app->cache)
            run_on_thread(task, look_up);
        else
            on_thread_done(task);
    }
    if (c->cancelled || find_task(c, true))
        return;
    if (c->done)
        c->done(c->arg, c->entries, &c->counts);
    leave(c);
}

/* ---- the start ---- */

/* What a hostile process wrote: the name must follow from the content. */
static bool take_source(struct ka_compile *c, const char *key)
{
    char hash[KA_HASH_HEX];
    KA_AUTO_FREE char *name = ka_format("compile-%s.json", key);
    KA_AUTO_BUF struct ka_buf text = {0};
    if (ka_child_read(c->child, name, SOURCE_BYTES_MAX, &text))
        return false;
    ka_hash_hex(ka_buf_str(&text), text.len, hash);
    return strcmp(hash, key) == 0 &&
           json_array_append_new(c->sources, json_pack("[s, s%]", key, ka_buf_str(&text), text.len)) == 0;
}

/* On a thread: there may be a gigabyte. */
static void gather(void *arg)
{
    struct ka_compile *c = arg;
    KA_EACH(c->wanted, i, item) {
        const char *key = json_string_value(item);
        if (i >= SOURCES_MAX || !ka_cache_is_key(key) || !take_source(c, key))
            c->counts.dropped++;
    }
}

static void on_gathered(void *arg)
{
    struct ka_compile *c = arg;
    c->gathering = false;
    ka_child_result_free(c->child);
    if (c->counts.dropped)
        ka_log(KA_LOG_WARN, "%u sources of kernels dropped: missing, too large, or not what their key says",
               c->counts.dropped);
    if (c->cancelled)
        leave(c);
    else
        go_on(c);
}

static void on_first(void *arg)
{
    struct ka_compile *c = arg;
    c->first = NULL;
    go_on(c);
}

struct ka_compile *ka_compile_start(struct ka_app *app, const struct ka_settings *settings,
                                    const json_t *wanted, const struct ka_child_result *child,
                                    ka_compile_done_fn done, void *arg)
{
    struct ka_compile *c = ka_calloc(1, sizeof(*c));
    *c = (struct ka_compile){.app = app, .done = done, .arg = arg, .began = ka_clock_ns()};
    ka_settings_copy(&c->settings, settings);
    for (size_t i = 0; i < TASKS; i++)
        c->tasks[i].compile = c;
    c->sources = json_array();
    c->entries = json_object();
    if (json_array_size(wanted)) {
        c->wanted = json_deep_copy(wanted);
        c->child = ka_child_result_keep(child);
        c->gathering = true;
        ka_work_start(app->loop, gather, on_gathered, c);
    } else
        c->first = ka_loop_soon(app->loop, on_first, c);
    return c;
}

void ka_compile_warm(struct ka_app *app, const struct ka_settings *settings)
{
    if (must_ask_toolchain(app))
        ka_compile_start(app, settings, NULL, NULL, NULL, NULL);
}
