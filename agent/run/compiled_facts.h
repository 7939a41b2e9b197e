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
/* Whether a function of rank.h says so of a candidate with these facts beside the best, where that is
 * verified. */
typedef bool (*ka_run_compare_fn)(const json_t *facts, const json_t *other);
bool ka_run_compares(const struct ka_run *run, const json_t *facts, ka_run_compare_fn compare);

#endif
