/* One jailed operation: request out, result in, checked before anything believes it. */
#include "op.h"

#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/core/fields.h"
#include "agent/disk/cache.h"
#include "agent/io/child.h"
#include "agent/io/work.h"
#include "base/each.h"
#include "base/hash.h"
#include "base/log.h"
#include "base/utf8.h"

#define RESULT_MAX ((size_t)16 << 20)
#define COMPILED_MAX ((size_t)64 << 20) /* with a kernel's machine code */
#define VALUES_MAX                                                                                           \
    ((size_t)1 << 19) /* of one result: an empty object of two bytes takes hundreds when parsed */
#define CASES_MAX 4096

struct ka_op {
    struct ka_app *app; /* NULL once cancelled */
    int deadline;
    uint64_t id;
    char nonce[33];
    char *operation;
    char *file;
    char *shown; /* the path people know the file by */
    ka_op_done_fn done;
    void *arg;
    const struct ka_child_result *child; /* while its result is parsed */
    json_t *doc;
    int parsed;
    struct ka_err why;
};

static enum ka_child_role role_of(const char *operation)
{
    if (strcmp(operation, "candidate") == 0 || strcmp(operation, "facts") == 0 ||
        strcmp(operation, "sanitize") == 0 || strcmp(operation, "bench") == 0)
        return KA_CHILD_CANDIDATE;
    bool of_the_user = strcmp(operation, "oracle") == 0 || strcmp(operation, "ceilings") == 0;
    return of_the_user ? KA_CHILD_ORACLE : KA_CHILD_TRUSTED;
}

/* A context with one queue for the host's launches takes the driver half the time of one with eight, and it
 * makes one context at a time: with many children that is what they wait for. Nothing runs beside anything in
 * them: a candidate may not name a stream. */
static const char *const one_queue[] = {"CUDA_DEVICE_MAX_CONNECTIONS=1"};

static void op_free(struct ka_op *op)
{
    free(op->operation);
    free(op->file);
    free(op->shown);
    free(op);
}

/* People know the file under their own path, not under that of the copy which the child reads. */
static void restore_path(json_t *value, const char *from, const char *to)
{
    KA_EACH(value, i, item)
        restore_path(item, from, to);
    KA_EACH_MEMBER(value, key, item)
        restore_path(item, from, to);
    const char *text = json_string_value(value);
    const char *at = text ? strstr(text, from) : NULL;
    if (!at)
        return;
    KA_AUTO_BUF struct ka_buf fixed = {0};
    for (; at; at = strstr(text, from)) {
        ka_buf_add(&fixed, text, (size_t)(at - text));
        ka_buf_puts(&fixed, to);
        text = at + strlen(from);
    }
    ka_buf_puts(&fixed, text);
    json_string_set(value, ka_buf_str(&fixed));
}

/* The last line that is not empty: where Python puts the exception. */
static void last_line(const char *text, char *out, size_t size)
{
    size_t len = strlen(text);
    while (len && (text[len - 1] == '\n' || text[len - 1] == ' '))
        len--;
    const char *newline = memrchr(text, '\n', len), *begin = newline ? newline + 1 : text, *end = text + len;
    snprintf(out, size, "%.*s", (int)(end - begin > 400 ? 400 : end - begin), begin);
}

/* "cgroup (no control group of our own: Permission denied)" from the jail's report. */
static void name_missing(const struct ka_child_result *child, struct ka_buf *text)
{
    json_auto_t *report = json_loads(child->layers, 0, NULL);
    KA_EACH(json_object_get(report, "missing"), i, name) {
        const char *layer = json_is_string(name) ? json_string_value(name) : "?";
        ka_buf_printf(text, "%s%s (%s)", i ? ", " : "", layer,
                      ka_text_of(json_object_get(report, "why"), layer, "unknown"));
    }
    if (!text->len)
        ka_buf_puts(text, "unknown");
}

/* What people are told, after the operation's name. */
static void say(struct ka_op_result *result, const char *fmt, ...) KA_PRINTF(2, 3);

