/* Short commands. Knows operations and check runs, not what happens inside them. */
#include "oneshot.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "agent/core/shapes.h"
#include "agent/ops/op.h"
#include "base/files.h"
#include "base/log.h"
#include "junit.h"
#include "show.h"
#include "signals.h"

/* ---- one operation: inspect, differentiate */

struct single {
    struct ka_app *app;
    struct ka_opts *opts;
    const char *command;
    const char *path, *file; /* as given, and resolved */
    int exit_code;
    struct ka_op *op;
};

static void print_json(const json_t *doc)
{
    json_dumpf(doc, stdout, JSON_INDENT(2) | JSON_REAL_PRECISION(6));
    putchar('\n');
}

/* One of many results: an object a line. */
static void print_line(const json_t *doc)
{
    json_dumpf(doc, stdout, JSON_COMPACT | JSON_REAL_PRECISION(6));
    putchar('\n');
    fflush(stdout);
}

static void show_refusals(const json_t *doc, const char *path)
{
    size_t i;
    json_t *item;
    json_array_foreach(json_object_get(doc, "refusals"), i, item)
    {
        const char *message = json_string_value(json_object_get(item, "message"));
        const char *remedy = json_string_value(json_object_get(item, "remedy"));
        fprintf(
            stderr, "%s:%lld:%lld: %s\n", path, (long long)json_integer_value(json_object_get(item, "line")),
            (long long)json_integer_value(json_object_get(item, "column")), message ? message : "refused");
        if (remedy)
            fprintf(stderr, "  remedy: %s\n", remedy);
    }
}

static void show_differentiated(const struct single *single, const json_t *doc)
{
    const json_t *report = json_object_get(doc, "report");
    const char *backward = json_string_value(json_object_get(doc, "backward"));
    if (single->opts->print) {
        puts(backward ? backward : "");
        return;
    }
    const char *schedule = json_string_value(json_object_get(report, "schedule"));
    printf("schedule %s, tape: %lld B (naive %lld B), atomics kept %lld of %lld\n", schedule ? schedule : "?",
           (long long)json_integer_value(json_object_get(report, "tape_bytes")),
           (long long)json_integer_value(json_object_get(report, "tape_naive_bytes")),
           (long long)json_integer_value(json_object_get(report, "atomics")),
           (long long)json_integer_value(json_object_get(report, "atomics_naive")));
    puts("not verified: kernel-agent --file-path FILE gives the verdict; --print shows the source");
}

static void on_single(void *arg, const struct ka_op_result *result)
{
    struct single *single = arg;
    bool differentiate = strcmp(single->command, "differentiate") == 0;
    single->op = NULL;
    uv_stop(&single->app->loop);
    single->exit_code = result->status == KA_OP_OK ? 0 : result->status == KA_OP_SANDBOX ? 6 : 3;
    if (single->opts->json && result->doc)
        print_json(result->doc);
    if (result->status == KA_OP_ERROR) {
        if (differentiate && json_array_size(json_object_get(result->doc, "refusals")))
            show_refusals(result->doc, single->path);
        else
            ka_show_error(json_object_get(result->doc, "error"), single->path);
    } else if (result->status != KA_OP_OK) {
        fprintf(stderr, "kernel-agent: %s\n", result->message);
    } else if (!single->opts->json && differentiate) {
        show_differentiated(single, result->doc);
    } else if (!single->opts->json) {
        ka_show_inspect(result->doc, single->path);
    }
}

