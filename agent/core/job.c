/* The run's state machine: one function a state, one setter for the state. Pure; see job.h for the words.
 *
 * Design. A turn collects up to `candidates` candidates; each is checked when it comes; the turn is judged
 * when its last one is. In draft and fix, "better" is more cases passed; a verified turn moves on to
 * optimise. In optimise, a turn is kept only if it is verified and cheaper by `min_rel_impr`; otherwise the
 * run rolls back to its best snapshot. */
#include "job.h"

#include <errno.h>
#include <math.h>
#include <string.h>

static const char *const state_names[] = {
    [KA_JOB_QUEUED] = "queued",     [KA_JOB_INSPECT] = "inspect",     [KA_JOB_PREFLIGHT] = "preflight",
    [KA_JOB_RETRIEVE] = "retrieve", [KA_JOB_DRAFT] = "draft",         [KA_JOB_CHECK] = "check",
    [KA_JOB_FIX] = "fix",           [KA_JOB_OPTIMISE] = "optimise",   [KA_JOB_DONE] = "done",
    [KA_JOB_FAILED] = "failed",     [KA_JOB_CANCELLED] = "cancelled",
};
static const char *const phase_names[] = {"draft", "fix", "optimise"};
static const enum ka_job_state phase_states[] = {KA_JOB_DRAFT, KA_JOB_FIX, KA_JOB_OPTIMISE};
static const char *const reason_names[] = {
    [KA_REASON_NONE] = "none",
    [KA_REASON_UNUSABLE] = "unusable",
    [KA_REASON_NOT_VERIFIED] = "not_verified",
    [KA_REASON_REFUSED_DRAFT] = "refused_draft",
    [KA_REASON_LLM] = "llm",
    [KA_REASON_SANDBOX] = "sandbox",
    [KA_REASON_INTERNAL] = "internal",
};

static const int reason_codes[] = {
    [KA_REASON_NONE] = 1,          [KA_REASON_UNUSABLE] = 3, [KA_REASON_NOT_VERIFIED] = 4,
    [KA_REASON_REFUSED_DRAFT] = 4, [KA_REASON_LLM] = 5,      [KA_REASON_SANDBOX] = 6,
    [KA_REASON_INTERNAL] = 1};

const char *ka_job_state_name(enum ka_job_state state)
{
    return state_names[state];
}

const char *ka_job_phase_name(enum ka_job_phase phase)
{
    return phase_names[phase];
}

void ka_job_init(struct ka_job *job, const struct ka_job_limits *limits)
{
    memset(job, 0, sizeof(*job));
    job->limits = *limits;
    job->best_cost = INFINITY;
    job->turn_cost = INFINITY;
}

bool ka_job_ended(const struct ka_job *job)
{
    return job->state == KA_JOB_DONE || job->state == KA_JOB_FAILED || job->state == KA_JOB_CANCELLED;
}

int ka_job_exit_code(const struct ka_job *job)
{
    if (job->state == KA_JOB_DONE)
        return 0;
    if (job->state == KA_JOB_CANCELLED)
        return 130;
    return reason_codes[job->reason];
}

/* The one place where the state changes. Every entry gets a fresh operation number. */
static void enter(struct ka_job *job, enum ka_job_state state, enum ka_command_type type,
                  struct ka_command *command)
{
    job->state = state;
    job->op++;
    *command = (struct ka_command){.type = type, .phase = job->phase, .op = job->op};
    if (type == KA_CMD_CHECK)
        command->snapshot = job->checking;
    else if (type == KA_CMD_FINISH)
        command->snapshot = job->best;
    else
        command->snapshot = job->current;
}

static void fail(struct ka_job *job, enum ka_job_reason reason, struct ka_command *command)
{
    job->reason = reason;
    enter(job, KA_JOB_FAILED, KA_CMD_FINISH, command);
}

/* Nothing further can or may be tried: the best there is decides how the run ends. */
static void conclude(struct ka_job *job, enum ka_job_reason reason, struct ka_command *command)
{
    if (job->best_verified)
        enter(job, KA_JOB_DONE, KA_CMD_FINISH, command);
    else
        fail(job, reason, command);
}

/* Ask for one more candidate of the turn that is under way. */
static void ask_again(struct ka_job *job, struct ka_command *command)
{
    if (job->turn_source == 0 && job->iters >= job->limits.max_iters) {
        conclude(job, KA_REASON_NOT_VERIFIED, command);
        return;
    }
    enum ka_command_type type = KA_CMD_ASK;
    if (job->turn_source == 1)
        type = job->phase == KA_PHASE_OPTIMISE ? KA_CMD_TUNE : KA_CMD_DIFFERENTIATE;
    else
        job->iters++;
    enter(job, phase_states[job->phase], type, command);
}

