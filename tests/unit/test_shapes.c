/* Shapes: what the ladder keeps, and what hidden shapes promise. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "agent/core/shapes.h"
#include "base/each.h"

static json_t *parse(const char *text)
{
    json_t *value = json_loads(text, 0, NULL);
    assert_non_null(value);
    return value;
}

/* The levels of `dims` are exactly the given shapes, in this order. */
static void assert_levels(const char *dims, uint64_t budget, size_t count, const char *const *levels)
{
    json_t *shape = parse(dims), *scaled;
    for (size_t i = 0; i < count; i++) {
        assert_int_equal(ka_shapes_scale(shape, budget, i, &scaled), 0);
        json_t *want = parse(levels[i]);
        if (!json_equal(scaled, want)) {
            char *text = json_dumps(scaled, JSON_COMPACT);
            fail_msg("level %zu of %s is %s, not %s", i, dims, text, levels[i]);
        }
        json_decref(want);
        json_decref(scaled);
    }
    assert_int_equal(ka_shapes_scale(shape, budget, count, &scaled), -ERANGE);
    assert_int_equal(ka_shapes_levels(shape, budget), count);
    json_decref(shape);
}
#define LEVELS(dims, budget, ...)                                                                            \
    assert_levels(dims, budget, sizeof((const char *[]){__VA_ARGS__}) / sizeof(char *),                      \
                  (const char *[]){__VA_ARGS__})

static int64_t get(const json_t *shape, const char *name)
{
    return json_integer_value(json_object_get(shape, name));
}

static void shapes__large_sizes__go_down_in_powers_of_two(void **state)
{
    (void)state;
    LEVELS("{\"M\":4096,\"N\":4096}", KA_SHAPES_BUDGET, "{\"M\":128,\"N\":128}", "{\"M\":64,\"N\":64}",
           "{\"M\":32,\"N\":32}", "{\"M\":16,\"N\":16}");
}

static void shapes__ragged_sizes__stay_ragged(void **state)
{
    (void)state;
    LEVELS("{\"M\":4096,\"N\":1000}", KA_SHAPES_BUDGET, "{\"M\":128,\"N\":120}", "{\"M\":64,\"N\":56}",
           "{\"M\":32,\"N\":24}", "{\"M\":16,\"N\":8}");
    LEVELS("{\"M\":4096,\"N\":4097}", KA_SHAPES_BUDGET, "{\"M\":128,\"N\":113}", "{\"M\":64,\"N\":49}",
           "{\"M\":32,\"N\":17}", "{\"M\":16,\"N\":17}");
}

static void shapes__shape_within_the_budget__is_its_own_first_level(void **state)
{
    (void)state;
    LEVELS("{\"M\":8,\"N\":100}", KA_SHAPES_BUDGET, "{\"M\":8,\"N\":100}", "{\"M\":8,\"N\":52}",
           "{\"M\":8,\"N\":20}", "{\"M\":8,\"N\":4}");
    LEVELS("{\"K\":3}", KA_SHAPES_BUDGET, "{\"K\":3}");
}

static void shapes__multiples_of_16__keep_their_odd_part(void **state)
{
    (void)state;
    LEVELS("{\"M\":2048,\"N\":768}", 128 * 96, "{\"M\":128,\"N\":96}", "{\"M\":64,\"N\":48}",
           "{\"M\":32,\"N\":16}", "{\"M\":16,\"N\":16}");
}

static void shapes__attention__keeps_head_sizes_and_head_groups(void **state)
{
    (void)state;
    LEVELS("{\"B\":4,\"HQ\":32,\"HKV\":8,\"N\":4096,\"D\":64}", KA_SHAPES_BUDGET,
           "{\"B\":2,\"HQ\":4,\"HKV\":2,\"N\":128,\"D\":64}",
           "{\"B\":2,\"HQ\":4,\"HKV\":2,\"N\":64,\"D\":64}", "{\"B\":2,\"HQ\":4,\"HKV\":2,\"N\":32,\"D\":64}",
           "{\"B\":1,\"HQ\":2,\"HKV\":1,\"N\":32,\"D\":64}",
           "{\"B\":1,\"HQ\":2,\"HKV\":1,\"N\":16,\"D\":64}");
    LEVELS("{\"B\":1,\"H\":16,\"N\":2048,\"D\":128}", KA_SHAPES_BUDGET,
           "{\"B\":1,\"H\":2,\"N\":128,\"D\":128}", "{\"B\":1,\"H\":2,\"N\":64,\"D\":64}",
           "{\"B\":1,\"H\":2,\"N\":32,\"D\":32}", "{\"B\":1,\"H\":1,\"N\":32,\"D\":32}",
           "{\"B\":1,\"H\":1,\"N\":16,\"D\":16}");
}

