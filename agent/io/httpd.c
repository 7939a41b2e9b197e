/* libmicrohttpd in external-poll mode: its epoll descriptor is a uv_poll, its one timeout a uv_timer. Knows
 * requests and answers, no route.
 *
 * Rules that keep the two libraries apart: MHD_run() is called from the loop only, never from inside itself;
 * a timeout of 0 ms becomes 1 ms; a call that is not answered inside its callback is suspended, and resumed
 * by its answer; what is suspended at the end would never be let go, so none may be. */
#include "httpd.h"

#include <errno.h>
#include <jansson.h>
#include <microhttpd.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/hash.h"
#include "base/log.h"
#include "loop_uv.h"

#define SURPLUS 64 /* connections that may be there at a time to be told that they are too many */
#define SWEEP_MS 500
#define PING_MS 15000
#define BLOCK ((size_t)16 << 10)
#define HEAD_MAX ((size_t)32 << 10) /* memory of a connection: the request's line and headers */

struct peer { /* a connection */
    struct ka_httpd *httpd;
    int fd;
    bool whole;     /* a request is, and its answer under way */
    uint64_t since; /* when it began, or was answered last */
    struct peer *next, **at;
};

struct stream { /* an answer that goes on */
    struct ka_httpd *httpd;
    struct MHD_Connection *connection;
    ka_stream_fn more;
    void (*gone)(void *arg);
    void *arg;
    struct ka_buf waiting; /* for the client to take it */
    bool ended, suspended;
    uint64_t sent; /* when the client was given something */
    struct stream *next, **at;
};

struct ka_httpd {
    struct MHD_Daemon *mhd;
    struct ka_httpd_conf conf;
    uv_loop_t *loop;
    uv_poll_t poll;
    uv_timer_t timer, sweep;
    struct peer *peers;
    struct stream *streams;
    unsigned stream_count;
    bool closing;
    unsigned count;
    unsigned handles;
};

struct ka_call {
    struct ka_httpd *httpd;
    struct MHD_Connection *connection;
    char id[KA_CALL_ID];
    const char *method, *path;
    struct ka_buf body;
    struct MHD_Response *response; /* waits to be sent */
    unsigned status;
    bool shown, suspended;
};

/* ---- the loop ---- */

static void on_timer(uv_timer_t *timer);

static void wait_again(struct ka_httpd *httpd)
{
    MHD_UNSIGNED_LONG_LONG ms = 0;
    if (MHD_get_timeout(httpd->mhd, &ms) == MHD_YES)
        uv_timer_start(&httpd->timer, on_timer, ms < 1 ? 1 : ms, 0);
    else
        uv_timer_stop(&httpd->timer);
}

static void turn(struct ka_httpd *httpd)
{
    MHD_run(httpd->mhd);
    wait_again(httpd);
}

static void on_timer(uv_timer_t *timer)
{
    turn(timer->data);
}

static void on_poll(uv_poll_t *poll, int status, int events)
{
    (void)status;
    (void)events;
    turn(poll->data);
}

/* ---- connections ---- */

/* Its end is read by libmicrohttpd, which then lets go of it. */
static void cut(const struct peer *peer)
{
    shutdown(peer->fd, SHUT_RDWR);
}

static void refuse_peer(const struct peer *peer)
{
    static const char text[] =
        "HTTP/1.1 503 Service Unavailable\r\nRetry-After: 5\r\nConnection: close\r\n"
        "Content-Type: application/json\r\nContent-Length: 73\r\n\r\n"
        "{\"error\": {\"code\": \"busy\", \"message\": \"there are too many connections\"}}\n";
    if (send(peer->fd, text, sizeof(text) - 1, MSG_NOSIGNAL | MSG_DONTWAIT) < 0)
        ka_log(KA_LOG_DEBUG, "http: a refusal was not taken");
    cut(peer);
}

static void on_connection(void *arg, struct MHD_Connection *connection, void **context,
                          enum MHD_ConnectionNotificationCode code)
{
    struct ka_httpd *httpd = arg;
    struct peer *peer = *context;
    if (code == MHD_CONNECTION_NOTIFY_STARTED) {
        *context = peer = ka_calloc(1, sizeof(*peer));
        *peer = (struct peer){
            .httpd = httpd,
            .fd = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD)->connect_fd,
            .since = uv_now(httpd->loop),
            .next = httpd->peers,
            .at = &httpd->peers};
        if (peer->next)
            peer->next->at = &peer->next;
        httpd->peers = peer;
        if (++httpd->count > httpd->conf.max_connections)
            refuse_peer(peer);
        return;
    }
    httpd->count--;
    *peer->at = peer->next;
    if (peer->next)
        peer->next->at = peer->at;
    free(peer);
}

