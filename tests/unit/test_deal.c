/* Dealing cases out to children. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "agent/core/deal.h"
#include "agent/core/plan.h"

#define START 0.1
#define RATE 1e7

static json_t *case_of(int id, int m)
{
    return json_pack("{s:i, s:{s:i}}", "id", id, "dims", "M", m);
}

static json_t *cases_of(const int *sizes, int count)
{
    json_t *cases = json_array();
    for (int i = 0; i < count; i++)
        json_array_append_new(cases, case_of(i, sizes[i]));
    return cases;
}

static json_t *deal(const json_t *cases, size_t most, double child, bool together)
{
    const struct ka_deal_of of = {
        .most = most, .start = START, .rate = RATE, .child = child, .together = together};
    return ka_deal(cases, &of);
}

static json_int_t id_at(const json_t *dealt, size_t part, size_t at)
{
    return json_integer_value(json_object_get(json_array_get(json_array_get(dealt, part), at), "id"));
}

static size_t size_of(const json_t *dealt)
{
    size_t total = 0;
    for (size_t i = 0; i < json_array_size(dealt); i++)
        total += json_array_size(json_array_get(dealt, i));
    return total;
}

static void deal__every_case__is_in_one_part(void **state)
{
    const int sizes[] = {5, 1 << 24, 7, 1 << 22, 9, 9, 1 << 23};
    (void)state;
    json_t *cases = cases_of(sizes, 7), *dealt = deal(cases, 3, 0, false);
    unsigned seen = 0;
    assert_int_equal(json_array_size(dealt), 3);
    for (size_t i = 0; i < 3; i++)
        for (size_t k = 0; k < json_array_size(json_array_get(dealt, i)); k++)
            seen |= 1u << id_at(dealt, i, k);
    assert_int_equal(seen, 0x7f);
    assert_int_equal(size_of(dealt), 7);
    json_decref(cases);
    json_decref(dealt);
}

static void deal__one_great_case__leaves_the_small_ones_to_the_others(void **state)
{
    const int sizes[] = {1 << 30, 8, 8, 8};
    (void)state;
    json_t *cases = cases_of(sizes, 4), *dealt = deal(cases, 2, 0, false);
    assert_int_equal(json_array_size(dealt), 2);
    size_t great = id_at(dealt, 0, 0) == 0 ? 0 : 1;
    assert_int_equal(json_array_size(json_array_get(dealt, great)), 1);
    assert_int_equal(json_array_size(json_array_get(dealt, 1 - great)), 3);
    json_decref(cases);
    json_decref(dealt);
}

static void deal__within_a_part__the_cheapest_comes_first(void **state)
{
    const int sizes[] = {1 << 24, 3, 1 << 22, 2};
    (void)state;
    json_t *cases = cases_of(sizes, 4), *dealt = deal(cases, 1, 0, false);
    const json_int_t wanted[] = {3, 1, 2, 0};
    for (size_t i = 0; i < 4; i++)
        assert_int_equal(id_at(dealt, 0, i), wanted[i]);
    json_decref(cases);
    json_decref(dealt);
}

static void deal__equal_dims_together__share_a_part(void **state)
{
    const int sizes[] = {4, 5, 4, 5, 4, 6};
    (void)state;
    json_t *cases = cases_of(sizes, 6), *dealt = deal(cases, 4, 0, true);
    assert_int_equal(json_array_size(dealt), 3); /* no part is empty */
    assert_int_equal(size_of(dealt), 6);
    for (size_t i = 0; i < 3; i++) {
        const json_t *part = json_array_get(dealt, i);
        for (size_t k = 1; k < json_array_size(part); k++)
            assert_true(json_equal(json_object_get(json_array_get(part, k), "dims"),
                                   json_object_get(json_array_get(part, 0), "dims")));
    }
    json_decref(cases);
    json_decref(dealt);
}

static void deal__fewer_cases_than_parts_or_none__makes_no_empty_part(void **state)
{
    const int sizes[] = {4};
    (void)state;
    json_t *cases = cases_of(sizes, 1), *dealt = deal(cases, 8, 0, false);
    assert_int_equal(json_array_size(dealt), 1);
    json_decref(dealt);
    json_array_clear(cases);
    dealt = deal(cases, 8, 0, false);
    assert_int_equal(json_array_size(dealt), 0);
    json_decref(cases);
    json_decref(dealt);
}

