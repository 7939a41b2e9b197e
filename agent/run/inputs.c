/* The last part of preflight: which other kinds of inputs than make_args draws (rows apart in memory, axes in another order,
 * mixed magnitudes, rows whose greatest value stands twice) the forward takes. Those on which forward and oracle agree are
 * tried in every check. A forward that is wrong for the rest is a finding about it that nobody asked for: it is said, and
 * counts neither way. */
#include "internal.h"

#include "cases.h"
#include "core/plan.h"
#include "hash.h"
#include "log.h"

static json_t *all_kinds(void)
{
    return json_pack("[s, s, s, s]", "strided", "transposed", "mixed", "tied");
}

static int try_kind(const struct ka_op_result *result, json_int_t id, struct ka_err *why)
{
    const json_t *entry = ka_case_find(result->doc, id);
    struct ka_tensors *tensors = NULL;
    if (result->status != KA_OP_OK)
        return ka_fail(why, -1, "%s", result->message);
    if (!json_is_true(json_object_get(entry, "ok"))) {
        ka_case_error(entry, why);
        return -1;
    }
    int rc = ka_case_open(result->child, id, &tensors, why);
    rc = rc ? rc : ka_case_agrees(tensors, entry, NULL, why);
    ka_tensors_free(tensors);
    return rc;
}

static void on_inputs(struct ka_run *run, const struct ka_op_result *result)
{
    if (result->status == KA_OP_SANDBOX) {
        ka_run_op_failed(run, result);
        return;
    }
    json_t *kinds = all_kinds(), *kept = json_array(), *left_out = json_object(), *kind;
    size_t i;
    json_array_foreach(kinds, i, kind)
    {
        struct ka_err why;
        if (try_kind(result, (json_int_t)i, &why) == 0) {
            json_array_append(kept, kind);
            continue;
        }
        json_object_set_new(left_out, json_string_value(kind), json_string(why.msg));
        ka_log(KA_LOG_DEBUG, "%s: %s inputs are not tried: %s", run->name, json_string_value(kind), why.msg);
    }
    json_object_set_new(run->oracles, "inputs", json_pack("{s:o, s:o}", "kept", kept, "left_out", left_out));
    json_decref(kinds);
    ka_run_preflight_done(run);
}

void ka_run_inputs(struct ka_run *run)
{
    static const char *const keep[] = {"id", "dims", "seed", "upstream", "inputs"};
    json_t *kinds = all_kinds(), *cases = json_array();
    ka_plan_inputs(cases, run->shapes, kinds, ka_random_u64());
    json_decref(kinds);
    if (!json_array_size(cases)) {
        json_decref(cases);
        ka_run_preflight_done(run);
        return;
    }
    ka_log_progress(run->name, "preflight: inputs of other strides and values");
    json_t *extra = json_pack("{s:o, s:b}", "cases", ka_plan_for_child(cases, keep, KA_COUNT(keep)), "fd", 0);
    json_decref(cases);
    ka_run_op(run, "oracle", run->work_forward, extra, on_inputs);
}
