/* Is one tensor right? The daemon's own comparison in double, and the facts of a failure.
 *
 * Words: *want* is the float64 oracle's tensor; *base* is the same computation by eager PyTorch in the
 * input's dtype; *got* is the candidate's (or, for forward agreement, the real Triton forward's). *Off* is an
 * element outside atol + rtol*|want|, where atol is a share of the root mean square of the non-zero expected
 * elements: an absolute tolerance would let zeros pass for small gradients.
 *
 * The rule: shape and dtype equal; finite exactly where want is (a want beyond the dtype's range counts as
 * infinite; within twice that size either will do); ||got-want||/||want|| <= factor*e_base + floor; off
 * elements at most factor times those of base; where want is all zero, got is zero too (or no larger than
 * factor times base's own rounding, or what rounding of the inputs may leave); zero never passes for a
 * non-zero want. `factor` is 2 in both places: two honest evaluations rarely round the same elements badly.
 *
 * A tensor that is right on the whole is also judged in parts: each row of the last axis, each block of 64
 * elements of a longer row, each element. A part may be off by a share of its own norm, and by what rounding
 * leaves there: 8 units in the last place of the root mean square of its neighbours (some 300 elements), and
 * 4 times the error that base has among them, or the oracle at inputs moved by rounding. Zeros among them do
 * not count for a part that is not zero itself. A row of the wrong sign is found down to 1e-6 of the size of
 * those beside it (float32; 1e-2 in float16), and beside rows of its own size at any; honest kernels stay
 * below a third of what they may be off by. A row that is expected to be zero may keep 16 times as much, for
 * eager may have terms cancel to nothing that another order of the sum does not. Where rounding decides on
 * which side of a kink an element is (base_off, off_moved), as many may be off. One element of a part may be
 * off by what rounding leaves in its column, where each column is a sum of its own (a scan over rows), and a
 * stretch of a long row by what it leaves in its row within 2,048 elements, where sums are carried along it
 * and one rounding stands in a whole stretch: one element or stretch of a tensor, and one more in a million.
 *
 * One case needs care: an expected gradient that is mathematically zero but rounds to 1e-17 in float64
 * (softmax over one column). Base then errs by its whole size: no dtype could resolve it. Such a tensor
 * passes within base's error, or within what a zero may keep of rounding, but is `vacuous`: it proves
 * nothing, and ka_verdict does not count it as evidence. Nor does a gradient that cancels nearly to nothing
 * (a layer norm over two columns) where it misses the limit: another honest order of its sums may be several
 * times as far off as base. It passes while rounding explains what it is off by.
 *
 * No clock and no state: any number of threads may compare at once. A large tensor is split over threads of
 * its own, which are gone when the call returns. Sums are rounded in an order that depends on their number:
 * the last digits of an error may too. Memory: a sixteenth of a float64 tensor, and more for the patterns of
 * a failure. */
#ifndef KA_COMPARE_H
#define KA_COMPARE_H

#include <jansson.h>

#include "tensor.h"

/* One evaluation in the dtype, or at other inputs, and what it would be without rounding. */
struct ka_draw {
    const struct ka_tensor *made, *exact; /* borrowed */
};

#define KA_DRAWS_MAX 24

struct ka_tolerance {
    enum ka_dtype dtype; /* what got must be */
    double floor, factor;
    double atol, rtol; /* atol in units of the root mean square of want */
    /* Of a part (a row, a block of one): the share of its own norm that it may be off by, and of its
     * neighbours' root mean square. 0: the whole alone is judged. */
    double local, grain;
    double off_share; /* share of elements that may be off beside those, */
    double off_few;   /* and a few of small tensors: halves have outliers */
    size_t off_moved; /* elements off when the oracle's inputs are moved by rounding, at most, */
    double moved;     /* and by how much that moves the whole, norm-relative; the floor has it */
    /* Norm that rounding may leave where want is zero, or rounding itself; 0 where no scale is known. Of what
     * is judged coarsely any gradient may be so far off: values at which a softmax is saturated leave nothing
     * of it, and rounding of what they were computed from. */
    double zero_norm;
    double zero_moved; /* norm by which the oracle's gradient moves with inputs moved by rounding, at most */
    double upstream_norm; /* 0: not known */
    bool coarse;
    double rounding;  /* the most that rounding was seen to move it, norm-relative: beyond */
    double cancelled; /* little more than rounding is left of it */
    size_t few;   /* so many that are not zero may be off by so much of upstream_norm and prove nothing: */
    double units; /* eager has them right by luck; kernels take what was stored, in halves */
    double near_error; /* e_base and the elements off of base at inputs close by: see ka_tolerance_near() */
    size_t near_off;
    struct ka_draw draws[KA_DRAWS_MAX]; /* of rounding, beside base's */
    size_t draw_count;
};