/* The differentiator traces one call of the stub: --sweep names the shape, else the first one, small enough for the CPU. */
static json_t *trace_dims(const struct ka_app *app, const json_t *inspect)
{
    const char *which = app->opts->sweep;
    json_t *given = which[0] == '[' || which[0] == '{' ? json_loads(which, 0, NULL) : NULL;
    if (given) {
        json_t *dims = json_incref(json_is_array(given) ? json_array_get(given, 0) : given);
        json_decref(given);
        return dims;
    }
    json_t *own = json_object_get(inspect, "sweep_cpu");
    bool cpu = strcmp(app->device, "cpu") == 0, scaled = cpu && !json_array_size(own);
    json_t *entry = json_array_get(cpu && !scaled ? own : json_object_get(inspect, "sweep"), 0),
           *small = NULL;
    json_t *dims = json_object_get(entry, "dims");
    if (scaled && ka_shapes_scale(dims, KA_SHAPES_BUDGET, 0, &small) == 0)
        return small;
    return json_incref(dims);
}

static void start_differentiate(struct single *single, const json_t *inspect)
{
    struct ka_err err;
    struct ka_op_req request = {.operation = "differentiate", .file = single->file, .shown = single->path};
    json_t *extra = json_pack("{s:{s:o, s:i}, s:n, s:n}", "case", "dims", trace_dims(single->app, inspect),
                              "seed", 0, "schedule", "config");
    if (ka_op_start(single->app, &request, extra, on_single, single, &single->op, &err)) {
        fprintf(stderr, "kernel-agent: %s\n", err.msg);
        uv_stop(&single->app->loop);
    }
}

static void on_inspected(void *arg, const struct ka_op_result *result)
{
    struct single *single = arg;
    if (result->status == KA_OP_OK)
        start_differentiate(single, result->doc);
    else
        on_single(arg, result);
}

static int run_single(struct ka_app *app, const char *command, const char *path)
{
    struct ka_err err;
    struct single single = {.app = app, .opts = app->opts, .command = command, .path = path, .exit_code = 1};
    char *real = ka_path_real(path, &err);
    if (!real) {
        fprintf(stderr, "kernel-agent: %s\n", err.msg);
        return 3;
    }
    single.file = real;
    bool differentiate = strcmp(command, "differentiate") == 0;
    struct ka_op_req request = {.operation = "inspect", .file = real, .shown = path};
    if (ka_op_start(app, &request, NULL, differentiate ? on_inspected : on_single, &single, &single.op, &err))
        fprintf(stderr, "kernel-agent: %s\n", err.msg);
    else
        uv_run(&app->loop, UV_RUN_DEFAULT);
    free(real);
    return single.exit_code;
}

/* ---- a check run in a folder that does not stay */

struct checking {
    struct ka_app *app;
    struct ka_signals signals;
    struct ka_run *run;
    json_t *result;
    int exit_code;
};

static void on_checked(struct ka_run *run, bool waiting, void *arg)
{
    struct checking *checking = arg;
    (void)waiting;
    checking->exit_code = ka_run_exit_code(run);
    checking->result = ka_run_result(run);
    checking->run = NULL;
    ka_run_free(run);
    ka_signals_stop(&checking->signals);
    uv_stop(&checking->app->loop);
}

static void on_stop(void *arg)
{
    struct checking *checking = arg;
    if (checking->run)
        ka_run_interrupt(checking->run);
}

static int check_in(struct ka_app *app, const char *path, json_t **result)
{
    struct ka_err err;
    struct checking checking = {.app = app, .exit_code = 1};
    ka_signals_start(&checking.signals, &app->loop, on_stop, &checking);
    int rc = ka_run_start(app, path, KA_RUN_CHECK, on_checked, &checking, &checking.run, &err);
    if (rc) {
        fprintf(stderr, "kernel-agent: %s\n", err.msg);
        ka_signals_stop(&checking.signals);
        uv_run(&app->loop, UV_RUN_NOWAIT); /* closes them before they go out of scope */
        checking.exit_code = 3;
    } else {
        uv_run(&app->loop, UV_RUN_DEFAULT);
    }
    if (result)
        *result = checking.result;
    else
        json_decref(checking.result);
    return checking.exit_code;
}

