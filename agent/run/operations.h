/* Jailed operations on behalf of a run. */
#ifndef KA_RUN_OPERATIONS_H
#define KA_RUN_OPERATIONS_H

#include "internal.h"

typedef void (*ka_run_op_fn)(struct ka_run *run, const struct ka_op_result *result);
typedef void (*ka_run_child_fn)(struct ka_run *run, void *arg, const struct ka_op_result *result);

/* Start `operation` on `file`; steals `extra`, the further members of the request. `next` runs once, unless
 * the operation is cancelled. A failure to start ends the run (KA_EV_INTERNAL). */
void ka_run_op(struct ka_run *run, const char *operation, const char *file, json_t *extra, ka_run_op_fn next);

struct ka_run_child_req {
    const char *operation, *file;
    json_t *extra;    /* stolen; may be NULL */
    const char *part; /* of several, for the timeline ("hidden shapes, 1 of 4"); may be NULL */
    bool emptied;     /* begins when all others on the GPU, of whatever program, are through: it needs the
                       * memory */
};

/* One of several. NULL with `err` when it cannot be started: `done` then never runs. The handle is gone once
 * `done` runs or it was cancelled. */
struct ka_run_child *ka_run_child_start(struct ka_run *run, const struct ka_run_child_req *req,
                                        ka_run_child_fn done, void *arg, struct ka_err *err);
void ka_run_child_cancel(struct ka_run_child *child);
/* All that are in flight. */
void ka_run_op_cancel(struct ka_run *run);
/* Like ka_run_fail(): what to tell people about an operation that gave no result. */
void ka_run_op_failed(struct ka_run *run, const struct ka_op_result *result);

#endif