/* The numbers for gradients and outputs in `dtype`; integers must be equal. */
struct ka_tolerance ka_tolerance_of(enum ka_dtype dtype);

/* For float32 that came through products in TF32: 10 bits of mantissa, as float16 has. Before any below. */
void ka_tolerance_tf32(struct ka_tolerance *tol);

/* For inputs of mixed magnitudes: the finite elements must be the right ones, and the tensor as a whole,
 * not its parts, must be right to a few percent. What is large there (a log-sum-exp of 100) leaves its
 * rounding in what is small: flash attention, which computes the scores anew, is off by 3.5% in float32 where
 * one is 500, and eager PyTorch, which kept them, by nothing. */
void ka_tolerance_coarsen(struct ka_tolerance *tol);

/* For inputs with large, equal or infinite elements: what saturates or cancels there leaves more rounding in
 * honest kernels than in eager PyTorch. A tail that is cut off is wrong by more. */
void ka_tolerance_loosen(struct ka_tolerance *tol);

/* For inputs whose rows have their greatest value twice, in half precision: where terms cancel (scores of
 * keys whose greatest elements are all alike, say) kernels that round what they multiply leave more single
 * elements off than eager PyTorch. A gradient that goes to the wrong one of the two is off by its whole size,
 * which the norm shows. */
void ka_tolerance_ties(struct ka_tolerance *tol);

/* Two float64 oracles against each other (the user's reference, the forward through torch): both claim to be
 * exact up to rounding and to constants that were written in float32. */
struct ka_tolerance ka_tolerance_oracle(void);

/* Take the float64 oracle's gradient at inputs moved by rounding (`moved`; NULL changes nothing) into the
 * tolerance, which borrows both tensors. Of several draws the largest counts. Errors as ka_compare(). */
int ka_tolerance_widen(struct ka_tolerance *tol, const struct ka_tensor *moved, const struct ka_tensor *want,
                       struct ka_err *err);

/* Take one more draw of base's rounding into the tolerance: the same computation at inputs close by, in
 * float64 (`want`) and in the dtype (`base`). Gradients of few elements need several: base may be right
 * by luck where terms cancel. Either NULL changes nothing; both are borrowed. Errors as ka_compare(). */
int ka_tolerance_near(struct ka_tolerance *tol, const struct ka_tensor *base, const struct ka_tensor *want,
                      struct ka_err *err);

enum ka_diff_reason {
    KA_DIFF_OK,
    KA_DIFF_MISSING, /* no such tensor */
    KA_DIFF_SHAPE,
    KA_DIFF_DTYPE,
    KA_DIFF_NONFINITE,
    KA_DIFF_NOT_ZERO, /* all zero expected */
    KA_DIFF_ZERO,     /* all zero found */
    KA_DIFF_NORM,     /* this one and the next: off by an amount */
    KA_DIFF_ELEMENTS,
    KA_DIFF_PART, /* right on the whole, and not in some row, block or element */
};

enum ka_part_kind { KA_PART_NONE, KA_PART_ELEMENT, KA_PART_BLOCK, KA_PART_ROW };

/* `count` elements from `first` on, and how far they are off: relative to their norm, unless that is zero. */
struct ka_part {
    enum ka_part_kind kind;
    size_t first, count;
    bool relative;
    double error, limit;
};

