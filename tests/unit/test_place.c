/* Places: a pair's lines by the numbers that the model sees, and no path. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "agent/core/compose.h"
#include "agent/core/place.h"

static const char FORWARD[] =
    "\nimport torch\nfrom kernel_agent import autodiff\n\ndef f(x):\n    return x\n";
static const char BACKWARD[] = "def g(dy):\n\n    return dy.t\n";

static char *pair(void)
{
    struct ka_buf out = {0};
    assert_int_equal(ka_compose_pair(FORWARD, BACKWARD, &out, NULL), 0);
    return ka_buf_steal(&out);
}

/* The number of the line of `text` that is `line`. */
static json_int_t number_of(const char *text, const char *line)
{
    const char *at = strstr(text, line);
    json_int_t number = 1;
    assert_non_null(at);
    for (const char *c = text; c < at; c++)
        number += *c == '\n';
    return number;
}

static void assert_told(const struct ka_place *place, json_int_t line, const char *want)
{
    struct ka_buf out = {0};
    ka_place_line(place, line, &out);
    assert_string_equal(ka_buf_str(&out), want);
    ka_buf_free(&out);
}

static void place__line__has_the_number_that_the_model_sees(void **state)
{
    (void)state;
    KA_AUTO_FREE char *text = pair();
    const struct ka_place place = {.pair = text, .forward = FORWARD};
    assert_told(&place, number_of(text, "def g"), "line 1 of the backward part, `def g(dy):`");
    assert_told(&place, number_of(text, "    return dy.t"), "line 3 of the backward part, `return dy.t`");
    assert_told(&place, number_of(text, "import torch"), "line 2 of the forward, `import torch`");
    assert_told(&place, number_of(text, "    return x"), "line 6 of the forward, `return x`");
    assert_told(&place, number_of(text, "    return lambda"),
                "a line of the forward, `return lambda stub: stub`");
    assert_told(&place, 0, "");
    assert_told(&place, 1000, "");
}

static void place__numbered_text__agrees_with_it(void **state)
{
    (void)state;
    struct ka_buf out = {0};
    ka_place_number(BACKWARD, &out);
    assert_string_equal(ka_buf_str(&out), "   1| def g(dy):\n   2|\n   3|     return dy.t\n");
    ka_buf_clear(&out);
    ka_place_number("\n\na\n\n\n", &out);
    assert_string_equal(ka_buf_str(&out), "   3| a\n");
    ka_buf_clear(&out);
    ka_place_number("", &out);
    assert_string_equal(ka_buf_str(&out), "");
    ka_buf_free(&out);
}

static char *error_of(const char *text, const char *message, bool hidden, bool whole)
{
    KA_AUTO_BUF struct ka_buf trace = {0}, out = {0};
    json_int_t line = number_of(text, "    return dy.t");
    ka_buf_printf(&trace,
                  "  File \"/srv/kernels/3.py\", line %lld, in g\n    return dy.t\n           ^^^^\n%s\n",
                  (long long)line, message);
    json_auto_t *error =
        json_pack("{s:s, s:I, s:s}", "message", message, "line", line, "traceback", ka_buf_str(&trace));
    const struct ka_place place = {text, FORWARD, whole};
    (hidden ? ka_place_hidden_error : ka_place_error)(&place, error, &out);
    return ka_buf_steal(&out);
}

static void place__traceback__has_places_and_no_path(void **state)
{
    (void)state;
    KA_AUTO_FREE char *text = pair();
    KA_AUTO_FREE char *told = error_of(text, "OSError: no '/srv/kernels/x/y.so' for 8 / 2 / 1", false, false);
    assert_string_equal(told, "OSError: no 'y.so' for 8 / 2 / 1\n"
                              "  line 3 of the backward part, in g:\n    return dy.t\n           ^^^^\n"
                              "OSError: no 'y.so' for 8 / 2 / 1\n");
    KA_AUTO_FREE char *own = error_of(text, "OSError: no", false, true);
    assert_non_null(strstr(own, "File \"/srv/kernels/3.py\", line")); /* for whoever has the file */
}

static void place__error_on_a_hidden_shape__tells_type_and_line_alone(void **state)
{
    (void)state;
    KA_AUTO_FREE char *text = pair();
    KA_AUTO_FREE char *told = error_of(text, "ValueError: size 71", true, false);
    assert_string_equal(told, "ValueError at line 3 of the backward part, `return dy.t`");
    KA_AUTO_FREE char *secret = error_of(text, "Size71Error: x", true, false);
    assert_string_equal(secret, "an exception at line 3 of the backward part, `return dy.t`");
}

static void place__sentence_of_the_process__names_lines_as_they_are_seen(void **state)
{
    (void)state;
    KA_AUTO_FREE char *text = pair();
    const struct ka_place place = {.pair = text, .forward = FORWARD}, own = {.pair = text, .whole = true};
    KA_AUTO_FREE char *said =
        ka_format("g (line %lld): online 3, line x, line 99", (long long)number_of(text, "def g"));
    KA_AUTO_BUF struct ka_buf told = {0}, kept = {0};
    ka_place_retell(&place, said, &told);
    assert_string_equal(ka_buf_str(&told), "g (line 1 of the backward part): online 3, line x, line 99");
    ka_place_retell(&own, said, &kept);
    assert_string_equal(ka_buf_str(&kept), said);
}

static void place__endless_message__is_cut(void **state)
{
    (void)state;
    struct ka_buf many = {0}, out = {0};
    const struct ka_place place = {.pair = "x\n"};
    for (int i = 0; i < 100000; i++)
        ka_buf_puts(&many, "line 1 ");
    json_auto_t *error =
        json_pack("{s:s, s:s}", "message", ka_buf_str(&many), "traceback", ka_buf_str(&many));
    ka_place_error(&place, error, &out);
    assert_in_range(out.len, 1000, 6000);
    ka_buf_clear(&out);
    ka_place_retell(&place, ka_buf_str(&many), &out);
    assert_in_range(out.len, 1000, 20000);
    ka_buf_free(&many);
    ka_buf_free(&out);
}

static void place__anything_else__is_told_as_far_as_it_goes(void **state)
{
    (void)state;
    struct ka_buf out = {0};
    const struct ka_place place = {.pair = "x\n"};
    ka_place_error(&place, NULL, &out);
    assert_string_equal(ka_buf_str(&out), "an error without a message");
    ka_buf_clear(&out);
    json_auto_t *odd =
        json_pack("{s:s, s:s}", "message", "m", "traceback", "  File \"x\", line\n  File \"y\", line 9\n");
    ka_place_error(&place, odd, &out);
    assert_string_equal(ka_buf_str(&out), "m\n  File \"x\", line\n  another place:\n");
    ka_buf_clear(&out);
    ka_place_hidden_error(&place, NULL, &out);
    assert_string_equal(ka_buf_str(&out), "an exception");
    ka_buf_free(&out);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(place__line__has_the_number_that_the_model_sees),
        cmocka_unit_test(place__numbered_text__agrees_with_it),
        cmocka_unit_test(place__traceback__has_places_and_no_path),
        cmocka_unit_test(place__error_on_a_hidden_shape__tells_type_and_line_alone),
        cmocka_unit_test(place__sentence_of_the_process__names_lines_as_they_are_seen),
        cmocka_unit_test(place__endless_message__is_cut),
        cmocka_unit_test(place__anything_else__is_told_as_far_as_it_goes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
