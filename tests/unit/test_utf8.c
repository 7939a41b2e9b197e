/* UTF-8 checking and cleaning. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>
#include <cmocka.h>

#include "base/utf8.h"

static void utf8__sequences__are_valid_or_not_as_unicode_says(void **state)
{
    (void)state;
    static const struct {
        const char *bytes;
        size_t length;
    } cases[] = {
        {"a", 1},
        {"\x7F", 1},
        {"\xC3\xA9", 2},
        {"\xE2\x82\xAC", 3},
        {"\xF0\x9F\x98\x80", 4},
        {"\xF4\x8F\xBF\xBF", 4},
        {"\x80", 0},             /* a continuation alone */
        {"\xC3", 0},             /* cut short */
        {"\xC0\xAF", 0},         /* overlong */
        {"\xE0\x80\xAF", 0},     /* overlong */
        {"\xF0\x80\x80\xAF", 0}, /* overlong */
        {"\xED\xA0\x80", 0},     /* a surrogate */
        {"\xF4\x90\x80\x80", 0}, /* past the last code point */
        {"\xF5\x80\x80\x80", 0},
        {"\xE2\x28\xA1", 0},
        {"", 0},
    };
    for (size_t i = 0; i < KA_COUNT(cases); i++)
        assert_int_equal(ka_utf8_sequence(cases[i].bytes, strlen(cases[i].bytes)), cases[i].length);
}

static void utf8__repair__replaces_each_bad_byte_and_keeps_the_rest(void **state)
{
    (void)state;
    static const struct {
        const char *bytes, *want;
    } cases[] = {
        {"", ""},
        {"plain", "plain"},
        {"\xC3\xA9", "\xC3\xA9"},
        {"\xFF", "\xEF\xBF\xBD"},
        {"a\xFF\xFE"
         "b",
         "a\xEF\xBF\xBD\xEF\xBF\xBD"
         "b"},
        {"ab\xC3", "ab\xEF\xBF\xBD"},
    };
    for (size_t i = 0; i < KA_COUNT(cases); i++) {
        struct ka_buf out = {0};
        assert_int_equal(ka_utf8_repair(cases[i].bytes, strlen(cases[i].bytes), &out), 0);
        assert_string_equal(ka_buf_str(&out), cases[i].want);
        ka_buf_free(&out);
    }
}

static void utf8__line__is_one_line_without_controls_cut_between_characters(void **state)
{
    (void)state;
    static const struct {
        const char *bytes;
        size_t size;
        const char *want;
    } cases[] = {
        {" a\r\n\tb \x1B[0m", 40, "a b [0m"},
        {"x\xC2\x9By", 40, "x y"},
        {"bad\xFF!", 40, "bad?!"},
        {"1234", 4, "123"},
        {"12\xC3\xA9", 4, "12"},
        {"12\xC3\xA9", 5, "12\xC3\xA9"},
        {"\n\n", 4, ""},
        {"abc", 1, ""},
    };
    for (size_t i = 0; i < KA_COUNT(cases); i++) {
        char line[40];
        ka_utf8_line(cases[i].bytes, strlen(cases[i].bytes), line, cases[i].size);
        assert_string_equal(line, cases[i].want);
    }
}

static void utf8__clean__drops_a_cut_character_and_replaces_other_bad_bytes(void **state)
{
    (void)state;
    static const struct {
        const char *bytes, *want;
    } cases[] = {
        {"", ""},
        {"ab\xC3\xA9", "ab\xC3\xA9"},
        {"ab\xC3", "ab"},
        {"ab\xE2\x82", "ab"},
        {"ab\xF0\x9F\x98", "ab"},
        {"ab\xE2\x82: c", "ab??: c"},
        {"\x80\xC0z", "??z"},
        {"\xED\xA0\x80", "???"},
    };
    for (size_t i = 0; i < KA_COUNT(cases); i++) {
        char text[16];
        strcpy(text, cases[i].bytes);
        assert_string_equal(ka_utf8_clean(text), cases[i].want);
    }
    assert_null(ka_utf8_clean(NULL));
}

