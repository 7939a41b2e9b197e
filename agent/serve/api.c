/* Requests to the queue, and what it says of them. Knows no socket. */
#include "api.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "agent/core/fields.h"
#include "agent/io/httpd.h"
#include "base/files.h"
#include "base/hash.h"
#include "metrics.h"
#include "queue.h"
#include "stream.h"

#define LIST_MAX 1000
#define FILE_MAX ((size_t)16 << 20)

/* ---- answers ---- */

static void reply_json(struct ka_call *call, unsigned status, const json_t *doc)
{
    KA_AUTO_FREE char *text = json_dumps(doc, JSON_COMPACT | JSON_REAL_PRECISION(15));
    const struct ka_reply reply = {
        .status = status, .type = "application/json", .body = text, .len = strlen(text)};
    ka_call_reply(call, &reply);
}

static void refuse(struct ka_call *call, int rc, const struct ka_err *err)
{
    static const struct {
        int rc;
        unsigned status;
        const char *code;
    } rows[] = {
        {-EINVAL, 400, "invalid"},    {-ENOENT, 404, "not_found"},   {-EBUSY, 409, "conflict"},
        {-EAGAIN, 429, "queue_full"}, {-ESHUTDOWN, 503, "draining"}, {-ENOSPC, 507, "disk_full"},
        {-EDQUOT, 507, "disk_full"},  {-EROFS, 507, "read_only"},
    };
    for (size_t i = 0; i < KA_COUNT(rows); i++)
        if (rows[i].rc == rc) {
            ka_call_refuse(call, rows[i].status, rows[i].code, err->msg);
            return;
        }
    ka_call_refuse(call, 500, "internal", err->msg);
}

static void reply_entry(struct ka_call *call, unsigned status, const struct ka_entry *entry)
{
    json_auto_t *doc = ka_entry_json(entry);
    reply_json(call, status, doc);
}

static void on_submitted(void *arg, int rc, const struct ka_entry *entry, const struct ka_err *err)
{
    if (rc)
        refuse(arg, rc, err);
    else
        reply_entry(arg, 202, entry);
}

static void on_known(void *arg, int rc, const struct ka_entry *entry, const struct ka_err *err)
{
    if (rc)
        refuse(arg, rc, err);
    else
        reply_entry(arg, 200, entry);
}

static void on_deleted(void *arg, int rc, const struct ka_entry *entry, const struct ka_err *err)
{
    static const struct ka_reply gone = {.status = 204, .type = "application/json", .body = ""};
    (void)entry;
    if (rc)
        refuse(arg, rc, err);
    else
        ka_call_reply(arg, &gone);
}

/* ---- requests ---- */

static void get_health(struct ka_api *api, struct ka_call *call, const char *id)
{
    json_auto_t *doc = json_pack("{s:s}", "status", "ok");
    (void)api;
    (void)id;
    reply_json(call, 200, doc);
}

static void get_ready(struct ka_api *api, struct ka_call *call, const char *id)
{
    (void)id;
    if (ka_queue_draining(api->queue))
        ka_call_refuse(call, 503, "draining", "the service is about to end");
    else
        get_health(api, call, id);
}

static void get_metrics(struct ka_api *api, struct ka_call *call, const char *id)
{
    KA_AUTO_BUF struct ka_buf text = {0};
    (void)id;
    ka_metrics_write(api->queue, &text);
    const struct ka_reply reply = {
        .status = 200, .type = "text/plain; version=0.0.4", .body = text.data, .len = text.len};
    ka_call_reply(call, &reply);
}

static void post_run(struct ka_api *api, struct ka_call *call, const char *id)
{
    struct ka_submission submission;
    struct ka_err err;
    size_t len;
    (void)id;
    const char *body = ka_call_body(call, &len);
    int rc = ka_submission_parse(body, len, &submission, &err);
    if (rc == 0) {
        bool known = ka_queue_knows(api->queue, &submission);
        rc = ka_queue_submit(api->queue, &submission, known ? on_known : on_submitted, call, &err);
        ka_submission_free(&submission);
    }
    if (rc)
        refuse(call, rc, &err);
}

