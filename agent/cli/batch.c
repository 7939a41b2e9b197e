/* Many runs on one loop. Knows files and runs, no phase. */
#include "batch.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "agent/app/asked.h"
#include "agent/core/fields.h"
#include "agent/disk/modules.h"
#include "agent/io/loop.h"
#include "agent/io/signals.h"
#include "agent/run/run.h"
#include "base/files.h"
#include "base/hash.h"
#include "base/log.h"
#include "rag/build.h"
#include "show.h"

#define FILES_MAX 100000

enum item_state { PENDING, RUNNING, SKIPPED, ENDED, NEVER_STARTED };

struct item {
    char *path;
    char hash[KA_HASH_HEX];
    enum item_state state;
    int exit_code;
    json_t *result;
    char *why; /* it could not start */
    struct ka_run *run;
    struct batch *batch;
};

struct batch {
    const struct ka_opts *opts;
    struct ka_app app;
    struct ka_settings settings;
    struct ka_signals *signals;
    struct item *items;
    size_t count, running;
    char *index_path;
    json_t *index; /* path -> {"hash", "pair", "run_dir"} of what is verified */
    bool stopping;
};

/* ---- which files */

/* Of a file and of what it imports; what cannot be read is told by its run. */
static void hash_file(const struct batch *batch, struct item *item, const struct ka_buf *text)
{
    struct ka_modules found;
    const struct ka_modules_req request = {
        .source = ka_buf_str(text), .file = item->path, .path = batch->opts->run.path};
    ka_hash_hex(text->data, text->len, item->hash);
    if (ka_modules_freeze(&request, &found, NULL) || found.count == 0)
        return;
    KA_AUTO_FREE char *both = ka_format("%s %s", item->hash, found.hash);
    ka_hash_hex(both, strlen(both), item->hash);
}

static int add_file(void *arg, const char *path, struct ka_err *err)
{
    struct batch *batch = arg;
    KA_AUTO_BUF struct ka_buf text = {0};
    (void)err;
    if (batch->count == FILES_MAX || ka_file_read(path, (size_t)4 << 20, &text, NULL) ||
        !strstr(ka_buf_str(&text), "@autodiff") || !strstr(ka_buf_str(&text), "SWEEP"))
        return 0;
    struct item *item = KA_APPEND(batch->items, batch->count);
    item->batch = batch;
    item->path = ka_strdup(path);
    hash_file(batch, item, &text);
    return 0;
}

/* ---- what was done before */

static void load_index(struct batch *batch)
{
    batch->index_path = ka_path_join(batch->opts->run.out, "batch.json");
    batch->index = json_load_file(batch->index_path, 0, NULL);
    if (!json_is_object(batch->index)) {
        json_decref(batch->index);
        batch->index = json_object();
    }
}

static void save_index(struct batch *batch)
{
    struct ka_err err;
    KA_AUTO_FREE char *text = json_dumps(batch->index, JSON_INDENT(1) | JSON_SORT_KEYS);
    if (ka_file_replace(batch->index_path, text, strlen(text), &err))
        ka_log(KA_LOG_ERROR, "%s", err.msg);
}

static void skip_verified(struct batch *batch)
{
    for (size_t i = 0; i < batch->count; i++) {
        struct item *item = &batch->items[i];
        json_t *known = json_object_get(batch->index, item->path);
        const char *pair = ka_text_of(known, "pair", NULL);
        bool same = strcmp(ka_text_of(known, "hash", ""), item->hash) == 0;
        if (!batch->opts->force && same && pair && access(pair, F_OK) == 0)
            item->state = SKIPPED;
    }
}

/* ---- running */

static void fill(struct batch *batch);

static void on_item_done(struct ka_run *run, bool waiting, void *arg)
{
    struct item *item = arg;
    struct batch *batch = item->batch;
    (void)waiting;
    item->exit_code = ka_run_exit_code(run);
    item->result = ka_run_result(run);
    item->state = ENDED;
    item->run = NULL;
    batch->running--;
    if (item->exit_code == 0) {
        json_object_set_new(batch->index, item->path,
                            json_pack("{s:s, s:s, s:s}", "hash", item->hash, "pair", ka_run_pair_path(run),
                                      "run_dir", ka_run_dir(run)));
        save_index(batch);
    }
    ka_run_free(run);
    fill(batch);
}

static void start_item(struct batch *batch, struct item *item)
{
    struct ka_err err;
    KA_AUTO_FREE char *unfinished = ka_run_find_unfinished(batch->settings.out, item->path);
    const struct ka_run_req request = {.settings = &batch->settings,
                                       .file = item->path,
                                       .mode = KA_RUN_COMPLETE,
                                       .done = on_item_done,
                                       .arg = item};
    int rc = unfinished ? ka_run_resume(&batch->app, &batch->settings, unfinished, on_item_done, item,
                                        &item->run, &err)
                        : -ENOENT;
    if (rc && rc != -EBUSY) /* what another process works on is left to it */
        rc = ka_run_start(&batch->app, &request, &item->run, &err);
    if (rc) {
        item->state = NEVER_STARTED;
        item->exit_code = rc == -ENOENT || rc == -EFBIG ? 3 : 2;
        item->why = ka_strdup(err.msg);
        return;
    }
    item->state = RUNNING;
    batch->running++;
}

