/* Of what a lesson is made: the kind of a verdict's first finding, the finding without places, and the few
 * lines that mended it. Pure. */
#ifndef KA_LESSON_H
#define KA_LESSON_H

#include <jansson.h>

#include "base/base.h"

#define KA_LESSON_LINES 16 /* that a change may have; what changed more mended nothing in particular */

/* Append the kind of what a verdict (ka_verdict_json()) says first: a rule, with the type of what was raised
 * ("raised, TypeError"), or the pattern of what is wrong ("wrong gradient, last_tile"), and whether plain
 * cases are right. The same for the same mistake on other shapes and in other forwards. Nothing for a
 * verified one. */
void ka_lesson_kind(const json_t *verdict, struct ka_buf *out);

/* Is it of a comparison? Its finding is the same for many a mistake. */
bool ka_lesson_is_comparison(const char *kind);

/* Append the first finding of a verdict's facts as one line, without places, quoted lines of code and the
 * numbers of a comparison: they mean nothing in another file. */
void ka_lesson_finding(const char *facts, struct ka_buf *out);

/* Append what was changed from one backward part to the other, as ka_short_diff() tells it, without comments
 * and blank lines, each line cut. False, and nothing, where that is nothing, or more than KA_LESSON_LINES. */
bool ka_lesson_change(const char *wrong, const char *mended, struct ka_buf *out);

#endif
