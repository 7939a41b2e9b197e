/* Candidates without a model: the differentiator's draft, and then its other schedules as the tuner's menu. */
#include "internal.h"

#include <stdlib.h>
#include <string.h>

#include "core/plan.h"
#include "log.h"

/* The differentiator traces one call of the stub: on the smallest required shape. */
static json_t *trace_case(const struct ka_run *run)
{
    json_t *smallest = NULL, *shape;
    size_t i;
    json_array_foreach(run->shapes, i, shape)
    {
        json_t *dims = json_object_get(shape, "dims");
        if (strcmp(json_string_value(json_object_get(shape, "class")), "required") == 0 &&
            (!smallest || ka_plan_size(dims) < ka_plan_size(smallest)))
            smallest = dims;
    }
    return json_pack("{s:O, s:i}", "dims", smallest, "seed", 0);
}

static void ask_differentiator(struct ka_run *run, const char *schedule, ka_run_op_fn done)
{
    json_t *extra = json_pack("{s:o, s:s?, s:n}", "case", trace_case(run), "schedule", schedule, "config");
    ka_run_op(run, "differentiate", run->work_forward, extra, done);
}

static void log_refusals(const struct ka_run *run, const json_t *doc)
{
    size_t i;
    json_t *refusal;
    json_array_foreach(json_object_get(doc, "refusals"), i, refusal)
    {
        const char *message = json_string_value(json_object_get(refusal, "message"));
        ka_log(KA_LOG_INFO, "%s: the differentiator refuses line %lld: %s", run->name,
               (long long)json_integer_value(json_object_get(refusal, "line")), message ? message : "?");
    }
}

static void on_draft(struct ka_run *run, const struct ka_op_result *result)
{
    if (result->status == KA_OP_SANDBOX) {
        ka_run_op_failed(run, result);
        return;
    }
    const char *backward = json_string_value(json_object_get(result->doc, "backward"));
    json_decref(run->draft);
    run->draft = result->doc ? json_deep_copy(result->doc) : NULL;
    if (run->draft)
        ka_run_put(run, "draft", run->draft);
    if (strcmp(run->app->opts->draft, "llm") == 0) { /* only its mathematics is wanted: the prompt has it */
        log_refusals(run, result->doc);
        ka_run_post_type(run, KA_EV_NO_CANDIDATE);
        return;
    }
    if (result->status == KA_OP_OK && backward) {
        ka_run_post_candidate(run, backward, "differentiator", "draft of the built-in differentiator");
        return;
    }
    ka_log(KA_LOG_INFO, "%s: no draft from the differentiator: %s", run->name, result->message);
    log_refusals(run, result->doc);
    json_decref(run->failure);
    json_t *error = json_object_get(result->doc, "error");
    run->failure = json_is_object(error)
                       ? json_deep_copy(error)
                       : json_pack("{s:s, s:s}", "kind", "unsupported_op", "message", result->message);
    ka_run_put(run, "failure", run->failure);
    ka_run_post_type(run, KA_EV_NO_CANDIDATE);
}

void ka_run_differentiate(struct ka_run *run)
{
    if (run->given) {
        ka_run_post_candidate(run, run->given, "file", "the backward in the file");
        return;
    }
    ka_log_progress(run->name, "draft: differentiator");
    ask_differentiator(run, NULL, on_draft);
}

/* ---- tuner */

/* Schedules tried so far, kept in the state so that a resumed run goes on with the next. */
static json_t *tried_schedules(struct ka_run *run)
{
    json_t *tried = ka_state_get(run->state, "tried_schedules");
    return json_is_array(tried) ? tried : json_array();
}

static const char *next_schedule(struct ka_run *run, const json_t *tried)
{
    size_t i, k;
    json_t *name, *old;
    json_array_foreach(json_object_get(json_object_get(run->draft, "report"), "alternatives"), i, name)
    {
        bool seen = !json_is_string(name);
        json_array_foreach((json_t *)tried, k, old) seen = seen || json_equal(old, name);
        if (!seen)
            return json_string_value(name);
    }
    return NULL;
}

static void on_variant(struct ka_run *run, const struct ka_op_result *result)
{
    const char *backward = json_string_value(json_object_get(result->doc, "backward"));
    const char *schedule =
        json_string_value(json_object_get(json_object_get(result->doc, "report"), "schedule"));
    if (result->status == KA_OP_OK && backward &&
        strcmp(backward, json_string_value(json_object_get(run->draft, "backward"))) != 0) {
        char note[128];
        snprintf(note, sizeof(note), "schedule: %.80s", schedule ? schedule : "?");
        ka_run_post_candidate(run, backward, "tuner", note);
        return;
    }
    if (result->status != KA_OP_OK)
        ka_log(KA_LOG_INFO, "%s: a schedule could not be built: %s", run->name, result->message);
    ka_run_tune(run, 0);
}

void ka_run_tune(struct ka_run *run, int64_t snapshot)
{
    (void)snapshot; /* variants come from the forward, not from the candidate */
    json_t *tried = tried_schedules(run);
    const char *schedule = next_schedule(run, tried);
    if (!schedule) {
        json_decref(tried);
        ka_run_post_type(run, KA_EV_NO_CANDIDATE);
        return;
    }
    char name[64];
    snprintf(name, sizeof(name), "%.60s", schedule);
    json_array_append_new(tried, json_string(name));
    ka_run_put(run, "tried_schedules", tried);
    json_decref(tried);
    ka_log_progress(run->name, "optimise: schedule %s", name);
    ask_differentiator(run, name, on_variant);
}
