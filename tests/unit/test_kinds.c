/* The table of kinds: what plan, verdict and judge take for granted of its rows. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include <math.h>

#include "agent/core/kinds.h"
#include "agent/core/plan.h"

static void kinds__rows__have_what_their_sort_needs(void **state)
{
    (void)state;
    const struct ka_kind *kind;
    for (size_t i = 0; (kind = ka_kind_at(i)); i++) {
        bool question = kind->sort == KA_KIND_QUESTION;
        assert_true(question || kind->label);
        assert_true(!kind->meaning || kind->label);
        assert_int_equal(question, kind->when >= KA_KIND_PLAIN);
        assert_int_equal(kind->sort == KA_KIND_LAYOUT || kind->sort == KA_KIND_VALUES,
                         kind->when == KA_KIND_TAKEN || kind->when == KA_KIND_NEVER);
        assert_int_equal(question && kind->when != KA_KIND_SUBSETS,
                         kind->value || kind->other || kind->scales[0] != 0);
        assert_true(!kind->other || kind->when == KA_KIND_LATER);
        for (size_t k = 0; k < KA_COUNT(kind->scales); k++) {
            assert_int_equal(kind->scales[k] != 0, kind->scales[0] != 0);
            assert_int_equal(kind->scales[k] != 0, kind->scales_half[k] != 0);
            assert_true(kind->scales[k] == 0 || frexp(kind->scales[k], &(int){0}) == 0.5); /* exact */
            assert_true(kind->scales_half[k] == 0 || frexp(kind->scales_half[k], &(int){0}) == 0.5);
        }
        assert_string_equal(ka_kind_find(kind->sort, kind->name)->name, kind->name);
    }
    assert_null(ka_kind_find(KA_KIND_UPSTREAM, "slice"));
    assert_null(ka_kind_find(KA_KIND_UPSTREAM, NULL));
}

/* A failure is told by the label of its case: no label may look like another's. */
static void kinds__label_of_one__is_no_part_of_another(void **state)
{
    (void)state;
    const struct ka_kind *a, *b;
    for (size_t i = 0; (a = ka_kind_at(i)); i++)
        for (size_t k = 0; (b = ka_kind_at(k)); k++)
            if (a->label && b->label && strcmp(a->name, b->name) != 0)
                assert_null(strstr(a->label, b->label));
}

static void assert_label(const char *item, const char *label, const char *meaning)
{
    json_t *doc = json_loads(item, 0, NULL);
    struct ka_buf text = {0};
    ka_kind_label(doc, &text);
    assert_string_equal(ka_buf_str(&text), label);
    assert_int_equal(ka_kind_is_plain(label), strcmp(label, "normal upstream") == 0);
    const char *found = ka_kind_meaning(label);
    assert_true(meaning ? found && strstr(found, meaning) : !found);
    ka_buf_free(&text);
    json_decref(doc);
}

static void kinds__label_of_a_case__names_all_that_is_of_another_kind(void **state)
{
    (void)state;
    assert_label("{\"upstream\": {\"kind\": \"normal\", \"seed\": 7}, \"twice\": true}", "normal upstream",
                 NULL);
    assert_label("{\"upstream\": {\"kind\": \"onehot\"}}", "onehot upstream", "divide by it");
    assert_label("{\"upstream\": {\"kind\": \"ones\"}}", "ones upstream", "y.sum()");
    assert_label("{\"upstream\": {\"kind\": \"normal\"}, \"order\": \"reversed\"}",
                 "normal upstream, programs in another order", NULL);
    assert_label("{\"upstream\": {\"kind\": \"normal\"}, \"values\": {\"x\": \"tied\"}, \"layouts\": "
                 "{\"w\": \"slice\", \"upstream/0\": \"stacked\", \"upstream/2\": \"expanded\"}}",
                 "normal upstream, stacked upstream, expanded upstream 2, w slice, x tied", NULL);
    assert_label("{\"upstream\": {\"kind\": \"normal\"}, \"needs\": [\"x\"]}",
                 "normal upstream, only x wants a gradient", NULL);
    assert_label("{\"upstream\": {\"kind\": \"normal\"}, \"needs\": [\"x\", \"w\", \"scaled\"]}",
                 "normal upstream, only x, w and scaled want gradients", NULL);
    assert_string_equal(ka_kind_meaning("x tied, w slice"), ka_kind_find(KA_KIND_VALUES, "tied")->meaning);
    assert_string_equal(ka_kind_meaning("tied slice"), ka_kind_find(KA_KIND_LAYOUT, "slice")->meaning);
    assert_null(ka_kind_meaning("x spliced"));
}

static void kinds__values_in_which_rounding_grows__loosen_the_norm_once(void **state)
{
    (void)state;
    struct ka_tolerance plain = ka_tolerance_of(KA_F32), loose = plain, half = ka_tolerance_of(KA_F16);
    const struct ka_kind *large = ka_kind_find(KA_KIND_VALUES, "large");
    large->tolerate(&loose);
    assert_true(loose.floor > plain.floor && loose.floor <= 2e-3);
    double once = loose.floor;
    ka_kind_find(KA_KIND_VALUES, "masked")->tolerate(&loose);
    assert_true(loose.floor == once && large->only_against);
    ka_kind_find(KA_KIND_VALUES, "mixed")->tolerate(&loose);
    assert_true(loose.floor > once);
    large->tolerate(&half);
    assert_true(half.floor > ka_tolerance_of(KA_F16).floor && half.floor <= 0.02);
}

static void kinds__questions__are_the_candidates_alone(void **state)
{
    (void)state;
    json_t *all = json_object(), *cases = json_pack("[o]", all);
    const struct ka_kind *kind;
    size_t i, questions = 0;
    json_object_set_new(all, "class", json_string("hidden"));
    json_object_set_new(all, "values", json_pack("{s:s}", "x", "tied"));
    for (i = 0; (kind = ka_kind_at(i)); i++)
        if (kind->sort == KA_KIND_QUESTION)
            questions += json_object_set_new(all, kind->name, json_true()) == 0;
    json_t *oracle = ka_plan_for_oracle(cases), *candidate = ka_plan_for_candidate(cases);
    assert_int_equal(json_object_size(json_array_get(oracle, 0)), 1);
    assert_int_equal(json_object_size(json_array_get(candidate, 0)), 1 + questions);
    json_decref(oracle);
    json_decref(candidate);
    json_decref(cases);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(kinds__rows__have_what_their_sort_needs),
        cmocka_unit_test(kinds__label_of_one__is_no_part_of_another),
        cmocka_unit_test(kinds__label_of_a_case__names_all_that_is_of_another_kind),
        cmocka_unit_test(kinds__questions__are_the_candidates_alone),
        cmocka_unit_test(kinds__values_in_which_rounding_grows__loosen_the_norm_once),
    };
    return cmocka_run_group_tests_name("kinds", tests, NULL, NULL);
}