static struct peer *peer_of(struct MHD_Connection *connection)
{
    return MHD_get_connection_info(connection, MHD_CONNECTION_INFO_SOCKET_CONTEXT)->socket_context;
}

static void wake(struct stream *stream)
{
    if (!stream->suspended)
        return;
    stream->suspended = false;
    MHD_resume_connection(stream->connection);
}

/* Has the client ended what it sends? libmicrohttpd does not see the end that comes with the last bytes of
 * half a request, and would wait for the rest. */
static bool sends_no_more(const struct peer *peer)
{
    char byte;
    return recv(peer->fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) == 0;
}

/* A client that sends a byte now and then is never silent. */
static void on_sweep(uv_timer_t *timer)
{
    struct ka_httpd *httpd = timer->data;
    for (const struct peer *peer = httpd->peers; peer; peer = peer->next)
        if (!peer->whole &&
            (uv_now(httpd->loop) - peer->since > httpd->conf.request_s * 1000U || sends_no_more(peer)))
            cut(peer);
    for (struct stream *stream = httpd->streams; stream; stream = stream->next)
        wake(stream);
    if (httpd->streams)
        uv_timer_start(&httpd->timer, on_timer, 1, 0);
}

/* ---- calls ---- */

const char *ka_call_id(const struct ka_call *call)
{
    return call->id;
}

const char *ka_call_method(const struct ka_call *call)
{
    return call->method;
}

const char *ka_call_path(const struct ka_call *call)
{
    return call->path;
}

const char *ka_call_header(const struct ka_call *call, const char *name)
{
    return MHD_lookup_connection_value(call->connection, MHD_HEADER_KIND, name);
}

struct last_of {
    const char *name, *value;
};

static enum MHD_Result on_header(void *arg, enum MHD_ValueKind kind, const char *name, const char *value)
{
    struct last_of *last = arg;
    (void)kind;
    if (strcasecmp(name, last->name) == 0)
        last->value = value;
    return MHD_YES;
}

const char *ka_call_last_header(const struct ka_call *call, const char *name)
{
    struct last_of last = {.name = name};
    MHD_get_connection_values(call->connection, MHD_HEADER_KIND, on_header, &last);
    return last.value;
}

const char *ka_call_argument(const struct ka_call *call, const char *name)
{
    return MHD_lookup_connection_value(call->connection, MHD_GET_ARGUMENT_KIND, name);
}

const char *ka_call_body(const struct ka_call *call, size_t *len)
{
    *len = call->body.len;
    return ka_buf_str(&call->body);
}

/* Takes the response. */
static void answer(struct ka_call *call, struct MHD_Response *response, unsigned status, const char *type)
{
    MHD_add_response_header(response, "Content-Type", type);
    MHD_add_response_header(response, "X-Request-Id", call->id);
    MHD_add_response_header(response, "Cache-Control", "no-store");
    MHD_add_response_header(response, "X-Content-Type-Options", "nosniff");
    ka_log(KA_LOG_DEBUG, "%s %s %s: %u", call->id, call->method, call->path, status);
    call->response = response;
    call->status = status;
}

/* libmicrohttpd asks for bytes; where there are none it is to wait until wake(). */
static ssize_t read_stream(void *arg, uint64_t at, char *bytes, size_t max)
{
    struct stream *stream = arg;
    uint64_t now = uv_now(stream->httpd->loop);
    (void)at;
    if (stream->httpd->closing)
        return MHD_CONTENT_READER_END_OF_STREAM;
    if (!stream->waiting.len && !stream->ended)
        stream->ended = !stream->more(stream->arg, &stream->waiting);
    if (!stream->waiting.len && stream->ended)
        return MHD_CONTENT_READER_END_OF_STREAM;
    if (!stream->waiting.len && now - stream->sent >= PING_MS)
        ka_buf_puts(&stream->waiting, ": nothing new\n\n");
    size_t len = stream->waiting.len < max ? stream->waiting.len : max;
    if (len) {
        memcpy(bytes, stream->waiting.data, len);
        ka_buf_consume(&stream->waiting, len);
        stream->sent = now;
    } else {
        stream->suspended = true;
        MHD_suspend_connection(stream->connection);
    }
    return (ssize_t)len;
}

static void free_stream(void *arg)
{
    struct stream *stream = arg;
    *stream->at = stream->next;
    if (stream->next)
        stream->next->at = stream->at;
    stream->httpd->stream_count--;
    stream->gone(stream->arg);
    ka_buf_free(&stream->waiting);
    free(stream);
}

