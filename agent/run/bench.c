/* The steps of a benchmark. What samples mean is agent/core/bench_result.c's. */
#include "bench.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "agent/core/bench_result.h"
#include "agent/core/compose.h"
#include "agent/core/fields.h"
#include "agent/disk/modules.h"
#include "agent/io/cards.h"
#include "agent/io/child.h"
#include "agent/io/loop.h"
#include "agent/ops/op.h"
#include "base/each.h"
#include "base/files.h"
#include "base/hash.h"
#include "base/log.h"
#include "clocks.h"
#include "folder.h"

#define FILE_MAX ((size_t)4 << 20)

struct ka_bench {
    struct ka_app *app;
    struct ka_settings settings; /* own */
    char *file, *name, *only;
    int seconds;
    bool emptied;                   /* the card's memory had run out beside others': it is had alone */
    char *folder;                   /* of the copies; does not stay */
    char *forward, *pair, *modules; /* the copies; no modules: NULL */
    ka_bench_done_fn done;
    void *arg;
    struct ka_op *op;         /* NULL: none under way */
    struct ka_clocks *clocks; /* NULL: nobody reads them */
    json_t *inspect, *shapes, *ceilings, *timed, *readings, *error;
    double wall_seconds;
    int code;
};

/* ---- the file, copied */

static char *temporary_folder(struct ka_err *err)
{
    const char *base = getenv("TMPDIR");
    char *folder = ka_path_join(base && *base ? base : "/tmp", "kernel-agent-bench-XXXXXX");
    if (mkdtemp(folder))
        return folder;
    ka_fail(err, -errno, "%s: %s", folder, strerror(errno));
    free(folder);
    return NULL;
}

static int copy_modules(struct ka_bench *bench, const char *forward, struct ka_err *err)
{
    KA_AUTO_FREE char *into = ka_path_join(bench->folder, "modules");
    struct ka_modules found;
    const struct ka_modules_req request = {.source = forward,
                                           .file = bench->file,
                                           .path = bench->settings.path,
                                           .into = into,
                                           .installed = ka_app_elsewhere(bench->app)};
    int rc = ka_modules_freeze(&request, &found, err);
    bench->modules = ka_path_real(into, NULL);
    return rc;
}

/* The whole file, and its forward part for the child that sees no candidate. */
static int copy_file(struct ka_bench *bench, struct ka_err *err)
{
    KA_AUTO_BUF struct ka_buf text = {0}, forward = {0}, backward = {0};
    int rc = ka_file_read(bench->file, FILE_MAX, &text, err);
    if (rc)
        return rc;
    if (memchr(ka_buf_str(&text), '\0', text.len))
        return ka_fail(err, -EINVAL, "%s: not a Python file (it holds NUL bytes)", bench->file);
    bool split = ka_compose_split(ka_buf_str(&text), &forward, &backward, NULL) == 0;
    if (!split && !ka_compose_by_hand(ka_buf_str(&text)))
        return ka_fail(
            err, -EINVAL,
            "%s has no line '%s', and no torch.autograd.Function with a backward: there is nothing "
            "to time",
            bench->file, KA_MARKER);
    const struct ka_buf *seen = split ? &forward : &text;
    bench->folder = temporary_folder(err);
    if (!bench->folder)
        return -EIO;
    bench->forward = ka_path_join(bench->folder, "forward.py");
    bench->pair = ka_path_join(bench->folder, "pair.py");
    rc = copy_modules(bench, ka_buf_str(seen), err);
    if (rc == 0)
        rc = ka_file_put(bench->forward, seen->data, seen->len, err);
    return rc ? rc : ka_file_put(bench->pair, text.data, text.len, err);
}

/* ---- the end */

static bool is_timed(const json_t *shape)
{
    bool any = false;
    KA_EACH_MEMBER(json_object_get(shape, "passes"), pass, found) {
        const json_t *ours = json_object_get(json_object_get(found, "subjects"), ka_bench_subject(0));
        if (!json_object_get(json_object_get(ours, "alone"), "median_ms"))
            return false;
        any = true;
    }
    return any;
}

static json_t *result_of(const struct ka_bench *bench)
{
    const struct ka_bench_facts facts = {.shapes = bench->shapes,
                                         .ceilings = bench->ceilings,
                                         .timed = bench->timed,
                                         .wall_seconds = bench->wall_seconds,
                                         .min_rel_impr = bench->settings.min_rel_impr};
    json_t *result = ka_bench_result(&facts);
    const json_t *stub = json_object_get(bench->inspect, "stub");
    json_object_set_new(result, "file", json_string(bench->file));
    json_object_set_new(result, "stub", json_string(ka_text_of(stub, "name", bench->name)));
    json_object_set(result, "versions", json_object_get(bench->inspect, "versions"));
    json_object_set_new(result, "clocks", json_incref(bench->readings));
    return result;
}

