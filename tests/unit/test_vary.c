/* Covering designs, and the variations that are made by them. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "agent/core/cover.h"
#include "agent/core/kinds.h"
#include "agent/core/vary.h"
#include "base/each.h"

#define FACTORS 7

static bool anything(const struct ka_cover_row *row, void *arg)
{
    (void)row;
    (void)arg;
    return true;
}

/* `count` factors with a plain level and two more families of `each` levels. */
static void make(struct ka_cover_factor *factors, size_t count, size_t each)
{
    for (size_t f = 0; f < count; f++) {
        factors[f] = (struct ka_cover_factor){.levels = 1 + 2 * each};
        for (size_t l = 1; l < factors[f].levels; l++)
            factors[f].family[l] = l <= each ? 1 : 2;
    }
}

static bool meet(const struct ka_cover_factor *factors, const struct ka_cover_row *rows, size_t count,
                 size_t f, int a, size_t g, int b)
{
    for (size_t i = 0; i < count; i++)
        if (factors[f].family[rows[i].level[f]] == a && factors[g].family[rows[i].level[g]] == b)
            return true;
    return a == 0 && b == 0;
}

static bool occurs(const struct ka_cover_row *rows, size_t count, size_t f, size_t level)
{
    for (size_t i = 0; i < count; i++)
        if (rows[i].level[f] == level)
            return true;
    return false;
}

static void assert_covers(const struct ka_cover_factor *factors, size_t count,
                          const struct ka_cover_row *rows, size_t have)
{
    for (size_t f = 0; f < count; f++) {
        for (size_t l = 1; l < factors[f].levels; l++)
            assert_true(occurs(rows, have, f, l));
        for (size_t g = 0; g < count; g++)
            for (int pair = 0; f != g && pair < 9; pair++)
                assert_true(meet(factors, rows, have, f, pair / 3, g, pair % 3));
    }
}

static void cover__every_level_occurs_and_every_two_families_meet(void **state)
{
    (void)state;
    for (size_t count = 2; count <= FACTORS; count++) {
        struct ka_cover_factor factors[FACTORS];
        struct ka_cover_row rows[40];
        make(factors, count, 3);
        size_t have = ka_cover(factors, count, anything, NULL, rows, 0, 40);
        assert_covers(factors, count, rows, have);
        assert_in_range(have, 9, count <= 3 ? 12 : 17);
    }
}

static void cover__rows_that_there_are__count_and_stay(void **state)
{
    (void)state;
    struct ka_cover_factor factors[FACTORS];
    struct ka_cover_row rows[40], first[40];
    make(factors, 4, 2);
    size_t all = ka_cover(factors, 4, anything, NULL, rows, 0, 40);
    memcpy(first, rows, sizeof(rows));
    assert_int_equal(ka_cover(factors, 4, anything, NULL, rows, all, 40), all); /* nothing is left */
    assert_true(ka_cover(factors, 4, anything, NULL, rows, 3, 40) > 3);
    assert_memory_equal(rows, first, 3 * sizeof(rows[0]));
    assert_int_equal(ka_cover(factors, 4, anything, NULL, rows, 0, 2), 2);
}

/* At most one factor beyond its first two levels. */
static bool one_high(const struct ka_cover_row *row, void *arg)
{
    size_t high = 0;
    for (size_t f = 0; f < *(size_t *)arg; f++)
        high += row->level[f] > 1;
    return high <= 1;
}

static void cover__rows_that_do_not_fit__are_not_made_and_the_rest_is_covered(void **state)
{
    (void)state;
    size_t count = 3;
    struct ka_cover_factor factors[FACTORS];
    struct ka_cover_row rows[40];
    make(factors, count, 1);
    size_t have = ka_cover(factors, count, one_high, &count, rows, 0, 40);
    assert_true(have < 40);
    for (size_t i = 0; i < have; i++)
        assert_true(one_high(&rows[i], &count));
    for (size_t f = 0; f < count; f++)
        for (size_t l = 1; l < factors[f].levels; l++)
            assert_true(occurs(rows, have, f, l));
    assert_true(meet(factors, rows, have, 0, 1, 2, 2));
    assert_false(meet(factors, rows, have, 0, 2, 2, 2));
}

/* ---- variations */