static void begin_turn(struct ka_job *job, enum ka_job_phase phase, int source, struct ka_command *command)
{
    job->phase = phase;
    job->turn_source = source;
    job->turn_left = source == 0 ? job->limits.candidates : 1;
    if (job->turn_left < 1)
        job->turn_left = 1;
    job->turn_best = 0;
    job->turn_passed = 0;
    job->turn_verified = false;
    job->turn_cost = INFINITY;
    ask_again(job, command);
}

/* A turn of the phase by the model, or the end if there is none. */
static void model_turn(struct ka_job *job, enum ka_job_phase phase, struct ka_command *command)
{
    if (job->limits.use_llm)
        begin_turn(job, phase, 0, command);
    else
        conclude(job, KA_REASON_NOT_VERIFIED, command);
}

static void optimise_turn(struct ka_job *job, struct ka_command *command)
{
    if (!job->limits.optimise)
        conclude(job, KA_REASON_NOT_VERIFIED, command);
    else if (!job->tuner_done)
        begin_turn(job, KA_PHASE_OPTIMISE, 1, command);
    else if (job->no_gain >= job->limits.patience_perf)
        conclude(job, KA_REASON_NOT_VERIFIED, command);
    else
        model_turn(job, KA_PHASE_OPTIMISE, command);
}

static bool better(bool verified, int passed, double cost, bool than_verified, int than_passed,
                   double than_cost)
{
    if (verified != than_verified)
        return verified;
    if (passed != than_passed)
        return passed > than_passed;
    return cost < than_cost;
}

static void take_turn_as_best(struct ka_job *job)
{
    job->best = job->turn_best;
    job->best_passed = job->turn_passed;
    job->best_verified = job->turn_verified;
    job->best_cost = job->turn_cost;
}

static void roll_back(struct ka_job *job)
{
    if (job->current != job->best)
        job->rollbacks++;
    job->current = job->best;
    job->below_best = 0;
}

/* All candidates of a draft or fix turn are checked. */
static void judge_parity(struct ka_job *job, struct ka_command *command)
{
    job->current = job->turn_best;
    if (better(job->turn_verified, job->turn_passed, 0, job->best_verified, job->best_passed, 0) ||
        !job->best) {
        take_turn_as_best(job);
        job->below_best = 0;
    } else if (job->turn_passed < job->best_passed) {
        job->below_best++;
        if (job->below_best >= job->limits.patience_parity)
            roll_back(job);
    } else {
        take_turn_as_best(job); /* as good, and newer */
        job->below_best = 0;
    }
    if (job->best_verified)
        optimise_turn(job, command);
    else
        model_turn(job, KA_PHASE_FIX, command);
}

/* All candidates of an optimise turn are checked. */
static void judge_speed(struct ka_job *job, struct ka_command *command)
{
    bool gain = job->turn_verified && job->turn_cost < job->best_cost * (1.0 - job->limits.min_rel_impr);
    job->current = job->turn_best ? job->turn_best : job->best;
    if (gain) {
        take_turn_as_best(job);
        job->no_gain = 0;
    } else {
        roll_back(job);
        if (job->turn_source == 0)
            job->no_gain++;
    }
    optimise_turn(job, command);
}

static void end_of_turn(struct ka_job *job, struct ka_command *command)
{
    if (job->phase == KA_PHASE_OPTIMISE)
        judge_speed(job, command);
    else
        judge_parity(job, command);
}

static int on_queued(struct ka_job *job, const struct ka_event *event, struct ka_command *command)
{
    if (event->type != KA_EV_START)
        return -EINVAL;
    enter(job, KA_JOB_INSPECT, KA_CMD_INSPECT, command);
    return 0;
}

/* Inspect and preflight both find out whether the file can be used. */
static int on_looked_at(struct ka_job *job, const struct ka_event *event, struct ka_command *command)
{
    if (event->type == KA_EV_OK && job->state == KA_JOB_INSPECT)
        enter(job, KA_JOB_PREFLIGHT, KA_CMD_PREFLIGHT, command);
    else if (event->type == KA_EV_OK)
        enter(job, KA_JOB_RETRIEVE, KA_CMD_RETRIEVE, command);
    else if (event->type == KA_EV_UNUSABLE)
        fail(job, KA_REASON_UNUSABLE, command);
    else
        return -EINVAL;
    return 0;
}