int ka_call_stream(struct ka_call *call, ka_stream_fn more, void (*gone)(void *arg), void *arg)
{
    struct ka_httpd *httpd = call->httpd;
    if (httpd->stream_count >= httpd->conf.max_streams)
        return -EAGAIN;
    struct stream *stream = ka_calloc(1, sizeof(*stream));
    *stream = (struct stream){.httpd = httpd,
                              .connection = call->connection,
                              .more = more,
                              .gone = gone,
                              .arg = arg,
                              .sent = uv_now(httpd->loop),
                              .next = httpd->streams,
                              .at = &httpd->streams};
    if (stream->next)
        stream->next->at = &stream->next;
    httpd->streams = stream;
    httpd->stream_count++;
    answer(call, MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, BLOCK, read_stream, stream, free_stream),
           200, "text/event-stream");
    return 0;
}

void ka_call_reply(struct ka_call *call, const struct ka_reply *reply)
{
    struct MHD_Response *response =
        MHD_create_response_from_buffer(reply->len, (void *)reply->body, MHD_RESPMEM_MUST_COPY);
    for (const char *const *header = reply->headers; header && *header; header += 2)
        MHD_add_response_header(response, header[0], header[1]);
    answer(call, response, reply->status, reply->type);
    if (call->suspended) {
        call->suspended = false;
        MHD_resume_connection(call->connection);
        uv_timer_start(&call->httpd->timer, on_timer, 1, 0);
    }
}

static void refuse_with(struct ka_call *call, unsigned status, const char *code, const char *message,
                        const char *const *headers)
{
    json_auto_t *doc =
        json_pack("{s:{s:s, s:s, s:s}}", "error", "code", code, "message", message, "request_id", call->id);
    KA_AUTO_FREE char *text = json_dumps(doc, JSON_COMPACT);
    const struct ka_reply reply = {
        .status = status, .type = "application/json", .body = text, .len = strlen(text), .headers = headers};
    ka_call_reply(call, &reply);
}

void ka_call_refuse(struct ka_call *call, unsigned status, const char *code, const char *message)
{
    static const char *const who[] = {"WWW-Authenticate", "Bearer", NULL};
    static const char *const later[] = {"Retry-After", "5", NULL};
    bool busy = status == 429 || status == 503;
    refuse_with(call, status, code, message, status == 401 ? who : busy ? later : NULL);
}

void ka_call_refuse_for(struct ka_call *call, unsigned seconds)
{
    char text[16];
    const char *headers[] = {"Retry-After", text, NULL};
    snprintf(text, sizeof(text), "%u", seconds);
    refuse_with(call, 429, "too_many_requests", "too many requests; Retry-After says when to go on", headers);
}

static enum MHD_Result send_response(struct ka_call *call)
{
    enum MHD_Result rc = MHD_queue_response(call->connection, call->status, call->response);
    MHD_destroy_response(call->response);
    call->response = NULL;
    return rc;
}

/* Of a body that does not say how long it is nobody knows when it is too long. */
static void check_length(struct ka_call *call)
{
    char text[96];
    const char *length = ka_call_header(call, "Content-Length");
    if (ka_call_header(call, "Transfer-Encoding")) {
        ka_call_refuse(call, 411, "length_required", "a body comes with a Content-Length, and in one piece");
    } else if (length && (strlen(length) > 18 || strtoull(length, NULL, 10) > call->httpd->conf.max_body)) {
        snprintf(text, sizeof(text), "a body has at most %zu bytes", call->httpd->conf.max_body);
        ka_call_refuse(call, 413, "too_large", text);
    }
}

static struct ka_call *new_call(struct ka_httpd *httpd, struct MHD_Connection *connection, const char *path,
                                const char *method)
{
    struct ka_call *call = ka_calloc(1, sizeof(*call));
    *call = (struct ka_call){.httpd = httpd,
                             .connection = connection,
                             .method = method,
                             .path = path,
                             .body = {.max = httpd->conf.max_body}};
    snprintf(call->id, sizeof(call->id), "%016llx", (unsigned long long)ka_random_u64());
    return call;
}

/* Called once when the head is there, then for each piece of the body, then once more without one; and again
 * when it is resumed. */
