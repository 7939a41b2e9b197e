/* Any JSON as a saved job: refused with a message, or a job that can be written, named, resumed and stepped
 * on. */
#include <stdlib.h>

#include "agent/core/job.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void step_on(struct ka_job *job)
{
    static const enum ka_event_type events[] = {KA_EV_OK, KA_EV_CANDIDATE, KA_EV_CHECKED, KA_EV_BAD_ANSWER,
                                                KA_EV_CANCEL};
    struct ka_command command;
    ka_job_resume(job, &command);
    for (size_t i = 0; i < KA_COUNT(events); i++) {
        struct ka_event event = {
            .type = events[i], .op = job->op, .snapshot = 1, .passed = 1, .total = 2, .cost = 1};
        ka_job_step(job, &event, &command);
    }
    if (!ka_job_ended(job))
        return;
    int code = ka_job_exit_code(job);
    if (code < 0 || code > 255)
        abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct ka_job job, again;
    struct ka_err err = {{0}};
    json_t *doc = json_loadb((const char *)data, size, JSON_DECODE_ANY, NULL);
    if (!doc)
        return 0;
    int rc = ka_job_from_json(doc, &job, &err);
    json_decref(doc);
    if (rc) {
        if (!err.msg[0])
            abort();
        return 0;
    }
    if (!*ka_job_state_name(job.state) || !*ka_job_phase_name(job.phase))
        abort();
    doc = ka_job_to_json(&job);
    if (!doc || ka_job_from_json(doc, &again, &err))
        abort();
    json_decref(doc);
    step_on(&job);
    return 0;
}
