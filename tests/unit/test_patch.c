/* Patches: what applies, and what is refused with which sentence. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "agent/core/patch.h"

/* Three protected lines, then two functions that share a line. */
static const char TEXT[] = "import triton\n"
                           "x = 1\n"
                           "# ---- backward ----\n"
                           "def first(a):\n"
                           "    s = a + 1\n"
                           "    return s\n"
                           "\n"
                           "\n"
                           "def second(a):\n"
                           "    s = a + 1\n"
                           "    return s * 2\n";

static struct ka_buf out;
static struct ka_err err;

static int apply(const char *patch)
{
    ka_buf_clear(&out);
    err.msg[0] = '\0';
    return ka_patch_apply(TEXT, patch, 3, &out, &err);
}

static int free_out(void **state)
{
    (void)state;
    ka_buf_free(&out);
    return 0;
}

static void assert_says(const char *part)
{
    if (!strstr(err.msg, part))
        fail_msg("'%s' is not in '%s'", part, err.msg);
}

static void assert_result_has(const char *part)
{
    if (!strstr(ka_buf_str(&out), part))
        fail_msg("'%s' is not in the result:\n%s", part, ka_buf_str(&out));
}

#define ENVELOPE(body) "*** Begin Patch\n*** Update File: f.py\n" body "*** End Patch\n"

static void patch__hunk_with_unique_context__is_applied(void **state)
{
    (void)state;
    assert_int_equal(apply(ENVELOPE("@@\n     s = a + 1\n-    return s * 2\n+    return s * 3\n")), 0);
    assert_result_has("    s = a + 1\n    return s * 3\n");
    assert_null(strstr(ka_buf_str(&out), "s * 2"));
    assert_result_has("import triton\nx = 1\n# ---- backward ----\ndef first(a):\n");
}

static void patch__several_hunks_in_any_order__are_applied_to_the_original(void **state)
{
    (void)state;
    assert_int_equal(
        apply(ENVELOPE("@@\n-    return s * 2\n+    return s * 3\n@@\n-    return s\n+    return -s\n"
                       "+    # done\n")),
        0);
    assert_result_has(
        "def first(a):\n    s = a + 1\n    return -s\n    # done\n\n\ndef second(a):\n    s = a + 1\n    "
        "return s * 3\n");
}

static void patch__hunk_that_fits_twice__is_ambiguous(void **state)
{
    (void)state;
    assert_int_equal(apply(ENVELOPE("@@\n-    s = a + 1\n+    s = a\n")), -EEXIST);
    assert_says("hunk 1 (patch line 3)");
    assert_says("lines 5 and 10");
    assert_int_equal(out.len, 0);
}

static void patch__header_line__chooses_the_function(void **state)
{
    (void)state;
    assert_int_equal(apply(ENVELOPE("@@ def second(a):\n-    s = a + 1\n+    s = a\n")), 0);
    assert_result_has("def first(a):\n    s = a + 1\n");
    assert_result_has("def second(a):\n    s = a\n");
    assert_int_equal(apply(ENVELOPE("@@ def first\n-    s = a + 1\n+    s = a\n")), 0);
    assert_result_has("def first(a):\n    s = a\n");
    assert_result_has("def second(a):\n    s = a + 1\n");
}

static void patch__additions_below_a_header__go_below_its_line(void **state)
{
    (void)state;
    assert_int_equal(apply(ENVELOPE("@@ def second(a):\n+    a = a * 2\n")), 0);
    assert_result_has("def second(a):\n    a = a * 2\n    s = a + 1\n");
    assert_result_has("def first(a):\n    s = a + 1\n");
    assert_int_equal(apply(ENVELOPE("@@ x = 1\n+y = 2\n")), -EPERM);
}

/* Decorators, and a signature over several lines with brackets in a comment. */
static const char KERNELS[] = "# ---- backward ----\n"
                              "@triton.jit\n"
                              "def one(\n"
                              "    x_ptr,  # (M, N\n"
                              "    BLOCK: tl.constexpr,\n"
                              "):\n"
                              "    x = 1\n"
                              "\n"
                              "@triton.jit\n"
                              "def two(x_ptr):\n"
                              "    x = 1\n";

