/* HTTP requests from clients, whole, and what is answered: libmicrohttpd on the uv loop.
 *
 * A *call* is one request. It is shown twice: `begun` once its head is there, where it may be answered at
 * once (a body that was announced is then not read), and `whole` once its body is there too. It is answered
 * once, inside of these or later. A call belongs to this module; after ka_call_reply() nobody else may look
 * at it. Everything runs on the loop's thread.
 *
 * Bodies come with a Content-Length, up to `max_body`: 411 and 413 are answered here. Paths are as they were
 * sent, with no escape undone.
 */
#ifndef KA_HTTPD_H
#define KA_HTTPD_H

#include "base/base.h"

struct ka_call;
struct ka_httpd;
struct ka_loop;

#define KA_CALL_ID 17

struct ka_httpd_conf {
    size_t max_body;
    unsigned max_connections; /* one more is told 503 and closed */
    unsigned idle_s;          /* silence that ends a connection */
    unsigned max_streams;     /* of these */
    unsigned request_s;       /* that a request may take to be whole, however steadily it comes */
    void (*begun)(void *arg, struct ka_call *call);
    void (*whole)(void *arg, struct ka_call *call);
    void *arg;
};

struct ka_reply {
    unsigned status;
    const char *type; /* of the body */
    const char *body; /* copied */
    size_t len;
    const char *const *headers; /* more of them: name, value, ..., NULL; NULL: none */
};

/* A socket that listens on `address`: "unix:PATH", for this user alone, or "HOST:PORT" with 127.0.0.1,
 * localhost or [::1] (other machines come through a proxy that speaks TLS), port 0 being any. A socket file
 * that nobody listens on is replaced. -EINVAL, -EADDRINUSE, -errno. */
int ka_httpd_listen(const char *address, int *fd, struct ka_err *err);

/* "unix:PATH" or "HOST:PORT" with the port that it got, of a socket that listens; free() it. */
char *ka_httpd_address(int fd);

bool ka_httpd_is_unix(const char *address);

/* Takes `fd`, copies `conf`. -EIO. */
int ka_httpd_new(struct ka_loop *loop, const struct ka_httpd_conf *conf, int fd, struct ka_httpd **out,
                 struct ka_err *err);

/* No call may be unanswered. The answers are still handed to the system; frees it from the loop. */
void ka_httpd_close(struct ka_httpd *httpd);

/* Borrowed until the call is answered. A header that is not there is NULL; so is a query's argument. */
const char *ka_call_id(const struct ka_call *call);
const char *ka_call_method(const struct ka_call *call);
const char *ka_call_path(const struct ka_call *call);
const char *ka_call_header(const struct ka_call *call, const char *name);
const char *ka_call_last_header(const struct ka_call *call, const char *name); /* where it comes again */
const char *ka_call_argument(const struct ka_call *call, const char *name);
const char *ka_call_body(const struct ka_call *call, size_t *len);

void ka_call_reply(struct ka_call *call, const struct ka_reply *reply);

/* More of an answer that goes on: what there is by now is appended to `out`, nothing where there is nothing
 * yet. false: that was the end. Asked as often as the client takes what it gets, and every so often. */
typedef bool (*ka_stream_fn)(void *arg, struct ka_buf *out);

/* Answer with a stream of events (text/event-stream), inside of `begun` or `whole`. Its silence is broken by
 * comments. `gone` runs once when nobody asks for more any more, and may free `arg`. -EAGAIN: there are too
 * many; the call is then not answered. */
int ka_call_stream(struct ka_call *call, ka_stream_fn more, void (*gone)(void *arg), void *arg);
/* {"error": {"code", "message", "request_id"}} */
void ka_call_refuse(struct ka_call *call, unsigned status, const char *code, const char *message);
/* 429: this client has sent too many requests, and may go on after so many seconds. */
void ka_call_refuse_for(struct ka_call *call, unsigned seconds);

#endif
