/* The service's client: one request after another, each on a loop of its own. Knows requests and what is
 * printed. */
#include "client_cli.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "agent/core/fields.h"
#include "agent/core/sse.h"
#include "agent/core/submission.h"
#include "agent/io/http.h"
#include "agent/io/httpd.h"
#include "agent/io/loop.h"
#include "agent/serve/entry.h"
#include "agent/serve/service.h"
#include "base/each.h"
#include "base/files.h"
#include "show.h"
#include "show_event.h"

#define ANSWER_MAX ((size_t)64 << 20)
#define EVENT_MAX ((size_t)16 << 20)
#define ASK_MS 60000
#define POLL_US 300000

struct client {
    const struct ka_opts *opts;
    char *address, *token;
};

struct asking {
    struct ka_loop *loop;
    struct ka_sse *events; /* what takes an answer that is a stream; NULL: it is a document */
    long most_ms;          /* that it may take; 0: as long as it takes */
    struct ka_buf body;
    long status;
    char *failure;
};

/* ---- one request */

static int on_body(void *arg, struct ka_transfer *transfer, const char *bytes, size_t len)
{
    struct asking *asking = arg;
    if (asking->events && ka_http_status(transfer) == 200)
        return ka_sse_feed(asking->events, bytes, len);
    return ka_buf_add(&asking->body, bytes, len);
}

static void on_end(void *arg, const struct ka_http_end *end)
{
    struct asking *asking = arg;
    asking->status = end->status;
    asking->failure = ka_strdup(end->failure);
    ka_loop_stop(asking->loop);
}

static int transfer(const struct client *client, const char *path, const char *body, struct asking *asking,
                    struct ka_err *err)
{
    bool local = ka_httpd_is_unix(client->address);
    KA_AUTO_FREE char *url = ka_format("http://%s%s", local ? "localhost" : client->address, path);
    const struct ka_http_req req = {.url = url,
                                    .socket = local ? client->address + strlen("unix:") : NULL,
                                    .direct = true,
                                    .bearer = client->token,
                                    .body = body,
                                    .body_len = body ? strlen(body) : 0,
                                    .connect_ms = 10000,
                                    .total_ms = asking->most_ms};
    struct ka_transfer *running;
    struct ka_http *http = ka_http_new(asking->loop, err);
    if (!http)
        return -ENOMEM;
    int rc = ka_http_start(http, &req, on_body, on_end, asking, &running, err);
    if (rc == 0)
        ka_loop_run(asking->loop);
    ka_http_close(http, NULL, NULL);
    ka_loop_run(asking->loop);
    return rc;
}

/* `body` NULL: a GET. The answer's document (new reference; {} of a stream), or NULL with `err`. */
static json_t *ask_for(const struct client *client, const char *path, const char *body, struct ka_sse *events,
                       long most_ms, struct ka_err *err)
{
    struct asking asking = {
        .loop = ka_loop_new(), .events = events, .most_ms = most_ms, .body = {.max = ANSWER_MAX}};
    json_t *doc = NULL;
    int rc = transfer(client, path, body, &asking, err);
    ka_loop_close(asking.loop);
    if (rc == 0 && asking.failure)
        rc = ka_fail(err, -EIO, "%s: no service there: %s", client->address, asking.failure);
    if (rc == 0 && events && asking.status == 200)
        doc = json_object();
    else if (rc == 0)
        doc = json_loadb(ka_buf_str(&asking.body), asking.body.len, 0, NULL);
    if (rc == 0 && asking.status >= 300) {
        const char *why = ka_text_of(json_object_get(doc, "error"), "message", "refused");
        ka_fail(err, -EIO, "%s (HTTP %ld)", why, asking.status);
        json_decref(doc);
        doc = NULL;
    } else if (rc == 0 && !doc) {
        ka_fail(err, -EIO, "%s: not an answer of the service", client->address);
    }
    free(asking.failure);
    ka_buf_free(&asking.body);
    return doc;
}

static json_t *ask(const struct client *client, const char *path, const char *body, struct ka_err *err)
{
    return ask_for(client, path, body, NULL, ASK_MS, err);
}

static int check_id(const char *id, struct ka_err *err)
{
    return ka_entry_is_id(id, strlen(id))
               ? 0
               : ka_fail(err, -EINVAL, "'%s' is no run's id (kernel-agent status lists them)", id);
}

static json_t *ask_of(const struct client *client, const char *id, const char *what, const char *body,
                      struct ka_err *err)
{
    if (check_id(id, err))
        return NULL;
    KA_AUTO_FREE char *path = ka_format("/v1/runs/%s%s", id, what);
    return ask(client, path, body, err);
}

/* ---- what is printed */

static void print_run(const json_t *run)
{
    printf("%-16s  %-9s  %-12s  %4d  %3s  %s%s%s\n", ka_text_of(run, "id", "?"),
           ka_text_of(run, "state", "?"), ka_text_of(run, "verdict", "-"),
           (int)ka_number_of(run, "priority", 0), ka_text_of(run, "gpu", "-"), ka_text_of(run, "name", "?"),
           ka_text_of(run, "reason", NULL) ? "  " : "", ka_text_of(run, "reason", ""));
}

