/* Jailed operations of a run: one in flight, its course in the run's record. */
#include "internal.h"

#include <string.h>

#include "compile.h"
#include "log.h"

/* Kernels that a child had to compile for itself: for those that come after it. */
static void compile_later(struct ka_run *run, const struct ka_op_result *result)
{
    const json_t *cache = json_object_get(result->doc, "cache");
    const json_t *wanted = json_object_get(cache, "wanted");
    if (cache)
        ka_record_add(run->record, "cache", json_deep_copy(cache));
    if (json_array_size(wanted) && run->app->cache)
        ka_compile_start(run->app, wanted, result->child, NULL, NULL);
}

static void on_op(void *arg, const struct ka_op_result *result)
{
    struct ka_run *run = arg;
    ka_run_op_fn next = run->op_next;
    run->op = NULL;
    ka_record_add(run->record, "child",
                  json_pack("{s:s, s:i, s:I, s:O?, s:s, s:s}", "op", result->operation, "status",
                            (int)result->status, "ms", (json_int_t)result->child->wall_ms, "seconds",
                            json_object_get(result->doc, "seconds"), "message", result->message, "stderr",
                            result->child->err));
    if (strcmp(result->operation, "facts") != 0)
        compile_later(run, result);
    next(run, result);
}

void ka_run_op(struct ka_run *run, const char *operation, const char *file, json_t *extra, ka_run_op_fn next)
{
    struct ka_err err;
    bool sanitizes = strcmp(operation, "sanitize") == 0;
    struct ka_op_req request = {.operation = operation,
                                .file = file,
                                .shown = run->file,
                                .tool = sanitizes ? run->app->sanitizer : NULL};
    run->op_next = next;
    if (ka_op_start(run->app, &request, extra, on_op, run, &run->op, &err))
        ka_run_fail(run, KA_EV_INTERNAL, "internal", "%s", err.msg);
}

void ka_run_op_cancel(struct ka_run *run)
{
    if (run->op)
        ka_op_cancel(run->op);
    run->op = NULL;
    ka_run_compile_cancel(run);
}

void ka_run_op_failed(struct ka_run *run, const struct ka_op_result *result)
{
    if (result->status == KA_OP_SANDBOX) {
        ka_run_fail(run, KA_EV_SANDBOX, "sandbox", "%s", result->message);
        return;
    }
    const json_t *error = json_object_get(result->doc, "error");
    if (result->status == KA_OP_ERROR && json_is_object(error)) {
        const char *kind = json_string_value(json_object_get(error, "kind"));
        bool internal = !kind || strcmp(kind, "internal") == 0;
        ka_run_fail_doc(run, internal ? KA_EV_INTERNAL : KA_EV_UNUSABLE, json_deep_copy(error));
        return;
    }
    ka_run_fail(run, KA_EV_UNUSABLE, result->status == KA_OP_TIMEOUT ? "timeout" : "died", "%s",
                result->message);
}