static void say(struct ka_op_result *result, const char *fmt, ...)
{
    int len = snprintf(result->message, sizeof(result->message), "%s: ", result->operation);
    va_list args;
    va_start(args, fmt);
    vsnprintf(result->message + len, sizeof(result->message) - (size_t)len, fmt, args);
    va_end(args);
}

static void explain_death(const struct ka_op *op, const struct ka_child_result *child,
                          struct ka_op_result *result)
{
    char tail[512];
    KA_AUTO_BUF struct ka_buf missing = {0};
    int by = ka_child_signal(child);
    last_line(child->err, tail, sizeof(tail));
    result->status = child->error == -EPERM ? KA_OP_SANDBOX : child->timed_out ? KA_OP_TIMEOUT : KA_OP_DIED;
    if (child->timed_out) {
        say(result, "no result within the deadline of %d s (--deadline)", op->deadline);
    } else if (child->error == -EPERM) {
        name_missing(child, &missing);
        say(result,
            "nothing ran: a layer that --require-sandbox asks for is missing here: %.600s; kernel-agent "
            "doctor "
            "says what is lost without it",
            ka_buf_str(&missing));
    } else if (child->error == -EIO && *tail) {
        say(result, "%.300s: %s", child->msg.msg, tail);
    } else if (child->error) {
        say(result, "%.900s", child->msg.msg);
    } else if (by == SIGKILL) {
        say(result,
            "the system killed the child (signal 9), as it does where the machine's memory runs out: fewer "
            "children at a time (--children) or smaller sizes take less; last words: %s",
            tail);
    } else if (by) {
        say(result, "the child was ended by signal %d (%s); last words: %s", by, strsignal(by), tail);
    } else {
        say(result, "the child ended with code %d and no result; last words: %s", child->exit_status, tail);
    }
}

/* How many values the text may hold, no fewer than it does: those in front of, and after, a comma or a
 * bracket. */
static size_t count_values(const char *text, size_t len)
{
    size_t count = 1;
    bool quoted = false;
    for (size_t i = 0; i < len; i++) {
        char c = text[i];
        if (quoted && c == '\\')
            i++;
        else if (c == '"')
            quoted = !quoted;
        else if (!quoted)
            count += c == ',' || c == '[' || c == '{';
    }
    return count;
}

/* *out is set where it is JSON, and whatever comes back the caller's. */
static int parse_bounded(struct ka_buf *text, json_t **out, struct ka_err *err)
{
    json_error_t why;
    size_t values = count_values(ka_buf_str(text), text->len);
    if (values > VALUES_MAX)
        return ka_fail(err, -EFBIG, "result.json holds more than the %zu values allowed", VALUES_MAX);
    if (text->len)
        ka_utf8_clean_json(text->data, text->len);
    *out = json_loadb(ka_buf_str(text), text->len, 0, &why);
    if (!*out)
        return ka_fail(err, -EBADMSG, "result.json is not valid JSON: %.200s", why.text);
    size_t cases = json_array_size(json_object_get(*out, "cases"));
    return cases <= CASES_MAX ? 0
                              : ka_fail(err, -EFBIG, "result.json has %zu cases, more than the %d allowed",
                                        cases, CASES_MAX);
}

/* Does the result answer this request? */
static bool is_answer(const struct ka_op *op, const json_t *doc)
{
    return strcmp(ka_text_of(doc, "nonce", ""), op->nonce) == 0 &&
           strcmp(ka_text_of(doc, "op", ""), op->operation) == 0 &&
           json_is_boolean(json_object_get(doc, "ok"));
}

static int parse_result(const struct ka_op *op, const struct ka_child_result *child, json_t **out,
                        struct ka_err *err)
{
    KA_AUTO_BUF struct ka_buf text = {0};
    json_auto_t *doc = NULL;
    size_t max = strcmp(op->operation, "compile") == 0 ? COMPILED_MAX : RESULT_MAX;
    int rc = ka_child_read(child, "result.json", max, &text);
    if (rc == -EFBIG)
        return ka_fail(err, rc, "result.json has more than the %zu bytes allowed", max);
    if (rc)
        return ka_fail(err, rc, "result.json: %s", strerror(-rc));
    rc = parse_bounded(&text, &doc, err);
    if (rc)
        return rc;
    if (!is_answer(op, doc))
        return ka_fail(err, -EBADMSG, "result.json does not answer the request");
    restore_path(doc, op->file, op->shown);
    *out = json_incref(doc);
    return 0;
}

