/* Pairs: composing and splitting, and the one import that a finished pair does not keep. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "agent/core/compose.h"

static struct ka_buf out, back;
static struct ka_err err;

static int free_out(void **state)
{
    (void)state;
    ka_buf_free(&out);
    ka_buf_free(&back);
    return 0;
}

static int compose(const char *forward, const char *backward)
{
    ka_buf_clear(&out);
    err.msg[0] = '\0';
    return ka_compose_pair(forward, backward, &out, &err);
}

static void assert_says(const char *part)
{
    if (!strstr(err.msg, part))
        fail_msg("'%s' is not in '%s'", part, err.msg);
}

static void compose__import_of_autodiff__becomes_the_marker_function(void **state)
{
    (void)state;
    assert_int_equal(compose("import torch\nfrom kernel_agent import autodiff\nx = 1\n\n\n", "\n\ny = 2\n\n"),
                     0);
    assert_string_equal(ka_buf_str(&out),
                        "import torch\n\n\n"
                        "def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent\n"
                        "    return lambda stub: stub\n\n\n"
                        "x = 1\n"
                        "\n\n# ---- backward ----\n\n\n"
                        "y = 2\n");
}

static void compose__older_spelling_of_the_argument__is_taken_by_the_marker_function(void **state)
{
    (void)state;
    assert_int_equal(
        compose("from kernel_agent import autodiff\n@autodiff(idxs_buffers=(0,))\ndef f(x): pass\n",
                "y = 2\n"),
        0);
    assert_non_null(
        strstr(ka_buf_str(&out), "def autodiff(inputs_require_grad=(), idxs_buffers=()):  # marks"));
}

static void compose__every_spelling_of_the_import__is_replaced(void **state)
{
    (void)state;
    static const char *const imports[] = {
        "from kernel_agent.autodiff import autodiff",
        "from kernel_agent import autodiff  # the decorator",
        "from   kernel_agent\timport (autodiff)",
        "from kernel_agent import autodiff\r",
    };
    for (size_t i = 0; i < KA_COUNT(imports); i++) {
        assert_int_equal(compose(imports[i], "y"), 0);
        assert_true(ka_starts_with(ka_buf_str(&out), "def autodiff(inputs_require_grad=()):"));
        assert_null(strstr(ka_buf_str(&out), "import"));
    }
    assert_int_equal(compose("from kernel_agent import autodiff as grad", "y"), 0);
    assert_true(ka_starts_with(ka_buf_str(&out), "def grad(inputs_require_grad=()):"));
}

static void compose__indented_import__keeps_its_indentation(void **state)
{
    (void)state;
    assert_int_equal(
        compose("try:\n    from kernel_agent import autodiff\nexcept ImportError:\n    raise\n", "y"), 0);
    assert_non_null(strstr(ka_buf_str(&out),
                           "try:\n    def autodiff(inputs_require_grad=()):  # marks the stub for "
                           "kernel-agent\n        return lambda stub: stub\nexcept"));
}

static void compose__other_use_of_the_package__is_an_error_with_its_line(void **state)
{
    (void)state;
    static const char *const imports[] = {
        "import kernel_agent",
        "import torch, kernel_agent as ka",
        "import kernel_agent.autodiff",
        "from kernel_agent import autodiff, differentiate",
        "from kernel_agent.differentiate import rule",
        "from kernel_agent import *",
        "from kernel_agent import autodiff as",
    };
    for (size_t i = 0; i < KA_COUNT(imports); i++) {
        char forward[200];
        snprintf(forward, sizeof(forward), "import torch\n\n%s\n", imports[i]);
        assert_int_equal(compose(forward, "y"), -EINVAL);
        assert_says("line 3");
        assert_int_equal(out.len, 0);
    }
}

static void compose__mention_in_a_string_or_comment__is_left_alone(void **state)
{
    (void)state;
    const char *forward =
        "\"\"\"Use it:\n\nimport kernel_agent\n\"\"\"\n# import kernel_agent\nimport kernel_agents\n"
        "s = 'it''s' \"\\\"\"  # \"\"\"\n"
        "from kernel_agents import autodiff\n";
    assert_int_equal(compose(forward, "y"), 0);
    assert_true(ka_starts_with(ka_buf_str(&out), forward));
    /* the string is closed on its line, so the import below it is code */
    assert_int_equal(compose("s = \"\"\"a\\\"\"\"\"\nimport kernel_agent\n", "y"), -EINVAL);
}

