/* Which of two backwards of one forward is faster, by times that were taken in turn. Pure.
 *
 * Both were called in each round, one after the other, on the same values: what changes with the rounds (a
 * clock that falls, a warm card) meets both, so a round's ratio says more than its times. A round has one
 * ratio, the geometric mean over the shapes of the one's time over the other's; their median, and the
 * interval that holds the true one with 95 % (times.h), is what a race came to. */
#ifndef KA_RACE_H
#define KA_RACE_H

#include <jansson.h>

#include "times.h"

struct ka_race {
    struct ka_times ratio; /* ours over the rival's: below 1, ours is faster; without a rival all zero */
    double ms;             /* ours: geometric mean over the shapes of the medians of forward and backward */
    size_t shapes;
    bool graphs; /* CUDA graphs were timed: the host's part is not in it. False: plain calls */
};

/* `timed`: a result of operation bench, of the pass "both" (docs/protocol.md). Graphs count where every
 * subject has them on every shape. -ENODATA with a sentence where a shape has no times, or a case failed. */
int ka_race_of(const json_t *timed, struct ka_race *out, struct ka_err *err);

/* Ours is faster: by more than `min_rel`, and by more than the times vary. */
bool ka_race_won(const struct ka_race *race, double min_rel);

/* What the job is told (job.h): a first candidate's own milliseconds; of a later one the best's cost times
 * the ratio, and no less than the best's where it did not win. */
double ka_race_cost(const struct ka_race *race, double best_cost, double min_rel);

/* Where the time of the largest shape goes, added to a document: "kernels": [{"pass", "name", "launches",
 * "ms"}] and "floor": {"fwd", "bwd": ka_bench_floor()}, each where operation bench has measured it. Told
 * by a process that has run the candidate, and held against nothing: names are words, and so many at most.
 * Nothing where the last case failed. */
void ka_race_kernels(const json_t *timed, json_t *doc);

#endif
