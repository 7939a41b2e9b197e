/* Who is faster, by samples taken in turn: a few by hand, and ten thousand runs under a noisy clock. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include <errno.h>
#include <math.h>

#include "agent/core/job.h"
#include "agent/core/race.h"

#define MIN_REL 0.02
#define ROUNDS 25

static int race_of(const char *text, struct ka_race *out, struct ka_err *err)
{
    json_auto_t *timed = json_loads(text, 0, NULL);
    assert_non_null(timed);
    return ka_race_of(timed, out, err);
}

#define SUBJECT(name, alone, graph)                                                                          \
    "{\"name\": \"" name "\", \"times\": {\"both\": {\"alone\": " alone ", \"graph\": " graph "}}}"
#define CASE(ours, rival) "{\"ok\": true, \"subjects\": [" ours ", " rival "]}"

/* The document that a result of operation bench adds to. */
static json_t *kernels_of(const char *text)
{
    json_auto_t *timed = json_loads(text, 0, NULL);
    assert_non_null(timed);
    json_t *doc = json_object();
    ka_race_kernels(timed, doc);
    return doc;
}

#define ROW(name, pass) "{\"name\":\"" name "\",\"pass\":\"" pass "\",\"launches\":2,\"ms\":0.5}"
#define FIRST "{\"ok\":true,\"subjects\":[{\"name\":\"ours\",\"kernels\":[" ROW("other", "fwd") "]}]},"
#define ROOF "\"roof\":{\"copy\":{\"bytes\":1000,\"ms\":[0.5]},\"bytes\":{\"fwd\":4000,\"bwd\":6000}}"

static void race__kernels__are_words_of_the_last_shape(void **state)
{
    (void)state;
    json_auto_t *doc = kernels_of("{\"cases\":[" FIRST "{\"ok\":true,\"subjects\":[{\"name\":\"ours\","
                                  "\"kernels\":[" ROW("walk_2", "bwd") "," ROW("a\\nb `c`", "bwd") "," ROW(
                                      "", "fwd") "," ROW("odd", "both") ",7]}]}]," ROOF "}");
    const json_t *rows = json_object_get(doc, "kernels"), *floor = json_object_get(doc, "floor");
    assert_true(json_array_size(rows) == 1);
    assert_string_equal(json_string_value(json_object_get(json_array_get(rows, 0), "name")), "walk_2");
    assert_true(json_number_value(json_object_get(json_array_get(rows, 0), "launches")) == 2);
    assert_true(json_number_value(json_object_get(json_object_get(floor, "fwd"), "floor_ms")) == 2);
    assert_true(json_number_value(json_object_get(json_object_get(floor, "bwd"), "floor_ms")) == 3);
    json_auto_t *none = kernels_of("{\"cases\":[" FIRST "{\"ok\":false}]," ROOF "}");
    json_auto_t *empty = kernels_of("{\"cases\":[]}");
    assert_true(json_object_size(none) == 0 && json_object_size(empty) == 0);
}

static void race__two_shapes__has_one_ratio_a_round(void **state)
{
    (void)state;
    struct ka_race race;
    /* ours takes half of one and the same of the other: 1 over the root of 2 */
    assert_int_equal(race_of("{\"cases\": [" CASE(SUBJECT("ours", "[9]", "[1, 2, 1, 1, 1, 1, 1]"),
                                                  SUBJECT("rival", "[9]", "[2, 4, 2, 2, 2, 2, 2]")) ", " //
                             CASE(SUBJECT("ours", "[9]", "[4, 4, 4, 4, 4, 4, 4]"),
                                  SUBJECT("rival", "[9]", "[4, 4, 4, 4, 4, 4, 4]")) "]}",
                             &race, NULL),
                     0);
    assert_true(fabs(race.ratio.median - sqrt(0.5)) < 1e-12 && fabs(race.ratio.high - sqrt(0.5)) < 1e-12);
    assert_true(race.graphs && race.shapes == 2 && race.ratio.count == 7 && fabs(race.ms - 2) < 1e-12);
    assert_true(ka_race_won(&race, MIN_REL) && !ka_race_won(&race, 0.3));
    assert_true(fabs(ka_race_cost(&race, 10, MIN_REL) - 10 * sqrt(0.5)) < 1e-9);
    assert_true(ka_race_cost(&race, 10, 0.3) == 10.0);
}

