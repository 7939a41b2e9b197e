/* Line views. Knows nothing of what the lines mean. */
#include "lines.h"

#include <string.h>

static bool is_blank(char c)
{
    return c == ' ' || c == '\t' || c == '\r';
}

bool ka_line_next(const char **cursor, const char *end, struct ka_line *line)
{
    const char *at = *cursor;
    if (at >= end)
        return false;
    const char *newline = memchr(at, '\n', (size_t)(end - at));
    const char *stop = newline ? newline : end;
    *cursor = newline ? newline + 1 : end;
    while (stop > at && stop[-1] == '\r')
        stop--;
    *line = (struct ka_line){at, (size_t)(stop - at)};
    return true;
}

struct ka_line ka_line_rstrip(struct ka_line line)
{
    while (line.len && is_blank(line.at[line.len - 1]))
        line.len--;
    return line;
}

struct ka_line ka_line_strip(struct ka_line line)
{
    line = ka_line_rstrip(line);
    size_t indent = ka_line_indent(line);
    return (struct ka_line){line.at + indent, line.len - indent};
}

size_t ka_line_indent(struct ka_line line)
{
    size_t n = 0;
    while (n < line.len && is_blank(line.at[n]))
        n++;
    return n;
}

bool ka_line_is(struct ka_line line, const char *text)
{
    return line.len == strlen(text) && memcmp(line.at, text, line.len) == 0;
}

bool ka_line_same(struct ka_line a, struct ka_line b)
{
    return a.len == b.len && memcmp(a.at, b.at, a.len) == 0;
}

bool ka_line_starts(struct ka_line line, const char *prefix)
{
    size_t len = strlen(prefix);
    return line.len >= len && memcmp(line.at, prefix, len) == 0;
}

bool ka_line_has(struct ka_line line, const char *text)
{
    return memmem(line.at, line.len, text, strlen(text)) != NULL;
}

int ka_line_put(struct ka_line line, struct ka_buf *out)
{
    ka_buf_add(out, line.at, line.len);
    return ka_buf_puts(out, "\n");
}
