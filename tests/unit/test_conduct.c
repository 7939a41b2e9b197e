/* What a candidate's process says of itself can only count against it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "core/conduct.h"

static const char CLEAN[] =
    "{\"modified\": [], \"aliases\": [], \"launches_backward\": 1, \"torch_ops_forward\": {\"aten::detach\": "
    "1},"
    " \"torch_ops_backward\": {\"aten::empty_like\": 2, \"aten::zero_\": 1, \"aten::sum\": 1}}";

/* The facts of a verdict on one case with this report; `changes` are merged into the clean one, null removes.
 * free() them. */
static char *facts_of(const char *changes)
{
    json_t *report = json_loads(CLEAN, 0, NULL), *change = json_loads(changes, 0, NULL), *value;
    const char *key, *const grads[] = {"x"};
    assert_non_null(report);
    assert_non_null(change);
    json_object_foreach(change, key, value)
    {
        if (json_is_null(value))
            json_object_del(report, key);
        else
            json_object_set(report, key, value);
    }
    struct ka_verdict *verdict = ka_verdict_new(grads, 1);
    json_t *dims = json_pack("{s:i}", "N", 8);
    size_t at =
        ka_verdict_case(verdict, ka_verdict_shape(verdict, KA_SHAPE_REQUIRED, dims, NULL), "normal upstream");
    ka_conduct_judge(report, verdict, at);
    struct ka_buf facts = {0};
    ka_verdict_facts(verdict, 3, &facts);
    json_decref(dims);
    json_decref(report);
    json_decref(change);
    ka_verdict_free(verdict);
    return ka_buf_str(&facts)[0] ? ka_buf_steal(&facts) : ka_strdup("");
}

static void assert_says(const char *changes, const char *sentence)
{
    char *facts = facts_of(changes);
    if (!strstr(facts, sentence))
        fail_msg("%s: no '%s' in: %s", changes, sentence, facts);
    free(facts);
}

static void conduct__clean_report__holds_nothing_against_it(void **state)
{
    (void)state;
    char *facts = facts_of("{}");
    assert_null(strstr(facts, "case"));
    free(facts);
}

static void conduct__torch_arithmetic__is_named_with_its_phase(void **state)
{
    (void)state;
    assert_says("{\"torch_ops_backward\": {\"aten::sum\": 1, \"aten::mul\": 3}}",
                "torch_math: the backward computes with torch (aten::mul)");
    assert_says("{\"torch_ops_forward\": {\"aten::mm\": 1}}",
                "torch_math: the forward computes with torch (aten::mm)");
    assert_says("{\"torch_ops_backward\": {\"custom::backward\": 1}}", "custom::backward");
}

static void conduct__member_that_is_missing__counts_like_a_confession(void **state)
{
    (void)state;
    assert_says("{\"torch_ops_backward\": null}",
                "torch_math: the backward computes with torch (operations that it does not report)");
    assert_says("{\"modified\": null}", "modified: the report says nothing");
    assert_says("{\"aliases\": 3}", "alias: the report says nothing");
    assert_says("{\"launches_backward\": null}", "no_launch");
    assert_says("{\"launches_backward\": \"9\"}", "no_launch");
}

static void conduct__modified_and_shared_memory__are_named(void **state)
{
    (void)state;
    assert_says("{\"modified\": [\"x\"]}", "modified: x was modified in place");
    assert_says("{\"aliases\": [\"grad/x=upstream/0\"]}",
                "alias: a returned gradient shares memory: grad/x=upstream/0");
    assert_says("{\"launches_backward\": 0}", "no_launch");
}

static void conduct__operations__are_judged_by_their_whole_name(void **state)
{
    (void)state;
    assert_true(ka_conduct_allowed("aten::zero_"));
    assert_true(ka_conduct_allowed("aten::_to_copy"));
    assert_true(ka_conduct_allowed("aten::t"));
    assert_false(ka_conduct_allowed("aten::summ"));
    assert_false(ka_conduct_allowed("aten::su"));
    assert_false(ka_conduct_allowed("aten::"));
    assert_false(ka_conduct_allowed("aten::_"));
    assert_false(ka_conduct_allowed("mine::sum"));
    assert_false(ka_conduct_allowed("aten::_local_scalar_dense"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(conduct__clean_report__holds_nothing_against_it),
        cmocka_unit_test(conduct__torch_arithmetic__is_named_with_its_phase),
        cmocka_unit_test(conduct__member_that_is_missing__counts_like_a_confession),
        cmocka_unit_test(conduct__modified_and_shared_memory__are_named),
        cmocka_unit_test(conduct__operations__are_judged_by_their_whole_name),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
