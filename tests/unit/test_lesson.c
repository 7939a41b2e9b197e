/* What a lesson is made of: kinds of findings, findings without places, short changes. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "agent/core/lesson.h"

static void assert_kind(const char *verdict, const char *want)
{
    KA_AUTO_BUF struct ka_buf kind = {0};
    json_auto_t *doc = json_loads(verdict, 0, NULL);
    ka_lesson_kind(doc, &kind);
    assert_string_equal(ka_buf_str(&kind), want);
}

#define FAILS(failures) "{\"verified\": false, \"failures\": [" failures "]}"
#define RAISED(message) "{\"shape\": null, \"rule\": \"raised\", \"text\": \"raised: " message "\"}"
#define OFF(label, pattern)                                                                                  \
    "{\"case\": \"" label "\", \"rule\": \"values\", \"tensor\": \"the gradient of x\","                     \
    " \"facts\": {\"patterns\": [{\"kind\": \"" pattern "\"}, {\"kind\": \"rounding\"}]}}"

static void kind__first_finding__names_rule_and_what_is_wrong(void **state)
{
    (void)state;
    assert_kind(FAILS(RAISED("TypeError: no\\nline 3")), "raised, TypeError");
    assert_kind(FAILS(RAISED("Size_127: no")), "raised, an exception");
    assert_kind(FAILS(RAISED("TypeError: no") "," OFF("normal upstream", "sign")), "raised, TypeError");
    assert_kind(FAILS("{\"rule\": \"syntax\", \"text\": \"syntax: no\"}"), "syntax");
    assert_kind(FAILS(OFF("normal upstream", "last_tile")), "wrong gradient, last_tile");
    assert_kind(FAILS(OFF("x transposed", "factor")), "wrong gradient, factor, plain cases right");
    assert_kind(FAILS(OFF("x transposed", "factor") "," OFF("normal upstream", "factor")),
                "wrong gradient, factor");
    assert_kind(FAILS("{\"rule\": \"shape\", \"tensor\": \"output 1\", \"facts\": {\"patterns\": []}}"),
                "wrong output, shape");
    assert_kind(FAILS(""), "unproved");
    assert_kind("{\"verified\": true, \"failures\": []}", "");
    assert_kind("[3]", "unproved");
    assert_kind(FAILS("3"), "");
}

static void assert_finding(const char *facts, const char *want)
{
    KA_AUTO_BUF struct ka_buf finding = {0};
    ka_lesson_finding(facts, &finding);
    assert_string_equal(ka_buf_str(&finding), want);
}

static void finding__places_and_quoted_code__are_left_out(void **state)
{
    (void)state;
    assert_finding("raised: TypeError: no 'to'\n  line 7 of the forward, `x = secret`, in f:\n",
                   "raised: TypeError: no 'to'");
    assert_finding("syntax: line 7 of the backward part, `x = `: invalid syntax\n", "syntax: invalid syntax");
    assert_finding("On shape {\"M\": 3}, 1 of 2 cases fail:\n- (ones) wrong at line 12 of the forward, "
                   "`y = x`, and on.\n- more\n",
                   "(ones) wrong at , and on.");
    assert_finding("line 7 of the forward, `never closed", ", `never closed");
    assert_finding("an outline 7 is no place; line x of the forward\x1b[2J",
                   "an outline 7 is no place; line x of the forward [2J");
    assert_finding("- (ones) the gradient of w is wrong. Norm-relative error 0.8, allowed 1e-05 (eager "
                   "PyTorch: 6.77e-08). 24 of 24 elements are off (100%). Worst at index [1]: found -0.1, "
                   "expected 3.99. It points the right way. 3 of 4",
                   "(ones) the gradient of w is wrong. It points the right way.");
    assert_finding("", "");
}

static void assert_change(const char *wrong, const char *mended, const char *want)
{
    KA_AUTO_BUF struct ka_buf change = {0};
    assert_int_equal(ka_lesson_change(wrong, mended, &change), want != NULL);
    assert_string_equal(ka_buf_str(&change), want ? want : "");
}

static void change__few_lines__stand_without_comments_and_blank_lines(void **state)
{
    (void)state;
    assert_change("a\nb\nc\nd\n", "a\n    B\n# why\n\nc\nD\n", "-b\n+    B\n..\n-d\n+D\n");
    assert_change("a\n", "a\n# a comment\n\n", NULL);
    assert_change("a\n", "a\n", NULL);
    assert_change("a\n", "a\n```\n", NULL);
}

static void change__of_many_lines__is_none(void **state)
{
    (void)state;
    KA_AUTO_BUF struct ka_buf most = {0}, told = {0};
    for (int i = 0; i < KA_LESSON_LINES; i++) {
        ka_buf_printf(&most, "line %d\n", i);
        ka_buf_printf(&told, "+line %d\n", i);
    }
    assert_change("", ka_buf_str(&most), ka_buf_str(&told));
    ka_buf_puts(&most, "one more\n");
    assert_change("", ka_buf_str(&most), NULL);
    KA_AUTO_BUF struct ka_buf a = {0}, b = {0};
    for (int i = 0; i < 3000; i++) {
        ka_buf_printf(&a, "a%d\n", i);
        ka_buf_printf(&b, "b%d\n", i);
    }
    assert_change(ka_buf_str(&a), ka_buf_str(&b), NULL);
}

static void change__long_line__is_cut(void **state)
{
    (void)state;
    KA_AUTO_BUF struct ka_buf change = {0};
    char line[402];
    memset(line, 'x', 400);
    strcpy(line + 400, "\n");
    assert_true(ka_lesson_change("", line, &change));
    assert_in_range(change.len, 100, 130);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(kind__first_finding__names_rule_and_what_is_wrong),
        cmocka_unit_test(finding__places_and_quoted_code__are_left_out),
        cmocka_unit_test(change__few_lines__stand_without_comments_and_blank_lines),
        cmocka_unit_test(change__of_many_lines__is_none),
        cmocka_unit_test(change__long_line__is_cut),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
