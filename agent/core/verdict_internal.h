/* What a verdict keeps, for the bodies that make it: verdict.c, which decides, and verdict_facts.c, which
 * tells the model. */
#ifndef KA_VERDICT_INTERNAL_H
#define KA_VERDICT_INTERNAL_H

#include "verdict.h"

#define SUBJECT "the gradient of %s"
#define ORDERED_MAX 16 /* kernels that are named for it */
#define REMARKS_MAX 16

struct failure {
    char *subject; /* "the gradient of x"; NULL for a rule */
    char *rule;
    char *text;  /* the rule's sentence; NULL for a comparison */
    char *known; /* what may be said of it on a hidden shape; NULL: the rule */
    char *label;
    struct ka_diff diff;
};

/* The worst comparison of one gradient; error is negative before the first, infinite when there was nothing
 * to measure. */
struct worst {
    double error, base_error, limit;
    size_t compared, right; /* cases in which it was, and was right */
};

struct shape {
    struct worst *worst; /* on this shape, of the first `worst_count` gradients */
    size_t worst_count;
    enum ka_shape_kind kind;
    json_t *dims;
    char *hint, *skipped;
    bool open; /* why it is skipped may be told */
    size_t cases, cases_failed;
    struct failure *failures;
    size_t failure_count;
};

struct a_case {
    size_t shape;
    char *label;
    bool failed;
};

struct gradient {
    char *name;
    size_t judged; /* comparisons with what is neither zero nor noise */
    size_t seen;
    size_t noise;
    struct worst worst;
    size_t worst_shape;
    size_t runs; /* of one backward; 0: not repeated */
    double spread_abs, spread_of_limit;
};

struct ka_verdict {
    struct shape *shapes;
    struct a_case *cases;
    struct gradient *grads;
    struct shape whole;         /* failures that belong to no shape */
    char *ordered[ORDERED_MAX]; /* names of kernels */
    char *remarks[REMARKS_MAX]; /* sentences */
    size_t shape_count, case_count, grad_count;
};

bool ka_verdict_shape_passed(const struct shape *shape);
/* Seen, but compared with nothing but zeros and noise, or never seen at all. */
bool ka_verdict_unproved(const struct gradient *g);

/* Failing shapes, the smallest first, hidden ones last; free() the list. */
const struct shape **ka_verdict_failing(const struct ka_verdict *v, size_t *count);

/* One failure in a sentence or more. `mostly_right`: the same gradient is right in more cases than not. */
void ka_verdict_tell(const struct failure *f, enum ka_describe how, bool mostly_right, struct ka_buf *out);

#endif
