/* Pair files and the lexer below them. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "pair_fixture.h"
#include "rag/lex.h"
#include "rag/pair.h"

/* Spellings joined by one blank; NEWLINE is "$". */
static void assert_tokens(const char *source, const char *expected)
{
    struct ka_tokens t = {0};
    struct ka_buf text = {0};
    assert_int_equal(ka_lex(source, strlen(source), &t, NULL), 0);
    for (size_t i = 0; i < t.count; i++) {
        char *token = ka_token_text(&t, i);
        ka_buf_printf(&text, "%s%s", i ? " " : "", t.items[i].kind == KA_TOKEN_NEWLINE ? "$" : token);
        free(token);
    }
    assert_string_equal(ka_buf_str(&text), expected);
    ka_buf_free(&text);
    ka_tokens_free(&t);
}

static void lex__comments_blank_lines_and_continuations__vanish(void **state)
{
    (void)state;
    assert_tokens("", "");
    assert_tokens("\n  # only a comment\n\n", "");
    assert_tokens("a = b  # why\n\nc", "a = b $ c $");
    assert_tokens("f(a,\n  # inside\n  b)\nx = 1 + \\\n 2\n", "f ( a , b ) $ x = 1 + 2 $");
}

static void lex__same_code__differs_in_comments_at_most(void **state)
{
    (void)state;
    assert_true(ka_lex_same_code("a = 1\nb = 2\n", "# why\na = 1  # so\n\n\nb = 2\n"));
    assert_false(ka_lex_same_code("a = 1\n", "a = 2\n"));
    assert_false(ka_lex_same_code("if a:\n    b\n    c\n", "if a:\n    b\nc\n"));
    assert_false(ka_lex_same_code("a = '# 1'\n", "a = '# 2'\n"));
    assert_false(ka_lex_same_code("a\n", "a\nb\n"));
}

static void lex__strings_numbers_and_operators__are_single_tokens(void **state)
{
    (void)state;
    assert_tokens("x //= 1.5e-3 ** .5 != 0xff", "x //= 1.5e-3 ** .5 != 0xff $");
    assert_tokens("rb'a\\'b' f\"#no\" name'x'", "rb'a\\'b' f\"#no\" name 'x' $");
    assert_tokens("'''a\n'b''\n''' y", "'''a\n'b''\n''' y $");
    assert_tokens("'open\nz", "'open $ z $");
    assert_tokens("\"\"\"open\nz", "\"\"\"open\nz $");
}

static void lex__lines_and_indentation__are_those_of_the_source(void **state)
{
    (void)state;
    struct ka_tokens t = {0};
    const char *source = "a = '''\n\n'''\nif a:\n\tb\n";
    assert_int_equal(ka_lex(source, strlen(source), &t, NULL), 0);
    size_t last = t.count - 2;
    assert_true(ka_token_is(&t, last, "b"));
    assert_int_equal(t.items[last].line, 5);
    assert_int_equal(t.items[last].indent, 8);
    assert_int_equal(t.items[4].line, 4);
    ka_tokens_free(&t);
}

static void block__decorated_functions_and_classes__are_found(void **state)
{
    (void)state;
    const char *source = "x = 1\n@triton.autotune(\n  configs=[],\n)\n@triton.jit\ndef f(a):\n    def g(): "
                         "pass\n    return 1\n"
                         "class C:\n    pass\nasync def h(): pass\n";
    struct ka_tokens t = {0};
    assert_int_equal(ka_lex(source, strlen(source), &t, NULL), 0);
    struct ka_block b;
    size_t at = 0;
    assert_true(ka_block_next(&t, &at, &b));
    assert_true(ka_token_is(&t, b.name, "f"));
    assert_true(ka_block_decorated(&t, &b, "jit"));
    assert_true(ka_block_decorated(&t, &b, "autotune"));
    assert_false(ka_block_decorated(&t, &b, "triton"));
    assert_true(ka_block_next(&t, &at, &b));
    assert_true(b.is_class);
    assert_true(ka_block_next(&t, &at, &b));
    assert_true(ka_token_is(&t, b.name, "h"));
    assert_false(ka_block_next(&t, &at, &b));
    ka_tokens_free(&t);
}

