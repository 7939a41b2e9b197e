/* Similar pairs from the store. */
#ifndef KA_RUN_RETRIEVE_H
#define KA_RUN_RETRIEVE_H

#include "internal.h"

void ka_run_retrieve(struct ka_run *run);

#endif