static void shapes__height_beside_a_width__is_no_head_count(void **state)
{
    (void)state;
    json_t *shape = parse("{\"B\":16,\"C\":64,\"H\":56,\"W\":56,\"k\":3}"), *scaled = NULL;
    for (size_t i = 0; ka_shapes_scale(shape, KA_SHAPES_BUDGET, i, &scaled) == 0; i++) {
        assert_int_equal(get(scaled, "H"), get(scaled, "W"));
        assert_int_equal(get(scaled, "k"), 3);
        json_decref(scaled);
    }
    json_decref(shape);
}

static void shapes__order_and_multiples__survive(void **state)
{
    (void)state;
    json_t *shape = parse("{\"T\":4096,\"window\":512,\"C\":480,\"G\":15}"), *scaled = NULL;
    assert_true(ka_shapes_levels(shape, (uint64_t)1 << 40) > 2);
    for (size_t i = 1; ka_shapes_scale(shape, (uint64_t)1 << 40, i, &scaled) == 0; i++) {
        if (get(scaled, "T") > 16)
            assert_true(get(scaled, "T") > get(scaled, "window"));
        if (get(scaled, "C") > 16)
            assert_int_equal(get(scaled, "C") % get(scaled, "G"), 0);
        json_decref(scaled);
    }
    json_decref(shape);
}

static void shapes__other_values__are_untouched(void **state)
{
    (void)state;
    LEVELS("{\"N\":4096,\"eps\":1e-5,\"causal\":true,\"act\":\"silu\",\"lens\":[1000,2000],\"seed\":12345,"
           "\"pad\":-1,"
           "\"zero\":0}",
           64,
           "{\"N\":64,\"eps\":1e-5,\"causal\":true,\"act\":\"silu\",\"lens\":[1000,2000],\"seed\":12345,"
           "\"pad\":-1,"
           "\"zero\":0}",
           "{\"N\":32,\"eps\":1e-5,\"causal\":true,\"act\":\"silu\",\"lens\":[1000,2000],\"seed\":12345,"
           "\"pad\":-1,"
           "\"zero\":0}",
           "{\"N\":16,\"eps\":1e-5,\"causal\":true,\"act\":\"silu\",\"lens\":[1000,2000],\"seed\":12345,"
           "\"pad\":-1,"
           "\"zero\":0}");
}

static void shapes__many_dimensions__still_fit(void **state)
{
    (void)state;
    json_t *shape = parse("{\"a\":16,\"b1\":16,\"c\":16,\"d1\":16,\"e\":16,\"f\":9223372036854775807}"),
           *scaled = NULL;
    assert_int_equal(ka_shapes_scale(shape, KA_SHAPES_BUDGET, 0, &scaled), 0);
    uint64_t product = 1;
    const char *name;
    json_t *value;
    json_object_foreach(scaled, name, value) product *= (uint64_t)json_integer_value(value);
    assert_true(product > 1 && product <= KA_SHAPES_BUDGET);
    json_decref(scaled);
    json_decref(shape);
}

static void shapes__unusable_dims__are_errors(void **state)
{
    (void)state;
    json_t *list = json_array(), *many = json_object(), *out = NULL;
    for (int i = 0; i <= KA_SHAPES_MAX_DIMS; i++) {
        char name[16];
        snprintf(name, sizeof(name), "d%d", i);
        json_object_set_new(many, name, json_integer(2));
    }
    assert_int_equal(ka_shapes_scale(list, 1, 0, &out), -EINVAL);
    assert_int_equal(ka_shapes_scale(NULL, 1, 0, &out), -EINVAL);
    assert_int_equal(ka_shapes_scale(many, 1, 0, &out), -EFBIG);
    assert_int_equal(ka_shapes_hidden(list, NULL, 1, 1, 1, &out), -EINVAL);
    assert_int_equal(ka_shapes_hidden(many, NULL, 1, 1, 1, &out), -EFBIG);
    assert_null(out);
    json_decref(list);
    json_decref(many);
}

