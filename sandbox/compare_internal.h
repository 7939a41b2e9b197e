/* Shared by the pass rule, its measurements, the search for patterns and their wording; not for callers. */
#ifndef KA_COMPARE_INTERNAL_H
#define KA_COMPARE_INTERNAL_H

#include "compare.h"

/* Both finite, both NaN, both infinite with one sign, or NaN against infinity. */
bool ka_same_nonfinite(double got, double want);

/* Outside the element tolerance; `rms` is that of want's non-zero elements. */
bool ka_element_off(const struct ka_tolerance *tol, double rms, double got, double want);

/* ---- compare_measure.c */

/* Three tensors of one shape, got and want of known dtypes; base may be NULL. Expected values of `overflow`
 * and more are infinite. */
struct ka_triple {
    const struct ka_tensor *got, *want, *base;
    double overflow, atol, rtol;
};

/* What one pass over a triple tells. Norms are over the elements that are finite in want, and in base for its
 * own; where want is zero everywhere errors are norms, not relative. */
struct ka_measured {
    double most_want, most_got; /* largest finite magnitudes */
    size_t nonfinite_want, nonfinite_got, mask_differs;
    double want_norm, rms;    /* rms of the non-zero expected elements */
    double error, base_error; /* norm-relative */
    size_t worst;             /* first element of which only one side is finite, else the furthest off */
    double worst_got, worst_want;
    size_t off, base_off;
};

/* Reads each tensor once, and blocks that may hold elements that are off a second time. Large tensors are
 * split over threads, which are gone when it returns. -ENOMEM. */
int ka_measure(const struct ka_triple *t, struct ka_measured *out, struct ka_err *err);

/* ---- compare_threads.c */

#define KA_PARTS_MAX 8

/* Into how many parts work on `count` elements is split: 1 below a million of them, else as many as there are
 * processors for this process, at most KA_PARTS_MAX. */
size_t ka_parts_of(size_t count);

/* Call work(arg, 0 .. parts-1), each from a thread of its own; returns when all have. Where a thread cannot
 * be had the caller's does its part. */
void ka_parts_run(size_t parts, void (*work)(void *arg, size_t part), void *arg);

/* ---- compare_patterns.c */

/* Fill diff->patterns for a failed tensor whose shape and dtype are right. -ENOMEM. */
int ka_patterns_find(const struct ka_tensor *got, const struct ka_tensor *want,
                     const struct ka_tolerance *tol, double rms, const struct ka_compare_other *others,
                     size_t other_count, struct ka_diff *diff, struct ka_err *err);

#endif