/* A child takes as long to start as eight cases. */
static void deal__small_cases__do_not_pay_for_another_child(void **state)
{
    int sizes[20];
    (void)state;
    for (int i = 0; i < 20; i++)
        sizes[i] = 1;
    for (int count = 0; count <= 20; count++) {
        json_t *cases = cases_of(sizes, count), *dealt = deal(cases, 3, 8.0 * START, false);
        assert_int_equal(json_array_size(dealt), count == 0 ? 0 : count <= 7 ? 1 : count <= 15 ? 2 : 3);
        assert_int_equal(size_of(dealt), count);
        json_decref(dealt);
        json_decref(cases);
    }
    sizes[1] = 1 << 28;
    json_t *cases = cases_of(sizes, 2), *dealt = deal(cases, 3, 8.0 * START, false);
    assert_int_equal(json_array_size(dealt), 2);
    json_decref(dealt);
    json_decref(cases);
}

/* A long row costs little, many channels much: what was measured counts, not the product of the sizes. */
static void deal__known_seconds__come_before_sizes(void **state)
{
    const int sizes[] = {1 << 24, 8, 16, 32};
    (void)state;
    json_t *known = json_pack("[{s:{s:i}, s:f}, {s:{s:i}, s:f}, {s:{s:i}, s:f}]", "dims", "M", 1 << 24,
                              "processor_seconds", 0.1, "dims", "M", 8, "processor_seconds", 5.0, "dims", "M",
                              32, "processor_seconds", 0.0);
    const struct ka_deal_of of = {.most = 2, .start = START, .rate = RATE, .known = known};
    json_t *cases = cases_of(sizes, 4), *dealt = ka_deal(cases, &of);
    assert_int_equal(json_array_size(dealt), 2);
    size_t alone = json_array_size(json_array_get(dealt, 0)) == 1 ? 0 : 1;
    assert_int_equal(id_at(dealt, alone, 0), 1);
    assert_int_equal(id_at(dealt, 1 - alone, 2), 0);
    json_decref(known);
    json_decref(cases);
    json_decref(dealt);
}

/* Eighteen small cases of equal dims are one great one to whoever gets them. */
static void deal__together__counts_them_all(void **state)
{
    const int sizes[] = {4, 4, 4, 4, 4, 4, 1 << 21, (1 << 21) + 1};
    (void)state;
    json_t *cases = cases_of(sizes, 8), *dealt = deal(cases, 2, 0, true);
    assert_int_equal(json_array_size(dealt), 2);
    size_t small = json_array_size(json_array_get(dealt, 0)) == 6 ? 0 : 1;
    assert_int_equal(json_array_size(json_array_get(dealt, small)), 6);
    assert_int_equal(json_array_size(json_array_get(dealt, 1 - small)), 2);
    json_decref(cases);
    json_decref(dealt);
}

/* What is compiled for sizes is compiled in each child that has such a case. */
static void deal__what_dims_cost_a_child__is_paid_once(void **state)
{
    const int sizes[] = {4, 5, 4, 5, 4, 5, 4, 5};
    (void)state;
    const struct ka_deal_of of = {.most = 2, .start = START, .rate = RATE, .anew = 1};
    json_t *cases = cases_of(sizes, 8), *dealt = ka_deal(cases, &of);
    assert_int_equal(json_array_size(dealt), 2);
    for (size_t i = 0; i < 2; i++) {
        assert_int_equal(json_array_size(json_array_get(dealt, i)), 4);
        for (size_t k = 1; k < 4; k++)
            assert_int_equal(id_at(dealt, i, k) % 2, id_at(dealt, i, 0) % 2);
    }
    json_decref(cases);
    json_decref(dealt);
}

/* A case that makes hundreds of calls is worth ten that do not. */
static void deal__what_is_asked__counts(void **state)
{
    const int sizes[] = {4, 4, 4, 4, 4, 4};
    (void)state;
    json_t *cases = cases_of(sizes, 6);
    json_object_set_new(json_array_get(cases, 2), "calls", json_object());
    json_t *dealt = deal(cases, 2, 0, false);
    assert_int_equal(json_array_size(dealt), 2);
    size_t alone = json_array_size(json_array_get(dealt, 0)) == 1 ? 0 : 1;
    assert_int_equal(json_array_size(json_array_get(dealt, alone)), 1);
    assert_int_equal(id_at(dealt, alone, 0), 2);
    json_decref(cases);
    json_decref(dealt);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(deal__every_case__is_in_one_part),
        cmocka_unit_test(deal__one_great_case__leaves_the_small_ones_to_the_others),
        cmocka_unit_test(deal__within_a_part__the_cheapest_comes_first),
        cmocka_unit_test(deal__equal_dims_together__share_a_part),
        cmocka_unit_test(deal__fewer_cases_than_parts_or_none__makes_no_empty_part),
        cmocka_unit_test(deal__known_seconds__come_before_sizes),
        cmocka_unit_test(deal__together__counts_them_all),
        cmocka_unit_test(deal__what_dims_cost_a_child__is_paid_once),
        cmocka_unit_test(deal__what_is_asked__counts),
        cmocka_unit_test(deal__small_cases__do_not_pay_for_another_child),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