static json_t *json(const char *text)
{
    json_t *doc = json_loads(text, 0, NULL);
    assert_non_null(doc);
    return doc;
}

static const char *const TENSORS = "[{\"name\": \"x\", \"shape\": [4, 20], \"dtype\": \"float32\"},"
                                   " {\"name\": \"z\", \"shape\": [4, 20], \"dtype\": \"float32\"},"
                                   " {\"name\": \"w\", \"shape\": [20], \"dtype\": \"float32\"},"
                                   " {\"name\": \"upstream/0\", \"shape\": [4, 20], \"dtype\": \"float32\"}]";

static bool has(const json_t *variations, const char *member, const char *tensor, const char *kind)
{
    size_t i;
    json_t *item;
    json_array_foreach((json_t *)variations, i, item)
    {
        const json_t *found = json_object_get(json_object_get(item, member), tensor);
        if (found && strcmp(json_string_value(found), kind) == 0)
            return true;
    }
    return false;
}

static void vary__each_tensor__has_what_its_shape_suits(void **state)
{
    (void)state;
    json_t *tensors = json(TENSORS), *made = ka_vary(tensors, NULL, NULL);
    static const char *const matrix[] = {"slice", "stacked", "transposed", "expanded", "spanned", "shifted"};
    for (size_t i = 0; i < KA_COUNT(matrix); i++) {
        assert_true(has(made, "layouts", "x", matrix[i]));
        assert_true(has(made, "layouts", "upstream/0", matrix[i]));
    }
    static const char *const values[] = {"mixed", "tied", "flat", "large", "masked"};
    for (size_t i = 0; i < KA_COUNT(values); i++) {
        assert_true(has(made, "values", "x", values[i]));
        assert_false(has(made, "values", "upstream/0", values[i]));
    }
    assert_true(has(made, "layouts", "z", "shared") && !has(made, "layouts", "x", "shared"));
    assert_true(has(made, "layouts", "w", "stacked") && !has(made, "layouts", "w", "transposed"));
    assert_false(has(made, "values", "w", "mixed"));
    assert_false(has(made, "layouts", "upstream/0", "shared"));
    assert_in_range(json_array_size(made), 9, KA_VARY_MOST);
    json_decref(made);
    json_decref(tensors);
}

static void vary__where_products_are_in_tf32__rows_are_less_uneven(void **state)
{
    (void)state;
    static const char *const entries[] = {"[]", "[\"out/0\"]"};
    for (size_t i = 0; i < KA_COUNT(entries); i++) {
        json_t *entry = json_pack("{s:[{s:s, s:b, s:[i, i], s:s}], s:o}", "inputs", "name", "x", "grad", 1,
                                  "shape", 4, 20, "dtype", "float32", "tf32", json(entries[i]));
        json_t *tensors = ka_vary_tensors(entry), *made = ka_vary(tensors, NULL, NULL);
        assert_int_equal(has(made, "values", "x", "mixed"), i == 0);
        assert_int_equal(has(made, "values", "x", "uneven"), i == 1);
        json_decref(made);
        json_decref(tensors);
        json_decref(entry);
    }
}

static void vary__an_axis_more__is_of_all_inputs_of_a_matrixs_shape_together(void **state)
{
    (void)state;
    json_auto_t *tensors = json(TENSORS), *made = ka_vary(tensors, NULL, NULL);
    json_auto_t *wanted = json("{\"layouts\": {\"x\": \"unsqueezed\", \"z\": \"unsqueezed\"}}");
    size_t found = 0;
    KA_EACH(made, i, item)
        found += json_equal(item, wanted);
    assert_int_equal(found, 1);
    json_auto_t *refused = json("{\"x unsqueezed\": \"too many values to unpack\"}");
    json_auto_t *without = ka_vary(tensors, NULL, refused), *kept = json_pack("[O]", wanted);
    json_auto_t *again = ka_vary(tensors, kept, NULL);
    assert_false(has(without, "layouts", "z", "unsqueezed") || has(again, "layouts", "z", "unsqueezed"));
}

