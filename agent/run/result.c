/* What a run came to, for people and programs. */
#include "result.h"

#include <math.h>
#include <string.h>

#include "agent/core/checked.h"
#include "agent/core/conduct.h"
#include "agent/core/fields.h"
#include "agent/core/plan.h"
#include "agent/io/loop.h"
#include "base/each.h"
#include "events.h"
#include "internal.h"
#include "sizes.h"

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

const json_t *ka_run_question(const struct ka_run *run)
{
    return run->question;
}

const char *ka_run_name(const struct ka_run *run)
{
    return run->name;
}

const char *ka_run_pair_path(const struct ka_run *run)
{
    return run->pair_path;
}

static const char *verdict_word(const struct ka_run *run)
{
    switch (ka_run_exit_code(run)) {
    case 0:
        return "verified";
    case 3:
        return "unusable";
    case 4:
        return "not_verified";
    case 75:
        return "waiting";
    default:
        return run->job.best_verified ? "verified" : "error";
    }
}

static void add_llm(const struct ka_run *run, json_t *result)
{
    const struct ka_settings *settings = &run->settings;
    json_int_t in = json_integer_value(json_object_get(run->totals, "tokens_in"));
    json_int_t out = json_integer_value(json_object_get(run->totals, "tokens_out"));
    json_int_t cached = json_integer_value(json_object_get(run->totals, "tokens_cached"));
    json_t *llm = json_pack("{s:O, s:I, s:I, s:I}", "requests", json_object_get(run->totals, "requests"),
                            "tokens_in", in, "tokens_out", out, "tokens_cached", cached);
    bool priced = settings->price_in > 0 || settings->price_out > 0;
    json_object_set_new(
        llm, "cost",
        priced ? json_real(((double)in * settings->price_in + (double)out * settings->price_out) / 1e6)
               : json_null());
    json_object_set_new(result, "llm", llm);
}

/* Sum over the measured cases: how many atomic elements the backward adds. */
static json_int_t atomics_of(const json_t *facts)
{
    json_int_t sum = 0;
    KA_EACH(json_object_get(facts, "cases"), i, entry)
        sum += json_integer_value(json_object_get(json_object_get(entry, "backward"), "atomics"));
    return sum;
}

/* What is known of races between programs: only the interpreter sees who accesses what. Compiled candidates
 * are interpreted once, on small sizes, for their facts. */
static json_t *races_of(const struct ka_run *run, const struct ka_snapshot *best)
{
    bool compiled = ka_run_on_gpu(run);
    return json_pack("{s:b, s:b, s:O?}", "looked_for", !compiled || ka_conduct_watched(best->facts),
                     "small_sizes", compiled, "ordered_by_atomics",
                     json_object_get(best->verdict, "ordered_by_atomics"));
}

static void add_best(struct ka_run *run, json_t *result)
{
    struct ka_snapshot best;
    json_object_set_new(
        result, "shapes",
        json_pack("{s:i, s:i, s:i, s:i}", "required", 0, "passed", 0, "hidden", 0, "hidden_passed", 0));
    json_object_set_new(result, "gradients", json_array());
    if (run->job.best && ka_state_snapshot_get(run->state, run->job.best, &best, NULL) == 0) {
        json_t *shapes = json_object_get(best.verdict, "shapes");
        json_t *gradients = json_object_get(best.verdict, "gradients");
        if (shapes)
            json_object_set_new(result, "shapes", json_deep_copy(shapes));
        if (gradients)
            json_object_set(result, "gradients", gradients);
        json_object_set(result, "per_shape", json_object_get(best.verdict, "per_shape"));
        json_object_set_new(result, "races", races_of(run, &best));
        bool by_llm = strcmp(best.origin, "llm") == 0;
        json_object_set_new(result, "draft", json_string(by_llm ? "llm" : best.origin));
        json_object_set_new(result, "atomics",
                            best.facts ? json_integer(atomics_of(best.facts)) : json_null());
        const json_t *times = json_object_get(best.facts, "times");
        json_object_set_new(result, "modelled_cost",
                            isfinite(best.cost) && !times ? json_real(best.cost) : json_null());
        json_object_set_new(result, "ms", times ? json_real(ka_number_of(times, "ms", 0)) : json_null());
        if (!json_is_true(json_object_get(best.verdict, "verified")))
            json_object_set(result, "failures", json_object_get(best.verdict, "facts"));
        json_object_set(result, "measured", best.facts);
        struct ka_checked_of of = {.verdict = best.verdict,
                                   .oracles = run->oracles,
                                   .facts = best.facts,
                                   .device = run->settings.device,
                                   .target = run->settings.target};
        json_object_set_new(result, "checked", ka_checked_json(&of));
        ka_snapshot_free(&best);
    }
    json_t *skipped = json_object_get(json_object_get(result, "shapes"), "skipped");
    if (!json_is_array(skipped))
        json_object_set(json_object_get(result, "shapes"), "skipped", run->skipped);
    else
        json_array_extend(skipped, run->skipped);
}

