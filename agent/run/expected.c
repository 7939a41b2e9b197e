/* Cases of a check, and where the oracle's answer to each lies. */
#include "expected.h"

#include <stdlib.h>

#include "agent/core/fields.h"
#include "agent/core/kinds.h"
#include "agent/core/plan.h"
#include "base/each.h"
#include "base/hash.h"
#include "sizes.h"

struct offer {
    struct offer *next;
    struct ka_fan *fan;
    json_t *item;
};

struct source {
    struct ka_fan *fan;    /* NULL: not asked for yet */
    json_int_t id;         /* of the case in the fan */
    size_t users;          /* cases that are not judged yet and need it */
    struct ka_fan *closer; /* a closer look at this very case, which so many wait for; NULL: none */
    size_t lookers;
};

struct ka_expected {
    struct ka_run *run;
    json_t *cases;
    struct source *sources; /* one a case */
    struct ka_fan **own;    /* rounds that this set asked for, one a case at most */
    size_t own_count;
};

/* ---- offers */

void ka_expected_offer(struct ka_run *run, struct ka_fan *fan, const json_t *item)
{
    struct offer *offer = ka_calloc(1, sizeof(*offer));
    *offer = (struct offer){run->offers, ka_fan_hold(fan), json_incref((json_t *)item)};
    run->offers = offer;
}

static void free_offer(struct offer *offer)
{
    ka_fan_free(offer->fan);
    json_decref(offer->item);
    free(offer);
}

void ka_expected_withdraw(struct ka_run *run)
{
    while (run->offers) {
        struct offer *offer = run->offers;
        run->offers = offer->next;
        free_offer(offer);
    }
}

static bool is_normal(const json_t *item)
{
    return ka_is_text(json_object_get(item, "upstream"), "kind", "normal");
}

static bool same(const json_t *a, const json_t *b, const char *name)
{
    const json_t *x = json_object_get(a, name), *y = json_object_get(b, name);
    return x == y || (x && y && json_equal((json_t *)x, (json_t *)y));
}

static void take_from(struct source *source, struct ka_fan *fan, json_int_t id)
{
    source->fan = ka_fan_hold(fan);
    source->id = id;
}

/* The offer becomes the case's source, and the case takes over its seeds. */
static void take_offer(struct ka_run *run, json_t *item, struct source *source)
{
    for (struct offer **at = &run->offers; *at; at = &(*at)->next) {
        struct offer *offer = *at;
        if (!is_normal(item) || !same(item, offer->item, "dims") || !same(item, offer->item, "layouts") ||
            !same(item, offer->item, "values") || !same(item, offer->item, "scalar"))
            continue;
        json_object_set(item, "seed", json_object_get(offer->item, "seed"));
        json_object_set(item, "upstream", json_object_get(offer->item, "upstream"));
        take_from(source, offer->fan, json_integer_value(json_object_get(offer->item, "id")));
        *at = offer->next;
        free_offer(offer);
        return;
    }
}

/* ---- the cases */

static int count_differentiable(const struct ka_run *run)
{
    int count = 0;
    KA_EACH(run->outputs, i, output)
        count += json_is_true(json_object_get(output, "differentiable"));
    return count;
}

/* The case whose oracle answers to case `i`: itself, or the one that it is like. */
static size_t answered_by(const struct ka_expected *expected, size_t i)
{
    const json_t *like = json_object_get(json_array_get(expected->cases, i), "like");
    return like ? (size_t)json_integer_value(json_object_get(like, "id")) : i;
}

/* The cases whose answers case `i` is judged by: its own and, of what it asks about, another's. */
static size_t answers_for(const struct ka_expected *expected, size_t i, size_t answers[2])
{
    const json_t *other = ka_kind_other_case(json_array_get(expected->cases, i));
    answers[0] = answered_by(expected, i);
    if (other)
        answers[1] = answered_by(expected, (size_t)json_integer_value(json_object_get(other, "id")));
    return other ? 2 : 1;
}

static void count_users(struct ka_expected *expected)
{
    size_t answers[2];
    for (size_t i = 0; i < json_array_size(expected->cases); i++)
        for (size_t k = answers_for(expected, i, answers); k-- > 0;)
            expected->sources[answers[k]].users++;
}

/* Cases that are like others are drawn as these are, once that is settled. */
static void take_over(json_t *item)
{
    const json_t *like = json_object_get(item, "like");
    if (!like)
        return;
    json_object_set(item, "seed", json_object_get(like, "seed"));
    json_object_set(item, "upstream", json_object_get(like, "upstream"));
}

static struct ka_expected *draw(struct ka_run *run)
{
    struct ka_expected *made = ka_calloc(1, sizeof(*made));
    const json_t *variations = json_object_get(json_object_get(run->oracles, "inputs"), "cases");
    const json_t *scalars = json_object_get(json_object_get(run->oracles, "scalars"), "varied");
    made->run = run;
    made->cases =
        ka_plan_check(run->shapes, run->grads, count_differentiable(run), run->half, ka_random_u64());
    ka_plan_varied(made->cases, ka_plan_roomy(run->shapes), variations, ka_random_u64());
    ka_plan_scalars(made->cases, ka_plan_variants(run->shapes), scalars, ka_random_u64());
    if (ka_run_on_gpu(run)) /* the interpreter has no order of programs to vary */
        ka_plan_compiled(made->cases);
    made->sources = ka_calloc(json_array_size(made->cases), sizeof(*made->sources));
    made->own = ka_calloc(json_array_size(made->cases), sizeof(struct ka_fan *));
    KA_EACH(made->cases, i, item) {
        if (!json_object_get(item, "like"))
            take_offer(run, item, &made->sources[i]);
    }
    KA_EACH(made->cases, i, item)
        take_over(item);
    count_users(made);
    ka_expected_withdraw(run);
    return made;
}

