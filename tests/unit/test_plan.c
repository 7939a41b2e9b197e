/* Cases of a check, and the modelled cost. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include <math.h>

#include "agent/core/kinds.h"
#include "agent/core/plan.h"
#include "agent/core/rank.h"

static json_t *json(const char *text)
{
    json_t *doc = json_loads(text, 0, NULL);
    assert_non_null(doc);
    return doc;
}

static json_t *shapes(void)
{
    return json("[{\"dims\": {\"M\": 64, \"N\": 100}, \"class\": \"required\", \"kind\": \"sweep\"},"
                " {\"dims\": {\"M\": 8, \"N\": 32}, \"class\": \"required\", \"kind\": \"sweep\"},"
                " {\"dims\": {\"M\": 2, \"N\": 2}, \"class\": \"optional\", \"kind\": \"sweep\"},"
                " {\"dims\": {\"M\": 1, \"N\": 33}, \"class\": \"hidden\", \"kind\": \"one\"}]");
}

static size_t count_where(const json_t *cases, const char *member, const char *text)
{
    size_t i, count = 0;
    json_t *item;
    json_array_foreach((json_t *)cases, i, item)
    {
        const json_t *value =
            json_object_get(strcmp(member, "upstream") == 0 ? json_object_get(item, "upstream") : item,
                            strcmp(member, "upstream") == 0 ? "kind" : member);
        count += json_is_string(value) && strcmp(json_string_value(value), text) == 0;
    }
    return count;
}

static void plan__check__covers_every_shape_with_five_seeds_over_the_required(void **state)
{
    (void)state;
    json_t *list = shapes(), *grads = json("[\"x\", \"w\"]");
    json_t *cases = ka_plan_check(list, grads, 2, false, 7);
    size_t i, normal_required = 0;
    json_t *item;
    json_array_foreach(cases, i, item)
    {
        assert_int_equal(json_integer_value(json_object_get(item, "id")), (json_int_t)i);
        normal_required +=
            strcmp(json_string_value(json_object_get(item, "class")), "required") == 0 &&
            strcmp(json_string_value(json_object_get(json_object_get(item, "upstream"), "kind")), "normal") ==
                0 &&
            !json_object_get(item, "needs");
    }
    assert_true(normal_required >= KA_PLAN_MIN_SEEDS);
    assert_int_equal(count_where(cases, "class", "hidden"), 1);
    assert_int_equal(count_where(cases, "class", "optional"), 1);
    assert_int_equal(count_where(cases, "upstream", "onehot"), 1);
    assert_int_equal(count_where(cases, "upstream", "ones"), 1);
    assert_int_equal(count_where(cases, "upstream", "none_one"), 2); /* one for each output */
    json_decref(cases);
    json_decref(list);
    json_decref(grads);
}

static void plan__each_of_several_outputs__is_left_out_once_whatever_the_secret(void **state)
{
    (void)state;
    json_t *list = shapes(), *grads = json("[\"x\"]"), *item;
    for (uint64_t secret = 0; secret < 20; secret++) {
        json_t *cases = ka_plan_check(list, grads, 3, false, secret);
        unsigned left_out = 0;
        size_t i;
        json_array_foreach(cases, i, item)
        {
            const json_t *up = json_object_get(item, "upstream");
            if (strcmp(json_string_value(json_object_get(up, "kind")), "none_one") == 0)
                left_out |= 1u << json_integer_value(json_object_get(up, "seed")) % 3;
        }
        assert_int_equal(left_out, 7);
        json_decref(cases);
    }
    json_decref(list);
    json_decref(grads);
}

static void plan__more_gradients_than_bits__the_first_have_their_subsets(void **state)
{
    (void)state;
    json_t *list = shapes(), *grads = json_array(), *item;
    for (int i = 0; i < 70; i++)
        json_array_append_new(grads, json_sprintf("g%d", i));
    json_t *cases = ka_plan_check(list, grads, 1, false, 7);
    size_t i, alone = 0, left_out = 0;
    json_array_foreach(cases, i, item)
    {
        size_t wanted = json_array_size(json_object_get(item, "needs"));
        alone += wanted == 1;
        left_out += wanted == 63;
    }
    assert_int_equal(alone, 16);
    assert_int_equal(left_out, 16);
    json_decref(cases);
    json_decref(list);
    json_decref(grads);
}

