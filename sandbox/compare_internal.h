/* Shared by the pass rule, the search for patterns and their wording; not for callers. */
#ifndef KA_COMPARE_INTERNAL_H
#define KA_COMPARE_INTERNAL_H

#include "sandbox/compare.h"

/* Both finite, both NaN, both infinite with one sign, or NaN against infinity. */
bool ka_same_nonfinite(double got, double want);

/* Outside the element tolerance; `rms` is that of want's non-zero elements. */
bool ka_element_off(const struct ka_tolerance *tol, double rms, double got, double want);

/* Fill diff->patterns for a failed tensor whose shape and dtype are right. -ENOMEM. */
int ka_patterns_find(const struct ka_tensor *got, const struct ka_tensor *want,
                     const struct ka_tolerance *tol, double rms, const struct ka_compare_other *others,
                     size_t other_count, struct ka_diff *diff, struct ka_err *err);

#endif