static int on_retrieve(struct ka_job *job, const struct ka_event *event, struct ka_command *command)
{
    if (event->type != KA_EV_OK)
        return -EINVAL;
    if (job->limits.use_differentiator)
        begin_turn(job, KA_PHASE_DRAFT, 1, command);
    else
        model_turn(job, KA_PHASE_DRAFT, command);
    return 0;
}

/* Draft, fix and optimise wait for the same things: a candidate, or word that there is none. */
static int on_candidate_wanted(struct ka_job *job, const struct ka_event *event, struct ka_command *command)
{
    switch ((int)event->type) {
    case KA_EV_CANDIDATE:
        job->bad_answers = 0;
        job->checking = event->snapshot;
        enter(job, KA_JOB_CHECK, KA_CMD_CHECK, command);
        return 0;
    case KA_EV_BAD_ANSWER:
        if (++job->bad_answers >= job->limits.max_bad_answers)
            conclude(job, KA_REASON_NOT_VERIFIED, command);
        else
            ask_again(job, command);
        return 0;
    case KA_EV_NO_CANDIDATE:
        if (job->turn_source == 1 && job->phase == KA_PHASE_OPTIMISE) {
            job->tuner_done = true;
            optimise_turn(job, command);
        } else if (job->phase == KA_PHASE_OPTIMISE) {
            if (job->turn_best) /* another candidate of the turn */
                judge_speed(job, command);
            else
                conclude(job, KA_REASON_NOT_VERIFIED, command);
        } else if (job->limits.use_llm) {
            job->tuner_done = true;
            model_turn(job, KA_PHASE_DRAFT, command);
        } else {
            fail(job, KA_REASON_REFUSED_DRAFT, command);
        }
        return 0;
    default:
        return -EINVAL;
    }
}

static int on_check(struct ka_job *job, const struct ka_event *event, struct ka_command *command)
{
    if (event->type != KA_EV_CHECKED)
        return -EINVAL;
    job->attempts++;
    job->turn_left--;
    if (!job->turn_best || better(event->verified, event->passed, event->cost, job->turn_verified,
                                  job->turn_passed, job->turn_cost)) {
        job->turn_best = job->checking;
        job->turn_passed = event->passed;
        job->turn_verified = event->verified;
        job->turn_cost = event->cost;
    }
    job->checking = 0;
    if (job->turn_left > 0 && (job->turn_source == 1 || job->iters < job->limits.max_iters))
        ask_again(job, command);
    else
        end_of_turn(job, command);
    return 0;
}

static int on_ending(struct ka_job *job, const struct ka_event *event, struct ka_command *command)
{
    if (event->type == KA_EV_LLM_FAILED)
        conclude(job, KA_REASON_LLM, command);
    else if (event->type == KA_EV_BUDGET)
        conclude(job, KA_REASON_NOT_VERIFIED, command);
    else if (event->type == KA_EV_SANDBOX)
        fail(job, KA_REASON_SANDBOX, command);
    else if (event->type == KA_EV_INTERNAL)
        conclude(job, KA_REASON_INTERNAL, command);
    else if (event->type == KA_EV_CANCEL)
        enter(job, KA_JOB_CANCELLED, KA_CMD_FINISH, command);
    else
        return -EINVAL;
    return 0;
}

typedef int state_fn(struct ka_job *job, const struct ka_event *event, struct ka_command *command);

static state_fn *const on_state[] = {
    [KA_JOB_QUEUED] = on_queued,          [KA_JOB_INSPECT] = on_looked_at,
    [KA_JOB_PREFLIGHT] = on_looked_at,    [KA_JOB_RETRIEVE] = on_retrieve,
    [KA_JOB_DRAFT] = on_candidate_wanted, [KA_JOB_CHECK] = on_check,
    [KA_JOB_FIX] = on_candidate_wanted,   [KA_JOB_OPTIMISE] = on_candidate_wanted,
};

int ka_job_step(struct ka_job *job, const struct ka_event *event, struct ka_command *command)
{
    if (ka_job_ended(job))
        return -ESTALE;
    if (event->type != KA_EV_CANCEL && event->type != KA_EV_START && event->op != job->op)
        return -ESTALE;
    if (event->type >= KA_EV_LLM_FAILED)
        return on_ending(job, event, command);
    return on_state[job->state](job, event, command);
}

