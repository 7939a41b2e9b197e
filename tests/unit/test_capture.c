/* What is kept of a child's output. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <jansson.h>
#include <string.h>

#include "agent/io/capture.h"

static void capture__short_output__is_kept_whole(void **state)
{
    (void)state;
    struct ka_capture c = {.half = 4};
    struct ka_buf out = {0};
    ka_capture_add(&c, "abcdef", 6);
    assert_int_equal(ka_capture_text(&c, &out), 0);
    assert_string_equal(ka_buf_str(&out), "abcdef");
    ka_buf_free(&out);
    ka_capture_free(&c);
}

static void capture__long_output__drops_the_middle(void **state)
{
    static const size_t steps[] = {1, 3, 7, 26};
    (void)state;
    for (size_t i = 0; i < KA_COUNT(steps); i++) {
        struct ka_capture c = {.half = 4};
        struct ka_buf out = {0};
        const char *text = "abcdefghijklmnopqrstuvwx\0z";
        for (size_t at = 0; at < 26; at += steps[i])
            ka_capture_add(&c, text + at, 26 - at < steps[i] ? 26 - at : steps[i]);
        assert_int_equal(ka_capture_text(&c, &out), 0);
        assert_string_equal(ka_buf_str(&out), "abcd\n[... 18 bytes left out ...]\nwx?z");
        ka_buf_free(&out);
        ka_capture_free(&c);
    }
}

static void capture__characters_cut_at_the_gap__leave_valid_text(void **state)
{
    (void)state;
    for (size_t shift = 0; shift < 3; shift++) {
        struct ka_capture c = {.half = 4};
        struct ka_buf out = {0};
        ka_capture_add(&c, "xy", shift);
        for (int i = 0; i < 9; i++)
            ka_capture_add(&c, "\xE2\x82\xAC", 3);
        assert_int_equal(ka_capture_text(&c, &out), 0);
        json_t *text = json_string(ka_buf_str(&out)); /* NULL for what is no UTF-8 */
        assert_non_null(text);
        assert_non_null(strstr(ka_buf_str(&out), "\xE2\x82\xAC"));
        json_decref(text);
        ka_buf_free(&out);
        ka_capture_free(&c);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(capture__short_output__is_kept_whole),
        cmocka_unit_test(capture__long_output__drops_the_middle),
        cmocka_unit_test(capture__characters_cut_at_the_gap__leave_valid_text),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
