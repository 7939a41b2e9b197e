/* The report: each section says what it must, and nothing that is missing or odd breaks it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/core/checked.h"
#include "agent/core/report.h"

static const char FULL[] =
    "{\"verdict\":\"verified\",\"exit_code\":0,\"stub\":\"norm\",\"file\":\"/k/norm.py\",\"device\":\"cpu\","
    "\"shapes\":{\"required\":2,\"passed\":2,\"hidden\":5,\"hidden_passed\":4,\"optional\":1,\"optional_"
    "passed\":1,"
    "\"skipped\":[{\"dims\":{\"M\":4096},\"reason\":\"too "
    "large\"},{\"shape\":\"hidden\",\"reason\":\"refused\"}]},"
    "\"gradients\":[{\"name\":\"x\",\"error\":3.1e-7,\"baseline_error\":2.9e-7,\"worst_shape\":{\"M\":8,"
    "\"N\":100}},"
    "{\"name\":\"a|b\",\"error\":null,\"baseline_error\":null,\"worst_shape\":null}],"
    "\"attempts\":4,\"rollbacks\":1,\"draft\":\"differentiator\",\"retrieved\":[{\"id\":\"rms_norm\","
    "\"similarity\":0.83}],"
    "\"tape_bytes\":0,\"atomics\":0,\"speed\":null,\"llm\":{\"requests\":3,\"tokens_in\":1200,\"tokens_"
    "cached\":800,\"tokens_out\":"
    "300,"
    "\"cost\":0.5},\"seconds\":12.34,\"pair\":\"/out/"
    "norm.py\",\"modelled_cost\":2000,"
    "\"measured\":{\"cases\":[{\"backward\":{\"launches\":2,\"bytes_read\":2048,\"bytes_written\":10,"
    "\"atomics\":0,"
    "\"programs\":4},\"kernels\":[{\"name\":\"b\",\"registers\":40,\"spills\":0,\"shared\":0}]}]},"
    "\"history\":[{\"phase\":\"draft\",\"origin\":\"differentiator\",\"verified\":true,\"kept\":true,"
    "\"cost\":9000},"
    "{\"phase\":\"optimise\",\"origin\":\"llm\",\"note\":\"a | "
    "b\",\"verified\":false,\"required\":2,\"passed\":1,"
    "\"kept\":false}],"
    "\"children\":[{\"op\":\"oracle\",\"start\":1,\"end\":2}],"
    "\"draft_report\":{\"tape_bytes\":0,\"schedule\":\"owner\"},"
    "\"device_answers\":[{\"line\":12,\"asked\":\"is_hip()\",\"answer\":false}]}";

static struct ka_buf out;

static int free_out(void **state)
{
    (void)state;
    ka_buf_free(&out);
    return 0;
}

static void report(const char *doc)
{
    struct ka_err err;
    json_t *result = json_loads(doc, 0, NULL);
    assert_non_null(result);
    ka_buf_clear(&out);
    assert_int_equal(ka_report_markdown(result, &out, &err), 0);
    json_decref(result);
}

static void assert_has(const char *part)
{
    if (!strstr(ka_buf_str(&out), part))
        fail_msg("'%s' is not in:\n%s", part, ka_buf_str(&out));
}

static void assert_lacks(const char *part)
{
    if (strstr(ka_buf_str(&out), part))
        fail_msg("'%s' is in:\n%s", part, ka_buf_str(&out));
}

static void report__verified_run__tells_verdict_and_shapes(void **state)
{
    (void)state;
    report(FULL);
    assert_true(ka_starts_with(ka_buf_str(&out), "# norm: verified\n\n"));
    assert_has("| required shapes passed | 2 of 2 |\n");
    assert_has("| hidden shapes passed | 4 of 5 |\n");
    assert_has("| pair | /out/norm.py |\n");
    assert_has("| model | 3 requests, 1200 tokens in (800 of them cached), 300 out, cost 0.5000 |\n");
    assert_has("- M=4096: too large\n- hidden: refused\n");
    assert_true(ka_ends_with(ka_buf_str(&out), "|\n"));
    assert_false(ka_ends_with(ka_buf_str(&out), "\n\n"));
}

static void report__gradients__have_error_baseline_and_worst_shape(void **state)
{
    (void)state;
    report(FULL);
    assert_has("| x | 3.1e-07 | 2.9e-07 | M=8, N=100 |\n");
    assert_has("| a\\|b | - | - | - |\n");
}

static void report__facts__are_counted_and_claim_no_time(void **state)
{
    (void)state;
    report(FULL);
    assert_has("| backward | best |\n");
    assert_has("| launches | 2 |\n");
    assert_has("| bytes read | 2.0 KiB |\n");
    assert_has("| atomic elements | 0 |\n");
    assert_has("| registers, most of a kernel | 40 |\n");
    assert_has("| modelled cost | 2000 |\n");
    assert_has("It is not a time");
    assert_has("Not timed");
}

static void report__times_of_a_run_on_a_gpu__are_its_speed_and_nothing_is_modelled(void **state)
{
    (void)state;
    report("{\"stub\": \"norm\", \"verdict\": \"verified\", \"ms\": 0.25, \"modelled_cost\": null, "
           "\"measured\": {\"cases\": [], \"times\": {\"way\": \"graph\", \"ms\": 0.25, \"shapes\": "
           "[{\"dims\": {\"M\": 8}, \"ms\": 0.25}]}}}");
    assert_has(
        "## Speed\n\nMeasured on the GPU, forward and backward together, as CUDA graphs: M=8: 0.25 ms.");
    assert_lacks("Not timed");
    assert_lacks("odelled cost");
}

static void report__history_pairs_and_answers__are_listed(void **state)
{
    (void)state;
    report(FULL);
    assert_has("1. draft by differentiator: verified, cost 9000, kept\n"
               "2. optimise by llm (a \\| b): not verified, 1 of 2 shapes, rolled back\n");
    assert_has("| rms_norm | 0.830 |\n");
    assert_has("- schedule of the draft: owner\n");
    assert_has("| 12 | is_hip() | false |\n");
}

static void report__failed_run__tells_why(void **state)
{
    (void)state;
    report("{\"verdict\":\"unusable\",\"stub\":null,\"error\":{\"kind\":\"no_stub\",\"message\":\"no "
           "function is decorated\","
           "\"file\":\"a.py\",\"line\":3,\"remedy\":\"decorate the stub\",\"traceback\":\"Trace\"}}");
    assert_true(ka_starts_with(ka_buf_str(&out), "# kernel-agent: the forward file cannot be used\n"));
    assert_has("a.py:3: no function is decorated\n\nWhat to do: decorate the stub\n\n```\nTrace\n```\n");
    assert_lacks("## Gradients");
    assert_lacks("## Speed");
    assert_lacks("## Attempts");
    report("{\"verdict\":\"not_verified\",\"failures\":\"dx is wrong.\",\"best\":\"/out/n.unverified.py\"}");
    assert_has("## What does not pass\n\ndx is wrong.\n");
    assert_has("| best candidate, not verified | /out/n.unverified.py |");
}

static void report__shape_of_the_other_kinds__is_named(void **state)
{
    (void)state;
    report("{\"verdict\":\"verified\",\"variants_on\":{\"M\":4,\"N\":24}}");
    assert_non_null(strstr(out.data, "| other upstreams and inputs tried on | M=4, N=24 |\n"));
}

static void report__what_was_varied_or_not_asked__is_named(void **state)
{
    (void)state;
    report("{\"verdict\":\"verified\",\"oracles\":{\"scalars\":{\"varied\":[{\"name\":\"eps\",\"way\":0}]},"
           "\"unasked\":{\"w\":\"the backward returns "
           "None for it\"},\"sizes\":{\"D = 1\":\"too small\"}}}");
    assert_non_null(strstr(out.data, "| also called with another | eps |\n"));
    assert_non_null(
        strstr(out.data, "| not checked: the gradient of w | the backward returns None for it |\n"));
    assert_non_null(strstr(out.data, "| size that the forward does not take: D = 1 | too small |\n"));
    report("{\"verdict\":\"verified\",\"oracles\":{\"scalars\":7,\"unasked\":[1]}}");
    assert_null(strstr(out.data, "also called"));
}

static void report__what_was_checked__is_told_with_what_was_not(void **state)
{
    (void)state;
    report("{\"verdict\":\"verified\",\"checked\":{\"kinds\":[{\"name\":\"normal upstream\",\"cases\":12},"
           "{\"name\":\"strided inputs\",\"cases\":1}],"
           "\"left_out\":[{\"name\":\"tied inputs\",\"reason\":\"the forward is wrong\"},{\"name\":3}],"
           "\"scaled\":[{\"dims\":{\"M\":4096},\"checked\":{\"M\":128},\"required\":true}],"
           "\"not_seen\":[\"races\"],\"never_varied\":[\"eps = 1e-6\"],\"notes\":[\"line 3: TF32\"]}}");
    assert_non_null(strstr(out.data, "## What was checked\n"));
    assert_non_null(strstr(out.data, "- kinds of cases, and how many of each: normal upstream (12); strided "
                                     "inputs (1)\n"));
    assert_non_null(strstr(out.data, "- not tried: tied inputs: the forward is wrong\n- not tried: ?\n"));
    assert_non_null(strstr(out.data, "- a required size was scaled: M=4096 was checked at M=128\n"));
    assert_non_null(
        strstr(out.data, "- never varied: eps = 1e-6\n- not seen: races\n- note: line 3: TF32\n"));
    report("{\"verdict\":\"verified\",\"checked\":{\"kinds\":7,\"scaled\":[1],\"notes\":[null]}}");
    assert_non_null(strstr(out.data, "- note: ?\n"));
}

static void checked__kinds_without_a_case__are_left_out_with_the_reason(void **state)
{
    (void)state;
    json_t *verdict = json_loads("{\"kinds\":[{\"name\":\"normal upstream\",\"cases\":3},{\"name\":"
                                 "\"normal upstream, w slice\",\"cases\":1}],\"notes\":[{\"line\":4,"
                                 "\"message\":\"TF32\"}]}",
                                 0, NULL);
    json_t *oracles = json_loads("{\"inputs\":{\"left_out\":{\"w tied\":\"it has no rows\"}},"
                                 "\"scalars\":{\"never_varied\":{\"mode\":\"no number\"}},"
                                 "\"scaled\":[{\"dims\":{\"M\":9}}]}",
                                 0, NULL);
    struct ka_checked_of of = {verdict, oracles, NULL, "cpu", "sm_90"};
    json_t *checked = ka_checked_json(&of);
    char *text = json_dumps(checked, JSON_COMPACT);
    assert_null(strstr(text, "\"name\":\"slice\""));
    assert_non_null(strstr(text, "{\"name\":\"w tied\",\"reason\":\"it has no rows\"}"));
    assert_null(strstr(text, "\"name\":\"tied\""));
    assert_non_null(strstr(text, "one differentiable output"));
    assert_non_null(strstr(text, "nothing compiled them here"));
    assert_non_null(strstr(text, "\"scaled\":[{\"dims\":{\"M\":9}}]"));
    assert_non_null(strstr(text, "races that timing decides among kernels ordered by atomics: "));
    assert_null(strstr(text, "the interpreter was given"));
    assert_non_null(strstr(text, "\"never_varied\":[\"mode: no number\"]"));
    assert_non_null(strstr(text, "line 4: TF32"));
    free(text);
    json_decref(checked);
    of = (struct ka_checked_of){.device = "cuda"};
    checked = ka_checked_json(&of);
    const json_t *unseen = json_object_get(checked, "not_seen");
    assert_int_equal(json_array_size(unseen), 2);
    assert_non_null(strstr(json_string_value(json_array_get(unseen, 0)), "could not run this"));
    json_decref(checked);
    json_t *facts = json_loads("{\"cases\":[{\"ok\":true}]}", 0, NULL);
    of.facts = facts;
    checked = ka_checked_json(&of);
    unseen = json_object_get(checked, "not_seen");
    assert_non_null(strstr(json_string_value(json_array_get(unseen, 0)), "sizes larger than those"));
    json_decref(checked);
    json_decref(facts);
    json_decref(verdict);
    json_decref(oracles);
}

static void report__children__are_summed_by_operation(void **state)
{
    (void)state;
    report("{\"children\":[{\"op\":\"inspect\",\"start\":0,\"end\":2.5,\"status\":\"ok\"},"
           "{\"op\":\"oracle\",\"start\":2,\"end\":14,\"status\":\"ok\"},"
           "{\"op\":\"oracle\",\"start\":3,\"end\":5,\"status\":\"died\"},"
           "{\"op\":\"a|b\\n<c>\",\"start\":3,\"end\":1,\"status\":\"ok\"},{\"op\":\"no start\"}]}");
    assert_has(
        "| operation | children | seconds | longest |\n|---|---|---|---|\n"
        "| inspect | 1 | 2.50 | 2.50 |\n| oracle | 2 | 14.0 | 12.0 |\n| a\\|b <c> | 1 | 0.00 | 0.00 |\n");
    assert_lacks("no start");
    report("{\"verdict\":\"verified\"}");
    assert_lacks("## Time");
}

static void report__children_of_very_many_operations__are_summed_as_others(void **state)
{
    (void)state;
    json_t *list = json_array(), *result = json_pack("{s:o}", "children", list);
    char op[16];
    for (int i = 0; i < 100; i++) {
        snprintf(op, sizeof(op), "op%d", i);
        json_array_append_new(list, json_pack("{s:s, s:i, s:i}", "op", op, "start", 0, "end", 1));
    }
    assert_int_equal(ka_report_markdown(result, &out, NULL), 0);
    assert_has("| op22 | 1 | 1.00 | 1.00 |\n| others | 77 | 77.0 | 1.00 |\n");
    json_decref(result);
}

static void report__member_of_any_type__is_survived(void **state)
{
    (void)state;
    static const char *const odd[] = {
        "null",
        "7",
        "-1e300",
        "\"text\"",
        "[]",
        "{}",
        "[1,null,\"x\",[],{}]",
        "true",
        "[{\"name\":{},\"dims\":3,\"line\":\"x\",\"cases\":[7],\"gradients\":[1]}]"};
    json_t *full = json_loads(FULL, 0, NULL);
    const char *name;
    json_t *member;
    json_object_foreach(full, name, member)
    {
        for (size_t i = 0; i < KA_COUNT(odd); i++) {
            json_t *changed = json_deep_copy(full);
            json_object_set_new(changed, name, json_loads(odd[i], JSON_DECODE_ANY, NULL));
            ka_buf_clear(&out);
            assert_int_equal(ka_report_markdown(changed, &out, NULL), 0);
            assert_true(ka_starts_with(ka_buf_str(&out), "# "));
            json_decref(changed);
        }
    }
    json_decref(full);
    report("{}");
    assert_true(ka_starts_with(ka_buf_str(&out), "# kernel-agent: no verdict\n"));
}

static void report__no_object__is_refused(void **state)
{
    (void)state;
    json_t *list = json_array();
    assert_int_equal(ka_report_markdown(list, &out, NULL), -EINVAL);
    assert_int_equal(ka_report_markdown(NULL, &out, NULL), -EINVAL);
    assert_int_equal(out.len, 0);
    json_decref(list);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_teardown(name, free_out)
    const struct CMUnitTest tests[] = {
        TEST(report__verified_run__tells_verdict_and_shapes),
        TEST(report__gradients__have_error_baseline_and_worst_shape),
        TEST(report__facts__are_counted_and_claim_no_time),
        TEST(report__times_of_a_run_on_a_gpu__are_its_speed_and_nothing_is_modelled),
        TEST(report__history_pairs_and_answers__are_listed),
        TEST(report__failed_run__tells_why),
        TEST(report__shape_of_the_other_kinds__is_named),
        TEST(report__what_was_checked__is_told_with_what_was_not),
        TEST(checked__kinds_without_a_case__are_left_out_with_the_reason),
        TEST(report__what_was_varied_or_not_asked__is_named),
        TEST(report__children__are_summed_by_operation),
        TEST(report__children_of_very_many_operations__are_summed_as_others),
        TEST(report__member_of_any_type__is_survived),
        TEST(report__no_object__is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
