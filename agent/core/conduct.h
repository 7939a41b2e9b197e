/* What a candidate's process reported of itself, held against it: pure.
 *
 * The report comes from a process that ran the candidate's code, so nothing in it is evidence of anything
 * good; a clean report proves nothing, and a report that lacks a member is as bad as one that confesses.
 * Rules: "modified", "alias", "kernel", "race", "no_launch", "torch_math", "prepared", "unnamed". Of a list
 * the first few are named, and the rest counted: what one case can add to a verdict is bounded. */
#ifndef KA_CONDUCT_H
#define KA_CONDUCT_H

#include <jansson.h>

#include "place.h"
#include "verdict.h"

/* What is known of a case without its report. */
struct ka_conduct_of {
    bool compiled; /* kernels were not interpreted, so that nothing can be said of races */
    bool scales; /* a module written by hand, and each upstream is one number: the forward's kernels may make
                      the gradients, which the backward multiplies by it */
    bool
        empty; /* inputs or outputs have no elements, or every gradient is free: nothing has to be launched */
    const json_t *free;           /* names of gradients that no kernel has to compute; NULL: none */
    const struct ka_place *place; /* how lines that it names are told; NULL: as it named them */
};

/* Are the outputs of an oracle's case such that a backward may scale? */
bool ka_conduct_may_scale(const json_t *outputs);

/* Have the outputs of an oracle's case no elements? Every gradient is zero, and no kernel has to say so. */
bool ka_conduct_nothing_to_launch(const json_t *outputs);

/* `report` is the case's entry in the candidate's result (docs/protocol.md, op candidate); `at` the case of
 * the verdict. */
void ka_conduct_judge(const json_t *report, const struct ka_conduct_of *of, struct ka_verdict *verdict,
                      size_t at);

/* Interpreted, it was seen what each launch read and wrote: a gradient that no kernel made of the upstream is
 * not the kernels' work. Those that are named in `nowhere` (NULL: none) may come from nowhere. */
void ka_conduct_traces(const json_t *report, const json_t *nowhere, struct ka_verdict *verdict, size_t at);

/* A candidate that runs compiled is interpreted once on small sizes, which operation facts reports: hold that
 * against it, as a case of `shape`, and take it out of the facts. What the interpreter cannot run is none. */
void ka_conduct_interpreted(json_t *facts, const struct ka_conduct_of *of, struct ka_verdict *verdict,
                            size_t shape);

/* Whether the interpreter got through any case of such facts (may be NULL). */
bool ka_conduct_watched(const json_t *facts);

/* Honest host work on floating tensors: allocation, views, copies and casts, and sums of partial results that
 * kernels wrote. `name` as in "aten::sum". */
bool ka_conduct_allowed(const char *name);

/* A remark for each of `launches`, names of kernels that a candidate's text launches, that `seen` (an object)
 * does not have: no case launched it, and what it computes was not looked at. */
void ka_conduct_unlaunched(const json_t *launches, const json_t *seen, struct ka_verdict *verdict);

#endif
