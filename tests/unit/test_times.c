/* Medians, their intervals, and what counts as faster. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include <errno.h>

#include "agent/core/times.h"

static int times_of(const char *text, struct ka_times *out)
{
    json_t *samples = json_loads(text, 0, NULL);
    int rc = ka_times_of(samples, out);
    json_decref(samples);
    return rc;
}

/* 1, 2, ..., n in some order. */
static struct ka_times of_first(size_t n)
{
    struct ka_times made;
    json_t *samples = json_array();
    for (size_t i = 0; i < n; i++)
        json_array_append_new(samples, json_real((double)((i * 37) % n + 1)));
    assert_int_equal(ka_times_of(samples, &made), 0);
    json_decref(samples);
    return made;
}

static void times__odd_and_even_counts__have_their_median(void **state)
{
    (void)state;
    struct ka_times times;
    assert_int_equal(times_of("[3, 1, 2]", &times), 0);
    assert_true(times.median == 2.0 && times.low == 1.0 && times.high == 3.0 && times.count == 3);
    assert_int_equal(times_of("[4.0, 1.0, 2.0, 3.0]", &times), 0);
    assert_true(times.median == 2.5);
}

/* The table of the sign test: of 6 to 8 samples none, of 9 one, of 15 three, of 20 five, of 100 thirty-nine
 * may be left out at each end. */
static void times__interval__is_that_of_the_sign_test(void **state)
{
    (void)state;
    static const size_t rows[][2] = {{5, 0}, {6, 0}, {8, 0}, {9, 1}, {12, 2}, {15, 3}, {20, 5}, {100, 39}};
    for (size_t i = 0; i < KA_COUNT(rows); i++) {
        size_t n = rows[i][0], left_out = rows[i][1];
        struct ka_times times = of_first(n);
        assert_true(times.low == (double)(left_out + 1));
        assert_true(times.high == (double)(n - left_out));
    }
}

static void times__one_outlier__moves_neither_median_nor_interval(void **state)
{
    (void)state;
    struct ka_times calm, hit;
    assert_int_equal(times_of("[10, 11, 12, 13, 14, 15, 16, 17, 18]", &calm), 0);
    assert_int_equal(times_of("[10, 11, 12, 13, 14, 15, 16, 17, 999]", &hit), 0);
    assert_true(calm.median == hit.median && calm.high == hit.high);
}

static void times__that_are_none__are_refused(void **state)
{
    (void)state;
    static const char *const bad[] = {"[]", "[1, 0]", "[1, -2]", "[1, \"2\"]", "[null]", "{}", "[1, [2]]"};
    struct ka_times times = {.count = 77};
    for (size_t i = 0; i < KA_COUNT(bad); i++)
        assert_int_equal(times_of(bad[i], &times), -EINVAL);
    assert_int_equal(ka_times_of(NULL, &times), -EINVAL);
    assert_int_equal(times.count, 77);
}

static void faster__needs_the_gain_and_no_overlap(void **state)
{
    (void)state;
    struct ka_times slow = {10.0, 9.5, 10.5, 9}, fast = {8.0, 7.5, 8.5, 9};
    struct ka_times near = {9.9, 9.85, 9.95, 9}, noisy = {8.0, 6.0, 9.6, 9}, tight = {10.0, 9.99, 10.01, 9};
    assert_true(ka_times_faster(&fast, &slow, 0.02));
    assert_false(ka_times_faster(&slow, &fast, 0.02));
    assert_false(ka_times_faster(&noisy, &slow, 0.02));
    assert_false(ka_times_faster(&near, &tight, 0.02));
    assert_true(ka_times_faster(&near, &tight, 0.005));
    assert_false(ka_times_faster(&slow, &slow, 0.0));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(times__odd_and_even_counts__have_their_median),
        cmocka_unit_test(times__interval__is_that_of_the_sign_test),
        cmocka_unit_test(times__one_outlier__moves_neither_median_nor_interval),
        cmocka_unit_test(times__that_are_none__are_refused),
        cmocka_unit_test(faster__needs_the_gain_and_no_overlap),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
