/* Part of preflight: on which shapes of the user's sweep forward and oracle agree.
 *
 * Without a GPU each shape is tried scaled down, from the largest scale to the smallest, until forward and
 * oracle agree on it; on a GPU first as it is, and scaled only if the oracle cannot hold it. A required shape
 * that never does ends the run (exit code 3). */
#include "preflight_internal.h"

#include <string.h>

#include "agent/core/fields.h"
#include "agent/core/plan.h"
#include "agent/core/shapes.h"
#include "base/each.h"
#include "base/log.h"
#include "events.h"
#include "expected.h"
#include "operations.h"
#include "sizes.h"

/* Product of sizes that is tried when the oracle does not hold the real shape. */
#define GPU_BUDGET ((uint64_t)1 << 24)

/* Shapes still to be settled are entries {"dims", "ladder": [...], "level", "stand_ins", "required", "error",
 * "mismatch"}. The first `stand_ins` scales of the ladder may be checked in place of the shape; the rest are
 * tried only to find the smallest scale that shows a disagreement. */

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
    return required || strcmp(run->settings.sweep, "required") != 0;
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
    json_auto_t *sweep = ka_run_sweep(run, &own_cpu_sweep);
    json_t *pending = json_array();
    json_object_del(run->oracles, "scaled"); /* of an interrupted run */
    KA_EACH(sweep, i, entry) {
        json_t *dims = json_object_get(entry, "dims");
        json_t *flag = json_object_get(entry, "required");
        bool required = !flag || json_is_true(flag);
        if (!wanted(run, required))
            json_array_append_new(run->skipped, json_pack("{s:O, s:s}", "dims", dims, "reason",
                                                          "not required (--sweep required)"));
        else
            json_array_append_new(pending, pending_shape(run, dims, own_cpu_sweep, required));
    }
    return pending;
}

static json_t *dims_at_level(const json_t *entry)
{
    json_t *ladder = json_object_get(entry, "ladder");
    return json_array_get(ladder, (size_t)json_integer_value(json_object_get(entry, "level")));
}

static void ask_level(struct ka_run *run);

static bool is_mismatch(const json_t *error)
{
    return ka_is_text(error, "kind", "forward_oracle_mismatch") || ka_is_text(error, "kind", "gradient_nan");
}

static bool next_level(struct ka_run *run, json_t *entry, json_t *still);

/* One shape failed on its level. What cannot be run is tried smaller, and a scale that works stands in for
 * it. Forward and oracle that ran and differ are a finding about the forward: smaller scales are tried only
 * to name the smallest that shows it. */
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

/* What the stub returns, and which of the wanted inputs were tensors on at least one shape (None arguments
 * are not). */
static void learn_outputs(struct ka_run *run, const json_t *entry)
{
    if (!json_is_true(json_object_get(entry, "ok")))
        return;
    if (!run->outputs)
        run->outputs = json_incref(json_object_get(entry, "outputs"));
    const char *const sides[] = {"inputs", "outputs"}; /* an upstream is of its output's type */
    for (size_t side = 0; side < KA_COUNT(sides); side++) {
        KA_EACH(json_object_get(entry, sides[side]), i, one) {
            run->half = run->half || ka_is_text(one, "dtype", "float16");
        }
    }
    KA_EACH(json_object_get(entry, "grads"), i, name) {
        bool known = !json_is_string(name);
        KA_EACH(run->grads, k, old)
            known = known || json_equal(old, name);
        if (!known)
            json_array_append(run->grads, name);
    }
}

/* A smaller stand-in for a shape is said; on a GPU also what kept the real one from being checked. */
static void note_smaller(struct ka_run *run, const json_t *entry)
{
    json_t *own = json_object_get(entry, "dims"), *checked = dims_at_level(entry);
    if (!json_equal(own, checked)) {
        if (!json_object_get(run->oracles, "scaled"))
            json_object_set_new(run->oracles, "scaled", json_array());
        json_array_append_new(json_object_get(run->oracles, "scaled"),
                              json_pack("{s:O, s:O, s:O}", "dims", own, "checked", checked, "required",
                                        json_object_get(entry, "required")));
    }
    if (ka_run_scaled_down(run) || !json_integer_value(json_object_get(entry, "level")))
        return;
    KA_AUTO_FREE char *dims = ka_text_of_value(dims_at_level(entry), JSON_COMPACT);
    KA_AUTO_BUF struct ka_buf text = {0};
    ka_buf_printf(&text, "checked as %s instead: %.300s", dims,
                  ka_text_of(json_object_get(entry, "error"), "message", "no result at its own size"));
    json_array_append_new(run->skipped, json_pack("{s:O, s:s}", "dims", json_object_get(entry, "dims"),
                                                  "reason", ka_buf_str(&text)));
}

