/* Inspect, and the first stage of preflight: what the user's file is, and on which shapes of its sweep forward and oracle agree.
 *
 * Preflight. Without a GPU each shape of the sweep is tried scaled down, from the largest scale to the smallest, until
 * forward and oracle agree on it; on a GPU first as it is, and scaled only if the oracle cannot hold it; a required shape
 * that never does ends the run (exit code 3). Then, beside each other: hidden shapes are derived from what was accepted, and those that
 * forward and oracle accept are kept; finite differences; other kinds of inputs; and the differentiator begins its draft. */
#include "internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "agent/core/plan.h"
#include "agent/core/shapes.h"
#include "base/hash.h"
#include "base/log.h"
#include "cases.h"
#include "expected.h"
#include "fan.h"

#define EVALUATION_SECONDS                                                                                   \
    10         /* in float64, with all checks; the whole case takes about three times as long */
#define SLOW 4 /* seconds of the oracle for one case, with the start of a context and compiling */
#define GPU_BUDGET                                                                                           \
    ((uint64_t)1 << 24) /* product of sizes that is tried when the oracle does not hold the real shape */

static void inspected(struct ka_run *run)
{
    ka_run_put(run, "inspect", run->inspect);
    ka_record_add(run->record, "inspected", json_deep_copy(run->inspect));
    ka_run_post_type(run, KA_EV_OK);
}

static void on_inspected(struct ka_run *run, const struct ka_op_result *result)
{
    if (result->status != KA_OP_OK) {
        ka_run_op_failed(run, result);
        return;
    }
    json_decref(run->inspect);
    run->inspect = json_deep_copy(result->doc);
    inspected(run);
}

void ka_run_inspect(struct ka_run *run)
{
    if (ka_run_knows(run)) {
        ka_run_recall_inspect(run);
        inspected(run);
        return;
    }
    ka_log_progress(run->name, "inspect");
    ka_run_op(run, "inspect", run->work_forward, NULL, on_inspected);
}

/* ---- preflight: shapes still to be settled are entries {"dims", "ladder": [...], "level", "stand_ins", "required", "error",
 * "mismatch"}. The first `stand_ins` scales of the ladder may be checked in place of the shape; the rest are tried only to find
 * the smallest scale that shows a disagreement. */

bool ka_run_scaled_down(const struct ka_run *run)
{
    return strcmp(run->app->device, "cpu") == 0;
}

json_t *ka_run_small(const struct ka_run *run, json_t *dims)
{
    json_t *small;
    if (ka_run_on_gpu(run) && ka_shapes_scale(dims, KA_SHAPES_BUDGET, 0, &small) == 0)
        return small;
    return json_incref(dims);
}

bool ka_run_on_gpu(const struct ka_run *run)
{
    return strcmp(run->app->device, "cuda") == 0;
}

static json_t *ladder_of(struct ka_run *run, const json_t *dims, bool own_cpu_sweep)
{
    json_t *ladder = json_array(), *scaled;
    if (!ka_run_scaled_down(run) || own_cpu_sweep)
        json_array_append(ladder, (json_t *)dims);
    uint64_t budget = ka_run_scaled_down(run) ? KA_SHAPES_BUDGET : GPU_BUDGET;
    for (size_t level = 0; ka_shapes_scale(dims, budget, level, &scaled) == 0; level++) {
        if (!json_equal(scaled, json_array_get(ladder, 0)) &&
            (!own_cpu_sweep || ka_plan_size(scaled) < ka_plan_size(dims)))
            json_array_append(ladder, scaled);
        json_decref(scaled);
    }
    if (!json_array_size(ladder))
        json_array_append(ladder, (json_t *)dims);
    return ladder;
}

static bool wanted(const struct ka_run *run, bool required)
{
    return required || strcmp(run->app->opts->sweep, "required") != 0;
}

json_t *ka_run_sweep(struct ka_run *run, bool *own_cpu_sweep)
{
    const char *which = run->app->opts->sweep;
    *own_cpu_sweep = false;
    if (which[0] == '[' || which[0] == '{') {
        json_t *given = json_loads(which, 0, NULL);
        json_t *list = json_is_array(given) ? json_incref(given) : json_pack("[O]", given);
        json_t *sweep = json_array();
        size_t i;
        json_t *dims;
        json_array_foreach(list, i, dims)
            json_array_append_new(sweep, json_pack("{s:O, s:b}", "dims", dims, "required", 1));
        json_decref(given);
        json_decref(list);
        *own_cpu_sweep = true;
        return sweep;
    }
    json_t *cpu = json_object_get(run->inspect, "sweep_cpu");
    *own_cpu_sweep = ka_run_scaled_down(run) && json_array_size(cpu) > 0;
    return json_incref(*own_cpu_sweep ? cpu : json_object_get(run->inspect, "sweep"));
}

