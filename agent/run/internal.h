/* The run's inside, shared by the files of this folder only.
 *
 *     run.c      life: start, resume, dispatch of commands, events in
 *     open.c     folder, documents, what a fresh or resumed run begins with
 *     operations.c  jailed operations (agent/ops/op.h) on behalf of the run
 *     fan.c      one operation over many cases, in several children
 *     expected.c the oracle's half of a check, also ahead of the candidate
 *     forward.c  inspect and preflight: what the file is, on which shapes forward and oracle agree
 *     known.c    the same, remembered for the next pair of the same forward
 *     compiled_facts.c  registers and spills of the kernels that operation facts found
 *     hidden.c   part of preflight: hidden shapes
 *     preflight_differences.c  part of preflight: finite differences of the forward
 *     inputs.c   part of preflight: inputs of other strides and magnitudes
 *     check.c    scan, candidate, oracle, comparison, facts
 *     ask.c      prompt, model or mailbox, answer to candidate
 *     retrieve.c the store
 *     draft.c    the differentiator and the tuner
 *     finish.c   result object, pair, reports */
#ifndef KA_RUN_INTERNAL_H
#define KA_RUN_INTERNAL_H

#include "agent/disk/record.h"
#include "agent/disk/state.h"
#include "agent/io/child.h"
#include "agent/io/loop.h"
#include "agent/io/llm.h"
#include "agent/ops/op.h"
#include "run.h"

/* Owns `facts`: the result of operation facts, complete. */
typedef void (*ka_run_compile_fn)(struct ka_run *run, json_t *facts);
typedef void (*ka_run_op_fn)(struct ka_run *run, const struct ka_op_result *result);
typedef void (*ka_run_child_fn)(struct ka_run *run, void *arg, const struct ka_op_result *result);
struct ka_run_child; /* one child in flight: operations.c */
struct ka_fan;       /* one operation over many cases, in several children: fan.h */
struct ka_fan_found;
struct ka_expected; /* the oracle's half of a check: expected.h */
typedef void (*ka_fan_fn)(struct ka_run *run, struct ka_fan *fan, void *arg);

/* Preflight while it lasts. First the sweep, level by level; then three parts beside each other. */
struct ka_preflight {
    json_t *pending; /* shapes of the sweep still to be settled: forward.c */
    json_t *asked;   /* the cases of this level, as the children were told them */
    struct ka_fan *sweep;
    json_t *
        stand_in; /* the shape on which other kinds of inputs and upstreams are tried; NULL: the smallest required */
    json_t *tried, *asked_hidden; /* hidden.c */
    struct ka_fan *hidden;
    json_t *smaller;      /* preflight_differences.c */
    json_t *asked_inputs; /* inputs.c */
    struct ka_fan *inputs;
    unsigned left; /* parts of the second stage that are not through */
};

/* The differentiator's draft, begun during preflight: draft.c. */
struct ka_ahead {
    struct ka_run_child *child; /* NULL: ended, or never begun */
    bool ended, wanted;
    struct ka_op_result result; /* its doc is ours */
};
struct ka_check; /* the check in flight: check.c */

struct ka_run {
    struct ka_app *app;
    struct ka_settings settings; /* own; nothing changes them */
    struct ka_known *known;      /* known.c; NULL: nothing is kept */
    struct ka_job job;
    struct ka_state *state;
    struct ka_record *record;
    ka_run_done_fn done;
    void *arg;

    char *dir;          /* absolute */
    char *file;         /* the user's file, absolute */
    char *name;         /* file name without .py */
    char *forward;      /* text of the user's file when the run began */
    char *work_forward; /* path of the copy that children read */

    json_t *inspect;   /* result of the operation inspect; NULL before */
    json_t *shapes;    /* what is checked, see agent/core/plan.h; NULL before */
    json_t *outputs;   /* of the stub, as the oracle saw them on the first shape; NULL before */
    json_t *grads;     /* names of the inputs whose gradients are checked */
    bool half;         /* some input is float16 */
    json_t *skipped;   /* sweep shapes that are not checked, and why */
    json_t *sanitized; /* result of the operation sanitize; NULL: not asked for */
    json_t *
        oracles; /* what the second opinions on the oracle said: {"finite_differences", "reference", "inputs"} */
    json_t *retrieved; /* [{"id", "similarity", "backward", ...}] */
    json_t *draft;     /* last result of the operation differentiate; NULL before */
    json_t *variant;   /* the tuner's, while its facts are counted; NULL */
    json_t *history;   /* attempts in order: phase, origin, verdict, cost, kept */
    json_t *totals;    /* requests, tokens_in, tokens_out, seconds */
    json_t *failure;   /* why the run failed, for people; NULL */
    char *pair_path;   /* once a candidate was written out */
    char *given;       /* a backward to be checked instead of drafted (check, verify); NULL */
    char *waiting_for; /* request file in the mailbox; NULL */
    json_t *feedback;  /* the model's last answer, where it was not usable: {"problem", "answer"}; NULL */

    struct ka_run_child *children;  /* in flight */
    json_t *timeline;               /* of those that ended: "children" of the result object */
    struct ka_preflight *preflight; /* NULL: not under way */
    struct ka_ahead ahead;
    struct offer *offers;         /* expected.c */
    struct ka_expected *prepared; /* for the next check; NULL */
    struct ka_compile *compile;   /* of the last facts; NULL */
    json_t *compile_facts;
    ka_run_compile_fn compile_next;
    uint64_t llm_op;               /* the question in flight; 0: none */
    struct ka_mailbox_watch *mail; /* waits for an answer in the mailbox; NULL */
    struct ka_soon *first;         /* the first turn of the loop; NULL: it was */
    struct ka_check *check;
    double began;          /* of this process's part, ka_clock_seconds() */
    double seconds_before; /* of earlier processes */
    bool interrupted, finished, waiting;
};