/* On a thread: a result may be megabytes. */
static void parse(void *arg)
{
    struct ka_op *op = arg;
    op->parsed = parse_result(op, op->child, &op->doc, &op->why);
}

static void finish(struct ka_op *op, struct ka_op_result *result)
{
    ka_utf8_clean(result->message);
    if (result->child->err[0])
        ka_log(KA_LOG_DEBUG, "%s: stderr: %s", op->operation, result->child->err);
    op->done(op->arg, result);
}

static void on_parsed(void *arg)
{
    struct ka_op *op = arg;
    struct ka_op_result result = {.operation = op->operation, .child = op->child, .doc = op->doc};
    if (op->parsed) {
        result.status = KA_OP_DIED;
        say(&result, "the child left no valid result: %.900s", op->why.msg);
    } else if (!json_is_true(json_object_get(op->doc, "ok"))) {
        result.status = KA_OP_ERROR;
        snprintf(result.message, sizeof(result.message), "%.1000s",
                 ka_text_of(json_object_get(op->doc, "error"), "message", "error without a message"));
    }
    if (op->app)
        finish(op, &result);
    json_decref(op->doc);
    ka_child_result_free(op->child);
    op_free(op);
}

static void on_child(void *arg, uint64_t id, const struct ka_child_result *child)
{
    struct ka_op *op = arg;
    (void)id;
    if (op->app && !child->error && !child->timed_out && !child->term_signal && child->exit_status == 0) {
        op->child = ka_child_result_keep(child);
        ka_work_start(op->app->loop, parse, on_parsed, op);
        return;
    }
    struct ka_op_result result = {.operation = op->operation, .child = child};
    if (op->app) {
        explain_death(op, child, &result);
        finish(op, &result);
    }
    op_free(op);
}

/* Only what launches kernels needs the GPU; the rest does not wait for it. */
static const char *device_of(const struct ka_op_req *req)
{
    static const char *const launching[] = {"oracle",        "candidate", "sanitize",
                                            "differentiate", "ceilings",  "bench"};
    for (size_t i = 0; i < KA_COUNT(launching); i++)
        if (strcmp(req->operation, launching[i]) == 0)
            return req->settings->device;
    return "cpu";
}

/* Who times on a GPU, and asks for turns on it, unless it has that alone from its start on. */
static bool takes_turns(const struct ka_app *app, const struct ka_op_req *req)
{
    bool times = strcmp(req->operation, "bench") == 0 || strcmp(req->operation, "ceilings") == 0;
    return times && !req->alone && app->cards && strcmp(device_of(req), "cuda") == 0;
}

static bool has_ran_out(const json_t *entry)
{
    return json_is_true(json_object_get(entry, "out_of_memory")) ||
           json_is_true(json_object_get(json_object_get(entry, "error"), "out_of_memory"));
}

bool ka_op_ran_out(const struct ka_op_result *result)
{
    bool full = has_ran_out(result->doc);
    KA_EACH(json_object_get(result->doc, "cases"), i, entry) {
        full |= has_ran_out(entry);
        KA_EACH(json_object_get(entry, "subjects"), k, subject)
            full |= has_ran_out(subject);
    }
    return full;
}

/* What whoever asks has set already stays. The tensors of a case lie in a child's scratch, and the next
 * case's may be written while they are read. */
static void set_budget(const struct ka_app *app, json_t *request)
{
    size_t half = ((size_t)app->gpu_child.scratch_mb << 20) / 2;
    size_t most = half && half < KA_CASE_BYTES_MAX ? half : KA_CASE_BYTES_MAX;
    if (!json_object_get(request, "budget"))
        json_object_set_new(request, "budget", json_object());
    json_t *budget = json_copy(json_object_get(request, "budget"));
    json_object_set_new(budget, "case_bytes", json_integer((json_int_t)most));
    json_object_set_new(request, "budget", budget);
}

