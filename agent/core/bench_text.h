/* A benchmark's result (bench_result.h) as plain text: a table a pass, a row a shape, and below it what has
 * no time and why. Pure. */
#ifndef KA_BENCH_TEXT_H
#define KA_BENCH_TEXT_H

#include <jansson.h>

#include "base/base.h"

/* `result` also has "stub". Times are in milliseconds: the median, and half the width of its interval. */
void ka_bench_text(const json_t *result, struct ka_buf *out);

#endif
