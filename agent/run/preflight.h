/* On which shapes forward and oracle agree, and what else the checks of this forward need. */
#ifndef KA_RUN_PREFLIGHT_H
#define KA_RUN_PREFLIGHT_H

#include "internal.h"

void ka_run_preflight(struct ka_run *run);
void ka_run_preflight_free(struct ka_run *run); /* what is in flight is cancelled */

#endif
