/* The run's inside, for the files of this folder: what a run holds. It declares no function; each file has
 * its own header. A file uses those above it, never one below:
 *
 *     events.c          feeds the machine; saves, then has the command executed
 *     sizes.c           on which sizes things run: the user's own, scaled, small
 *     compiled_facts.c  what kernels cost as binaries, and the request of operation facts
 *     history.c         what was tried, in order
 *     learn.c           what earlier runs learned, and what this one teaches
 *     operations.c      jailed operations on behalf of the run
 *     cases.c, judge.c  the results of one case, compared
 *     fan.c             one operation over many cases, in several children
 *     expected.c        the oracle's half of a check, also ahead of the candidate
 *     known.c           inspect and preflight, remembered for the next pair of the same forward
 *     inspect.c         what the file is
 *     draft.c, tuner.c  candidates without a model: the differentiator, and its other schedules
 *     preflight.c       on which shapes forward and oracle agree: the parts preflight_*.c
 *     retrieve.c        the store
 *     ask.c             prompts, model or mailbox, answers to candidates
 *     racing.c          on a GPU: a candidate timed beside the best
 *     check*.c          scan, candidate, oracle, comparison, facts, the verdict's way into the record
 *     result.c          the result object
 *     folder.c          what a run's folder is called
 *     finish.c          pair and reports
 *     commands.c        which file does what the machine commands
 *     run.c             folder, documents, what a fresh or resumed run begins with; the end
 *     clocks.c, bench.c a benchmark, which is no run: it has operations and a folder alone */
#ifndef KA_RUN_INTERNAL_H
#define KA_RUN_INTERNAL_H

#include "agent/app/app.h"
#include "agent/core/job.h"
#include "agent/disk/record.h"
#include "agent/disk/state.h"
#include "agent/io/child.h"
#include "agent/io/llm.h"
#include "agent/io/loop.h"
#include "agent/ops/op.h"
#include "base/hash.h"

struct ka_run;
struct ka_run_child; /* one child in flight: operations.c */
struct ka_fan;       /* fan.h */
struct ka_expected;  /* expected.h */
struct ka_preflight; /* preflight_internal.h */
struct ka_check;     /* check.c */
struct ka_raced;     /* racing.h */

/* Owns `facts`: the result of operation facts, complete. */
typedef void (*ka_run_compile_fn)(struct ka_run *run, json_t *facts);

/* What the machine's commands do: commands.c. */
struct ka_run_actions {
    void (*execute)(struct ka_run *run, const struct ka_command *command);
    void (*stop_all)(struct ka_run *run); /* whatever is in flight: nobody waits for it any more */
};

/* The differentiator's draft, begun during preflight: draft.c. */
struct ka_ahead {
    struct ka_run_child *child; /* NULL: ended, or never begun */
    bool ended, wanted;
    struct ka_op_result result; /* its doc is ours */
};

/* A question to the model that is on its way: ask.c. */
struct ka_asked {
    struct ka_run *run;
    int slot;                      /* of the turn */
    int question;                  /* the last that was put; 0: none */
    uint64_t llm_op;               /* 0: none */
    struct ka_mailbox_watch *mail; /* waits for an answer in the mailbox; NULL */
};

struct ka_run {
    struct ka_app *app;
    const struct ka_run_actions *actions;
    struct ka_settings settings; /* own; nothing changes them once it has begun */
    bool has_card;               /* settings.card is counted */
    struct ka_known *known;      /* known.c; NULL: nothing is kept */
    struct ka_job job;
    struct ka_state *state;
    struct ka_record *record;
    void (*done)(struct ka_run *run, bool waiting, void *arg); /* ka_run_done_fn */
    void *arg;

    char *dir;          /* absolute */
    char *file;         /* the user's file, absolute */
    char *name;         /* file name without .py */
    char *forward;      /* text of the user's file when the run began */
    char *work_forward; /* path of the copy that children read */
    char *modules;      /* folder with copies of the user's modules that it imports; NULL: of none */
    char modules_hash[KA_HASH_HEX]; /* of those, as they were when the run began */

    json_t *inspect;   /* result of the operation inspect; NULL before */
    json_t *shapes;    /* what is checked, see agent/core/plan.h; NULL before */
    json_t *outputs;   /* of the stub, as the oracle saw them on the first shape; NULL before */
    json_t *grads;     /* names of the inputs whose gradients are checked */
    bool half;         /* some input or output is float16 */
    json_t *skipped;   /* sweep shapes that are not checked, and why */
    json_t *sanitized; /* result of the operation sanitize; NULL: not asked for */
    json_t *oracles;   /* what the second opinions on the oracle said: {"finite_differences", "reference",
                          "inputs"} */
    json_t *retrieved; /* [{"id", "similarity", "backward", ...}] */
    json_t *lessons;   /* {"found": [{"id", "kind", ...}], "told": [{"turn", "slot", "for", "ids"}]} */
    json_t *draft;     /* last result of the operation differentiate; NULL before */
    json_t *variant;   /* the tuner's, while its facts are counted; NULL */
    json_t
        *history;   /* attempts by turn and slot: phase, origin, verdict, cost; or why an answer was no use */
    json_t *totals; /* requests, tokens_in, tokens_out, seconds */
    json_t *failure;   /* why the run failed, for people; NULL */
    char *pair_path;   /* once a candidate was written out */
    char *given;       /* a backward to be checked instead of drafted (check, verify); NULL */
    char *waiting_for; /* request file in the mailbox; NULL */
    json_t *question;  /* the one that the run ends at: see ka_run_question(); NULL */
    json_t *feedback;  /* by slot, the last answer where it was not usable: {"0": {"problem", "answer"}} */

    struct ka_run_child *children;  /* in flight */
    json_t *timeline;               /* of those that ended: "children" of the result object */
    struct ka_preflight *preflight; /* NULL: not under way */
    struct ka_ahead ahead;
    struct offer *offers;         /* expected.c */
    struct ka_expected *prepared; /* for the next check; NULL */
    struct ka_compile *compile;   /* of the last facts; NULL */
    json_t *compile_facts;
    ka_run_compile_fn compile_next;
    void (*raced)(struct ka_run *run, const struct ka_raced *raced); /* racing.c; NULL: none is under way */
    json_t *race_cases;
    struct ka_asked asked[KA_JOB_SLOTS];
    struct ka_soon *first; /* the first turn of the loop; NULL: it was */
    struct ka_check *check;
    double began;          /* of this process's part, ka_clock_seconds() */
    double seconds_before; /* of earlier processes */
    bool interrupted, finished, waiting;
    bool ends_at_question; /* none is put */
};

#endif
