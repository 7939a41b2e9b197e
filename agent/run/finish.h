/* The last command of a run. */
#ifndef KA_RUN_FINISH_H
#define KA_RUN_FINISH_H

#include "internal.h"

void ka_run_finish(struct ka_run *run);

#endif