static void shapes__hidden__are_new_distinct_and_small(void **state)
{
    (void)state;
    json_t *dims = parse("{\"B\":2,\"M\":32,\"N\":56,\"eps\":0.5}"), *out;
    json_t *sweep = parse("[{\"B\":2,\"M\":32,\"N\":57,\"eps\":0.5},{\"B\":2,\"M\":1,\"N\":56,\"eps\":0.5}]");
    for (uint64_t seed = 0; seed < 200; seed++) {
        assert_int_equal(ka_shapes_hidden(dims, sweep, seed, 12, 4096, &out), 0);
        assert_int_equal(json_array_size(out), 12);
        for (size_t i = 0; i < 12; i++) {
            json_t *shape = json_object_get(json_array_get(out, i), "dims");
            assert_true(get(shape, "B") >= 1 && get(shape, "M") >= 1 && get(shape, "N") >= 1);
            assert_true(get(shape, "B") * get(shape, "M") * get(shape, "N") <= 2 * 2 * 32 * 56);
            assert_true(json_real_value(json_object_get(shape, "eps")) == 0.5);
            assert_false(json_equal(shape, dims));
            assert_false(json_equal(shape, json_array_get(sweep, 0)));
            assert_false(json_equal(shape, json_array_get(sweep, 1)));
            for (size_t j = 0; j < i; j++)
                assert_false(json_equal(shape, json_object_get(json_array_get(out, j), "dims")));
        }
        json_decref(out);
    }
    json_decref(dims);
    json_decref(sweep);
}

static void shapes__hidden__depend_on_the_seed_alone(void **state)
{
    (void)state;
    json_t *dims = parse("{\"M\":32,\"N\":56}"), *a, *b, *c;
    assert_int_equal(ka_shapes_hidden(dims, NULL, 7, 8, 4096, &a), 0);
    assert_int_equal(ka_shapes_hidden(dims, NULL, 7, 8, 4096, &b), 0);
    assert_int_equal(ka_shapes_hidden(dims, NULL, 8, 8, 4096, &c), 0);
    assert_true(json_equal(a, b));
    assert_false(json_equal(a, c));
    json_decref(a);
    json_decref(b);
    json_decref(c);
    json_decref(dims);
}

static void shapes__hidden__cover_every_kind(void **state)
{
    (void)state;
    static const char *const kinds[] = {
        "one", "prime", "one_less", "one_more", "block_less_one", "block_plus_one", "odd_batch", "several"};
    json_t *dims = parse("{\"B\":2,\"M\":64,\"N\":48}"), *out;
    assert_int_equal(ka_shapes_hidden(dims, NULL, 3, 16, KA_SHAPES_BUDGET, &out), 0);
    for (size_t k = 0; k < KA_COUNT(kinds); k++) {
        bool seen = false;
        for (size_t i = 0; i < json_array_size(out); i++) {
            json_t *entry = json_array_get(out, i), *shape = json_object_get(entry, "dims");
            if (strcmp(json_string_value(json_object_get(entry, "kind")), kinds[k]) != 0)
                continue;
            seen = true;
            if (strcmp(kinds[k], "odd_batch") == 0)
                assert_true(get(shape, "B") % 2 == 1 && get(shape, "B") >= 3);
            if (strcmp(kinds[k], "one") == 0)
                assert_true(get(shape, "B") == 1 || get(shape, "M") == 1 || get(shape, "N") == 1);
        }
        if (!seen)
            fail_msg("no hidden shape of kind %s", kinds[k]);
    }
    json_decref(out);
    json_decref(dims);
}

