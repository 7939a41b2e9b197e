/* What the process knows of the forward that it checked last. */
#ifndef KA_RUN_KNOWN_H
#define KA_RUN_KNOWN_H

#include "internal.h"

/* Is this a check of that forward? Only then may ka_run_recall_*() be called. */
bool ka_run_knows(const struct ka_run *run);
void ka_run_recall_inspect(struct ka_run *run);
void ka_run_recall_shapes(struct ka_run *run);
/* After preflight; does nothing unless the app keeps what is known. */
void ka_run_remember(const struct ka_run *run);

#endif
