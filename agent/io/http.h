/* HTTP requests over libcurl's multi interface on a uv loop: bytes out, bytes in, and when it ended.
 *
 * Everything runs on the loop's thread. One *transfer* is one request. It has no clock beyond curl's own
 * timeouts and no retries: those belong to the caller. Redirects are not followed, since they would carry the
 * key elsewhere; proxies and certificate authorities (CURL_CA_BUNDLE, SSL_CERT_FILE) come from the
 * environment as for the curl tool; only http and https are spoken, and certificates are always verified. */
#ifndef KA_HTTP_H
#define KA_HTTP_H

#include "base/base.h"

struct ka_loop;
struct ka_http;
struct ka_transfer;

struct ka_http_req {
    const char *url;
    const char *socket; /* a unix socket's path, in place of the URL's host; NULL */
    bool direct;        /* never through a proxy */
    const char
        *bearer; /* sent as `Authorization: Bearer ...`; NULL sends none. Our copy is wiped afterwards. */
    const char *body; /* JSON of a POST, borrowed until the transfer has ended; NULL: a GET */
    size_t body_len;
    long connect_ms, total_ms;
};

struct ka_http_end {
    bool permanent; /* the same request would fail again: a bad URL, a certificate that does not verify */
    const char *failure;  /* what curl says went wrong in the transport; NULL when it ended in good order */
    long status;          /* HTTP status, 0 when none came */
    long retry_after_s;   /* what the endpoint asked for; 0 when nothing */
    const char *redirect; /* where a 3xx pointed to, or NULL */
};

/* More of the answer's body; non-zero cuts the transfer. Runs inside curl: of this module, only the two
 * functions at the end may be called. */
typedef int (*ka_http_body_fn)(void *arg, struct ka_transfer *transfer, const char *bytes, size_t len);
/* It ended; runs once, from the loop, never from inside ka_http_start(). The transfer is gone when it
 * returns. */
typedef void (*ka_http_end_fn)(void *arg, const struct ka_http_end *end);

/* NULL with `err` set when curl cannot be set up. */
struct ka_http *ka_http_new(struct ka_loop *loop, struct ka_err *err);

/* Release everything once no transfer runs (the caller has aborted or awaited all); not from a callback of a
 * transfer. `closed` runs from the loop when the last handle is closed; `http` is gone then. */
void ka_http_close(struct ka_http *http, void (*closed)(void *arg), void *arg);

/* -ENOMEM or -EINVAL, with `err` set. */
int ka_http_start(struct ka_http *http, const struct ka_http_req *req, ka_http_body_fn body,
                  ka_http_end_fn end, void *arg, struct ka_transfer **transfer, struct ka_err *err);

/* Drop a transfer: neither callback runs any more. Not from inside on_body. */
void ka_http_abort(struct ka_transfer *transfer);

/* While a transfer runs. The content type is NULL when the endpoint sent none. */
const char *ka_http_content_type(const struct ka_transfer *transfer);
long ka_http_status(const struct ka_transfer *transfer);

#endif
