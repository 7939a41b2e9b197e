/* The draft of the built-in differentiator, also ahead of its turn. */
#include "draft.h"

#include <string.h>

#include "agent/core/fields.h"
#include "agent/core/plan.h"
#include "base/each.h"
#include "base/log.h"
#include "events.h"

/* The differentiator traces one call of the stub: on the smallest required shape. Where others launch another
 * kernel, it traces them too. */
static json_t *trace_case(const struct ka_run *run)
{
    json_t *others = json_array();
    KA_EACH(run->shapes, i, shape)
        json_array_append(others, json_object_get(shape, "dims"));
    return json_pack("{s:O, s:i, s:o}", "dims", json_object_get(ka_plan_cheapest(run->shapes), "dims"),
                     "seed", 0, "others", others);
}

/* A draft that is not verified is made once more with what this asks, where there is a reason: what it read
 * back rounded is not read back, and loops have one stage, which takes the least of the GPU; where nothing
 * was said of a shape, for others had the GPU's memory, it is the same again. NULL: there is none (new
 * reference). */
static json_t *once_more(const struct ka_run *run)
{
    bool rounded = json_is_true(json_object_get(json_object_get(run->draft, "report"), "rounded"));
    bool large = json_is_true(json_object_get(run->draft, "large"));
    bool unsaid = json_is_true(json_object_get(run->draft, "unsaid"));
    if (json_object_get(run->draft, "asked") || (!rounded && !large && !unsaid))
        return NULL;
    json_t *asked = json_object();
    if (rounded && !unsaid)
        json_object_set_new(asked, "exact", json_integer(1));
    if (large)
        json_object_set_new(asked, "num_stages", json_integer(1));
    return asked;
}

static void ask_differentiator(struct ka_run *run, json_t *schedule, json_t *config, json_t *also,
                               ka_run_op_fn done)
{
    json_auto_t *asked = json_is_object(also) ? json_deep_copy(also) : json_object();
    if (json_is_object(config))
        json_object_update(asked, config);
    ka_run_op(run, "differentiate", run->work_forward,
              json_pack("{s:o, s:O?, s:O}", "case", trace_case(run), "schedule", schedule, "config", asked),
              done);
}

void ka_run_ask_differentiator(struct ka_run *run, json_t *schedule, json_t *config, ka_run_op_fn done)
{
    ask_differentiator(run, schedule, config, json_object_get(run->draft, "asked"), done);
}

/* A reason to make the draft once more, if it is one of the differentiator's, and the first. */
static bool has_reason(struct ka_run *run, const char *reason)
{
    bool drafted = run->job.turn_source == 1 && run->job.phase == KA_PHASE_DRAFT && !run->given;
    if (!drafted || !run->draft || json_object_get(run->draft, "asked"))
        return false;
    json_object_set_new(run->draft, reason, json_true());
    ka_run_put(run, "draft", run->draft);
    return true;
}

bool ka_run_draft_is_large(struct ka_run *run)
{
    return has_reason(run, "large");
}

bool ka_run_draft_is_unsaid(struct ka_run *run)
{
    return has_reason(run, "unsaid");
}

static void log_refusals(const struct ka_run *run, const json_t *doc)
{
    KA_EACH(json_object_get(doc, "refusals"), i, refusal) {
        ka_log(KA_LOG_INFO, "%s: the differentiator refuses line %lld: %s", run->name,
               (long long)json_integer_value(json_object_get(refusal, "line")),
               ka_text_of(refusal, "message", "?"));
    }
}

static void keep_draft(struct ka_run *run, const json_t *doc)
{
    json_decref(run->draft);
    run->draft = doc ? json_deep_copy(doc) : NULL;
    if (run->draft)
        ka_run_put(run, "draft", run->draft);
}

/* There is none: why is said, and kept as what the run may end with. */
static void keep_refusal(struct ka_run *run, const struct ka_op_result *result)
{
    ka_log(KA_LOG_INFO, "%s: no draft from the differentiator: %s", run->name, result->message);
    log_refusals(run, result->doc);
    json_decref(run->failure);
    json_t *error = json_object_get(result->doc, "error");
    run->failure = json_is_object(error)
                       ? json_deep_copy(error)
                       : json_pack("{s:s, s:s}", "kind", "unsupported_op", "message", result->message);
    ka_run_put(run, "failure", run->failure);
}

