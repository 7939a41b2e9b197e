/* Part of preflight: hidden shapes, derived from what was accepted, and kept where forward and oracle agree.
 * A candidate cannot know them.
 *
 * Scaling for the CPU may leave a loop over blocks with a single turn, in every shape made from the scaled
 * ones. So each size that was scaled is also tried long, beside small ones; unless it is one that the grid
 * grows with, which a probe of twice the size shows: thousands of programs would take the interpreter
 * minutes. */
#include "preflight_internal.h"

#include <string.h>

#include "agent/core/plan.h"
#include "agent/core/shapes.h"
#include "base/hash.h"
#include "base/log.h"
#include "expected.h"
#include "sizes.h"

#define HIDDEN_TRIED 12
#define HIDDEN_KEPT 8
#define LONG_BUDGET ((uint64_t)1 << 24)

static void keep_agreed(struct ka_run *run, struct ka_fan *fan, const json_t *tried, const json_t *asked,
                        size_t most)
{
    size_t i, kept = 0;
    json_t *entry;
    json_array_foreach((json_t *)tried, i, entry)
    {
        json_t *error = NULL;
        struct ka_fan_found found;
        const char *kind = json_string_value(json_object_get(entry, "kind"));
        if (kind && kept < most && ka_fan_find(fan, (json_int_t)i, &found) &&
            ka_preflight_agrees(&found, &error)) {
            ka_preflight_accept(run, json_object_get(entry, "dims"), "hidden", kind, found.entry);
            ka_expected_offer(run, fan, json_array_get(asked, i));
            kept++;
        }
        json_decref(error);
    }
}

/* The fan and what it was asked, which are the caller's to free from now on. False while it is not through.
 */
static bool take(struct ka_run *run, struct ka_fan *fan, json_t **tried, json_t **asked)
{
    struct ka_preflight *preflight = run->preflight;
    if (!ka_fan_ended(fan))
        return false;
    *tried = preflight->tried;
    *asked = preflight->asked_hidden;
    preflight->tried = preflight->asked_hidden = NULL;
    preflight->hidden = NULL;
    return true;
}

static void on_long(struct ka_run *run, struct ka_fan *fan, void *arg)
{
    json_t *tried, *asked;
    (void)arg;
    if (!take(run, fan, &tried, &asked))
        return;
    keep_agreed(run, fan, tried, asked, json_array_size(tried));
    ka_fan_free(fan);
    json_decref(tried);
    json_decref(asked);
    run->preflight->ended(run, KA_STAGE_LONG);
}

static json_int_t programs_of(const struct ka_fan *fan, size_t id)
{
    struct ka_fan_found found;
    if (!ka_fan_find(fan, (json_int_t)id, &found))
        return 0;
    return json_integer_value(json_object_get(json_object_get(found.entry, "facts"), "programs"));
}

/* Of the probes in `tried` the shapes that are worth a look (new reference). */
static json_t *affordable(const json_t *tried, const struct ka_fan *fan)
{
    json_t *list = json_array(), *entry;
    json_int_t base = 0;
    size_t i;
    json_array_foreach((json_t *)tried, i, entry)
    {
        const json_t *dims = json_object_get(entry, "long");
        json_int_t programs = programs_of(fan, i);
        if (json_object_get(entry, "kind"))
            continue;
        if (!dims)
            base = programs;
        else if (programs > 0 && programs <= base)
            json_array_append_new(list, json_pack("{s:O, s:s}", "dims", dims, "kind", "long"));
    }
    return list;
}

static void ask(struct ka_run *run, json_t *tried, const char *what, ka_fan_fn changed)
{
    struct ka_preflight *preflight = run->preflight;
    preflight->tried = tried;
    preflight->hidden = ka_preflight_ask(run, tried, what, &preflight->asked_hidden, changed);
}

static void on_hidden(struct ka_run *run, struct ka_fan *fan, void *arg)
{
    json_t *tried, *asked;
    (void)arg;
    ka_preflight_progress(run, fan, "hidden shapes");
    if (!take(run, fan, &tried, &asked))
        return;
    keep_agreed(run, fan, tried, asked, HIDDEN_KEPT);
    run->preflight->longer = affordable(tried, fan);
    ka_fan_free(fan);
    json_decref(tried);
    json_decref(asked);
    run->preflight->ended(run, KA_STAGE_HIDDEN);
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
bool ka_preflight_hidden(struct ka_run *run)
{
    json_t *known = json_array(), *shape, *found;
    size_t i, required = 0;
    json_array_foreach(run->shapes, i, shape)
    {
        json_array_append(known, json_object_get(shape, "dims"));
        required += strcmp(json_string_value(json_object_get(shape, "class")), "required") == 0;
    }
    json_t *tried = json_array(), *stand_in = run->preflight->stand_in;
    if (stand_in)
        json_array_append(tried, stand_in);
    size_t each = required ? (HIDDEN_TRIED + required - 1) / required : 0;
    json_array_foreach(run->shapes, i, shape)
    {
        if (strcmp(json_string_value(json_object_get(shape, "class")), "required") != 0)
            continue;
        json_t *small = ka_run_small(run, json_object_get(shape, "dims"));
        if (ka_shapes_hidden(small, known, ka_random_u64(), each, KA_SHAPES_BUDGET, &found) == 0) {
            json_array_extend(tried, found);
            json_decref(found);
        }
        json_decref(small);
    }
    json_decref(known);
    add_probes(run, tried);
    if (json_array_size(tried)) {
        ask(run, tried, "hidden shapes", on_hidden);
        return true;
    }
    json_decref(tried);
    return false;
}

/* Of the probes those whose grid does not grow with the size. */
bool ka_preflight_long(struct ka_run *run)
{
    json_t *longer = run->preflight->longer;
    if (!json_array_size(longer))
        return false;
    run->preflight->longer = NULL;
    ka_log_progress(run->name, "preflight: long hidden shapes");
    ask(run, longer, "long hidden shapes", on_long);
    return true;
}
