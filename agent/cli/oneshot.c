/* Short commands. Knows operations and check runs, not what happens inside them. */
#include "oneshot.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/app/asked.h"
#include "agent/core/fields.h"
#include "agent/core/shapes.h"
#include "agent/disk/modules.h"
#include "agent/io/loop.h"
#include "agent/io/signals.h"
#include "agent/ops/op.h"
#include "agent/run/known.h"
#include "agent/run/run.h"
#include "base/each.h"
#include "base/files.h"
#include "base/log.h"
#include "junit.h"
#include "show.h"

/* What a command works with. */
struct tools {
    const struct ka_opts *opts;
    struct ka_app app;
    struct ka_settings settings;
    struct ka_known *known; /* of the checks of one command */
};

/* Close it whatever comes back. */
static int tools_open(struct tools *tools, const struct ka_opts *opts)
{
    struct ka_err err;
    *tools = (struct tools){.opts = opts};
    int code = ka_app_open(&tools->app, opts, false, 1, &err);
    if (code == 0 && ka_settings_init(&tools->settings, opts, &tools->app, false, &err))
        code = 2;
    return code ? ka_show_problem(&err, code) : 0;
}

static void tools_close(struct tools *tools)
{
    ka_known_free(tools->known);
    ka_settings_free(&tools->settings);
    ka_app_close(&tools->app);
}

/* ---- one operation: inspect, differentiate */

#define SOURCE_MAX ((size_t)4 << 20)
#define DOCUMENT (JSON_INDENT(2) | JSON_REAL_PRECISION(6))
#define LINE (JSON_COMPACT | JSON_REAL_PRECISION(6)) /* one of many results: an object a line */

struct single {
    struct tools *tools;
    const char *command;
    const char *path, *file; /* as given, and resolved */
    char *modules;           /* the user's, copied into a folder that does not stay; NULL: none */
    int exit_code;
    struct ka_op *op;
};

static void show_refusals(const json_t *doc, const char *path)
{
    KA_EACH(json_object_get(doc, "refusals"), i, item) {
        fprintf(stderr, "%s:%lld:%lld: %s\n", path,
                (long long)json_integer_value(json_object_get(item, "line")),
                (long long)json_integer_value(json_object_get(item, "column")),
                ka_text_of(item, "message", "refused"));
        if (ka_text_of(item, "remedy", NULL))
            fprintf(stderr, "  remedy: %s\n", ka_text_of(item, "remedy", ""));
    }
}

