/* The decision: what verifies a candidate, what blocks it, and what stays secret. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "agent/core/verdict.h"

static const char *const GRADS[] = {"x", "w"};

static struct ka_diff right(double error)
{
    return (struct ka_diff){
        .pass = true, .rank = 1, .dims = {37}, .count = 37, .error = error, .base_error = 1e-7};
}

static struct ka_diff wrong(void)
{
    struct ka_diff diff = right(0.25);
    diff.pass = false;
    diff.reason = KA_DIFF_NORM;
    diff.off = 3;
    diff.worst = 36;
    diff.pattern_count = 1;
    diff.patterns[0] =
        (struct ka_pattern){.kind = KA_PATTERN_LAST_TILE, .from = 32, .to = 36, .dim = 37, .tile = 16};
    return diff;
}

static size_t shape(struct ka_verdict *v, enum ka_shape_kind kind, int m, const char *hint)
{
    json_t *dims = json_pack("{s:i,s:i}", "M", m, "N", 37);
    size_t at = ka_verdict_shape(v, kind, dims, hint);
    json_decref(dims);
    return at;
}

/* A case in which both gradients are compared; x may be spoiled. */
static size_t judge(struct ka_verdict *v, size_t at_shape, const struct ka_diff *x)
{
    struct ka_diff ok = right(1e-7);
    size_t at = ka_verdict_case(v, at_shape, "random upstream");
    ka_verdict_gradient(v, at, "x", x ? x : &ok);
    ka_verdict_gradient(v, at, "w", &ok);
    return at;
}

static struct ka_verdict *good(void)
{
    struct ka_verdict *v = ka_verdict_new(GRADS, 2);
    judge(v, shape(v, KA_SHAPE_REQUIRED, 8, NULL), NULL);
    judge(v, shape(v, KA_SHAPE_HIDDEN, 53, "a prime size"), NULL);
    return v;
}

static char *facts(const struct ka_verdict *v)
{
    struct ka_buf text = {0};
    assert_int_equal(ka_verdict_facts(v, 3, &text), 0);
    return ka_buf_steal(&text);
}

/* Frees the verdict and checks its decision. */
static void decide(struct ka_verdict *v, bool verified)
{
    assert_int_equal(ka_verdict_verified(v), verified);
    ka_verdict_free(v);
}

static char *facts_of_labels(const char *const *labels, size_t count)
{
    struct ka_verdict *v = ka_verdict_new(GRADS, 2);
    size_t at = shape(v, KA_SHAPE_REQUIRED, 8, NULL);
    struct ka_diff bad = wrong();
    for (size_t i = 0; i < count; i++)
        ka_verdict_gradient(v, ka_verdict_case(v, at, labels[i]), "x", &bad);
    char *text = facts(v);
    ka_verdict_free(v);
    return text;
}

static void facts__failure_of_one_kind_of_case__says_what_that_means(void **state)
{
    (void)state;
    static const struct {
        const char *label, *words;
    } rows[] = {
        {"normal upstream, transposed upstream",
         "fails only with transposed upstream: axes in another order"},
        {"normal upstream, expanded upstream 1", "stride 0"},
        {"normal upstream, x slice", "fails only with x slice: a part of a wider tensor"},
        {"normal upstream, w flat", "nothing may divide"},
        {"normal upstream, x slice, w flat", "fails only with x slice, w flat."},
        {"none_one upstream", "test for None"},
        {"onehot upstream", "divide by it"},
        {"normal upstream, second backward over the same graph", "the first one used up"},
        {"normal upstream, only x wants a gradient", "ctx.needs_input_grad"},
    };
    for (size_t i = 0; i < KA_COUNT(rows); i++) {
        char *text = facts_of_labels(&rows[i].label, 1);
        assert_non_null(strstr(text, rows[i].words));
        free(text);
    }
}

