/* The run's life: events into the machine, the machine's commands into action. Knows no detail of any phase. */
#include "internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "expected.h"

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

static void execute(struct ka_run *run, const struct ka_command *command)
{
    switch (command->type) {
    case KA_CMD_NONE:
        return;
    case KA_CMD_INSPECT:
        ka_run_inspect(run);
        return;
    case KA_CMD_PREFLIGHT:
        ka_run_preflight(run);
        return;
    case KA_CMD_RETRIEVE:
        ka_run_retrieve(run);
        return;
    case KA_CMD_DIFFERENTIATE:
        ka_run_differentiate(run);
        return;
    case KA_CMD_ASK:
        ka_run_ask(run, command->phase, command->snapshot);
        return;
    case KA_CMD_TUNE:
        ka_run_tune(run, command->snapshot);
        return;
    case KA_CMD_CHECK:
        ka_run_check(run, command->snapshot);
        return;
    case KA_CMD_FINISH:
        ka_run_finish(run);
        return;
    }
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

/* Whatever is in flight: nobody waits for it any more. */
static void stop_all(struct ka_run *run)
{
    ka_run_preflight_free(run);
    ka_run_draft_ahead_cancel(run);
    ka_run_check_free(run);
    ka_expected_discard(run);
    ka_expected_withdraw(run);
    ka_run_op_cancel(run);
    ka_run_ask_cancel(run);
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
        stop_all(run);
    if (save(run) || run->interrupted) {
        interrupted_end(run);
        return;
    }
    if (!stopped_by_budget(run, &command))
        execute(run, &command);
}

void ka_run_resume_command(struct ka_run *run, const struct ka_command *command)
{
    if (save(run))
        interrupted_end(run);
    else if (!stopped_by_budget(run, command))
        execute(run, command);
}

void ka_run_post_type(struct ka_run *run, enum ka_event_type type)
{
    struct ka_event event = {.type = type, .op = run->job.op};
    ka_run_post(run, &event);
}

void ka_run_post_candidate(struct ka_run *run, const char *backward, const char *origin, const char *note)
{
    struct ka_snapshot snapshot = {
        .parent = run->job.current,
        .phase = (char *)ka_job_phase_name(run->job.phase),
        .origin = (char *)origin,
        .note = (char *)note,
        .backward = (char *)backward,
    };
    struct ka_err err;
    struct ka_event event = {.type = KA_EV_CANDIDATE, .op = run->job.op};
    if (ka_state_snapshot_add(run->state, &snapshot, &event.snapshot, &err)) {
        ka_log(KA_LOG_ERROR, "%s: %s", run->name, err.msg);
        interrupted_end(run);
        return;
    }
    ka_record_add(run->record, "candidate",
                  json_pack("{s:I, s:s, s:s, s:s}", "snapshot", (json_int_t)event.snapshot, "origin", origin,
                            "note", note, "backward", backward));
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
    stop_all(run);
    interrupted_end(run);
}

int ka_run_exit_code(const struct ka_run *run)
{
    if (run->waiting)
        return 75;
    if (!ka_job_ended(&run->job))
        return 130;
    return ka_job_exit_code(&run->job);
}

const char *ka_run_dir(const struct ka_run *run)
{
    return run->dir;
}

const char *ka_run_name(const struct ka_run *run)
{
    return run->name;
}

static void run_gone(void *arg)
{
    struct ka_run *run = arg;
    ka_settings_free(&run->settings);
    free(run->dir);
    free(run);
}

void ka_run_free(struct ka_run *run)
{
    if (!run)
        return;
    stop_all(run);
    ka_state_close(run->state);
    ka_record_close(run->record);
    json_t *documents[] = {run->inspect, run->shapes,    run->outputs, run->timeline,  run->skipped,
                           run->oracles, run->sanitized, run->grads,   run->retrieved, run->draft,
                           run->history, run->totals,    run->failure, run->feedback,  run->variant};
    for (size_t i = 0; i < KA_COUNT(documents); i++)
        json_decref(documents[i]);
    free(run->file);
    free(run->name);
    free(run->forward);
    free(run->work_forward);
    free(run->pair_path);
    free(run->given);
    free(run->waiting_for);
    ka_soon_cancel(run->first);
    ka_loop_soon(run->app->loop, run_gone, run); /* whoever called may still look at it */
}