static void shapes__hidden__go_beyond_the_block_of_every_size(void **state)
{
    (void)state;
    json_t *dims = json_pack("{s:i,s:i}", "M", 3, "N", 20), *out, *shape;
    for (uint64_t seed = 0; seed < 32; seed++) {
        bool rows = false, cols = false;
        size_t i;
        assert_int_equal(ka_shapes_hidden(dims, NULL, seed, 6, KA_SHAPES_BUDGET, &out), 0);
        json_array_foreach(out, i, shape)
        {
            const json_t *varied = json_object_get(shape, "dims");
            rows = rows || json_integer_value(json_object_get(varied, "M")) == 5;
            cols = cols || json_integer_value(json_object_get(varied, "N")) == 33;
        }
        assert_true(rows && cols);
        json_decref(out);
    }
    json_decref(dims);
}

static void shapes__hidden_of_nothing_to_vary__is_empty(void **state)
{
    (void)state;
    json_t *dims = parse("{\"eps\":0.5,\"flag\":false}"), *out;
    assert_int_equal(ka_shapes_hidden(dims, NULL, 1, 4, 100, &out), 0);
    assert_int_equal(json_array_size(out), 0);
    json_decref(out);
    json_decref(dims);
}

static void long_shapes__one_size_long__the_rest_small_with_a_probe(void **state)
{
    (void)state;
    json_t *dims = parse("{\"B\":64,\"M\":4096,\"N\":50257,\"D\":64,\"causal\":true}"), *found;
    assert_int_equal(ka_shapes_long(dims, (uint64_t)1 << 24, &found), 0);
    assert_int_equal(json_array_size(found), 4);
    const json_t *batch = json_array_get(found, 1);
    assert_null(json_object_get(batch, "long"));
    assert_string_equal(json_string_value(json_object_get(batch, "dim")), "B");
    assert_int_equal(get(json_object_get(batch, "dims"), "B"), 2);
    json_array_remove(found, 1);
    const json_t *base = json_object_get(json_array_get(found, 0), "dims");
    assert_true(get(base, "M") <= 16 && get(base, "N") <= 32 && get(base, "B") <= 2);
    static const char *const names[] = {"M", "N"};
    for (size_t i = 0; i < 2; i++) {
        const json_t *entry = json_array_get(found, i + 1);
        const json_t *probe = json_object_get(entry, "dims"), *longer = json_object_get(entry, "long");
        assert_int_equal(get(probe, names[i]), 2 * get(base, names[i]));
        assert_int_equal(get(probe, names[1 - i]), get(base, names[1 - i]));
        assert_int_equal(get(longer, names[1 - i]), get(base, names[1 - i]));
        assert_true(json_is_true(json_object_get(longer, "causal")));
    }
    assert_int_equal(get(json_object_get(json_array_get(found, 1), "long"), "M"), 4096);
    int64_t ragged = get(json_object_get(json_array_get(found, 2), "long"), "N");
    assert_int_equal(ragged, KA_SHAPES_LONG + 50257 % 16);
    json_decref(found);
    json_decref(dims);
}

static size_t count_with(const json_t *list, const char *name)
{
    size_t i, count = 0;
    json_t *entry;
    json_array_foreach((json_t *)list, i, entry) count += json_object_get(entry, name) != NULL;
    return count;
}

static void covering_shapes__each_size_wanted__occurs_once(void **state)
{
    (void)state;
    static const char *const names[] = {"B", "M", "N"};
    json_t *dims = parse("{\"B\":3,\"M\":39,\"N\":100,\"causal\":true}"), *found, *entry, *size;
    assert_int_equal(ka_shapes_cover(dims, 128, (uint64_t)1 << 17, &found), 0);
    size_t i, k, zeros[3] = {0}, ones[3] = {0}, twos[3] = {0}, multiples[3] = {0}, short_of[3] = {0};
    json_array_foreach(found, i, entry)
    {
        const json_t *made = json_object_get(entry, "dims");
        const char *name;
        for (k = 0; k < 3; k++) {
            zeros[k] += get(made, names[k]) == 0;
            ones[k] += get(made, names[k]) == 1;
            twos[k] += get(made, names[k]) == 2;
            multiples[k] += get(made, names[k]) == 128;
            short_of[k] += get(made, names[k]) == 127;
        }
        json_object_foreach(json_object_get(entry, "wants"), name, size)
            assert_true(json_equal(size, json_object_get(made, name)));
    }
    for (k = 0; k < 3; k++) {
        assert_int_equal(zeros[k], k == 0); /* what comes first */
        assert_int_equal(ones[k], 1);
        assert_int_equal(twos[k], 1);
        assert_int_equal(multiples[k], k > 0);
        assert_int_equal(short_of[k], k > 0);
    }
    json_t *twos_of = json_object_get(json_array_get(found, json_array_size(found) - 1), "wants");
    json_t *have = parse("{\"B\":2,\"M\":5}"), *shapes = json_pack("[{s:o}]", "dims", have);
    json_t *singles = ka_shapes_singles(dims, "two", twos_of, shapes);
    assert_int_equal(json_array_size(singles), 2); /* B = 2 occurs elsewhere */
    assert_int_equal(get(json_object_get(json_array_get(singles, 0), "dims"), "M"), 2);
    assert_int_equal(get(json_object_get(json_array_get(singles, 0), "dims"), "N"), 100);
    json_decref(singles);
    json_decref(shapes);
    json_decref(found);
    json_decref(dims);
}