static void show(const struct client *client, const json_t *doc)
{
    if (client->opts->json) {
        ka_show_json(doc, JSON_INDENT(2) | JSON_REAL_PRECISION(15));
        return;
    }
    const json_t *runs = json_object_get(doc, "runs");
    printf("%-16s  %-9s  %-12s  %4s  %3s  %s\n", "id", "state", "verdict", "prio", "gpu", "file");
    if (!runs)
        print_run(doc);
    KA_EACH(runs, i, run)
        print_run(run);
}

/* ---- commands */

/* The run that the file became, or NULL. */
static json_t *submit(const struct client *client, const char *file, struct ka_err *err)
{
    const char *slash = strrchr(file, '/');
    KA_AUTO_BUF struct ka_buf text = {0};
    if (ka_file_read(file, KA_SUBMISSION_MAX, &text, err))
        return NULL;
    json_auto_t *request = json_pack("{s:s%, s:s, s:o, s:i}", "source", ka_buf_str(&text), text.len, "name",
                                     slash ? slash + 1 : file, "options", ka_opts_given(client->opts),
                                     "priority", client->opts->priority);
    if (!request) {
        ka_fail(err, -EINVAL, "%s: not UTF-8", file);
        return NULL;
    }
    KA_AUTO_FREE char *body = json_dumps(request, JSON_COMPACT);
    return ask(client, "/v1/runs", body, err);
}

static bool has_ended(const json_t *run)
{
    return !ka_is_text(run, "state", "queued") && !ka_is_text(run, "state", "running");
}

static int exit_code_of(const json_t *run)
{
    return ka_is_text(run, "state", "cancelled") ? 130 : (int)ka_number_of(run, "exit_code", 1);
}

/* Steals `run`; the run once it has ended. */
static json_t *wait_for(const struct client *client, json_t *run, struct ka_err *err)
{
    while (run && !has_ended(run)) {
        usleep(POLL_US);
        json_t *now = ask_of(client, ka_text_of(run, "id", ""), "", NULL, err);
        json_decref(run);
        run = now;
    }
    return run;
}

/* What happened in a run: its lines so far, or with --follow until it has ended. */
static json_t *show_log(const struct client *client, const char *id, struct ka_err *err)
{
    struct ka_sse events;
    bool as_json = client->opts->json, follow = client->opts->follow;
    if (check_id(id, err))
        return NULL;
    KA_AUTO_FREE char *path = ka_format("/v1/runs/%s/events?follow=%s", id, follow ? "true" : "false");
    ka_sse_init(&events, EVENT_MAX, as_json ? ka_show_event_json : ka_show_event, NULL);
    json_t *doc = ask_for(client, path, NULL, &events, follow ? 0 : ASK_MS, err);
    ka_sse_free(&events);
    return doc;
}

static int open_client(struct client *client, struct ka_err *err)
{
    KA_AUTO_FREE char *folder = ka_service_folder(client->opts);
    KA_AUTO_FREE char *file = folder ? ka_path_join(folder, "address") : NULL;
    KA_AUTO_BUF struct ka_buf text = {0};
    if (client->opts->token_file && ka_service_token(client->opts->token_file, &client->token, err))
        return -EINVAL;
    if (!client->opts->address && (!file || ka_file_read(file, 4096, &text, NULL)))
        return ka_fail(err, -ENOENT,
                       "no service runs with the state folder %s: kernel-agent serve, or name it "
                       "by --address or --state",
                       folder ? folder : "(none)");
    client->address = ka_strdup(client->opts->address ? client->opts->address : ka_buf_str(&text));
    return 0;
}

static json_t *carry_out(const struct client *client, const char *command, const char *word,
                         struct ka_err *err)
{
    if (strcmp(command, "submit") == 0) {
        json_t *run = submit(client, word, err);
        return client->opts->wait ? wait_for(client, run, err) : run;
    }
    if (strcmp(command, "logs") == 0)
        return show_log(client, word, err);
    if (strcmp(command, "cancel") == 0)
        return ask_of(client, word, "/cancel", "", err);
    if (strcmp(command, "retry") == 0) {
        json_t *run = ask_of(client, word, "/retry", "", err);
        return client->opts->wait ? wait_for(client, run, err) : run;
    }
    return word ? ask_of(client, word, "", NULL, err) : ask(client, "/v1/runs?limit=1000", NULL, err);
}

int ka_client_main(const struct ka_opts *opts, const char *command, const char *word)
{
    struct client client = {.opts = opts};
    struct ka_err err;
    json_auto_t *doc = open_client(&client, &err) ? NULL : carry_out(&client, command, word, &err);
    int code = doc ? opts->wait && has_ended(doc) ? exit_code_of(doc) : 0 : ka_show_problem(&err, 2);
    if (doc && strcmp(command, "logs") != 0)
        show(&client, doc);
    if (client.token)
        explicit_bzero(client.token, strlen(client.token));
    free(client.token);
    free(client.address);
    return code;
}
