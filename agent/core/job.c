/* The run's state machine: one function a state, one setter for the state. Pure; see job.h for the words.
 *
 * Design. A turn has a slot for each candidate; each is checked when it comes, and the turn is judged when
 * all slots are settled. Answers that are no use cost their slot; if no slot has a candidate, all are asked
 * again. In draft and fix, "better" is more cases passed; a verified turn moves on to
 * optimise. In optimise, a turn is kept only if it is verified and cheaper by `min_rel_impr`; a model's move
 * that is not verified has one fix turn, its repair; otherwise the run rolls back to its best snapshot. */
#include "job.h"

#include <errno.h>
#include <math.h>
#include <string.h>

#define TUNER_SHARE 0.5 /* of min_rel_impr: what a tuner changes is about half of what is timed */

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

static const char *const slot_names[] = {
    [KA_SLOT_OPEN] = "open",         [KA_SLOT_WAITS] = "waits",     [KA_SLOT_JUDGED] = "judged",
    [KA_SLOT_UNUSABLE] = "unusable", [KA_SLOT_NOTHING] = "nothing", [KA_SLOT_UNANSWERED] = "unanswered",
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
}

bool ka_job_ended(const struct ka_job *job)
{
    return job->state == KA_JOB_DONE || job->state == KA_JOB_FAILED || job->state == KA_JOB_CANCELLED;
}