static char *request_text(const struct ka_op *op, const struct ka_op_req *req, json_t *extra)
{
    const struct ka_settings *settings = req->settings;
    const char *device = device_of(req);
    json_auto_t *request = extra ? extra : json_object();
    json_object_update_new(request,
                           json_pack("{s:s, s:s, s:s, s:s, s:s, s:s?, s:s?}", "op", op->operation, "nonce",
                                     op->nonce, "file", op->file, "device", device, "target",
                                     settings->target, "dtype", settings->dtype[0] ? settings->dtype : NULL,
                                     "compiled", op->app->cache ? ka_cache_folder(op->app->cache) : NULL));
    if (settings->function)
        json_object_set_new(request, "function", json_string(settings->function));
    if (req->modules)
        json_object_set_new(request, "modules", json_string(req->modules));
    if (takes_turns(op->app, req))
        json_object_set_new(request, "turns", json_true());
    if (strcmp(op->operation, "oracle") == 0 && strcmp(device, "cuda") == 0)
        set_budget(op->app, request);
    return json_dumps(request, JSON_COMPACT);
}

/* On a GPU the shapes are the user's own: tensors of gigabytes pass through the scratch, which lies in
 * memory. */
static struct ka_child_limits limits_for(const struct ka_app *app, const char *device)
{
    if (strcmp(device, "cuda") != 0)
        return (struct ka_child_limits){0};
    return (struct ka_child_limits){.mem_mb = app->gpu_child.mem_mb,
                                    .scratch_mb = app->gpu_child.scratch_mb,
                                    .fsize_mb = app->gpu_child.scratch_mb};
}

int ka_op_start(struct ka_app *app, const struct ka_op_req *req, json_t *extra, ka_op_done_fn done, void *arg,
                struct ka_op **out, struct ka_err *err)
{
    struct ka_op *op = ka_calloc(1, sizeof(*op));
    op->app = app;
    op->deadline = req->settings->deadline;
    op->operation = ka_strdup(req->operation);
    op->file = ka_strdup(req->file);
    op->shown = ka_strdup(req->shown ? req->shown : req->file);
    op->done = done;
    op->arg = arg;
    snprintf(op->nonce, sizeof(op->nonce), "%016" PRIx64 "%016" PRIx64, ka_random_u64(), ka_random_u64());
    KA_AUTO_FREE char *text = request_text(op, req, extra);
    const char *readable[5] = {op->file};
    size_t readable_count = 1;
    if (app->cache)
        readable[readable_count++] = ka_cache_folder(app->cache);
    if (req->modules)
        readable[readable_count++] = req->modules;
    if (req->tool)
        readable[readable_count++] = req->tool;
    if (req->beside)
        readable[readable_count++] = req->beside;
    struct ka_child_req request = {
        .request = text,
        .python = app->python,
        .package_dir = app->package_dir,
        .ro = readable,
        .ro_count = readable_count,
        .env = one_queue,
        .env_count = KA_COUNT(one_queue),
        .device = device_of(req),
        .turns = takes_turns(app, req),
        .alone = req->alone,
        .emptied = req->emptied,
        .card = req->settings->card,
        .local_sockets = req->tool != NULL,
        .require = req->settings->require_sandbox,
        .role = role_of(op->operation),
        .limits = limits_for(app, device_of(req)),
        .deadline_ms = (unsigned)req->settings->deadline * 1000u,
    };
    if (strcmp(op->operation, "bench") == 0) /* waiting for the GPU takes processor time */
        request.limits.cpu_s = 2u * (unsigned)req->settings->deadline;
    int rc = ka_child_start(app->children, &request, on_child, op, &op->id);
    if (rc) {
        rc = ka_fail(err, rc, "%s: cannot start a child: %s", op->operation, strerror(-rc));
        op_free(op);
        return rc;
    }
    *out = op;
    return 0;
}

void ka_op_cancel(struct ka_op *op)
{
    struct ka_app *app = op->app;
    op->app = NULL; /* freed when its child is gone */
    ka_child_cancel(app->children, op->id);
}