static void utf8__clean_json__mends_what_a_strict_reader_refuses(void **state)
{
    (void)state;
    static const struct {
        const char *bytes, *want;
    } cases[] = {
        {"\"a\\ud83d\\ude00\\n\"", "\"a\\ud83d\\ude00\\n\""},
        {"\"\\ud83d\"", "\"\\ufffd\""},
        {"\"\\uD83D\\u0041\"", "\"\\ufffd\\u0041\""},
        {"\"\\udc80\"", "\"\\ufffd\""},
        {"\"\\u0000\"", "\"\\ufffd\""},
        {"\"\\\\ud83d\"", "\"\\\\ud83d\""}, /* a backslash and six letters */
        {"\"\xC3\"", "\"?\""},
        {"\"\\ud8", "\"\\ud8"},
        {"\\", "\\"},
    };
    for (size_t i = 0; i < KA_COUNT(cases); i++) {
        char text[32];
        strcpy(text, cases[i].bytes);
        ka_utf8_clean_json(text, strlen(text));
        assert_string_equal(text, cases[i].want);
    }
}

/* "aa..." of `length` bytes in front of three euro signs. */
static const char *euros_after(size_t length, char out[static 4096])
{
    memset(out, 'a', length);
    strcpy(out + length, "\xE2\x82\xAC\xE2\x82\xAC\xE2\x82\xAC");
    return out;
}

static bool is_valid(const char *text)
{
    size_t left = strlen(text);
    for (size_t step; left; text += step, left -= step)
        if (!(step = ka_utf8_sequence(text, left)))
            return false;
    return true;
}

static void fail__message_cut_anywhere__is_valid(void **state)
{
    (void)state;
    char text[4096];
    for (size_t length = 1010; length < 1024; length++) {
        struct ka_err err;
        assert_int_equal(ka_fail(&err, -3, "%s", euros_after(length, text)), -3);
        assert_true(is_valid(err.msg) && strlen(err.msg) >= length);
    }
    for (size_t length = 890; length < 901; length++) {
        struct ka_err err;
        ka_fail(&err, 0, "%.900s: and more", euros_after(length, text));
        assert_true(is_valid(err.msg) && strstr(err.msg, ": and more"));
    }
}

static void buf__text_cut_by_a_precision__is_valid_and_other_bytes_stay(void **state)
{
    (void)state;
    char text[4096];
    for (size_t length = 290; length < 301; length++) {
        struct ka_buf out = {0};
        ka_buf_puts(&out, "\xFF");
        ka_buf_printf(&out, "%.300s", euros_after(length, text));
        assert_true(is_valid(out.data + 1) && out.len == strlen(out.data) && out.len >= length);
        ka_buf_printf(&out, ": %s\xE9%d", "\xE9", 7);
        assert_true(*out.data == '\xFF' && ka_ends_with(out.data, ": \xE9\xE9"
                                                                  "7"));
        ka_buf_printf(&out, "%.*s%.1f", 1, "\xE9", 0.5);
        assert_true(ka_ends_with(out.data, "\xE9"
                                           "0.5"));
        ka_buf_free(&out);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(utf8__sequences__are_valid_or_not_as_unicode_says),
        cmocka_unit_test(utf8__repair__replaces_each_bad_byte_and_keeps_the_rest),
        cmocka_unit_test(utf8__line__is_one_line_without_controls_cut_between_characters),
        cmocka_unit_test(utf8__clean__drops_a_cut_character_and_replaces_other_bad_bytes),
        cmocka_unit_test(utf8__clean_json__mends_what_a_strict_reader_refuses),
        cmocka_unit_test(fail__message_cut_anywhere__is_valid),
        cmocka_unit_test(buf__text_cut_by_a_precision__is_valid_and_other_bytes_stay),
    };
    return cmocka_run_group_tests_name("utf8", tests, NULL, NULL);
}
