/* A pair as text: the forward part, the marker line, the backward part, and how the three become one file.
 *
 * The finished file imports only torch and triton: the import of `autodiff` becomes the two-line marker
 * function of docs/protocol.md. Text in, text out; nothing is executed. */
#ifndef KA_COMPOSE_H
#define KA_COMPOSE_H

#include "base/base.h"
#include "base/marker.h"

/* Append the pair made of `forward` (whatever follows a marker line in it is dropped) and `backward` (blank
 * lines around it trimmed) to `out`. `from kernel_agent import autodiff`, also from `kernel_agent.autodiff`
 * and with `as name`, is replaced at its own indentation. Composing a split pair gives the same bytes again.
 * -EINVAL, naming the line: any other import of kernel_agent, which a finished pair cannot keep. */
int ka_compose_pair(const char *forward, const char *backward, struct ka_buf *out, struct ka_err *err);

/* Append what stands before and after the marker line, each without blank lines at its ends and with a final
 * newline. -ENOENT when there is no marker line. */
int ka_compose_split(const char *text, struct ka_buf *forward, struct ka_buf *backward, struct ka_err *err);

/* Does a text without a marker look like a module that somebody wrote by hand: autograd function and forward
 * in one, which the jail tells apart? */
bool ka_compose_by_hand(const char *text);

/* The first byte after the marker line, or NULL. With `loose`, where there is none, spellings such as "#---
 * Backward ---" count too. */
const char *ka_compose_after_marker(const char *text, bool loose);

/* Lines up to and with the marker line: what a patch may not touch. 0 without a marker. */
size_t ka_compose_forward_lines(const char *text);

/* Append `len` bytes of text without blank lines at its ends, with "\n" line ends and one at the end. */
void ka_compose_tidy(const char *text, size_t len, struct ka_buf *out);

#endif