void ka_expected_prepare(struct ka_run *run)
{
    if (run->prepared || run->settings.fail_fast || !json_array_size(run->shapes))
        return;
    run->prepared = draw(run);
    size_t count = json_array_size(run->prepared->cases);
    KA_AUTO_FREE size_t *all = ka_calloc(count, sizeof(*all));
    for (size_t i = 0; i < count; i++)
        all[i] = i;
    size_t fit = ka_plan_fit(run->prepared->cases, all, 0, count, run->shapes, ka_run_results_room(run) / 2);
    ka_expected_ask(run->prepared, all, fit, NULL, NULL);
}

void ka_expected_discard(struct ka_run *run)
{
    ka_expected_free(run->prepared);
    run->prepared = NULL;
}

struct ka_expected *ka_expected_take(struct ka_run *run)
{
    struct ka_expected *made = run->prepared ? run->prepared : draw(run);
    run->prepared = NULL;
    return made;
}

void ka_expected_free(struct ka_expected *expected)
{
    if (!expected)
        return;
    for (size_t i = 0; i < json_array_size(expected->cases); i++) {
        ka_fan_free(expected->sources[i].fan);
        ka_fan_free(expected->sources[i].closer);
    }
    for (size_t i = 0; i < expected->own_count; i++)
        ka_fan_free(expected->own[i]);
    json_decref(expected->cases);
    free(expected->own);
    free(expected->sources);
    free(expected);
}

json_t *ka_expected_cases(const struct ka_expected *expected)
{
    return expected->cases;
}

void ka_expected_ask(struct ka_expected *expected, const size_t *list, size_t count, ka_fan_fn changed,
                     void *arg)
{
    json_auto_t *open = json_array();
    for (size_t i = 0; i < count; i++)
        if (answered_by(expected, list[i]) == list[i] && !expected->sources[list[i]].fan)
            json_array_append(open, json_array_get(expected->cases, list[i]));
    for (size_t i = 0; i < expected->own_count; i++)
        ka_fan_listen(expected->own[i], changed, arg);
    if (json_array_size(open)) {
        json_auto_t *told = ka_plan_for_oracle(open);
        struct ka_fan_req req = {.operation = "oracle",
                                 .file = expected->run->work_forward,
                                 .cases = told,
                                 .extra = json_pack("{s:b}", "fd", 0),
                                 .shapes = expected->run->shapes,
                                 .together = !ka_run_on_gpu(expected->run),
                                 .agree = true};
        struct ka_fan *fan = ka_fan_start(expected->run, &req, changed, arg);
        expected->own[expected->own_count++] = fan;
        for (size_t i = 0; i < count; i++)
            if (answered_by(expected, list[i]) == list[i] && !expected->sources[list[i]].fan)
                take_from(&expected->sources[list[i]], fan, (json_int_t)list[i]);
    }
}

void ka_expected_look_closer(struct ka_expected *expected, size_t i, ka_fan_fn changed, void *arg)
{
    struct source *source = &expected->sources[i];
    if (source->lookers++)
        return;
    json_auto_t *one = json_pack("[O]", json_array_get(expected->cases, answered_by(expected, i)));
    json_auto_t *told = ka_plan_for_oracle(one);
    json_object_set_new(json_array_get(told, 0), "closer", json_true());
    struct ka_fan_req req = {.operation = "oracle",
                             .file = expected->run->work_forward,
                             .what = "a closer look",
                             .cases = told,
                             .extra = json_pack("{s:b}", "fd", 0),
                             .shapes = expected->run->shapes,
                             .together = true};
    source->closer = ka_fan_start(expected->run, &req, changed, arg);
}

void ka_expected_leave_closer(struct ka_expected *expected, size_t i)
{
    struct source *source = &expected->sources[i];
    if (--source->lookers)
        return;
    ka_fan_free(source->closer);
    source->closer = NULL;
}

/* ---- looking things up */

bool ka_expected_find(const struct ka_expected *expected, size_t i, struct ka_fan_found *found,
                      json_int_t *id)
{
    const struct source *source = &expected->sources[answered_by(expected, i)];
    *id = source->id;
    return source->fan && ka_fan_find(source->fan, source->id, found);
}

bool ka_expected_find_closer(const struct ka_expected *expected, size_t i, struct ka_fan_found *found)
{
    struct ka_fan *closer = expected->sources[i].closer;
    *found = (struct ka_fan_found){0};
    return !closer || ka_fan_find(closer, (json_int_t)answered_by(expected, i), found) ||
           ka_fan_ended(closer);
}

void ka_expected_release(struct ka_expected *expected, size_t i)
{
    size_t answers[2];
    for (size_t k = answers_for(expected, i, answers); k-- > 0;) {
        struct source *source = &expected->sources[answers[k]];
        source->users--;
        for (size_t n = 0; n < expected->own_count && source->users == 0; n++)
            if (expected->own[n] == source->fan) /* what preflight computed goes with preflight's */
                ka_fan_release(source->fan, source->id);
    }
}

const struct ka_op_result *ka_expected_failed(const struct ka_expected *expected, enum ka_op_status status)
{
    const struct ka_op_result *failed = NULL;
    for (size_t i = 0; i < expected->own_count && !failed; i++)
        failed = ka_fan_failed(expected->own[i], status);
    return failed;
}

void ka_expected_stop(struct ka_expected *expected)
{
    for (size_t i = 0; i < expected->own_count; i++)
        ka_fan_stop(expected->own[i]);
    for (size_t i = 0; i < json_array_size(expected->cases); i++)
        if (expected->sources[i].closer)
            ka_fan_stop(expected->sources[i].closer);
}
