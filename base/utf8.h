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

/* In place, without changing the length of what stays: a character that the end cuts is dropped, and every
 * other byte that is no valid UTF-8 becomes '?'. For text that was cut at a number of bytes; NULL is fine.
 * Returns `text`. */
char *ka_utf8_clean(char *text);

/* In place and of the same length: JSON text from a lenient writer made fit for a strict reader. Invalid
 * bytes become '?'; escapes of lone surrogates and of NUL become that of U+FFFD. */
void ka_utf8_clean_json(char *text, size_t len);

#endif
