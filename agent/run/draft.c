/* Candidates without a model: the differentiator's draft, and then its other schedules as the tuner's menu. */
#include "internal.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "agent/core/compose.h"
#include "agent/core/plan.h"
#include "agent/core/rank.h"
#include "base/files.h"
#include "base/hash.h"
#include "base/log.h"

#define SAME_MAX 2 /* variants in a row whose modelled cost is the best's own */

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

static void ask_differentiator(struct ka_run *run, json_t *schedule, json_t *config, ka_run_op_fn done)
{
    json_t *extra =
        json_pack("{s:o, s:O?, s:O?}", "case", trace_case(run), "schedule", schedule, "config", config);
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
    if (strcmp(run->settings.draft, "llm") == 0) { /* only its mathematics is wanted: the prompt has it */
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

/* ---- ahead of its turn: the draft depends on the shapes only, and preflight has those long before it ends */

static void take_ahead(struct ka_run *run)
{
    struct ka_op_result result = run->ahead.result;
    run->ahead = (struct ka_ahead){0};
    on_draft(run, &result);
    json_decref(result.doc);
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
    if (run->ahead.wanted)
        take_ahead(run);
}

void ka_run_draft_ahead(struct ka_run *run)
{
    struct ka_err err;
    if (run->given)
        return;
    ka_run_draft_ahead_cancel(run);
    run->ahead.child =
        ka_run_child_start(run, "differentiate", run->work_forward,
                           json_pack("{s:o}", "case", trace_case(run)), NULL, on_ahead, NULL, &err);
}

void ka_run_draft_ahead_cancel(struct ka_run *run)
{
    if (run->ahead.child)
        ka_run_child_cancel(run->ahead.child);
    json_decref(run->ahead.result.doc);
    run->ahead = (struct ka_ahead){0};
}

void ka_run_differentiate(struct ka_run *run)
{
    if (run->given) {
        ka_run_post_candidate(run, run->given, "file", "the backward in the file");
        return;
    }
    ka_log_progress(run->name, "draft: differentiator");
    if (run->ahead.ended)
        take_ahead(run);
    else if (run->ahead.child)
        run->ahead.wanted = true;
    else
        ask_differentiator(run, NULL, NULL, on_draft);
}

/* ---- tuner
 *
 * A variant is a schedule and a configuration. It is drafted, its cost is modelled from counted facts, and only one that would
 * beat the best becomes a candidate: what is kept has passed the whole check. */

/* {"tried": [variant], "best": variant, "pending": variant, "before": snapshot}, kept in the state so that a resumed run goes on
 * with the next variant (new reference). */
static json_t *load_tuner(struct ka_run *run)
{
    json_t *tuner = ka_state_get(run->state, "tuner");
    if (json_is_object(tuner))
        return tuner;
    json_decref(tuner);
    const json_t *report = json_object_get(run->draft, "report");
    return json_pack("{s:[], s:{s:O?, s:n}}", "tried", "best", "schedule",
                     json_object_get(report, "schedule"), "config");
}

/* Whether the variant that was posted last has become the best candidate. */
static void settle(const struct ka_run *run, json_t *tuner)
{
    json_t *pending = json_object_get(tuner, "pending");
    if (pending && json_integer_value(json_object_get(tuner, "before")) != (json_int_t)run->job.best)
        json_object_set(tuner, "best", pending);
    json_object_del(tuner, "pending");
}

static void describe_variant(const json_t *variant, char *text, size_t size)
{
    const char *schedule = json_string_value(json_object_get(variant, "schedule")), *name;
    int length = snprintf(text, size, "schedule: %.60s", schedule ? schedule : "?");
    json_t *value;
    json_object_foreach(json_object_get(variant, "config"), name, value)
    {
        if (length > 0 && (size_t)length < size)
            length += snprintf(text + length, size - (size_t)length, ", %.40s %lld", name,
                               (long long)json_integer_value(value));
    }
}

static char *variant_path(const struct ka_run *run)
{
    return ka_path_join(run->dir, "candidates/variant.py");
}

/* The variant under way: its backward was written to variant_path(). */
static void post_variant(struct ka_run *run)
{
    json_t *tuner = load_tuner(run);
    json_t *tried = json_object_get(tuner, "tried");
    json_t *variant = json_array_get(tried, json_array_size(tried) - 1);
    char note[256];
    describe_variant(variant, note, sizeof(note));
    json_object_set(tuner, "pending", variant);
    json_object_set_new(tuner, "before", json_integer((json_int_t)run->job.best));
    ka_run_put(run, "tuner", tuner);
    json_decref(tuner);
    json_t *backward = json_incref(json_object_get(run->variant, "backward"));
    ka_run_post_candidate(run, json_string_value(backward), "tuner", note);
    json_decref(backward);
}

/* Configurations that leave the model's figure as it is: after a few the rest is not drafted. */
static void count_same(struct ka_run *run, double cost)
{
    json_t *tuner = load_tuner(run);
    bool same = fabs(cost - run->job.best_cost) <= 1e-9 * run->job.best_cost;
    json_int_t before = json_integer_value(json_object_get(tuner, "same"));
    json_object_set_new(tuner, "same", json_integer(same ? before + 1 : 0));
    ka_run_put(run, "tuner", tuner);
    json_decref(tuner);
}

static void on_variant_compiled(struct ka_run *run, json_t *facts)
{
    double cost = ka_rank_cost(facts);
    json_decref(facts);
    if (cost < run->job.best_cost * (1.0 - run->job.limits.min_rel_impr)) {
        post_variant(run);
        return;
    }
    ka_log(KA_LOG_INFO, "%s: modelled cost %.4g, the best has %.4g: not tried", run->name, cost,
           run->job.best_cost);
    count_same(run, cost);
    ka_run_tune(run, 0);
}

static void on_variant_facts(struct ka_run *run, const struct ka_op_result *result)
{
    if (result->status == KA_OP_SANDBOX) {
        ka_run_op_failed(run, result);
    } else if (result->status == KA_OP_OK) {
        ka_run_compile(run, result, on_variant_compiled);
    } else {
        ka_log(KA_LOG_INFO, "%s: a variant could not be measured: %s", run->name, result->message);
        ka_run_tune(run, 0);
    }
}

static int write_variant(const struct ka_run *run, const char *backward, struct ka_err *err)
{
    struct ka_buf pair = {0};
    char *path = variant_path(run);
    int rc = ka_compose_pair(run->forward, backward, &pair, err);
    if (rc == 0)
        rc = ka_file_write(path, pair.data, pair.len, err);
    ka_buf_free(&pair);
    free(path);
    return rc;
}

static void on_variant(struct ka_run *run, const struct ka_op_result *result)
{
    const char *backward = json_string_value(json_object_get(result->doc, "backward"));
    const char *known = json_string_value(json_object_get(run->draft, "backward"));
    const char *entry = json_string_value(json_object_get(result->doc, "entry"));
    struct ka_err err;
    bool built = result->status == KA_OP_OK && backward && entry;
    if (!built)
        ka_log(KA_LOG_INFO, "%s: a variant could not be built: %s", run->name, result->message);
    if (!built || (known && strcmp(backward, known) == 0)) {
        ka_run_tune(run, 0);
        return;
    }
    if (write_variant(run, backward, &err)) {
        ka_run_fail(run, KA_EV_INTERNAL, "internal", "%s", err.msg);
        return;
    }
    json_decref(run->variant);
    run->variant = json_deep_copy(result->doc);
    char *path = variant_path(run);
    ka_run_op(run, "facts", path, ka_run_facts_request(run, entry), on_variant_facts);
    free(path);
}

void ka_run_tune(struct ka_run *run, int64_t snapshot)
{
    (void)snapshot; /* variants come from the forward, not from the candidate */
    json_t *tuner = load_tuner(run);
    settle(run, tuner);
    bool idle = json_integer_value(json_object_get(tuner, "same")) >= SAME_MAX;
    json_t *variant = idle ? NULL
                           : ka_plan_variant(json_object_get(run->draft, "report"),
                                             json_object_get(tuner, "tried"), json_object_get(tuner, "best"));
    if (variant)
        json_array_append(json_object_get(tuner, "tried"), variant);
    ka_run_put(run, "tuner", tuner);
    json_decref(tuner);
    if (!variant) {
        ka_run_post_type(run, KA_EV_NO_CANDIDATE);
        return;
    }
    char text[256];
    describe_variant(variant, text, sizeof(text));
    ka_log_progress(run->name, "optimise: %s", text);
    ask_differentiator(run, json_object_get(variant, "schedule"), json_object_get(variant, "config"),
                       on_variant);
    json_decref(variant);
}
