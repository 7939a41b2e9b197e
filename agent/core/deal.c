/* Cases to children. Knows sizes, no processes. */
#include "deal.h"

#include <math.h>
#include <stdlib.h>

#include "base/each.h"
#include "plan.h"

struct hand {
    json_t *cases;
    double cost;
};

static double size_of(const json_t *item)
{
    return ka_plan_size(json_object_get(item, "dims"));
}

static int by_size(const void *a, const void *b)
{
    const json_t *x = *(const json_t *const *)a, *y = *(const json_t *const *)b;
    double p = size_of(x), q = size_of(y);
    if (p != q)
        return p < q ? -1 : 1;
    json_int_t i = json_integer_value(json_object_get(x, "id")),
               k = json_integer_value(json_object_get(y, "id"));
    return i < k ? -1 : i > k;
}

static bool has_dims(const struct hand *hand, const json_t *dims)
{
    KA_EACH(hand->cases, i, item) {
        if (json_equal(json_object_get(item, "dims"), dims))
            return true;
    }
    return false;
}

static struct hand *choose(struct hand *hands, size_t count, const json_t *item, bool together)
{
    struct hand *least = &hands[0];
    for (size_t i = 0; i < count; i++) {
        if (together && has_dims(&hands[i], json_object_get(item, "dims")))
            return &hands[i];
        if (hands[i].cost < least->cost)
            least = &hands[i];
    }
    return least;
}

/* As many as have something to do for longer than it takes to start them. */
static size_t worthwhile(const json_t *cases, size_t parts, double start, double child)
{
    double all = 0;
    KA_EACH(cases, i, item)
        all += start + size_of(item);
    return child > 0 && all / child < (double)parts ? (size_t)ceil(all / child) : parts;
}

json_t *ka_deal(const json_t *cases, size_t most, double start, double child, bool together)
{
    size_t count = json_array_size(cases), parts = worthwhile(cases, most, start, child);
    json_t *dealt = json_array();
    KA_AUTO_FREE json_t **sorted = ka_calloc(count, sizeof(json_t *));
    KA_AUTO_FREE struct hand *hands = ka_calloc(parts, sizeof(*hands));
    for (size_t i = 0; i < count; i++)
        sorted[i] = json_array_get(cases, i);
    qsort(sorted, count, sizeof(json_t *), by_size);
    for (size_t i = 0; i < parts; i++)
        hands[i].cases = json_array();
    for (size_t i = count; i-- > 0 && parts;) {
        struct hand *hand = choose(hands, parts, sorted[i], together);
        json_array_insert(hand->cases, 0, sorted[i]);
        hand->cost += start + size_of(sorted[i]);
    }
    for (size_t i = 0; i < parts; i++) {
        if (json_array_size(hands[i].cases))
            json_array_append(dealt, hands[i].cases);
        json_decref(hands[i].cases);
    }
    return dealt;
}