static void plan__more_than_two_outputs__each_is_also_used_alone(void **state)
{
    (void)state;
    json_t *list = shapes(), *grads = json("[\"x\"]");
    for (int outputs = 1; outputs < 5; outputs++) {
        json_t *cases = ka_plan_check(list, grads, outputs, false, 7);
        assert_int_equal(count_where(cases, "upstream", "only_one"), outputs > 2 ? outputs : 0);
        bool named[5] = {false};
        size_t i;
        json_t *item;
        json_array_foreach(cases, i, item)
        {
            json_t *up = json_object_get(item, "upstream"), *output = json_object_get(up, "output");
            KA_AUTO_BUF struct ka_buf label = {0}, want = {0};
            ka_kind_label(item, &label);
            if (!output)
                continue;
            json_int_t at = json_integer_value(output);
            assert_int_equal(json_integer_value(json_object_get(up, "seed")) % outputs, at);
            bool none = strcmp(json_string_value(json_object_get(up, "kind")), "none_one") == 0;
            ka_buf_printf(&want, "%s (output %d)", none ? "none_one upstream" : "upstream of one output",
                          (int)at);
            assert_string_equal(ka_buf_str(&label), ka_buf_str(&want));
            assert_non_null(ka_kind_meaning(ka_buf_str(&label)));
            named[at] = named[at] || none;
        }
        for (int k = 0; k < outputs; k++)
            assert_int_equal(named[k], outputs > 1);
        json_decref(cases);
    }
    json_decref(list);
    json_decref(grads);
}

static void plan__four_gradients__each_two_are_wanted_together(void **state)
{
    (void)state;
    json_t *list = shapes(), *grads = json("[\"a\", \"b\", \"c\", \"d\"]"),
           *cases = ka_plan_check(list, grads, 1, false, 7), *item;
    size_t i, pairs = 0;
    json_array_foreach(cases, i, item)
    {
        const json_t *like = json_object_get(item, "like");
        pairs += json_array_size(json_object_get(item, "needs")) == 2;
        assert_int_equal(like != NULL, json_object_get(item, "needs") != NULL);
        if (like) {
            assert_true(json_integer_value(json_object_get(like, "id")) < (json_int_t)i);
            assert_true(json_equal(json_object_get(like, "dims"), json_object_get(item, "dims")));
        }
    }
    assert_int_equal(pairs, 6);
    json_decref(cases);
    json_decref(list);
    json_decref(grads);
}

/* Two graphs alive at once: an earlier case of the same shape is told whole, and as it is at the end. */
static void plan__questions_about_another_case__name_an_earlier_one_of_the_shape(void **state)
{
    (void)state;
    json_t *list = shapes(), *grads = json("[\"x\"]"), *cases = ka_plan_check(list, grads, 1, false, 7),
           *item;
    size_t i, asked = 0;
    json_array_foreach(cases, i, item)
    {
        json_t *other = json_object_get(item, "beside");
        if (!other)
            continue;
        asked++;
        assert_true(json_integer_value(json_object_get(other, "id")) < (json_int_t)i);
        assert_true(json_equal(json_object_get(other, "dims"), json_object_get(item, "dims")));
        assert_ptr_equal(other, json_object_get(item, "stale"));
        assert_true(json_is_true(json_object_get(item, "kept")));
        json_object_set_new(other, "seed", json_integer(99)); /* as an oracle's answer from before does */
        json_t *told = ka_plan_for_candidate(cases), *to = json_array_get(told, i);
        assert_int_equal(json_integer_value(json_object_get(json_object_get(to, "beside"), "seed")), 99);
        assert_null(json_object_get(json_object_get(to, "beside"), "class"));
        const json_t *cheap = json_object_get(json_object_get(to, "calls"), "dims");
        assert_int_equal(json_integer_value(json_object_get(cheap, "M")), 2);
        json_decref(told);
        told = ka_plan_for_oracle(cases);
        assert_null(json_object_get(json_array_get(told, i), "beside"));
        json_decref(told);
    }
    assert_int_equal(asked, 1);
    json_decref(cases);
    json_decref(list);
    json_decref(grads);
}

static void plan__fit__is_as_many_as_have_room_and_at_least_one(void **state)
{
    (void)state;
    json_t *cases = json("[{\"dims\": {\"N\": 1}}, {\"dims\": {\"N\": 8}}, {\"dims\": {\"N\": 9}}]");
    json_t *known = json("[{\"dims\": {\"N\": 8}, \"bytes\": 100}, {\"dims\": {\"N\": 9}, \"bytes\": 60}]");
    const size_t order[] = {0, 2, 1, 2};
    const struct {
        size_t from, upto;
        double room;
        size_t fit;
    } rows[] = {{0, 4, 1e9, 4}, {0, 4, 59, 1},  {0, 4, 60, 2},  {0, 4, 160, 3},
                {2, 4, 1, 1},   {2, 4, 160, 2}, {1, 2, 1e9, 1}, {4, 4, 1e9, 0}};
    for (size_t i = 0; i < KA_COUNT(rows); i++)
        assert_int_equal(ka_plan_fit(cases, order, rows[i].from, rows[i].upto, known, rows[i].room),
                         rows[i].fit);
    json_decref(cases);
    json_decref(known);
}