static json_t *pending_shape(struct ka_run *run, const json_t *dims, bool own_cpu_sweep, bool required)
{
    json_t *ladder = ladder_of(run, dims, own_cpu_sweep);
    size_t levels = json_array_size(ladder);
    return json_pack("{s:O, s:o, s:i, s:I, s:b}", "dims", dims, "ladder", ladder, "level", 0, "stand_ins",
                     (json_int_t)(own_cpu_sweep ? 1 : levels), "required", required);
}

static json_t *pending_start(struct ka_run *run)
{
    bool own_cpu_sweep;
    json_t *sweep = ka_run_sweep(run, &own_cpu_sweep);
    json_t *pending = json_array();
    size_t i;
    json_t *entry;
    json_array_foreach(sweep, i, entry)
    {
        json_t *dims = json_object_get(entry, "dims");
        json_t *flag = json_object_get(entry, "required");
        bool required = !flag || json_is_true(flag);
        if (!wanted(run, required))
            json_array_append_new(run->skipped, json_pack("{s:O, s:s}", "dims", dims, "reason",
                                                          "not required (--sweep required)"));
        else
            json_array_append_new(pending, pending_shape(run, dims, own_cpu_sweep, required));
    }
    json_decref(sweep);
    return pending;
}

static json_t *dims_at_level(const json_t *entry)
{
    json_t *ladder = json_object_get(entry, "ladder");
    return json_array_get(ladder, (size_t)json_integer_value(json_object_get(entry, "level")));
}

static void ask_level(struct ka_run *run);

static bool already_accepted(const struct ka_run *run, const json_t *dims)
{
    size_t i;
    json_t *shape;
    json_array_foreach(run->shapes, i, shape)
    {
        if (json_equal(json_object_get(shape, "dims"), dims))
            return true;
    }
    return false;
}

void ka_run_accept_shape(struct ka_run *run, const json_t *dims, const char *class, const char *kind,
                         const json_t *entry)
{
    double seconds = json_number_value(json_object_get(entry, "seconds"));
    if (!already_accepted(run, dims))
        json_array_append_new(
            run->shapes, json_pack("{s:O, s:s, s:s, s:O?, s:b}", "dims", dims, "class", class, "kind", kind,
                                   "grads", json_object_get(entry, "grads"), "slow", seconds > SLOW));
}

/* The finding, with what the oracle saw of a race, which is its likeliest cause. */
static json_t *mismatch_error(const json_t *entry, const struct ka_err *err)
{
    const json_t *facts = json_object_get(entry, "facts");
    const char *race = json_string_value(json_array_get(json_object_get(facts, "races"), 0));
    struct ka_buf text = {0};
    ka_buf_printf(&text, "%s%s%.300s", err->msg, race ? " The forward has a race: " : "", race ? race : "");
    json_t *error = json_pack(
        "{s:s, s:s, s:s}", "kind", "forward_oracle_mismatch", "message", ka_buf_str(&text), "remedy",
        "the forward gives values that its own operations do not; if it cannot run at such a size, name "
        "shapes that it can in SWEEP_CPU");
    ka_buf_free(&text);
    return error;
}

/* The whole child failed, and with it every shape that it had. */
static json_t *whole_error(const struct ka_fan_found *found)
{
    const json_t *error = json_object_get(found->doc, "error");
    if (json_is_object(error))
        return json_deep_copy(error);
    return json_pack("{s:s, s:s}", "kind", found->status == KA_OP_TIMEOUT ? "timeout" : "died", "message",
                     found->message);
}

bool ka_run_case_agrees(const struct ka_fan_found *found, json_t **error)
{
    struct ka_err err;
    if (found->status != KA_OP_OK) {
        *error = whole_error(found);
    } else if (json_is_true(json_object_get(found->entry, "ok"))) {
        if (found->agrees == 0)
            return true;
        *error = found->agrees == -EDOM
                     ? mismatch_error(found->entry, found->why)
                     : json_pack("{s:s, s:s}", "kind", "internal", "message", found->why->msg);
    } else if (json_is_object(json_object_get(found->entry, "error"))) {
        *error = json_deep_copy(json_object_get(found->entry, "error"));
    } else {
        ka_case_error(found->entry, &err);
        *error = json_pack("{s:s, s:s}", "kind", "internal", "message", err.msg);
    }
    return false;
}