/* One shape on its present level. False if the run has ended by it. */
static bool settle_shape(struct ka_run *run, struct ka_fan *fan, json_t *entry, json_t *item, json_t *still)
{
    struct ka_fan_found found;
    json_t *error = NULL;
    bool alive = true;
    ka_fan_find(fan, json_integer_value(json_object_get(item, "id")), &found);
    if (!ka_preflight_agrees(&found, &error)) {
        alive = settle_failed(run, entry, error, still);
    } else if (json_is_true(json_object_get(entry, "mismatch"))) {
        alive = next_level(run, entry, still);
    } else {
        note_smaller(run, entry);
        ka_preflight_accept(run, dims_at_level(entry),
                            json_is_true(json_object_get(entry, "required")) ? "required" : "optional",
                            "sweep", found.entry);
        ka_expected_offer(run, fan, item);
    }
    if (alive && found.status == KA_OP_OK) {
        learn_outputs(run, found.entry);
        ka_preflight_learn_reference(run, found.entry);
    }
    return alive;
}

/* On a GPU the user's own sizes are checked, and some twenty kinds of upstreams and inputs on one of them.
 * Where that costs much, they get a smaller one. */
static json_t *find_stand_in(const struct ka_run *run)
{
    json_t *smallest = ka_plan_smallest(run->shapes);
    if (!ka_run_on_gpu(run) || !json_is_true(json_object_get(smallest, "costly")))
        return NULL;
    json_auto_t *dims = ka_run_small(run, json_object_get(smallest, "dims"));
    if (ka_preflight_has(run, dims))
        return NULL;
    return json_pack("{s:O, s:s, s:s, s:b}", "dims", dims, "class", "hidden", "kind",
                     "a small version of a required shape", "stand_in", 1);
}

static void on_level(struct ka_run *run, struct ka_fan *fan, void *arg)
{
    struct ka_preflight *preflight = run->preflight;
    (void)arg;
    if (!ka_preflight_through(run, fan, "forward against oracle"))
        return;
    json_auto_t *pending = preflight->pending, *asked = preflight->asked;
    json_t *still = json_array();
    preflight->pending =
        still; /* before the loop: a failing shape ends the run, and with it what the run holds */
    preflight->asked = NULL;
    preflight->sweep = NULL;
    bool alive = true;
    KA_EACH(pending, i, entry) {
        if (alive)
            alive = settle_shape(run, fan, entry, json_array_get(asked, i), still);
    }
    ka_fan_free(fan);
    if (!alive)
        return;
    if (json_array_size(still)) {
        ask_level(run);
        return;
    }
    preflight->stand_in = find_stand_in(run);
    preflight->ended(run, KA_STAGE_SWEEP);
}

static void ask_level(struct ka_run *run)
{
    struct ka_preflight *preflight = run->preflight;
    json_auto_t *shapes = json_array();
    ka_log_progress(run->name, "preflight: forward against oracle on %zu shapes",
                    json_array_size(preflight->pending));
    KA_EACH(preflight->pending, i, entry)
        json_array_append_new(shapes, json_pack("{s:O}", "dims", dims_at_level(entry)));
    preflight->sweep = ka_preflight_ask(run, shapes, "sweep", &preflight->asked, on_level);
}

bool ka_preflight_sweep(struct ka_run *run)
{
    run->preflight->pending = pending_start(run);
    if (json_array_size(run->preflight->pending))
        ask_level(run);
    else
        ka_run_fail(run, KA_EV_UNUSABLE, "sweep_empty", "no shape is left to check (--sweep %s)",
                    run->settings.sweep);
    return true;
}
