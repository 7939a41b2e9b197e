/* What a benchmark says of samples, and what it refuses. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "agent/core/bench_result.h"
#include "agent/core/bench_text.h"
#include "base/base.h"

#define COPY "\"copy\": {\"bytes\": 1000000, \"ms\": [2.0, 1.0, 4.0]}" /* 1e6 bytes a millisecond */
#define MATMUL "\"matmul\": {\"flops\": 1000000, \"dtype\": \"float16\", \"ms\": [1.0]}"
#define CASE                                                                                                 \
    "\"id\": 0, \"ok\": true, \"bytes\": {\"fwd\": 2e6, \"bwd\": 3e6, \"both\": 3e6}, "                      \
    "\"least_bytes\": {\"fwd\": 1e6, \"bwd\": 1e6, \"both\": 2e6}"
#define CEILINGS(more)                                                                                       \
    "{\"device\": {\"name\": \"card\", \"l2_bytes\": 500000}, " COPY ", " MATMUL ", \"cases\": [{" CASE      \
    ", \"flops\": " more "}]}"
#define MS(t) "[" t ", " t ", " t ", " t ", " t ", " t ", " t "]"
#define SUBJECT(name, bwd)                                                                                   \
    "{\"name\": \"" name "\", \"times\": {\"bwd\": {\"alone\": " bwd ", \"graph\": " bwd "}}, "              \
    "\"late\": [0.01, 0.01], \"saved_bytes\": 5, \"peak_bytes\": 9, \"difference\": 1e-7}"
#define TIMED(subjects)                                                                                      \
    "{\"cases\": [{\"id\": 0, \"ok\": true, \"rounds\": 7, \"subjects\": [" subjects "]}]}"

struct asked {
    const char *ceilings, *timed;
    double wall;
};

static json_t *result_of(struct asked asked)
{
    json_t *shapes = json_pack("[{s:i, s:{s:i}}]", "id", 0, "dims", "M", 8);
    json_t *ceilings = json_loads(asked.ceilings ? asked.ceilings : CEILINGS("null"), 0, NULL);
    json_t *timed = json_loads(asked.timed, 0, NULL);
    assert_non_null(ceilings);
    assert_non_null(timed);
    struct ka_bench_facts facts = {.shapes = shapes,
                                   .ceilings = ceilings,
                                   .timed = timed,
                                   .wall_seconds = asked.wall > 0 ? asked.wall : 100,
                                   .min_rel_impr = 0.02};
    json_t *result = ka_bench_result(&facts);
    json_decref(shapes);
    json_decref(ceilings);
    json_decref(timed);
    assert_non_null(result);
    return result;
}

/* Of bwd, the only shape. */
static json_t *pass_of(json_t *result)
{
    json_t *shape = json_array_get(json_object_get(result, "shapes"), 0);
    return json_object_get(json_object_get(shape, "passes"), "bwd");
}

static json_t *time_of(json_t *result, const char *subject)
{
    return json_object_get(json_object_get(json_object_get(pass_of(result), "subjects"), subject), "alone");
}

static double number(const json_t *object, const char *name)
{
    const json_t *value = json_object_get(object, name);
    assert_true(json_is_number(value));
    return json_number_value(value);
}

static void assert_near(double value, double expected)
{
    if (!(value > expected * (1 - 1e-9) && value < expected * (1 + 1e-9)))
        fail_msg("%g is not %g", value, expected);
}

static void bench__honest_times__have_floor_rate_and_ratio(void **state)
{
    (void)state;
    json_t *result = result_of(
        (struct asked){.timed = TIMED(SUBJECT("ours", MS("6.0")) ", " SUBJECT("eager", MS("12.0")))});
    assert_near(number(pass_of(result), "floor_ms"), 3.0); /* by the best of the copies */
    assert_string_equal(json_string_value(json_object_get(pass_of(result), "floor_of")), "bytes");
    assert_near(number(time_of(result, "ours"), "median_ms"), 6.0);
    assert_near(number(time_of(result, "ours"), "bytes_per_s"), 0.5e9);
    assert_null(json_object_get(time_of(result, "ours"), "below_floor"));
    json_t *bwd = json_object_get(json_object_get(result, "geomean"), "bwd");
    json_t *eager = json_object_get(json_object_get(bwd, "graph"), "eager");
    assert_near(number(eager, "ratio"), 2.0);
    assert_near(number(eager, "faster"), 1.0);
    assert_null(json_object_get(json_object_get(bwd, "graph"), "compile"));
    assert_near(number(result, "claimed_seconds"), 0.252);
    assert_true(json_is_null(json_object_get(result, "refused")));
    json_decref(result);
}