static bool is_mismatch(const json_t *error)
{
    const char *kind = json_string_value(json_object_get(error, "kind"));
    return kind && strcmp(kind, "forward_oracle_mismatch") == 0;
}

static bool next_level(struct ka_run *run, json_t *entry, json_t *still);

/* One shape failed on its level. What cannot be run is tried smaller, and a scale that works stands in for it. Forward and oracle
 * that ran and differ are a finding about the forward: smaller scales are tried only to name the smallest that shows it. */
static bool settle_failed(struct ka_run *run, json_t *entry, json_t *error, json_t *still)
{
    ka_record_add(run->record, "shape_failed",
                  json_pack("{s:O, s:O}", "dims", dims_at_level(entry), "error", error));
    bool mismatch = is_mismatch(error);
    if (mismatch) {
        json_object_set(error, "dims", dims_at_level(entry));
        json_object_set_new(entry, "mismatch", json_true());
    }
    if (mismatch ||
        !json_object_get(entry, "error")) /* of other errors the first, on the largest scale, tells most */
        json_object_set(entry, "error", error);
    json_decref(error);
    return next_level(run, entry, still);
}

/* One scale down, or the shape is settled: it failed on all. Returns false if the run has ended by it. */
static bool next_level(struct ka_run *run, json_t *entry, json_t *still)
{
    json_int_t level = json_integer_value(json_object_get(entry, "level")) + 1;
    bool mismatch = json_is_true(json_object_get(entry, "mismatch"));
    size_t levels = json_array_size(json_object_get(entry, "ladder"));
    json_int_t stand_ins = json_integer_value(json_object_get(entry, "stand_ins"));
    if (level < (mismatch ? (json_int_t)levels : stand_ins)) {
        json_object_set_new(entry, "level", json_integer(level));
        json_array_append(still, entry);
        return true;
    }
    json_t *first = json_object_get(entry, "error");
    if (json_is_true(json_object_get(entry, "required"))) {
        json_t *failure = json_deep_copy(first);
        if (!mismatch)
            json_object_set(failure, "dims", json_object_get(entry, "dims"));
        ka_run_fail_doc(run, KA_EV_UNUSABLE, failure);
        return false;
    }
    json_array_append_new(run->skipped, json_pack("{s:O, s:O?}", "dims", json_object_get(entry, "dims"),
                                                  "reason", json_object_get(first, "message")));
    return true;
}

/* What the stub returns, and which of the wanted inputs were tensors on at least one shape (None arguments are not). */
static void learn_outputs(struct ka_run *run, const json_t *entry)
{
    size_t i, k;
    json_t *name, *old;
    if (!json_is_true(json_object_get(entry, "ok")))
        return;
    if (!run->outputs)
        run->outputs = json_incref(json_object_get(entry, "outputs"));
    json_array_foreach(json_object_get(entry, "inputs"), i, name)
    {
        const char *dtype = json_string_value(json_object_get(name, "dtype"));
        run->half = run->half || (dtype && strcmp(dtype, "float16") == 0);
    }
    json_array_foreach(json_object_get(entry, "grads"), i, name)
    {
        bool known = !json_is_string(name);
        json_array_foreach(run->grads, k, old) known = known || json_equal(old, name);
        if (!known)
            json_array_append(run->grads, name);
    }
}

/* The user's reference() has agreed on every shape so far, unless it could not be used, which is said. */
static void learn_reference(struct ka_run *run, const json_t *entry)
{
    const char *problem = json_string_value(json_object_get(entry, "reference_error"));
    const json_t *has = json_object_get(run->inspect, "has");
    if (!json_is_true(json_object_get(has, "reference")) || !json_is_true(json_object_get(entry, "ok")))
        return;
    if (problem && !json_object_get(run->oracles, "reference_error")) {
        ka_log(KA_LOG_WARN, "%s: the reference is no second opinion: %s", run->name, problem);
        json_object_set_new(run->oracles, "reference_error", json_string(problem));
    }
    bool usable = !json_object_get(run->oracles, "reference_error");
    json_object_set_new(run->oracles, "reference", json_string(usable ? "agree" : "unusable"));
}

