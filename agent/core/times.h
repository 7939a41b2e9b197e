/* What a row of measured times says: the median, how sure it is, and whether one is faster than another.
 * Pure. */
#ifndef KA_TIMES_H
#define KA_TIMES_H

#include <jansson.h>

#include "base/base.h"

#define KA_TIMES_LEAST 6 /* of fewer samples the smallest and the largest do not hold the median at 95 % */

struct ka_times {
    double median, low, high;
    size_t count;
};

/* The median, and around it the two order statistics nearest to it that hold the true median with at least
 * 95 %, whatever the distribution: the number of samples below it is binomial (Conover, Practical
 * Nonparametric Statistics, 3.2). Of fewer than KA_TIMES_LEAST samples they are the smallest and the largest.
 * -EINVAL where there is no sample, or one is no positive finite number. */
int ka_times_of(const json_t *samples, struct ka_times *out);

/* The rule by which something counts as faster than something else: its median is smaller by more than
 * `min_rel`, and the two intervals do not meet. */
bool ka_times_faster(const struct ka_times *a, const struct ka_times *b, double min_rel);

#endif
