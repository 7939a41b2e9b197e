/* What a run has tried, in the order of turns and slots, whatever came first. */
#ifndef KA_RUN_HISTORY_H
#define KA_RUN_HISTORY_H

#include "internal.h"

/* Add what became of `slot`, and save; steals `entry`. Among several of a turn it gets its direction. */
void ka_run_history_add(struct ka_run *run, int slot, json_t *entry);

#endif
