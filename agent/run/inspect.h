/* The first command of a run. */
#ifndef KA_RUN_INSPECT_H
#define KA_RUN_INSPECT_H

#include "internal.h"

void ka_run_inspect(struct ka_run *run);

#endif
