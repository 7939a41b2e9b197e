/* Jailed operations of a run: what is in flight, what became of it in the run's record, and a second try for
 * a child that died. */
#include "operations.h"

#include <errno.h>
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "agent/core/fields.h"
#include "agent/ops/compile.h"
#include "base/each.h"
#include "base/log.h"
#include "compiled_facts.h"
#include "events.h"
#include "sizes.h"

#define START_SHARE 0.2 /* of the newest in what contexts take of late */

struct ka_run_child {
    struct ka_run *run;
    struct ka_run_child *next;
    struct ka_op *op;
    char *operation, *file, *part;
    json_t *extra; /* for a second try */
    ka_run_op_fn single;
    ka_run_child_fn done;
    void *arg;
    bool again, emptied;
};

static void forget(struct ka_run_child *child)
{
    struct ka_run_child **at = &child->run->children;
    while (*at != child)
        at = &(*at)->next;
    *at = child->next;
    json_decref(child->extra);
    free(child->operation);
    free(child->file);
    free(child->part);
    free(child);
}

/* Kernels that a child had to compile for itself: for those that come after it. */
static void compile_later(struct ka_run *run, const struct ka_op_result *result)
{
    const json_t *cache = json_object_get(result->doc, "cache");
    const json_t *wanted = json_object_get(cache, "wanted");
    if (cache)
        ka_record_add(run->record, "cache", json_deep_copy(cache));
    if (json_array_size(wanted) && run->app->cache)
        ka_compile_start(run->app, &run->settings, wanted, result->child, NULL, NULL);
}

/* How long contexts take of late: what an oracle says, since a candidate may say anything; no longer than
 * its process was there. */
static void learn_start(struct ka_app *app, const struct ka_op_result *result)
{
    double said = ka_number_of(result->doc, "context_seconds", 0);
    double seconds = fmin(said, (double)result->child->wall_ms / 1e3);
    if (strcmp(result->operation, "oracle") == 0 && seconds > 0)
        app->gpu_start += (seconds - app->gpu_start) * (app->gpu_start > 0 ? START_SHARE : 1);
}

static const char *word_of(enum ka_op_status status)
{
    static const char *const words[] = {[KA_OP_OK] = "ok",
                                        [KA_OP_ERROR] = "error",
                                        [KA_OP_DIED] = "died",
                                        [KA_OP_TIMEOUT] = "timeout",
                                        [KA_OP_SANDBOX] = "error"};
    return words[status];
}

/* Seconds since the run began in this process, to the millisecond. */
static double when(const struct ka_run *run, uint64_t at)
{
    return run->seconds_before + floor(((double)at / 1e9 - run->began) * 1000) / 1000;
}

/* A row of the timeline, in order of the ends; the report sorts. */
static void add_to_timeline(struct ka_run *run, const struct ka_run_child *child,
                            const struct ka_op_result *result)
{
    const struct ka_child_result *ended = result->child;
    uint64_t now = ka_clock_ns();
    size_t cases = json_array_size(json_object_get(child->extra, "cases"));
    json_t *row =
        json_pack("{s:s, s:s*, s:f, s:f, s:b, s:s, s:I}", "op", result->operation, "part", child->part,
                  "start", when(run, ended->began ? ended->began : now), "end", when(run, now), "warm",
                  (int)ended->warm, "status", word_of(result->status), "cases", (json_int_t)cases);
    json_array_append_new(run->timeline, row);
}

static int start(struct ka_run_child *child, struct ka_err *err);

/* A child that a signal ended for reasons of its own gets one more try, and so does one that went when the
 * machine's memory ran out: it waits for more. Limits and filters would end it again. */
static bool try_again(struct ka_run_child *child, const struct ka_op_result *result)
{
    struct ka_run *run = child->run;
    int by = ka_child_signal(result->child);
    if (result->status != KA_OP_DIED || child->again || !by || by == SIGXCPU || by == SIGSYS || by == SIGXFSZ)
        return false;
    struct ka_err err;
    child->again = true;
    if (start(child, &err))
        return false;
    ka_number_add(run->totals, "retries", 1);
    ka_log(KA_LOG_WARN, "%s: %s; once more", run->name, result->message);
    return true;
}

/* What is timed has its card alone, but those who made way keep their memory there. Of other operations,
 * cases that ran out are tried again by who deals them out (fan.c). */
static bool wants_more_memory(const struct ka_run_child *child, const struct ka_op_result *result)
{
    const json_t *error = json_object_get(result->doc, "error");
    bool full = strcmp(result->operation, "bench") == 0
                    ? ka_op_ran_out(result)
                    : json_is_true(json_object_get(error, "out_of_memory"));
    return full && ka_run_on_gpu(child->run) && !child->emptied;
}

