/* Cases to children. Knows what they cost, no processes. */
#include "deal.h"

#include <math.h>
#include <stdlib.h>

#include "base/each.h"
#include "kinds.h"
#include "plan.h"

#define SHARE_MORE 1.001 /* sums are rounded */

/* Cases that go the same way. */
struct unit {
    json_t *cases;
    double cost; /* of them all */
    size_t at;   /* of the first: equals stay in order */
    size_t like; /* the first unit that has such dims */
};

static double cost_of(const json_t *item, const struct ka_deal_of *of)
{
    const json_t *dims = json_object_get(item, "dims");
    double cost = of->start + ka_kind_seconds(item);
    KA_EACH(of->known, i, shape) {
        double seconds = json_number_value(json_object_get(shape, "processor_seconds"));
        if (seconds > 0 && json_equal(json_object_get(shape, "dims"), dims))
            return cost + seconds;
    }
    return cost + ka_plan_size(dims) / of->rate;
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
    for (size_t i = 0; i < count && of->anew > 0; i++) {
        json_t *dims = json_object_get(json_array_get(units[i].cases, 0), "dims");
        units[i].like = units[of_dims(units, count, dims) - units].at;
    }
    qsort(units, count, sizeof(*units), cheapest_first);
    return count;
}

/* What all cases cost in one part. */
static double cost_of_all(const struct unit *units, size_t count, double anew)
{
    double all = 0;
    for (size_t i = 0; i < count; i++)
        all += units[i].cost + (units[i].like == units[i].at ? anew : 0);
    return all;
}

/* As many as have something to do for longer than it takes to start them. */
static size_t worthwhile(const struct unit *units, size_t count, const struct ka_deal_of *of)
{
    double all = cost_of_all(units, count, of->anew);
    return of->child > 0 && all / of->child < (double)of->most ? (size_t)ceil(all / of->child) : of->most;
}

/* Units from the dearest down, and what each part has cost so far. */
struct dealing {
    const struct unit *units;
    size_t count, part_count;
    size_t *owner;      /* of a unit: the part */
    double *cost;       /* of a part */
    double anew, share; /* what a part costs if all cost the same */
};

/* Whether a part has the dims of unit `at`, the dearer ones being dealt. */
static bool has_dims(const struct dealing *d, size_t part, size_t at)
{
    for (size_t i = at + 1; i < d->count; i++)
        if (d->owner[i] == part && d->units[i].like == d->units[at].like)
            return true;
    return false;
}

/* To who has such dims and is not full, else to whoever has least with it. */
static void give(const struct dealing *d, size_t at)
{
    size_t best = 0;
    double cost = 0;
    bool fits = false;
    for (size_t part = 0; part < d->part_count && !fits; part++) {
        bool has = d->anew > 0 && has_dims(d, part, at);
        double with = d->cost[part] + d->units[at].cost + (has ? 0 : d->anew);
        fits = has && with <= d->share;
        if (fits || part == 0 || with < cost) {
            best = part;
            cost = with;
        }
    }
    d->owner[at] = best;
    d->cost[best] = cost;
}

json_t *ka_deal(const json_t *cases, const struct ka_deal_of *of)
{
    KA_AUTO_FREE struct unit *units = ka_calloc(json_array_size(cases), sizeof(*units));
    size_t count = gather(cases, of, units), part_count = worthwhile(units, count, of);
    KA_AUTO_FREE size_t *owner = ka_calloc(count, sizeof(*owner));
    KA_AUTO_FREE double *cost = ka_calloc(part_count, sizeof(*cost));
    double share = count ? cost_of_all(units, count, of->anew) / (double)part_count * SHARE_MORE : 0;
    const struct dealing dealing = {units, count, part_count, owner, cost, of->anew, share};
    json_t *dealt = json_array();
    for (size_t i = count; i-- > 0;)
        give(&dealing, i);
    for (size_t part = 0; part < part_count; part++) {
        json_t *own = json_array();
        for (size_t i = 0; i < count; i++)
            if (owner[i] == part)
                json_array_extend(own, units[i].cases);
        if (json_array_size(own))
            json_array_append(dealt, own);
        json_decref(own);
    }
    for (size_t i = 0; i < count; i++)
        json_decref(units[i].cases);
    return dealt;
}