static int apply_to_kernels(const char *patch)
{
    ka_buf_clear(&out);
    err.msg[0] = '\0';
    return ka_patch_apply(KERNELS, patch, 1, &out, &err);
}

static void patch__additions_below_a_long_signature__go_below_its_end(void **state)
{
    (void)state;
    assert_int_equal(apply_to_kernels(ENVELOPE("@@ def one(\n+    y = 2\n")), 0);
    assert_result_has("):\n    y = 2\n    x = 1\n");
}

static void patch__hunk_from_the_header_or_its_decorator__is_applied(void **state)
{
    (void)state;
    assert_int_equal(apply_to_kernels(ENVELOPE("@@ def two\n-def two(x_ptr):\n+def two(x_ptr, N):\n")), 0);
    assert_result_has("def two(x_ptr, N):\n    x = 1\n");
    assert_int_equal(
        apply_to_kernels(ENVELOPE("@@ def two\n-@triton.jit\n+@triton.autotune\n def two(x_ptr):\n")), 0);
    assert_result_has("@triton.jit\ndef one(\n");
    assert_result_has("@triton.autotune\ndef two(x_ptr):\n");
}

static void patch__unknown_header__is_named(void **state)
{
    (void)state;
    assert_int_equal(apply(ENVELOPE("@@ def third(a):\n-    s = a + 1\n+    s = a\n")), -ENOENT);
    assert_says("def third(a):");
}

static void patch__hunk_without_context__is_rejected(void **state)
{
    (void)state;
    assert_int_equal(apply(ENVELOPE("@@\n+    s = 7\n")), -EINVAL);
    assert_says("neither a context line nor a removed line");
}

static void patch__addition_at_end_of_file__is_appended(void **state)
{
    (void)state;
    assert_int_equal(apply(ENVELOPE("@@\n+# tail\n*** End of File\n")), 0);
    assert_true(ka_ends_with(ka_buf_str(&out), "return s * 2\n# tail\n"));
}

static void patch__end_of_file__pins_the_hunk(void **state)
{
    (void)state;
    const char *text = "a\nb\na\nb\n\n";
    assert_int_equal(ka_patch_apply(text, ENVELOPE("@@\n a\n-b\n+c\n*** End of File\n"), 0, &out, &err), 0);
    assert_string_equal(ka_buf_str(&out), "a\nb\na\nc\n\n");
}

static void patch__missing_line__is_quoted_with_hunk_and_line(void **state)
{
    (void)state;
    assert_int_equal(
        apply(ENVELOPE("@@\n-    return s\n+    return 0\n@@\n     t = a - 1\n-    return s * 2\n")),
        -ENOENT);
    assert_says("hunk 2, patch line 7");
    assert_says("t = a - 1");
}

static void patch__lines_that_exist_apart__are_explained(void **state)
{
    (void)state;
    assert_int_equal(apply(ENVELOPE("@@\n def first(a):\n-    return s * 2\n")), -ENOENT);
    assert_says("not one after the other");
}

static void patch__trailing_blanks_and_crlf__are_tolerated(void **state)
{
    (void)state;
    assert_int_equal(
        apply("*** Begin Patch\r\n*** Update File: f.py\r\n@@\r\n-    return s * 2  \r\n+    return 4\r\n"
              "*** End Patch\r\n"),
        0);
    assert_result_has("    s = a + 1\n    return 4\n");
    assert_null(strchr(ka_buf_str(&out), '\r'));
}

static void patch__other_indentation__shifts_the_added_lines(void **state)
{
    (void)state;
    assert_int_equal(apply(ENVELOPE("@@\n def second(a):\n     s = a + 1\n-return s * 2\n+return 4\n")),
                     -ENOENT);
    assert_int_equal(apply(ENVELOPE("@@\n s = a + 1\n-return s * 2\n+if s:\n+    return 4\n+return 5\n")), 0);
    assert_result_has("    s = a + 1\n    if s:\n        return 4\n    return 5\n");
    assert_int_equal(apply(ENVELOPE("@@\n         s = a + 1\n-        return s * 2\n+        return 4\n")),
                     0);
    assert_result_has("    s = a + 1\n    return 4\n");
}

