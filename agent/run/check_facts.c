/* Measured facts, only told of what is verified: on a GPU, where processors are idle, they are counted beside
 * the candidate. And compute-sanitizer. */
#include "check_internal.h"

#include "agent/core/conduct.h"
#include "agent/core/describe.h"
#include "agent/core/fields.h"
#include "agent/core/plan.h"
#include "agent/core/sanitize.h"
#include "base/each.h"
#include "base/log.h"
#include "compiled_facts.h"
#include "expected.h"
#include "fan.h"
#include "operations.h"

/* A shape whose failures count, and are told: those of hidden ones are not, and optional ones may fail. */
static size_t required_shape(const struct ka_check *check)
{
    KA_EACH(check->cases, i, plan) {
        if (ka_plan_is(plan, "required"))
            return check->shape_of[i];
    }
    return check->shape_of[0];
}

/* Gradients that no kernel has to compute, on any required shape: a new reference. */
static json_t *free_gradients(const struct ka_check *check)
{
    json_t *free = NULL;
    KA_EACH(check->cases, i, plan) {
        struct ka_fan_found oracle;
        json_int_t id;
        if (!ka_plan_is(plan, "required") || !ka_expected_find(check->expected, i, &oracle, &id))
            continue;
        const json_t *here = json_object_get(oracle.entry, "free");
        if (!free)
            free = json_deep_copy(here);
        for (size_t k = json_array_size(free); k-- > 0;)
            if (!ka_has_text(here, json_string_value(json_array_get(free, k))))
                json_array_remove(free, k);
    }
    return free;
}

/* The facts are there, and every case is judged. */
static void finish(struct ka_run *run)
{
    struct ka_check *check = run->check;
    if (check->compiled) {
        json_auto_t *free = free_gradients(check);
        const struct ka_conduct_of of = {.scales = check->by_hand && ka_conduct_may_scale(run->outputs),
                                         .free = free,
                                         .empty =
                                             free && json_array_size(free) == json_array_size(run->grads),
                                         .place = &check->place};
        ka_conduct_interpreted(check->facts, &of, check->verdict, required_shape(check));
    }
    ka_check_conclude(run);
}

/* A backward that the target's compiler refuses is none there, whatever the interpreter made of it: where
 * that is known before the cases are judged, they need not be. Nor where it raises in every call; the facts
 * are the interpreter's, so that says nothing of one that is compiled. */
static void facts_ended(struct ka_run *run)
{
    struct ka_check *check = run->check;
    KA_AUTO_BUF struct ka_buf text = {0};
    check->facts_ended = true;
    if (!check->compiled && ka_describe_raised(check->facts, &check->place, &text)) {
        ka_check_reject_when_idle(run, KA_VERDICT_RAISED, ka_buf_str(&text));
    } else if (ka_describe_uncompiled(check->facts, &check->place, &text)) {
        ka_buf_printf(&text, " (target %s)", run->settings.target);
        if (!check->reject_rule)
            ka_check_reject_when_idle(run, "does_not_compile", ka_buf_str(&text));
    } else if (check->facts_wanted) {
        finish(run);
    } else if (!check->candidate) {
        ka_check_next_round(run);
    }
}

static void on_compiled(struct ka_run *run, json_t *facts)
{
    json_decref(run->check->facts);
    run->check->facts = facts;
    facts_ended(run);
}

static void on_facts(struct ka_run *run, void *arg, const struct ka_op_result *result)
{
    (void)arg;
    run->check->facts_child = NULL;
    if (result->status == KA_OP_OK) {
        ka_run_compile(run, result, on_compiled);
        return;
    }
    if (run->check->candidate) /* else the cases will say the same */
        ka_log(KA_LOG_WARN, "%s: no compile facts: %s", run->name, result->message);
    facts_ended(run);
}

void ka_check_measure(struct ka_run *run, bool early)
{
    struct ka_check *check = run->check;
    struct ka_err err;
    json_t *request = ka_run_facts_request(run, check->entry);
    check->facts_early = early && json_object_get(request, "real");
    if (early)
        json_object_del(request, "real");
    json_object_set_new(request, "conduct", json_boolean(check->compiled));
    struct ka_run_child_req req = {.operation = "facts", .file = check->pair_path, .extra = request};
    check->facts_child = ka_run_child_start(run, &req, on_facts, NULL, &err);
    if (check->facts_child)
        return;
    ka_log(KA_LOG_WARN, "%s: no compile facts: %s", run->name, err.msg);
    facts_ended(run);
}

void ka_check_measure_verified(struct ka_run *run)
{
    struct ka_check *check = run->check;
    check->facts_wanted = true;
    if (check->facts_ended && !check->facts_early)
        finish(run);
    else if (!check->facts_child && !run->compile)
        ka_check_measure(run, false);
}

/* ---- compute-sanitizer, only for what is verified without it */

/* What racecheck reports of Triton's own code is told, and blames nobody. */
static void tell_redundant(const struct ka_run *run)
{
    KA_EACH(run->sanitized, i, tool) {
        KA_EACH(json_object_get(tool, "redundant"), k, race)
            ka_log(
                KA_LOG_INFO,
                "%s: %s: in %s, line %lld, lanes that hold one reduced value each store it to one place in "
                "shared memory: Triton's own code, which may change the last bit from run to run",
                run->name, ka_text_of(tool, "tool", "?"), ka_text_of(race, "kernel", "?"),
                (long long)json_integer_value(json_object_get(race, "line")));
    }
}

static void on_sanitized(struct ka_run *run, const struct ka_op_result *result)
{
    struct ka_verdict *verdict = run->check->verdict;
    json_decref(run->sanitized);
    run->sanitized = json_deep_copy(json_object_get(result->doc, "runs"));
    tell_redundant(run);
    ka_sanitize_judge(result->status == KA_OP_OK ? result->doc : NULL, result->message, verdict);
    if (ka_verdict_verified(verdict))
        ka_check_measure_verified(run);
    else
        ka_check_conclude(run);
}

void ka_check_sanitize(struct ka_run *run)
{
    json_auto_t *list = json_pack("[O]", ka_plan_smallest(run->shapes));
    json_auto_t *cases = ka_plan_preflight(list, ka_random_u64());
    ka_log_progress(run->name, "compute-sanitizer: memcheck, racecheck, initcheck");
    json_t *extra = json_pack("{s:o, s:s, s:s}", "cases", ka_plan_for_candidate(cases), "entry",
                              run->check->entry, "sanitizer", run->settings.sanitizer);
    ka_run_op(run, "sanitize", run->check->pair_path, extra, on_sanitized);
}