static void plan__memory_of_the_candidate__is_of_every_kind_and_mostly_nan(void **state)
{
    (void)state;
    json_t *list = shapes(), *grads = json("[\"x\", \"w\"]"), *item;
    for (uint64_t secret = 0; secret < 50; secret++) {
        json_t *cases = ka_plan_check(list, grads, 1, false, secret), *told = ka_plan_for_oracle(cases);
        size_t i, special = 0;
        assert_int_equal(count_where(cases, "memory", "zero"), 1);
        assert_true(count_where(cases, "memory", "large") && count_where(cases, "memory", "bits"));
        json_array_foreach(cases, i, item)
        {
            const char *memory = json_string_value(json_object_get(item, "memory"));
            special += memory != NULL;
            if (memory && strcmp(memory, "zero") == 0) {
                const char *kind =
                    json_string_value(json_object_get(json_object_get(item, "upstream"), "kind"));
                assert_null(json_object_get(item, "noop"));
                assert_null(json_object_get(item, "needs"));
                assert_string_equal(kind, "normal");
            }
            assert_null(json_object_get(json_array_get(told, i), "memory"));
        }
        assert_true(2 * special < json_array_size(cases) + 8);
        json_decref(told);
        json_decref(cases);
    }
    json_decref(list);
    json_decref(grads);
}

static void plan__further_seeds__are_spent_on_the_smallest_required_shape(void **state)
{
    (void)state;
    json_t *list = shapes(), *grads = json("[\"x\"]"), *cases = ka_plan_check(list, grads, 1, false, 7),
           *item;
    size_t i, plain[2] = {0};
    json_array_foreach(cases, i, item)
    {
        const char *kind = json_string_value(json_object_get(json_object_get(item, "upstream"), "kind"));
        for (size_t k = 0; k < 2; k++)
            plain[k] +=
                strcmp(kind, "normal") == 0 &&
                json_equal(json_object_get(item, "dims"), json_object_get(json_array_get(list, k), "dims"));
    }
    assert_int_equal(plain[0], 1);
    assert_int_equal(plain[1], KA_PLAN_MIN_SEEDS - 1);
    json_decref(cases);
    json_decref(list);
    json_decref(grads);
}

static void plan__further_seeds__run_programs_in_other_orders(void **state)
{
    (void)state;
    json_t *list = shapes(), *grads = json("[\"x\"]"), *cases = ka_plan_check(list, grads, 1, false, 7),
           *item;
    size_t i, reversed = 0, drawn = 0;
    json_array_foreach(cases, i, item)
    {
        const json_t *order = json_object_get(item, "order");
        reversed += json_is_string(order) && strcmp(json_string_value(order), "reversed") == 0;
        drawn += json_is_integer(order);
        if (order)
            assert_null(json_object_get(item, "twice"));
    }
    assert_int_equal(reversed, 1);
    assert_int_equal(drawn, KA_PLAN_MIN_SEEDS - 3);
    ka_plan_compiled(cases);
    json_array_foreach(cases, i, item) assert_null(json_object_get(item, "order"));
    json_decref(cases);
    json_decref(list);
    json_decref(grads);
}

static void plan__variants__are_on_the_smallest_required_shape(void **state)
{
    (void)state;
    json_t *list = shapes(), *grads = json("[\"x\", \"w\"]"),
           *cases = ka_plan_check(list, grads, 1, false, 7), *item;
    size_t i, alone = 0, twice = 0, noop = 0;
    json_array_foreach(cases, i, item)
    {
        const char *kind = json_string_value(json_object_get(json_object_get(item, "upstream"), "kind"));
        bool special =
            strcmp(kind, "normal") != 0 || json_object_get(item, "needs") || json_object_get(item, "twice");
        if (special)
            assert_int_equal(json_integer_value(json_object_get(json_object_get(item, "dims"), "M")), 8);
        alone += json_array_size(json_object_get(item, "needs")) == 1;
        twice += json_is_true(json_object_get(item, "twice"));
        noop += json_is_true(json_object_get(item, "noop"));
    }
    assert_int_equal(alone, 2);
    assert_int_equal(twice, 1);
    assert_int_equal(noop, json_array_size(cases) - 1);              /* not where fresh memory is zero */
    assert_int_equal(count_where(cases, "upstream", "none_one"), 0); /* one output */
    json_decref(cases);
    json_decref(list);
    json_decref(grads);
}

