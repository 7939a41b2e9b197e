/* What a run came to. Loop thread only. */
#ifndef KA_RUN_RESULT_H
#define KA_RUN_RESULT_H

#include <jansson.h>

struct ka_run;

/* The result object of the design (new reference); meaningful once done. */
json_t *ka_run_result(struct ka_run *run);
int ka_run_exit_code(const struct ka_run *run); /* of the program, for this run */
const char *ka_run_dir(const struct ka_run *run);
const char *ka_run_name(const struct ka_run *run);
const char *ka_run_pair_path(const struct ka_run *run); /* NULL without a candidate */

/* Of a run of mode KA_RUN_QUESTION: {"file", "stub", "phase", "tokens", "budget", "bytes_per_token",
 * "parts": [{"name", "tokens"}], "left_out", "messages"}. NULL where it ended without a question.
 * Borrowed. */
const json_t *ka_run_question(const struct ka_run *run);

#endif
