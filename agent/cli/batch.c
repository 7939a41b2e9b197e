/* Many runs on one loop. Knows files and runs, no phase. */
#include "batch.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "agent/app/asked.h"
#include "agent/core/fields.h"
#include "agent/io/loop.h"
#include "agent/io/signals.h"
#include "agent/run/run.h"
#include "base/files.h"
#include "base/log.h"
#include "batch_files.h"
#include "claim.h"
#include "junit.h"
#include "show.h"

#define EXIT_WAITING 75

enum item_state { PENDING, RUNNING, SKIPPED, ENDED, NEVER_STARTED };

struct item {
    const char *path, *hash;
    enum item_state state;
    int claim; /* while it runs; -1 */
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
    struct ka_batch_file *files;
    struct item *items; /* one for each of them */
    size_t count, running, ended;
    double began;
    char *index_path, *claims; /* a file and a folder that batches at the same time share */
    json_t *index;             /* path -> {"hash", "pair", "run_dir"} of what is verified */
    bool stopping;
};

/* ---- what was done before */

static void load_index(struct batch *batch)
{
    json_decref(batch->index);
    batch->index = json_load_file(batch->index_path, 0, NULL);
    if (!json_is_object(batch->index)) {
        json_decref(batch->index);
        batch->index = json_object();
    }
}

/* Other batches write it too: what they have written meanwhile stays. */
static void note_verified(struct batch *batch, const struct item *item, const struct ka_run *run)
{
    struct ka_err err;
    int lock = -1, rc = ka_claim_take(batch->claims, batch->index_path, true, &lock, &err);
    load_index(batch);
    json_object_set_new(batch->index, item->path,
                        json_pack("{s:s, s:s, s:s}", "hash", item->hash, "pair", ka_run_pair_path(run),
                                  "run_dir", ka_run_dir(run)));
    KA_AUTO_FREE char *text = json_dumps(batch->index, JSON_INDENT(1) | JSON_SORT_KEYS);
    if (rc == 0)
        rc = ka_file_replace(batch->index_path, text, strlen(text), &err);
    if (rc)
        ka_log(KA_LOG_ERROR, "%s", err.msg);
    ka_claim_release(batch->claims, batch->index_path, lock);
}

static bool is_verified(const struct batch *batch, const struct item *item)
{
    json_t *known = json_object_get(batch->index, item->path);
    const char *pair = ka_text_of(known, "pair", NULL);
    bool same = strcmp(ka_text_of(known, "hash", ""), item->hash) == 0;
    return !batch->opts->force && same && pair && access(pair, F_OK) == 0;
}

/* ---- running */

static void fill(struct batch *batch);

static void let_go(struct item *item)
{
    ka_claim_release(item->batch->claims, item->path, item->claim);
    item->claim = -1;
}

/* How far it is, and when it will be over if the rest is like what was. */
static void tell_progress(struct batch *batch)
{
    size_t left = 0, failed = 0;
    for (size_t i = 0; i < batch->count; i++) {
        left += batch->items[i].state == PENDING || batch->items[i].state == RUNNING;
        failed += batch->items[i].exit_code != 0 && batch->items[i].exit_code != EXIT_WAITING;
    }
    double took = ka_clock_seconds() - batch->began,
           seconds = batch->ended ? took / (double)batch->ended * (double)left : 0;
    ka_log(KA_LOG_INFO, "batch: %zu of %zu files, %zu failed, %zu at work%s%.0f%s", batch->count - left,
           batch->count, failed, batch->running, left ? "; about " : "; took ",
           !left          ? took
           : seconds < 90 ? seconds
                          : seconds / 60,
           !left          ? " s"
           : seconds < 90 ? " s left"
                          : " min left");
}

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
    batch->ended++;
    if (item->exit_code == 0)
        note_verified(batch, item, run);
    ka_run_free(run);
    let_go(item);
    tell_progress(batch);
    fill(batch);
}

/* Another run of the file is not gone on with where it cannot be: its folder is gone, the file has changed
 * since, or nobody would answer it. What else is in the way would be so of a fresh one too. */
static bool may_begin_anew(int rc)
{
    return rc == -ENOENT || rc == -ESTALE || rc == -EINVAL;
}