static void bench__flops__make_the_floor_where_they_take_longer(void **state)
{
    (void)state;
    json_t *result = result_of(
        (struct asked){.ceilings = CEILINGS("{\"bwd\": 8e6}"), .timed = TIMED(SUBJECT("ours", MS("16.0")))});
    assert_near(number(pass_of(result), "floor_ms"), 8.0);
    assert_string_equal(json_string_value(json_object_get(pass_of(result), "floor_of")), "flops");
    assert_near(number(time_of(result, "ours"), "flops_per_s"), 0.5e9);
    json_decref(result);
}

static void bench__below_the_floor__is_said__below_its_writes__is_refused(void **state)
{
    (void)state;
    json_t *result = result_of((struct asked){.timed = TIMED(SUBJECT("ours", MS("2.0")))});
    assert_true(json_is_true(json_object_get(time_of(result, "ours"), "below_floor")));
    json_decref(result);
    /* 1e6 bytes are written, of which the L2 may hold 5e5: half a millisecond. */
    result = result_of(
        (struct asked){.timed = TIMED(SUBJECT("ours", MS("0.4")) ", " SUBJECT("eager", MS("0.6")))});
    const char *why = json_string_value(json_object_get(time_of(result, "ours"), "refused"));
    assert_non_null(why);
    assert_non_null(strstr(why, "less than the 0.5 ms"));
    assert_null(json_object_get(time_of(result, "ours"), "median_ms"));
    assert_near(number(time_of(result, "eager"), "median_ms"), 0.6);
    assert_int_equal(json_object_size(json_object_get(result, "geomean")), 0);
    json_decref(result);
}

static void bench__samples_that_are_no_times__are_refused(void **state)
{
    (void)state;
    static const char *const bad[] = {TIMED(SUBJECT("ours", "[6, 0, 6]")), TIMED(SUBJECT("ours", "[]")),
                                      TIMED(SUBJECT("ours", "[6, -1]")), TIMED(SUBJECT("ours", "[[6], 6]"))};
    for (size_t i = 0; i < KA_COUNT(bad); i++) {
        json_t *result = result_of((struct asked){.timed = bad[i]});
        assert_non_null(json_object_get(time_of(result, "ours"), "refused"));
        json_decref(result);
    }
}

static void bench__work_after_the_call__is_refused(void **state)
{
    (void)state;
    json_t *result =
        result_of((struct asked){.timed = TIMED("{\"name\": \"ours\", \"times\": {\"bwd\": {\"alone\": " MS(
                                     "6.0") "}}, "
                                            "\"late\": [5.0, 5.0, 5.0, 0.1]}")});
    const char *why = json_string_value(json_object_get(time_of(result, "ours"), "refused"));
    assert_non_null(why);
    assert_non_null(strstr(why, "went on for 5 ms"));
    json_decref(result);
}

static void bench__more_time_than_there_was__refuses_everything(void **state)
{
    (void)state;
    json_t *result = result_of((struct asked){.timed = TIMED(SUBJECT("ours", MS("6.0"))), .wall = 0.05});
    assert_true(json_is_string(json_object_get(result, "refused")));
    assert_int_equal(json_array_size(json_object_get(result, "shapes")), 0);
    assert_int_equal(json_object_size(json_object_get(result, "geomean")), 0);
    json_decref(result);
}

static void bench__shape_without_result__has_its_error(void **state)
{
    (void)state;
    static const char *const answers[] = {
        "{\"cases\": [{\"id\": 0, \"ok\": false, \"error\": {\"message\": \"no launch\"}}]}",
        "{\"cases\": []}", "{}", "{\"cases\": [7, null]}"};
    for (size_t i = 0; i < KA_COUNT(answers); i++) {
        json_t *result = result_of((struct asked){.timed = answers[i]});
        json_t *shape = json_array_get(json_object_get(result, "shapes"), 0);
        json_t *error = json_object_get(shape, "error");
        assert_string_equal(json_string_value(json_object_get(error, "message")),
                            i ? "no result" : "no launch");
        json_decref(result);
    }
}

static void bench__figures_beyond_all_measure__are_none(void **state)
{
    (void)state;
    static const char *const ceilings[] = {
        "{\"copy\": {\"bytes\": 1e308, \"ms\": [1e-300]}, \"cases\": [{" CASE "}]}",
        "{\"copy\": {\"bytes\": 1e-300, \"ms\": [1e308]}, \"cases\": [{" CASE "}]}",
        "{\"copy\": {\"bytes\": 1, \"ms\": [1]}, \"matmul\": {\"flops\": 1e308, \"ms\": [1]}, "
        "\"cases\": [{" CASE ", \"flops\": {\"bwd\": 1e308}}]}"};
    for (size_t i = 0; i < KA_COUNT(ceilings); i++) {
        json_t *result = result_of((struct asked){
            .ceilings = ceilings[i], .timed = TIMED(SUBJECT("ours", MS("1e-300"))), .wall = 1e9});
        assert_non_null(pass_of(result));
        json_decref(result);
    }
    json_t *result = result_of((struct asked){.timed = TIMED(SUBJECT("ours", MS("1e308")))});
    assert_true(json_is_string(json_object_get(result, "refused")));
    json_decref(result);
}