/* The argument as a number from 1 to `most`; 0: it is none. */
static size_t count_of(const char *text, size_t most)
{
    char *end;
    unsigned long count = strtoul(text, &end, 10);
    return *text >= '0' && *text <= '9' && !*end && count >= 1 && count <= most ? count : 0;
}

static void get_runs(struct ka_api *api, struct ka_call *call, const char *id)
{
    const char *wanted = ka_call_argument(call, "state"), *limit = ka_call_argument(call, "limit");
    enum ka_entry_state state = wanted ? ka_entry_state_of(wanted) : KA_ENTRY_STATES;
    size_t most = limit ? count_of(limit, LIST_MAX) : 100, total = 0;
    (void)id;
    if ((wanted && state == KA_ENTRY_STATES) || !most) {
        ka_call_refuse(call, 400, "invalid",
                       "state is queued, running, done, failed or cancelled; limit is from 1 to 1000");
        return;
    }
    json_auto_t *doc = json_pack("{s:[]}", "runs");
    json_t *runs = json_object_get(doc, "runs");
    for (size_t i = ka_queue_count(api->queue); i-- > 0;) {
        const struct ka_entry *entry = ka_queue_at(api->queue, i);
        if (!entry || (wanted && entry->state != state))
            continue;
        total++;
        if (json_array_size(runs) < most)
            json_array_append_new(runs, ka_entry_json(entry));
    }
    json_object_set_new(doc, "total", json_integer((json_int_t)total));
    reply_json(call, 200, doc);
}

static const struct ka_entry *find(struct ka_api *api, struct ka_call *call, const char *id)
{
    const struct ka_entry *entry = ka_queue_find(api->queue, id);
    if (!entry)
        ka_call_refuse(call, 404, "not_found", "there is no such run");
    return entry;
}

static void get_run(struct ka_api *api, struct ka_call *call, const char *id)
{
    const struct ka_entry *entry = find(api, call, id);
    if (entry)
        reply_entry(call, 200, entry);
}

static int read_result(const struct ka_entry *entry, struct ka_buf *text, struct ka_err *err)
{
    if (!entry->folder)
        return ka_fail(err, -ENOENT, "the run %s is %s: it has no result", entry->id,
                       ka_entry_state_name(entry->state));
    KA_AUTO_FREE char *path = ka_path_join(entry->folder, "result.json");
    return ka_file_read(path, FILE_MAX, text, err);
}

static void get_result(struct ka_api *api, struct ka_call *call, const char *id)
{
    KA_AUTO_BUF struct ka_buf text = {0};
    struct ka_err err;
    const struct ka_entry *entry = find(api, call, id);
    int rc = entry ? read_result(entry, &text, &err) : 0;
    if (!entry)
        return;
    const struct ka_reply reply = {
        .status = 200, .type = "application/json", .body = ka_buf_str(&text), .len = text.len};
    if (rc)
        refuse(call, rc, &err);
    else
        ka_call_reply(call, &reply);
}

static void get_pair(struct ka_api *api, struct ka_call *call, const char *id)
{
    KA_AUTO_BUF struct ka_buf text = {0}, pair = {0};
    struct ka_err err;
    const struct ka_entry *entry = find(api, call, id);
    int rc = entry ? read_result(entry, &text, &err) : 0;
    if (!entry)
        return;
    json_auto_t *result = rc ? NULL : json_loadb(ka_buf_str(&text), text.len, 0, NULL);
    const char *path = ka_text_of(result, "pair", NULL);
    if (rc == 0)
        rc = path ? ka_file_read(path, FILE_MAX, &pair, &err)
                  : ka_fail(&err, -ENOENT, "the run %s has no candidate", id);
    const struct ka_reply reply = {
        .status = 200, .type = "text/x-python; charset=utf-8", .body = ka_buf_str(&pair), .len = pair.len};
    if (rc)
        refuse(call, rc, &err);
    else
        ka_call_reply(call, &reply);
}

static void get_run_events(struct ka_api *api, struct ka_call *call, const char *id)
{
    if (find(api, call, id) && ka_stream_run(api->queue, call, id))
        ka_call_refuse(call, 503, "busy", "too many streams are open");
}