/* On a GPU a smaller stand-in for a shape is said, with what kept the real one from being checked. */
static void note_smaller(struct ka_run *run, const json_t *entry)
{
    if (ka_run_scaled_down(run) || !json_integer_value(json_object_get(entry, "level")))
        return;
    const char *why = json_string_value(json_object_get(json_object_get(entry, "error"), "message"));
    char *dims = json_dumps(dims_at_level(entry), JSON_COMPACT);
    struct ka_buf text = {0};
    ka_buf_printf(&text, "checked as %s instead: %.300s", dims, why ? why : "no result at its own size");
    json_array_append_new(run->skipped, json_pack("{s:O, s:s}", "dims", json_object_get(entry, "dims"),
                                                  "reason", ka_buf_str(&text)));
    ka_buf_free(&text);
    free(dims);
}

/* One shape on its present level. False if the run has ended by it. */
static bool settle_shape(struct ka_run *run, struct ka_fan *fan, json_t *entry, json_t *item, json_t *still)
{
    struct ka_fan_found found;
    json_t *error = NULL;
    bool alive = true;
    ka_fan_find(fan, json_integer_value(json_object_get(item, "id")), &found);
    if (!ka_run_case_agrees(&found, &error)) {
        alive = settle_failed(run, entry, error, still);
    } else if (json_is_true(json_object_get(entry, "mismatch"))) {
        alive = next_level(run, entry, still);
    } else {
        note_smaller(run, entry);
        ka_run_accept_shape(run, dims_at_level(entry),
                            json_is_true(json_object_get(entry, "required")) ? "required" : "optional",
                            "sweep", found.entry);
        ka_expected_offer(run, fan, item);
    }
    if (alive && found.status == KA_OP_OK) {
        learn_outputs(run, found.entry);
        learn_reference(run, found.entry);
    }
    return alive;
}

static void second_stage(struct ka_run *run);

static void on_level(struct ka_run *run, struct ka_fan *fan, void *arg)
{
    struct ka_preflight *preflight = run->preflight;
    const struct ka_op_result *failed = ka_fan_failed(fan, KA_OP_SANDBOX);
    (void)arg;
    if (failed) {
        ka_run_op_failed(run, failed);
        return;
    }
    ka_run_preflight_progress(run, fan, "forward against oracle");
    if (!ka_fan_ended(fan))
        return;
    json_t *pending = preflight->pending, *asked = preflight->asked, *still = json_array(), *entry;
    preflight->pending =
        still; /* before the loop: a failing shape ends the run, and with it what the run holds */
    preflight->asked = NULL;
    preflight->sweep = NULL;
    bool alive = true;
    size_t i;
    json_array_foreach(pending, i, entry)
    {
        if (alive)
            alive = settle_shape(run, fan, entry, json_array_get(asked, i), still);
    }
    ka_fan_free(fan);
    json_decref(pending);
    json_decref(asked);
    if (!alive)
        return;
    if (json_array_size(still))
        ask_level(run);
    else
        second_stage(run);
}

struct ka_fan *ka_run_ask_oracle(struct ka_run *run, const json_t *dims_list, const char *what,
                                 json_t **asked, ka_fan_fn changed)
{
    json_t *cases = ka_plan_preflight(dims_list, ka_random_u64());
    *asked = ka_plan_for_oracle(cases);
    struct ka_fan_req req = {.operation = "oracle",
                             .file = run->work_forward,
                             .what = what,
                             .cases = *asked,
                             .extra = json_pack("{s:b}", "fd", 0),
                             .agree = true};
    if (ka_run_on_gpu(run)) /* a shape that takes longer has a smaller one stand in for it */
        json_object_set_new(req.extra, "budget", json_pack("{s:i}", "seconds", EVALUATION_SECONDS));
    json_decref(cases);
    return ka_fan_start(run, &req, changed, NULL);
}

static void ask_level(struct ka_run *run)
{
    struct ka_preflight *preflight = run->preflight;
    json_t *shapes = json_array(), *entry;
    size_t i;
    ka_log_progress(run->name, "preflight: forward against oracle on %zu shapes",
                    json_array_size(preflight->pending));
    json_array_foreach(preflight->pending, i, entry)
        json_array_append_new(shapes, json_pack("{s:O}", "dims", dims_at_level(entry)));
    preflight->sweep = ka_run_ask_oracle(run, shapes, "sweep", &preflight->asked, on_level);
    json_decref(shapes);
}

