/* One question to the model, and its answer. */
#ifndef KA_RUN_ASK_H
#define KA_RUN_ASK_H

#include "internal.h"

void ka_run_ask(struct ka_run *run, enum ka_job_phase phase, int64_t snapshot);
void ka_run_ask_cancel(struct ka_run *run);

#endif
