/* The tuner: the differentiator's other schedules and configurations.
 *
 * A variant is a schedule and a configuration. It is drafted, and only one that beats the best becomes a
 * candidate: what is kept has passed the whole check. On a GPU it is timed, which takes less than the check:
 * one that is faster than the best *leads*, the next is timed beside it, and when no variant is left the last
 * leader is checked; those before it, should it fail. Elsewhere a variant's cost is modelled from counted
 * facts, and it may give up nothing that the model has no price for. */
#include "tuner.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "agent/core/compose.h"
#include "agent/core/plan.h"
#include "agent/core/rank.h"
#include "base/each.h"
#include "base/files.h"
#include "base/log.h"
#include "compiled_facts.h"
#include "draft.h"
#include "events.h"
#include "operations.h"
#include "racing.h"

#define SAME_MAX 2 /* variants in a row whose modelled cost is the best's own */

/* {"tried": [variant], "best": variant, "leads": [{"variant", "backward"}], "pending": variant, "before":
 * snapshot}, kept in the state so that a resumed run goes on with the next variant (new reference). */
static json_t *load_tuner(struct ka_run *run)
{
    json_t *tuner = ka_state_get(run->state, "tuner");
    if (json_is_object(tuner))
        return tuner;
    json_decref(tuner);
    const json_t *report = json_object_get(run->draft, "report");
    return json_pack("{s:[], s:[], s:{s:O?, s:n}}", "tried", "leads", "best", "schedule",
                     json_object_get(report, "schedule"), "config");
}

/* Whether the variant that was posted last has become the best candidate: then nothing else leads. */
static void settle(const struct ka_run *run, json_t *tuner)
{
    json_t *pending = json_object_get(tuner, "pending");
    if (pending && json_integer_value(json_object_get(tuner, "before")) != (json_int_t)run->job.best) {
        json_object_set(tuner, "best", pending);
        json_array_clear(json_object_get(tuner, "leads"));
    }
    json_object_del(tuner, "pending");
}

/* The fastest that is not checked yet (borrowed); NULL: the best candidate is faster. */
static json_t *leader(const json_t *tuner)
{
    const json_t *leads = json_object_get(tuner, "leads");
    return json_array_size(leads) ? json_array_get(leads, json_array_size(leads) - 1) : NULL;
}

static void describe_variant(const json_t *variant, char *text, size_t size)
{
    const char *schedule = json_string_value(json_object_get(variant, "schedule"));
    int length = snprintf(text, size, "schedule: %.60s", schedule ? schedule : "?");
    KA_EACH_MEMBER(json_object_get(variant, "config"), name, value) {
        if (length > 0 && (size_t)length < size)
            length += snprintf(text + length, size - (size_t)length, ", %.40s %lld", name,
                               (long long)json_integer_value(value));
    }
}

static char *variant_path(const struct ka_run *run)
{
    return ka_path_join(run->dir, "candidates/variant.py");
}

/* The variant under way leads: its backward was written to variant_path(). */
static void lead(struct ka_run *run)
{
    json_auto_t *tuner = load_tuner(run);
    json_t *tried = json_object_get(tuner, "tried");
    json_array_append_new(json_object_get(tuner, "leads"),
                          json_pack("{s:O, s:O}", "variant",
                                    json_array_get(tried, json_array_size(tried) - 1), "backward",
                                    json_object_get(run->variant, "backward")));
    ka_run_put(run, "tuner", tuner);
}

/* The leader becomes a candidate. */
static void post_leader(struct ka_run *run)
{
    json_auto_t *tuner = load_tuner(run);
    json_auto_t *chosen = json_incref(leader(tuner));
    json_t *leads = json_object_get(tuner, "leads"), *variant = json_object_get(chosen, "variant");
    char note[256];
    describe_variant(variant, note, sizeof(note));
    json_array_remove(leads, json_array_size(leads) - 1);
    json_object_set(tuner, "pending", variant);
    json_object_set_new(tuner, "before", json_integer((json_int_t)run->job.best));
    ka_run_put(run, "tuner", tuner);
    ka_run_post_candidate(run, 0, json_string_value(json_object_get(chosen, "backward")), "tuner", note,
                          false);
}

/* Configurations that leave the model's figure as it is: after a few the rest is not drafted. */
static void count_same(struct ka_run *run, double cost)
{
    json_auto_t *tuner = load_tuner(run);
    bool same = fabs(cost - run->job.best_cost) <= 1e-9 * run->job.best_cost;
    json_int_t before = json_integer_value(json_object_get(tuner, "same"));
    json_object_set_new(tuner, "same", json_integer(same ? before + 1 : 0));
    ka_run_put(run, "tuner", tuner);
}