static void plan__three_gradients__each_is_left_out_once(void **state)
{
    (void)state;
    json_t *list = shapes(), *grads = json("[\"x\", \"w\", \"b\"]"),
           *cases = ka_plan_check(list, grads, 1, false, 7), *item;
    size_t i, alone = 0, pairs = 0;
    json_array_foreach(cases, i, item)
    {
        json_t *needs = json_object_get(item, "needs");
        alone += json_array_size(needs) == 1;
        pairs +=
            json_array_size(needs) == 2 && !json_equal(json_array_get(needs, 0), json_array_get(needs, 1));
    }
    assert_int_equal(alone, 3);
    assert_int_equal(pairs, 3);
    json_decref(cases);
    json_decref(list);
    json_decref(grads);
}

static void plan__seeds__differ_between_cases_and_between_secrets(void **state)
{
    (void)state;
    json_t *list = shapes(), *grads = json("[\"x\"]");
    json_t *first = ka_plan_check(list, grads, 1, false, 7),
           *second = ka_plan_check(list, grads, 1, false, 8), *a, *b;
    size_t i, k;
    json_array_foreach(first, i, a)
    {
        json_array_foreach(first, k, b)
        {
            if (i != k)
                assert_int_not_equal(json_integer_value(json_object_get(a, "seed")),
                                     json_integer_value(json_object_get(b, "seed")));
        }
        assert_int_not_equal(json_integer_value(json_object_get(a, "seed")),
                             json_integer_value(json_object_get(json_array_get(second, i), "seed")));
    }
    json_decref(first);
    json_decref(second);
    json_decref(list);
    json_decref(grads);
}

static void plan__what_a_child_is_sent__does_not_say_which_shapes_are_hidden(void **state)
{
    (void)state;
    json_t *list = shapes(), *cases = ka_plan_preflight(list, 1);
    json_t *sent = ka_plan_for_candidate(cases);
    char *text = json_dumps(sent, 0);
    assert_int_equal(json_array_size(sent), 4);
    assert_null(strstr(text, "hidden"));
    assert_null(strstr(text, "required"));
    free(text);
    json_decref(sent);
    json_decref(cases);
    json_decref(list);
}

static double cost_of(const char *text)
{
    json_t *facts = json(text);
    double cost = ka_rank_cost(facts);
    json_decref(facts);
    return cost;
}

static double programs_at_once(int warps, int registers, int shared)
{
    json_auto_t *kernel =
        json_pack("{s:i, s:i, s:i}", "num_warps", warps, "registers", registers, "shared", shared);
    return ka_rank_programs(kernel);
}

static void rank__programs_at_once__by_what_ends_first(void **state)
{
    (void)state;
    assert_true(programs_at_once(1, 16, 0) == 32);         /* as many as there are places */
    assert_true(programs_at_once(8, 16, 0) == 8);          /* warps */
    assert_true(programs_at_once(8, 205, 1024) == 1);      /* registers */
    assert_true(programs_at_once(8, 124, 81920) == 2);     /* both */
    assert_true(programs_at_once(4, 32, 100 * 1024) == 2); /* shared memory */
    assert_true(programs_at_once(4, 32, 228 * 1024) == 0); /* more than there is */
    assert_true(programs_at_once(0, 255, 0) == floor(65536.0 / (255 * 128))); /* Triton's four warps */
}

static void rank__atomics_spills_and_launches__cost(void **state)
{
    (void)state;
    double plain = cost_of("{\"cases\": [{\"backward\": {\"bytes_read\": 1000, \"bytes_written\": 1000, "
                           "\"launches\": 1, \"programs\": 4}}]}");
    double atomic = cost_of("{\"cases\": [{\"backward\": {\"bytes_read\": 1000, \"bytes_written\": 1000, "
                            "\"atomics\": 10, \"launches\": 1, \"programs\": 4}}]}");
    double launches = cost_of("{\"cases\": [{\"backward\": {\"bytes_read\": 1000, \"bytes_written\": 1000, "
                              "\"launches\": 2, \"programs\": 4}}]}");
    double spills = cost_of("{\"cases\": [{\"backward\": {\"bytes_read\": 1000, \"bytes_written\": 1000, "
                            "\"launches\": 1, \"programs\": 4},"
                            " \"kernels\": [{\"ok\": true, \"spills\": 8, \"num_warps\": 4}]}]}");
    assert_true(plain < atomic && plain < launches && plain < spills);
}

/* Whether a backward with these counts gives up something beside one with those. */
static bool gives_up(const char *mine, const char *theirs)
{
    char text[2][256];
    snprintf(text[0], sizeof(text[0]), "{\"cases\": [{\"backward\": {}}, {\"backward\": {%s}}]}", mine);
    snprintf(text[1], sizeof(text[1]), "{\"cases\": [{\"backward\": {}}, {\"backward\": {%s}}]}", theirs);
    json_t *facts = json(text[0]), *other = json(text[1]);
    bool found = ka_rank_gives_up(facts, other);
    json_decref(other);
    json_decref(facts);
    return found;
}