static void facts__kind_that_another_case_is_right_with__is_not_blamed(void **state)
{
    (void)state;
    struct ka_verdict *v = ka_verdict_new(GRADS, 2);
    size_t at = shape(v, KA_SHAPE_REQUIRED, 8, NULL);
    struct ka_diff bad = wrong(), good_one = right(1e-7);
    ka_verdict_gradient(v, ka_verdict_case(v, at, "normal upstream, x slice, w flat"), "x", &bad);
    ka_verdict_gradient(v, ka_verdict_case(v, at, "normal upstream, x slice, w tied"), "x", &good_one);
    char *text = facts(v);
    assert_non_null(strstr(text, "fails only with w flat: rows that are constant, zero or nearly constant"));
    free(text);
    ka_verdict_free(v);
}

static void facts__failure_with_a_plain_upstream_too__blames_no_kind_of_case(void **state)
{
    (void)state;
    const char *const labels[] = {"normal upstream, transposed upstream", "normal upstream"};
    char *text = facts_of_labels(labels, 2);
    assert_null(strstr(text, "fails only with"));
    free(text);
}

static void verdict__all_shapes_right__is_verified(void **state)
{
    (void)state;
    struct ka_verdict *v = good();
    char *text = facts(v);
    assert_string_equal(text, "");
    free(text);
    decide(v, true);
}

static void verdict__each_kind_of_failure__blocks_only_where_it_must(void **state)
{
    (void)state;
    struct ka_diff bad = wrong();
    const struct {
        enum ka_shape_kind kind;
        bool verified;
    } rows[] = {{KA_SHAPE_REQUIRED, false}, {KA_SHAPE_HIDDEN, false}, {KA_SHAPE_OPTIONAL, true}};
    for (size_t i = 0; i < KA_COUNT(rows); i++) {
        struct ka_verdict *v = good();
        judge(v, shape(v, rows[i].kind, 4, NULL), &bad);
        decide(v, rows[i].verified);
    }
}

static void verdict__nothing_checked__is_not_verified(void **state)
{
    (void)state;
    decide(ka_verdict_new(GRADS, 2), false);
    struct ka_verdict *v = good();
    shape(v, KA_SHAPE_REQUIRED, 9, NULL); /* no case */
    decide(v, false);
    v = ka_verdict_new(GRADS, 2);
    judge(v, shape(v, KA_SHAPE_HIDDEN, 53, NULL), NULL); /* nothing required */
    decide(v, false);
    v = ka_verdict_new(NULL, 0);
    ka_verdict_case(v, shape(v, KA_SHAPE_REQUIRED, 9, NULL), "random upstream");
    decide(v, false);
}

static void verdict__skipped_shapes__never_count_as_passed(void **state)
{
    (void)state;
    const struct {
        enum ka_shape_kind kind;
        bool verified;
    } rows[] = {{KA_SHAPE_REQUIRED, false}, {KA_SHAPE_HIDDEN, true}, {KA_SHAPE_OPTIONAL, true}};
    for (size_t i = 0; i < KA_COUNT(rows); i++) {
        struct ka_verdict *v = good();
        size_t big = shape(v, rows[i].kind, 4096, NULL);
        judge(v, big, NULL); /* a case may have run before memory gave out */
        ka_verdict_skip(v, big, "the oracle needs 9 GB");
        struct ka_verdict_counts n = ka_verdict_count(v);
        assert_int_equal(n.skipped, 1);
        assert_int_equal(n.passed, 1);
        assert_int_equal(n.hidden, 1);
        assert_int_equal(n.hidden_passed, 1);
        assert_int_equal(n.optional, 0);
        decide(v, rows[i].verified);
    }
}