static void patch__protected_line_changed__is_refused(void **state)
{
    (void)state;
    assert_int_equal(apply(ENVELOPE("@@\n import triton\n-x = 1\n+x = 2\n")), -EPERM);
    assert_says("forward part (line 1 of the file");
    assert_int_equal(apply(ENVELOPE("@@\n x = 1\n+y = 2\n # ---- backward ----\n")), -EPERM);
    assert_int_equal(apply(ENVELOPE("@@\n-# ---- backward ----\n")), -EPERM);
}

static void patch__protected_lines__may_be_context(void **state)
{
    (void)state;
    assert_int_equal(apply(ENVELOPE("@@\n x = 1\n # ---- backward ----\n+import math\n")), 0);
    assert_result_has("# ---- backward ----\nimport math\ndef first(a):\n");
}

static void patch__line_in_both_parts__is_taken_from_the_backward(void **state)
{
    (void)state;
    const char *text = "a = 1\nb = 2\n#\na = 1\n";
    ka_buf_clear(&out);
    assert_int_equal(ka_patch_apply(text, ENVELOPE("@@\n-a = 1\n+a = 5\n"), 3, &out, &err), 0);
    assert_string_equal(ka_buf_str(&out), "a = 1\nb = 2\n#\na = 5\n");
}

static void patch__overlapping_hunks__are_refused(void **state)
{
    (void)state;
    assert_int_equal(
        apply(ENVELOPE("@@\n-    return s * 2\n+    return 3\n@@\n-    return s * 2\n+    return 4\n")),
        -EBUSY);
    assert_says("hunks 1 and 2 overlap");
    assert_int_equal(
        apply(ENVELOPE("@@\n-    return s * 2\n+    return 3\n@@\n+    t = 1\n     return s * 2\n")), -EBUSY);
    assert_int_equal(apply(ENVELOPE("@@\n     return s * 2\n+# one\n@@\n     return s * 2\n+# two\n")),
                     -EBUSY);
}

static void patch__neighbours_that_share_context__are_applied(void **state)
{
    (void)state;
    assert_int_equal(
        apply(ENVELOPE("@@\n-def second(a):\n+def second(b):\n     s = a + 1\n@@\n     s = a + 1\n-    "
                       "return s * 2\n+    return b\n")),
        0);
    assert_result_has("def second(b):\n    s = a + 1\n    return b\n");
}

static void patch__without_its_end__is_refused(void **state)
{
    (void)state;
    assert_int_equal(apply("*** Begin Patch\n*** Update File: f.py\n@@\n-    return s * 2\n+    return 3\n"),
                     -EINVAL);
    assert_says("was the answer cut?");
}

static void patch__line_without_prefix__is_named(void **state)
{
    (void)state;
    assert_int_equal(apply(ENVELOPE("@@\ndef second(a):\n-    s = a + 1\n")), -EINVAL);
    assert_says("patch line 4");
    assert_says("starts with ' ' (context), '-' or '+'");
}

static void patch__other_verbs__are_refused(void **state)
{
    (void)state;
    assert_int_equal(apply("*** Begin Patch\n*** Delete File: f.py\n*** End Patch\n"), -EINVAL);
    assert_says("Delete File");
}

static void patch__prose_around_the_envelope__is_ignored(void **state)
{
    (void)state;
    assert_int_equal(
        apply("Here it is:\n```\n" ENVELOPE("\n-    return s * 2\n+    return 3\n\n") "```\nDone.\n"), 0);
    assert_result_has("    s = a + 1\n    return 3\n");
}

static void patch__text_that_is_none__is_refused(void **state)
{
    (void)state;
    assert_int_equal(apply("please change line 3"), -EINVAL);
    assert_int_equal(apply(""), -EINVAL);
    assert_int_equal(apply("*** Begin Patch\n*** End Patch\n"), -EINVAL);
    assert_says("holds no hunk");
}

static void patch__added_file__replaces_all_but_the_protected(void **state)
{
    (void)state;
    assert_int_equal(apply("*** Begin Patch\n*** Add File: f.py\n+y = 1\n+\n+z = 2\n*** End Patch\n"), 0);
    assert_string_equal(ka_buf_str(&out), "import triton\nx = 1\n# ---- backward ----\ny = 1\n\nz = 2\n");
    assert_int_equal(
        apply(
            "*** Begin Patch\n*** Add File: f.py\n+import os\n+# ---- backward ----\n+z = 2\n*** End Patch"),
        0);
    assert_string_equal(ka_buf_str(&out), "import triton\nx = 1\n# ---- backward ----\nz = 2\n");
}

