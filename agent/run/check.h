/* One check of one candidate. */
#ifndef KA_RUN_CHECK_H
#define KA_RUN_CHECK_H

#include "internal.h"

void ka_run_check(struct ka_run *run, int64_t snapshot);
void ka_run_check_free(struct ka_run *run);

#endif
