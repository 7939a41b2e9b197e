/* Excerpts of pairs: the math, and what the backward takes from the forward. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "pair_fixture.h"
#include "rag/excerpt.h"

#define UNUSED "LOST = 2\n\n\ndef lost():\n    return kernel\n\n\n"
#define HELPERS                                                                                              \
    "ROWS = 32  # of a tile\n\n\n@triton.jit\ndef inner(x):\n    return x * ROWS\n\n\n"                      \
    "def scan(x, **k):\n    inner[(1,)](x, y.lost)\n    return x\n\n\n"
#define USES "# ---- backward ----\n\n\ndef run_autograd(x):\n    return scan(run(x), lost=1)\n"

static struct ka_pair parsed(const char *source)
{
    struct ka_pair pair;
    struct ka_err err;
    if (ka_pair_parse("dataset/a/b.py", source, strlen(source), &pair, &err))
        fail_msg("%s", err.msg);
    return pair;
}

static void excerpt__docstring__is_prose_without_what_the_store_reads(void **state)
{
    (void)state;
    struct ka_pair pair = parsed(ROW_PAIR);
    struct ka_buf out = {0};
    ka_excerpt_docstring(&pair, &out);
    assert_string_equal(ka_buf_str(&out), "Sum of squares: a note with a colon.\n\nForward: y = sum x^2\n"
                                          "op: prose, not the block\n\nMore prose.\n");
    ka_buf_free(&out);
    ka_pair_free(&pair);
}

static void excerpt__code__has_what_the_backward_names_and_what_that_names(void **state)
{
    (void)state;
    struct ka_pair pair = parsed(HEAD("a", "b") ROW_KERNEL("kernel", "row", "") UNUSED HELPERS STUB USES);
    struct ka_buf out = {0};
    ka_excerpt_code(&pair, &out);
    assert_string_equal(ka_buf_str(&out), HELPERS USES);
    ka_buf_free(&out);
    ka_pair_free(&pair);
}

static void excerpt__backward_that_stands_alone__is_all(void **state)
{
    (void)state;
    struct ka_pair pair = parsed(ROW_PAIR);
    struct ka_buf out = {0};
    ka_excerpt_code(&pair, &out);
    assert_string_equal(ka_buf_str(&out), strstr(BACKWARD, "@triton.jit"));
    ka_buf_free(&out);
    ka_pair_free(&pair);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(excerpt__docstring__is_prose_without_what_the_store_reads),
        cmocka_unit_test(excerpt__code__has_what_the_backward_names_and_what_that_names),
        cmocka_unit_test(excerpt__backward_that_stands_alone__is_all),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
