/* Keeps both ends of an endless stream. Knows nothing of where the bytes come from. */
#include "capture.h"

#include <stdlib.h>
#include <string.h>

static void ring_add(struct ka_capture *c, const char *bytes, size_t len)
{
    if (!c->ring)
        c->ring = ka_calloc(c->half, 1);
    if (len > c->half) {
        bytes += len - c->half;
        len = c->half;
    }
    while (len) {
        size_t part = c->half - c->at < len ? c->half - c->at : len;
        memcpy(c->ring + c->at, bytes, part);
        c->at = (c->at + part) % c->half;
        c->ring_len = c->ring_len + part < c->half ? c->ring_len + part : c->half;
        bytes += part;
        len -= part;
    }
}

void ka_capture_add(struct ka_capture *c, const char *bytes, size_t len)
{
    size_t room = c->head.len < c->half ? c->half - c->head.len : 0;
    size_t first = len < room ? len : room;
    c->total += len;
    if (first)
        ka_buf_add(&c->head, bytes, first);
    if (len > first && c->half)
        ring_add(c, bytes + first, len - first);
}

int ka_capture_text(const struct ka_capture *c, struct ka_buf *out)
{
    KA_AUTO_BUF struct ka_buf raw = {0};
    size_t dropped = c->total - c->head.len - c->ring_len;
    size_t old = c->ring_len == c->half ? c->half - c->at : 0;
    ka_buf_add(&raw, ka_buf_str(&c->head), c->head.len);
    if (dropped)
        ka_buf_printf(&raw, "\n[... %zu bytes left out ...]\n", dropped);
    if (c->ring) {
        ka_buf_add(&raw, c->ring + c->at, old);
        ka_buf_add(&raw, c->ring, c->ring_len - old);
    }
    for (size_t i = 0; i < raw.len; i++)
        if (raw.data[i] == '\0')
            raw.data[i] = '?';
    return ka_buf_repair(out, ka_buf_str(&raw), raw.len);
}

void ka_capture_free(struct ka_capture *c)
{
    ka_buf_free(&c->head);
    free(c->ring);
    c->ring = NULL;
    c->ring_len = c->at = c->total = 0;
}