static void verdict__gradient_never_returned_or_only_noise__blocks(void **state)
{
    (void)state;
    struct ka_diff ok = right(1e-7), noise = right(1e8);
    noise.vacuous = true;
    for (int only_noise = 0; only_noise < 2; only_noise++) {
        struct ka_verdict *v = ka_verdict_new(GRADS, 2);
        size_t at = ka_verdict_case(v, shape(v, KA_SHAPE_REQUIRED, 8, NULL), "random upstream");
        ka_verdict_gradient(v, at, "x", &ok);
        if (only_noise)
            ka_verdict_gradient(v, at, "w", &noise);
        char *text = facts(v);
        assert_non_null(strstr(text, only_noise ? "gradient of w is rounding noise"
                                                : "gradient of w was never returned"));
        free(text);
        assert_false(ka_verdict_verified(v));
        ka_verdict_gradient(v, at, "w", &ok);
        decide(v, true);
    }
}

static void verdict__gradient_compared_with_zeros_alone__blocks(void **state)
{
    (void)state;
    struct ka_diff zero = right(0);
    zero.want_zero = zero.nothing = true;
    struct ka_verdict *v = ka_verdict_new(GRADS, 2);
    size_t at = shape(v, KA_SHAPE_REQUIRED, 8, NULL);
    judge(v, at, &zero);
    judge(v, at, &zero);
    char *text = facts(v);
    assert_non_null(strstr(text, "gradient of x was never compared with anything but zero"));
    assert_null(strstr(text, "gradient of w"));
    free(text);
    assert_false(ka_verdict_verified(v));
    judge(v, at, NULL);
    decide(v, true);
}

static void facts__a_cause__stands_without_what_follows_from_it(void **state)
{
    (void)state;
    struct ka_verdict *v = ka_verdict_new(GRADS, 2);
    size_t at = ka_verdict_case(v, shape(v, KA_SHAPE_REQUIRED, 8, NULL), "random upstream");
    ka_verdict_fail(v, at, KA_VERDICT_RAISED, "NameError");
    char *text = facts(v);
    assert_non_null(strstr(text, "NameError"));
    assert_null(strstr(text, "never returned")); /* it had no chance to be */
    free(text);
    ka_verdict_fail_whole(v, "import", "line 3: imports os");
    text = facts(v);
    assert_ptr_equal(strstr(text, "import: line 3"), text);
    assert_null(strstr(text, "never returned")); /* the scan rejected it: nothing was run */
    free(text);
    ka_verdict_free(v);
}

static void facts__required_shape_that_nobody_judged__is_told_with_its_reason(void **state)
{
    (void)state;
    struct ka_verdict *v = ka_verdict_new(GRADS, 2);
    ka_verdict_skip(v, shape(v, KA_SHAPE_REQUIRED, 8, NULL), "the GPU ran out of memory");
    ka_verdict_skip(v, shape(v, KA_SHAPE_HIDDEN, 7, NULL), "of hidden shapes nobody is told");
    char *text = facts(v);
    assert_non_null(strstr(text, "Nothing is said of required shape"));
    assert_non_null(strstr(text, ": the GPU ran out of memory.\n"));
    assert_null(strstr(text, "hidden"));
    assert_null(strstr(text, "never returned")); /* nobody asked for it */
    free(text);
    ka_verdict_free(v);
}