static void covering_shapes__size_of_few__has_a_small_multiple(void **state)
{
    (void)state;
    json_t *dims = parse("{\"D\":39,\"W\":4}"), *found, *entry;
    assert_int_equal(ka_shapes_cover(dims, 128, (uint64_t)1 << 17, &found), 0);
    size_t i, few = 0, many = 0;
    json_array_foreach(found, i, entry)
    {
        few += get(json_object_get(entry, "wants"), "W") == 16;
        many += get(json_object_get(entry, "wants"), "D") == 128;
    }
    assert_true(few == 1 && many == 1);
    json_decref(found);
    json_decref(dims);
}

static void covering_shapes__small_sizes_alone__have_the_same_multiple(void **state)
{
    (void)state;
    json_auto_t *dims = json_pack("{s:i, s:i}", "M", 4, "N", 16), *list = NULL;
    size_t many = 0;
    assert_int_equal(ka_shapes_cover(dims, 128, KA_SHAPES_BUDGET, &list), 0);
    KA_EACH(list, i, entry)
        many += json_integer_value(json_object_get(json_object_get(entry, "wants"), "M")) == 128;
    assert_int_equal(many, 1);
}

static void covering_shapes__too_large__take_a_smaller_multiple(void **state)
{
    (void)state;
    json_t *dims = parse("{\"M\":39,\"K\":44,\"N\":35}"), *alone = parse("{\"N\":24}"), *found, *entry;
    assert_int_equal(ka_shapes_cover(dims, 128, (uint64_t)1 << 17, &found), 0);
    size_t i, multiples = 0;
    json_array_foreach(found, i, entry)
    {
        int64_t size = get(json_object_get(entry, "wants"), "M");
        multiples += size == 64;
    }
    assert_int_equal(multiples, 1);
    json_decref(found);
    assert_int_equal(ka_shapes_cover(alone, 128, (uint64_t)1 << 17, &found), 0);
    assert_int_equal(get(json_object_get(json_array_get(found, 2), "dims"), "N"), 2048);
    json_decref(found);
    json_decref(alone);
    json_decref(dims);
}

static void long_shapes__nothing_scaled_or_too_large__gives_none(void **state)
{
    (void)state;
    json_t *small = parse("{\"M\":30,\"N\":100}"), *large = parse("{\"M\":4096,\"N\":4096}"), *found;
    assert_int_equal(ka_shapes_long(small, (uint64_t)1 << 24, &found), 0);
    assert_int_equal(count_with(found, "dim"), 2);
    assert_int_equal(count_with(found, "long"), 0);
    json_decref(found);
    assert_int_equal(ka_shapes_long(large, 4096, &found), 0);
    assert_int_equal(count_with(found, "long"), 0);
    json_decref(found);
    json_t *list = json_array();
    assert_int_equal(ka_shapes_long(list, 4096, &found), -EINVAL);
    json_decref(list);
    json_decref(small);
    json_decref(large);
}

static struct ka_shapes_limits within(int64_t most, uint64_t budget)
{
    return (struct ka_shapes_limits){.most = most, .budget = budget, .square = INFINITY};
}

