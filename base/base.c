/* Error values and the byte buffer. Knows no file, socket, clock or loop. */
#include "base.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "utf8.h"

int ka_fail(struct ka_err *err, int code, const char *fmt, ...)
{
    if (err) {
        va_list args;
        va_start(args, fmt);
        vsnprintf(err->msg, sizeof(err->msg), fmt, args);
        va_end(args);
        ka_utf8_clean(
            err->msg); /* a precision or the end may cut a character, and JSON takes none that is cut */
    }
    return code;
}

static int reserve(struct ka_buf *buf, size_t more)
{
    size_t max = buf->max ? buf->max : KA_BUF_MAX;
    if (buf->failed)
        return buf->failed;
    if (buf->len > max || more > max - buf->len)
        return buf->failed = -EFBIG;
    size_t need = buf->len + more + 1;
    if (need <= buf->cap)
        return 0;
    size_t cap = buf->cap ? buf->cap : 64;
    while (cap < need)
        cap *= 2;
    buf->data = ka_realloc(buf->data, cap, 1);
    buf->cap = cap;
    return 0;
}

int ka_buf_add(struct ka_buf *buf, const void *bytes, size_t len)
{
    int rc = reserve(buf, len);
    if (rc)
        return rc;
    if (len)
        memcpy(buf->data + buf->len, bytes, len);
    buf->len += len;
    buf->data[buf->len] = '\0';
    return 0;
}

int ka_buf_puts(struct ka_buf *buf, const char *text)
{
    return ka_buf_add(buf, text, strlen(text));
}

int ka_buf_repair(struct ka_buf *buf, const char *bytes, size_t len)
{
    size_t valid = 0; /* length of the run of valid bytes at `bytes` */
    int rc = 0;
    while (len && rc == 0) {
        size_t step = ka_utf8_sequence(bytes + valid, len - valid);
        valid += step;
        if (step && valid < len)
            continue;
        rc = ka_buf_add(buf, bytes, valid);
        bool bad = valid < len;
        if (rc == 0 && bad)
            rc = ka_buf_puts(buf, "\xEF\xBF\xBD");
        bytes += valid + bad;
        len -= valid + bad;
        valid = 0;
    }
    return rc;
}

/* Does a "%.900s" stand in it? */
static bool cuts_text(const char *fmt)
{
    for (const char *at = strstr(fmt, "%."); at; at = strstr(at + 2, "%.")) {
        size_t digits = strspn(at + 2, "0123456789");
        if (digits && at[2 + digits] == 's')
            return true;
    }
    return false;
}

int ka_buf_printf(struct ka_buf *buf, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    int need = vsnprintf(NULL, 0, fmt, args);
    va_end(args);
    if (need < 0)
        return buf->failed = -EINVAL;
    int rc = reserve(buf, (size_t)need);
    if (rc)
        return rc;
    va_start(args, fmt);
    vsnprintf(buf->data + buf->len, (size_t)need + 1, fmt, args);
    va_end(args);
    if (cuts_text(fmt))
        ka_utf8_clean(buf->data + buf->len);
    buf->len += cuts_text(fmt) ? strlen(buf->data + buf->len) : (size_t)need;
    return 0;
}

void ka_buf_consume(struct ka_buf *buf, size_t n)
{
    if (n >= buf->len) {
        ka_buf_clear(buf);
        return;
    }
    memmove(buf->data, buf->data + n, buf->len - n + 1);
    buf->len -= n;
}

void ka_buf_clear(struct ka_buf *buf)
{
    buf->len = 0;
    buf->failed = 0;
    if (buf->data)
        buf->data[0] = '\0';
}

void ka_buf_free(struct ka_buf *buf)
{
    free(buf->data);
    *buf = (struct ka_buf){.max = buf->max};
}

const char *ka_buf_str(const struct ka_buf *buf)
{
    return buf->data ? buf->data : "";
}

char *ka_buf_steal(struct ka_buf *buf)
{
    char *data = buf->data ? buf->data : ka_strdup("");
    *buf = (struct ka_buf){.max = buf->max};
    return data;
}

static void out_of_memory(void)
{
    fputs("kernel-agent: out of memory\n", stderr);
    abort();
}

void *ka_calloc(size_t count, size_t size)
{
    void *memory = calloc(count ? count : 1, size ? size : 1);
    if (!memory)
        out_of_memory();
    return memory;
}

void *ka_realloc(void *memory, size_t count, size_t size)
{
    memory = reallocarray(memory, count, size);
    if (!memory)
        out_of_memory();
    return memory;
}

void *ka_grow(void *items, size_t count, size_t size)
{
    size_t before = count - 1;
    bool full = (before & (before - 1)) == 0; /* none, or as many as there is room for */
    char *grown = full ? ka_realloc(items, before ? 2 * before : 1, size) : items;
    memset(grown + before * size, 0, size);
    return grown;
}

char *ka_strndup(const char *text, size_t len)
{
    char *copy = ka_calloc(len + 1, 1);
    memcpy(copy, text, len);
    return copy;
}

char *ka_strdup(const char *text)
{
    return text ? ka_strndup(text, strlen(text)) : NULL;
}

char *ka_format(const char *fmt, ...)
{
    char *text;
    va_list args;
    va_start(args, fmt);
    if (vasprintf(&text, fmt, args) < 0)
        out_of_memory();
    va_end(args);
    return text;
}

void ka_free_at(void *pointer)
{
    free(*(void **)pointer);
}

#define COUNTER_STEP 0x9e3779b97f4a7c15u

uint64_t ka_mix64(uint64_t x)
{
    x += COUNTER_STEP;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

uint64_t ka_random_next(uint64_t *state)
{
    uint64_t next = ka_mix64(*state);
    *state += COUNTER_STEP;
    return next;
}

bool ka_starts_with(const char *text, const char *prefix)
{
    return strncmp(text, prefix, strlen(prefix)) == 0;
}

bool ka_ends_with(const char *text, const char *suffix)
{
    size_t text_len = strlen(text), suffix_len = strlen(suffix);
    return text_len >= suffix_len && memcmp(text + text_len - suffix_len, suffix, suffix_len) == 0;
}

const char *ka_first_byte(const char *bytes, size_t len)
{
    for (const char *end = bytes + len; bytes < end; bytes++)
        if (!strchr(" \t\r\n", *bytes))
            return bytes;
    return NULL;
}
