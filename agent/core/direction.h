/* Directions for questions that are asked beside each other, so that their answers differ: a schedule each.
 * Pure. */
#ifndef KA_DIRECTION_H
#define KA_DIRECTION_H

#include "base/base.h"
#include "job.h"

/* Append the direction of a slot (0 to KA_JOB_SLOTS - 1), a sentence without a full stop. Those of one turn
 * all differ; where the schedule alone is asked for (optimise), those of the next turn are others again. */
void ka_direction(enum ka_job_phase phase, int turn, int slot, struct ka_buf *out);

#endif
