/* Slopes of the forward against the oracle's gradient. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include <errno.h>

#include "agent/core/differences.h"

#define SLOPE(analytic, numeric, spread)                                                                     \
    "{\"analytic\": " analytic ", \"numeric\": " numeric ", \"spread\": " spread ", \"noise\": 1e-9}"
#define RIGHT SLOPE("2.0", "2.0001", "1e-6")
#define WRONG SLOPE("2.0", "3.0", "1e-6")
#define NOISY SLOPE("2.0", "3.0", "0.5")
#define BROKEN SLOPE("2.0", "null", "1e-6")

/* The judgement of input x with these slopes, beside an input w that is right. */
static int judge(const char *slopes, struct ka_differences *found, struct ka_err *err)
{
    char text[2048];
    snprintf(text, sizeof(text), "{\"slopes\": {\"x\": %s, \"w\": [" RIGHT "]}}", slopes);
    json_t *fd = json_loads(text, 0, NULL), *grads = json_pack("[s, s]", "x", "w");
    assert_non_null(fd);
    int rc = ka_differences_judge(fd, grads, found, err);
    json_decref(fd);
    json_decref(grads);
    return rc;
}

static void differences__all_certain_and_equal__agree(void **state)
{
    (void)state;
    struct ka_differences found;
    struct ka_err err;
    assert_int_equal(judge("[" RIGHT ", " RIGHT "]", &found, &err), 0);
    assert_int_equal(found.agree, 3);
    assert_int_equal(found.open, 0);
}

static void differences__two_contradictions__name_input_and_both_numbers(void **state)
{
    (void)state;
    struct ka_differences found;
    struct ka_err err;
    assert_int_equal(judge("[" WRONG ", " RIGHT ", " WRONG "]", &found, &err), -EDOM);
    assert_non_null(strstr(err.msg, "gradient of x"));
    assert_non_null(strstr(err.msg, "gives 2,"));
    assert_non_null(strstr(err.msg, "slope is 3 "));
    assert_non_null(strstr(err.msg, "2 of 3"));
}

static void differences__one_contradiction_among_agreements__is_a_kink(void **state)
{
    (void)state;
    struct ka_differences found;
    struct ka_err err;
    assert_int_equal(judge("[" RIGHT ", " WRONG "]", &found, &err), 0);
    assert_int_equal(found.disagree, 1);
}

static void differences__the_only_certain_slope__decides(void **state)
{
    (void)state;
    struct ka_differences found;
    struct ka_err err;
    assert_int_equal(judge("[" NOISY ", " WRONG ", " NOISY "]", &found, &err), -EDOM);
}

static void differences__what_is_uncertain_or_missing__is_open_and_never_agrees(void **state)
{
    (void)state;
    static const char *const open[] = {"[" NOISY "]", "[" BROKEN "]", "[]", "null", "[7]", "[{}]"};
    for (size_t i = 0; i < KA_COUNT(open); i++) {
        struct ka_differences found;
        struct ka_err err;
        assert_int_equal(judge(open[i], &found, &err), 0);
        assert_int_equal(found.open, 1);
        assert_int_equal(found.agree, 1); /* w */
    }
}

static void differences__asked_again__slopes_of_both_answers_are_judged_together(void **state)
{
    (void)state;
    json_t *fd = json_loads("{\"slopes\": {\"x\": [" RIGHT ", " WRONG "]}}", 0, NULL);
    json_t *grads = json_pack("[s]", "x");
    struct ka_differences found;
    struct ka_err err;
    ka_differences_add(fd, NULL);
    assert_int_equal(ka_differences_judge(fd, grads, &found, &err), 0);
    json_t *earlier = json_deep_copy(fd);
    ka_differences_add(fd, earlier);
    assert_int_equal(ka_differences_judge(fd, grads, &found, &err), -EDOM);
    assert_int_equal(found.agree, 2);
    assert_int_equal(found.disagree, 2);
    json_decref(earlier);
    json_decref(grads);
    json_decref(fd);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(differences__all_certain_and_equal__agree),
        cmocka_unit_test(differences__two_contradictions__name_input_and_both_numbers),
        cmocka_unit_test(differences__one_contradiction_among_agreements__is_a_kink),
        cmocka_unit_test(differences__the_only_certain_slope__decides),
        cmocka_unit_test(differences__what_is_uncertain_or_missing__is_open_and_never_agrees),
        cmocka_unit_test(differences__asked_again__slopes_of_both_answers_are_judged_together),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
