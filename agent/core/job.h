/* The life of one run, as a pure state machine: an event in, a command out.
 *
 *     queued -> inspect -> preflight -> retrieve -> draft -> check -> (fix -> check)* -> optimise -> check ->
 *     ... -> done
 *     any -> failed | cancelled
 *
 * Words: an *operation* is the one thing a run has in flight (a child, a question to the model); its number
 * is in the command, and the event that completes it carries it back. An event with another number is late
 * and is dropped. A *turn* is what is asked for from one snapshot: up to `candidates` questions to the model
 * at once, one a *slot*, or one candidate of the differentiator or tuner. A *snapshot* is a stored candidate.
 *
 * Answers come in any order, also while a candidate of the turn is checked: those that wait are checked next,
 * and the turn is judged when every slot is settled, by slots. So what a run does next does not hang on which
 * answer was the first.
 *
 * No I/O, no clock, no allocation: the driver (run.c) executes commands, stores snapshots, and tells what
 * happened. It saves the job before it executes the command, so that after a crash ka_job_resume() repeats
 * that command. */
#ifndef KA_JOB_H
#define KA_JOB_H

#include <jansson.h>

#include "base/base.h"

enum ka_job_state {
    KA_JOB_QUEUED,
    KA_JOB_INSPECT,   /* a child loads the file and says what it is */
    KA_JOB_PREFLIGHT, /* a child shows that forward and oracle agree on the shapes to be checked */
    KA_JOB_RETRIEVE,  /* the store is searched */
    KA_JOB_DRAFT,     /* the differentiator, or the model, writes a first candidate; it perhaps a second */
    KA_JOB_CHECK,     /* candidate, then oracle, then the comparison */
    KA_JOB_FIX,       /* the model is shown what is wrong, also with a move of optimise: once */
    KA_JOB_OPTIMISE,  /* another schedule from the tuner, or from the model */
    KA_JOB_DONE,      /* the best snapshot is verified and written out */
    KA_JOB_FAILED,
    KA_JOB_CANCELLED,
};

enum ka_job_phase { KA_PHASE_DRAFT, KA_PHASE_FIX, KA_PHASE_OPTIMISE };

enum ka_job_reason {
    KA_REASON_NONE,
    KA_REASON_UNUSABLE,      /* the forward file: exit code 3 */
    KA_REASON_NOT_VERIFIED,  /* budget or patience used up: exit code 4 */
    KA_REASON_REFUSED_DRAFT, /* the differentiator refused and there is no model: exit code 4 */
    KA_REASON_LLM,           /* endpoint unreachable or refusing: exit code 5 */
    KA_REASON_SANDBOX,       /* a required layer is missing: exit code 6 */
    KA_REASON_INTERNAL,      /* exit code 1 */
};

enum ka_event_type {
    KA_EV_START,
    KA_EV_OK,           /* inspect, preflight, retrieve: went well */
    KA_EV_UNUSABLE,     /* inspect, preflight: the forward file cannot be used */
    KA_EV_CANDIDATE,    /* draft, fix, optimise: `snapshot` holds a new candidate for `slot` */
    KA_EV_BAD_ANSWER,   /* the model answered `slot` with nothing usable; it will be told why */
    KA_EV_NO_CANDIDATE, /* the differentiator refused (in preflight, of a draft that was begun ahead: with
                           the operation's number, and without a model), the tuner has no further variant, or
                           the model says that nothing is left to gain */
    KA_EV_LLM_FAILED,   /* the question of `slot` has no answer */
    KA_EV_CHECKED,      /* check: `passed` of `total` cases, `verified`, `cost` */
    KA_EV_BUDGET,       /* tokens, money or seconds are used up: finish with the best there is */
    KA_EV_SANDBOX,
    KA_EV_INTERNAL,
    KA_EV_CANCEL, /* needs no operation number */
};

struct ka_event {
    enum ka_event_type type;
    uint64_t op;      /* of CANDIDATE to LLM_FAILED: the slot's */
    int slot;         /* of the same */
    int64_t snapshot; /* KA_EV_CANDIDATE */
    bool another;     /* the same and CHECKED, of the differentiator: it has one more, should this one fail */
    int passed, total;
    bool verified;
    double
        cost; /* lower is better: milliseconds on a GPU, else modelled bytes; compared within a run alone */
};