static void show_differentiated(const struct single *single, const json_t *doc)
{
    const json_t *report = json_object_get(doc, "report");
    if (single->tools->opts->print) {
        puts(ka_text_of(doc, "backward", ""));
        return;
    }
    printf("schedule %s, tape: %lld B (naive %lld B), atomics kept %lld of %lld\n",
           ka_text_of(report, "schedule", "?"),
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
    ka_loop_stop(single->tools->app.loop);
    single->exit_code = result->status == KA_OP_OK ? 0 : result->status == KA_OP_SANDBOX ? 6 : 3;
    if (single->tools->opts->json && result->doc)
        ka_show_json(result->doc, DOCUMENT);
    if (result->status == KA_OP_ERROR) {
        if (differentiate && json_array_size(json_object_get(result->doc, "refusals")))
            show_refusals(result->doc, single->path);
        else
            ka_show_error(json_object_get(result->doc, "error"), single->path);
    } else if (result->status != KA_OP_OK) {
        fprintf(stderr, "kernel-agent: %s\n", result->message);
    } else if (!single->tools->opts->json && differentiate) {
        show_differentiated(single, result->doc);
    } else if (!single->tools->opts->json) {
        ka_show_inspect(result->doc, single->path);
    }
}

/* The differentiator traces one call of the stub: --sweep names the shape, else the first one, small enough
 * for the CPU; and the others, where they launch what that does not. */
static json_t *trace_dims(const struct ka_settings *settings, const json_t *inspect)
{
    const char *which = settings->sweep;
    json_auto_t *given = which[0] == '[' || which[0] == '{' ? json_loads(which, 0, NULL) : NULL;
    if (given)
        return json_is_array(given) ? json_incref(given) : json_pack("[O]", given);
    json_t *own = json_object_get(inspect, "sweep_cpu"), *all = json_array();
    bool cpu = strcmp(settings->device, "cpu") == 0, scaled = cpu && !json_array_size(own);
    KA_EACH(cpu && !scaled ? own : json_object_get(inspect, "sweep"), i, entry) {
        json_t *dims = json_object_get(entry, "dims"), *small = NULL;
        if (scaled && ka_shapes_scale(dims, KA_SHAPES_BUDGET, 0, &small) == 0)
            json_array_append_new(all, small);
        else
            json_array_append(all, dims);
    }
    return all;
}

static void start_differentiate(struct single *single, const json_t *inspect)
{
    struct ka_err err;
    struct ka_op_req request = {.operation = "differentiate",
                                .file = single->file,
                                .shown = single->path,
                                .modules = single->modules,
                                .settings = &single->tools->settings};
    json_auto_t *dims = trace_dims(&single->tools->settings, inspect);
    json_t *extra = json_pack("{s:{s:O?, s:i, s:O}, s:n, s:n}", "case", "dims", json_array_get(dims, 0),
                              "seed", 0, "others", dims, "schedule", "config");
    if (ka_op_start(&single->tools->app, &request, extra, on_single, single, &single->op, &err)) {
        ka_show_problem(&err, 0);
        ka_loop_stop(single->tools->app.loop);
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

/* `folder` is made, and the caller's to remove. */
static int freeze_modules(struct single *single, char *folder, struct ka_err *err)
{
    KA_AUTO_BUF struct ka_buf source = {0};
    struct ka_modules found = {0};
    if (!mkdtemp(folder))
        return ka_fail(err, -errno, "%s: %s", folder, strerror(errno));
    int rc = ka_file_read(single->file, SOURCE_MAX, &source, err);
    const struct ka_modules_req request = {.source = ka_buf_str(&source),
                                           .file = single->file,
                                           .path = single->tools->settings.path,
                                           .into = folder,
                                           .installed = ka_app_elsewhere(&single->tools->app)};
    if (rc == 0)
        rc = ka_modules_freeze(&request, &found, err);
    single->modules = found.count ? folder : NULL;
    return rc;
}

static int run_single(struct tools *tools, const char *command, const char *path)
{
    struct ka_err err;
    struct single single = {.tools = tools, .command = command, .path = path, .exit_code = 1};
    KA_AUTO_FREE char *real = ka_path_real(path, &err);
    if (!real)
        return ka_show_problem(&err, 3);
    single.file = real;
    char folder[] = "/tmp/kernel-agent-modules-XXXXXX";
    int rc = freeze_modules(&single, folder, &err);
    if (rc) {
        ka_rmtree(folder, NULL);
        return ka_show_problem(&err, 3);
    }
    bool differentiate = strcmp(command, "differentiate") == 0;
    struct ka_op_req request = {.operation = "inspect",
                                .file = real,
                                .shown = path,
                                .modules = single.modules,
                                .settings = &tools->settings};
    if (ka_op_start(&tools->app, &request, NULL, differentiate ? on_inspected : on_single, &single,
                    &single.op, &err))
        ka_show_problem(&err, single.exit_code);
    else
        ka_loop_run(tools->app.loop);
    ka_rmtree(folder, NULL);
    return single.exit_code;
}

/* ---- a check run in a folder that does not stay */

struct checking {
    struct ka_app *app;
    struct ka_signals *signals;
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
    ka_signals_stop(checking->signals);
    ka_loop_stop(checking->app->loop);
}

static void on_stop(void *arg)
{
    struct checking *checking = arg;
    if (checking->run)
        ka_run_interrupt(checking->run);
}

static int check_in(struct tools *tools, const char *out, const char *path, const char *function,
                    json_t **result)
{
    struct ka_err err;
    struct ka_settings settings;
    struct checking checking = {.app = &tools->app, .exit_code = 1};
    ka_settings_copy(&settings, &tools->settings);
    ka_settings_set(&settings.out, out);
    if (function)
        ka_settings_set(&settings.function, function);
    const struct ka_run_req request = {.settings = &settings,
                                       .file = path,
                                       .mode = KA_RUN_CHECK,
                                       .known = tools->known,
                                       .done = on_checked,
                                       .arg = &checking};
    checking.signals = ka_signals_start(tools->app.loop, on_stop, &checking);
    if (ka_run_start(&tools->app, &request, &checking.run, &err)) {
        checking.exit_code = ka_show_problem(&err, 3);
        ka_signals_stop(checking.signals);
    } else {
        ka_loop_run(tools->app.loop);
    }
    ka_settings_free(&settings);
    *result = checking.result;
    return checking.exit_code;
}

/* The verdict on the pair in `path`, or on a `function` of a module (NULL: what is asked for, or the first);
 * *result is a new reference. Returns the exit code. */
static int check(struct tools *tools, const char *path, const char *function, json_t **result)
{
    const char *base = getenv("TMPDIR");
    KA_AUTO_FREE char *folder = ka_path_join(base && *base ? base : "/tmp", "kernel-agent-check-XXXXXX");
    if (!mkdtemp(folder)) {
        fprintf(stderr, "kernel-agent: %s: %s\n", folder, strerror(errno));
        return 2;
    }
    int code = check_in(tools, folder, path, function, result);
    ka_rmtree(folder, NULL);
    return code;
}

static char *pair_of_run(const char *dir, struct ka_err *err)
{
    struct ka_err why;
    KA_AUTO_BUF struct ka_buf text = {0};
    KA_AUTO_FREE char *path = ka_path_join(dir, "result.json");
    if (ka_file_read(path, (size_t)64 << 20, &text, &why)) {
        ka_fail(err, -ENOENT, "%s: not the folder of a finished run (%s)", dir, why.msg);
        return NULL;
    }
    json_auto_t *result = json_loads(ka_buf_str(&text), 0, NULL);
    const char *found = json_string_value(json_object_get(result, "pair"));
    const char *name = found ? strrchr(found, '/') : NULL;
    if (name)
        return ka_path_join(dir, name + 1); /* the folder may have been moved */
    ka_fail(err, -ENOENT, "%s: names no verified pair; go on with: kernel-agent --resume %s", path, dir);
    return NULL;
}

/* The worse of two exit codes: what stops a command, then a file that cannot be used, then a verdict. */
static int worse(int a, int b)
{
    static const int order[] = {0, 4, 3};
    for (size_t i = 0; i < KA_COUNT(order); i++)
        if (a == order[i] || b == order[i])
            return a == order[i] ? b : a;
    return a;
}

static bool goes_on(int code)
{
    return code == 0 || code == 3 || code == 4;
}

/* Of several functions one may have no arguments: nobody asked for it by name, so that it is said and held
 * against nobody. Returns the exit code. */
static int excuse(json_t *result, const char *asked, int code)
{
    const char *kind = ka_text_of(json_object_get(result, "error"), "kind", "");
    bool without = strcmp(kind, "make_args_missing") == 0 || strcmp(kind, "sweep_missing") == 0;
    if (asked || code != 3 || !without)
        return code;
    json_object_set_new(result, "verdict", json_string("not_checked"));
    json_object_set_new(result, "exit_code", json_integer(0));
    return 0;
}

/* One result, told. `function`: of several in the file; NULL: the file is one check. */
static int tell(struct tools *tools, const char *path, const char *function, json_t *result, bool line,
                struct ka_buf *suites)
{
    struct ka_err err;
    KA_AUTO_BUF struct ka_buf name = {0};
    ka_log_progress_end();
    json_object_del(result, "run_dir");
    json_object_del(result, "pair");
    json_object_del(result, "best");
    json_object_del(result, "functions");
    if (result && tools->opts->json)
        ka_show_json(result, line ? LINE : DOCUMENT);
    else if (result)
        ka_show_result(result);
    fflush(stdout);
    ka_buf_printf(&name, "%s%s%s", path, function ? "::" : "", function ? function : "");
    ka_junit_add(suites, ka_buf_str(&name), result);
    if (tools->opts->junit && ka_junit_write(tools->opts->junit, suites, &err))
        return ka_show_problem(&err, 2);
    return 0;
}

/* The functions of a module after the first, whose result says which there are. */
static int check_others(struct tools *tools, const char *path, const json_t *functions, const char *first,
                        size_t *checked, struct ka_buf *suites)
{
    int code = 0;
    KA_EACH(functions, i, item) {
        const char *name = json_string_value(item);
        json_auto_t *result = NULL;
        if (!name || strcmp(name, first) == 0 || !goes_on(code))
            continue;
        int one = check(tools, path, name, &result);
        one = excuse(result, NULL, one);
        *checked += strcmp(ka_text_of(result, "verdict", ""), "not_checked") != 0;
        code = worse(code, one);
        code = worse(code, tell(tools, path, name, result, true, suites));
    }
    return code;
}

static int run_check(struct tools *tools, const char *path, bool line, struct ka_buf *suites)
{
    json_auto_t *result = NULL;
    const char *asked = tools->opts->run.function;
    int code = check(tools, path, NULL, &result);
    json_t *all = json_object_get(result, "functions");
    bool several = !asked && json_array_size(all) > 1;
    if (!several) {
        int told = tell(tools, path, NULL, result, line, suites);
        return code ? code : told;
    }
    json_auto_t *functions = json_incref(all);
    const char *first = ka_text_of(result, "stub", "");
    code = excuse(result, asked, code);
    size_t checked = strcmp(ka_text_of(result, "verdict", ""), "not_checked") != 0;
    code = worse(code, tell(tools, path, first, result, true, suites));
    if (goes_on(code))
        code = worse(code, check_others(tools, path, functions, first, &checked, suites));
    return code == 0 && !checked ? 3 : code;
}

static int run_verify(struct tools *tools, const char *dir, struct ka_buf *suites)
{
    struct ka_err err;
    KA_AUTO_FREE char *pair = pair_of_run(dir, &err);
    return pair ? run_check(tools, pair, false, suites) : ka_show_problem(&err, 2);
}

int ka_oneshot_main(const struct ka_opts *opts, const char *command, const char *path)
{
    struct tools tools;
    KA_AUTO_BUF struct ka_buf suites = {0};
    int code = tools_open(&tools, opts);
    if (code == 0 && strcmp(command, "check") == 0)
        code = run_check(&tools, path, false, &suites);
    else if (code == 0 && strcmp(command, "verify") == 0)
        code = run_verify(&tools, path, &suites);
    else if (code == 0)
        code = run_single(&tools, command, path);
    tools_close(&tools);
    return code;
}

int ka_oneshot_check_all(const struct ka_opts *opts, const char *const *paths, size_t count)
{
    struct tools tools;
    KA_AUTO_BUF struct ka_buf suites = {0};
    int code = tools_open(&tools, opts);
    bool go_on = code == 0;
    tools.known = ka_known_new();
    for (size_t i = 0; i < count && go_on; i++) {
        int one = run_check(&tools, paths[i], true, &suites);
        code = worse(code, one);
        go_on = goes_on(one);
    }
    tools_close(&tools);
    return code;
}
