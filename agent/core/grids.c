/* What probes of a forward's grid say of shapes that have not run. Must not know how a shape is run. */
#include "grids.h"

#include <math.h>

#include "base/each.h"
#include "plan.h"
#include "shapes.h"

/* What a probe says of one size: programs without it, and how many more each further unit of it makes. */
struct growth {
    const json_t *probe; /* borrowed, with the size doubled */
    const char *name;
    double from, programs, each;
};

static double size_in(const json_t *dims, const char *name)
{
    return (double)json_integer_value(json_object_get(dims, name));
}

static double programs_at(const struct growth *growth, double size)
{
    return growth->programs + growth->each * (size - growth->from);
}

/* The probe's shape with another size (new reference), NULL where that is too large. */
static json_t *resized(const struct growth *growth, double size, uint64_t budget)
{
    json_t *dims = json_deep_copy(growth->probe);
    json_object_set_new(dims, growth->name, json_integer((json_int_t)size));
    if (ka_plan_size(dims) <= (double)budget)
        return dims;
    json_decref(dims);
    return NULL;
}

static void append(json_t *list, json_t *dims, const char *kind)
{
    json_array_append_new(list, json_pack("{s:o, s:s}", "dims", dims, "kind", kind));
}

static void add_many(const struct growth *grown, size_t count, double programs, uint64_t budget, json_t *list)
{
    json_t *best = NULL;
    for (size_t i = 0; i < count; i++) {
        const struct growth *growth = &grown[i];
        if (growth->each <= 0)
            continue;
        double size = growth->from + (programs - growth->programs) / growth->each;
        json_t *dims = resized(growth, size > growth->from ? size + 1 : growth->from, budget);
        bool better = dims && (!best || ka_plan_size(dims) < ka_plan_size(best));
        json_decref(better ? best : dims);
        best = better ? dims : best;
    }
    if (best)
        append(list, best, "many_programs");
}

static bool reached(const json_t *shapes, const char *name, double size)
{
    KA_EACH(shapes, i, shape) {
        if (size_in(json_object_get(shape, "dims"), name) >= size)
            return true;
    }
    return false;
}

static void add_beyond(const struct growth *growth, const json_t *shapes, double more, uint64_t budget,
                       json_t *list)
{
    double least = 2 * growth->programs;
    if (growth->each > 0 || growth->programs < 2 || growth->programs > KA_GRIDS_SECOND ||
        reached(shapes, growth->name, least) || reached(list, growth->name, least))
        return;
    json_t *dims = resized(growth, least + more, budget);
    if (dims)
        append(list, dims, "beyond_programs");
}

static size_t read_growths(const json_t *probes, struct growth *grown, const json_t **longer)
{
    double base = 0;
    size_t count = 0;
    KA_EACH(probes, i, entry) {
        const json_t *dims = json_object_get(entry, "dims");
        const char *name = json_string_value(json_object_get(entry, "dim"));
        double programs = size_in(entry, "programs");
        if (json_object_get(entry, "kind"))
            continue;
        if (!name)
            base = programs;
        if (!name || programs <= 0 || base <= 0 || count == KA_SHAPES_MAX_DIMS)
            continue;
        double from = size_in(dims, name) / 2;
        longer[count] = json_object_get(entry, "long");
        grown[count++] = (struct growth){dims, name, from, base, (programs - base) / from};
    }
    return count;
}

/* The long shape (new reference), with a smaller size where that has too many programs; NULL where there is
 * no such that is longer than the probe. `*programs`: of what is returned. */
static json_t *affordable(const struct growth *growth, const json_t *longer, double limit, double *programs)
{
    double size = size_in(longer, growth->name);
    *programs = programs_at(growth, size);
    if (*programs <= limit)
        return json_incref((json_t *)longer);
    double room = growth->from + (limit - growth->programs) / growth->each;
    double less = size - 16 * ceil((size - room) / 16); /* as far from a multiple of 16 */
    if (limit < KA_GRIDS_MOST || less <= 2 * growth->from)
        return NULL;
    *programs = programs_at(growth, less);
    json_t *dims = json_deep_copy(longer);
    json_object_set_new(dims, growth->name, json_integer((json_int_t)less));
    return dims;
}

json_t *ka_grids_worth(const json_t *probes, const json_t *shapes, uint64_t budget, uint64_t seed)
{
    json_t *list = json_array();
    struct growth grown[KA_SHAPES_MAX_DIMS];
    const json_t *longer[KA_SHAPES_MAX_DIMS];
    size_t count = read_growths(probes, grown, longer);
    double most = 0, more = 1 + 2 * (double)(ka_random_next(&seed) % (KA_GRIDS_ODD / 2));
    for (size_t i = 0; i < count; i++) {
        double there = 0, limit = most > KA_GRIDS_SECOND ? KA_GRIDS_SECOND : KA_GRIDS_MOST;
        json_t *dims = longer[i] ? affordable(&grown[i], longer[i], limit, &there) : NULL;
        if (!dims)
            continue;
        append(list, dims, "long");
        most = there > most ? there : most;
    }
    if (most <= KA_GRIDS_MANY)
        add_many(grown, count, KA_GRIDS_MANY + more, budget, list);
    for (size_t i = 0; i < count; i++)
        add_beyond(&grown[i], shapes, more, budget, list);
    return list;
}