/* The same of the end of parallelism: programs on the user's own sizes, and atomic adds. */
static bool ends(int mine, int adds, int theirs, int their_adds)
{
    static const char facts_of[] = "{\"cases\": [{\"backward\": {\"atomics\": %d}}], \"widest\": %d}";
    char text[2][256];
    snprintf(text[0], sizeof(text[0]), facts_of, adds, mine);
    snprintf(text[1], sizeof(text[1]), facts_of, their_adds, theirs);
    json_t *facts = json(text[0]), *other = json(text[1]);
    bool found = ka_rank_ends_parallelism(facts, other);
    json_decref(other);
    json_decref(facts);
    return found;
}

static void rank__a_few_programs_in_place_of_more__end_parallelism(void **state)
{
    (void)state;
    assert_true(ends(1, 0, 8, 0));
    assert_true(ends(31, 0, 4096, 0));
    assert_false(ends(32, 0, 4096, 0));
    assert_false(ends(1, 0, 1, 0)); /* there is no more to do */
    assert_false(ends(1, 0, 4096, 9));
    assert_true(ends(1, 9, 4096, 9));
    assert_false(ends(0, 0, 4096, 0)); /* not known */
    assert_false(ka_rank_ends_parallelism(NULL, NULL));
}

static void rank__what_has_no_price__is_given_up_by_atomics_and_fewer_programs(void **state)
{
    (void)state;
    assert_true(gives_up("\"atomics\": 1", "\"atomics\": 0"));
    assert_true(gives_up("\"atomics\": 1", ""));
    assert_false(gives_up("\"atomics\": 9", "\"atomics\": 2")); /* those have a price */
    assert_false(gives_up("\"atomics\": 0", "\"atomics\": 2"));
    assert_true(gives_up("\"widest\": 7", "\"widest\": 8"));
    assert_false(gives_up("\"widest\": 8", "\"widest\": 8"));
    assert_false(gives_up("\"widest\": 7", "\"widest\": 8, \"atomics\": 2")); /* partial sums instead */
    assert_false(ka_rank_gives_up(NULL, NULL));
}

static bool hopeless(const char *mine, int theirs)
{
    char text[2][256];
    snprintf(text[0], sizeof(text[0]),
             "{\"cases\": [], \"kernels\": [{\"name\": \"bwd\", \"spills\": 0}, {\"name\": \"bwd_w\", %s}]}",
             mine);
    snprintf(text[1], sizeof(text[1]), "{\"cases\": [{\"kernels\": [{\"name\": \"bwd\", \"spills\": %d}]}]}",
             theirs);
    json_t *facts = json(text[0]), *other = json(text[1]);
    bool found = ka_rank_is_hopeless(facts, other);
    json_decref(other);
    json_decref(facts);
    return found;
}

static void rank__what_spills_far_more__need_not_be_timed(void **state)
{
    (void)state;
    assert_true(hopeless("\"ok\": true, \"spills\": 513", 0));
    assert_false(hopeless("\"ok\": true, \"spills\": 512", 0));
    assert_false(hopeless("\"ok\": true, \"spills\": 900", 450)); /* the other one does too */
    assert_true(hopeless("\"ok\": true, \"spills\": 901", 450));
    assert_true(hopeless("\"ok\": false, \"spills\": null", 9000));
    /* for ragged sizes, not for others */
    assert_false(hopeless("\"spills\": 901}, {\"name\": \"bwd_w\", \"spills\": 0", 0));
    assert_true(hopeless("\"spills\": 901}, {\"name\": \"bwd_w\", \"spills\": 600", 0));
    assert_true(hopeless("\"spills\": 0}, {\"name\": \"bwd_w\", \"ok\": false", 0));
    assert_false(ka_rank_is_hopeless(NULL, NULL));
}

static void rank__what_kernels_take__is_that_of_the_users_own_sizes(void **state)
{
    (void)state;
    static const char cases[] = "{\"cases\": [{\"backward\": {\"bytes_read\": 1000, \"bytes_written\": 1000, "
                                "\"programs\": 4}, \"kernels\": [{\"ok\": true, \"num_warps\": 4, "
                                "\"registers\": 32, \"spills\": 0}]}], \"kernels\": [%s]}";
    char none[512], spilled[512];
    snprintf(none, sizeof(none), cases, "");
    snprintf(spilled, sizeof(spilled), cases,
             "{\"ok\": true, \"num_warps\": 4, \"registers\": 255, \"spills\": 400}");
    assert_true(cost_of(spilled) > cost_of(none));
}