/* ---- run.c */
/* Feed the machine; saves, then executes the command. The run may be freed when this returns. */
void ka_run_post(struct ka_run *run, const struct ka_event *event);
/* Shorthands that fill in the operation number. */
void ka_run_post_type(struct ka_run *run, enum ka_event_type type);
void ka_run_post_candidate(struct ka_run *run, const char *backward, const char *origin, const char *note);
/* End the run with a reason for people; `kind` is the error kind of docs/protocol.md, or "internal". */
void ka_run_fail(struct ka_run *run, enum ka_event_type type, const char *kind, const char *fmt, ...)
    KA_PRINTF(4, 5);
void ka_run_fail_doc(struct ka_run *run, enum ka_event_type type, json_t *failure); /* steals */
int ka_run_put(struct ka_run *run, const char *name, const json_t *doc);
double ka_run_seconds(const struct ka_run *run);
/* Save, then execute: what a resumed run does first. */
void ka_run_resume_command(struct ka_run *run, const struct ka_command *command);

/* ---- open.c */
int ka_run_save_start(struct ka_run *run, struct ka_err *err);
void ka_run_close_parts(struct ka_run *run);

/* ---- operations.c */
/* Start `operation` on `file`; steals `extra`, the further members of the request. `next` runs once, unless the operation is
 * cancelled. A failure to start ends the run (KA_EV_INTERNAL). */
void ka_run_op(struct ka_run *run, const char *operation, const char *file, json_t *extra, ka_run_op_fn next);
/* Like ka_fail(): what to tell people about an operation that gave no result. */
void ka_run_op_failed(struct ka_run *run, const struct ka_op_result *result);
void ka_run_op_cancel(struct ka_run *run);
/* One of several; `part` says which of them for the timeline ("hidden shapes, 1 of 4"). Steals `extra`. NULL with `err` when it cannot be
 * started: `done` then never runs. The handle is gone once `done` runs or it was cancelled. */
struct ka_run_child *ka_run_child_start(struct ka_run *run, const char *operation, const char *file,
                                        json_t *extra, const char *part, ka_run_child_fn done, void *arg,
                                        struct ka_err *err);
void ka_run_child_cancel(struct ka_run_child *child);

/* ---- known.c */
/* Is this a check of the forward that was checked last? Only then may the others be called. */
bool ka_run_knows(const struct ka_run *run);
void ka_run_recall_inspect(struct ka_run *run);
void ka_run_recall_shapes(struct ka_run *run);
/* After preflight; does nothing unless there is somewhere to keep what is known. */
void ka_run_remember(const struct ka_run *run);

/* ---- compiled_facts.c */
/* Complete the result of an operation facts: its kernels' sources are compiled, or found in the cache. */
void ka_run_compile(struct ka_run *run, const struct ka_op_result *result, ka_run_compile_fn next);
void ka_run_compile_cancel(struct ka_run *run);

/* ---- forward.c, for the rest of preflight */
/* Are shapes scaled, to be run in the interpreter? */
bool ka_run_scaled_down(const struct ka_run *run);
/* SWEEP, or SWEEP_CPU where it counts (new reference): [{"dims", "required"}]. */
json_t *ka_run_sweep(struct ka_run *run, bool *own_cpu_sweep);
/* Add to the shapes that are checked, unless it is there; `entry`: the oracle's of this shape. */
void ka_run_accept_shape(struct ka_run *run, const json_t *dims, const char *class, const char *kind,
                         const json_t *entry);
bool ka_run_on_gpu(const struct ka_run *run);
/* A small version of a shape (new reference). On a GPU the user's own sizes are checked; what else is asked of the forward (hidden shapes,
 * finite differences, counts in the interpreter) is asked of this. On the CPU the shape is one already. */
json_t *ka_run_small(const struct ka_run *run, json_t *dims);
/* Did forward and oracle agree on a case? Otherwise the error document (new reference) in *error. */
bool ka_run_case_agrees(const struct ka_fan_found *found, json_t **error);
/* One case for each of `list`, [{"dims"}], with its place in the list as id. `*asked`: what the children are told (new reference). */
struct ka_fan *ka_run_ask_oracle(struct ka_run *run, const json_t *list, const char *what, json_t **asked,
                                 ka_fan_fn changed);
void ka_run_preflight_progress(struct ka_run *run, const struct ka_fan *fan, const char *what);
void ka_run_preflight_part_done(struct ka_run *run); /* of the second stage */
void ka_run_preflight_free(struct ka_run *run);      /* what is in flight is cancelled */

/* ---- the phases */
void ka_run_inspect(struct ka_run *run);
void ka_run_preflight(struct ka_run *run);
void ka_run_hidden(struct ka_run *run);
void ka_run_differences(struct ka_run *run);
void ka_run_inputs(struct ka_run *run);
void ka_run_preflight_done(struct ka_run *run);
void ka_run_retrieve(struct ka_run *run);
void ka_run_check(struct ka_run *run, int64_t snapshot);
void ka_run_check_free(struct ka_run *run);
/* The request of operation facts. Its bytes are counted in the interpreter: the user's own sizes are scaled down for it. */
json_t *ka_run_facts_request(const struct ka_run *run, const char *entry);
void ka_run_ask(struct ka_run *run, enum ka_job_phase phase, int64_t snapshot);
void ka_run_ask_cancel(struct ka_run *run);
void ka_run_differentiate(struct ka_run *run);
void ka_run_draft_ahead(struct ka_run *run); /* the same, before it is asked for */
void ka_run_draft_ahead_cancel(struct ka_run *run);
void ka_run_tune(struct ka_run *run, int64_t snapshot);
void ka_run_finish(struct ka_run *run);

#endif
