/* What the parts of preflight share: cases that the oracle is asked for, and the shapes that are accepted. */
#include "preflight_internal.h"

#include <errno.h>
#include <string.h>

#include "agent/core/fields.h"
#include "agent/core/plan.h"
#include "agent/core/vary.h"
#include "base/each.h"
#include "base/hash.h"
#include "base/log.h"
#include "cases.h"
#include "operations.h"
#include "sizes.h"

/* Seconds of one evaluation in float64, with all checks; the whole case takes about three times as long. */
#define EVALUATION_SECONDS 20
/* One of some thirty cases of this shape is too many by these, as the oracle does it: seconds, with the start
 * of a context and compiling; bytes of its results, which lie in memory until they are judged. */
#define SLOW 4
#define BULKY ((double)((size_t)512 << 20))

static struct ka_fan *start(struct ka_run *run, const char *what, json_t *asked, json_t *extra, bool together,
                            ka_fan_fn changed)
{
    struct ka_fan_req req = {.operation = "oracle",
                             .file = run->work_forward,
                             .what = what,
                             .cases = asked,
                             .extra = extra,
                             .together = together,
                             .agree = true};
    return ka_fan_start(run, &req, changed, NULL);
}

struct ka_fan *ka_preflight_ask(struct ka_run *run, const json_t *dims_list, const char *what, json_t **asked,
                                ka_fan_fn changed)
{
    json_auto_t *cases = ka_plan_preflight(dims_list, ka_random_u64());
    *asked = ka_plan_for_oracle(cases);
    json_t *extra = json_pack("{s:b}", "fd", 0);
    if (ka_run_on_gpu(run)) /* a shape that takes longer has a smaller one stand in for it */
        json_object_set_new(extra, "budget", json_pack("{s:i}", "seconds", EVALUATION_SECONDS));
    return start(run, what, *asked, extra, false, changed);
}

struct ka_fan *ka_preflight_try(struct ka_run *run, const json_t *cases, const char *what, json_t **asked,
                                ka_fan_fn changed)
{
    *asked = ka_plan_for_oracle(cases);
    return json_array_size(cases)
               ? start(run, what, *asked, json_pack("{s:b}", "fd", 0), !ka_run_on_gpu(run), changed)
               : NULL;
}

/* The finding, with what the oracle saw of a race, which is its likeliest cause. */
static json_t *mismatch_error(const json_t *entry, const struct ka_err *err)
{
    const json_t *facts = json_object_get(entry, "facts");
    const char *race = json_string_value(json_array_get(json_object_get(facts, "races"), 0));
    KA_AUTO_BUF struct ka_buf text = {0};
    ka_buf_printf(&text, "%s%s%.300s", err->msg, race ? " The forward has a race: " : "", race ? race : "");
    return json_pack(
        "{s:s, s:s, s:s}", "kind", "forward_oracle_mismatch", "message", ka_buf_str(&text), "remedy",
        "the forward gives values that its own operations do not; if it cannot run at such a size, name "
        "shapes that it can in SWEEP_CPU");
}