static void patch__unified_diff__is_applied_whatever_its_counts(void **state)
{
    (void)state;
    assert_int_equal(
        apply("diff --git a/f.py b/f.py\nindex 1..2 100644\n--- a/f.py\n+++ b/f.py\n"
              "@@ -99,1 +99,7 @@ def second(a):\n     s = a + 1\n-    return s * 2\n+    return 3\n"
              "\\ No newline at end of file\n"),
        0);
    assert_result_has("    s = a + 1\n    return 3\n");
}

static void patch__unified_line_number__chooses_between_equal_places(void **state)
{
    (void)state;
    const char *second = "--- a/f\n+++ b/f\n@@ -10 +10 @@\n-    s = a + 1\n+    s = 2\n";
    assert_int_equal(apply(second), 0);
    assert_result_has("def first(a):\n    s = a + 1\n");
    assert_result_has("def second(a):\n    s = 2\n");
    assert_int_equal(apply("--- a/f\n+++ b/f\n@@ -4 +4 @@\n-    s = a + 1\n+    s = 2\n"), 0);
    assert_result_has("def first(a):\n    s = 2\n");
}

static void patch__caps__are_enforced(void **state)
{
    (void)state;
    size_t len = KA_PATCH_MAX_BYTES + 1;
    char *big = malloc(len + 1);
    memset(big, 'x', len);
    big[len] = '\0';
    assert_int_equal(apply(big), -EFBIG);
    memset(big, '\n', 2 * KA_PATCH_MAX_LINES);
    big[2 * KA_PATCH_MAX_LINES] = '\0';
    assert_int_equal(apply(big), -EFBIG);
    free(big);
}

static void patch__is_in__knows_both_spellings(void **state)
{
    (void)state;
    assert_true(ka_patch_is_in("text\n*** Begin Patch\n"));
    assert_true(ka_patch_is_in("--- a/f\n+++ b/f\n"));
    assert_false(ka_patch_is_in("--- a rule of dashes\nprose\n"));
    assert_false(ka_patch_is_in(TEXT));
}

int main(void)
{
#define TEST(name) cmocka_unit_test_teardown(name, free_out)
    const struct CMUnitTest tests[] = {
        TEST(patch__hunk_with_unique_context__is_applied),
        TEST(patch__several_hunks_in_any_order__are_applied_to_the_original),
        TEST(patch__hunk_that_fits_twice__is_ambiguous),
        TEST(patch__header_line__chooses_the_function),
        TEST(patch__additions_below_a_header__go_below_its_line),
        TEST(patch__additions_below_a_long_signature__go_below_its_end),
        TEST(patch__hunk_from_the_header_or_its_decorator__is_applied),
        TEST(patch__unknown_header__is_named),
        TEST(patch__hunk_without_context__is_rejected),
        TEST(patch__addition_at_end_of_file__is_appended),
        TEST(patch__end_of_file__pins_the_hunk),
        TEST(patch__missing_line__is_quoted_with_hunk_and_line),
        TEST(patch__lines_that_exist_apart__are_explained),
        TEST(patch__trailing_blanks_and_crlf__are_tolerated),
        TEST(patch__other_indentation__shifts_the_added_lines),
        TEST(patch__protected_line_changed__is_refused),
        TEST(patch__protected_lines__may_be_context),
        TEST(patch__line_in_both_parts__is_taken_from_the_backward),
        TEST(patch__overlapping_hunks__are_refused),
        TEST(patch__neighbours_that_share_context__are_applied),
        TEST(patch__without_its_end__is_refused),
        TEST(patch__line_without_prefix__is_named),
        TEST(patch__other_verbs__are_refused),
        TEST(patch__prose_around_the_envelope__is_ignored),
        TEST(patch__text_that_is_none__is_refused),
        TEST(patch__added_file__replaces_all_but_the_protected),
        TEST(patch__unified_diff__is_applied_whatever_its_counts),
        TEST(patch__unified_line_number__chooses_between_equal_places),
        TEST(patch__caps__are_enforced),
        TEST(patch__is_in__knows_both_spellings),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
