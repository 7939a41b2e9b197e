/* On which sizes a run's children work. */
#include "sizes.h"

#include <math.h>
#include <string.h>

#include "agent/core/plan.h"
#include "agent/core/shapes.h"
#include "agent/io/machine.h"
#include "base/each.h"

bool ka_run_on_gpu(const struct ka_run *run)
{
    return strcmp(run->settings.device, "cuda") == 0;
}

bool ka_run_scaled_down(const struct ka_run *run)
{
    return strcmp(run->settings.device, "cpu") == 0;
}

#define SQUARE_TIMES 16   /* a tensor of so many times the product of the sizes has some of them twice */
#define HUGE_TENSOR 4e6   /* elements, from which on that costs more than the interpreter has time for */
#define BUDGET_LEAST 512. /* a product of sizes: a block of 256 beside a 2 */

/* Would the interpreter have little to do even with a tensor of N by N elements, of which no product of the
 * sizes tells? */
static bool is_little(const json_t *dims)
{
    struct ka_shapes_limits limits = {.most = INT64_MAX, .budget = UINT64_MAX, .square = KA_RUN_SQUARE};
    return ka_shapes_fit(dims, limits);
}

/* Scaled once more, until it is little. Takes over `found`, a small version of `dims`. */
static json_t *little(const json_t *dims, json_t *found)
{
    json_t *smaller;
    for (size_t level = 1; !is_little(found) && ka_shapes_scale(dims, KA_SHAPES_BUDGET, level, &smaller) == 0;
         level++) {
        json_decref(found);
        found = smaller;
    }
    return found;
}

static double elements_of(const json_t *tensor)
{
    double count = 1;
    KA_EACH(json_object_get(tensor, "shape"), i, size)
        count *= (double)json_integer_value(size);
    return count;
}

/* A shape that preflight has accepted (borrowed), by its sizes; NULL: none. */
static const json_t *accepted(const struct ka_run *run, const json_t *dims)
{
    KA_EACH(run->shapes, i, shape) {
        if (json_equal(json_object_get(shape, "dims"), dims))
            return shape;
    }
    return NULL;
}

/* Elements of its largest tensor. */
static double largest_of(const json_t *shape)
{
    double most = 0;
    KA_EACH(json_object_get(shape, "tensors"), i, tensor)
        most = fmax(most, elements_of(tensor));
    return most;
}

uint64_t ka_run_budget(const struct ka_run *run, const json_t *dims)
{
    double most = largest_of(accepted(run, dims)), size = ka_plan_size(dims);
    if (most < HUGE_TENSOR || most <= SQUARE_TIMES * size)
        return KA_SHAPES_BUDGET;
    return (uint64_t)fmax(BUDGET_LEAST, (double)KA_SHAPES_BUDGET * SQUARE_TIMES * size / most);
}

json_t *ka_run_small(const struct ka_run *run, json_t *dims)
{
    json_t *small;
    const json_t *shape = accepted(run, dims);
    if (!ka_run_on_gpu(run) || ka_shapes_scale(dims, ka_run_budget(run, dims), 0, &small))
        return json_incref(dims);
    bool square = largest_of(shape) > SQUARE_TIMES * ka_plan_size(dims);
    return square && json_is_true(json_object_get(shape, "costly")) ? little(dims, small) : small;
}

json_t *ka_run_interpreted(const struct ka_run *run, json_t *dims)
{
    json_t *found = ka_run_small(run, dims);
    return ka_run_on_gpu(run) ? little(dims, found) : found;
}

double ka_run_results_room(const struct ka_run *run)
{
    struct ka_machine machine;
    ka_machine_read(&machine);
    if (!ka_run_on_gpu(run) || !machine.memory_bytes)
        return INFINITY;
    return fmin((double)machine.memory_bytes / 3, (double)machine.memory_available_bytes / 2);
}

json_t *ka_run_sweep(struct ka_run *run, bool *own_cpu_sweep)
{
    const char *which = run->settings.sweep;
    *own_cpu_sweep = false;
    if (which[0] == '[' || which[0] == '{') {
        json_auto_t *given = json_loads(which, 0, NULL);
        json_auto_t *list = json_is_array(given) ? json_incref(given) : json_pack("[O]", given);
        json_t *sweep = json_array();
        KA_EACH(list, i, dims)
            json_array_append_new(sweep, json_pack("{s:O, s:b}", "dims", dims, "required", 1));
        *own_cpu_sweep = true;
        return sweep;
    }
    json_t *cpu = json_object_get(run->inspect, "sweep_cpu");
    *own_cpu_sweep = ka_run_scaled_down(run) && json_array_size(cpu) > 0;
    return json_incref(*own_cpu_sweep ? cpu : json_object_get(run->inspect, "sweep"));
}
