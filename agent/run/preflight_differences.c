/* Part of preflight: finite differences of the real forward against the oracle's gradient, on the smallest
 * required shape, or on a GPU a small version of it. They cost many runs of the forward; what is wrong in the
 * oracle's rules is wrong at every size. A disagreement is followed down to the smallest scale that shows it,
 * and ends the run. What stays open is said, and never counts as agreement. */
#include "preflight_internal.h"

#include "agent/core/differences.h"
#include "agent/core/plan.h"
#include "agent/core/shapes.h"
#include "base/each.h"
#include "base/hash.h"
#include "base/log.h"
#include "cases.h"
#include "events.h"
#include "operations.h"
#include "sizes.h"

static void finish(struct ka_run *run, const char *verdict, const struct ka_differences *found,
                   const json_t *dims, const char *why)
{
    json_t *doc = json_pack("{s:s, s:I, s:I, s:O?, s:s*}", "verdict", verdict, "agree",
                            (json_int_t)(found ? found->agree : 0), "open",
                            (json_int_t)(found ? found->open : 0), "dims", dims, "reason", why);
    if (why)
        ka_log(KA_LOG_WARN, "%s: finite differences say nothing: %s", run->name, why);
    json_object_set_new(run->oracles, "finite_differences", doc);
    run->preflight->ended(run, KA_STAGE_DIFFERENCES);
}

static void disagree(struct ka_run *run, const json_t *dims, const char *message)
{
    json_t *failure =
        json_pack("{s:s, s:s, s:O}", "kind", "forward_oracle_mismatch", "message", message, "dims", dims);
    json_object_set_new(
        failure, "remedy",
        json_string("a value that is meant to be constant for the backward must be detached: use x.detach() "
                    "where the stub reads it (x.max().item() has no derivative, but changes with x)"));
    ka_run_fail_doc(run, KA_EV_UNUSABLE, failure);
}

/* `smaller`: [{"dims", "message"?}]; the first is known to disagree, the rest are smaller ones that were
 * tried. */
static void on_smaller(struct ka_run *run, const struct ka_op_result *result)
{
    json_auto_t *tried = run->preflight->smaller;
    json_t *smallest = json_array_get(tried, 0);
    struct ka_err err, why;
    ka_fail(&err, 0, "%s", json_string_value(json_object_get(smallest, "message")));
    run->preflight->smaller = NULL;
    for (size_t i = 1; result->status == KA_OP_OK && i < json_array_size(tried); i++) {
        const json_t *entry = ka_case_find(result->doc, (json_int_t)i - 1);
        struct ka_differences found;
        if (ka_differences_judge(json_object_get(entry, "fd"), run->grads, &found, &why)) {
            smallest = json_array_get(tried, i);
            err = why;
        }
    }
    disagree(run, json_object_get(smallest, "dims"), err.msg);
}

static void ask(struct ka_run *run, const json_t *dims_list, ka_run_op_fn done)
{
    json_auto_t *cases = ka_plan_preflight(dims_list, ka_random_u64());
    json_t *extra = json_pack("{s:o, s:s}", "cases", ka_plan_for_oracle(cases), "fd", "only");
    ka_run_op(run, "oracle", run->work_forward, extra, done);
}

static void ask_smaller(struct ka_run *run, const json_t *dims, const char *message)
{
    json_auto_t *list = json_array();
    json_t *scaled;
    json_t *smaller = run->preflight->smaller = json_pack("[{s:O, s:s}]", "dims", dims, "message", message);
    for (size_t level = 0; ka_shapes_scale(dims, KA_SHAPES_BUDGET, level, &scaled) == 0; level++) {
        if (ka_plan_size(scaled) < ka_plan_size(dims)) {
            json_array_append_new(smaller, json_pack("{s:O}", "dims", scaled));
            json_array_append_new(list, json_pack("{s:O}", "dims", scaled));
        }
        json_decref(scaled);
    }
    if (json_array_size(list))
        ask(run, list, on_smaller);
    else
        disagree(run, dims, message);
}

static void on_differences(struct ka_run *run, const struct ka_op_result *result);

/* One slope that contradicts among others that agree is a kink, or what is wrong was small for the others by
 * chance: asked once more, of other inputs. */
static void ask_again(struct ka_run *run, const json_t *dims, json_t *fd)
{
    json_auto_t *list = json_pack("[{s:O}]", "dims", dims);
    run->preflight->first_differences = json_incref(fd);
    ka_log(KA_LOG_INFO, "%s: one slope of finite differences contradicts the oracle: asked again", run->name);
    ask(run, list, on_differences);
}

/* Inputs that reach an output and whose gradients nobody checks: not the verdict's to blame, but to be said.
 */
static void learn_unasked(struct ka_run *run, const json_t *entry)
{
    json_t *unasked = json_object_get(entry, "unasked");
    if (!json_object_size(unasked))
        return;
    json_object_set_new(run->oracles, "unasked", json_deep_copy(unasked));
    KA_EACH_MEMBER(unasked, name, why) {
        const char *text = json_string_value(why);
        ka_log(KA_LOG_WARN, "%s: the gradient of %s is not checked, though an output hangs on it: %s",
               run->name, name, text ? text : "nobody asks for it");
    }
}

static void on_differences(struct ka_run *run, const struct ka_op_result *result)
{
    json_auto_t *dims = ka_run_small(run, json_object_get(ka_plan_smallest(run->shapes), "dims"));
    const json_t *entry = result->status == KA_OP_OK ? ka_case_find(result->doc, 0) : NULL;
    json_t *fd = json_object_get(entry, "fd");
    const char *skipped = json_string_value(json_object_get(fd, "skipped"));
    json_t *first = run->preflight->first_differences;
    struct ka_differences found;
    struct ka_err err;
    learn_unasked(run, entry);
    ka_differences_add(fd, first);
    if (result->status == KA_OP_SANDBOX) {
        ka_run_op_failed(run, result);
    } else if (!json_is_object(fd)) {
        if (entry)
            ka_case_error(entry, &err);
        else
            ka_fail(&err, 0, "%s", result->message);
        finish(run, "open", NULL, dims, err.msg);
    } else if (skipped) {
        finish(run, "open", NULL, dims, skipped);
    } else if (ka_differences_judge(fd, run->grads, &found, &err)) {
        ask_smaller(run, dims, err.msg);
    } else if (found.disagree && !first) {
        ask_again(run, dims, fd);
    } else {
        finish(run, found.agree ? "agree" : "open", &found, dims,
               found.agree ? NULL : "every slope is drowned by kinks or rounding");
    }
}

bool ka_preflight_differences(struct ka_run *run)
{
    json_t *smallest = ka_plan_smallest(run->shapes);
    if (!smallest)
        return false;
    json_auto_t *list = json_pack("[{s:o}]", "dims", ka_run_small(run, json_object_get(smallest, "dims")));
    ask(run, list, on_differences);
    return true;
}