void ka_run_preflight_progress(struct ka_run *run, const struct ka_fan *fan, const char *what)
{
    size_t done, all;
    ka_fan_count(fan, &done, &all);
    if (done < all)
        ka_log_progress(run->name, "preflight: %s, %zu of %zu cases", what, done, all);
}

/* ---- the second stage: its parts run beside each other */

/* On a GPU the user's own sizes are checked, and some twenty kinds of upstreams and inputs on one of them. Where that takes
 * long, they get a smaller one. */
static json_t *find_stand_in(const struct ka_run *run)
{
    json_t *smallest = ka_plan_smallest(run->shapes);
    if (!ka_run_on_gpu(run) || !json_is_true(json_object_get(smallest, "slow")))
        return NULL;
    json_t *dims = ka_run_small(run, json_object_get(smallest, "dims"));
    if (already_accepted(run, dims)) {
        json_decref(dims);
        return NULL;
    }
    return json_pack("{s:o, s:s, s:s}", "dims", dims, "class", "hidden", "kind", KA_PLAN_STAND_IN);
}

static void second_stage(struct ka_run *run)
{
    run->preflight->stand_in = find_stand_in(run);
    run->preflight->left = 3;
    ka_run_draft_ahead(run);
    ka_run_hidden(run);
    ka_run_differences(run);
    ka_run_inputs(run);
}

void ka_run_preflight_free(struct ka_run *run)
{
    struct ka_preflight *preflight = run->preflight;
    if (!preflight)
        return;
    run->preflight = NULL;
    struct ka_fan *fans[] = {preflight->sweep, preflight->hidden, preflight->inputs};
    json_t *documents[] = {preflight->pending, preflight->asked,        preflight->tried,
                           preflight->smaller, preflight->asked_hidden, preflight->asked_inputs,
                           preflight->stand_in};
    for (size_t i = 0; i < KA_COUNT(fans); i++)
        ka_fan_free(fans[i]);
    for (size_t i = 0; i < KA_COUNT(documents); i++)
        json_decref(documents[i]);
    free(preflight);
}

void ka_run_preflight_part_done(struct ka_run *run)
{
    if (--run->preflight->left == 0)
        ka_run_preflight_done(run);
}

void ka_run_preflight_done(struct ka_run *run)
{
    size_t hidden = 0, i;
    json_t *shape;
    ka_run_preflight_free(run);
    json_array_foreach(run->shapes, i, shape) hidden +=
        strcmp(json_string_value(json_object_get(shape, "class")), "hidden") == 0;
    ka_run_remember(run);
    ka_run_put(run, "shapes", run->shapes);
    ka_run_put(run, "skipped", run->skipped);
    ka_run_put(run, "oracles", run->oracles);
    ka_run_put(run, "outputs", run->outputs);
    ka_run_put(run, "grads", run->grads);
    json_t *half = json_boolean(run->half);
    ka_run_put(run, "half", half);
    ka_record_add(run->record, "preflight",
                  json_pack("{s:O, s:O, s:O?, s:O}", "shapes", run->shapes, "skipped", run->skipped,
                            "outputs", run->outputs, "oracles", run->oracles));
    ka_log(KA_LOG_INFO, "%s: forward and oracle agree on %zu shapes of the sweep and %zu hidden ones",
           run->name, json_array_size(run->shapes) - hidden, hidden);
    ka_expected_prepare(run);
    ka_run_post_type(run, KA_EV_OK);
}

void ka_run_preflight(struct ka_run *run)
{
    if (ka_run_knows(run)) {
        ka_run_recall_shapes(run);
        ka_run_preflight_done(run);
        return;
    }
    json_decref(run->shapes);
    run->shapes = json_array();
    json_array_clear(run->skipped);
    json_object_clear(run->oracles);
    json_decref(run->outputs);
    run->outputs = NULL;
    json_array_clear(run->grads);
    ka_run_preflight_free(run);
    ka_expected_withdraw(run);
    run->preflight = ka_calloc(1, sizeof(*run->preflight));
    run->preflight->pending = pending_start(run);
    if (!json_array_size(run->preflight->pending)) {
        ka_run_fail(run, KA_EV_UNUSABLE, "sweep_empty", "no shape is left to check (--sweep %s)",
                    run->app->opts->sweep);
        return;
    }
    ask_level(run);
}
