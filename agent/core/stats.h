/* Statistics of a handful of timings: robust ones, because clocks jump and other work disturbs.
 *
 * Inputs are not changed. All values must be finite (geomean: positive as well), else -EINVAL; no values is
 * -ENODATA. */
#ifndef KA_STATS_H
#define KA_STATS_H

#include "base/base.h"

#define KA_STATS_MAX_COUNT ((size_t)1 << 20)

/* The middle value, or the mean of the two middle ones. */
int ka_stats_median(const double *values, size_t count, double *median);

/* A confidence interval of the median from order statistics: it needs no assumption about the distribution.
 * [low, high] are two of the values, chosen symmetrically so that the binomial(count, 1/2) coverage is at
 * least `confidence` (0 < c < 1). -ERANGE when so few values cannot give it (6 are needed for 0.95). */
int ka_stats_median_interval(const double *values, size_t count, double confidence, double *low,
                             double *high);

/* Geometric mean. */
int ka_stats_geomean(const double *values, size_t count, double *mean);

/* Noise: 1.4826 * median(|value - median|) / |median|, the relative standard deviation if the noise is
 * normal. 0 for one value. -ERANGE when the median is 0. */
int ka_stats_noise(const double *values, size_t count, double *noise);

#endif