static void on_draft(struct ka_run *run, const struct ka_op_result *result)
{
    if (result->status == KA_OP_SANDBOX) {
        ka_run_op_failed(run, result);
        return;
    }
    const char *backward = json_string_value(json_object_get(result->doc, "backward"));
    keep_draft(run, result->doc);
    if (strcmp(run->settings.draft, "llm") == 0) { /* only its mathematics is wanted: the prompt has it */
        log_refusals(run, result->doc);
        ka_run_post_answer(run, KA_EV_NO_CANDIDATE, 0);
        return;
    }
    if (result->status == KA_OP_OK && backward) {
        ka_run_post_candidate(
            run, 0, backward, "differentiator", "draft of the built-in differentiator",
            json_is_true(json_object_get(json_object_get(run->draft, "report"), "rounded")));
        return;
    }
    keep_refusal(run, result);
    ka_run_post_answer(run, KA_EV_NO_CANDIDATE, 0);
}

/* ---- ahead of its turn: the draft depends on the shapes only, and preflight has those long before it ends
 */

static void take_ahead(struct ka_run *run)
{
    struct ka_op_result result = run->ahead.result;
    run->ahead = (struct ka_ahead){0};
    on_draft(run, &result);
    json_decref(result.doc);
}

/* A launch that cannot be taken from where it stands: that hangs on the text, and on nothing that preflight
 * has still to find out. */
static bool refuses_launch(const struct ka_op_result *result)
{
    const json_t *first = json_array_get(json_object_get(result->doc, "refusals"), 0);
    return result->status != KA_OP_OK && ka_is_text(first, "construct", "launch");
}

static void on_ahead(struct ka_run *run, void *arg, const struct ka_op_result *result)
{
    (void)arg;
    run->ahead.child = NULL;
    run->ahead.ended = true;
    run->ahead.result = *result;
    run->ahead.result.child = NULL; /* gone when this returns */
    run->ahead.result.operation = "differentiate";
    json_incref(result->doc);
    if (run->ahead.wanted) {
        take_ahead(run);
    } else if (refuses_launch(result) && run->job.state == KA_JOB_PREFLIGHT) {
        if (run->job.limits.use_llm) {
            log_refusals(run, result->doc); /* the model is asked, when preflight is through */
            return;
        }
        keep_draft(run, result->doc);
        keep_refusal(run, result);
        ka_run_post_type(run, KA_EV_NO_CANDIDATE);
    }
}

void ka_run_draft_ahead(struct ka_run *run)
{
    struct ka_err err;
    if (run->given)
        return;
    ka_run_draft_ahead_cancel(run);
    struct ka_run_child_req req = {.operation = "differentiate",
                                   .file = run->work_forward,
                                   .extra = json_pack("{s:o}", "case", trace_case(run))};
    run->ahead.child = ka_run_child_start(run, &req, on_ahead, NULL, &err);
}

void ka_run_draft_ahead_cancel(struct ka_run *run)
{
    if (run->ahead.child)
        ka_run_child_cancel(run->ahead.child);
    json_decref(run->ahead.result.doc);
    run->ahead = (struct ka_ahead){0};
}

static void on_once_more(struct ka_run *run, const struct ka_op_result *result)
{
    const char *backward = json_string_value(json_object_get(result->doc, "backward"));
    json_auto_t *asked = once_more(run);
    if (result->status == KA_OP_SANDBOX) {
        ka_run_op_failed(run, result);
    } else if (result->status != KA_OP_OK || !backward) {
        ka_log(KA_LOG_INFO, "%s: no other draft from the differentiator: %s", run->name, result->message);
        ka_run_post_answer(run, KA_EV_NO_CANDIDATE, 0);
    } else {
        json_decref(run->draft);
        run->draft = json_deep_copy(result->doc);
        json_object_set(run->draft, "asked", asked);
        ka_run_put(run, "draft", run->draft);
        ka_run_post_candidate(run, 0, backward, "differentiator",
                              "draft of the built-in differentiator, made once more", false);
    }
}

void ka_run_differentiate(struct ka_run *run)
{
    if (run->given) {
        ka_run_post_candidate(run, 0, run->given, "file", "the backward in the file", false);
        return;
    }
    if (run->job.best) {
        json_auto_t *also = once_more(run);
        ka_log_progress(run->name, "draft: differentiator, once more%s%s%s",
                        json_object_size(also) ? "" : ": others had the GPU's memory",
                        json_object_get(also, "exact") ? ", with nothing read back rounded" : "",
                        json_object_get(also, "num_stages") ? ", with one stage a loop" : "");
        ask_differentiator(run, NULL, NULL, also, on_once_more);
        return;
    }
    ka_log_progress(run->name, "draft: differentiator");
    if (run->ahead.ended)
        take_ahead(run);
    else if (run->ahead.child)
        run->ahead.wanted = true;
    else
        ka_run_ask_differentiator(run, NULL, NULL, on_draft);
}
