/* On a GPU a candidate is timed beside the best one: what is measured decides, not a model. */
#ifndef KA_RUN_RACING_H
#define KA_RUN_RACING_H

#include "agent/core/race.h"
#include "internal.h"

/* What a race came to; valid during the call. */
struct ka_raced {
    const char *why;    /* the candidate could not be timed; NULL: it was */
    struct ka_race is;  /* without a ratio where there is no verified best yet */
    double cost;        /* for the job: ka_race_cost(); INFINITY where it was not timed */
    bool won;           /* faster than the best, or the first */
    const json_t *doc;  /* {"ms", "way": "graph" | "alone", "shapes": [{"dims", "ms"}], "ratio"?, "low"?,
                           "high"?}, of forward and backward together; NULL where it was not timed */
    const char *result; /* a few words: "0.93 of the best's time (0.92 to 0.94)" */
};

typedef void (*ka_run_raced_fn)(struct ka_run *run, const struct ka_raced *raced);

/* Is this a run in which times decide: one that optimises, on a GPU? */
bool ka_run_races(const struct ka_run *run);

/* Time forward and backward of a pair on shapes of the sweep, in turn with the best verified candidate, with
 * the GPU to themselves. `next` runs once, unless the run's operations are cancelled. */
void ka_run_race(struct ka_run *run, const char *pair_path, ka_run_raced_fn next);

#endif