static enum MHD_Result on_request(void *arg, struct MHD_Connection *connection, const char *path,
                                  const char *method, const char *version, const char *piece, size_t *len,
                                  void **at)
{
    struct ka_httpd *httpd = arg;
    struct ka_call *call = *at;
    (void)version;
    if (!call) {
        *at = call = new_call(httpd, connection, path, method);
        httpd->conf.begun(httpd->conf.arg, call);
        if (!call->response)
            check_length(call);
        return call->response ? send_response(call) : MHD_YES;
    }
    if (*len) {
        if (ka_buf_add(&call->body, piece, *len))
            return MHD_NO;
        *len = 0;
        return MHD_YES;
    }
    if (!call->shown) {
        call->shown = true;
        peer_of(connection)->whole = true;
        httpd->conf.whole(httpd->conf.arg, call);
    }
    if (call->response)
        return send_response(call);
    if (!call->suspended) {
        call->suspended = true;
        MHD_suspend_connection(connection);
    }
    return MHD_YES;
}

static void on_completed(void *arg, struct MHD_Connection *connection, void **at,
                         enum MHD_RequestTerminationCode why)
{
    struct ka_call *call = *at;
    struct peer *peer = peer_of(connection);
    (void)arg;
    (void)why;
    *at = NULL;
    peer->whole = false;
    peer->since = uv_now(peer->httpd->loop);
    if (!call)
        return;
    if (call->response)
        MHD_destroy_response(call->response);
    ka_buf_free(&call->body);
    free(call);
}

/* Escapes are left as they are: no path of ours needs one. */
static size_t keep_escapes(void *arg, struct MHD_Connection *connection, char *text)
{
    (void)arg;
    (void)connection;
    return strlen(text);
}

static void KA_PRINTF(2, 0) on_log(void *arg, const char *fmt, va_list args)
{
    char text[256];
    (void)arg;
    vsnprintf(text, sizeof(text), fmt, args);
    text[strcspn(text, "\n")] = '\0';
    ka_log(KA_LOG_DEBUG, "http: %s", text);
}

/* ---- life ---- */

int ka_httpd_new(struct ka_loop *loop, const struct ka_httpd_conf *conf, int fd, struct ka_httpd **out,
                 struct ka_err *err)
{
    struct ka_httpd *httpd = ka_calloc(1, sizeof(*httpd));
    *httpd = (struct ka_httpd){.conf = *conf, .loop = ka_loop_uv(loop), .handles = 3};
    httpd->mhd = MHD_start_daemon(
        MHD_USE_EPOLL | MHD_ALLOW_SUSPEND_RESUME | MHD_USE_ERROR_LOG, 0, NULL, NULL, on_request, httpd,
        MHD_OPTION_EXTERNAL_LOGGER, on_log, NULL, MHD_OPTION_LISTEN_SOCKET, fd, MHD_OPTION_NOTIFY_COMPLETED,
        on_completed, NULL, MHD_OPTION_UNESCAPE_CALLBACK, keep_escapes, NULL, MHD_OPTION_CONNECTION_LIMIT,
        conf->max_connections + SURPLUS, MHD_OPTION_NOTIFY_CONNECTION, on_connection, httpd,
        MHD_OPTION_CONNECTION_TIMEOUT, conf->idle_s, MHD_OPTION_CONNECTION_MEMORY_LIMIT, HEAD_MAX,
        MHD_OPTION_END);
    const union MHD_DaemonInfo *info =
        httpd->mhd ? MHD_get_daemon_info(httpd->mhd, MHD_DAEMON_INFO_EPOLL_FD) : NULL;
    if (!info) {
        close(fd);
        free(httpd);
        return ka_fail(err, -EIO, "libmicrohttpd cannot be set up");
    }
    uv_poll_init(httpd->loop, &httpd->poll, info->epoll_fd);
    uv_timer_init(httpd->loop, &httpd->timer);
    uv_timer_init(httpd->loop, &httpd->sweep);
    httpd->poll.data = httpd->timer.data = httpd->sweep.data = httpd;
    uv_timer_start(&httpd->sweep, on_sweep, SWEEP_MS, SWEEP_MS);
    uv_poll_start(&httpd->poll, UV_READABLE, on_poll);
    wait_again(httpd);
    *out = httpd;
    return 0;
}

static void on_closed(uv_handle_t *handle)
{
    struct ka_httpd *httpd = handle->data;
    if (--httpd->handles == 0)
        free(httpd);
}

void ka_httpd_close(struct ka_httpd *httpd)
{
    if (!httpd)
        return;
    httpd->closing = true;
    for (struct stream *stream = httpd->streams; stream; stream = stream->next)
        wake(stream);
    MHD_run(httpd->mhd); /* resumes what was answered last, then writes it */
    MHD_run(httpd->mhd);
    uv_close((uv_handle_t *)&httpd->poll, on_closed);
    uv_close((uv_handle_t *)&httpd->timer, on_closed);
    uv_close((uv_handle_t *)&httpd->sweep, on_closed);
    MHD_stop_daemon(httpd->mhd);
    httpd->mhd = NULL;
}