static void facts__what_is_right__is_told_beside_what_is_not(void **state)
{
    (void)state;
    struct ka_verdict *v = ka_verdict_new(GRADS, 2);
    struct ka_diff bad = wrong(), ok = right(1e-7);
    bad.patterns[0] = (struct ka_pattern){.kind = KA_PATTERN_CORRELATION, .value = 0.1};
    size_t at = shape(v, KA_SHAPE_REQUIRED, 8, NULL);
    for (int i = 0; i < 2; i++)
        judge(v, at, NULL);
    size_t one = ka_verdict_case(v, at, "onehot upstream");
    ka_verdict_gradient(v, one, "x", &ok);
    one = ka_verdict_case(v, at, "ones upstream");
    ka_verdict_gradient(v, one, "x", &bad);
    char *text = facts(v);
    assert_non_null(strstr(text,
                           "  Right: the gradient of x in 3 of 4 cases; the gradient of w in every case in "
                           "which it was compared.\n"));
    assert_non_null(strstr(text, "  Nothing failed with: random upstream (2 cases); onehot upstream.\n"));
    assert_null(strstr(text, "formula")); /* the same one is right elsewhere */
    assert_null(strstr(text, "Over all"));
    free(text);
    judge(v, shape(v, KA_SHAPE_REQUIRED, 9, NULL), NULL);
    judge(v, shape(v, KA_SHAPE_HIDDEN, 71, "a prime size"), NULL);
    judge(v, shape(v, KA_SHAPE_HIDDEN, 73, "a prime size"), NULL);
    text = facts(v);
    assert_non_null(strstr(text,
                           "Nothing fails on shape {\"M\": 9, \"N\": 37}; a hidden shape (a prime size: M).\n"
                           "Over all 4 shapes, the gradient of x is right in 6 of 7 cases.\n"
                           "Over all 4 shapes, the gradient of w is right in 5 of 5 cases.\n"));
    free(text);
    for (int i = 0; i < 5; i++)
        judge(v, at, &bad);
    text = facts(v);
    assert_non_null(strstr(text, "formula"));
    free(text);
    ka_verdict_free(v);
}

static void hidden_shape__what_may_be_known_of_an_error__is_told(void **state)
{
    (void)state;
    struct ka_verdict *v = good();
    size_t at = ka_verdict_case(v, shape(v, KA_SHAPE_HIDDEN, 71, "block + 1"), "random upstream");
    ka_verdict_fail_known(v, at, KA_VERDICT_RAISED, "IndexError: 71 is out of range", "IndexError at line 3");
    char *text = facts(v);
    assert_non_null(strstr(text, "(random upstream) raised: IndexError at line 3."));
    assert_null(strstr(text, "71"));
    free(text);
    ka_verdict_free(v);
}

static void verdict__missing_gradient__is_right_only_where_zero_is_expected(void **state)
{
    (void)state;
    struct ka_diff missing = {.reason = KA_DIFF_MISSING, .want_zero = true};
    struct ka_verdict *v = good();
    judge(v, shape(v, KA_SHAPE_REQUIRED, 5, NULL), &missing);
    decide(v, true);
    v = ka_verdict_new(GRADS, 2);
    judge(v, shape(v, KA_SHAPE_REQUIRED, 5, NULL), &missing);
    decide(v, false); /* never returned at all */
    v = good();
    missing.want_zero = false;
    judge(v, shape(v, KA_SHAPE_REQUIRED, 5, NULL), &missing);
    decide(v, false);
    v = good();
    missing.want_zero = true;
    ka_verdict_output(v, 0, 0, &missing);
    decide(v, false); /* an output is never None instead of zeros */
}

static void verdict__broken_rule_or_scan_finding__blocks_and_is_told(void **state)
{
    (void)state;
    struct ka_verdict *v = good();
    ka_verdict_fail(v, 0, "input_modified", "x was changed in place");
    char *text = facts(v);
    assert_non_null(strstr(text, "input_modified: x was changed in place"));
    free(text);
    decide(v, false);
    v = good();
    ka_verdict_fail_whole(v, "torch_computes_gradient", "line 7 calls torch.matmul");
    text = facts(v);
    assert_non_null(strstr(text, "line 7 calls torch.matmul"));
    free(text);
    decide(v, false);
}

static void facts__smallest_failing_shape__comes_first_and_hidden_last(void **state)
{
    (void)state;
    struct ka_verdict *v = ka_verdict_new(GRADS, 2);
    struct ka_diff bad = wrong();
    judge(v, shape(v, KA_SHAPE_HIDDEN, 1, "size 1"), &bad);
    judge(v, shape(v, KA_SHAPE_REQUIRED, 600, NULL), &bad);
    size_t small = shape(v, KA_SHAPE_REQUIRED, 70, NULL);
    judge(v, small, &bad);
    judge(v, small, NULL);
    char *text = facts(v);
    const char *first = strstr(text, "{\"M\": 70"), *second = strstr(text, "{\"M\": 600"),
               *last = strstr(text, "a hidden shape (size 1: M)");
    assert_true(first && second && last && first < second && second < last);
    assert_non_null(strstr(text, "1 of 2 cases fail"));
    free(text);
    ka_verdict_free(v);
}

