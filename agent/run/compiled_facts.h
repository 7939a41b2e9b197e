/* What kernels cost as binaries: operation facts, and the compiler. */
#ifndef KA_RUN_COMPILED_FACTS_H
#define KA_RUN_COMPILED_FACTS_H

#include "internal.h"

/* The request of operation facts. Its bytes are counted in the interpreter: the user's own sizes are scaled
 * down. */
json_t *ka_run_facts_request(const struct ka_run *run, const char *entry);
/* Complete its result: its kernels' sources are compiled, or found in the cache. */
void ka_run_compile(struct ka_run *run, const struct ka_op_result *result, ka_run_compile_fn next);
void ka_run_compile_cancel(struct ka_run *run);
/* Whether a candidate with these facts would give up what the best has and no cost can weigh. */
bool ka_run_gives_up(const struct ka_run *run, const json_t *facts);

#endif