static bool try_emptied(struct ka_run_child *child, const struct ka_op_result *result)
{
    struct ka_err err;
    if (!wants_more_memory(child, result))
        return false;
    child->emptied = true;
    if (start(child, &err))
        return false;
    ka_log(KA_LOG_INFO, "%s: once more, when others are through: the GPU's memory had run out",
           child->run->name);
    return true;
}

static void on_op(void *arg, const struct ka_op_result *result)
{
    struct ka_run_child *child = arg;
    struct ka_run *run = child->run;
    child->op = NULL;
    ka_record_add(run->record, "child",
                  json_pack("{s:s, s:s*, s:i, s:I, s:I, s:O?, s:O*, s:s, s:s}", "op", result->operation,
                            "part", child->part, "status", (int)result->status, "ms",
                            (json_int_t)result->child->wall_ms, "paused_ms",
                            (json_int_t)result->child->paused_ms, "seconds",
                            json_object_get(result->doc, "seconds"), "context_seconds",
                            json_object_get(result->doc, "context_seconds"), "message", result->message,
                            "stderr", result->child->err));
    add_to_timeline(run, child, result);
    learn_start(run->app, result);
    if (try_again(child, result) || try_emptied(child, result))
        return;
    if (strcmp(result->operation, "facts") != 0)
        compile_later(run, result);
    ka_run_op_fn single = child->single;
    ka_run_child_fn done = child->done;
    void *its = child->arg;
    forget(child);
    if (single)
        single(run, result);
    else
        done(run, its, result);
}

static int start(struct ka_run_child *child, struct ka_err *err)
{
    struct ka_run *run = child->run;
    bool sanitizes = strcmp(child->operation, "sanitize") == 0;
    struct ka_op_req request = {.operation = child->operation,
                                .file = child->file,
                                .shown = run->file,
                                .modules = run->modules,
                                .tool = sanitizes ? run->settings.sanitizer : NULL,
                                .beside = json_string_value(json_object_get(child->extra, "rival")),
                                .alone = child->emptied,
                                .emptied = child->emptied,
                                .settings = &run->settings};
    return ka_op_start(run->app, &request, json_copy(child->extra), on_op, child, &child->op, err);
}

static struct ka_run_child *add(struct ka_run *run, const char *operation, const char *file, json_t *extra)
{
    struct ka_run_child *child = ka_calloc(1, sizeof(*child));
    child->run = run;
    child->operation = ka_strdup(operation);
    child->file = ka_strdup(file);
    child->extra = extra ? extra : json_object();
    child->next = run->children;
    run->children = child;
    return child;
}

void ka_run_op(struct ka_run *run, const char *operation, const char *file, json_t *extra, ka_run_op_fn next)
{
    struct ka_run_child *child = add(run, operation, file, extra);
    struct ka_err err;
    child->single = next;
    if (start(child, &err)) {
        forget(child);
        ka_run_fail(run, KA_EV_INTERNAL, "internal", "%s", err.msg);
    }
}

struct ka_run_child *ka_run_child_start(struct ka_run *run, const struct ka_run_child_req *req,
                                        ka_run_child_fn done, void *arg, struct ka_err *err)
{
    struct ka_run_child *child = add(run, req->operation, req->file, req->extra);
    child->part = req->part ? ka_strdup(req->part) : NULL;
    child->emptied = req->emptied;
    child->done = done;
    child->arg = arg;
    if (start(child, err) == 0)
        return child;
    forget(child);
    return NULL;
}

void ka_run_child_cancel(struct ka_run_child *child)
{
    if (child->op)
        ka_op_cancel(child->op);
    forget(child);
}

void ka_run_op_cancel(struct ka_run *run)
{
    while (run->children)
        ka_run_child_cancel(run->children);
    ka_run_compile_cancel(run);
}

/* Once preflight is through, the forward file is known to be usable: it is not to blame any more. */
void ka_run_op_failed(struct ka_run *run, const struct ka_op_result *result)
{
    if (result->status == KA_OP_SANDBOX) {
        ka_run_fail(run, KA_EV_SANDBOX, "sandbox", "%s", result->message);
        return;
    }
    bool judged = run->job.state != KA_JOB_INSPECT && run->job.state != KA_JOB_PREFLIGHT;
    const json_t *error = json_object_get(result->doc, "error");
    if (result->status == KA_OP_ERROR && json_is_object(error)) {
        const char *kind = json_string_value(json_object_get(error, "kind"));
        bool internal = judged || !kind || strcmp(kind, "internal") == 0;
        ka_run_fail_doc(run, internal ? KA_EV_INTERNAL : KA_EV_UNUSABLE, json_deep_copy(error));
        return;
    }
    ka_run_fail(run, judged ? KA_EV_INTERNAL : KA_EV_UNUSABLE,
                result->status == KA_OP_TIMEOUT ? "timeout" : "died", "%s", result->message);
}