static void hidden_shape__dims_and_positions__stay_private(void **state)
{
    (void)state;
    struct ka_verdict *v = good();
    struct ka_diff bad = wrong();
    size_t at = judge(v, shape(v, KA_SHAPE_HIDDEN, 71, "block + 1"), &bad);
    ka_verdict_fail(v, at, "candidate_raised", "IndexError: 71 is out of range");
    char *text = facts(v);
    json_t *o = ka_verdict_json(v, false);
    char *shown = json_dumps(o, 0);
    json_decref(o);
    assert_non_null(strstr(text, "a hidden shape (block + 1: M)"));
    assert_non_null(strstr(text, "candidate_raised"));
    *strstr(text, "Nothing fails on shape {\"M\": 8, ") = '\0'; /* the user's own */
    assert_null(strstr(text, "71"));
    assert_null(strstr(text, "37"));
    assert_null(strstr(text, "36"));
    assert_null(strstr(shown, "71"));
    o = ka_verdict_json(v, true);
    char *private = json_dumps(o, 0);
    json_decref(o);
    assert_non_null(strstr(private, "\"M\": 71"));
    assert_non_null(strstr(private, "IndexError: 71"));
    free(text);
    free(shown);
    free(private);
    ka_verdict_free(v);
}

static void json__gradients__carry_the_worst_error_and_its_shape(void **state)
{
    (void)state;
    struct ka_verdict *v = good();
    struct ka_diff worse = right(4e-6), noise = right(1e9);
    noise.vacuous = true;
    judge(v, shape(v, KA_SHAPE_REQUIRED, 11, NULL), &worse);
    judge(v, shape(v, KA_SHAPE_REQUIRED, 12, NULL), &noise);
    json_t *o = ka_verdict_json(v, false), *x = json_array_get(json_object_get(o, "gradients"), 0);
    assert_true(json_is_true(json_object_get(o, "verified")));
    assert_string_equal(json_string_value(json_object_get(x, "name")), "x");
    assert_true(json_real_value(json_object_get(x, "error")) == 4e-6);
    assert_int_equal(json_integer_value(json_object_get(json_object_get(x, "worst_shape"), "M")), 11);
    json_t *rows = json_object_get(o, "per_shape"), *row, *own;
    size_t i, seen = 0;
    json_array_foreach(rows, i, row)
    {
        own = json_array_get(json_object_get(row, "gradients"), 0);
        if (json_integer_value(json_object_get(json_object_get(row, "shape"), "M")) == 11)
            seen += json_real_value(json_object_get(own, "error")) == 4e-6;
        if (strcmp(json_string_value(json_object_get(row, "kind")), "hidden") == 0)
            seen += json_is_string(json_object_get(row, "shape"));
        if (json_integer_value(json_object_get(json_object_get(row, "shape"), "M")) == 12)
            seen += !own || strcmp(json_string_value(json_object_get(own, "name")), "x") != 0; /* noise */
    }
    assert_int_equal(seen, 3);
    json_t *shapes = json_object_get(o, "shapes");
    assert_int_equal(json_integer_value(json_object_get(shapes, "required")), 3);
    assert_int_equal(json_integer_value(json_object_get(shapes, "hidden_passed")), 1);
    json_decref(o);
    struct ka_diff missing = {.reason = KA_DIFF_MISSING};
    judge(v, shape(v, KA_SHAPE_REQUIRED, 13, NULL), &missing);
    o = ka_verdict_json(v, false);
    x = json_array_get(json_object_get(o, "gradients"), 0);
    assert_true(json_is_null(json_object_get(x, "error")));
    assert_int_equal(json_integer_value(json_object_get(json_object_get(x, "worst_shape"), "M")), 13);
    json_decref(o);
    ka_verdict_free(v);
}