/* One kernel of 4 warps that moves 2000 bytes and has these resources. */
static double cost_with(int registers, int shared)
{
    char text[256];
    snprintf(text, sizeof(text),
             "{\"cases\": [{\"backward\": {\"bytes_read\": 1000, \"bytes_written\": 1000, \"launches\": 1, "
             "\"programs\": 4}, \"kernels\": [{\"ok\": true, \"num_warps\": 4, \"registers\": %d, "
             "\"shared\": %d}]}]}",
             registers, shared);
    return cost_of(text);
}

static void rank__too_few_resident_warps__make_bytes_dearer(void **state)
{
    (void)state;
    assert_true(cost_with(32, 0) == cost_with(128, 50000)); /* 16 warps and more are enough */
    assert_true(cost_with(255, 0) > cost_with(128, 0));     /* 8 programs of 4 warps would fit, 2 do */
    assert_true(cost_with(64, 100000) > cost_with(64, 50000));
    assert_true(isinf(cost_with(64, 300000))); /* more than a multiprocessor has */
}

static void assert_variant(const char *tried, const char *best, const char *expected)
{
    json_t *report = json("{\"schedule\": \"partials\", \"alternatives\": [\"owner\", \"atomic\"], "
                          "\"configs\": [{\"num_warps\": 2}, {\"num_warps\": 8}]}");
    json_t *done = json(tried), *kept = json(best), *variant = ka_plan_variant(report, done, kept);
    if (!expected) {
        assert_null(variant);
    } else {
        json_t *wanted = json(expected);
        assert_true(json_equal(variant, wanted));
        json_decref(wanted);
    }
    json_decref(variant);
    json_decref(kept);
    json_decref(done);
    json_decref(report);
}

static void plan__variants_of_the_tuner__are_schedules_and_then_configurations_of_the_best(void **state)
{
    (void)state;
    const char *draft = "{\"schedule\": \"partials\", \"config\": null}",
               *owner = "{\"schedule\": \"owner\", \"config\": null}";
    assert_variant("[]", draft, owner);
    assert_variant("[{\"schedule\": \"owner\", \"config\": null}]", draft,
                   "{\"schedule\": \"atomic\", \"config\": null}");
    const char *both =
        "[{\"schedule\": \"owner\", \"config\": null}, {\"schedule\": \"atomic\", \"config\": null}]";
    assert_variant(both, draft, "{\"schedule\": \"partials\", \"config\": {\"num_warps\": 2}}");
    assert_variant(both, owner, "{\"schedule\": \"owner\", \"config\": {\"num_warps\": 2}}");
    assert_variant(both, "{\"schedule\": \"owner\", \"config\": {\"splits\": 128, \"num_warps\": 4}}",
                   "{\"schedule\": \"owner\", \"config\": {\"splits\": 128, \"num_warps\": 2}}");
    assert_variant(
        "[{\"schedule\": \"owner\", \"config\": null}, {\"schedule\": \"atomic\", \"config\": null}, "
        "{\"schedule\": \"owner\", \"config\": {\"num_warps\": 2}}, "
        "{\"schedule\": \"owner\", \"config\": {\"num_warps\": 8}}]",
        owner, NULL);
}

static void plan__variants_of_the_tuner__end_with_their_budget(void **state)
{
    (void)state;
    json_t *tried = json_array();
    for (int i = 0; i < KA_PLAN_MAX_VARIANTS; i++)
        json_array_append_new(tried, json_integer(i));
    char *text = json_dumps(tried, 0);
    assert_variant(text, "{\"schedule\": \"partials\", \"config\": null}", NULL);
    free(text);
    json_decref(tried);
    json_t *best = json("{\"schedule\": \"partials\"}");
    assert_null(ka_plan_variant(NULL, NULL, best));
    json_decref(best);
}

static void plan__variants_of_the_tuner__end_with_the_time_of_the_run(void **state)
{
    (void)state;
    assert_false(ka_plan_late(1e9, 0, true)); /* which has no end */
    assert_false(ka_plan_late(100, 100, false));
    assert_true(ka_plan_late(100.5, 100, false));
    assert_false(ka_plan_late(50, 100, true));
    assert_true(ka_plan_late(50.5, 100, true)); /* the check of what is ahead takes time too */
}

static void rank__nothing_measured_or_not_compiled__is_infinite(void **state)
{
    (void)state;
    assert_true(isinf(cost_of("{\"cases\": []}")));
    assert_true(isinf(cost_of("{}")));
    assert_true(
        isinf(cost_of("{\"cases\": [{\"backward\": {\"bytes_read\": 1}, \"kernels\": [{\"ok\": false}]}]}")));
    assert_true(isinf(ka_rank_cost(NULL)));
}

