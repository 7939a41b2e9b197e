/* Server-sent events, incrementally: bytes in any chunking go in, whole events come out.
 *
 * Words: an *event* is a block of lines ended by an empty one; its *data* is the values of its `data:` lines
 * joined by newlines, its *type* the value of `event:`, "message" by default. Lines end with LF, CR LF or CR.
 * Comments, `id:`, `retry:` and unknown fields are skipped, and so are events without data. Pure: no socket,
 * no clock. */
#ifndef KA_SSE_H
#define KA_SSE_H

#include "base/base.h"

/* One event. `data` is followed by a NUL that is not counted; both strings live until the callback returns.
 * A non-zero return stops the parser. */
typedef int (*ka_sse_event_fn)(void *arg, const char *type, const char *data, size_t len);

struct ka_sse {
    ka_sse_event_fn event;
    void *arg;
    struct ka_buf line, type, data; /* the unfinished line; what the unfinished event holds so far */
    bool has_data;
    bool after_cr;   /* a LF right now belongs to the CR before it */
    bool past_start; /* the byte order mark can no longer come */
    int stopped;     /* what the parser failed or was stopped with; every later feed returns it */
};

/* `max_event` caps a line and an event's data, each. Free with ka_sse_free(). */
void ka_sse_init(struct ka_sse *sse, size_t max_event, ka_sse_event_fn event, void *arg);
void ka_sse_free(struct ka_sse *sse);

/* -EFBIG when an event passes the cap, -ENOMEM, or what the callback returned. */
int ka_sse_feed(struct ka_sse *sse, const char *bytes, size_t len);

/* The stream ended: deliver an event whose last newlines are missing, as some endpoints leave them out. */
int ka_sse_finish(struct ka_sse *sse);

#endif
