/* What a candidate's process says of itself can only count against it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "agent/core/conduct.h"

static const char CLEAN[] =
    "{\"modified\": [], \"aliases\": [], \"kernels\": [], \"races\": [], \"launches_backward\": 1,"
    " \"torch_ops_forward\": {\"aten::detach\": 1},"
    " \"torch_ops_backward\": {\"aten::empty_like\": 2, \"aten::zero_\": 1, \"aten::sum\": 1}}";

static const struct ka_conduct_of interpreted = {.compiled = false};

/* The facts of a verdict on one case with this report; `changes` are merged into the clean one, null removes.
 * free() them. */
static char *facts_where(const char *changes, bool compiled)
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
    const struct ka_conduct_of of = {.compiled = compiled};
    ka_conduct_judge(report, &of, verdict, at);
    struct ka_buf facts = {0};
    ka_verdict_facts(verdict, 3, &facts);
    json_decref(dims);
    json_decref(report);
    json_decref(change);
    ka_verdict_free(verdict);
    return ka_buf_str(&facts)[0] ? ka_buf_steal(&facts) : ka_strdup("");
}

static char *facts_of(const char *changes)
{
    return facts_where(changes, false);
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
    assert_says("{\"kernels\": null}", "kernel: the report says nothing");
    assert_says("{\"races\": null}", "race: the report says nothing");
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

static void conduct__races_and_what_kernels_may_not_call__are_told_in_their_words(void **state)
{
    (void)state;
    assert_says("{\"races\": [\"two meet\", \"b\"]}", "race: two meet, and 1 more");
    assert_says("{\"kernels\": [\"line 3: calls f\"]}", "kernel: line 3: calls f");
}

static void conduct__compiled_kernels__have_no_record_of_races(void **state)
{
    (void)state;
    char *facts = facts_where("{\"races\": null}", true);
    assert_null(strstr(facts, "case"));
    free(facts);
    facts = facts_where("{\"races\": [\"two meet\"]}", true);
    assert_non_null(strstr(facts, "race: two meet"));
    free(facts);
}

static void conduct__kernels_that_wait__are_named_once_and_held_against_nobody(void **state)
{
    (void)state;
    json_t *report = json_loads(CLEAN, 0, NULL), *dims = json_pack("{s:i}", "N", 8);
    const char *const grads[] = {"x"};
    json_object_set_new(report, "ordered_by_atomics", json_pack("[s, s, i]", "lock", "count", 3));
    struct ka_verdict *verdict = ka_verdict_new(grads, 1);
    size_t shape = ka_verdict_shape(verdict, KA_SHAPE_REQUIRED, dims, NULL);
    for (int i = 0; i < 2; i++)
        ka_conduct_judge(report, &interpreted, verdict, ka_verdict_case(verdict, shape, "normal upstream"));
    json_t *doc = ka_verdict_json(verdict, true), *names = json_pack("[s, s, s]", "lock", "count", "?");
    assert_true(json_equal(json_object_get(doc, "ordered_by_atomics"), names));
    assert_int_equal(json_array_size(json_object_get(doc, "failures")), 0);
    json_decref(names);
    json_decref(doc);
    json_decref(dims);
    json_decref(report);
    ka_verdict_free(verdict);
}

static void conduct__no_launch__is_right_where_inputs_have_no_elements(void **state)
{
    (void)state;
    for (int empty = 0; empty < 2; empty++) {
        const char *const grads[] = {"x"};
        const struct ka_conduct_of of = {.empty = empty};
        json_auto_t *report = json_loads(CLEAN, 0, NULL), *dims = json_pack("{s:i}", "N", 0);
        KA_AUTO_BUF struct ka_buf facts = {0};
        json_object_set_new(report, "launches_backward", json_integer(0));
        struct ka_verdict *verdict = ka_verdict_new(grads, 1);
        size_t shape = ka_verdict_shape(verdict, KA_SHAPE_HIDDEN, dims, "zero");
        ka_conduct_judge(report, &of, verdict, ka_verdict_case(verdict, shape, "normal upstream"));
        ka_verdict_facts(verdict, 3, &facts);
        assert_int_equal(strstr(ka_buf_str(&facts), "no_launch") == NULL, empty);
        ka_verdict_free(verdict);
    }
}

static void conduct__outputs_without_elements__need_no_launch(void **state)
{
    (void)state;
    static const struct {
        const char *outputs;
        bool nothing;
    } cases[] = {
        {"[{\"shape\": [2, 0, 3], \"differentiable\": true}]", true},
        {"[{\"shape\": [0], \"differentiable\": true}, {\"shape\": [4], \"differentiable\": false}]", true},
        {"[{\"shape\": [0], \"differentiable\": true}, {\"shape\": [4], \"differentiable\": true}]", false},
        {"[{\"shape\": [], \"differentiable\": true}]", false},
        {"[{\"differentiable\": true}]", false},
        {"[]", false},
        {"null", false},
    };
    for (size_t i = 0; i < KA_COUNT(cases); i++) {
        json_auto_t *outputs = json_loads(cases[i].outputs, JSON_DECODE_ANY, NULL);
        assert_int_equal(ka_conduct_nothing_to_launch(outputs), cases[i].nothing);
    }
}

/* What is said of a backward that scales what its forward's kernels made; free() it. */
static char *scaled(const char *changes, bool scales, size_t *remarks)
{
    static const char SCALED[] = "{\"modified\": [], \"aliases\": [], \"kernels\": [], \"races\": [],"
                                 " \"launches_forward\": 1, \"launches_backward\": 0, \"prepared\": [],"
                                 " \"torch_ops_forward\": {}, \"torch_ops_backward\": {\"aten::mul\": 1}}";
    const char *const grads[] = {"x"};
    const struct ka_conduct_of of = {.scales = scales};
    json_t *report = json_loads(SCALED, 0, NULL), *change = json_loads(changes, 0, NULL);
    json_t *dims = json_pack("{s:i}", "N", 8);
    struct ka_verdict *verdict = ka_verdict_new(grads, 1);
    struct ka_buf facts = {0};
    json_object_update(report, change);
    size_t at =
        ka_verdict_case(verdict, ka_verdict_shape(verdict, KA_SHAPE_REQUIRED, dims, NULL), "normal upstream");
    ka_conduct_judge(report, &of, verdict, at);
    ka_verdict_facts(verdict, 3, &facts);
    json_t *doc = ka_verdict_json(verdict, true);
    *remarks = json_array_size(json_object_get(doc, "remarks"));
    json_decref(doc);
    json_decref(dims);
    json_decref(report);
    json_decref(change);
    ka_verdict_free(verdict);
    return ka_buf_str(&facts)[0] ? ka_buf_steal(&facts) : ka_strdup("");
}

static void conduct__scaling_by_one_number__is_remarked_where_it_may_be(void **state)
{
    (void)state;
    static const struct {
        const char *changes, *said;
        bool scales;
    } rows[] = {
        {"{}", NULL, true},
        {"{}", "torch_math: the backward computes with torch (aten::mul)", false},
        {"{}", "no_launch", false},
        {"{\"launches_forward\": 0}", "no_launch", true},
        {"{\"prepared\": [\"x\"]}", "prepared: the forward makes the gradient of x with torch", true},
        {"{\"prepared\": null}", "prepared: the report says nothing", true},
        {"{\"torch_ops_backward\": {\"aten::sub\": 1}}", "torch_math", true},
        {"{\"torch_ops_forward\": {\"aten::mul\": 1}}", "torch_math", true},
    };
    for (size_t i = 0; i < KA_COUNT(rows); i++) {
        size_t remarks;
        char *facts = scaled(rows[i].changes, rows[i].scales, &remarks);
        if (rows[i].said)
            assert_non_null(strstr(facts, rows[i].said));
        else
            assert_null(strstr(facts, "case"));
        if (!i)
            assert_int_equal(remarks, 1);
        free(facts);
    }
}

static void conduct__only_outputs_of_one_number__may_be_scaled_by(void **state)
{
    (void)state;
    static const struct {
        const char *outputs;
        bool may;
    } rows[] = {
        {"[{\"shape\": [], \"differentiable\": true}]", true},
        {"[{\"shape\": [1, 1], \"differentiable\": true}]", true},
        {"[{\"shape\": [], \"differentiable\": true}, {\"shape\": [4], \"differentiable\": false}]", true},
        {"[{\"shape\": [], \"differentiable\": true}, {\"shape\": [4], \"differentiable\": true}]", false},
        {"[{\"shape\": [4], \"differentiable\": false}]", false},
        {"[{\"shape\": null, \"differentiable\": true}]", false},
        {"[]", false},
    };
    for (size_t i = 0; i < KA_COUNT(rows); i++) {
        json_t *outputs = json_loads(rows[i].outputs, 0, NULL);
        assert_int_equal(ka_conduct_may_scale(outputs), rows[i].may);
        json_decref(outputs);
    }
    assert_false(ka_conduct_may_scale(NULL));
}

/* {"modified": [...], "aliases": [...], "torch_ops_backward": {...}} of `count` items each. */
static char *crowded(size_t count)
{
    json_t *change = json_object(), *names = json_array(), *operations = json_object();
    for (size_t i = 0; i < count; i++) {
        char name[40];
        snprintf(name, sizeof(name), "aten::mul%zu", i);
        json_object_set_new(operations, name, json_integer(1));
        json_array_append_new(names, json_sprintf("saved/%zu", i));
    }
    json_object_set(change, "modified", names);
    json_object_set_new(change, "aliases", names);
    json_object_set_new(change, "torch_ops_backward", operations);
    char *text = json_dumps(change, 0);
    json_decref(change);
    return text;
}

static void conduct__thousands_of_confessions__are_counted(void **state)
{
    (void)state;
    char *few = crowded(4), *many = crowded(4096);
    assert_says(many, "modified: saved/0 was modified in place, and 4095 more");
    assert_says(many, "alias: a returned gradient shares memory: saved/0, and 4095 more");
    char *facts = facts_of(many), *short_facts = facts_of(few);
    assert_true(strlen(facts) < 4 * strlen(short_facts) + 200); /* what is shown does not grow with it */
    free(facts);
    free(short_facts);
    free(few);
    free(many);
}

static size_t failures_of(const char *changes)
{
    json_t *report = json_loads(changes, 0, NULL), *dims = json_pack("{s:i}", "N", 8);
    const char *const grads[] = {"x"};
    struct ka_verdict *verdict = ka_verdict_new(grads, 1);
    size_t shape = ka_verdict_shape(verdict, KA_SHAPE_REQUIRED, dims, NULL);
    ka_conduct_judge(report, &interpreted, verdict, ka_verdict_case(verdict, shape, "normal upstream"));
    json_t *doc = ka_verdict_json(verdict, true);
    size_t count = json_array_size(json_object_get(doc, "failures"));
    json_decref(doc);
    json_decref(dims);
    json_decref(report);
    ka_verdict_free(verdict);
    return count;
}

static void conduct__one_report__adds_a_bounded_number_of_failures(void **state)
{
    (void)state;
    char *many = crowded(4096);
    assert_in_range(failures_of(many), 3, 26);
    free(many);
}

static void conduct__names_cut_inside_a_character__are_still_told(void **state)
{
    (void)state;
    for (size_t length = 50; length < 160; length++) {
        char name[200] = {0}, text[900];
        memset(name, 'a', length);
        strcat(name, "\xE2\x82\xAC\xE2\x82\xAC");
        snprintf(text, sizeof(text),
                 "{\"modified\": [\"%s\"], \"aliases\": [\"%s\"], \"torch_ops_backward\": {\"%s\": 1}}", name,
                 name, name);
        assert_int_equal(failures_of(text), 7);
    }
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

static void conduct__interpreted_beside_compiled__is_a_case_of_its_own(void **state)
{
    static const struct {
        const char *entry, *change, *part; /* what changes in a clean conduct */
    } rows[] = {
        {"{\"ok\":true}", "{\"untraced\":[]}", NULL},
        {"{\"ok\":true}", "{\"untraced\":[],\"races\":[\"two programs met\"]}", "race: two programs met"},
        {"{\"ok\":true}", "{\"untraced\":[\"w\"]}", "the gradient of w comes from no kernel"},
        {"{\"ok\":true}", "{}", "does not say where gradients come from"},
        {"{\"ok\":true}", "{\"untraced\":[],\"torch_ops_backward\":{\"aten::mul\":2}}", "aten::mul"},
        {"{\"ok\":false,\"raised_in\":\"host\",\"error\":{\"message\":\"no GPU, no work\"}}", "{}",
         "no GPU, no work"},
        {"{\"ok\":false,\"raised_in\":\"kernel\"}", "{}", NULL},
        {"{\"ok\":false,\"raised_in\":\"forward\"}", "{}", NULL},
    };
    (void)state;
    for (size_t i = 0; i < KA_COUNT(rows); i++) {
        json_t *entry = json_loads(rows[i].entry, 0, NULL), *conduct = json_loads(CLEAN, 0, NULL);
        json_t *change = json_loads(rows[i].change, 0, NULL), *dims = json_pack("{s:i}", "N", 8);
        const char *const grads[] = {"x"};
        assert_int_equal(json_object_update(conduct, change), 0);
        json_object_set(entry, "conduct", conduct);
        json_t *facts = json_pack("{s:[o]}", "cases", entry);
        struct ka_verdict *verdict = ka_verdict_new(grads, 1);
        size_t shape = ka_verdict_shape(verdict, KA_SHAPE_REQUIRED, dims, NULL);
        ka_conduct_interpreted(facts, &interpreted, verdict, shape);
        struct ka_buf text = {0};
        ka_verdict_facts(verdict, 3, &text);
        assert_int_equal(ka_verdict_count(verdict).cases_failed, rows[i].part != NULL);
        assert_true(!rows[i].part || strstr(ka_buf_str(&text), rows[i].part));
        assert_null(json_object_get(entry, "conduct")); /* told once */
        assert_int_equal(ka_conduct_watched(facts), strstr(rows[i].entry, "true") != NULL);
        ka_buf_free(&text);
        ka_verdict_free(verdict);
        json_decref(facts);
        json_decref(conduct);
        json_decref(change);
        json_decref(dims);
    }
    ka_conduct_interpreted(NULL, &interpreted, NULL, 0);
    assert_false(ka_conduct_watched(NULL));
}

static void conduct__upstream_that_is_handed_on__is_a_remark_where_that_is_free(void **state)
{
    (void)state;
    const char *const grads[] = {"x"};
    json_auto_t *free_ones = json_pack("[s]", "x"), *dims = json_pack("{s:i}", "N", 8);
    json_auto_t *report = json_loads(CLEAN, 0, NULL);
    json_object_set_new(report, "aliases",
                        json_pack("[s, s, s]", "grad/x=upstream/0", "grad/x=x", "grad/xx=upstream/0"));
    const struct ka_conduct_of of = {.free = free_ones};
    struct ka_verdict *verdict = ka_verdict_new(grads, 1);
    size_t shape = ka_verdict_shape(verdict, KA_SHAPE_REQUIRED, dims, NULL);
    ka_conduct_judge(report, &of, verdict, ka_verdict_case(verdict, shape, "normal upstream"));
    json_auto_t *doc = ka_verdict_json(verdict, true);
    KA_AUTO_BUF struct ka_buf facts = {0};
    ka_verdict_facts(verdict, 3, &facts);
    assert_int_equal(json_array_size(json_object_get(doc, "remarks")), 1);
    assert_null(strstr(ka_buf_str(&facts), "grad/x=upstream/0"));
    assert_non_null(strstr(ka_buf_str(&facts), "grad/x=x, and 1 more"));
    ka_verdict_free(verdict);
}

static void conduct__kernel_that_no_case_launched__is_remarked(void **state)
{
    (void)state;
    const char *const grads[] = {"x"};
    struct ka_verdict *verdict = ka_verdict_new(grads, 1);
    json_t *launches = json_pack("[s, s, i]", "row_kernel", "loop_kernel", 3);
    json_t *seen = json_pack("{s:b, s:b}", "row_kernel", true, "other", true);
    ka_conduct_unlaunched(launches, seen, verdict);
    json_t *doc = ka_verdict_json(verdict, true), *remarks = json_object_get(doc, "remarks");
    assert_int_equal(json_array_size(remarks), 1);
    assert_non_null(strstr(json_string_value(json_array_get(remarks, 0)), "no case launched loop_kernel"));
    json_decref(doc);
    json_decref(seen);
    json_decref(launches);
    ka_verdict_free(verdict);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(conduct__clean_report__holds_nothing_against_it),
        cmocka_unit_test(conduct__no_launch__is_right_where_inputs_have_no_elements),
        cmocka_unit_test(conduct__outputs_without_elements__need_no_launch),
        cmocka_unit_test(conduct__torch_arithmetic__is_named_with_its_phase),
        cmocka_unit_test(conduct__member_that_is_missing__counts_like_a_confession),
        cmocka_unit_test(conduct__modified_and_shared_memory__are_named),
        cmocka_unit_test(conduct__scaling_by_one_number__is_remarked_where_it_may_be),
        cmocka_unit_test(conduct__only_outputs_of_one_number__may_be_scaled_by),
        cmocka_unit_test(conduct__races_and_what_kernels_may_not_call__are_told_in_their_words),
        cmocka_unit_test(conduct__compiled_kernels__have_no_record_of_races),
        cmocka_unit_test(conduct__kernels_that_wait__are_named_once_and_held_against_nobody),
        cmocka_unit_test(conduct__thousands_of_confessions__are_counted),
        cmocka_unit_test(conduct__one_report__adds_a_bounded_number_of_failures),
        cmocka_unit_test(conduct__names_cut_inside_a_character__are_still_told),
        cmocka_unit_test(conduct__operations__are_judged_by_their_whole_name),
        cmocka_unit_test(conduct__interpreted_beside_compiled__is_a_case_of_its_own),
        cmocka_unit_test(conduct__upstream_that_is_handed_on__is_a_remark_where_that_is_free),
        cmocka_unit_test(conduct__kernel_that_no_case_launched__is_remarked),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
