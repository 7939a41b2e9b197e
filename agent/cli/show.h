/* Results for people, on stdout: plain text, aligned, no colours. */
#ifndef KA_SHOW_H
#define KA_SHOW_H

#include <jansson.h>

#include "base/base.h"

/* A document, with jansson's `flags`, and a newline. */
void ka_show_json(const json_t *doc, size_t flags);

/* What went wrong, to stderr; returns `code`. */
int ka_show_problem(const struct ka_err *err, int code);

/* The verdict of a run: table of gradients, shapes, where the pair is, or why there is none. */
void ka_show_result(const json_t *result);

/* The backward of a finished pair, below an empty line; nothing where `pair` is NULL or cannot be read. */
void ka_show_backward(const char *pair);

/* What `inspect` understood of a file. */
void ka_show_inspect(const json_t *inspect, const char *path);

/* An error document of docs/protocol.md: message, place, remedy, traceback; to stderr. */
void ka_show_error(const json_t *error, const char *path);

#endif
