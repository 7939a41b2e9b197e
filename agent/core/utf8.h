/* Text from outside made fit for JSON and for terminals. Pure. */
#ifndef KA_UTF8_H
#define KA_UTF8_H

#include "base.h"

/* Length of the valid UTF-8 sequence at the start of `len` bytes; 0 when they do not start with one. Overlong
 * forms, surrogates and code points past U+10FFFF are not valid. */
size_t ka_utf8_sequence(const char *bytes, size_t len);

/* Append `bytes` to `out` with every byte that is not part of valid UTF-8 replaced by U+FFFD. Errors of
 * ka_buf_add(). */
int ka_utf8_repair(const char *bytes, size_t len, struct ka_buf *out);

/* One line for people, NUL-terminated, at most `size` - 1 bytes, cut between characters: control characters
 * (those that steer terminals too) become spaces, runs of space one space, invalid bytes '?'. */
void ka_utf8_line(const char *bytes, size_t len, char *line, size_t size);

#endif
