/* Loops over JSON values: `break` and `continue` do what they do in any loop. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/each.h"

static void each__array__is_seen_in_order_with_its_index(void **state)
{
    (void)state;
    json_auto_t *array = json_pack("[i, i, i]", 0, 1, 2);
    size_t seen = 0;
    KA_EACH(array, i, item) {
        assert_int_equal(i, json_integer_value(item));
        assert_int_equal(i, seen++);
    }
    assert_int_equal(seen, 3);
}

static void each__break_and_continue__mean_the_loop(void **state)
{
    (void)state;
    json_auto_t *array = json_pack("[i, i, i, i]", 0, 1, 2, 3);
    json_auto_t *object = json_pack("{s:i, s:i, s:i}", "a", 0, "b", 1, "c", 2);
    json_int_t items = 0, members = 0;
    KA_EACH(array, i, item) {
        if (i == 1)
            continue;
        if (i == 3)
            break;
        items += 10 + json_integer_value(item);
    }
    KA_EACH_MEMBER(object, name, value) {
        if (*name == 'a')
            continue;
        members += 10 + json_integer_value(value);
        break;
    }
    assert_int_equal(items, 22);
    assert_int_equal(members, 11);
}

static void each__array_that_grows__is_seen_to_its_end(void **state)
{
    (void)state;
    json_auto_t *array = json_pack("[i]", 0);
    KA_EACH(array, i, item) {
        if (i < 4)
            json_array_append(array, item);
    }
    assert_int_equal(json_array_size(array), 5);
}

static void each__no_value_or_another_type__has_no_items(void **state)
{
    (void)state;
    json_auto_t *text = json_string("text");
    KA_EACH(NULL, i, item)
        fail_msg("%zu %p", i, (void *)item);
    KA_EACH(text, i, item)
        fail_msg("%zu %p", i, (void *)item);
    KA_EACH_MEMBER(text, name, value)
        fail_msg("%s", name);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each__array__is_seen_in_order_with_its_index),
        cmocka_unit_test(each__break_and_continue__mean_the_loop),
        cmocka_unit_test(each__array_that_grows__is_seen_to_its_end),
        cmocka_unit_test(each__no_value_or_another_type__has_no_items),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