static int parse(const char *path, const char *source, struct ka_pair *out, struct ka_err *err)
{
    return ka_pair_parse(path, source, strlen(source), out, err);
}

static void pair__well_formed_file__gives_its_parts(void **state)
{
    (void)state;
    struct ka_pair p;
    assert_int_equal(parse("/home/me/dataset/norm/square_sum_rows.py", ROW_PAIR, &p, NULL), 0);
    assert_string_equal(p.path, "dataset/norm/square_sum_rows.py");
    assert_string_equal(p.id, "square_sum_rows");
    assert_string_equal(p.family, "norm");
    assert_string_equal(p.title, "Sum of squares: a note with a colon.");
    assert_string_equal(p.op, "square_sum");
    assert_string_equal(p.schedule, "row_reduce_correct,recompute_from_stats");
    assert_string_equal(p.dtypes, "fp32,bf16");
    assert_int_equal(p.difficulty, 3);
    assert_string_equal(p.stub, "run");
    assert_string_equal(p.kernels, "kernel,back");
    assert_non_null(strstr(p.forward, "def kernel"));
    assert_null(strstr(p.forward, "backward ----"));
    assert_true(ka_starts_with(p.backward, "\n\n@triton.jit\ndef back"));
    assert_int_equal(strlen(p.hash), 64);
    ka_pair_free(&p);
}

static void pair__without_docstring__has_empty_metadata(void **state)
{
    (void)state;
    struct ka_pair p;
    assert_int_equal(
        parse("a.py", "# SPDX-License-Identifier: MIT\n" ROW_KERNEL("k", "r", "") STUB BACKWARD, &p, NULL),
        0);
    assert_string_equal(p.path, "a.py");
    assert_string_equal(p.id, "a");
    assert_string_equal(p.family, "");
    assert_string_equal(p.op, "");
    assert_string_equal(p.license, "MIT");
    assert_int_equal(p.difficulty, 0);
    ka_pair_free(&p);
}

static void pair__missing_parts__are_named(void **state)
{
    (void)state;
    const struct {
        const char *source, *word;
    } rows[] = {{ROW_KERNEL("k", "r", "") STUB, "# ---- backward ----"},
                {ROW_KERNEL("k", "r", "") "    " BACKWARD, "backward ----"},
                {ROW_KERNEL("k", "r", "") BACKWARD STUB, "@autodiff"},
                {STUB "# ---- backward ----\n", "@triton.jit"},
                {"", "backward ----"}};
    for (size_t i = 0; i < KA_COUNT(rows); i++) {
        struct ka_pair p;
        struct ka_err err;
        assert_int_equal(parse("norm/x.py", rows[i].source, &p, &err), -EINVAL);
        if (!strstr(err.msg, rows[i].word) || !strstr(err.msg, "norm/x.py"))
            fail_msg("'%s' does not name '%s'", err.msg, rows[i].word);
    }
}

static void pair__nul_byte_or_size__is_refused(void **state)
{
    (void)state;
    struct ka_pair p;
    struct ka_err err;
    assert_int_equal(ka_pair_parse("x.py", "a\0b", 3, &p, &err), -EINVAL);
    char *big = ka_calloc(KA_PAIR_MAX + 2, 1);
    memset(big, '\n', KA_PAIR_MAX + 1);
    assert_int_equal(ka_pair_parse("x.py", big, KA_PAIR_MAX + 1, &p, &err), -EFBIG);
    free(big);
    assert_int_equal(ka_pair_read("/nowhere/x.py", &p, &err), -ENOENT);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(lex__comments_blank_lines_and_continuations__vanish),
        cmocka_unit_test(lex__same_code__differs_in_comments_at_most),
        cmocka_unit_test(lex__strings_numbers_and_operators__are_single_tokens),
        cmocka_unit_test(lex__lines_and_indentation__are_those_of_the_source),
        cmocka_unit_test(block__decorated_functions_and_classes__are_found),
        cmocka_unit_test(pair__well_formed_file__gives_its_parts),
        cmocka_unit_test(pair__without_docstring__has_empty_metadata),
        cmocka_unit_test(pair__missing_parts__are_named),
        cmocka_unit_test(pair__nul_byte_or_size__is_refused),
    };
    return cmocka_run_group_tests_name("pair", tests, NULL, NULL);
}
