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

/* {"name", "way"} for every argument that wants no gradient: what it is, the child finds out. */
static json_t *all_ways(const struct ka_run *run)
{
    json_t *list = json_array();
    KA_EACH(json_object_get(json_object_get(run->inspect, "stub"), "params"), i, param) {
        for (int way = 0; way < WAYS && !json_is_true(json_object_get(param, "grad")); way++)
            json_array_append_new(
                list, json_pack("{s:O, s:i}", "name", json_object_get(param, "name"), "way", way));
    }
    return list;
}

static void on_scalars(struct ka_run *run, struct ka_fan *fan, void *arg)
{
    (void)arg;
    if (!ka_preflight_through(run, fan, NULL))
        return;
    json_t *asked = run->preflight->asked_scalars, *varied = json_array(), *never = json_object();
    json_auto_t *done = json_object();
    KA_EACH(asked, i, item) {
        json_t *scalar = json_object_get(item, "scalar");
        json_auto_t *error = NULL;
        const char *name = json_string_value(json_object_get(scalar, "name"));
        struct ka_fan_found found = {.status = KA_OP_DIED, .message = "no result"};
        ka_fan_find(fan, (json_int_t)i, &found);
        if (json_object_get(done, name))
            continue;
        bool agrees = ka_preflight_agrees(&found, &error);
        const char *why = ka_text_of(error, "message", "not taken");
        if (agrees) {
            json_array_append(varied, scalar);
            json_object_set_new(done, name, json_true());
            json_object_del(never, name);
            ka_expected_offer(run, fan, item);
        } else if (strstr(why, " is a tensor")) {
            json_object_set_new(done, name, json_true());
        } else if (!json_object_get(never, name)) { /* of several ways the first tells most */
            json_object_set_new(never, name, json_string(why));
        }
    }
    json_object_set_new(run->oracles, "scalars",
                        json_pack("{s:o, s:o}", "varied", varied, "never_varied", never));
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
