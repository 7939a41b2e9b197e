/* Events into the run's machine: saves the job whole, then has the command executed. Knows no phase. */
#include "events.h"

#include <errno.h>
#include <stdio.h>

#include "base/log.h"

double ka_run_seconds(const struct ka_run *run)
{
    return run->seconds_before + ka_clock_seconds() - run->began;
}

int ka_run_put(struct ka_run *run, const char *name, const json_t *doc)
{
    struct ka_err err;
    int rc = ka_state_put(run->state, name, doc, &err);
    if (rc)
        ka_log(KA_LOG_ERROR, "%s: %s", run->name, err.msg);
    return rc;
}

/* The whole job in one transaction, before its command runs: that is what makes a kill harmless. */
static int save(struct ka_run *run)
{
    struct ka_err err;
    json_object_set_new(run->totals, "seconds", json_real(ka_run_seconds(run)));
    int rc = ka_state_save_job(run->state, &run->job, &err);
    if (rc == 0)
        rc = ka_state_put(run->state, "totals", run->totals, &err);
    if (rc == 0)
        rc = ka_state_commit(run->state, &err);
    if (rc)
        ka_log(KA_LOG_ERROR, "%s: %s; nothing is lost up to here, make room and use --resume", run->name,
               err.msg);
    return rc;
}

static bool over_budget(const struct ka_run *run)
{
    const struct ka_settings *settings = &run->settings;
    double in = (double)json_integer_value(json_object_get(run->totals, "tokens_in"));
    double out = (double)json_integer_value(json_object_get(run->totals, "tokens_out"));
    double cost = (in * settings->price_in + out * settings->price_out) / 1e6;
    return (settings->max_seconds && ka_run_seconds(run) > settings->max_seconds) ||
           (settings->max_tokens && in + out > settings->max_tokens) ||
           (settings->max_cost > 0 && cost > settings->max_cost);
}

/* The machine knows no clock and no prices: a question that no budget covers is answered by KA_EV_BUDGET. */
static bool stopped_by_budget(struct ka_run *run, const struct ka_command *command)
{
    bool spends = command->type == KA_CMD_ASK || command->type == KA_CMD_TUNE;
    if (!spends || !over_budget(run))
        return false;
    ka_log(KA_LOG_WARN, "%s: a budget is used up; ending with the best so far", run->name);
    ka_run_post_type(run, KA_EV_BUDGET);
    return true;
}

static void interrupted_end(struct ka_run *run)
{
    run->finished = true;
    ka_record_add(run->record, "interrupted", NULL);
    run->done(run, false, run->arg);
}

void ka_run_post(struct ka_run *run, const struct ka_event *event)
{
    if (run->finished)
        return;
    enum ka_job_state before = run->job.state;
    struct ka_command command;
    int rc = ka_job_step(&run->job, event, &command);
    if (rc == -ESTALE) {
        ka_log(KA_LOG_DEBUG, "%s: late event dropped", run->name);
        return;
    }
    if (rc) {
        ka_log(KA_LOG_ERROR, "%s: internal: event %d does not belong in state %s", run->name,
               (int)event->type, ka_job_state_name(before));
        ka_run_post_type(run, KA_EV_INTERNAL);
        return;
    }
    if (before != run->job.state)
        ka_log(KA_LOG_DEBUG, "%s: %s -> %s", run->name, ka_job_state_name(before),
               ka_job_state_name(run->job.state));
    ka_record_add(run->record, "state",
                  json_pack("{s:s, s:s, s:s, s:I}", "from", ka_job_state_name(before), "to",
                            ka_job_state_name(run->job.state), "phase", ka_job_phase_name(run->job.phase),
                            "op", (json_int_t)run->job.op));
    if (ka_job_ended(&run->job))
        run->actions->stop_all(run);
    if (save(run) || run->interrupted) {
        interrupted_end(run);
        return;
    }
    if (!stopped_by_budget(run, &command))
        run->actions->execute(run, &command);
}

void ka_run_resume_command(struct ka_run *run, const struct ka_command *command)
{
    if (save(run))
        interrupted_end(run);
    else if (!stopped_by_budget(run, command))
        run->actions->execute(run, command);
}

void ka_run_post_type(struct ka_run *run, enum ka_event_type type)
{
    struct ka_event event = {.type = type, .op = run->job.op};
    ka_run_post(run, &event);
}

void ka_run_post_answer(struct ka_run *run, enum ka_event_type type, int slot)
{
    struct ka_event event = {.type = type, .op = run->job.slots[slot].op, .slot = slot};
    ka_run_post(run, &event);
}

void ka_run_post_candidate(struct ka_run *run, int slot, const char *backward, const char *origin,
                           const char *note, bool another)
{
    struct ka_snapshot snapshot = {
        .parent = run->job.current,
        .phase = (char *)ka_job_phase_name(run->job.phase),
        .origin = (char *)origin,
        .note = (char *)note,
        .backward = (char *)backward,
    };
    struct ka_err err;
    struct ka_event event = {
        .type = KA_EV_CANDIDATE, .op = run->job.slots[slot].op, .slot = slot, .another = another};
    if (ka_state_snapshot_add(run->state, &snapshot, &event.snapshot, &err)) {
        ka_log(KA_LOG_ERROR, "%s: %s", run->name, err.msg);
        interrupted_end(run);
        return;
    }
    ka_record_add(run->record, "candidate",
                  json_pack("{s:I, s:s, s:s, s:s, s:i}", "snapshot", (json_int_t)event.snapshot, "origin",
                            origin, "note", note, "backward", backward, "question",
                            run->job.slots[slot].question));
    ka_run_post(run, &event);
}

void ka_run_fail_doc(struct ka_run *run, enum ka_event_type type, json_t *failure)
{
    json_decref(run->failure);
    run->failure = failure;
    ka_run_put(run, "failure", failure);
    ka_record_add(run->record, "failure", json_copy(failure));
    ka_run_post_type(run, type);
}

void ka_run_fail(struct ka_run *run, enum ka_event_type type, const char *kind, const char *fmt, ...)
{
    struct ka_err err;
    va_list args;
    va_start(args, fmt);
    vsnprintf(err.msg, sizeof(err.msg), fmt, args);
    va_end(args);
    ka_run_fail_doc(run, type, json_pack("{s:s, s:s}", "kind", kind, "message", err.msg));
}

void ka_run_interrupt(struct ka_run *run)
{
    if (run->finished || run->interrupted)
        return;
    run->interrupted = true;
    run->actions->stop_all(run);
    interrupted_end(run);
}
