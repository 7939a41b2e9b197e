/* Any JSON as the shapes and gradients of a run: plans, scaled and hidden shapes keep their promises whatever
 * a child wrote. */
#include <stdlib.h>

#include "agent/core/plan.h"
#include "agent/core/shapes.h"

#define MAX_HIDDEN 12

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check_cases(json_t *cases)
{
    if (!json_is_array(cases))
        abort();
    json_t *sent = ka_plan_for_candidate(cases), *one;
    size_t i;
    if (json_array_size(sent) != json_array_size(cases))
        abort();
    json_array_foreach(sent, i, one)
    {
        if (json_object_get(one, "class") || json_object_get(one, "kind"))
            abort();
    }
    json_decref(sent);
    json_decref(cases);
}

static void check_shapes(const json_t *dims, const json_t *sweep)
{
    json_t *scaled, *hidden, *one, *other;
    size_t i, k, levels = ka_shapes_levels(dims, KA_SHAPES_BUDGET);
    for (size_t level = 0; level < levels && level < 8; level++) {
        if (ka_shapes_scale(dims, KA_SHAPES_BUDGET, level, &scaled))
            abort();
        if (json_object_size(scaled) != json_object_size(dims))
            abort();
        json_decref(scaled);
    }
    if (ka_shapes_hidden(dims, sweep, 7, MAX_HIDDEN, KA_SHAPES_BUDGET, &hidden))
        return;
    if (json_array_size(hidden) > MAX_HIDDEN)
        abort();
    json_array_foreach(hidden, i, one)
    {
        json_t *found = json_object_get(one, "dims");
        if (!json_is_string(json_object_get(one, "kind")) || json_equal(found, dims))
            abort();
        json_array_foreach((json_t *)sweep, k, other)
        {
            if (json_equal(found, other))
                abort();
        }
    }
    json_decref(hidden);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    json_t *doc = json_loadb((const char *)data, size, JSON_DECODE_ANY, NULL), *shape;
    if (!doc)
        return 0;
    const json_t *shapes = json_is_object(doc) ? json_object_get(doc, "shapes") : doc;
    const json_t *grads = json_object_get(doc, "grads");
    size_t i;
    if (json_array_size(shapes) <= 16) {
        check_cases(ka_plan_check(shapes, grads, 2, size & 1, 11));
        check_cases(ka_plan_preflight(shapes, 11));
        json_t *others = json_array();
        ka_plan_varied(others, shapes, grads, 11);
        ka_plan_scalars(others, shapes, grads, 11);
        check_cases(others);
        json_array_foreach((json_t *)shapes, i, shape) check_shapes(json_object_get(shape, "dims"), shapes);
    }
    check_shapes(doc, shapes);
    json_decref(doc);
    return 0;
}
