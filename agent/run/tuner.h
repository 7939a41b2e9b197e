/* The tuner without a clock. */
#ifndef KA_RUN_TUNER_H
#define KA_RUN_TUNER_H

#include "internal.h"

/* Post the next variant that is worth a check as a candidate, or say that there is none. */
void ka_run_tune(struct ka_run *run, int64_t snapshot);

#endif
