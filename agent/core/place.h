/* Places in a pair, told as the model is shown the text: it sees forward and backward part apart, each
 * numbered from 1, and no path. Messages and tracebacks are a candidate's own: they may say anything, and
 * are cut to some thousand bytes. Pure. */
#ifndef KA_PLACE_H
#define KA_PLACE_H

#include <jansson.h>

#include "base/base.h"

/* What was run, and the forward as it is shown: the pair has other imports. Borrowed. `whole`: who is told
 * has the file itself, and knows its lines and where it lies. */
struct ka_place {
    const char *pair, *forward;
    bool whole;
};

/* Append the text with its lines numbered as ka_place_line() names them ("   7| y = x"), without blank lines
 * at its ends: a forward's keep the numbers that they have in the user's file. */
void ka_place_number(const char *text, struct ka_buf *out);

/* Append "line 7 of the backward part, `y = x`", or "of the forward"; nothing for a line that is none of the
 * pair's. "line 7, `y = x`" where the place is `whole`. */
void ka_place_line(const struct ka_place *place, json_int_t line, struct ka_buf *out);

/* Append an `error` of docs/protocol.md: its message, and the frames of its traceback with such places.
 * Absolute paths are cut to their last name. As it came where the place is NULL or
 * `whole`. */
void ka_place_error(const struct ka_place *place, const json_t *error, struct ka_buf *out);

/* Append what may be said of an error on a hidden shape: the type of the exception, if it is one of Python's,
 * torch's or Triton's, and the line. Never its message, which may hold sizes. */
void ka_place_hidden_error(const struct ka_place *place, const json_t *error, struct ka_buf *out);

/* The type that a message begins with, if it is one of those; else "an exception". */
const char *ka_place_known_type(const char *message);

/* Append a sentence of the candidate's process that names lines of the pair ("line 12"), with these places.
 * As it is where the place is NULL or `whole`. */
void ka_place_retell(const struct ka_place *place, const char *text, struct ka_buf *out);

/* Append text with every absolute path cut to its last name. */
void ka_place_without_paths(const char *text, struct ka_buf *out);

#endif