static void compose__composed_split_composed__is_the_same(void **state)
{
    (void)state;
    struct ka_buf front = {0}, again = {0};
    assert_int_equal(compose("\nfrom kernel_agent import autodiff\nx = 1\r\n", "def f():\n\n    pass"), 0);
    assert_int_equal(ka_compose_split(ka_buf_str(&out), &front, &back, &err), 0);
    assert_string_equal(ka_buf_str(&back), "def f():\n\n    pass\n");
    assert_true(ka_ends_with(ka_buf_str(&front), "\nx = 1\n"));
    assert_int_equal(ka_compose_pair(ka_buf_str(&front), ka_buf_str(&back), &again, &err), 0);
    assert_string_equal(ka_buf_str(&again), ka_buf_str(&out));
    ka_buf_free(&front);
    ka_buf_free(&again);
}

static void compose__forward_that_is_a_pair__loses_its_old_backward(void **state)
{
    (void)state;
    assert_int_equal(compose("x = 1\n\n# ---- backward ----\nold = 2\n", "new = 3"), 0);
    assert_string_equal(ka_buf_str(&out), "x = 1\n\n\n# ---- backward ----\n\n\nnew = 3\n");
}

static void compose__split_without_marker__is_an_error(void **state)
{
    (void)state;
    assert_int_equal(ka_compose_split("x = 1\n", &out, &back, &err), -ENOENT);
    assert_says(KA_MARKER);
    assert_int_equal(out.len, 0);
}

static void compose__forward_lines__count_the_marker(void **state)
{
    (void)state;
    assert_int_equal(ka_compose_forward_lines("a\nb\n# ---- backward ----\nc\n"), 3);
    assert_int_equal(ka_compose_forward_lines("# ---- backward ----"), 1);
    assert_int_equal(ka_compose_forward_lines("a\nb\n"), 0);
}

static void compose__loose_marker__allows_other_dashes_only(void **state)
{
    (void)state;
    assert_string_equal(ka_compose_after_marker("a\n#--- Backward ---\nb", true), "b");
    assert_string_equal(ka_compose_after_marker("# ===== BACKWARD\nb", true), "b");
    assert_null(ka_compose_after_marker("a\n#--- Backward ---\nb", false));
    assert_null(ka_compose_after_marker("# backward\nb", true));
    assert_null(ka_compose_after_marker("# ---- backward kernels ----\nb", true));
    assert_null(ka_compose_after_marker("---- backward ----\nb", true));
}

int main(void)
{
#define TEST(name) cmocka_unit_test_teardown(name, free_out)
    const struct CMUnitTest tests[] = {
        TEST(compose__older_spelling_of_the_argument__is_taken_by_the_marker_function),
        TEST(compose__import_of_autodiff__becomes_the_marker_function),
        TEST(compose__every_spelling_of_the_import__is_replaced),
        TEST(compose__indented_import__keeps_its_indentation),
        TEST(compose__other_use_of_the_package__is_an_error_with_its_line),
        TEST(compose__mention_in_a_string_or_comment__is_left_alone),
        TEST(compose__composed_split_composed__is_the_same),
        TEST(compose__forward_that_is_a_pair__loses_its_old_backward),
        TEST(compose__split_without_marker__is_an_error),
        TEST(compose__forward_lines__count_the_marker),
        TEST(compose__loose_marker__allows_other_dashes_only),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
