/* Walking over the lines of a text without copying it. A line ends in "\n", with any "\r" in front of it;
 * neither belongs to it.
 * The views point into the text, which must outlive them. */
#ifndef KA_LINES_H
#define KA_LINES_H

#include "base.h"

struct ka_line {
    const char *at;
    size_t len;
};

/* The next line of [*cursor, end); false at the end. A last line without a newline counts, an empty one does
 * not. */
bool ka_line_next(const char **cursor, const char *end, struct ka_line *line);

/* Without the blanks (space, tab, CR) in front, behind, or on both sides. */
struct ka_line ka_line_rstrip(struct ka_line line);
struct ka_line ka_line_strip(struct ka_line line);

/* Blanks in front. */
size_t ka_line_indent(struct ka_line line);

bool ka_line_is(struct ka_line line, const char *text);
bool ka_line_same(struct ka_line a, struct ka_line b);
bool ka_line_starts(struct ka_line line, const char *prefix);
/* Does the line contain the text anywhere? */
bool ka_line_has(struct ka_line line, const char *text);

/* Append the line and "\n". Errors of ka_buf_add(). */
int ka_line_put(struct ka_line line, struct ka_buf *out);

#endif
