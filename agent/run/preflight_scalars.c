/* Part of preflight: which arguments that are numbers or flags may have another value than make_args gives
 * them. Those on which forward and oracle agree then are varied in every check; the rest is named, as never
 * varied: a backward may have their value written into it, and nobody would see. */
#include "preflight_internal.h"

#include <string.h>

#include "agent/core/fields.h"
#include "agent/core/plan.h"
#include "base/each.h"
#include "base/hash.h"
#include "expected.h"
#include "operations.h"

#define WAYS 3 /* of draw.py's nearby() */

/* Every input that wants a gradient, and small: what guards against a division by little shows there and
 * nowhere else. */
static json_t *all_small(const json_t *params)
{
    json_t *values = json_object();
    KA_EACH(params, i, param) {
        const char *name = json_string_value(json_object_get(param, "name"));
        if (name && json_is_true(json_object_get(param, "grad")))
            json_object_set_new(values, name, json_string("small"));
    }
    return values;
}

/* {"name", "way", "values"?} for every argument that wants no gradient: what it is, the child finds out. The
 * first way that is taken counts; beside small inputs the last one is, so that two are tried. */
static json_t *all_ways(const struct ka_run *run)
{
    json_t *params = json_object_get(json_object_get(run->inspect, "stub"), "params");
    json_t *list = json_array();
    json_auto_t *small = all_small(params);
    KA_EACH(params, i, param) {
        json_t *name = json_object_get(param, "name");
        for (int way = 0; way < WAYS && !json_is_true(json_object_get(param, "grad")); way++) {
            json_array_append_new(list, json_pack("{s:O, s:i}", "name", name, "way", way));
            json_array_append_new(
                list, json_pack("{s:O, s:i, s:O}", "name", name, "way", WAYS - 1 - way, "values", small));
        }
    }
    return list;
}

/* What came of it: the ways that are taken, why others are not, and the names that are through: among usual
 * values, and among small ones. */
struct answers {
    json_t *varied, *never, *done[2];
};

static void take_answer(struct ka_run *run, struct ka_fan *fan, size_t i, json_t *item, struct answers *out)
{
    json_t *scalar = json_object_get(item, "scalar"), *values = json_object_get(item, "values");
    json_t *done = out->done[values != NULL];
    json_auto_t *error = NULL;
    const char *name = json_string_value(json_object_get(scalar, "name"));
    struct ka_fan_found found = {.status = KA_OP_DIED, .message = "no result"};
    if (json_object_get(done, name))
        return;
    ka_fan_find(fan, (json_int_t)i, &found);
    bool agrees = ka_preflight_agrees(&found, &error);
    bool unheard = agrees && json_is_true(json_object_get(found.entry, "unheard"));
    const char *why = unheard ? "the outputs stay the same" : ka_text_of(error, "message", "not taken");
    if (agrees && !unheard) {
        json_array_append_new(out->varied,
                              json_pack("{s:O, s:O, s:O*}", "name", json_object_get(scalar, "name"), "way",
                                        json_object_get(scalar, "way"), "values", values));
        json_object_set_new(done, name, json_true());
        if (!values)
            json_object_del(out->never, name);
        ka_expected_offer(run, fan, item);
    } else if (strstr(why, " is a tensor")) {
        json_object_set_new(done, name, json_true());
    } else if (!values && !json_object_get(out->never, name)) { /* of several ways the first tells most */
        json_object_set_new(out->never, name, json_string(why));
    }
}

static void on_scalars(struct ka_run *run, struct ka_fan *fan, void *arg)
{
    (void)arg;
    if (!ka_preflight_through(run, fan, NULL))
        return;
    struct answers out = {json_array(), json_object(), {json_object(), json_object()}};
    KA_EACH(run->preflight->asked_scalars, i, item) {
        take_answer(run, fan, i, item, &out);
    }
    json_decref(out.done[0]);
    json_decref(out.done[1]);
    json_object_set_new(run->oracles, "scalars",
                        json_pack("{s:o, s:o}", "varied", out.varied, "never_varied", out.never));
    ka_preflight_note_crashes(run, fan);
    run->preflight->scalars = NULL;
    ka_fan_free(fan);
    run->preflight->ended(run, KA_STAGE_SCALARS);
}

bool ka_preflight_scalars(struct ka_run *run)
{
    json_auto_t *ways = all_ways(run), *cases = json_array();
    const json_t *stand_in = run->preflight->stand_in;
    ka_plan_scalars(cases, stand_in ? stand_in : ka_plan_smallest(run->shapes), ways, ka_random_u64());
    run->preflight->scalars =
        ka_preflight_try(run, cases, "numbers and flags", &run->preflight->asked_scalars, on_scalars);
    return run->preflight->scalars;
}
