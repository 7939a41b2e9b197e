/* The event stream parser on any bytes: cut at one place or fed whole, it must give the same events. */
#include <stdlib.h>
#include <string.h>

#include "agent/core/sse.h"

static int note(void *arg, const char *type, const char *data, size_t len)
{
    struct ka_buf *seen = arg;
    ka_buf_puts(seen, type);
    ka_buf_add(seen, "|", 1);
    ka_buf_add(seen, data, len);
    return ka_buf_add(seen, ";", 1);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t len);

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t len)
{
    if (len == 0)
        return 0;
    const char *text = (const char *)bytes + 1;
    size_t text_len = len - 1, cut = text_len ? bytes[0] % (text_len + 1) : 0;
    struct ka_buf whole_seen = {0}, cut_seen = {0};
    struct ka_sse whole, parts;
    ka_sse_init(&whole, 64, note, &whole_seen);
    ka_sse_init(&parts, 64, note, &cut_seen);
    ka_sse_feed(&whole, text, text_len);
    ka_sse_feed(&parts, text, cut);
    ka_sse_feed(&parts, text + cut, text_len - cut);
    int whole_rc = ka_sse_finish(&whole), cut_rc = ka_sse_finish(&parts);
    if (whole_rc != cut_rc || whole_seen.len != cut_seen.len ||
        memcmp(ka_buf_str(&whole_seen), ka_buf_str(&cut_seen), whole_seen.len) != 0)
        abort();
    ka_sse_free(&whole);
    ka_sse_free(&parts);
    ka_buf_free(&whole_seen);
    ka_buf_free(&cut_seen);
    return 0;
}