static void add_retrieved(const struct ka_run *run, json_t *result)
{
    json_t *list = json_array();
    KA_EACH(run->retrieved, i, pair)
        json_array_append_new(list, json_pack("{s:O?, s:O?}", "id", json_object_get(pair, "id"), "similarity",
                                              json_object_get(pair, "similarity")));
    json_object_set_new(result, "retrieved", list);
}

json_t *ka_run_result(struct ka_run *run)
{
    const json_t *stub = json_object_get(json_object_get(run->inspect, "stub"), "name");
    json_t *result =
        json_pack("{s:s, s:i, s:s, s:O?, s:s}", "verdict", verdict_word(run), "exit_code",
                  ka_run_exit_code(run), "file", run->file, "stub", stub, "device", run->settings.device);
    json_t *functions = json_object_get(run->inspect, "functions");
    if (json_array_size(functions) > 1)
        json_object_set(result, "functions", functions);
    add_best(run, result);
    json_object_set(result, "oracles", run->oracles);
    json_object_set(result, "variants_on", json_object_get(ka_plan_variants(run->shapes), "dims"));
    if (strcmp(run->settings.device, "cuda") != 0)
        json_object_set_new(
            result, "repeatability",
            json_string("not measurable here: the interpreter runs programs one after another"));
    if (run->sanitized)
        json_object_set(result, "sanitizer", run->sanitized);
    json_object_set_new(result, "attempts", json_integer(run->job.attempts));
    json_object_set_new(result, "snapshots", json_integer((json_int_t)ka_state_snapshot_count(run->state)));
    json_object_set_new(result, "rollbacks", json_integer(run->job.rollbacks));
    add_retrieved(run, result);
    json_t *tape = json_object_get(json_object_get(run->draft, "report"), "tape_bytes");
    json_object_set(result, "tape_bytes", tape ? tape : json_null());
    json_object_set_new(result, "speed", json_null());
    add_llm(run, result);
    json_object_set_new(result, "seconds", json_real(floor(ka_run_seconds(run) * 100) / 100));
    json_object_set_new(result, "pair",
                        run->pair_path && run->job.best_verified ? json_string(run->pair_path) : json_null());
    if (run->pair_path && !run->job.best_verified)
        json_object_set_new(result, "best", json_string(run->pair_path));
    json_object_set_new(result, "run_dir", json_string(run->dir));
    json_object_set(result, "children", run->timeline);
    json_object_set(result, "retries", json_object_get(run->totals, "retries"));
    json_object_set_new(result, "loop_blocked_ms", json_integer((json_int_t)ka_loop_most_ms(run->app->loop)));
    json_object_set_new(result, "loop_blocked_work_ms",
                        json_integer((json_int_t)ka_loop_most_work_ms(run->app->loop)));
    json_object_set(result, "device_answers", json_object_get(run->inspect, "device_answers"));
    /* An endpoint may fail for one of several questions: the run goes on with the others. */
    bool passed = ka_is_text(run->failure, "kind", "llm") && run->job.reason != KA_REASON_LLM;
    if (run->failure && !passed && ka_run_exit_code(run) != 0)
        json_object_set(result, "error", run->failure);
    if (run->waiting_for)
        json_object_set_new(result, "request", json_string(run->waiting_for));
    return result;
}
