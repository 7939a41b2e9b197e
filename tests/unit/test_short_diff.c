/* Short differences of texts. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "agent/core/short_diff.h"

static void assert_diff(const char *before, const char *after, size_t most, const char *want)
{
    struct ka_buf out = {0};
    ka_short_diff(before, after, most, &out);
    assert_string_equal(ka_buf_str(&out), want);
    ka_buf_free(&out);
}

static void diff__changed_lines__stand_without_their_context(void **state)
{
    (void)state;
    assert_diff("a\nb\nc\nd\ne\n", "a\nB\nc\nd\nE\n", 9, "-b\n+B\n..\n-e\n+E\n");
    assert_diff("a\nb\n", "a\nx\nb\n", 9, "+x\n");
    assert_diff("a\nx\nb", "a\nb\n", 9, "-x\n");
    assert_diff("", "a\n", 9, "+a\n");
    assert_diff("same\n", "same\n", 9, "");
}

static void diff__more_lines_than_wanted__are_counted(void **state)
{
    (void)state;
    assert_diff("a\nb\nc\n", "x\ny\n", 2, "-a\n-b\n.. and 3 more lines\n");
}

static void diff__texts_without_end__are_told_in_numbers(void **state)
{
    (void)state;
    struct ka_buf a = {0}, b = {0};
    for (int i = 0; i < 3000; i++) {
        ka_buf_printf(&a, "a%d\n", i);
        ka_buf_printf(&b, "b%d\n", i);
    }
    assert_diff(ka_buf_str(&a), ka_buf_str(&b), 5, ".. 3000 lines became 3000 others\n");
    ka_buf_free(&a);
    ka_buf_free(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(diff__changed_lines__stand_without_their_context),
        cmocka_unit_test(diff__more_lines_than_wanted__are_counted),
        cmocka_unit_test(diff__texts_without_end__are_told_in_numbers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
