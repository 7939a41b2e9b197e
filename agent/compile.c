/* Sources to compiled kernels, several children at a time. Knows the cache and operation compile, not who asks. */
#include "compile.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cache.h"
#include "hash.h"
#include "io/child.h"
#include "log.h"
#include "op.h"

#define SOURCES_MAX 256
#define TASKS 8 /* children at a time; they wait for their places like all others */
#define SOURCE_BYTES_MAX ((size_t)4 << 20)

struct ka_compile {
    struct ka_app *app;
    ka_compile_done_fn done;
    void *arg;
    uv_timer_t first; /* `done` never runs from inside start */
    struct task {
        struct ka_compile *compile;
        struct ka_op *op; /* NULL: free for the next source */
        size_t at;        /* its source */
    } tasks[TASKS];
    json_t *sources; /* [[key, text], ...] */
    size_t at;       /* the next that nobody has */
    json_t *entries;
    struct ka_compile_counts counts;
    uint64_t began;
};

static void go_on(struct ka_compile *c);

/* ---- the end ---- */

static void on_closed(uv_handle_t *handle)
{
    struct ka_compile *c = handle->data;
    json_decref(c->sources);
    json_decref(c->entries);
    free(c);
}

static void leave(struct ka_compile *c)
{
    uv_close((uv_handle_t *)&c->first, on_closed);
}

static void finish(struct ka_compile *c)
{
    if (c->done)
        c->done(c->arg, c->entries, &c->counts);
    leave(c);
}

void ka_compile_cancel(struct ka_compile *c)
{
    for (size_t i = 0; i < TASKS; i++)
        if (c->tasks[i].op)
            ka_op_cancel(c->tasks[i].op);
    leave(c);
}

/* ---- the toolchain's cache ---- */

static void open_cache(struct ka_app *app, const char *toolchain)
{
    struct ka_err err;
    char *root = ka_cache_default_root();
    int rc = root && toolchain ? ka_cache_open(root, toolchain, (uint64_t)app->opts->compile_cache_mb << 20,
                                               &app->cache, &err)
                               : ka_fail(&err, -ENOENT, "no home folder, or no toolchain");
    if (rc)
        ka_log(KA_LOG_WARN, "kernels are compiled anew each time: %s", err.msg);
    app->cache_asked = true;
    free(root);
}

static void on_toolchain(void *arg, const struct ka_op_result *result)
{
    struct task *task = arg;
    struct ka_compile *c = task->compile;
    task->op = NULL;
    if (!c->app->cache_asked)
        open_cache(c->app, json_string_value(json_object_get(result->doc, "toolchain")));
    go_on(c);
}

static int ask(struct task *task, json_t *source, ka_op_done_fn done)
{
    struct ka_compile *c = task->compile;
    struct ka_err err;
    struct ka_op_req request = {.operation = "compile", .file = c->app->package_dir};
    int rc = ka_op_start(c->app, &request, json_pack("{s:o}", "source", source), done, task, &task->op, &err);
    if (rc && rc != -ESHUTDOWN)
        ka_log(KA_LOG_WARN, "%s", err.msg);
    return rc;
}

static bool must_ask_toolchain(const struct ka_app *app)
{
    return !app->cache_asked && !app->opts->no_compile_cache;
}

/* ---- one source ---- */

static const char *key_at(const struct ka_compile *c, size_t at)
{
    return json_string_value(json_array_get(json_array_get(c->sources, at), 0));
}

static void settle(struct ka_compile *c, size_t at, json_t *outcome)
{
    json_object_set_new(c->entries, key_at(c, at), outcome);
}

static json_t *facts_of(const json_t *entry)
{
    return json_pack("{s:O}", "facts", json_object_get(entry, "facts"));
}

/* The numbers and the products; the rest of the result belongs to the request. */
static json_t *entry_of(const struct task *task, const struct ka_op_result *result)
{
    const char *key = json_string_value(json_object_get(result->doc, "key"));
    if (result->status != KA_OP_OK || !key || strcmp(key, key_at(task->compile, task->at)) != 0)
        return NULL;
    return json_pack("{s:O, s:O, s:O}", "facts", json_object_get(result->doc, "facts"), "metadata",
                     json_object_get(result->doc, "metadata"), "asm", json_object_get(result->doc, "asm"));
}

static json_t *refusal(const char *why)
{
    return json_pack("{s:{s:s, s:s}}", "error", "kind", "internal", "message", why);
}

static json_t *error_of(const struct ka_op_result *result)
{
    json_t *error = json_object_get(result->doc, "error");
    if (error)
        return json_pack("{s:O}", "error", error);
    return refusal(result->message[0] ? result->message : "compile: the child left no entry");
}

