/* The kinds of cases that a check is made of: one row a kind, in kinds.c. Pure.
 *
 * Words: a kind of *upstream* is `upstream.kind` of its case; a *layout* is how one tensor lies in memory,
 * and values* are an input's, both by tensor in its members `layouts` and `values` (vary.h). Oracle and
 * candidate are told of these, since each draws for itself. A *question* is a member of its own name: it is
 * asked of the candidate alone, and nothing that the oracle says of the case depends on it.
 *
 * How to add one: a row here, and one function that does it: sandbox/kernel_agent/draw.py for upstreams,
 * vary.py for layouts and values (and a row in vary.c, which tensors it suits), QUESTIONS of questions.py
 * for questions. What a question's answer is compared with is one function more, in QUESTIONS of
 * agent/run/judge.c; gradients are compared whatever the kind. */
#ifndef KA_KINDS_H
#define KA_KINDS_H

#include <jansson.h>

#include "base/base.h"
#include "sandbox/compare.h"

enum ka_kind_sort { KA_KIND_UPSTREAM, KA_KIND_LAYOUT, KA_KIND_VALUES, KA_KIND_QUESTION };

/* Which cases of a check are of the kind; "there" is the shape of ka_plan_variants(). plan.c acts on it. */
enum ka_kind_when {
    KA_KIND_NEVER,        /* children can do it, no check asks for it by itself */
    KA_KIND_ALWAYS,       /* upstreams: every shape, every further seed, and what is not of another kind */
    KA_KIND_ONCE,         /* upstreams: a case of its own there */
    KA_KIND_EACH_OUTPUT,  /* upstreams: one for each of several outputs, which is `seed % outputs` */
    KA_KIND_EACH_OF_MANY, /* the same, where there are more than two */
    KA_KIND_TAKEN,    /* layouts, values: in cases there by a covering design, if the forward takes them */
    KA_KIND_PLAIN,    /* questions: in the first plain case there */
    KA_KIND_EVERY,    /* questions: in every case */
    KA_KIND_FURTHER,  /* questions: in the plain cases of a shape that has had one already */
    KA_KIND_SUBSETS,  /* questions: cases of their own there: each gradient alone, each two, each left out */
    KA_KIND_LATER,    /* questions: in another plain case there, once the first one is through */
    KA_KIND_COMPILED, /* questions: in a plain case of the largest required shape, if compiled */
};

/* The other case that a question of KA_KIND_LATER is about. */
enum ka_kind_other {
    KA_KIND_FIRST = 1, /* the first plain one on the same shape: its expected values are there too */
    KA_KIND_CHEAPEST,  /* the one of the least shape of all */
};

#define KA_KIND_LINEAR_U 3.0 /* a*u + b*w: a + b is not 1, else what was kept of u would do */
#define KA_KIND_LINEAR_W 2.0

struct ka_kind {
    const char *name; /* of docs/protocol.md */
    enum ka_kind_sort sort;
    enum ka_kind_when when;
    /* How a case, or a part of one, goes by it; NULL: by nothing. Not a part of another row's. */
    const char *label;
    /* What it means that a thing fails with this kind, and not with a plain upstream on the same shape; NULL:
     * nothing. */
    const char *meaning;
    /* What an upstream is multiplied by, once each, and in float16; 0: not at all. */
    double scales[2], scales_half[2];
    /* The norm of the upstream is 1, not that of so many normal values. */
    bool unit;
    /* What such inputs, or an upstream, do to the tolerance of every comparison, or NULL. */
    void (*tolerate)(struct ka_tolerance *);
    /* The label of a kind that stands in its place in some checks, or NULL. */
    const char *instead;
    /* A comparison with them is no evidence for a gradient, and its error is not reported. */
    bool only_against;
    /* What is asked (new reference), the `n`th time that this is asked of a check; `secret` is for what is
     * drawn. NULL: the case has to do with another one, `other`, which is told to the candidate as cases are.
     */
    json_t *(*value)(size_t n, uint64_t secret);
    enum ka_kind_other other;
    double seconds; /* that asking may take beyond what a case takes */
};

/* Row `i`, in the order in which a check has the cases; NULL after the last. */
const struct ka_kind *ka_kind_at(size_t i);

/* The first row of that name (may be NULL), or NULL. */
const struct ka_kind *ka_kind_find(enum ka_kind_sort sort, const char *name);

/* The row of a case's upstream, NULL for none. */
const struct ka_kind *ka_kind_of_upstream(const json_t *item);

/* The rows of the values and layouts that a case's inputs have: row `i` of them, NULL after the last. */
const struct ka_kind *ka_kind_of_input(const json_t *item, size_t i);

/* The case that questions of `item` are about, as the item has it (borrowed); NULL: they are about none. */
const json_t *ka_kind_other_case(const json_t *item);

/* Seconds that the questions of a case may take, beyond what any case takes. */
double ka_kind_seconds(const json_t *item);

/* Whether a tensor of a case, by its name in `layouts`, is the upstream of an output. */
bool ka_kind_is_upstream(const char *tensor);

/* The layouts and values of a variation or a case in words, "stacked upstream, x transposed, w mixed";
 * nothing for none. */
void ka_kind_variation_label(const json_t *variation, struct ka_buf *out);

/* The label of a case: what the model may hear of it, never a seed. */
void ka_kind_label(const json_t *item, struct ka_buf *out);

/* The label of a case of which nothing is of another kind. */
bool ka_kind_is_plain(const char *label);

/* What the first part of a label means ("x transposed", and more after a comma), or NULL. */
const char *ka_kind_meaning(const char *part);

#endif
