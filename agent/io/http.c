/* curl's multi interface driven by uv: sockets become uv_poll handles, curl's one timer a uv_timer. Knows
 * nothing of chat completions.
 *
 * Rules that keep the two libraries apart: curl_multi_* is never called from a curl callback; finished
 * transfers are collected after every action; a socket's context belongs to its uv_poll and is freed in the
 * close callback; a timer of 0 ms becomes 1 ms, so that curl is entered from the loop and not in a spin. */
#include "http.h"

#include <curl/curl.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "loop_uv.h"

struct ka_http {
    uv_loop_t *loop;
    CURLM *multi;
    uv_timer_t timer;
    unsigned handles; /* uv handles not yet closed: the timer and one for each socket */
    void (*closed)(void *arg);
    void *closed_arg;
};

struct socket_watch {
    uv_poll_t poll;
    curl_socket_t socket;
    struct ka_http *http;
};

struct ka_transfer {
    struct ka_http *http;
    CURL *easy;
    struct curl_slist *headers;
    ka_http_body_fn body;
    ka_http_end_fn end;
    void *arg;
    bool cut;
    char why[CURL_ERROR_SIZE];
};

static void release_handle(struct ka_http *http)
{
    if (--http->handles)
        return;
    void (*closed)(void *arg) = http->closed;
    void *arg = http->closed_arg;
    free(http);
    if (closed)
        closed(arg);
}

/* ---- transfers ---- */

static void wipe_headers(struct curl_slist *headers)
{
    for (struct curl_slist *line = headers; line; line = line->next)
        explicit_bzero(line->data, strlen(line->data));
    curl_slist_free_all(headers);
}

static void free_transfer(struct ka_transfer *transfer)
{
    if (transfer->easy)
        curl_easy_cleanup(transfer->easy);
    wipe_headers(transfer->headers);
    free(transfer);
}

static size_t on_write(char *bytes, size_t size, size_t count, void *arg)
{
    struct ka_transfer *transfer = arg;
    size_t len = size * count;
    if (transfer->body(transfer->arg, transfer, bytes, len) == 0)
        return len;
    transfer->cut = true;
    return CURL_WRITEFUNC_ERROR;
}

static bool is_permanent(CURLcode code)
{
    return code == CURLE_URL_MALFORMAT || code == CURLE_UNSUPPORTED_PROTOCOL ||
           code == CURLE_PEER_FAILED_VERIFICATION || code == CURLE_SSL_CACERT_BADFILE;
}

static void finish(struct ka_transfer *transfer, CURLcode code)
{
    struct ka_http_end end = {.permanent = is_permanent(code)};
    curl_off_t retry_after = 0;
    char *redirect = NULL;
    curl_easy_getinfo(transfer->easy, CURLINFO_RESPONSE_CODE, &end.status);
    curl_easy_getinfo(transfer->easy, CURLINFO_RETRY_AFTER, &retry_after);
    curl_easy_getinfo(transfer->easy, CURLINFO_REDIRECT_URL, &redirect);
    end.redirect = redirect;
    end.retry_after_s = retry_after < 0 ? 0 : retry_after > 1000000 ? 1000000 : (long)retry_after;
    if (code != CURLE_OK && !transfer->cut)
        end.failure = transfer->why[0] ? transfer->why : curl_easy_strerror(code);
    curl_multi_remove_handle(transfer->http->multi, transfer->easy);
    transfer->end(transfer->arg, &end);
    free_transfer(transfer);
}

/* Always to the end of the queue, also when curl counts no running transfer. */
static void collect(struct ka_http *http)
{
    int left;
    CURLMsg *message;
    while ((message = curl_multi_info_read(http->multi, &left))) {
        char *transfer;
        CURLcode code = message->data.result; /* the message dies with its handle */
        if (message->msg != CURLMSG_DONE)
            continue;
        curl_easy_getinfo(message->easy_handle, CURLINFO_PRIVATE, &transfer);
        finish((struct ka_transfer *)(void *)transfer, code);
    }
}

/* ---- what curl asks of the loop ---- */

static void on_timer(uv_timer_t *timer)
{
    struct ka_http *http = timer->data;
    int running;
    curl_multi_socket_action(http->multi, CURL_SOCKET_TIMEOUT, 0, &running);
    collect(http);
}