bool ka_job_is_open(const struct ka_job *job, int slot)
{
    return !ka_job_ended(job) && job->turn_source == 0 && slot < job->slot_count &&
           job->slots[slot].state == KA_SLOT_OPEN;
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
        command->snapshot = job->slots[job->checking].snapshot;
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

/* Ask for `wanted` candidates, as far as there are questions left. */
static void ask(struct ka_job *job, int wanted, struct ka_command *command)
{
    bool model = job->turn_source == 0;
    int64_t left = (int64_t)job->limits.max_iters - job->iters;
    enum ka_command_type type = KA_CMD_ASK;
    if (model && left <= 0) {
        conclude(job, KA_REASON_NOT_VERIFIED, command);
        return;
    }
    if (!model)
        type = job->phase == KA_PHASE_OPTIMISE ? KA_CMD_TUNE : KA_CMD_DIFFERENTIATE;
    enter(job, phase_states[job->phase], type, command);
    job->slot_count = model && wanted > left ? (int)left : wanted;
    job->checking = 0;
    for (int i = 0; i < job->slot_count; i++)
        job->slots[i] =
            (struct ka_job_slot){.op = job->op, .question = model ? ++job->iters : 0, .cost = INFINITY};
}

static void begin_turn(struct ka_job *job, enum ka_job_phase phase, int source, struct ka_command *command)
{
    int wanted = source == 0 ? job->limits.candidates : 1;
    job->phase = phase;
    job->turn_source = source;
    job->turn++;
    ask(job, wanted < 1 ? 1 : wanted > KA_JOB_SLOTS ? KA_JOB_SLOTS : wanted, command);
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

/* The best candidate of the turn, of equals that of the first slot; NULL: there is none. */
static const struct ka_job_slot *best_of_turn(const struct ka_job *job)
{
    const struct ka_job_slot *best = NULL;
    for (int i = 0; i < job->slot_count; i++) {
        const struct ka_job_slot *slot = &job->slots[i];
        if (slot->state == KA_SLOT_JUDGED && (!best || better(slot->verified, slot->passed, slot->cost,
                                                              best->verified, best->passed, best->cost)))
            best = slot;
    }
    return best;
}

static void take_as_best(struct ka_job *job, const struct ka_job_slot *slot)
{
    job->best = slot->snapshot;
    job->best_passed = slot->passed;
    job->best_verified = slot->verified;
    job->best_cost = slot->cost;
}

static void roll_back(struct ka_job *job)
{
    if (job->current != job->best)
        job->rollbacks++;
    job->current = job->best;
    job->below_best = 0;
}

/* All candidates of a draft or fix turn are checked. */
static void judge_parity(struct ka_job *job, const struct ka_job_slot *found, struct ka_command *command)
{
    job->current = found->snapshot;
    if (better(found->verified, found->passed, 0, job->best_verified, job->best_passed, 0) || !job->best) {
        take_as_best(job, found);
        job->below_best = 0;
    } else if (found->passed < job->best_passed && job->turn_source == 1) {
        roll_back(job);
    } else if (found->passed < job->best_passed) {
        job->below_best++;
        if (job->below_best >= job->limits.patience_parity)
            roll_back(job);
    } else {
        take_as_best(job, found); /* as good, and newer */
        job->below_best = 0;
    }
    if (job->best_verified)
        optimise_turn(job, command);
    else if (job->another)
        begin_turn(job, KA_PHASE_DRAFT, 1, command);
    else
        model_turn(job, KA_PHASE_FIX, command);
}

double ka_job_least_gain(const struct ka_job *job)
{
    return job->limits.min_rel_impr * (job->turn_source == 1 ? TUNER_SHARE : 1);
}

bool ka_job_repairs(const struct ka_job *job)
{
    return job->phase == KA_PHASE_FIX && job->best_verified;
}

/* All candidates of an optimise turn, or of the repair after one, are checked. */
static void judge_speed(struct ka_job *job, const struct ka_job_slot *found, struct ka_command *command)
{
    bool gain = found->verified && found->cost < job->best_cost * (1.0 - ka_job_least_gain(job));
    job->current = found->snapshot;
    if (gain) {
        take_as_best(job, found);
        job->no_gain = 0;
    } else if (!found->verified && job->phase == KA_PHASE_OPTIMISE && job->turn_source == 0) {
        model_turn(job, KA_PHASE_FIX, command);
        return;
    } else {
        roll_back(job);
        if (job->turn_source == 0)
            job->no_gain++;
    }
    optimise_turn(job, command);
}

/* The first slot in that state; -1: none is. */
static int find_slot(const struct ka_job *job, enum ka_slot_state state)
{
    for (int i = 0; i < job->slot_count; i++)
        if (job->slots[i].state == state)
            return i;
    return -1;
}

/* No slot has a candidate. */
static void without_candidate(struct ka_job *job, struct ka_command *command)
{
    if (job->turn_source == 1) {
        bool drafted = job->phase != KA_PHASE_OPTIMISE;
        job->tuner_done = !drafted || (job->limits.use_llm && !job->best);
        if (!drafted)
            optimise_turn(job, command);
        else if (job->best)
            model_turn(job, KA_PHASE_FIX, command);
        else if (job->limits.use_llm)
            model_turn(job, KA_PHASE_DRAFT, command);
        else
            fail(job, KA_REASON_REFUSED_DRAFT, command);
    } else if (find_slot(job, KA_SLOT_NOTHING) >= 0) {
        conclude(job, KA_REASON_NOT_VERIFIED, command);
    } else if (find_slot(job, KA_SLOT_UNANSWERED) >= 0) {
        conclude(job, KA_REASON_LLM, command);
    } else if (++job->bad_answers >= job->limits.max_bad_answers) {
        conclude(job, KA_REASON_NOT_VERIFIED, command);
    } else {
        ask(job, job->slot_count, command);
    }
}

static void end_of_turn(struct ka_job *job, struct ka_command *command)
{
    const struct ka_job_slot *best = best_of_turn(job);
    if (!best) {
        without_candidate(job, command);
        return;
    }
    const struct ka_job_slot found = *best; /* the next turn takes the slots */
    job->bad_answers = 0;
    if (job->phase == KA_PHASE_OPTIMISE || ka_job_repairs(job))
        judge_speed(job, &found, command);
    else
        judge_parity(job, &found, command);
}

/* Nothing is under check: check what waits, await what is open, or judge the turn. */
static void go_on(struct ka_job *job, struct ka_command *command)
{
    int waits = find_slot(job, KA_SLOT_WAITS);
    if (waits >= 0) {
        job->checking = waits;
        enter(job, KA_JOB_CHECK, KA_CMD_CHECK, command);
    } else if (find_slot(job, KA_SLOT_OPEN) >= 0) {
        enter(job, phase_states[job->phase], KA_CMD_AWAIT, command);
    } else {
        end_of_turn(job, command);
    }
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

/* The draft was begun during preflight: where it is refused and nobody else writes one, the rest is for
 * nothing. */
static int on_refused_ahead(struct ka_job *job, const struct ka_event *event, struct ka_command *command)
{
    if (event->op != job->op)
        return -ESTALE;
    if (job->limits.use_llm || !job->limits.use_differentiator)
        return -EINVAL;
    fail(job, KA_REASON_REFUSED_DRAFT, command);
    return 0;
}

/* What comes of one slot, while others are open or checked. */
static int on_answer(struct ka_job *job, const struct ka_event *event, struct ka_command *command)
{
    static const enum ka_slot_state becomes[] = {
        [KA_EV_CANDIDATE] = KA_SLOT_WAITS,
        [KA_EV_BAD_ANSWER] = KA_SLOT_UNUSABLE,
        [KA_EV_NO_CANDIDATE] = KA_SLOT_NOTHING,
        [KA_EV_LLM_FAILED] = KA_SLOT_UNANSWERED,
    };
    if (job->state == KA_JOB_PREFLIGHT && event->type == KA_EV_NO_CANDIDATE)
        return on_refused_ahead(job, event, command);
    if (job->state < KA_JOB_DRAFT)
        return -EINVAL;
    if (event->slot < 0 || event->slot >= job->slot_count)
        return -ESTALE;
    struct ka_job_slot *slot = &job->slots[event->slot];
    if (slot->state != KA_SLOT_OPEN || slot->op != event->op)
        return -ESTALE;
    slot->state = becomes[event->type];
    slot->snapshot = event->type == KA_EV_CANDIDATE ? event->snapshot : 0;
    job->another = event->type == KA_EV_CANDIDATE && event->another;
    if (job->state == KA_JOB_CHECK)
        *command = (struct ka_command){.type = KA_CMD_NONE, .phase = job->phase, .op = job->op};
    else
        go_on(job, command);
    return 0;
}

static int on_check(struct ka_job *job, const struct ka_event *event, struct ka_command *command)
{
    if (event->type != KA_EV_CHECKED)
        return -EINVAL;
    struct ka_job_slot *slot = &job->slots[job->checking];
    job->attempts++;
    slot->state = KA_SLOT_JUDGED;
    slot->passed = event->passed;
    slot->verified = event->verified;
    slot->cost = event->cost;
    job->another = job->another || event->another;
    go_on(job, command);
    return 0;
}

/* Questions that no budget covers are not asked: the turn is judged by what it has. */
static void on_budget(struct ka_job *job, struct ka_command *command)
{
    for (int i = 0; i < job->slot_count; i++)
        if (ka_job_is_open(job, i))
            job->slots[i].state = KA_SLOT_UNANSWERED;
    if (job->turn_source == 0 && job->state != KA_JOB_CHECK && best_of_turn(job))
        end_of_turn(job, command);
    else
        conclude(job, KA_REASON_NOT_VERIFIED, command);
}

static int on_ending(struct ka_job *job, const struct ka_event *event, struct ka_command *command)
{
    if (event->type == KA_EV_BUDGET)
        on_budget(job, command);
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

/* Draft, fix and optimise wait for answers alone. */
static state_fn *const on_state[] = {
    [KA_JOB_QUEUED] = on_queued,     [KA_JOB_INSPECT] = on_looked_at, [KA_JOB_PREFLIGHT] = on_looked_at,
    [KA_JOB_RETRIEVE] = on_retrieve, [KA_JOB_CHECK] = on_check,       [KA_JOB_CANCELLED] = NULL,
};

int ka_job_step(struct ka_job *job, const struct ka_event *event, struct ka_command *command)
{
    if (ka_job_ended(job))
        return -ESTALE;
    if (event->type >= KA_EV_CANDIDATE && event->type <= KA_EV_LLM_FAILED)
        return on_answer(job, event, command);
    if (event->type != KA_EV_CANCEL && event->type != KA_EV_START && event->op != job->op)
        return -ESTALE;
    if (event->type >= KA_EV_BUDGET)
        return on_ending(job, event, command);
    return on_state[job->state] ? on_state[job->state](job, event, command) : -EINVAL;
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
    for (int i = 0; i < job->slot_count; i++) /* an answer to an earlier process comes late */
        job->slots[i].op = job->op;
}

/* Plain members as JSON: integers and booleans by table, so that none is forgotten in one direction. */
/* clang-format off */
#define JOB_INTS(X) \
    X(limits.max_iters) X(limits.patience_parity) X(limits.patience_perf) X(limits.candidates) \
    X(limits.max_bad_answers) X(op) X(current) X(checking) X(best) X(best_passed) X(turn) X(turn_source) \
    X(iters) X(attempts) X(below_best) X(no_gain) X(bad_answers) X(rollbacks)
#define JOB_BOOLS(X) \
    X(limits.use_llm) X(limits.use_differentiator) X(limits.optimise) X(best_verified) X(tuner_done) \
    X(another)
/* clang-format on */
#define JOB_REALS(X) X(limits.min_rel_impr) X(best_cost)
#define SLOT_INTS(X) X(op) X(question) X(snapshot) X(passed)
#define SLOT_BOOLS(X) X(verified)
#define SLOT_REALS(X) X(cost)

#define PUT_INT(name) json_object_set_new(doc, #name, json_integer((json_int_t)from->name));
#define PUT_BOOL(name) json_object_set_new(doc, #name, json_boolean(from->name));
#define PUT_REAL(name) /* null: no cost known */                                                             \
    json_object_set_new(doc, #name, isfinite(from->name) ? json_real(from->name) : json_null());

static json_t *slot_to_json(const struct ka_job_slot *from)
{
    json_t *doc = json_pack("{s:s}", "state", slot_names[from->state]);
    SLOT_INTS(PUT_INT)
    SLOT_BOOLS(PUT_BOOL)
    SLOT_REALS(PUT_REAL)
    return doc;
}

json_t *ka_job_to_json(const struct ka_job *from)
{
    json_t *doc = json_pack("{s:s, s:s, s:s}", "state", state_names[from->state], "phase",
                            phase_names[from->phase], "reason", reason_names[from->reason]);
    json_t *slots = json_array();
    JOB_INTS(PUT_INT)
    JOB_BOOLS(PUT_BOOL)
    JOB_REALS(PUT_REAL)
    for (int i = 0; i < from->slot_count; i++)
        json_array_append_new(slots, slot_to_json(&from->slots[i]));
    json_object_set_new(doc, "slots", slots);
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

static int slot_from_json(const json_t *doc, struct ka_job_slot *slot, struct ka_err *err)
{
    struct ka_job_slot read = {0};
    const json_t *value;
    int state;
    if (find_name(doc, "state", slot_names, KA_COUNT(slot_names), &state))
        return ka_fail(err, -EINVAL, "saved job: unknown state of a slot");
    read.state = (enum ka_slot_state)state;
    SLOT_INTS(GET_INT)
    SLOT_BOOLS(GET_BOOL)
    SLOT_REALS(GET_REAL)
    *slot = read;
    return 0;
}

static int slots_from_json(const json_t *list, struct ka_job *job, struct ka_err *err)
{
    size_t count = json_array_size(list);
    if (!json_is_array(list) || count > KA_JOB_SLOTS)
        return ka_fail(err, -EINVAL, "saved job: 'slots' is no list of at most %d", KA_JOB_SLOTS);
    if (job->checking < 0 || (job->checking && (size_t)job->checking >= count) ||
        (job->state == KA_JOB_CHECK && !count))
        return ka_fail(err, -EINVAL, "saved job: slot %d is checked, of %zu", job->checking, count);
    job->slot_count = (int)count;
    for (size_t i = 0; i < count; i++) {
        int rc = slot_from_json(json_array_get(list, i), &job->slots[i], err);
        if (rc)
            return rc;
    }
    return 0;
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
    JOB_INTS(GET_INT)
    JOB_BOOLS(GET_BOOL)
    JOB_REALS(GET_REAL)
    int rc = slots_from_json(json_object_get(doc, "slots"), &read, err);
    if (rc == 0)
        *job = read;
    return rc;
}