/* The run folder that the pair lies in, or a fresh one. */
static char *result_folder(const struct ka_bench *bench, struct ka_err *err)
{
    char *folder = ka_path_parent(bench->file);
    KA_AUTO_FREE char *state = ka_path_join(folder, "run.db");
    if (access(state, F_OK) == 0)
        return folder;
    free(folder);
    folder = NULL;
    ka_run_folder_make(bench->settings.out, bench->name, &folder, err);
    return folder;
}

static int write_result(const struct ka_bench *bench, json_t *result, struct ka_err *err)
{
    KA_AUTO_FREE char *folder = result_folder(bench, err);
    if (!folder)
        return -EIO;
    KA_AUTO_FREE char *path = ka_path_join(folder, "bench.json");
    KA_AUTO_FREE char *text = json_dumps(result, JSON_INDENT(1) | JSON_REAL_PRECISION(6));
    json_object_set_new(result, "written", json_string(path));
    return ka_file_write(path, text, strlen(text), err);
}

static void end(struct ka_bench *bench)
{
    json_auto_t *result = bench->code == 0 ? result_of(bench) : NULL;
    struct ka_err err;
    if (result && write_result(bench, result, &err)) {
        bench->error = json_pack("{s:s, s:s}", "kind", "internal", "message", err.msg);
        bench->code = 2;
    }
    KA_EACH(result ? json_object_get(result, "shapes") : NULL, i, shape) {
        if (bench->code == 0 && !is_timed(shape))
            bench->code = 4;
    }
    if (result && json_is_string(json_object_get(result, "refused")))
        bench->code = 4;
    bench->done(bench->arg, bench->code, result, bench->error);
}

static void on_readings(void *arg, json_t *readings)
{
    struct ka_bench *bench = arg;
    bench->readings = readings;
    end(bench);
}

static void finish(struct ka_bench *bench, int code)
{
    struct ka_clocks *clocks = bench->clocks;
    bench->code = code;
    bench->clocks = NULL;
    if (clocks)
        ka_clocks_stop(clocks); /* the end comes with its last reading */
    else
        end(bench);
}

/* An operation without a result. */
static void fail(struct ka_bench *bench, const struct ka_op_result *result)
{
    json_t *error = json_object_get(result->doc, "error");
    const char *kind = ka_text_of(error, "kind", "internal");
    bench->error = json_is_object(error)
                       ? json_incref(error)
                       : json_pack("{s:s, s:s}", "kind", "died", "message", result->message);
    bool internal = json_is_object(error) && strcmp(kind, "internal") == 0;
    bool none = strcmp(kind, "needs_gpu") == 0;
    finish(bench, result->status == KA_OP_SANDBOX ? 6 : internal ? 1 : none ? 2 : 3);
}

/* ---- the steps */

static int try_op(struct ka_bench *bench, const char *operation, const char *file, json_t *extra,
                  ka_op_done_fn next, struct ka_err *err)
{
    struct ka_op_req request = {.operation = operation,
                                .file = file,
                                .shown = bench->file,
                                .modules = bench->modules,
                                .alone = bench->emptied,
                                .emptied = bench->emptied,
                                .settings = &bench->settings};
    ka_log_progress(bench->name, "bench: %s", operation);
    return ka_op_start(bench->app, &request, extra, next, bench, &bench->op, err);
}

static void give_up(struct ka_bench *bench, const struct ka_err *err)
{
    bench->error = json_pack("{s:s, s:s}", "kind", "internal", "message", err->msg);
    finish(bench, 1);
}

static void start_op(struct ka_bench *bench, const char *operation, const char *file, json_t *extra,
                     ka_op_done_fn next)
{
    struct ka_err err;
    if (try_op(bench, operation, file, extra, next, &err))
        give_up(bench, &err);
}

/* Whether to try once more without the others on the card. */
static bool is_once_more(struct ka_bench *bench, const struct ka_op_result *result)
{
    if (bench->emptied || !ka_op_ran_out(result))
        return false;
    ka_log(KA_LOG_INFO, "%s: once more, when others are through: the GPU's memory had run out", bench->name);
    return bench->emptied = true;
}

static void time_it(struct ka_bench *bench);

static void on_timed(void *arg, const struct ka_op_result *result)
{
    struct ka_bench *bench = arg;
    bench->op = NULL;
    bench->wall_seconds = (double)result->child->wall_ms / 1e3;
    if (is_once_more(bench, result)) {
        time_it(bench);
        return;
    }
    if (result->status != KA_OP_OK) {
        fail(bench, result);
        return;
    }
    bench->timed = json_incref(result->doc);
    finish(bench, 0);
}

static void time_it(struct ka_bench *bench)
{
    json_t *passes = bench->only[0] ? json_pack("[s]", bench->only) : json_null();
    json_t *extra =
        json_pack("{s:O, s:i, s:o}", "cases", bench->shapes, "seconds", bench->seconds, "passes", passes);
    start_op(bench, "bench", bench->pair, extra, on_timed);
}

