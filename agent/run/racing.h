/* On a GPU a candidate is timed beside the best one: what is measured decides, not a model. */
#ifndef KA_RUN_RACING_H
#define KA_RUN_RACING_H

#include "internal.h"

/* What a race came to; valid during the call. */
struct ka_raced {
    double cost; /* for the job: ka_race_cost(); INFINITY where it could not be timed */
    bool won;    /* faster than the best, or the first */
    json_t *doc; /* {"ms", "way": "graph" | "alone", "shapes": [{"dims", "ms"}], "ratio"?, "low"?, "high"?},
                    of forward and backward together; of the largest shape also "kernels"?: [{"pass", "name",
                    "launches", "ms"}] and "floor"?: {"fwd", "bwd": ka_bench_floor()}; NULL where it could
                    not be timed; borrowed */
    const char *why; /* it could not be timed; else NULL; borrowed */
};

typedef void (*ka_run_raced_fn)(struct ka_run *run, const struct ka_raced *raced);

/* Is this a run in which times decide: one that optimises, on a GPU? */
bool ka_run_races(const struct ka_run *run);

/* Dims of what is timed: of the sweep what was checked, as it is or as something smaller; all, or evenly from
 * the smallest to the largest (new reference). */
json_t *ka_run_race_dims(struct ka_run *run);

/* Time forward and backward of a pair on shapes of the sweep, in turn with `leader`, another pair's path, or
 * with the best verified candidate where it is NULL, with the GPU to themselves. `next` runs once, unless the
 * run's operations are cancelled. `kernels`: each kernel is timed by itself too. */
void ka_run_race(struct ka_run *run, const char *pair_path, const char *leader, bool kernels,
                 ka_run_raced_fn next);

#endif
