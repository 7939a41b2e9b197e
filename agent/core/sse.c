/* The event stream parser. Knows nothing of what the events mean or where the bytes come from. */
#include "sse.h"

#include <string.h>

void ka_sse_init(struct ka_sse *sse, size_t max_event, ka_sse_event_fn event, void *arg)
{
    *sse = (struct ka_sse){.event = event, .arg = arg};
    sse->line.max = sse->type.max = sse->data.max = max_event;
}

void ka_sse_free(struct ka_sse *sse)
{
    ka_buf_free(&sse->line);
    ka_buf_free(&sse->type);
    ka_buf_free(&sse->data);
}

static int dispatch(struct ka_sse *sse)
{
    int rc = 0;
    if (sse->has_data) {
        const char *type = sse->type.len ? ka_buf_str(&sse->type) : "message";
        rc = sse->event(sse->arg, type, ka_buf_str(&sse->data), sse->data.len);
    }
    ka_buf_clear(&sse->type);
    ka_buf_clear(&sse->data);
    sse->has_data = false;
    return rc;
}

static int add_data(struct ka_sse *sse, const char *value, size_t len)
{
    int rc = sse->has_data ? ka_buf_add(&sse->data, "\n", 1) : 0;
    if (rc == 0)
        rc = ka_buf_add(&sse->data, value, len);
    sse->has_data = true;
    return rc;
}

/* Act on the finished line in sse->line, which has no line end. */
static int take_line(struct ka_sse *sse)
{
    const char *line = ka_buf_str(&sse->line);
    size_t len = sse->line.len;
    if (len == 0)
        return dispatch(sse);
    const char *colon = memchr(line, ':', len);
    size_t name_len = colon ? (size_t)(colon - line) : len;
    const char *value = colon ? colon + 1 : line + len;
    size_t value_len = (size_t)(line + len - value);
    if (value_len && *value == ' ') {
        value++;
        value_len--;
    }
    if (name_len == 4 && memcmp(line, "data", 4) == 0)
        return add_data(sse, value, value_len);
    if (name_len == 5 && memcmp(line, "event", 5) == 0) {
        ka_buf_clear(&sse->type);
        return ka_buf_add(&sse->type, value, value_len);
    }
    return 0;
}

static int end_line(struct ka_sse *sse)
{
    static const char mark[] = "\xEF\xBB\xBF";
    if (!sse->past_start && sse->line.len >= 3 && memcmp(sse->line.data, mark, 3) == 0)
        ka_buf_consume(&sse->line, 3);
    sse->past_start = true;
    int rc = take_line(sse);
    ka_buf_clear(&sse->line);
    return rc;
}

int ka_sse_feed(struct ka_sse *sse, const char *bytes, size_t len)
{
    const char *end = bytes + len;
    while (bytes < end && sse->stopped == 0) {
        if (sse->after_cr) {
            sse->after_cr = false;
            if (*bytes == '\n') {
                bytes++;
                continue;
            }
        }
        const char *stop = bytes;
        while (stop < end && *stop != '\n' && *stop != '\r')
            stop++;
        sse->stopped = ka_buf_add(&sse->line, bytes, (size_t)(stop - bytes));
        if (sse->stopped || stop == end)
            break;
        sse->after_cr = *stop == '\r';
        sse->stopped = end_line(sse);
        bytes = stop + 1;
    }
    return sse->stopped;
}

int ka_sse_finish(struct ka_sse *sse)
{
    if (sse->stopped == 0 && sse->line.len)
        sse->stopped = end_line(sse);
    if (sse->stopped == 0)
        sse->stopped = dispatch(sse);
    return sse->stopped;
}
