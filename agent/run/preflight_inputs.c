/* Part of preflight: which other layouts and values than make_args draws the forward takes, for each input.
 * Variations (agent/core/vary.h) are tried; those on which forward and oracle agree are in every check. Of
 * the others the oracle says which choices the forward does not take even alone: a further round goes
 * without them. A forward that is wrong for them is a finding about it that nobody asked for: it is said,
 * and counts neither way. What it takes alone it need not take together. */
#include "preflight_internal.h"

#include "agent/core/kinds.h"
#include "agent/core/plan.h"
#include "agent/core/vary.h"
#include "base/each.h"
#include "base/hash.h"
#include "base/log.h"
#include "expected.h"
#include "operations.h"

#define ROUNDS 3

static int try_one(const struct ka_fan *fan, json_int_t id, struct ka_fan_found *found, struct ka_err *why)
{
    *found = (struct ka_fan_found){.status = KA_OP_DIED, .message = "no result"};
    ka_fan_find(fan, id, found);
    if (found->status != KA_OP_OK)
        return ka_fail(why, -1, "%s", found->message);
    if (found->agrees)
        *why = *found->why;
    return found->agrees;
}

/* The choices to blame, or else all of it together. Whether there are such. */
static bool leave_out(struct ka_run *run, json_t *left_out, const struct ka_fan_found *found,
                      const char *label, const char *why)
{
    json_t *blame = json_object_get(found->entry, "blame");
    bool blamed = false;
    KA_EACH_MEMBER(blame, words, reason) {
        if (!json_is_string(reason))
            continue;
        json_object_set(left_out, words, reason);
        ka_log(KA_LOG_DEBUG, "%s: inputs are not tried: %s: %s", run->name, words, json_string_value(reason));
        blamed = true;
    }
    if (!blamed)
        json_object_set_new(left_out, label, json_string(why));
    return blamed;
}

/* Whether single choices are to blame for variations that are not fair. */
static bool leave_out_refused(struct ka_run *run, struct ka_fan *fan)
{
    json_t *left_out = json_object_get(json_object_get(run->oracles, "inputs"), "left_out");
    bool blamed = false;
    KA_EACH(run->preflight->variations, i, variation) {
        struct ka_fan_found found;
        struct ka_err why;
        KA_AUTO_BUF struct ka_buf label = {0};
        if (try_one(fan, (json_int_t)i, &found, &why) == 0)
            continue;
        ka_kind_variation_label(variation, &label);
        blamed = leave_out(run, left_out, &found, ka_buf_str(&label), why.msg) || blamed;
    }
    return blamed;
}

/* What is fair in a variation by the luck of the others in it, and not by itself, is not asked of anyone. */
static void keep_fair(struct ka_run *run, struct ka_fan *fan)
{
    struct ka_preflight *preflight = run->preflight;
    json_t *doc = json_object_get(run->oracles, "inputs");
    json_t *cases = json_object_get(doc, "cases"), *left_out = json_object_get(doc, "left_out");
    for (size_t i = json_array_size(cases); i-- > 0;)
        if (ka_vary_is_refused(json_array_get(cases, i), left_out)) {
            json_array_remove(cases, i);
            json_array_remove(json_object_get(doc, "kept"), i);
        }
    KA_EACH(preflight->variations, i, variation) {
        struct ka_fan_found found;
        struct ka_err why;
        KA_AUTO_BUF struct ka_buf label = {0};
        if (try_one(fan, (json_int_t)i, &found, &why) || ka_vary_is_refused(variation, left_out))
            continue;
        ka_kind_variation_label(variation, &label);
        json_array_append(cases, variation);
        json_array_append_new(json_object_get(doc, "kept"), json_string(ka_buf_str(&label)));
        ka_expected_offer(run, fan, json_array_get(preflight->asked_inputs, i));
    }
}

static bool ask(struct ka_run *run);

static void on_inputs(struct ka_run *run, struct ka_fan *fan, void *arg)
{
    struct ka_preflight *preflight = run->preflight;
    (void)arg;
    if (!ka_preflight_through(run, fan, NULL))
        return;
    bool blamed = leave_out_refused(run, fan);
    keep_fair(run, fan);
    ka_preflight_note_crashes(run, fan);
    preflight->inputs = NULL;
    ka_fan_free(fan);
    if (!blamed || preflight->rounds == ROUNDS || !ask(run))
        preflight->ended(run, KA_STAGE_INPUTS);
}

/* What no variation covers yet. False where nothing is left. */
static bool ask(struct ka_run *run)
{
    struct ka_preflight *preflight = run->preflight;
    const json_t *doc = json_object_get(run->oracles, "inputs");
    json_auto_t *cases = json_array();
    json_t *shape = ka_plan_roomy(run->shapes);
    json_decref(preflight->variations);
    json_decref(preflight->asked_inputs);
    preflight->rounds++;
    preflight->variations = ka_vary(json_object_get(shape, "tensors"), json_object_get(doc, "cases"),
                                    json_object_get(doc, "left_out"));
    ka_plan_varied(cases, preflight->stand_in ? preflight->stand_in : shape, preflight->variations,
                   ka_random_u64());
    preflight->inputs = ka_preflight_try(run, cases, "kinds of inputs", &preflight->asked_inputs, on_inputs);
    return preflight->inputs;
}

bool ka_preflight_inputs(struct ka_run *run)
{
    json_object_set_new(run->oracles, "inputs", json_pack("{s:[], s:[], s:{}}", "kept", "cases", "left_out"));
    return ask(run);
}