static void between__gaps_of_a_factor_of_two__get_a_size_each(void **state)
{
    (void)state;
    json_t *dims = parse("{\"M\": 4, \"N\": 40}");
    json_t *known = parse("[{\"dims\": {\"M\": 4, \"N\": 1100}}, {\"dims\": {\"M\": 6, \"N\": 40}}]"), *found;
    for (uint64_t seed = 0; seed < 50; seed++) {
        assert_int_equal(ka_shapes_between(dims, known, within(INT64_MAX, 1 << 17), seed, &found), 0);
        const int64_t ends[] = {40, 80, 160, 320, 1100};
        assert_int_equal(json_array_size(found), 4);
        KA_EACH(found, i, entry) {
            json_t *made = json_object_get(entry, "dims");
            assert_int_equal(get(made, "M"), 4);
            assert_int_equal(get(made, "N") % 16, 40 % 16);
            assert_in_range(get(made, "N"), ends[i] + 1, ends[i + 1] - 1);
        }
        json_decref(found);
        assert_int_equal(ka_shapes_between(dims, known, within(300, 1 << 17), seed, &found), 0);
        KA_EACH(found, i, entry)
            assert_in_range(get(json_object_get(entry, "dims"), "N"), 41, 300);
        json_decref(found);
    }
    assert_int_equal(ka_shapes_between(dims, known, within(INT64_MAX, 160), 7, &found), 0);
    assert_int_equal(json_array_size(found), 0);
    json_decref(found);
    json_decref(known);
    json_decref(dims);
}

static void between__one_size_that_is_as_ragged__is_found(void **state)
{
    (void)state;
    json_t *dims = parse("{\"N\": 32}"), *known = parse("[{\"dims\": {\"N\": 64}}]"), *found;
    for (uint64_t seed = 0; seed < 20; seed++) {
        json_t *shapes = json_array();
        json_array_append_new(shapes, json_pack("{s:O}", "dims", dims));
        json_array_extend(shapes, known);
        assert_int_equal(
            ka_shapes_between(dims, shapes, within(seed % 2 ? INT64_MAX : 48, 1 << 17), seed, &found), 0);
        assert_int_equal(json_array_size(found), 1);
        assert_int_equal(get(json_object_get(json_array_get(found, 0), "dims"), "N"), 48);
        json_decref(found);
        assert_int_equal(ka_shapes_between(dims, shapes, within(47, 1 << 17), seed, &found), 0);
        assert_int_equal(json_array_size(found), 0);
        json_decref(found);
        json_decref(shapes);
    }
    json_decref(known);
    json_decref(dims);
}

static void between__few_gaps__are_of_one_dimension_each(void **state)
{
    (void)state;
    json_t *dims = parse("{\"M\": 32, \"N\": 32}"), *found;
    json_t *known = parse("[{\"dims\": {\"M\": 32, \"N\": 32}}, {\"dims\": {\"M\": 128, \"N\": 128}}]");
    assert_int_equal(ka_shapes_between(dims, known, within(INT64_MAX, 1 << 17), 3, &found), 0);
    assert_int_equal(json_array_size(found), 4);
    KA_EACH(found, i, entry) {
        json_t *made = json_object_get(entry, "dims");
        assert_true((get(made, "M") == 32) != (get(made, "N") == 32));
    }
    json_decref(found);
    json_decref(known);
    json_decref(dims);
}

/* How many shapes have a size of this name that is within the bounds. */
static int count_within(const json_t *found, const char *name, int64_t low, int64_t high)
{
    int count = 0;
    KA_EACH(found, i, entry) {
        int64_t size = get(json_object_get(entry, "dims"), name);
        count += size >= low && size <= high;
    }
    return count;
}

static void between__largest_size_twice__has_room(void **state)
{
    (void)state;
    struct ka_shapes_limits limits = {.most = 1024, .budget = 1 << 17, .square = 4e6};
    json_t *dims = parse("{\"M\": 6, \"N\": 8}"), *found;
    json_t *known = parse("[{\"dims\": {\"M\": 6, \"N\": 257}}, {\"dims\": {\"M\": 6, \"N\": 1000}}]");
    for (uint64_t seed = 0; seed < 50; seed++) {
        assert_int_equal(ka_shapes_between(dims, known, limits, seed, &found), 0);
        assert_int_equal(json_array_size(found), 1);
        assert_int_equal(count_within(found, "N", 258, 816), 1); /* 6 times 816 times 816 */
        json_decref(found);
    }
    json_decref(known);
    json_decref(dims);
}

