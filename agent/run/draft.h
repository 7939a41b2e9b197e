/* The draft of the built-in differentiator. */
#ifndef KA_RUN_DRAFT_H
#define KA_RUN_DRAFT_H

#include "internal.h"
#include "operations.h"

void ka_run_differentiate(struct ka_run *run);
void ka_run_draft_ahead(struct ka_run *run); /* the same, before it is asked for */
void ka_run_draft_ahead_cancel(struct ka_run *run);
/* Operation differentiate on the smallest required shape. `schedule`, `config` (NULL: its own choice) are
 * borrowed. */
void ka_run_ask_differentiator(struct ka_run *run, json_t *schedule, json_t *config, ka_run_op_fn done);
/* What was checked wants more of the GPU than a program gets: whether the differentiator has another draft
 * for that. */
bool ka_run_draft_is_large(struct ka_run *run);
/* Nothing was said of shapes of it that others left no room for on the GPU: whether it may be checked once
 * more. */
bool ka_run_draft_is_unsaid(struct ka_run *run);

#endif