static void race__graph_of_one_alone__plain_calls_count(void **state)
{
    (void)state;
    struct ka_race race;
    assert_int_equal(race_of("{\"cases\": [" CASE(SUBJECT("ours", "[3, 3]", "[1, 1]"),
                                                  SUBJECT("rival", "[2, 2]", "[]")) "]}",
                             &race, NULL),
                     0);
    assert_true(!race.graphs && fabs(race.ratio.median - 1.5) < 1e-12);
    assert_true(!ka_race_won(&race, 0) && fabs(ka_race_cost(&race, 2, MIN_REL) - 3) < 1e-12);
}

static void race__without_a_rival__is_its_own_time(void **state)
{
    (void)state;
    struct ka_race race;
    assert_int_equal(
        race_of("{\"cases\": [{\"ok\": true, \"subjects\": [" SUBJECT("ours", "[5]", "[4, 9, 4]") "]}]}",
                &race, NULL),
        0);
    assert_true(race.ratio.count == 0 && ka_race_cost(&race, INFINITY, MIN_REL) == 4);
    assert_false(ka_race_won(&race, 0));
}

static void race__what_has_no_times__is_an_error_that_says_why(void **state)
{
    (void)state;
    static const struct {
        const char *text, *why;
    } rows[] = {
        {"{}", "no shape"},
        {"{\"cases\": []}", "no shape"},
        {"{\"cases\": [{\"ok\": false, \"error\": {\"message\": \"out of resources\"}}]}", "resources"},
        {"{\"cases\": [{\"ok\": true, \"subjects\": []}]}", "no times"},
        {"{\"cases\": [" CASE(SUBJECT("ours", "[1, -1]", "[]"), SUBJECT("rival", "[1, 1]", "[]")) "]}",
         "no time"},
        {"{\"cases\": [" CASE(SUBJECT("ours", "[1, 1]", "[]"), SUBJECT("rival", "[1, 0]", "[]")) "]}",
         "no time"},
        {"{\"cases\": [" CASE(SUBJECT("ours", "[1, 1]", "[]"), SUBJECT("rival", "[1]", "[]")) "]}",
         "no times"},
    };
    for (size_t i = 0; i < KA_COUNT(rows); i++) {
        struct ka_race race;
        struct ka_err err;
        assert_int_equal(race_of(rows[i].text, &race, &err), -ENODATA);
        if (!strstr(err.msg, rows[i].why))
            fail_msg("%s: %s", rows[i].text, err.msg);
    }
}

/* ---- a noisy clock ---- */

static uint64_t seed;