static void verdict__repeats__are_reported_and_decide_nothing(void **state)
{
    (void)state;
    struct ka_verdict *v = good();
    ka_verdict_repeated(v, "x", 5, 3e-8, 0.01);
    ka_verdict_repeated(v, "w", 5, 0, 0);
    json_t *doc = ka_verdict_json(v, true), *list = json_object_get(doc, "gradients");
    const json_t *x = json_object_get(json_array_get(list, 0), "repeats");
    const json_t *w = json_object_get(json_array_get(list, 1), "repeats");
    assert_true(json_is_false(json_object_get(x, "bit_for_bit")));
    assert_true(json_number_value(json_object_get(x, "max_abs")) == 3e-8);
    assert_true(json_is_true(json_object_get(w, "bit_for_bit")));
    json_decref(doc);
    decide(v, true);
    v = good();
    doc = ka_verdict_json(v, true);
    assert_true(
        json_is_null(json_object_get(json_array_get(json_object_get(doc, "gradients"), 0), "repeats")));
    json_decref(doc);
    decide(v, true);
}

static void facts__thousands_of_findings__are_cut_short(void **state)
{
    (void)state;
    struct ka_verdict *v = good();
    for (int i = 0; i < 5000; i++)
        ka_verdict_fail_whole(v, "forbidden", i == 99 ? "the last one" : "line 7: uses exec");
    char *text = facts(v);
    assert_non_null(strstr(text, "the last one"));
    assert_non_null(strstr(text, "and more than are listed here"));
    assert_true(strlen(text) < 101 * 60);
    free(text);
    decide(v, false);
}

/* A name, a label and a sentence that end inside a character: wherever the cuts fall, there is a result. */
static void json__text_cut_inside_a_character__is_still_a_result(void **state)
{
    (void)state;
    for (size_t length = 80; length < 180; length++) {
        char cut[200] = {0};
        memset(cut, 'a', length);
        memcpy(cut + length, "\xE2\x82", 2);
        char whole[200];
        snprintf(whole, sizeof(whole), "%s\xAC", cut);
        const char *const names[] = {whole};
        struct ka_diff bad = wrong();
        struct ka_verdict *v = ka_verdict_new(names, 1);
        size_t at_shape = shape(v, KA_SHAPE_HIDDEN, 8, cut), at = ka_verdict_case(v, at_shape, cut);
        ka_verdict_gradient(v, at, whole, &bad);
        ka_verdict_fail(v, at, "raised", cut);
        ka_verdict_fail_whole(v, cut, cut);
        ka_verdict_skip(v, at_shape, cut);
        json_t *doc = ka_verdict_json(v, true);
        assert_non_null(doc);
        assert_int_equal(json_array_size(json_object_get(doc, "failures")), 3);
        json_t *of;
        size_t i;
        json_array_foreach(json_object_get(doc, "failures"), i, of) assert_true(json_is_object(of));
        json_decref(doc);
        char *text = facts(v);
        json_t *said = json_string(text);
        assert_non_null(said);
        json_decref(said);
        free(text);
        decide(v, false);
    }
}

/* Everything that may be told, in cases that do not know of one another. */
static void tell(struct ka_verdict *v, size_t number)
{
    struct ka_diff bad = wrong(), better = right(1e-7 * (double)(number + 1));
    bad.error = 0.25 + 0.125 * (double)number;
    if (number == 4) {
        ka_verdict_skip(v, 2, "too large");
        return;
    }
    size_t at = judge(v, number % 2, number % 3 ? &better : &bad);
    if (number == 1)
        ka_verdict_gradient(v, at, "late", &better);
    if (number == 2) {
        ka_verdict_fail(v, at, "input_modified", "w was written");
        ka_verdict_output(v, at, 1, &bad);
        ka_verdict_repeated(v, "w", 3, 1e-3, 0.5);
    }
    if (number == 3) {
        ka_verdict_fail_whole(v, "race", "two programs");
        ka_verdict_ordered(v, "scan_kernel");
    }
}

