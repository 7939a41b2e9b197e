/* On which sizes a run's children work: the user's own on a GPU, small ones in the interpreter. */
#ifndef KA_RUN_SIZES_H
#define KA_RUN_SIZES_H

#include "internal.h"

/* Elements that the interpreter may have to do with, were the largest size of a shape there twice. */
#define KA_RUN_SQUARE 4e6

bool ka_run_on_gpu(const struct ka_run *run);
/* Are shapes scaled, to be run in the interpreter? */
bool ka_run_scaled_down(const struct ka_run *run);
/* The product of sizes that small versions of a shape may have: less where its tensors, as preflight has seen
 * them, are far larger than the product of its sizes says (windows of m x m tokens have m^4 scores). */
uint64_t ka_run_budget(const struct ka_run *run, const json_t *dims);
/* A small version of a shape (new reference). On a GPU the user's own sizes are checked; what else is asked
 * of the forward (hidden shapes, finite differences, counts in the interpreter) is asked of this. One that
 * costs much for tensors of which no product of the sizes tells (scores of N by N) is made smaller yet. On
 * the CPU the shape is one already. */
json_t *ka_run_small(const struct ka_run *run, json_t *dims);
/* What is interpreted beside the compiled cases (new reference): smaller yet where that is much. */
json_t *ka_run_interpreted(const struct ka_run *run, json_t *dims);
/* SWEEP, or SWEEP_CPU where it counts (new reference): [{"dims", "required"}]. */
json_t *ka_run_sweep(struct ka_run *run, bool *own_cpu_sweep);

/* Bytes of the oracle's results that may lie in memory at a time beside a candidate's, which take about as
 * much. Without a GPU shapes are small: no limit. */
double ka_run_results_room(const struct ka_run *run);

#endif