static double uniform(void)
{
    seed += 0x9e3779b97f4a7c15u;
    uint64_t z = (seed ^ (seed >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return ((double)((z ^ (z >> 31)) >> 11) + 0.5) * 0x1p-53;
}

static double normal(void)
{
    return sqrt(-2 * log(uniform())) * cos(2 * M_PI * uniform());
}

/* One sample: 1.5 % of noise; one in twenty is interrupted and takes up to three times as long. */
static double sample(double ms, double clock)
{
    double slow = uniform() < 0.05 ? 1 + 2 * uniform() : 1;
    return ms * clock * slow * exp(0.015 * normal());
}

/* The rounds of a race: the card's clock wanders by a tenth, for both alike. */
static struct ka_race race_between(double ours, double rival)
{
    json_auto_t *timed = json_loads(
        "{\"cases\": [" CASE(SUBJECT("ours", "[]", "[]"), SUBJECT("rival", "[]", "[]")) "]}", 0, NULL);
    json_t *subjects = json_object_get(json_array_get(json_object_get(timed, "cases"), 0), "subjects");
    double phase = uniform(), times[2] = {ours, rival};
    for (int round = 0; round < ROUNDS; round++) {
        double clock = 1 + 0.1 * sin(2 * M_PI * (phase + round / 40.0));
        for (size_t i = 0; i < 2; i++) {
            json_t *both = json_object_get(json_object_get(json_array_get(subjects, i), "times"), "both");
            json_array_append_new(json_object_get(both, "graph"), json_real(sample(times[i], clock)));
        }
    }
    struct ka_race race;
    assert_int_equal(ka_race_of(timed, &race, NULL), 0);
    return race;
}

static void step(struct ka_job *job, struct ka_event event)
{
    struct ka_command command;
    bool answers = event.type >= KA_EV_CANDIDATE && event.type <= KA_EV_LLM_FAILED;
    event.op = answers ? job->slots[0].op : job->op;
    assert_int_equal(ka_job_step(job, &event, &command), 0);
}

/* A run in which the model answers each optimise turn with a right backward of some speed. Returns the true
 * time of what the run ends with, of 1 at the start; counts wrong decisions. */
static double run_once(int *turns, int *regressions, int *refused)
{
    struct ka_job job;
    const struct ka_job_limits limits = {.max_iters = 12,
                                         .patience_parity = 2,
                                         .patience_perf = 3,
                                         .candidates = 1,
                                         .max_bad_answers = 3,
                                         .min_rel_impr = MIN_REL,
                                         .use_llm = true,
                                         .optimise = true};
    double best = 1;
    int64_t snapshot = 1;
    ka_job_init(&job, &limits);
    step(&job, (struct ka_event){.type = KA_EV_START});
    for (int i = 0; i < 3; i++)
        step(&job, (struct ka_event){.type = KA_EV_OK});
    step(&job, (struct ka_event){.type = KA_EV_CANDIDATE, .snapshot = snapshot});
    step(&job,
         (struct ka_event){.type = KA_EV_CHECKED, .passed = 5, .total = 5, .verified = true, .cost = 0.7});
    while (!ka_job_ended(&job)) {
        if (job.state == KA_JOB_OPTIMISE && job.turn_source == 1) {
            step(&job, (struct ka_event){.type = KA_EV_NO_CANDIDATE});
            continue;
        }
        double mine = best * (0.75 + 0.5 * uniform());
        struct ka_race race = race_between(mine, best);
        step(&job, (struct ka_event){.type = KA_EV_CANDIDATE, .snapshot = ++snapshot});
        step(&job, (struct ka_event){.type = KA_EV_CHECKED,
                                     .passed = 5,
                                     .total = 5,
                                     .verified = true,
                                     .cost = ka_race_cost(&race, job.best_cost, MIN_REL)});
        bool taken = job.best == snapshot;
        *regressions += taken && mine > best;
        *refused += !taken && mine < best * 0.95;
        best = taken ? mine : best;
        (*turns)++;
    }
    assert_true(job.state == KA_JOB_DONE && job.best_verified);
    return best;
}

static void race__ten_thousand_noisy_runs__accept_no_regression_and_refuse_no_gain(void **state)
{
    (void)state;
    int turns = 0, regressions = 0, refused = 0, slower = 0;
    seed = 20260801;
    for (int i = 0; i < 10000; i++)
        slower += run_once(&turns, &regressions, &refused) > 1;
    assert_int_equal(regressions, 0);
    assert_int_equal(refused, 0);
    assert_int_equal(slower, 0);
    assert_in_range(turns, 30000, 120000);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(race__two_shapes__has_one_ratio_a_round),
        cmocka_unit_test(race__kernels__are_words_of_the_last_shape),
        cmocka_unit_test(race__graph_of_one_alone__plain_calls_count),
        cmocka_unit_test(race__without_a_rival__is_its_own_time),
        cmocka_unit_test(race__what_has_no_times__is_an_error_that_says_why),
        cmocka_unit_test(race__ten_thousand_noisy_runs__accept_no_regression_and_refuse_no_gain),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
