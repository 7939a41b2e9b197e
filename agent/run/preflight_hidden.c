/* Part of preflight: hidden shapes, derived from what was accepted, and kept where forward and oracle agree.
 * A candidate cannot know them.
 *
 * Scaling for the CPU may leave a loop over blocks with a single turn, in every shape made from the scaled
 * ones. So each size that was scaled is also tried long, beside small ones; unless the grid grows with it so
 * far, which a probe of twice the size shows, that the interpreter would take minutes. On every device one
 * shape has more programs than the others, where some size makes them (agent/core/grids.h), and sizes lie
 * between those that are known. */
#include "preflight_internal.h"

#include <math.h>
#include <stdio.h>

#include "agent/core/fields.h"
#include "agent/core/grids.h"
#include "agent/core/plan.h"
#include "agent/core/shapes.h"
#include "base/each.h"
#include "base/hash.h"
#include "base/log.h"
#include "expected.h"
#include "sizes.h"

#define HIDDEN_TRIED 9 /* at random, beside those that cover sizes */
#define HIDDEN_KEPT 6
#define TILE 128 /* a multiple of the blocks that kernels take for rows and columns */
#define LONG_BUDGET ((uint64_t)1 << 24)
#define LONGEST_BETWEEN 1024 /* in the interpreter, where blocks and rows are run one after another */

/* "M = 1": what was wanted of a shape that is not taken, with the reason. */
static void leave_out(struct ka_run *run, const json_t *wants, const json_t *error)
{
    json_t *list = json_object_get(run->oracles, "sizes");
    if (!list)
        json_object_set_new(run->oracles, "sizes", list = json_object());
    KA_EACH_MEMBER(wants, name, size) {
        char text[120];
        snprintf(text, sizeof(text), "%.80s = %lld", name, (long long)json_integer_value(size));
        json_object_set_new(list, text, json_string(ka_text_of(error, "message", "not taken")));
    }
}

/* Of `most` at random, and all that cover sizes. Combined sizes that are not taken are to be tried one by
 * one: they are appended to `singles`. */