static int set_timer(CURLM *multi, long timeout_ms, void *arg)
{
    (void)multi;
    struct ka_http *http = arg;
    if (uv_is_closing((uv_handle_t *)&http->timer))
        return 0;
    if (timeout_ms < 0)
        uv_timer_stop(&http->timer);
    else
        uv_timer_start(&http->timer, on_timer, timeout_ms < 1 ? 1 : (uint64_t)timeout_ms, 0);
    return 0;
}

static void on_poll(uv_poll_t *poll, int status, int events)
{
    struct socket_watch *watch = poll->data;
    struct ka_http *http = watch->http;
    int running, flags = status < 0 ? CURL_CSELECT_ERR : 0;
    if (events & UV_READABLE)
        flags |= CURL_CSELECT_IN;
    if (events & UV_WRITABLE)
        flags |= CURL_CSELECT_OUT;
    curl_multi_socket_action(http->multi, watch->socket, flags, &running);
    collect(http);
}

static void on_watch_closed(uv_handle_t *handle)
{
    struct socket_watch *watch = handle->data;
    struct ka_http *http = watch->http;
    free(watch);
    release_handle(http);
}

static struct socket_watch *watch_socket(struct ka_http *http, curl_socket_t socket)
{
    struct socket_watch *watch = ka_calloc(1, sizeof(*watch));
    watch->socket = socket;
    watch->http = http;
    if (uv_poll_init_socket(http->loop, &watch->poll, socket) != 0) {
        free(watch);
        return NULL;
    }
    watch->poll.data = watch;
    http->handles++;
    return watch;
}

static int set_socket(CURL *easy, curl_socket_t socket, int what, void *arg, void *known)
{
    (void)easy;
    struct ka_http *http = arg;
    struct socket_watch *watch = known;
    if (what == CURL_POLL_REMOVE) {
        if (watch) {
            uv_poll_stop(&watch->poll);
            uv_close((uv_handle_t *)&watch->poll, on_watch_closed);
        }
        return 0;
    }
    if (!watch && !(watch = watch_socket(http, socket)))
        return -1; /* curl fails the transfers */
    int events = (what & CURL_POLL_IN ? UV_READABLE : 0) | (what & CURL_POLL_OUT ? UV_WRITABLE : 0);
    uv_poll_start(&watch->poll, events, on_poll);
    curl_multi_assign(http->multi, socket, watch); /* the one call that curl allows here */
    return 0;
}

/* ---- API ---- */

struct ka_http *ka_http_new(struct ka_loop *loop, struct ka_err *err)
{
    CURLM *multi = curl_global_init(CURL_GLOBAL_DEFAULT) == CURLE_OK ? curl_multi_init() : NULL;
    if (!multi) {
        ka_fail(err, -ENOMEM, "libcurl cannot be set up");
        return NULL;
    }
    struct ka_http *http = ka_calloc(1, sizeof(*http));
    http->loop = ka_loop_uv(loop);
    http->multi = multi;
    uv_timer_init(http->loop, &http->timer);
    http->timer.data = http;
    http->handles = 1;
    curl_multi_setopt(multi, CURLMOPT_SOCKETFUNCTION, set_socket);
    curl_multi_setopt(multi, CURLMOPT_SOCKETDATA, http);
    curl_multi_setopt(multi, CURLMOPT_TIMERFUNCTION, set_timer);
    curl_multi_setopt(multi, CURLMOPT_TIMERDATA, http);
    return http;
}

static void on_timer_closed(uv_handle_t *handle)
{
    release_handle(handle->data);
}

void ka_http_close(struct ka_http *http, void (*closed)(void *arg), void *arg)
{
    http->closed = closed;
    http->closed_arg = arg;
    uv_close((uv_handle_t *)&http->timer, on_timer_closed);
    curl_multi_cleanup(http->multi);
    http->multi = NULL;
    curl_global_cleanup(); /* counted: one for each ka_http_new() */
}

static int add_header(struct ka_transfer *transfer, const char *line)
{
    struct curl_slist *longer = curl_slist_append(transfer->headers, line);
    transfer->headers = longer ? longer : transfer->headers;
    return longer ? 0 : -ENOMEM;
}

static int add_headers(struct ka_transfer *transfer, const char *bearer)
{
    static const char *const fixed[] = {"Content-Type: application/json",
                                        "Accept: text/event-stream, application/json",
                                        "Expect:" /* no waiting for 100 Continue with large prompts */};
    int rc = 0;
    for (size_t i = 0; i < KA_COUNT(fixed) && rc == 0; i++)
        rc = add_header(transfer, fixed[i]);
    if (rc || !bearer)
        return rc;
    KA_AUTO_FREE char *line = ka_format("Authorization: Bearer %s", bearer);
    rc = add_header(transfer, line);
    explicit_bzero(line, strlen(line));
    return rc;
}

