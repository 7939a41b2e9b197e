/* Hidden shapes, the last of preflight's: derived from what was accepted, and kept where forward and oracle agree. A candidate
 * cannot know them.
 *
 * Scaling for the CPU may leave a loop over blocks with a single turn, in every shape made from the scaled ones. So each size
 * that was scaled is also tried long, beside small ones; unless it is one that the grid grows with, which a probe of twice
 * the size shows: thousands of programs would take the interpreter minutes. */
#include <string.h>

#include "cases.h"
#include "core/plan.h"
#include "core/shapes.h"
#include "hash.h"
#include "internal.h"
#include "log.h"

#define HIDDEN_TRIED 12
#define HIDDEN_KEPT 8
#define LONG_BUDGET ((uint64_t)1 << 24)

static void keep_agreed(struct ka_run *run, const json_t *tried, const struct ka_op_result *result,
                        size_t most)
{
    size_t i, kept = 0;
    json_t *entry;
    json_array_foreach((json_t *)tried, i, entry)
    {
        json_t *error = NULL;
        const char *kind = json_string_value(json_object_get(entry, "kind"));
        if (kind && kept < most && ka_run_case_agrees(result, (json_int_t)i, &error)) {
            ka_run_accept_shape(run, json_object_get(entry, "dims"), "hidden", kind,
                                ka_case_find(result->doc, (json_int_t)i));
            kept++;
        }
        json_decref(error);
    }
}

static void on_long(struct ka_run *run, const struct ka_op_result *result)
{
    json_t *tried = run->pending;
    run->pending = NULL;
    if (result->status == KA_OP_OK)
        keep_agreed(run, tried, result, json_array_size(tried));
    json_decref(tried);
    ka_run_differences(run);
}

static json_int_t programs_of(const struct ka_op_result *result, size_t id)
{
    const json_t *facts = json_object_get(ka_case_find(result->doc, (json_int_t)id), "facts");
    return json_integer_value(json_object_get(facts, "programs"));
}

/* Of the probes in `tried` the shapes that are worth a look (new reference). */
static json_t *affordable(const json_t *tried, const struct ka_op_result *result)
{
    json_t *list = json_array(), *entry;
    json_int_t base = 0;
    size_t i;
    json_array_foreach((json_t *)tried, i, entry)
    {
        const json_t *dims = json_object_get(entry, "long");
        json_int_t programs = programs_of(result, i);
        if (json_object_get(entry, "kind"))
            continue;
        if (!dims)
            base = programs;
        else if (programs > 0 && programs <= base)
            json_array_append_new(list, json_pack("{s:O, s:s}", "dims", dims, "kind", "long"));
    }
    return list;
}

static void on_hidden(struct ka_run *run, const struct ka_op_result *result)
{
    json_t *tried = run->pending;
    run->pending = NULL;
    json_t *longer = NULL;
    if (result->status == KA_OP_OK) {
        keep_agreed(run, tried, result, HIDDEN_KEPT);
        longer = affordable(tried, result);
    }
    json_decref(tried);
    if (!json_array_size(longer)) {
        json_decref(longer);
        ka_run_differences(run);
        return;
    }
    ka_log_progress(run->name, "preflight: long hidden shapes");
    run->pending = longer;
    ka_run_ask_oracle(run, longer, on_long);
}

/* Probes for the largest required shape of a sweep that was scaled automatically. */
static void add_probes(struct ka_run *run, json_t *pending)
{
    bool own_cpu_sweep;
    json_t *sweep = ka_run_sweep(run, &own_cpu_sweep), *entry, *largest = NULL, *probes;
    size_t i;
    json_array_foreach(sweep, i, entry)
    {
        const json_t *flag = json_object_get(entry, "required");
        json_t *dims = json_object_get(entry, "dims");
        if ((!flag || json_is_true(flag)) && (!largest || ka_plan_size(dims) > ka_plan_size(largest)))
            largest = dims;
    }
    if (largest && ka_run_scaled_down(run) && !own_cpu_sweep &&
        ka_shapes_long(largest, LONG_BUDGET, &probes) == 0) {
        json_array_extend(pending, probes);
        json_decref(probes);
    }
    json_decref(sweep);
}

/* Hidden shapes come from a small version of every required shape, taken in turn. */
void ka_run_hidden(struct ka_run *run)
{
    json_t *known = json_array(), *shape, *found;
    size_t i, required = 0;
    json_array_foreach(run->shapes, i, shape)
    {
        json_array_append(known, json_object_get(shape, "dims"));
        required += strcmp(json_string_value(json_object_get(shape, "class")), "required") == 0;
    }
    json_decref(run->pending);
    run->pending = json_array();
    size_t each = required ? (HIDDEN_TRIED + required - 1) / required : 0;
    json_array_foreach(run->shapes, i, shape)
    {
        if (strcmp(json_string_value(json_object_get(shape, "class")), "required") != 0 ||
            ka_shapes_hidden(json_object_get(shape, "dims"), known, ka_random_u64(), each, KA_SHAPES_BUDGET,
                             &found))
            continue;
        json_array_extend(run->pending, found);
        json_decref(found);
    }
    json_decref(known);
    add_probes(run, run->pending);
    if (!json_array_size(run->pending)) {
        ka_run_differences(run);
        return;
    }
    ka_log_progress(run->name, "preflight: hidden shapes");
    ka_run_ask_oracle(run, run->pending, on_hidden);
}