enum ka_command_type {
    KA_CMD_NONE,
    KA_CMD_INSPECT,
    KA_CMD_PREFLIGHT,
    KA_CMD_RETRIEVE,
    KA_CMD_DIFFERENTIATE, /* a draft without the model */
    KA_CMD_ASK,           /* the model, each open slot, in `phase`, going on from `snapshot` (0: nothing) */
    KA_CMD_AWAIT,         /* the same, and they are on their way, unless they went with an earlier process */
    KA_CMD_TUNE,          /* the next variant that needs no model */
    KA_CMD_CHECK,         /* `snapshot` */
    KA_CMD_FINISH,        /* write the results of a run that has ended */
};

struct ka_command {
    enum ka_command_type type;
    enum ka_job_phase phase;
    uint64_t op;
    int64_t snapshot;
};

struct ka_job_limits {
    int max_iters;       /* questions to the model over the whole run */
    int patience_parity; /* attempts below the best before a roll-back */
    int patience_perf;   /* optimise turns without gain before the end */
    int candidates;      /* per turn, at most KA_JOB_SLOTS */
    int max_bad_answers; /* times in a row that no answer was usable */
    double min_rel_impr; /* relative gain that counts */
    bool use_llm;
    bool use_differentiator;
    bool optimise; /* false: done as soon as a candidate is verified */
};

#define KA_JOB_SLOTS 32

enum ka_slot_state {
    KA_SLOT_OPEN,       /* asked; the answer is still to come */
    KA_SLOT_WAITS,      /* `snapshot` is to be checked, or is under check */
    KA_SLOT_JUDGED,     /* it was */
    KA_SLOT_UNUSABLE,   /* the answer */
    KA_SLOT_NOTHING,    /* left to gain, or to offer */
    KA_SLOT_UNANSWERED, /* the endpoint failed, or a budget was used up */
};

struct ka_job_slot {
    enum ka_slot_state state;
    uint64_t op;  /* its answer's event carries it */
    int question; /* the how manieth of the run, from 1; 0: not the model's */
    int64_t snapshot;
    int passed;
    bool verified;
    double cost;
};

struct ka_job {
    struct ka_job_limits limits;
    enum ka_job_state state;
    enum ka_job_phase phase;
    enum ka_job_reason reason;
    uint64_t op;     /* the operation in flight */
    int64_t current; /* snapshot the next turn starts from; 0: none */
    int checking;    /* slot under check */
    int64_t best;    /* best so far; 0: none */
    int best_passed;
    bool best_verified;
    double best_cost;
    struct ka_job_slot slots[KA_JOB_SLOTS]; /* of this turn */
    int slot_count;
    int turn;        /* number of it */
    int turn_source; /* 0 the model, 1 the differentiator or tuner */
    int iters;       /* questions asked */
    int attempts;    /* candidates checked */
    int below_best;  /* attempts in a row below the best */
    int no_gain;     /* optimise turns in a row without gain */
    int bad_answers; /* times in a row that no answer was usable */
    int rollbacks;
    bool tuner_done;
    bool another; /* the differentiator has one more draft */
};

/* Sensible defaults for the limits; the job is queued. */
void ka_job_init(struct ka_job *job, const struct ka_job_limits *limits);

/* Take the event. 0 with the command to execute next (perhaps KA_CMD_NONE), or -ESTALE for an event of
 * another operation or a job that has ended, or -EINVAL for an event that the state does not know: the job is
 * then unchanged. */
int ka_job_step(struct ka_job *job, const struct ka_event *event, struct ka_command *command);

/* After a restart: the command of the state the job is in, under a new operation number. */
void ka_job_resume(struct ka_job *job, struct ka_command *command);

/* The relative gain that a candidate of this turn must bring to replace the best: min_rel_impr, or half of it
 * where a tuner made it, which changes the backward alone. */
double ka_job_least_gain(const struct ka_job *job);

/* Is the turn the repair of a move that was to make a verified candidate faster? */
bool ka_job_repairs(const struct ka_job *job);

bool ka_job_ended(const struct ka_job *job);
bool ka_job_is_open(const struct ka_job *job, int slot); /* the model is asked, and has not answered */
int ka_job_exit_code(const struct ka_job *job); /* exit codes of the program; only for an ended job */

const char *ka_job_state_name(enum ka_job_state state);
const char *ka_job_phase_name(enum ka_job_phase phase);

/* All of the job as JSON and back. -EINVAL with a message for a document that is no job. */
json_t *ka_job_to_json(const struct ka_job *job);
int ka_job_from_json(const json_t *doc, struct ka_job *job, struct ka_err *err);

#endif