static void on_variant_compiled(struct ka_run *run, json_t *facts)
{
    double cost = ka_rank_cost(facts);
    bool gain = cost < run->job.best_cost * (1.0 - run->job.limits.min_rel_impr);
    bool gives_up = gain && ka_run_compares(run, facts, ka_rank_gives_up);
    json_decref(facts);
    if (gain && !gives_up) {
        lead(run);
        post_leader(run);
        return;
    }
    ka_log(KA_LOG_INFO, "%s: modelled cost %.4g, the best has %.4g%s: not tried", run->name, cost,
           run->job.best_cost, gives_up ? ", and no atomic adds or more programs" : "");
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

static void on_variant_raced(struct ka_run *run, const struct ka_raced *raced)
{
    if (raced->won)
        lead(run);
    ka_run_tune(run, 0);
}

static int write_pair(const struct ka_run *run, const char *path, const char *backward, struct ka_err *err)
{
    KA_AUTO_BUF struct ka_buf pair = {0};
    int rc = ka_compose_pair(run->forward, backward, &pair, err);
    return rc == 0 ? ka_file_replace(path, pair.data, pair.len, err) : rc;
}

static void race_variant(struct ka_run *run)
{
    KA_AUTO_FREE char *path = variant_path(run), *ahead = ka_path_join(run->dir, "candidates/leader.py");
    json_auto_t *tuner = load_tuner(run);
    const char *backward = json_string_value(json_object_get(leader(tuner), "backward"));
    struct ka_err err;
    if (backward && write_pair(run, ahead, backward, &err))
        ka_run_fail(run, KA_EV_INTERNAL, "internal", "%s", err.msg);
    else
        ka_run_race(run, path, backward ? ahead : NULL, false, on_variant_raced);
}

/* What does not compile or spills by the kilobyte is not worth the time of a GPU that others wait for. */
static void on_variant_lowered(struct ka_run *run, json_t *facts)
{
    bool hopeless = ka_run_compares(run, facts, ka_rank_is_hopeless);
    json_decref(facts);
    if (!hopeless) {
        race_variant(run);
        return;
    }
    ka_log(KA_LOG_INFO, "%s: it does not compile, or spills too much: not timed", run->name);
    ka_run_tune(run, 0);
}

static void on_variant_sources(struct ka_run *run, const struct ka_op_result *result)
{
    if (result->status == KA_OP_SANDBOX)
        ka_run_op_failed(run, result);
    else if (result->status == KA_OP_OK)
        ka_run_compile(run, result, on_variant_lowered);
    else
        race_variant(run);
}

/* Its kernels are compiled, all at once, before it is timed: meanwhile the GPU is free for other runs. */
static void compile_variant(struct ka_run *run, const char *entry)
{
    KA_AUTO_FREE char *path = variant_path(run);
    json_t *request = json_pack("{s:[], s:b, s:s, s:o}", "cases", "compile", 1, "entry", entry, "real",
                                ka_run_race_dims(run));
    ka_run_op(run, "facts", path, request, on_variant_sources);
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
    KA_AUTO_FREE char *path = variant_path(run);
    if (write_pair(run, path, backward, &err)) {
        ka_run_fail(run, KA_EV_INTERNAL, "internal", "%s", err.msg);
        return;
    }
    json_decref(run->variant);
    run->variant = json_deep_copy(result->doc);
    if (ka_run_races(run)) {
        compile_variant(run, entry);
        return;
    }
    ka_run_op(run, "facts", path, ka_run_facts_request(run, entry), on_variant_facts);
}

/* Products that are rounded otherwise are for a run that computes them compiled: the interpreter has them
 * exact, and says nothing of what they lose. What a tile costs that is formed transposed no count says. */
static bool is_for_a_gpu(const json_t *variant)
{
    const json_t *config = json_object_get(variant, "config");
    return json_object_get(config, "tf32x3") || json_object_get(config, "turned") ||
           json_object_get(config, "unmasked");
}

void ka_run_tune(struct ka_run *run, int64_t snapshot)
{
    (void)snapshot; /* variants come from the forward, not from the candidate */
    json_auto_t *tuner = load_tuner(run);
    settle(run, tuner);
    const json_t *ahead = leader(tuner);
    bool idle = json_integer_value(json_object_get(tuner, "same")) >= SAME_MAX ||
                ka_plan_late(ka_run_seconds(run), run->settings.max_seconds, ahead);
    json_auto_t *variant =
        idle ? NULL
             : ka_plan_variant(json_object_get(run->draft, "report"), json_object_get(tuner, "tried"),
                               json_object_get(ahead ? ahead : tuner, ahead ? "variant" : "best"));
    if (variant)
        json_array_append(json_object_get(tuner, "tried"), variant);
    ka_run_put(run, "tuner", tuner);
    if (variant && is_for_a_gpu(variant) && !ka_run_races(run)) {
        ka_run_tune(run, snapshot);
        return;
    }
    if (!variant && ahead) {
        post_leader(run);
        return;
    }
    if (!variant) {
        ka_run_post_answer(run, KA_EV_NO_CANDIDATE, 0);
        return;
    }
    char text[256];
    describe_variant(variant, text, sizeof(text));
    ka_log_progress(run->name, "optimise: %s", text);
    ka_record_add(run->record, "variant", json_pack("{s:s}", "note", text));
    ka_run_ask_differentiator(run, json_object_get(variant, "schedule"), json_object_get(variant, "config"),
                              on_variant);
}