static void get_events(struct ka_api *api, struct ka_call *call, const char *id)
{
    (void)id;
    if (ka_stream_queue(api->queue, call))
        ka_call_refuse(call, 503, "busy", "too many streams are open");
}

static void post_cancel(struct ka_api *api, struct ka_call *call, const char *id)
{
    struct ka_err err;
    int rc = ka_queue_cancel(api->queue, id, on_known, call, &err);
    if (rc)
        refuse(call, rc, &err);
}

static void post_retry(struct ka_api *api, struct ka_call *call, const char *id)
{
    struct ka_err err;
    int rc = ka_queue_retry(api->queue, id, on_submitted, call, &err);
    if (rc)
        refuse(call, rc, &err);
}

static void delete_run(struct ka_api *api, struct ka_call *call, const char *id)
{
    struct ka_err err;
    int rc = ka_queue_delete(api->queue, id, on_deleted, call, &err);
    if (rc)
        refuse(call, rc, &err);
}

/* ---- routes ---- */

static const struct route {
    const char *method, *path; /* '*' is an id */
    void (*handle)(struct ka_api *api, struct ka_call *call, const char *id);
} routes[] = {
    {"GET", "/healthz", get_health},
    {"GET", "/readyz", get_ready},
    {"GET", "/metrics", get_metrics},
    {"POST", "/v1/runs", post_run},
    {"GET", "/v1/runs", get_runs},
    {"GET", "/v1/runs/*", get_run},
    {"DELETE", "/v1/runs/*", delete_run},
    {"GET", "/v1/runs/*/result", get_result},
    {"GET", "/v1/runs/*/pair", get_pair},
    {"GET", "/v1/runs/*/events", get_run_events},
    {"GET", "/v1/events", get_events},
    {"POST", "/v1/runs/*/cancel", post_cancel},
    {"POST", "/v1/runs/*/retry", post_retry},
};

static bool matches(const char *pattern, const char *path, char id[static KA_ENTRY_ID])
{
    size_t before = strcspn(pattern, "*"), len = strlen(path);
    if (!pattern[before])
        return strcmp(pattern, path) == 0;
    if (len < before + KA_ENTRY_ID - 1 || strncmp(pattern, path, before) != 0 ||
        !ka_entry_is_id(path + before, KA_ENTRY_ID - 1) ||
        strcmp(pattern + before + 1, path + before + KA_ENTRY_ID - 1) != 0)
        return false;
    memcpy(id, path + before, KA_ENTRY_ID - 1);
    id[KA_ENTRY_ID - 1] = '\0';
    return true;
}

/* NULL: none; `*other` where there is one for another method. */
static const struct route *find_route(const struct ka_call *call, char id[static KA_ENTRY_ID], bool *other)
{
    *other = false;
    for (size_t i = 0; i < KA_COUNT(routes); i++) {
        if (!matches(routes[i].path, ka_call_path(call), id))
            continue;
        if (strcmp(routes[i].method, ka_call_method(call)) == 0)
            return &routes[i];
        *other = true;
    }
    return NULL;
}

static bool may_ask(const struct ka_api *api, const struct ka_call *call)
{
    static const char scheme[] = "Bearer ";
    const char *header = ka_call_header(call, "Authorization");
    if (!api->token)
        return true;
    return header && ka_starts_with(header, scheme) && ka_same_secret(header + strlen(scheme), api->token);
}

void ka_api_begun(void *arg, struct ka_call *call)
{
    struct ka_api *api = arg;
    char id[KA_ENTRY_ID];
    bool other;
    const struct route *route = find_route(call, id, &other);
    bool open = route && route->handle == get_health;
    if (!open && !may_ask(api, call))
        ka_call_refuse(call, 401, "unauthorized", "Authorization: Bearer TOKEN is missing or wrong");
    else if (!route && other)
        ka_call_refuse(call, 405, "method_not_allowed", "not with this method");
    else if (!route)
        ka_call_refuse(call, 404, "not_found", "there is nothing at this path");
}

void ka_api_whole(void *arg, struct ka_call *call)
{
    char id[KA_ENTRY_ID] = "";
    bool other;
    const struct route *route = find_route(call, id, &other);
    route->handle(arg, call, id);
}