enum ka_pattern_kind {
    KA_PATTERN_FACTOR,      /* got = value * want, within `residual` */
    KA_PATTERN_SIGN,        /* got = -want */
    KA_PATTERN_TRANSPOSED,  /* last two axes */
    KA_PATTERN_OTHER,       /* equals the tensor named `other` */
    KA_PATTERN_SHIFTED,     /* got[i + value] = want[i] along `axis`, value +-1 */
    KA_PATTERN_ZERO_SLICES, /* got is zero on `hits` indices of `axis`, from..to, and mostly right elsewhere
                             */
    KA_PATTERN_LAST_TILE,   /* only indices from..to of `axis` are off: the last tile of `tile` */
    KA_PATTERN_FIRST_TILE,  /* only the first tile of `tile` along `axis` is right */
    KA_PATTERN_RANGE,       /* only indices from..to of `axis` are off, and they are at most half */
    KA_PATTERN_SAME_ALONG,  /* got - want does not vary along `axis`: a broadcast term is missing */
    KA_PATTERN_NONFINITE,   /* non-finite values differ only on from..to of `axis`, `hits` elements in all */
    KA_PATTERN_ROUNDING,    /* a little off everywhere */
    KA_PATTERN_LINES, /* each index of `axis` is want times a factor of its own; `value`: by how much they
                               differ from 1 at most, where it may be rounding, else 0 */
    KA_PATTERN_SIGNS, /* right magnitudes, `hits` wrong signs */
    KA_PATTERN_CORRELATION, /* nothing else explains it: `value` is the cosine with want */
};

struct ka_pattern {
    enum ka_pattern_kind kind;
    int axis; /* -1 when the pattern has none */
    size_t from, to, hits, tile;
    size_t dim; /* size of `axis` */
    double value, residual;
    char other[64];
};

#define KA_PATTERNS_MAX 6

struct ka_diff {
    bool pass, vacuous;
    bool want_zero; /* every expected element is zero: a missing gradient may then stand for it */
    bool nothing;   /* no expected element is finite and other than zero: being equal proves nothing */
    enum ka_diff_reason reason;
    enum ka_dtype dtype, got_dtype;
    size_t rank, dims[KA_TENSOR_RANK_MAX];         /* of want */
    size_t got_rank, got_dims[KA_TENSOR_RANK_MAX]; /* of got */
    size_t count;
    double error, base_error, limit; /* norm-relative; when want is all zero: norms, not relative */
    double want_norm;
    size_t off, base_off; /* elements */
    size_t worst;         /* flat index of the element furthest off */
    double worst_got, worst_want;
    size_t nonfinite_got, nonfinite_want, mask_differs;
    struct ka_part part;                         /* KA_DIFF_PART: the worst */
    size_t parts_off;                            /* rows or blocks that hold something wrong */
    struct ka_pattern patterns[KA_PATTERNS_MAX]; /* most telling first; filled only on failure */
    size_t pattern_count;
};

/* Tensors that `got` may have been mixed up with: the other expected gradients of the case. */
struct ka_compare_other {
    const char *name;
    const struct ka_tensor *tensor;
};

/* Compare and explain. `got` may be NULL (missing); `base` may be NULL (then e_base is 0). `others` may be
 * NULL. Always fills *diff. -EINVAL when want or base is unusable (want not float64, base of another shape):
 * the oracle is broken then, not the candidate. -ENOMEM. A difference is not an error: see diff->pass. */
int ka_compare(const struct ka_tensor *got, const struct ka_tensor *want, const struct ka_tensor *base,
               const struct ka_tolerance *tol, const struct ka_compare_other *others, size_t other_count,
               struct ka_diff *diff, struct ka_err *err);

struct ka_term {
    double factor;
    const struct ka_tensor *tensor;
};

/* Norm of the sum of `count` (at least one) scaled tensors of one shape: NaN where an element is. `most`
 * (NULL is fine): the largest magnitude of an element, NaN aside. Threads as in ka_compare(). */
double ka_norm_of(const struct ka_term *terms, size_t count, double *most);

enum ka_describe {
    KA_DESCRIBE_FULL,
    KA_DESCRIBE_HIDDEN, /* no sizes, indices or values: nothing from which a hidden shape could be guessed */
};

/* Sentences about a difference, for the tensor called `name`: what an LLM or a person is shown. */
int ka_diff_describe(const struct ka_diff *diff, const char *name, enum ka_describe how, struct ka_buf *out);

/* The same as data, for the private record; the caller owns the object. NULL without memory. */
json_t *ka_diff_json(const struct ka_diff *diff);

const char *ka_diff_reason_name(enum ka_diff_reason reason);

#endif
