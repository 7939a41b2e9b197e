/* Part of preflight: which other kinds of inputs than make_args draws (rows apart in memory, axes in another
 * order, mixed magnitudes, rows whose greatest value stands twice) the forward takes. Those on which forward
 * and oracle agree are tried in every check. A forward that is wrong for the rest is a finding about it that
 * nobody asked for: it is said, and counts neither way. */
#include "preflight_internal.h"

#include "agent/core/kinds.h"
#include "agent/core/plan.h"
#include "base/hash.h"
#include "base/log.h"
#include "events.h"
#include "expected.h"
#include "operations.h"
#include "sizes.h"

static json_t *all_kinds(void)
{
    const struct ka_kind *kind;
    json_t *names = json_array();
    for (size_t i = 0; (kind = ka_kind_at(i)); i++)
        if (kind->sort == KA_KIND_INPUTS)
            json_array_append_new(names, json_string(kind->name));
    return names;
}

static int try_kind(const struct ka_fan *fan, json_int_t id, struct ka_err *why)
{
    struct ka_fan_found found = {.status = KA_OP_DIED, .message = "no result"};
    ka_fan_find(fan, id, &found);
    if (found.status != KA_OP_OK)
        return ka_fail(why, -1, "%s", found.message);
    if (found.agrees)
        *why = *found.why;
    return found.agrees;
}

static void on_inputs(struct ka_run *run, struct ka_fan *fan, void *arg)
{
    const struct ka_op_result *failed = ka_fan_failed(fan, KA_OP_SANDBOX);
    (void)arg;
    if (failed) {
        ka_run_op_failed(run, failed);
        return;
    }
    if (!ka_fan_ended(fan))
        return;
    json_t *kinds = all_kinds(), *kept = json_array(), *left_out = json_object(), *kind;
    size_t i;
    json_array_foreach(kinds, i, kind)
    {
        struct ka_err why;
        if (try_kind(fan, (json_int_t)i, &why) == 0) {
            json_array_append(kept, kind);
            ka_expected_offer(run, fan, json_array_get(run->preflight->asked_inputs, i));
            continue;
        }
        json_object_set_new(left_out, json_string_value(kind), json_string(why.msg));
        ka_log(KA_LOG_DEBUG, "%s: %s inputs are not tried: %s", run->name, json_string_value(kind), why.msg);
    }
    json_object_set_new(run->oracles, "inputs", json_pack("{s:o, s:o}", "kept", kept, "left_out", left_out));
    json_decref(kinds);
    run->preflight->inputs = NULL;
    ka_fan_free(fan);
    run->preflight->ended(run, KA_STAGE_INPUTS);
}

bool ka_preflight_inputs(struct ka_run *run)
{
    json_t *kinds = all_kinds(), *cases = json_array();
    const json_t *stand_in = run->preflight->stand_in;
    ka_plan_inputs(cases, stand_in ? stand_in : ka_plan_smallest(run->shapes), kinds, ka_random_u64());
    json_decref(kinds);
    if (!json_array_size(cases)) {
        json_decref(cases);
        return false;
    }
    json_t *asked = run->preflight->asked_inputs = ka_plan_for_oracle(cases);
    struct ka_fan_req req = {.operation = "oracle",
                             .file = run->work_forward,
                             .what = "kinds of inputs",
                             .cases = asked,
                             .extra = json_pack("{s:b}", "fd", 0),
                             .together = !ka_run_on_gpu(run),
                             .agree = true};
    json_decref(cases);
    run->preflight->inputs = ka_fan_start(run, &req, on_inputs, NULL);
    return true;
}
