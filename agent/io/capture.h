/* The output of a process, capped: the first and the last bytes are kept, the middle is counted. Pure; no uv.
 */
#ifndef KA_CAPTURE_H
#define KA_CAPTURE_H

#include "base/base.h"

struct ka_capture {
    size_t half;  /* bytes kept at each end; set before the first add */
    size_t total; /* bytes seen */
    struct ka_buf head;
    char *ring; /* the last `half` bytes after the head, oldest at `at` once it is full */
    size_t ring_len, at;
};

void ka_capture_add(struct ka_capture *capture, const char *bytes, size_t len);
/* Head, a line about what was dropped, tail: appended to `out`, NUL bytes and what is no UTF-8 replaced. */
int ka_capture_text(const struct ka_capture *capture, struct ka_buf *out);
void ka_capture_free(struct ka_capture *capture);

#endif