static void vary__magnitudes__are_one_tensors_and_a_shared_one_has_no_values_of_its_own(void **state)
{
    (void)state;
    json_t *tensors = json(TENSORS), *made = ka_vary(tensors, NULL, NULL), *item, *kind;
    size_t i;
    const char *name;
    json_array_foreach(made, i, item)
    {
        size_t magnitudes = 0;
        json_t *values = json_object_get(item, "values");
        json_object_foreach(values, name, kind) magnitudes +=
            strcmp(json_string_value(kind), "mixed") == 0 || strcmp(json_string_value(kind), "large") == 0;
        assert_true(magnitudes <= 1);
        const char *z = json_string_value(json_object_get(json_object_get(item, "layouts"), "z"));
        assert_true(!z || strcmp(z, "shared") != 0 || !json_object_get(values, "z"));
    }
    json_decref(made);
    json_decref(tensors);
}

static void vary__refused_choices__are_left_out_and_kept_variations_not_made_again(void **state)
{
    (void)state;
    json_t *tensors = json(TENSORS), *all = ka_vary(tensors, NULL, NULL), *kept = json_array();
    json_t *refused = json("{\"x transposed\": \"why\", \"w flat\": \"why\"}");
    for (size_t i = 0; i < json_array_size(all); i++) {
        const json_t *item = json_array_get(all, i);
        json_t *one = json_pack("[O]", item);
        if (!has(one, "layouts", "x", "transposed") && !has(one, "values", "w", "flat"))
            json_array_append(kept, json_array_get(all, i));
        json_decref(one);
    }
    json_t *more = ka_vary(tensors, kept, refused);
    assert_false(has(more, "layouts", "x", "transposed") || has(more, "values", "w", "flat"));
    assert_in_range(json_array_size(more), 1, json_array_size(all) - 1);
    json_array_extend(kept, more);
    assert_true(has(kept, "layouts", "x", "spanned") && has(kept, "values", "w", "tied"));
    json_t *none = ka_vary(tensors, all, NULL);
    assert_int_equal(json_array_size(none), 0);
    json_decref(none);
    json_decref(more);
    json_decref(refused);
    json_decref(kept);
    json_decref(all);
    json_decref(tensors);
}

static void vary__scalars_and_empty_tensors__have_nothing_to_vary(void **state)
{
    (void)state;
    json_t *tensors = json("[{\"name\": \"s\", \"shape\": []}, {\"name\": \"e\", \"shape\": [0, 3]},"
                           " {\"name\": \"upstream/0\", \"shape\": []}]");
    json_t *made = ka_vary(tensors, NULL, NULL);
    assert_int_equal(json_array_size(made), 0);
    json_decref(made);
    json_decref(tensors);
}

static void vary__tensors_of_a_case__are_its_inputs_and_what_has_an_upstream(void **state)
{
    (void)state;
    json_t *entry =
        json("{\"inputs\": [{\"name\": \"x\", \"shape\": [2], \"dtype\": \"float16\", \"grad\": true},"
             " {\"name\": \"i\", \"shape\": [2], \"dtype\": \"int64\", \"grad\": false}],"
             " \"outputs\": [{\"index\": 0, \"kind\": \"none\", \"differentiable\": false},"
             " {\"index\": 1, \"shape\": [3], \"dtype\": \"float16\", \"differentiable\": true}]}");
    json_t *made = ka_vary_tensors(entry);
    json_t *wanted =
        json("[{\"name\": \"x\", \"shape\": [2], \"dtype\": \"float16\", \"constant\": false},"
             " {\"name\": \"upstream/1\", \"shape\": [3], \"dtype\": \"float16\", \"constant\": false},"
             " {\"name\": \"i\", \"shape\": [2], \"dtype\": \"int64\", \"constant\": true}]");
    assert_true(json_equal(made, wanted));
    json_decref(wanted);
    json_decref(made);
    json_decref(entry);
}

static void vary__table_without_a_gradient__has_other_layouts_of_the_same_values(void **state)
{
    (void)state;
    json_t *tensors =
        json("[{\"name\": \"x\", \"shape\": [4, 6], \"dtype\": \"float32\"},"
             " {\"name\": \"t\", \"shape\": [4, 6], \"dtype\": \"float32\", \"constant\": true}]");
    json_t *made = ka_vary(tensors, NULL, NULL);
    size_t laid_out = 0, i;
    json_t *item;
    json_array_foreach(made, i, item)
    {
        const char *kind = json_string_value(json_object_get(json_object_get(item, "layouts"), "t"));
        laid_out += kind != NULL;
        assert_null(json_object_get(json_object_get(item, "values"), "t"));
        assert_true(!kind || !strstr("expanded spanned shared", kind));
    }
    assert_true(laid_out >= 4);
    json_decref(made);
    json_decref(tensors);
}

