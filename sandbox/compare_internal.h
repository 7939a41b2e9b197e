/* Shared by the pass rule, its measurements, the search for patterns and their wording; not for callers. */
#ifndef KA_COMPARE_INTERNAL_H
#define KA_COMPARE_INTERNAL_H

#include "compare.h"

/* Both finite, both NaN, both infinite with one sign, or NaN against infinity. */
bool ka_same_nonfinite(double got, double want);

/* Within twice the size from which on the dtype has infinity alone, and `got` is on the other side: what
 * rounding of the terms decides. In float16 also where eager's terms overflow as well. */
bool ka_is_at_the_edge(double overflow, double got, double want, double base);

/* Outside the element tolerance; `rms` is that of want's non-zero elements. */
bool ka_element_off(const struct ka_tolerance *tol, double rms, double got, double want);

/* ---- loops over elements */

#define BLOCK 1024 /* elements converted at a time: three blocks of doubles lie in the first-level cache */
#define UNIT 64    /* neighbours whose sums are kept: a block holds so many without rest */
#define LANES 4    /* independent sums, so that they need not wait for each other */

typedef double lanes __attribute__((vector_size(LANES * sizeof(double))));
typedef int64_t lane_bits __attribute__((vector_size(LANES * sizeof(int64_t))));

/* Of lanes; macros, since without AVX lanes cannot be arguments. A NaN is never the larger one. */
#define LOAD(lanes_, from) memcpy(&(lanes_), (from), sizeof(lanes_))
#define STORE(to, lanes_) memcpy((to), &(lanes_), sizeof(lanes_))
#define SIZE(x) ((lanes)((lane_bits)(x)&INT64_MAX))
#define SELECT(mask, a, b) ((lanes)(((lane_bits)(a) & (mask)) | ((lane_bits)(b) & ~(mask))))
#define RAISE(most, x) ((most) = SELECT((x) > (most), (x), (most)))

/* ---- compare_measure.c */

/* Three tensors of one shape, got and want of known dtypes; base may be NULL. Expected values of `overflow`
 * and more are infinite. */
struct ka_triple {
    const struct ka_tensor *got, *want, *base;
    double overflow, atol, rtol;
};

/* Of UNIT elements in row-major order (the last unit may have fewer), where want is finite: squares of
 * want and of what got and base differ from it by, and the most that |got - want| exceeds rtol*|want| by.
 * */
struct ka_unit {
    double got2, want2, base2, excess;
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
    struct ka_unit *units; /* the caller's, to free() */
};

/* Reads each tensor once, and blocks that may hold elements that are off a second time. Large tensors are
 * split over threads, which are gone when it returns. -ENOMEM. */
int ka_measure(const struct ka_triple *t, struct ka_measured *out, struct ka_err *err);

/* ---- compare_local.c */

/* Is each part right by itself, where the whole is? `allowed` elements may be off for which no part is to
 * blame. Fills diff->part and parts_off if not. */
bool ka_local_judge(const struct ka_triple *t, const struct ka_tolerance *tol, const struct ka_measured *m,
                    size_t allowed, struct ka_diff *diff);

/* Into how many parts work on `count` elements is split: 1 below a million of them, else as many as there are
 * processors for this process, at most KA_THREADS_MAX. */
size_t ka_parts_of(size_t count);

/* ---- compare_patterns.c */

/* Fill diff->patterns for a failed tensor whose shape and dtype are right. -ENOMEM. */
int ka_patterns_find(const struct ka_tensor *got, const struct ka_tensor *want,
                     const struct ka_tolerance *tol, double rms, const struct ka_compare_other *others,
                     size_t other_count, struct ka_diff *diff, struct ka_err *err);

#endif
