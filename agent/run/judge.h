/* One case of a check, judged.
 *
 * May run on a worker thread, several cases of one check at a time, each with a part of the verdict. Until it
 * returns the caller leaves alone: that part; the results of the children and their scratch folders; the
 * documents behind `plan`, `oracle` and `candidate`, which may be read elsewhere at the same time (no
 * reference to them is taken or given up), but not changed or freed. Nothing is logged. Large tensors are
 * compared in threads of its own, which are gone when it returns. */
#ifndef KA_RUN_JUDGE_H
#define KA_RUN_JUDGE_H

#include <jansson.h>

#include "agent/core/place.h"
#include "agent/core/verdict.h"
#include "agent/io/child.h"
#include "sandbox/tensor.h"

struct ka_judged_case {
    struct ka_verdict *verdict; /* what is told */
    size_t shape;               /* shape number of the verdict */
    size_t at;                  /* case number of the verdict */
    const json_t *plan, *oracle,
        *candidate; /* entries of this case; the last two NULL where a child left none */
    const struct ka_child_result *oracle_files, *candidate_files;
    json_int_t oracle_id; /* what the oracle's child knew the case as */
    int agrees;           /* 0, or why the oracles contradict each other: see ka_case_agrees(), with */
    const struct ka_err *disagreement;
    bool compiled; /* the candidate's kernels ran on a GPU */
    bool by_hand;  /* the candidate is a module that people wrote themselves, forward and backward in one */
    const struct ka_place *place; /* how lines of it are told */
    /* Another case of the same shape that this one's questions are about: plan, oracle, its files and its id
     * there; NULL: none. */
    const struct ka_judged_case *other;
    bool closer; /* the oracle was asked to look closer: what is off now is wrong */
    const struct ka_child_result *closer_files; /* what that left; NULL: nothing */
    json_int_t closer_id;                       /* of the case there */
    /* Told: gradients, of this case and of the other one, are off by so little that a closer look may explain
     * it, and nothing is by more. */
    bool doubted, other_doubted;
};

/* Everything about case `id`, told to the verdict. 0; -ENODATA, -EINVAL or `agrees`, with a sentence, when
 * the oracle could not say what is right: then nothing was judged. */
int ka_judge_case(struct ka_judged_case *one, json_int_t id, struct ka_err *why);

#endif
