/* Requests, and what queue, store and machine say to them. Knows no socket. */
#include "api.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "about.h"
#include "agent/core/fields.h"
#include "agent/core/request.h"
#include "agent/io/httpd.h"
#include "agent/io/loop.h"
#include "base/files.h"
#include "base/hash.h"
#include "metrics.h"
#include "queue.h"
#include "rag/index.h"
#include "similar.h"
#include "stream.h"
#include "web.h"

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

static void get_page(struct ka_api *api, struct ka_call *call, const char *id)
{
    (void)api;
    (void)id;
    ka_web_reply(call);
}

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
    ka_metrics_write(api->queue, api->app->cards, &text);
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

static void get_runs(struct ka_api *api, struct ka_call *call, const char *id)
{
    const char *wanted = ka_call_argument(call, "state"), *limit = ka_call_argument(call, "limit");
    enum ka_entry_state state = wanted ? ka_entry_state_of(wanted) : KA_ENTRY_STATES;
    size_t most = 100, total = 0;
    (void)id;
    if ((wanted && state == KA_ENTRY_STATES) || (limit && !ka_request_count(limit, 1, LIST_MAX, &most))) {
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

/* What `kernel-agent bench` left in the run's folder, once it was asked to time the pair there. */
static void get_bench(struct ka_api *api, struct ka_call *call, const char *id)
{
    KA_AUTO_BUF struct ka_buf text = {0};
    struct ka_err err;
    const struct ka_entry *entry = find(api, call, id);
    if (!entry)
        return;
    KA_AUTO_FREE char *path = entry->folder ? ka_path_join(entry->folder, "bench.json") : NULL;
    int rc = path ? ka_file_read(path, FILE_MAX, &text, &err) : -ENOENT;
    const struct ka_reply none = {.status = 204};
    const struct ka_reply reply = {
        .status = 200, .type = "application/json", .body = ka_buf_str(&text), .len = text.len};
    if (rc && rc != -ENOENT)
        refuse(call, rc, &err);
    else
        ka_call_reply(call, rc ? &none : &reply);
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
    const char *follow = ka_call_argument(call, "follow");
    bool whole = !follow || strcmp(follow, "true") == 0;
    if (!find(api, call, id))
        return;
    if (!whole && strcmp(follow, "false") != 0)
        ka_call_refuse(call, 400, "invalid", "follow is true or false");
    else if (ka_stream_run(api->queue, call, id, whole))
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

/* ---- store and machine ---- */

/* The text that an argument stands for: its own, or the file of the run that it names. free() it; NULL with
 * a sentence. */
static char *read_argument(struct ka_api *api, const char *name, const char *value, struct ka_err *err)
{
    KA_AUTO_BUF struct ka_buf source = {0};
    bool names_run = strcmp(name, "run") == 0;
    char *text = names_run ? NULL : ka_request_text(value);
    if (names_run && ka_entry_is_id(value, strlen(value)) &&
        ka_queue_source(api->queue, value, &source, err) == 0)
        text = ka_buf_steal(&source);
    if (!text || !text[strspn(text, " \t\r\n")]) {
        ka_fail(err, -EINVAL, names_run ? "run: there is no such run" : "%s: no text", name);
        free(text);
        return NULL;
    }
    return text;
}

/* One of the three, in `text`, which the caller frees. */
static int read_query(struct ka_api *api, struct ka_call *call, struct ka_similar_query *query, char **text,
                      struct ka_err *err)
{
    static const char *const names[] = {"query", "run", "words"};
    const char *topk = ka_call_argument(call, "topk"), *min_sim = ka_call_argument(call, "min-sim");
    size_t given = 0, at = 0;
    for (size_t i = 0; i < KA_COUNT(names); i++)
        if (ka_call_argument(call, names[i])) {
            given++;
            at = i;
        }
    if (given != 1)
        return ka_fail(err, -EINVAL, "one of query, run and words says what is looked for");
    if (topk && !ka_request_count(topk, 1, KA_INDEX_TOPK_MAX, &query->topk))
        return ka_fail(err, -EINVAL, "topk is a number from 1 to %d", KA_INDEX_TOPK_MAX);
    if (min_sim && !ka_request_number(min_sim, -1, 1, &query->min_sim))
        return ka_fail(err, -EINVAL, "min-sim is a number from -1 to 1");
    *text = read_argument(api, names[at], ka_call_argument(call, names[at]), err);
    *(strcmp(names[at], "words") == 0 ? &query->words : &query->forward) = *text;
    return *text ? 0 : -EINVAL;
}

static void get_similar(struct ka_api *api, struct ka_call *call, const char *id)
{
    struct ka_similar_query query = {.topk = 4};
    struct ka_err err;
    json_auto_t *found = NULL;
    KA_AUTO_FREE char *text = NULL;
    (void)id;
    int rc = read_query(api, call, &query, &text, &err);
    if (rc == 0)
        rc = ka_similar_find(api->app, &query, &found, &err);
    if (rc)
        refuse(call, rc, &err);
    else
        reply_json(call, 200, found);
}

static void get_machine(struct ka_api *api, struct ka_call *call, const char *id)
{
    json_auto_t *doc = ka_about_now(api->app, api->about);
    (void)id;
    reply_json(call, 200, doc);
}

/* ---- routes ---- */

static const struct route {
    const char *method, *path; /* '*' is an id */
    void (*handle)(struct ka_api *api, struct ka_call *call, const char *id);
} routes[] = {
    {"GET", "/", get_page},
    {"GET", "/healthz", get_health},
    {"GET", "/readyz", get_ready},
    {"GET", "/metrics", get_metrics},
    {"POST", "/v1/runs", post_run},
    {"GET", "/v1/runs", get_runs},
    {"GET", "/v1/runs/*", get_run},
    {"DELETE", "/v1/runs/*", delete_run},
    {"GET", "/v1/runs/*/result", get_result},
    {"GET", "/v1/runs/*/pair", get_pair},
    {"GET", "/v1/runs/*/bench", get_bench},
    {"GET", "/v1/runs/*/events", get_run_events},
    {"GET", "/v1/events", get_events},
    {"POST", "/v1/runs/*/cancel", post_cancel},
    {"POST", "/v1/runs/*/retry", post_retry},
    {"GET", "/v1/store/search", get_similar},
    {"GET", "/v1/machine", get_machine},
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

/* ---- who may ask ---- */

/* Whom the request counts for: all that came through no proxy are one. */
static unsigned seconds_to_wait(struct ka_rate *rate, const struct ka_call *call)
{
    size_t len;
    char hash[KA_HASH_HEX];
    const char *client = ka_request_client(ka_call_last_header(call, "X-Forwarded-For"), &len);
    ka_hash_hex(client, len, hash);
    hash[16] = '\0';
    return ka_rate_take(rate, strtoull(hash, NULL, 16), ka_clock_seconds());
}

/* The page itself holds nothing that is anybody's. */
static bool is_open(const struct route *route)
{
    return route && (route->handle == get_health || route->handle == get_page);
}

/* Answered where it may not ask. */
static bool may_ask(struct ka_api *api, struct ka_call *call)
{
    bool shown = !api->token || ka_request_shows(ka_call_header(call, "Authorization"), api->token);
    unsigned seconds = seconds_to_wait(shown ? &api->clients : &api->strangers, call);
    if (seconds)
        ka_call_refuse_for(call, seconds);
    else if (!shown)
        ka_call_refuse(call, 401, "unauthorized", "Authorization: Bearer TOKEN is missing or wrong");
    else if (!ka_request_same_origin(ka_call_header(call, "Origin"), ka_call_header(call, "Host")))
        ka_call_refuse(call, 403, "cross_origin", "the page of another site is asking");
    else if (!api->token && !ka_request_host_is_local(ka_call_header(call, "Host")))
        ka_call_refuse(call, 403, "wrong_host",
                       "without a token the Host is localhost; for other names use --token-file");
    else
        return true;
    return false;
}

void ka_api_begun(void *arg, struct ka_call *call)
{
    struct ka_api *api = arg;
    char id[KA_ENTRY_ID];
    bool other;
    const struct route *route = find_route(call, id, &other);
    if (!is_open(route) && !may_ask(api, call))
        return;
    if (!route && other)
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