int ka_oneshot_check(struct ka_app *app, const char *path, json_t **result)
{
    const char *base = getenv("TMPDIR");
    char *folder = ka_path_join(base && *base ? base : "/tmp", "kernel-agent-check-XXXXXX");
    char *kept = app->opts->out;
    if (!mkdtemp(folder)) {
        fprintf(stderr, "kernel-agent: %s: %s\n", folder, strerror(errno));
        free(folder);
        return 2;
    }
    app->opts->out = folder;
    int code = check_in(app, path, result);
    app->opts->out = kept;
    ka_rmtree(folder, NULL);
    free(folder);
    return code;
}

static char *pair_of_run(const char *dir, struct ka_err *err)
{
    struct ka_buf text = {0};
    char *path = ka_path_join(dir, "result.json"), *pair = NULL;
    struct ka_err why;
    if (ka_file_read(path, (size_t)64 << 20, &text, &why)) {
        ka_fail(err, -ENOENT, "%s: not the folder of a finished run (%s)", dir, why.msg);
    } else {
        json_t *result = json_loads(ka_buf_str(&text), 0, NULL);
        const char *found = json_string_value(json_object_get(result, "pair"));
        const char *name = found ? strrchr(found, '/') : NULL;
        if (name)
            pair = ka_path_join(dir, name + 1); /* the folder may have been moved */
        else
            ka_fail(err, -ENOENT, "%s: names no verified pair; go on with: kernel-agent --resume %s", path,
                    dir);
        json_decref(result);
    }
    ka_buf_free(&text);
    free(path);
    return pair;
}

static int run_check(struct ka_app *app, const char *path, bool line, struct ka_buf *suites)
{
    json_t *result = NULL;
    struct ka_err err;
    int code = ka_oneshot_check(app, path, &result);
    ka_log_progress_end();
    json_object_del(result, "run_dir");
    json_object_del(result, "pair");
    json_object_del(result, "best");
    if (result && app->opts->json && line)
        print_line(result);
    else if (result && app->opts->json)
        print_json(result);
    else if (result)
        ka_show_result(result);
    ka_junit_add(suites, path, result);
    if (app->opts->junit && ka_junit_write(app->opts->junit, suites, &err)) {
        fprintf(stderr, "kernel-agent: %s\n", err.msg);
        code = code ? code : 2;
    }
    json_decref(result);
    return code;
}

static int run_verify(struct ka_app *app, const char *dir, struct ka_buf *suites)
{
    struct ka_err err;
    char *pair = pair_of_run(dir, &err);
    if (!pair) {
        fprintf(stderr, "kernel-agent: %s\n", err.msg);
        return 2;
    }
    int code = run_check(app, pair, false, suites);
    free(pair);
    return code;
}

int ka_oneshot_main(struct ka_opts *opts, const char *command, const char *path)
{
    struct ka_app app;
    struct ka_err err;
    struct ka_buf suites = {0};
    int code = ka_app_open(&app, opts, false, &err);
    if (code)
        fprintf(stderr, "kernel-agent: %s\n", err.msg);
    else if (strcmp(command, "check") == 0)
        code = run_check(&app, path, false, &suites);
    else if (strcmp(command, "verify") == 0)
        code = run_verify(&app, path, &suites);
    else
        code = run_single(&app, command, path);
    ka_buf_free(&suites);
    ka_app_close(&app);
    return code;
}

int ka_oneshot_check_all(struct ka_opts *opts, const char *const *paths, size_t count)
{
    struct ka_app app;
    struct ka_err err;
    int code = ka_app_open(&app, opts, false, &err);
    bool go_on = code == 0;
    struct ka_buf suites = {0};
    app.keeps_known = true;
    if (!go_on)
        fprintf(stderr, "kernel-agent: %s\n", err.msg);
    for (size_t i = 0; i < count && go_on; i++) {
        int one = run_check(&app, paths[i], true, &suites);
        code = one ? one : code;
        go_on = one == 0 || one == 3 || one == 4;
    }
    ka_buf_free(&suites);
    ka_app_close(&app);
    return code;
}
