/* Cases to children. Knows what they cost, no processes. */
#include "deal.h"

#include <math.h>
#include <stdlib.h>

#include "base/each.h"
#include "plan.h"

#define ELEMENTS_A_SECOND 1e7

/* Cases that go the same way. */
struct unit {
    json_t *cases;
    double cost; /* of them all */
    size_t at;   /* of the first: equals stay in order */
};

static double cost_of(const json_t *item, const struct ka_deal_of *of)
{
    const json_t *dims = json_object_get(item, "dims");
    KA_EACH(of->known, i, shape) {
        double seconds = json_number_value(json_object_get(shape, "processor_seconds"));
        if (seconds > 0 && json_equal(json_object_get(shape, "dims"), dims))
            return of->start + seconds;
    }
    return of->start + ka_plan_size(dims) / ELEMENTS_A_SECOND;
}

static int cheapest_first(const void *a, const void *b)
{
    const struct unit *x = a, *y = b;
    if (x->cost != y->cost)
        return x->cost < y->cost ? -1 : 1;
    return x->at < y->at ? -1 : x->at > y->at;
}

static struct unit *of_dims(struct unit *units, size_t count, const json_t *dims)
{
    for (size_t i = 0; i < count; i++)
        if (json_equal(json_object_get(json_array_get(units[i].cases, 0), "dims"), dims))
            return &units[i];
    return NULL;
}

static size_t gather(const json_t *cases, const struct ka_deal_of *of, struct unit *units)
{
    size_t count = 0;
    KA_EACH(cases, i, item) {
        struct unit *unit = of->together ? of_dims(units, count, json_object_get(item, "dims")) : NULL;
        if (!unit) {
            unit = &units[count++];
            *unit = (struct unit){.cases = json_array(), .at = i};
        }
        json_array_append(unit->cases, item);
        unit->cost += cost_of(item, of);
    }
    qsort(units, count, sizeof(*units), cheapest_first);
    return count;
}

/* As many as have something to do for longer than it takes to start them. */
static size_t worthwhile(const struct unit *units, size_t count, const struct ka_deal_of *of)
{
    double all = 0;
    for (size_t i = 0; i < count; i++)
        all += units[i].cost;
    return of->child > 0 && all / of->child < (double)of->most ? (size_t)ceil(all / of->child) : of->most;
}

static struct unit *least_of(struct unit *parts, size_t count)
{
    struct unit *least = &parts[0];
    for (size_t i = 1; i < count; i++)
        if (parts[i].cost < least->cost)
            least = &parts[i];
    return least;
}

json_t *ka_deal(const json_t *cases, const struct ka_deal_of *of)
{
    KA_AUTO_FREE struct unit *units = ka_calloc(json_array_size(cases), sizeof(*units));
    size_t count = gather(cases, of, units), part_count = worthwhile(units, count, of);
    KA_AUTO_FREE struct unit *parts = ka_calloc(part_count, sizeof(*parts));
    KA_AUTO_FREE struct unit **owner = ka_calloc(count, sizeof(struct unit *));
    json_t *dealt = json_array();
    for (size_t i = count; i-- > 0;) {
        owner[i] = least_of(parts, part_count);
        owner[i]->cost += units[i].cost;
    }
    for (size_t i = 0; i < part_count; i++)
        parts[i].cases = json_array();
    for (size_t i = 0; i < count; i++) {
        json_array_extend(owner[i]->cases, units[i].cases);
        json_decref(units[i].cases);
    }
    for (size_t i = 0; i < part_count; i++) {
        if (json_array_size(parts[i].cases))
            json_array_append(dealt, parts[i].cases);
        json_decref(parts[i].cases);
    }
    return dealt;
}
