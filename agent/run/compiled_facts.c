/* The compiled half of a run's facts: what its kernels cost as binaries. Knows results of operation facts,
 * not compilers. */
#include "compiled_facts.h"

#include <string.h>

#include "agent/core/plan.h"
#include "agent/core/rank.h"
#include "agent/ops/compile.h"
#include "base/each.h"
#include "base/hash.h"
#include "sizes.h"

typedef void (*kernel_fn)(json_t *kernel, void *arg);

static void each_kernel(const json_t *facts, kernel_fn visit, void *arg)
{
    KA_EACH(json_object_get(facts, "cases"), i, entry) {
        KA_EACH(json_object_get(entry, "kernels"), j, kernel)
            visit(kernel, arg);
    }
    KA_EACH(json_object_get(facts, "kernels"), i, kernel)
        visit(kernel, arg);
}

/* A kernel keeps its place in the facts; its key gives way to the numbers, or to why there are none. */
static void fill(json_t *kernel, void *arg)
{
    static const char *const numbers[] = {"registers", "spills", "shared", "instructions"};
    const char *key = json_string_value(json_object_get(kernel, "compile"));
    if (!key)
        return;
    const json_t *outcome = json_object_get(arg, key);
    const json_t *found = json_object_get(outcome, "facts");
    for (size_t i = 0; found && i < KA_COUNT(numbers); i++) {
        json_t *number = json_object_get(found, numbers[i]);
        json_object_set(kernel, numbers[i], json_is_number(number) ? number : json_null());
    }
    json_object_set_new(kernel, "ok", json_boolean(found));
    json_t *error = json_object_get(outcome, "error");
    if (!found)
        json_object_set_new(kernel, "error",
                            error ? json_incref(error)
                                  : json_pack("{s:s, s:s}", "kind", "internal", "message",
                                              "the child left no source of this kernel"));
    json_object_del(kernel, "compile");
}

static void on_compiled(void *arg, const json_t *entries, const struct ka_compile_counts *counts)
{
    struct ka_run *run = arg;
    json_t *facts = run->compile_facts;
    run->compile = NULL;
    run->compile_facts = NULL;
    each_kernel(facts, fill, (void *)entries);
    json_t *record =
        json_pack("{s:i, s:i, s:i, s:i}", "hits", (int)counts->hits, "misses", (int)counts->misses, "failed",
                  (int)counts->failed, "dropped", (int)counts->dropped);
    json_object_del(facts, "cache");
    json_object_set(facts, "compile", record);
    ka_record_add(run->record, "compile", record);
    run->compile_next(run, facts);
}

void ka_run_compile(struct ka_run *run, const struct ka_op_result *result, ka_run_compile_fn next)
{
    run->compile_facts = json_deep_copy(result->doc);
    run->compile_next = next;
    const json_t *wanted = json_object_get(json_object_get(result->doc, "cache"), "wanted");
    run->compile = ka_compile_start(run->app, &run->settings, wanted, result->child, on_compiled, run);
}

void ka_run_compile_cancel(struct ka_run *run)
{
    if (run->compile)
        ka_compile_cancel(run->compile);
    run->compile = NULL;
    json_decref(run->compile_facts);
    run->compile_facts = NULL;
}

/* The largest of the user's own shapes that are checked smaller; NULL: they are checked as they are. */
static json_t *largest_scaled(const struct ka_run *run)
{
    json_t *largest = NULL;
    KA_EACH(json_object_get(run->oracles, "scaled"), i, entry) {
        json_t *dims = json_object_get(entry, "dims");
        if (json_is_true(json_object_get(entry, "required")) &&
            (!largest || ka_plan_size(dims) > ka_plan_size(largest)))
            largest = dims;
    }
    return largest;
}

json_t *ka_run_facts_request(const struct ka_run *run, const char *entry)
{
    json_auto_t *shapes = json_array();
    KA_EACH(run->shapes, i, shape) {
        json_t *dims = ka_run_interpreted(run, json_object_get(shape, "dims"));
        json_array_append_new(shapes, json_pack("{s:o, s:O, s:O}", "dims", dims, "class",
                                                json_object_get(shape, "class"), "kind",
                                                json_object_get(shape, "kind")));
    }
    json_t *request = ka_plan_facts(shapes, entry, ka_random_u64());
    json_t *largest = largest_scaled(run);
    if (largest)
        json_object_set_new(request, "real", json_pack("[O]", largest));
    return request;
}

bool ka_run_compares(const struct ka_run *run, const json_t *facts, ka_run_compare_fn compare)
{
    struct ka_snapshot best;
    if (!run->job.best || !run->job.best_verified ||
        ka_state_snapshot_get(run->state, run->job.best, &best, NULL))
        return false;
    bool found = compare(facts, best.facts);
    ka_snapshot_free(&best);
    return found;
}
