/* Which sizes a run's children work on, from what preflight has seen of a shape. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <cmocka.h>

#include "agent/core/plan.h"
#include "agent/core/shapes.h"
#include "agent/run/sizes.h"
#include "base/base.h"

/* A run on a GPU whose preflight has accepted windows of m x m tokens: m^4 scores each. */
static struct ka_run *run_of_windows(const char *device, bool costly)
{
    struct ka_run *run = ka_calloc(1, sizeof(*run));
    run->settings.device = (char *)device;
    run->shapes =
        json_pack("[{s:{s:i, s:i, s:i}, s:b, s:[{s:[i, i, i, i]}, {s:[i, i]}]}]", "dims", "W", 257, "H", 24,
                  "m", 12, "costly", costly, "tensors", "shape", 257, 24, 144, 144, "shape", 529, 24);
    return run;
}

static json_t *dims_of(const struct ka_run *run)
{
    return json_object_get(json_array_get(run->shapes, 0), "dims");
}

static double scores_of(const json_t *dims)
{
    double m = (double)json_integer_value(json_object_get(dims, "m"));
    return (double)json_integer_value(json_object_get(dims, "W")) *
           (double)json_integer_value(json_object_get(dims, "H")) * m * m * m * m;
}

static void drop(struct ka_run *run)
{
    json_decref(run->shapes);
    free(run);
}

static void sizes__tensors_far_beyond_the_product_of_sizes__leave_less_of_it(void **state)
{
    (void)state;
    struct ka_run *run = run_of_windows("cuda", false);
    uint64_t budget = ka_run_budget(run, dims_of(run));
    assert_in_range(budget, 1000, KA_SHAPES_BUDGET / 64);
    json_t *small = ka_run_small(run, dims_of(run));
    assert_true(ka_plan_size(small) <= (double)budget);
    assert_true(scores_of(small) < 1 << 22);
    json_decref(small);
    drop(run);
}

static void sizes__tensors_about_as_large_as_the_sizes_say__leave_all_of_it(void **state)
{
    (void)state;
    struct ka_run *run = run_of_windows("cuda", false);
    json_t *shape = json_array_get(run->shapes, 0), *other = json_pack("{s:i}", "W", 257);
    assert_int_equal(ka_run_budget(run, other), KA_SHAPES_BUDGET); /* never seen */
    json_object_set_new(shape, "tensors", json_pack("[{s:[i, i, i]}]", "shape", 257, 24, 144));
    assert_int_equal(ka_run_budget(run, dims_of(run)), KA_SHAPES_BUDGET);
    json_object_set_new(shape, "dims", json_pack("{s:i}", "W", 1)); /* a large constant beside small sizes */
    json_object_set_new(shape, "tensors", json_pack("[{s:[i, i]}]", "shape", 1 << 15, 1 << 15));
    assert_int_equal(ka_run_budget(run, dims_of(run)), 512);
    json_decref(other);
    drop(run);
}

static void sizes__what_is_interpreted_beside_compiled_cases__is_little(void **state)
{
    (void)state;
    struct ka_run *run = run_of_windows("cuda", true);
    json_t *small = ka_run_interpreted(run, dims_of(run));
    struct ka_shapes_limits limits = {.most = INT64_MAX, .budget = UINT64_MAX, .square = KA_RUN_SQUARE};
    assert_true(ka_shapes_fit(small, limits));
    json_decref(small);
    json_t *matrices = json_pack("{s:i, s:i}", "M", 65536, "N", 64);
    small = ka_run_interpreted(run, matrices);
    assert_true(ka_shapes_fit(small, limits) && !json_equal(small, matrices));
    json_decref(small);
    json_decref(matrices);
    drop(run);
}

static void sizes__on_the_cpu__are_what_they_are(void **state)
{
    (void)state;
    struct ka_run *run = run_of_windows("cpu", true);
    json_t *small = ka_run_small(run, dims_of(run)), *interpreted = ka_run_interpreted(run, dims_of(run));
    assert_true(json_equal(small, dims_of(run)) && json_equal(interpreted, small));
    json_decref(small);
    json_decref(interpreted);
    drop(run);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sizes__tensors_far_beyond_the_product_of_sizes__leave_less_of_it),
        cmocka_unit_test(sizes__tensors_about_as_large_as_the_sizes_say__leave_all_of_it),
        cmocka_unit_test(sizes__what_is_interpreted_beside_compiled_cases__is_little),
        cmocka_unit_test(sizes__on_the_cpu__are_what_they_are),
    };
    return cmocka_run_group_tests_name("sizes", tests, NULL, NULL);
}