static void bench__what_is_missing__and_what_was_kept__are_told(void **state)
{
    (void)state;
    json_t *result = result_of((struct asked){
        .timed = TIMED("{\"name\": \"baseline\", \"missing\": \"none\"}, "
                       "{\"name\": \"ours\", \"no_graph\": \"a copy\", \"times\": {\"bwd\": {\"alone\": " MS(
                           "6.0") "}}, \"late\": [], \"saved_bytes\": 5, \"peak_bytes\": 9}")});
    json_t *shape = json_array_get(json_object_get(result, "shapes"), 0);
    assert_string_equal(json_string_value(json_object_get(json_object_get(shape, "missing"), "baseline")),
                        "none");
    assert_string_equal(json_string_value(json_object_get(json_object_get(shape, "no_graph"), "ours")),
                        "a copy");
    json_t *memory = json_object_get(json_object_get(shape, "memory"), "ours");
    assert_near(number(memory, "saved_bytes"), 5);
    assert_near(number(memory, "peak_bytes"), 9);
    json_decref(result);
}

static void assert_says(const char *text, const char *words)
{
    if (!strstr(text, words))
        fail_msg("'%s' is not in:\n%s", words, text);
}

static void table__has_a_row_a_shape__and_says_what_has_no_time(void **state)
{
    (void)state;
    struct ka_buf text = {0};
    json_t *result = result_of((struct asked){
        .timed = TIMED(SUBJECT("ours", MS("6.0")) ", " SUBJECT("eager", MS("12.0")) ", " SUBJECT(
            "compile", MS("0.1")) ", {\"name\": \"baseline\", \"missing\": \"the file has none\"}")});
    json_object_set_new(result, "stub", json_string("softmax"));
    ka_bench_text(result, &text);
    const char *said = ka_buf_str(&text);
    assert_says(said, "softmax on card");
    assert_says(said, "\nbackward ");
    assert_null(strstr(said, "\nforward"));
    assert_says(said,
                "12 +-0           refused                 -             6 +-0             6 +-0      50%");
    assert_says(said, "calls: 2.00x as fast as eager (faster on 1 of 1, slower on 0)\n");
    assert_says(said, "compile, backward alone, refused: 0.1 ms is less than the 0.5 ms");
    assert_says(said, "baseline: the file has none (M=8)\n");
    ka_buf_free(&text);
    json_decref(result);
}

static void table__of_a_refused_run__has_the_reason_alone(void **state)
{
    (void)state;
    struct ka_buf text = {0};
    json_t *result = result_of((struct asked){.timed = TIMED(SUBJECT("ours", MS("6.0"))), .wall = 0.05});
    ka_bench_text(result, &text);
    assert_says(ka_buf_str(&text), "refused: the times together are 0.1 s");
    assert_null(strstr(ka_buf_str(&text), "backward"));
    ka_buf_free(&text);
    json_decref(result);
}

static void table__gradients_far_from_eager__are_said(void **state)
{
    (void)state;
    struct ka_buf text = {0};
    json_t *result =
        result_of((struct asked){.timed = TIMED("{\"name\": \"ours\", \"times\": {\"bwd\": {\"alone\": " MS(
                                     "6.0") "}}, \"late\": [], \"difference\": 0.5}")});
    ka_bench_text(result, &text);
    assert_says(ka_buf_str(&text), "ours: its gradients are not those of eager PyTorch");
    ka_buf_free(&text);
    json_decref(result);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bench__honest_times__have_floor_rate_and_ratio),
        cmocka_unit_test(bench__flops__make_the_floor_where_they_take_longer),
        cmocka_unit_test(bench__below_the_floor__is_said__below_its_writes__is_refused),
        cmocka_unit_test(bench__samples_that_are_no_times__are_refused),
        cmocka_unit_test(bench__work_after_the_call__is_refused),
        cmocka_unit_test(bench__more_time_than_there_was__refuses_everything),
        cmocka_unit_test(bench__shape_without_result__has_its_error),
        cmocka_unit_test(bench__figures_beyond_all_measure__are_none),
        cmocka_unit_test(bench__what_is_missing__and_what_was_kept__are_told),
        cmocka_unit_test(table__has_a_row_a_shape__and_says_what_has_no_time),
        cmocka_unit_test(table__of_a_refused_run__has_the_reason_alone),
        cmocka_unit_test(table__gradients_far_from_eager__are_said),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