static int start_run(struct batch *batch, struct item *item, struct ka_err *err)
{
    KA_AUTO_FREE char *unfinished = ka_run_find_unfinished(batch->settings.out, item->path);
    const struct ka_run_req request = {.settings = &batch->settings,
                                       .file = item->path,
                                       .mode = KA_RUN_COMPLETE,
                                       .done = on_item_done,
                                       .arg = item};
    int rc = unfinished ? ka_run_resume(&batch->app, &batch->settings, unfinished, on_item_done, item,
                                        &item->run, err)
                        : -ENOENT;
    if (rc && unfinished && may_begin_anew(rc))
        ka_log(KA_LOG_WARN, "%s: begun anew: %s", item->path, err->msg);
    return may_begin_anew(rc) ? ka_run_start(&batch->app, &request, &item->run, err) : rc;
}

/* One process works on a file at a time; another may have verified it since this one looked. */
static void start_item(struct batch *batch, struct item *item)
{
    struct ka_err err;
    int rc = ka_claim_take(batch->claims, item->path, false, &item->claim, &err);
    if (rc == 0) {
        load_index(batch);
        if (is_verified(batch, item)) {
            item->state = SKIPPED;
            let_go(item);
            return;
        }
        rc = start_run(batch, item, &err);
    }
    if (rc) {
        item->state = NEVER_STARTED;
        item->exit_code = rc == -ENOENT || rc == -EFBIG ? 3 : 2;
        item->why = ka_strdup(err.msg);
        let_go(item);
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
    json_auto_t *doc = json_pack("{s:o, s:i, s:f, s:s?}", "files", files, "exit_code", final_code(batch),
                                 "seconds", ka_clock_seconds() - batch->began, "part", batch->opts->part);
    ka_show_json(doc, JSON_INDENT(2) | JSON_REAL_PRECISION(6));
}

static int write_junit(const struct batch *batch, struct ka_err *err)
{
    KA_AUTO_BUF struct ka_buf suites = {0};
    for (size_t i = 0; i < batch->count; i++) {
        const struct item *item = &batch->items[i];
        json_auto_t *said = item->state == SKIPPED   ? json_pack("{s:s, s:s}", "verdict", "not_checked",
                                                                 "failures", "verified before, and unchanged")
                            : item->state == PENDING ? json_pack("{s:s, s:s}", "verdict", "not_checked",
                                                                 "failures", "the batch ended before")
                            : item->why              ? json_pack("{s:{s:s}}", "error", "message", item->why)
                                                     : json_incref(item->result);
        ka_junit_add(&suites, item->path, said);
    }
    return ka_junit_write(batch->opts->junit, &suites, err);
}

static void batch_free(struct batch *batch)
{
    for (size_t i = 0; i < batch->count; i++) {
        free(batch->items[i].why);
        json_decref(batch->items[i].result);
    }
    free(batch->items);
    ka_batch_files_free(batch->files, batch->count);
    free(batch->index_path);
    free(batch->claims);
    json_decref(batch->index);
}

static int batch_prepare(struct batch *batch, const char *dir, struct ka_err *err)
{
    if (ka_batch_files_find(&batch->app, batch->opts, dir, &batch->files, &batch->count, err) ||
        ka_mkdirs(batch->opts->run.out, err))
        return 2;
    batch->items = ka_calloc(batch->count + 1, sizeof(*batch->items));
    batch->index_path = ka_path_join(batch->opts->run.out, "batch.json");
    batch->claims = ka_path_join(batch->opts->run.out, ".batch");
    load_index(batch);
    for (size_t i = 0; i < batch->count; i++) {
        struct item *item = &batch->items[i];
        *item = (struct item){
            .path = batch->files[i].path, .hash = batch->files[i].hash, .claim = -1, .batch = batch};
        item->state = is_verified(batch, item) ? SKIPPED : PENDING;
    }
    return 0;
}

static int show(const struct batch *batch)
{
    struct ka_err err;
    if (batch->opts->json)
        print_json(batch);
    else
        print_table(batch);
    if (batch->opts->junit && write_junit(batch, &err))
        return ka_show_problem(&err, 2);
    return final_code(batch);
}

int ka_batch_main(const struct ka_opts *opts, const char *dir)
{
    struct batch batch = {.opts = opts, .began = ka_clock_seconds()};
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
        code = show(&batch);
    }
    batch_free(&batch);
    ka_settings_free(&batch.settings);
    ka_app_close(&batch.app);
    return code;
}