void ka_job_resume(struct ka_job *job, struct ka_command *command)
{
    static const enum ka_command_type commands[] = {
        [KA_JOB_INSPECT] = KA_CMD_INSPECT,   [KA_JOB_PREFLIGHT] = KA_CMD_PREFLIGHT,
        [KA_JOB_RETRIEVE] = KA_CMD_RETRIEVE, [KA_JOB_CHECK] = KA_CMD_CHECK,
        [KA_JOB_FIX] = KA_CMD_ASK,           [KA_JOB_DONE] = KA_CMD_FINISH,
        [KA_JOB_FAILED] = KA_CMD_FINISH,     [KA_JOB_CANCELLED] = KA_CMD_FINISH,
    };
    if (job->state == KA_JOB_QUEUED) {
        enter(job, KA_JOB_INSPECT, KA_CMD_INSPECT, command);
        return;
    }
    enum ka_command_type type = commands[job->state];
    if (job->state == KA_JOB_DRAFT)
        type = job->turn_source == 1 ? KA_CMD_DIFFERENTIATE : KA_CMD_ASK;
    else if (job->state == KA_JOB_OPTIMISE)
        type = job->turn_source == 1 ? KA_CMD_TUNE : KA_CMD_ASK;
    enter(job, job->state, type, command);
}

/* Plain members as JSON: integers and booleans by table, so that none is forgotten in one direction. */
/* clang-format off */
#define JOB_INTS(X) \
    X(limits.max_iters) X(limits.patience_parity) X(limits.patience_perf) X(limits.candidates) \
    X(limits.max_bad_answers) X(op) X(current) X(checking) X(best) X(best_passed) X(turn_best) \
    X(turn_passed) X(turn_left) X(turn_source) X(iters) X(attempts) X(below_best) X(no_gain) \
    X(bad_answers) X(rollbacks)
#define JOB_BOOLS(X) \
    X(limits.use_llm) X(limits.use_differentiator) X(limits.optimise) X(best_verified) X(turn_verified) \
    X(tuner_done)
/* clang-format on */
#define JOB_REALS(X) X(limits.min_rel_impr) X(best_cost) X(turn_cost)

json_t *ka_job_to_json(const struct ka_job *job)
{
    json_t *doc = json_object();
    json_object_set_new(doc, "state", json_string(state_names[job->state]));
    json_object_set_new(doc, "phase", json_string(phase_names[job->phase]));
    json_object_set_new(doc, "reason", json_string(reason_names[job->reason]));
#define PUT_INT(name) json_object_set_new(doc, #name, json_integer((json_int_t)job->name));
#define PUT_BOOL(name) json_object_set_new(doc, #name, json_boolean(job->name));
#define PUT_REAL(name) /* null: no cost known */                                                             \
    json_object_set_new(doc, #name, isfinite(job->name) ? json_real(job->name) : json_null());
    JOB_INTS(PUT_INT)
    JOB_BOOLS(PUT_BOOL)
    JOB_REALS(PUT_REAL)
    return doc;
}

static int find_name(const json_t *doc, const char *key, const char *const *names, size_t count, int *out)
{
    const char *text = json_string_value(json_object_get(doc, key));
    for (size_t i = 0; text && i < count; i++) {
        if (strcmp(names[i], text) == 0) {
            *out = (int)i;
            return 0;
        }
    }
    return -EINVAL;
}

int ka_job_from_json(const json_t *doc, struct ka_job *job, struct ka_err *err)
{
    struct ka_job read = {0};
    int state, phase, reason;
    if (find_name(doc, "state", state_names, KA_COUNT(state_names), &state) ||
        find_name(doc, "phase", phase_names, KA_COUNT(phase_names), &phase) ||
        find_name(doc, "reason", reason_names, KA_COUNT(reason_names), &reason))
        return ka_fail(err, -EINVAL, "saved job: unknown state, phase or reason");
    read.state = (enum ka_job_state)state;
    read.phase = (enum ka_job_phase)phase;
    read.reason = (enum ka_job_reason)reason;
    const json_t *value;
#define GET_INT(name)                                                                                        \
    value = json_object_get(doc, #name);                                                                     \
    if (!json_is_integer(value))                                                                             \
        return ka_fail(err, -EINVAL, "saved job: member '%s' is missing", #name);                            \
    read.name = (__typeof__(read.name))json_integer_value(value);
#define GET_BOOL(name)                                                                                       \
    value = json_object_get(doc, #name);                                                                     \
    if (!json_is_boolean(value))                                                                             \
        return ka_fail(err, -EINVAL, "saved job: member '%s' is missing", #name);                            \
    read.name = json_is_true(value);
#define GET_REAL(name)                                                                                       \
    value = json_object_get(doc, #name);                                                                     \
    read.name = json_is_number(value) ? json_number_value(value) : INFINITY;
    JOB_INTS(GET_INT)
    JOB_BOOLS(GET_BOOL)
    JOB_REALS(GET_REAL)
    *job = read;
    return 0;
}