static CURLcode set_options(struct ka_transfer *transfer, const struct ka_http_req *req)
{
    CURL *easy = transfer->easy;
    const char *bundle = getenv("CURL_CA_BUNDLE"), *file = bundle ? bundle : getenv("SSL_CERT_FILE");
    const CURLcode set[] = {
        curl_easy_setopt(easy, CURLOPT_URL, req->url),
        curl_easy_setopt(easy, CURLOPT_PROTOCOLS_STR, "http,https"),
        req->body ? curl_easy_setopt(easy, CURLOPT_POSTFIELDSIZE_LARGE, (curl_off_t)req->body_len) : CURLE_OK,
        req->body ? curl_easy_setopt(easy, CURLOPT_POSTFIELDS, req->body)
                  : curl_easy_setopt(easy, CURLOPT_HTTPGET, 1L),
        curl_easy_setopt(easy, CURLOPT_HTTPHEADER, transfer->headers),
        req->direct ? curl_easy_setopt(easy, CURLOPT_NOPROXY, "*") : CURLE_OK,
        req->socket ? curl_easy_setopt(easy, CURLOPT_UNIX_SOCKET_PATH, req->socket) : CURLE_OK,
        /* private certificate authorities, named as for the curl tool */
        file && *file ? curl_easy_setopt(easy, CURLOPT_CAINFO, file) : CURLE_OK,
    };
    curl_easy_setopt(easy, CURLOPT_PRIVATE, transfer);
    curl_easy_setopt(easy, CURLOPT_ERRORBUFFER, transfer->why);
    curl_easy_setopt(easy, CURLOPT_WRITEFUNCTION, on_write);
    curl_easy_setopt(easy, CURLOPT_WRITEDATA, transfer);
    curl_easy_setopt(easy, CURLOPT_CONNECTTIMEOUT_MS, req->connect_ms);
    curl_easy_setopt(easy, CURLOPT_TIMEOUT_MS, req->total_ms);
    curl_easy_setopt(easy, CURLOPT_FOLLOWLOCATION, 0L);
    curl_easy_setopt(easy, CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(easy, CURLOPT_USERAGENT, "kernel-agent");
    curl_easy_setopt(easy, CURLOPT_QUICK_EXIT, 1L); /* an abort does not wait for a name lookup */
    for (size_t i = 0; i < KA_COUNT(set); i++)
        if (set[i] != CURLE_OK)
            return set[i];
    return CURLE_OK;
}

int ka_http_start(struct ka_http *http, const struct ka_http_req *req, ka_http_body_fn body,
                  ka_http_end_fn end, void *arg, struct ka_transfer **transfer, struct ka_err *err)
{
    struct ka_transfer *new = ka_calloc(1, sizeof(*new));
    *new = (struct ka_transfer){.http = http, .easy = curl_easy_init(), .body = body, .end = end, .arg = arg};
    int rc = 0;
    if (!new->easy || add_headers(new, req->bearer))
        rc = ka_fail(err, -ENOMEM, "no memory for a request");
    CURLcode code = rc ? CURLE_OK : set_options(new, req);
    if (code != CURLE_OK)
        rc = ka_fail(err, -EINVAL, "the request cannot be set up: %s", curl_easy_strerror(code));
    if (rc == 0 && curl_multi_add_handle(http->multi, new->easy) != CURLM_OK)
        rc = ka_fail(err, -ENOMEM, "the request cannot be started");
    if (rc)
        free_transfer(new);
    else
        *transfer = new;
    return rc;
}

void ka_http_abort(struct ka_transfer *transfer)
{
    curl_multi_remove_handle(transfer->http->multi, transfer->easy);
    free_transfer(transfer);
}

const char *ka_http_content_type(const struct ka_transfer *transfer)
{
    char *type = NULL;
    curl_easy_getinfo(transfer->easy, CURLINFO_CONTENT_TYPE, &type);
    return type;
}

long ka_http_status(const struct ka_transfer *transfer)
{
    long status = 0;
    curl_easy_getinfo(transfer->easy, CURLINFO_RESPONSE_CODE, &status);
    return status;
}