static void keep_agreed(struct ka_run *run, struct ka_fan *fan, const json_t *tried, const json_t *asked,
                        size_t most, json_t *singles)
{
    size_t kept = 0;
    KA_EACH(tried, i, entry) {
        json_auto_t *error = NULL;
        json_t *wants = json_object_get(entry, "wants");
        struct ka_fan_found found;
        const char *kind = json_string_value(json_object_get(entry, "kind"));
        if (!kind || (!wants && kept >= most) || !ka_fan_find(fan, (json_int_t)i, &found))
            continue;
        if (ka_preflight_agrees(&found, &error)) {
            if (!json_object_get(found.entry, "reference_error")) /* it need not take every size */
                ka_preflight_learn_reference(run, found.entry);
            json_object_set(
                ka_preflight_accept(run, json_object_get(entry, "dims"), "hidden", kind, found.entry),
                "stand_in", json_object_get(entry, "stand_in"));
            ka_expected_offer(run, fan, json_array_get(asked, i));
            kept += !wants;
        } else if (json_object_size(wants) > 1 && singles) {
            json_array_append(singles, entry);
        } else if (wants) {
            leave_out(run, wants, error);
        }
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
    json_auto_t *tried = NULL, *asked = NULL;
    (void)arg;
    if (!take(run, fan, &tried, &asked))
        return;
    keep_agreed(run, fan, tried, asked, json_array_size(tried), NULL);
    ka_preflight_note_crashes(run, fan);
    ka_fan_free(fan);
    run->preflight->ended(run, KA_STAGE_LONG);
}

/* Tell the probes in `tried` how many programs the forward launched on each. */
static void note_programs(json_t *tried, const struct ka_fan *fan)
{
    KA_EACH(tried, i, entry) {
        struct ka_fan_found found;
        if (json_object_get(entry, "kind") || !ka_fan_find(fan, (json_int_t)i, &found))
            continue;
        json_object_set(entry, "programs",
                        json_object_get(json_object_get(found.entry, "facts"), "programs"));
    }
}

/* Sizes between those of all shapes that are checked and of `longer`, to which they are added: each beside
 * others that are as small as can be. */
static void add_between(struct ka_run *run, json_t *longer)
{
    const json_t *dims = json_object_get(ka_plan_smallest(run->shapes), "dims");
    size_t levels = ka_shapes_levels(dims, KA_SHAPES_BUDGET);
    json_auto_t *small = NULL, *known = json_copy(run->shapes), *found = NULL;
    if (!levels || ka_shapes_scale(dims, KA_SHAPES_BUDGET, levels - 1, &small))
        return;
    json_array_extend(known, longer);
    struct ka_shapes_limits limits = {.most = INT64_MAX, .budget = LONG_BUDGET, .square = INFINITY};
    if (ka_run_scaled_down(run))
        limits = (struct ka_shapes_limits){LONGEST_BETWEEN, KA_SHAPES_BUDGET, KA_RUN_SQUARE};
    if (ka_shapes_between(small, known, limits, ka_random_u64(), &found) == 0)
        json_array_extend(longer, found);
}

static void ask(struct ka_run *run, json_t *tried, const char *what, ka_fan_fn changed)
{
    struct ka_preflight *preflight = run->preflight;
    preflight->tried = tried;
    preflight->hidden = ka_preflight_ask(run, tried, what, &preflight->asked_hidden, changed);
}

static void on_hidden(struct ka_run *run, struct ka_fan *fan, void *arg)
{
    json_auto_t *tried = NULL, *asked = NULL, *refused = json_array();
    (void)arg;
    ka_preflight_progress(run, fan, "hidden shapes");
    if (!take(run, fan, &tried, &asked))
        return;
    keep_agreed(run, fan, tried, asked, HIDDEN_KEPT, refused);
    note_programs(tried, fan);
    run->preflight->longer = ka_grids_worth(
        tried, run->shapes, ka_run_scaled_down(run) ? KA_SHAPES_BUDGET : LONG_BUDGET, ka_random_u64());
    KA_EACH(refused, i, entry) {
        json_auto_t *singles =
            ka_shapes_singles(json_object_get(entry, "of"), json_string_value(json_object_get(entry, "kind")),
                              json_object_get(entry, "wants"), run->shapes);
        json_array_extend(run->preflight->longer, singles);
    }
    add_between(run, run->preflight->longer);
    ka_preflight_note_crashes(run, fan);
    ka_fan_free(fan);
    run->preflight->ended(run, KA_STAGE_HIDDEN);
}

/* Whether a size of `dims` is twice that of `other` at least. */
static bool is_longer(const json_t *dims, const json_t *other, const char *name)
{
    return json_integer_value(json_object_get(dims, name)) >=
           2 * json_integer_value(json_object_get(other, name));
}

/* Probes for a shape; not for sizes that `than` (may be NULL) has about as long. */
static void add_probes_of(struct ka_run *run, const json_t *dims, const json_t *than, json_t *pending)
{
    json_auto_t *probes = NULL;
    if (ka_shapes_long(dims, LONG_BUDGET, &probes))
        return;
    KA_EACH(probes, i, entry) {
        const char *name = json_string_value(json_object_get(entry, "dim"));
        if (name && than && !is_longer(dims, than, name))
            continue;
        if (!ka_run_scaled_down(run)) /* the sweep itself is long */
            json_object_del(entry, "long");
        json_array_append(pending, entry);
    }
}

/* Probes for the largest required shape of a sweep, and for one that has a longer size, required or not: a
 * backward may do something else from some length on. */
static void add_probes(struct ka_run *run, json_t *pending)
{
    bool own_cpu_sweep;
    json_auto_t *sweep = ka_run_sweep(run, &own_cpu_sweep);
    const json_t *largest = NULL, *longer = NULL;
    int64_t longest = 0;
    KA_EACH(sweep, i, entry) {
        const json_t *flag = json_object_get(entry, "required");
        const json_t *dims = json_object_get(entry, "dims");
        if ((!flag || json_is_true(flag)) && (!largest || ka_plan_size(dims) > ka_plan_size(largest)))
            largest = dims;
    }
    if (!largest)
        return;
    KA_EACH(sweep, i, entry) {
        json_t *dims = json_object_get(entry, "dims");
        KA_EACH_MEMBER(dims, name, size) {
            if (is_longer(dims, largest, name) && json_integer_value(size) > longest) {
                longest = json_integer_value(size);
                longer = dims;
            }
        }
    }
    add_probes_of(run, largest, NULL, pending);
    if (longer)
        add_probes_of(run, longer, largest, pending);
}

/* Sizes that every dimension is to have, beside those of the smallest required shape. */
static void add_covering(struct ka_run *run, json_t *tried)
{
    const json_t *smallest = ka_plan_smallest(run->shapes);
    json_auto_t *small = smallest ? ka_run_small(run, json_object_get(smallest, "dims")) : NULL;
    json_auto_t *found = NULL;
    uint64_t budget = small ? ka_run_budget(run, json_object_get(smallest, "dims")) : 0;
    if (small && ka_shapes_cover(small, TILE, budget, &found) == 0) {
        KA_EACH(found, i, entry) {
            json_object_set(entry, "of", small);
            if (!ka_preflight_has(run, json_object_get(entry, "dims")))
                json_array_append(tried, entry);
        }
    }
}

/* Hidden shapes come from a small version of every required shape, taken in turn. */
bool ka_preflight_hidden(struct ka_run *run)
{
    json_auto_t *known = json_array();
    size_t required = 0;
    KA_EACH(run->shapes, i, shape) {
        json_array_append(known, json_object_get(shape, "dims"));
        required += ka_plan_is(shape, "required");
    }
    json_auto_t *tried = json_array();
    if (run->preflight->stand_in)
        json_array_append(tried, run->preflight->stand_in);
    size_t each = required ? (HIDDEN_TRIED + required - 1) / required : 0;
    KA_EACH(run->shapes, i, shape) {
        if (!ka_plan_is(shape, "required"))
            continue;
        json_t *dims = json_object_get(shape, "dims");
        json_auto_t *small = ka_run_small(run, dims), *found = NULL;
        if (ka_shapes_hidden(small, known, ka_random_u64(), each, ka_run_budget(run, dims), &found) == 0)
            json_array_extend(tried, found);
    }
    add_covering(run, tried);
    add_probes(run, tried);
    if (json_array_size(tried))
        ask(run, json_incref(tried), "hidden shapes", on_hidden);
    return json_array_size(tried);
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