/* Failures are not kept: they may be due to a deadline or to memory. */
static void on_compiled(void *arg, const struct ka_op_result *result)
{
    struct task *task = arg;
    struct ka_compile *c = task->compile;
    struct ka_err err;
    task->op = NULL;
    json_t *entry = entry_of(task, result);
    if (entry && c->app->cache && ka_cache_put(c->app->cache, key_at(c, task->at), entry, &err))
        ka_log(KA_LOG_WARN, "compiled kernel not kept: %s", err.msg);
    if (entry)
        c->counts.misses++;
    else
        c->counts.failed++;
    settle(c, task->at, entry ? facts_of(entry) : error_of(result));
    json_decref(entry);
    go_on(c);
}

static bool take_cached(struct ka_compile *c)
{
    json_t *entry = c->app->cache ? ka_cache_get(c->app->cache, key_at(c, c->at)) : NULL;
    bool found = json_is_object(json_object_get(entry, "facts"));
    if (found) {
        c->counts.hits++;
        settle(c, c->at, facts_of(entry));
    }
    json_decref(entry);
    return found;
}

/* All sources together have the time of one child: a check that brings many slow ones must not hold up the run. */
static bool is_late(const struct ka_compile *c)
{
    return (uv_hrtime() - c->began) / 1000000000u > (uint64_t)c->app->opts->deadline;
}

static struct task *free_task(struct ka_compile *c)
{
    for (size_t i = 0; i < TASKS; i++)
        if (!c->tasks[i].op)
            return &c->tasks[i];
    return NULL;
}

static bool is_busy(const struct ka_compile *c)
{
    for (size_t i = 0; i < TASKS; i++)
        if (c->tasks[i].op)
            return true;
    return false;
}

static void begin(struct ka_compile *c, struct task *task)
{
    bool late = is_late(c);
    task->at = c->at++;
    json_t *source = json_array_get(json_array_get(c->sources, task->at), 1);
    if (!late && ask(task, json_incref(source), on_compiled) == 0)
        return;
    c->counts.failed++;
    settle(c, task->at, refusal(late ? "compile: out of time (--deadline)" : "compile: no child"));
}

static void go_on(struct ka_compile *c)
{
    struct task *task;
    if (!is_busy(c) && must_ask_toolchain(c->app) && ask(&c->tasks[0], json_null(), on_toolchain) == 0)
        return;
    while (c->at < json_array_size(c->sources) && (task = free_task(c))) {
        if (take_cached(c))
            c->at++;
        else
            begin(c, task);
    }
    if (!is_busy(c))
        finish(c);
}

/* ---- the start ---- */

/* What a hostile process wrote: the name must follow from the content. */
static bool take_source(struct ka_compile *c, const struct ka_child_result *child, const char *key)
{
    char name[KA_HASH_HEX + 16], hash[KA_HASH_HEX];
    struct ka_buf text = {0};
    snprintf(name, sizeof(name), "compile-%s.json", key);
    bool good = ka_child_read(child, name, SOURCE_BYTES_MAX, &text) == 0;
    if (good) {
        ka_hash_hex(ka_buf_str(&text), text.len, hash);
        json_t *source =
            strcmp(hash, key) == 0 ? json_pack("[s, s%]", key, ka_buf_str(&text), text.len) : NULL;
        good = source && json_array_append_new(c->sources, source) == 0;
    }
    ka_buf_free(&text);
    return good;
}

static void on_first(uv_timer_t *timer)
{
    go_on(timer->data);
}

struct ka_compile *ka_compile_start(struct ka_app *app, const json_t *wanted,
                                    const struct ka_child_result *child, ka_compile_done_fn done, void *arg)
{
    struct ka_compile *c = ka_calloc(1, sizeof(*c));
    size_t i;
    json_t *item;
    *c = (struct ka_compile){.app = app, .done = done, .arg = arg, .began = uv_hrtime()};
    for (i = 0; i < TASKS; i++)
        c->tasks[i].compile = c;
    c->sources = json_array();
    c->entries = json_object();
    json_array_foreach((json_t *)wanted, i, item)
    {
        const char *key = json_string_value(item);
        if (i >= SOURCES_MAX || !ka_cache_is_key(key) || !take_source(c, child, key))
            c->counts.dropped++;
    }
    if (c->counts.dropped)
        ka_log(KA_LOG_WARN, "%u sources of kernels dropped: missing, too large, or not what their key says",
               c->counts.dropped);
    uv_timer_init(&app->loop, &c->first);
    c->first.data = c;
    uv_timer_start(&c->first, on_first, 0, 0);
    return c;
}

void ka_compile_warm(struct ka_app *app)
{
    if (must_ask_toolchain(app))
        ka_compile_start(app, NULL, NULL, NULL, NULL);
}