static void find_ceilings(struct ka_bench *bench);

static void on_ceilings(void *arg, const struct ka_op_result *result)
{
    struct ka_bench *bench = arg;
    bench->op = NULL;
    if (is_once_more(bench, result)) {
        find_ceilings(bench);
        return;
    }
    if (result->status != KA_OP_OK) {
        fail(bench, result);
        return;
    }
    bench->ceilings = json_incref(result->doc);
    const char *gpu = ka_cards_name(bench->app->cards, bench->settings.card);
    bench->clocks = ka_clocks_start(bench->app->loop, gpu ? gpu : "0", on_readings, bench);
    time_it(bench);
}

static void find_ceilings(struct ka_bench *bench)
{
    const char *own = ka_text_of(bench->inspect, "dtype", "float32");
    const char *dtype = bench->settings.dtype[0] ? bench->settings.dtype : own;
    start_op(bench, "ceilings", bench->forward,
             json_pack("{s:O, s:s}", "cases", bench->shapes, "ceiling_dtype", dtype), on_ceilings);
}

/* SWEEP at its own sizes, or what --sweep says; a seed for each, drawn here. */
static json_t *shapes_of(const struct ka_settings *settings, const json_t *inspect)
{
    const char *which = settings->sweep;
    json_auto_t *given = which[0] == '[' || which[0] == '{' ? json_loads(which, 0, NULL) : NULL;
    json_auto_t *one = json_is_object(given) ? json_pack("[O]", given) : NULL;
    json_t *shapes = json_array();
    bool all = strcmp(which, "required") != 0;
    KA_EACH(one ? one : given ? given : json_object_get(inspect, "sweep"), i, entry) {
        json_t *dims = given ? entry : json_object_get(entry, "dims");
        if (given || all || !json_is_false(json_object_get(entry, "required")))
            json_array_append_new(shapes, json_pack("{s:I, s:O, s:I}", "id", (json_int_t)i, "dims", dims,
                                                    "seed", (json_int_t)(ka_random_u64() >> 34)));
    }
    return shapes;
}

static void on_inspected(void *arg, const struct ka_op_result *result)
{
    struct ka_bench *bench = arg;
    bench->op = NULL;
    if (result->status != KA_OP_OK) {
        fail(bench, result);
        return;
    }
    bench->inspect = json_incref(result->doc);
    const json_t *functions = json_object_get(bench->inspect, "functions");
    const char *stub = ka_text_of(json_object_get(bench->inspect, "stub"), "name", NULL);
    if (json_array_size(functions) > 1 && stub)
        ka_settings_set(&bench->settings.function, stub);
    bench->shapes = shapes_of(&bench->settings, bench->inspect);
    bench->settings.card = ka_cards_pick(bench->app->cards);
    find_ceilings(bench);
}

int ka_bench_start(struct ka_app *app, const struct ka_bench_req *req, struct ka_bench **out,
                   struct ka_err *err)
{
    if (strcmp(req->settings->device, "cuda") != 0)
        return ka_fail(
            err, -ENODEV,
            "bench times compiled kernels on a GPU, and this would run on the CPU, where kernels are "
            "interpreted and no time means anything: nothing was timed. Use --device cuda on a "
            "machine that has one");
    struct ka_bench *bench = ka_calloc(1, sizeof(*bench));
    bench->app = app;
    ka_settings_copy(&bench->settings, req->settings);
    bench->only = ka_strdup(req->only);
    bench->seconds = req->seconds;
    bench->settings.deadline += req->seconds; /* for what is compiled there is as much as ever */
    bench->done = req->done;
    bench->arg = req->arg;
    bench->file = ka_path_real(req->file, err);
    int rc = bench->file ? 0 : -ENOENT;
    if (rc == 0) {
        bench->name = ka_run_folder_name(bench->file);
        rc = copy_file(bench, err);
    }
    if (rc == 0)
        rc = try_op(bench, "inspect", bench->forward, NULL, on_inspected, err);
    if (rc) {
        ka_bench_free(bench);
        return rc;
    }
    *out = bench;
    return 0;
}

void ka_bench_interrupt(struct ka_bench *bench)
{
    if (!bench->op)
        return;
    ka_op_cancel(bench->op);
    bench->op = NULL;
    finish(bench, 130);
}

void ka_bench_free(struct ka_bench *bench)
{
    json_t *documents[] = {bench->inspect, bench->shapes,   bench->ceilings,
                           bench->timed,   bench->readings, bench->error};
    for (size_t i = 0; i < KA_COUNT(documents); i++)
        json_decref(documents[i]);
    if (bench->folder)
        ka_rmtree(bench->folder, NULL);
    char *texts[] = {bench->file,    bench->name, bench->only,   bench->folder,
                     bench->forward, bench->pair, bench->modules};
    for (size_t i = 0; i < KA_COUNT(texts); i++)
        free(texts[i]);
    ka_settings_free(&bench->settings);
    free(bench);
}
