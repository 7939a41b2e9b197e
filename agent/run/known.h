/* What was found out about the forward that was checked last, for those who check several pairs of one
 * forward. */
#ifndef KA_RUN_KNOWN_H
#define KA_RUN_KNOWN_H

#include <stdbool.h>

struct ka_known;
struct ka_run;

struct ka_known *ka_known_new(void);
void ka_known_free(struct ka_known *known); /* NULL is fine */

/* Is this a check of that forward? Only then may ka_run_recall_*() be called. */
bool ka_run_knows(const struct ka_run *run);
void ka_run_recall_inspect(struct ka_run *run);
void ka_run_recall_shapes(struct ka_run *run);
/* After preflight; does nothing unless there is somewhere to keep it. */
void ka_run_remember(const struct ka_run *run);

#endif