static void plan__input_that_is_none_on_a_shape__is_never_asked_for_there(void **state)
{
    (void)state;
    json_t *list = json("[{\"dims\": {\"M\": 2}, \"class\": \"required\", \"grads\": [\"x\"]},"
                        " {\"dims\": {\"M\": 8}, \"class\": \"required\", \"grads\": [\"x\", \"gate\"]}]");
    json_t *grads = json("[\"x\", \"gate\"]"), *cases = ka_plan_check(list, grads, 1, false, 7), *item;
    size_t i, subsets = 0;
    json_array_foreach(cases, i, item)
    {
        if (!json_object_get(item, "needs"))
            continue;
        subsets++;
        assert_int_equal(json_integer_value(json_object_get(json_object_get(item, "dims"), "M")), 8);
    }
    assert_int_equal(subsets, 2);
    json_decref(cases);
    json_array_remove(list, 1); /* gate is None everywhere now: nothing asks for it */
    cases = ka_plan_check(list, grads, 1, false, 7);
    assert_int_equal(count_where(cases, "upstream", "onehot"), 1);
    json_array_foreach(cases, i, item) assert_null(json_object_get(item, "needs"));
    json_decref(cases);
    json_decref(list);
    json_decref(grads);
}

static void plan__repeats__are_asked_in_one_plain_case_of_the_largest_required_shape(void **state)
{
    (void)state;
    json_t *list = shapes(), *grads = json("[\"x\", \"w\"]"), *item;
    json_t *cases = ka_plan_check(list, grads, 2, false, 7);
    size_t i, asked = 0;
    ka_plan_compiled(cases);
    json_array_foreach(cases, i, item)
    {
        if (!json_object_get(item, "repeats"))
            continue;
        asked++;
        assert_int_equal(json_integer_value(json_object_get(item, "repeats")), 4);
        assert_int_equal(json_integer_value(json_object_get(json_object_get(item, "dims"), "M")), 64);
    }
    assert_int_equal(asked, 1);
    json_decref(cases);
    json_decref(list);
    json_decref(grads);
}

static void plan__variations__are_one_case_each_on_the_smallest_required_shape(void **state)
{
    (void)state;
    json_t *list = shapes(), *grads = json("[\"x\"]"), *item,
           *kinds = json("[{\"layouts\": {\"x\": \"slice\"}}, {\"values\": {\"x\": \"mixed\"}}]");
    json_t *cases = ka_plan_check(list, grads, 1, false, 7);
    size_t before = json_array_size(cases), i;
    ka_plan_varied(cases, ka_plan_smallest(list), kinds, 9);
    assert_int_equal(json_array_size(cases), before + 2);
    json_array_foreach(cases, i, item)
    {
        assert_int_equal(json_integer_value(json_object_get(item, "id")), (json_int_t)i);
        assert_int_equal(json_object_get(item, "layouts") != NULL, i == before);
        assert_int_equal(json_object_get(item, "values") != NULL, i == before + 1);
        if (i >= before)
            assert_int_equal(json_integer_value(json_object_get(json_object_get(item, "dims"), "M")), 8);
    }
    json_decref(cases);
    json_decref(list);
    json_decref(grads);
    json_decref(kinds);
}

static void plan__stand_in__takes_the_variants_and_every_required_shape_stays(void **state)
{
    (void)state;
    json_t *list = shapes(), *grads = json("[\"x\", \"w\"]"), *item;
    json_array_append_new(list, json_pack("{s:{s:i, s:i}, s:s, s:s, s:b}", "dims", "M", 2, "N", 3, "class",
                                          "hidden", "kind", "small", "stand_in", 1));
    const json_t *small = json_object_get(json_array_get(list, json_array_size(list) - 1), "dims");
    json_t *cases = ka_plan_check(list, grads, 2, false, 7);
    size_t i, required = 0;
    json_array_foreach(cases, i, item)
    {
        const char *kind = json_string_value(json_object_get(json_object_get(item, "upstream"), "kind"));
        bool plain = strcmp(kind, "normal") == 0 && !json_object_get(item, "needs");
        required += plain && strcmp(json_string_value(json_object_get(item, "class")), "required") == 0;
        if (!plain || json_object_get(item, "twice"))
            assert_true(json_equal(json_object_get(item, "dims"), small));
    }
    assert_int_equal(required, KA_PLAN_MIN_SEEDS);
    json_decref(cases);
    json_decref(list);
    json_decref(grads);
}

