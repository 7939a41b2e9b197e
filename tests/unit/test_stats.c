/* Statistics against values worked out by hand or taken from tables of order statistics. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <errno.h>
#include <math.h>

#include "agent/core/stats.h"

#define V(...) ((double[]){__VA_ARGS__}), sizeof((double[]){__VA_ARGS__}) / sizeof(double)

static void assert_near(double a, double b)
{
    if (!(fabs(a - b) <= 1e-12 * (fabs(b) + 1)))
        fail_msg("%.17g is not %.17g", a, b);
}

static void stats__median__is_the_middle_whatever_the_order(void **state)
{
    (void)state;
    double m = -1;
    assert_int_equal(ka_stats_median(V(5, 1, 3), &m), 0);
    assert_near(m, 3);
    assert_int_equal(ka_stats_median(V(4, 1, 3, 100), &m), 0);
    assert_near(m, 3.5);
    assert_int_equal(ka_stats_median(V(7), &m), 0);
    assert_near(m, 7);
    assert_int_equal(ka_stats_median(V(1e308, 1.5e308), &m), 0);
    assert_near(m / 1e308, 1.25);
}

static void stats__inputs__are_not_reordered(void **state)
{
    (void)state;
    double values[] = {3, 1, 2}, m;
    assert_int_equal(ka_stats_median(values, 3, &m), 0);
    assert_int_equal(ka_stats_noise(values, 3, &m), 0);
    assert_near(values[0], 3);
    assert_near(values[1], 1);
    assert_near(values[2], 2);
}

static void stats__unusable_values__are_errors_and_leave_the_result(void **state)
{
    (void)state;
    double m = -1, h = -1;
    assert_int_equal(ka_stats_median(NULL, 0, &m), -ENODATA);
    assert_int_equal(ka_stats_geomean(NULL, 0, &m), -ENODATA);
    assert_int_equal(ka_stats_median(V(1, NAN), &m), -EINVAL);
    assert_int_equal(ka_stats_noise(V(1, INFINITY), &m), -EINVAL);
    assert_int_equal(ka_stats_geomean(V(1, 0), &m), -EINVAL);
    assert_int_equal(ka_stats_geomean(V(1, -2), &m), -EINVAL);
    assert_int_equal(ka_stats_median_interval(V(1, 2, 3, 4, 5, 6), 1.0, &m, &h), -EINVAL);
    assert_int_equal(ka_stats_noise(V(-1, 0, 1), &m), -ERANGE);
    assert_near(m, -1);
    assert_near(h, -1);
}

static void stats__interval__follows_the_binomial_table(void **state)
{
    (void)state;
    double values[100], low = -1, high = -1;
    for (int i = 0; i < 100; i++)
        values[i] = 100 - i; /* 1..100, descending */
    assert_int_equal(ka_stats_median_interval(values, 5, 0.95, &low, &high), -ERANGE); /* coverage 0.9375 */
    assert_int_equal(ka_stats_median_interval(values, 5, 0.9375, &low, &high), 0);
    assert_near(low, 96);
    assert_near(high, 100);
    assert_int_equal(ka_stats_median_interval(values + 90, 10, 0.95, &low, &high), 0); /* ranks 2 and 9 */
    assert_near(low, 2);
    assert_near(high, 9);
    assert_int_equal(ka_stats_median_interval(values + 80, 20, 0.95, &low, &high), 0); /* ranks 6 and 15 */
    assert_near(low, 6);
    assert_near(high, 15);
    assert_int_equal(ka_stats_median_interval(values, 100, 0.95, &low, &high), 0); /* ranks 40 and 61 */
    assert_near(low, 40);
    assert_near(high, 61);
}

static void stats__interval_of_many_values__does_not_underflow(void **state)
{
    (void)state;
    static double values[5000];
    for (int i = 0; i < 5000; i++)
        values[i] = i;
    double low = -1, high = -1;
    assert_int_equal(ka_stats_median_interval(values, 5000, 0.95, &low, &high), 0);
    assert_near(low + high, 4999);
    assert_true(high - low > 120 && high - low < 160); /* 2 * 1.96 * sqrt(5000) / 2 = 138.6 */
}

static void stats__geomean__is_exact_for_powers(void **state)
{
    (void)state;
    double m;
    assert_int_equal(ka_stats_geomean(V(1, 4), &m), 0);
    assert_near(m, 2);
    assert_int_equal(ka_stats_geomean(V(0.5, 2, 1), &m), 0);
    assert_near(m, 1);
    assert_int_equal(ka_stats_geomean(V(1e300, 1e300, 1e300), &m), 0);
    assert_near(m / 1e300, 1);
}

static void stats__noise__is_relative_and_ignores_one_outlier(void **state)
{
    (void)state;
    double n;
    assert_int_equal(ka_stats_noise(V(9, 10, 11), &n), 0);
    assert_near(n, 0.14826);
    assert_int_equal(ka_stats_noise(V(90, 100, 110), &n), 0);
    assert_near(n, 0.14826);
    assert_int_equal(ka_stats_noise(V(9, 10, 11, 10, 1e9), &n), 0);
    assert_near(n, 0.14826);
    assert_int_equal(ka_stats_noise(V(5), &n), 0);
    assert_near(n, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(stats__median__is_the_middle_whatever_the_order),
        cmocka_unit_test(stats__inputs__are_not_reordered),
        cmocka_unit_test(stats__unusable_values__are_errors_and_leave_the_result),
        cmocka_unit_test(stats__interval__follows_the_binomial_table),
        cmocka_unit_test(stats__interval_of_many_values__does_not_underflow),
        cmocka_unit_test(stats__geomean__is_exact_for_powers),
        cmocka_unit_test(stats__noise__is_relative_and_ignores_one_outlier),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
