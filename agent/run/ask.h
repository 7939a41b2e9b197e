/* The questions of a turn to the model, and their answers. */
#ifndef KA_RUN_ASK_H
#define KA_RUN_ASK_H

#include "internal.h"

/* Put the questions of all open slots that this process has not put yet. */
void ka_run_ask(struct ka_run *run);
/* With --no-wait: take an answer that is there, or end the process with the questions put. */
void ka_run_await(struct ka_run *run);
void ka_run_ask_cancel(struct ka_run *run);

#endif