static void plan__powers__are_exact_and_smaller_in_half_precision(void **state)
{
    (void)state;
    for (int half = 0; half < 2; half++) {
        json_t *list = shapes(), *grads = json("[\"x\"]"), *cases = ka_plan_check(list, grads, 1, half, 7),
               *item;
        size_t i, asked = 0;
        json_array_foreach(cases, i, item)
        {
            const json_t *powers = json_object_get(item, "powers");
            asked += powers != NULL;
            double up = json_number_value(json_array_get(powers, 0));
            assert_true(!powers || up == (half ? 256 : 65536));
            assert_true(!powers || json_number_value(json_array_get(powers, 1)) == (half ? 0x1p-8 : 0x1p-24));
        }
        assert_int_equal(asked, 1);
        json_decref(cases);
        json_decref(list);
        json_decref(grads);
    }
}

static void plan__repeats__are_not_asked_of_variations(void **state)
{
    (void)state;
    json_t *list = shapes(), *kinds = json("[{\"values\": {\"x\": \"mixed\"}}]"), *cases = json_array();
    ka_plan_varied(cases, ka_plan_smallest(list), kinds, 9);
    ka_plan_compiled(cases);
    assert_null(json_object_get(json_array_get(cases, 0), "repeats"));
    json_decref(cases);
    json_decref(list);
    json_decref(kinds);
}

static void plan__variations__nothing_kept_or_nothing_required__adds_nothing(void **state)
{
    (void)state;
    json_t *list = shapes(), *none = json_array(), *cases = json_array(),
           *kinds = json("[{\"values\": {\"x\": \"mixed\"}}]");
    ka_plan_varied(cases, ka_plan_smallest(list), NULL, 9);
    ka_plan_varied(cases, ka_plan_smallest(none), kinds, 9);
    assert_int_equal(json_array_size(cases), 0);
    json_decref(cases);
    json_decref(list);
    json_decref(none);
    json_decref(kinds);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(plan__variations__are_one_case_each_on_the_smallest_required_shape),
        cmocka_unit_test(plan__variations__nothing_kept_or_nothing_required__adds_nothing),
        cmocka_unit_test(plan__stand_in__takes_the_variants_and_every_required_shape_stays),
        cmocka_unit_test(plan__repeats__are_not_asked_of_variations),
        cmocka_unit_test(plan__powers__are_exact_and_smaller_in_half_precision),
        cmocka_unit_test(plan__repeats__are_asked_in_one_plain_case_of_the_largest_required_shape),
        cmocka_unit_test(plan__input_that_is_none_on_a_shape__is_never_asked_for_there),
        cmocka_unit_test(plan__check__covers_every_shape_with_five_seeds_over_the_required),
        cmocka_unit_test(plan__each_of_several_outputs__is_left_out_once_whatever_the_secret),
        cmocka_unit_test(plan__further_seeds__are_spent_on_the_smallest_required_shape),
        cmocka_unit_test(plan__further_seeds__run_programs_in_other_orders),
        cmocka_unit_test(plan__variants__are_on_the_smallest_required_shape),
        cmocka_unit_test(plan__three_gradients__each_is_left_out_once),
        cmocka_unit_test(plan__more_gradients_than_bits__the_first_have_their_subsets),
        cmocka_unit_test(plan__more_than_two_outputs__each_is_also_used_alone),
        cmocka_unit_test(plan__four_gradients__each_two_are_wanted_together),
        cmocka_unit_test(plan__questions_about_another_case__name_an_earlier_one_of_the_shape),
        cmocka_unit_test(plan__fit__is_as_many_as_have_room_and_at_least_one),
        cmocka_unit_test(plan__memory_of_the_candidate__is_of_every_kind_and_mostly_nan),
        cmocka_unit_test(plan__seeds__differ_between_cases_and_between_secrets),
        cmocka_unit_test(plan__what_a_child_is_sent__does_not_say_which_shapes_are_hidden),
        cmocka_unit_test(rank__atomics_spills_and_launches__cost),
        cmocka_unit_test(rank__programs_at_once__by_what_ends_first),
        cmocka_unit_test(rank__a_few_programs_in_place_of_more__end_parallelism),
        cmocka_unit_test(rank__what_spills_far_more__need_not_be_timed),
        cmocka_unit_test(rank__what_kernels_take__is_that_of_the_users_own_sizes),
        cmocka_unit_test(rank__what_has_no_price__is_given_up_by_atomics_and_fewer_programs),
        cmocka_unit_test(rank__too_few_resident_warps__make_bytes_dearer),
        cmocka_unit_test(plan__variants_of_the_tuner__are_schedules_and_then_configurations_of_the_best),
        cmocka_unit_test(plan__variants_of_the_tuner__end_with_their_budget),
        cmocka_unit_test(plan__variants_of_the_tuner__end_with_the_time_of_the_run),
        cmocka_unit_test(rank__nothing_measured_or_not_compiled__is_infinite),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