static void parts__joined_in_turn__are_what_was_told_in_turn(void **state)
{
    (void)state;
    struct ka_verdict *all = ka_verdict_new(GRADS, 2), *joined = ka_verdict_new(GRADS, 2), *parts[6];
    for (struct ka_verdict **v = (struct ka_verdict *[]){all, joined, NULL}; *v; v++) {
        shape(*v, KA_SHAPE_REQUIRED, 8, NULL);
        shape(*v, KA_SHAPE_HIDDEN, 53, "a prime size");
        shape(*v, KA_SHAPE_OPTIONAL, 1024, NULL);
    }
    for (size_t i = 0; i < KA_COUNT(parts); i++)
        tell(all, i);
    for (size_t i = KA_COUNT(parts); i-- > 0;) {
        parts[i] = ka_verdict_part(joined);
        tell(parts[i], i);
    }
    for (size_t i = 0; i < KA_COUNT(parts); i++)
        ka_verdict_join(joined, parts[i]);
    json_t *want = ka_verdict_json(all, true), *got = ka_verdict_json(joined, true);
    assert_true(json_equal(want, got));
    assert_int_equal(json_array_size(json_object_get(got, "gradients")), 3);
    json_decref(want);
    json_decref(got);
    char *text = facts(all), *other = facts(joined);
    assert_string_equal(text, other);
    free(text);
    free(other);
    ka_verdict_free(all);
    ka_verdict_free(joined);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(parts__joined_in_turn__are_what_was_told_in_turn),
        cmocka_unit_test(verdict__repeats__are_reported_and_decide_nothing),
        cmocka_unit_test(facts__failure_of_one_kind_of_case__says_what_that_means),
        cmocka_unit_test(facts__failure_with_a_plain_upstream_too__blames_no_kind_of_case),
        cmocka_unit_test(facts__kind_that_another_case_is_right_with__is_not_blamed),
        cmocka_unit_test(verdict__all_shapes_right__is_verified),
        cmocka_unit_test(verdict__each_kind_of_failure__blocks_only_where_it_must),
        cmocka_unit_test(verdict__nothing_checked__is_not_verified),
        cmocka_unit_test(verdict__skipped_shapes__never_count_as_passed),
        cmocka_unit_test(verdict__gradient_never_returned_or_only_noise__blocks),
        cmocka_unit_test(verdict__gradient_compared_with_zeros_alone__blocks),
        cmocka_unit_test(facts__what_is_right__is_told_beside_what_is_not),
        cmocka_unit_test(hidden_shape__what_may_be_known_of_an_error__is_told),
        cmocka_unit_test(verdict__missing_gradient__is_right_only_where_zero_is_expected),
        cmocka_unit_test(verdict__broken_rule_or_scan_finding__blocks_and_is_told),
        cmocka_unit_test(facts__smallest_failing_shape__comes_first_and_hidden_last),
        cmocka_unit_test(hidden_shape__dims_and_positions__stay_private),
        cmocka_unit_test(facts__a_cause__stands_without_what_follows_from_it),
        cmocka_unit_test(facts__required_shape_that_nobody_judged__is_told_with_its_reason),
        cmocka_unit_test(facts__thousands_of_findings__are_cut_short),
        cmocka_unit_test(json__text_cut_inside_a_character__is_still_a_result),
        cmocka_unit_test(json__gradients__carry_the_worst_error_and_its_shape),
    };
    return cmocka_run_group_tests_name("verdict", tests, NULL, NULL);
}