static void fill(struct batch *batch)
{
    for (size_t i = 0; i < batch->count && !batch->stopping; i++) {
        if (batch->running >= (size_t)batch->opts->jobs)
            return;
        if (batch->items[i].state == PENDING)
            start_item(batch, &batch->items[i]);
    }
    if (!batch->running) {
        ka_signals_stop(batch->signals);
        ka_loop_stop(batch->app.loop);
    }
}

static void on_stop(void *arg)
{
    struct batch *batch = arg;
    batch->stopping = true;
    ka_log(KA_LOG_WARN, "interrupted; the same command goes on where this one stopped");
    for (size_t i = 0; i < batch->count; i++)
        if (batch->items[i].state == RUNNING)
            ka_run_interrupt(batch->items[i].run);
}

/* ---- results */

static const char *outcome(const struct item *item)
{
    if (item->state == SKIPPED)
        return "unchanged";
    if (item->state == PENDING)
        return "not begun";
    return ka_text_of(item->result, "verdict", "error");
}

static int final_code(const struct batch *batch)
{
    int code = batch->stopping ? 130 : 0;
    for (size_t i = 0; i < batch->count; i++)
        if (batch->items[i].exit_code > code)
            code = batch->items[i].exit_code;
    return code;
}

static void print_table(const struct batch *batch)
{
    size_t width = 4;
    for (size_t i = 0; i < batch->count; i++)
        width = strlen(batch->items[i].path) > width ? strlen(batch->items[i].path) : width;
    printf("%-*s  %-13s %4s %8s %9s  %s\n", (int)width, "file", "verdict", "exit", "attempts", "seconds",
           "pair or reason");
    for (size_t i = 0; i < batch->count; i++) {
        const struct item *item = &batch->items[i];
        const json_t *has_pair =
            item->state == SKIPPED ? json_object_get(batch->index, item->path) : item->result;
        const char *why = ka_text_of(json_object_get(item->result, "error"), "message", item->why);
        printf("%-*s  %-13s %4d %8lld %9.1f  %s\n", (int)width, item->path, outcome(item), item->exit_code,
               (long long)json_integer_value(json_object_get(item->result, "attempts")),
               json_number_value(json_object_get(item->result, "seconds")),
               item->exit_code && why ? why : ka_text_of(has_pair, "pair", ""));
    }
}

static void print_json(const struct batch *batch)
{
    json_t *files = json_array();
    for (size_t i = 0; i < batch->count; i++) {
        const struct item *item = &batch->items[i];
        json_array_append_new(files, json_pack("{s:s, s:s, s:i, s:O?, s:s?}", "file", item->path, "outcome",
                                               outcome(item), "exit_code", item->exit_code, "result",
                                               item->result, "reason", item->why));
    }
    json_auto_t *doc = json_pack("{s:o, s:i}", "files", files, "exit_code", final_code(batch));
    ka_show_json(doc, JSON_INDENT(2) | JSON_REAL_PRECISION(6));
}

static void batch_free(struct batch *batch)
{
    for (size_t i = 0; i < batch->count; i++) {
        free(batch->items[i].path);
        free(batch->items[i].why);
        json_decref(batch->items[i].result);
    }
    free(batch->items);
    free(batch->index_path);
    json_decref(batch->index);
}

static int batch_prepare(struct batch *batch, const char *dir, struct ka_err *err)
{
    KA_AUTO_FREE char *root = ka_path_real(dir, err);
    if (!root)
        return 2;
    ka_build_walk(root, add_file, batch, NULL); /* a folder that cannot be read has nothing for us */
    if (!batch->count)
        return ka_fail(err, 2, "%s: no forward file (with @autodiff and SWEEP) below it", dir);
    if (ka_mkdirs(batch->opts->run.out, err))
        return 2;
    load_index(batch);
    skip_verified(batch);
    return 0;
}

int ka_batch_main(const struct ka_opts *opts, const char *dir)
{
    struct batch batch = {.opts = opts};
    struct ka_err err;
    int code = ka_app_open(&batch.app, opts, true, opts->jobs, &err);
    if (code == 0 && ka_settings_init(&batch.settings, opts, &batch.app, true, &err))
        code = 2;
    if (code == 0)
        code = batch_prepare(&batch, dir, &err);
    if (code) {
        ka_show_problem(&err, code);
    } else {
        batch.signals = ka_signals_start(batch.app.loop, on_stop, &batch);
        fill(&batch);
        ka_loop_run(batch.app.loop);
        ka_log_progress_end();
        if (opts->json)
            print_json(&batch);
        else
            print_table(&batch);
        code = final_code(&batch);
    }
    batch_free(&batch);
    ka_settings_free(&batch.settings);
    ka_app_close(&batch.app);
    return code;
}