static void between__shapes_that_dimensions_cannot_share__are_one_for_each(void **state)
{
    (void)state;
    json_t *dims = parse("{\"M\": 16, \"N\": 32, \"K\": 64}"), *found;
    json_t *known = parse("[{\"dims\": {\"M\": 16, \"N\": 32, \"K\": 64}},"
                          " {\"dims\": {\"M\": 4096, \"N\": 4096, \"K\": 4096}}]");
    for (uint64_t seed = 0; seed < 20; seed++) {
        assert_int_equal(ka_shapes_between(dims, known, within(INT64_MAX, 1 << 20), seed, &found), 0);
        assert_in_range(count_within(found, "M", 257, 512), 1, 2); /* 2048 times 512 */
        assert_in_range(count_within(found, "N", 513, 1024), 1, 2);
        assert_in_range(count_within(found, "K", 1025, 2048), 1, 2);
        json_decref(found);
    }
    json_decref(known);
    json_decref(dims);
}

static void between__many_gaps__dimensions_share_shapes(void **state)
{
    (void)state;
    json_t *dims = parse("{\"M\": 16, \"N\": 32, \"K\": 64}"), *found;
    json_t *known = parse("[{\"dims\": {\"M\": 16, \"N\": 32, \"K\": 64}},"
                          " {\"dims\": {\"M\": 4096, \"N\": 1024, \"K\": 100}}]");
    assert_int_equal(ka_shapes_between(dims, known, within(INT64_MAX, (uint64_t)1 << 40), 7, &found), 0);
    assert_in_range(json_array_size(found), 4, 6);
    json_t *made = json_object_get(json_array_get(found, 1), "dims");
    assert_in_range(get(made, "M"), 33, 4095);
    assert_in_range(get(made, "N"), 33, 1023);
    assert_int_equal(get(made, "K"), 64);
    json_decref(found);
    assert_int_equal(ka_shapes_between(known, known, within(INT64_MAX, 1), 7, &found), -EINVAL);
    json_decref(known);
    json_decref(dims);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(shapes__large_sizes__go_down_in_powers_of_two),
        cmocka_unit_test(shapes__ragged_sizes__stay_ragged),
        cmocka_unit_test(shapes__shape_within_the_budget__is_its_own_first_level),
        cmocka_unit_test(shapes__multiples_of_16__keep_their_odd_part),
        cmocka_unit_test(shapes__attention__keeps_head_sizes_and_head_groups),
        cmocka_unit_test(shapes__height_beside_a_width__is_no_head_count),
        cmocka_unit_test(shapes__order_and_multiples__survive),
        cmocka_unit_test(shapes__other_values__are_untouched),
        cmocka_unit_test(shapes__many_dimensions__still_fit),
        cmocka_unit_test(shapes__unusable_dims__are_errors),
        cmocka_unit_test(shapes__hidden__are_new_distinct_and_small),
        cmocka_unit_test(shapes__hidden__depend_on_the_seed_alone),
        cmocka_unit_test(shapes__hidden__cover_every_kind),
        cmocka_unit_test(shapes__hidden__go_beyond_the_block_of_every_size),
        cmocka_unit_test(shapes__hidden_of_nothing_to_vary__is_empty),
        cmocka_unit_test(covering_shapes__each_size_wanted__occurs_once),
        cmocka_unit_test(covering_shapes__size_of_few__has_a_small_multiple),
        cmocka_unit_test(covering_shapes__small_sizes_alone__have_the_same_multiple),
        cmocka_unit_test(covering_shapes__too_large__take_a_smaller_multiple),
        cmocka_unit_test(long_shapes__one_size_long__the_rest_small_with_a_probe),
        cmocka_unit_test(between__gaps_of_a_factor_of_two__get_a_size_each),
        cmocka_unit_test(between__one_size_that_is_as_ragged__is_found),
        cmocka_unit_test(between__few_gaps__are_of_one_dimension_each),
        cmocka_unit_test(between__largest_size_twice__has_room),
        cmocka_unit_test(between__shapes_that_dimensions_cannot_share__are_one_for_each),
        cmocka_unit_test(between__many_gaps__dimensions_share_shapes),
        cmocka_unit_test(long_shapes__nothing_scaled_or_too_large__gives_none),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