static void vary__constant_rows__also_come_without_a_layout_that_makes_values(void **state)
{
    (void)state;
    json_t *tensors = json("[{\"name\": \"x\", \"shape\": [24, 40], \"dtype\": \"float32\"},"
                           " {\"name\": \"w\", \"shape\": [40], \"dtype\": \"float32\"},"
                           " {\"name\": \"b\", \"shape\": [40], \"dtype\": \"float32\"},"
                           " {\"name\": \"upstream/0\", \"shape\": [24, 40], \"dtype\": \"float32\"}]");
    json_t *made = ka_vary(tensors, NULL, NULL), *item;
    size_t i, plain = 0;
    json_array_foreach(made, i, item)
    {
        const char *values = json_string_value(json_object_get(json_object_get(item, "values"), "x"));
        const char *layout = json_string_value(json_object_get(json_object_get(item, "layouts"), "x"));
        plain +=
            values && strcmp(values, "flat") == 0 && (!layout || !strstr("expanded spanned shared", layout));
    }
    assert_true(plain > 0);
    json_t *again = ka_vary(tensors, made, NULL);
    assert_int_equal(json_array_size(again), 0);
    json_decref(again);
    json_decref(made);
    json_decref(tensors);
}

static void vary__variation_with_a_refused_choice__is_refused(void **state)
{
    (void)state;
    json_t *variation = json("{\"layouts\": {\"x\": \"slice\"}, \"values\": {\"A\": \"masked\"}}");
    json_t *refused = json("{\"A masked\": \"NaN\"}"),
           *others = json("{\"x masked\": \"NaN\", \"A slice\": \"?\"}");
    assert_true(ka_vary_is_refused(variation, refused));
    assert_false(ka_vary_is_refused(variation, others));
    assert_false(ka_vary_is_refused(NULL, refused));
    json_decref(variation);
    json_decref(refused);
    json_decref(others);
}

/* What an oracle's child wrote is no more than text. */
static void vary__odd_documents__make_nothing(void **state)
{
    (void)state;
    json_t *odd =
        json("[3, {}, {\"name\": 4, \"shape\": \"x\"}, {\"name\": \"x\", \"shape\": [\"a\", null]}]");
    json_decref(ka_vary(odd, odd, odd));
    json_decref(ka_vary_tensors(odd));
    json_decref(ka_vary(NULL, NULL, NULL));
    struct ka_buf text = {0};
    ka_kind_variation_label(json_array_get(odd, 1), &text);
    assert_string_equal(ka_buf_str(&text), "");
    json_decref(odd);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(vary__constant_rows__also_come_without_a_layout_that_makes_values),
        cmocka_unit_test(vary__table_without_a_gradient__has_other_layouts_of_the_same_values),
        cmocka_unit_test(cover__every_level_occurs_and_every_two_families_meet),
        cmocka_unit_test(cover__rows_that_there_are__count_and_stay),
        cmocka_unit_test(cover__rows_that_do_not_fit__are_not_made_and_the_rest_is_covered),
        cmocka_unit_test(vary__each_tensor__has_what_its_shape_suits),
        cmocka_unit_test(vary__where_products_are_in_tf32__rows_are_less_uneven),
        cmocka_unit_test(vary__an_axis_more__is_of_all_inputs_of_a_matrixs_shape_together),
        cmocka_unit_test(vary__magnitudes__are_one_tensors_and_a_shared_one_has_no_values_of_its_own),
        cmocka_unit_test(vary__refused_choices__are_left_out_and_kept_variations_not_made_again),
        cmocka_unit_test(vary__scalars_and_empty_tensors__have_nothing_to_vary),
        cmocka_unit_test(vary__tensors_of_a_case__are_its_inputs_and_what_has_an_upstream),
        cmocka_unit_test(vary__odd_documents__make_nothing),
        cmocka_unit_test(vary__variation_with_a_refused_choice__is_refused),
    };
    return cmocka_run_group_tests_name("vary", tests, NULL, NULL);
}