static json_t *nan_error(const struct ka_err *err)
{
    return json_pack(
        "{s:s, s:s, s:s}", "kind", "gradient_nan", "message", err->msg, "remedy",
        "somewhere the forward computes what has no derivative, as a root or a logarithm of 0 or "
        "infinity less infinity do, and a later operation hides it: give the operation a harmless "
        "argument there, as in tl.sqrt(tl.where(mask, x, 1.0))");
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

bool ka_preflight_agrees(const struct ka_fan_found *found, json_t **error)
{
    struct ka_err err;
    if (found->status != KA_OP_OK) {
        *error = whole_error(found);
    } else if (json_is_true(json_object_get(found->entry, "ok"))) {
        if (found->agrees == 0)
            return true;
        *error = found->agrees == -EDOM ? mismatch_error(found->entry, found->why)
                 : found->agrees == -ERANGE
                     ? nan_error(found->why)
                     : json_pack("{s:s, s:s}", "kind", "internal", "message", found->why->msg);
    } else if (json_is_object(json_object_get(found->entry, "error"))) {
        *error = json_deep_copy(json_object_get(found->entry, "error"));
    } else {
        ka_case_error(found->entry, &err);
        *error = json_pack("{s:s, s:s}", "kind", "internal", "message", err.msg);
    }
    return false;
}

bool ka_preflight_has(const struct ka_run *run, const json_t *dims)
{
    KA_EACH(run->shapes, i, shape) {
        if (json_equal(json_object_get(shape, "dims"), dims))
            return true;
    }
    return false;
}

json_t *ka_preflight_accept(struct ka_run *run, const json_t *dims, const char *class, const char *kind,
                            const json_t *entry)
{
    if (ka_preflight_has(run, dims))
        return NULL;
    bool costly = json_number_value(json_object_get(entry, "seconds")) > SLOW ||
                  json_number_value(json_object_get(entry, "bytes")) > BULKY;
    json_t *shape = json_pack("{s:O, s:s, s:s, s:O?, s:b, s:O?, s:O?, s:o}", "dims", dims, "class", class,
                              "kind", kind, "grads", json_object_get(entry, "grads"), "costly", costly,
                              "bytes", json_object_get(entry, "bytes"), "processor_seconds",
                              json_object_get(entry, "processor_seconds"), "tensors", ka_vary_tensors(entry));
    json_array_append_new(run->shapes, shape);
    return shape;
}

void ka_preflight_learn_reference(struct ka_run *run, const json_t *entry)
{
    const char *problem = json_string_value(json_object_get(entry, "reference_error"));
    const json_t *has = json_object_get(run->inspect, "has");
    if (!json_is_true(json_object_get(has, "reference")) || !json_is_true(json_object_get(entry, "ok")) ||
        json_object_get(entry, "reference_without_room"))
        return;
    if (problem && !json_object_get(run->oracles, "reference_error")) {
        ka_log(KA_LOG_WARN, "%s: the reference is no second opinion: %s", run->name, problem);
        json_object_set_new(run->oracles, "reference_error", json_string(problem));
    }
    bool usable = !json_object_get(run->oracles, "reference_error");
    json_object_set_new(run->oracles, "reference", json_string(usable ? "agree" : "unusable"));
}

void ka_preflight_note_crashes(struct ka_run *run, const struct ka_fan *fan)
{
    size_t done, all;
    ka_fan_count(fan, &done, &all);
    for (size_t id = 0; id < all; id++) {
        struct ka_fan_found found;
        const json_t *error = NULL;
        if (ka_fan_find(fan, (json_int_t)id, &found))
            error = json_object_get(found.entry, "error");
        if (!ka_is_text(error, "kind", "internal"))
            continue;
        json_t *crashed = json_object_get(run->oracles, "crashed");
        if (!crashed) {
            crashed = json_pack("{s:i, s:O?}", "cases", 0, "message", json_object_get(error, "message"));
            json_object_set_new(run->oracles, "crashed", crashed);
        }
        ka_number_add(crashed, "cases", 1);
    }
}

void ka_preflight_progress(struct ka_run *run, const struct ka_fan *fan, const char *what)
{
    size_t done, all;
    ka_fan_count(fan, &done, &all);
    if (done < all)
        ka_log_progress(run->name, "preflight: %s, %zu of %zu cases", what, done, all);
}

bool ka_preflight_through(struct ka_run *run, const struct ka_fan *fan, const char *what)
{
    const struct ka_op_result *failed = ka_fan_failed(fan, KA_OP_SANDBOX);
    if (failed) {
        ka_run_op_failed(run, failed);
        return false;
    }
    if (what)
        ka_preflight_progress(run, fan, what);
    return ka_fan_ended(fan);
}
