/* Answers: each way in which a model may answer, and the sentence it gets back when it cannot be used. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/core/answer.h"
#include "agent/core/compose.h"

static const char FORWARD[] =
    "import torch\nfrom kernel_agent import autodiff\n@autodiff((0,))\ndef f(x):\n    return x\n";
static const char BACKWARD[] = "class F:\n    scale = 1\n\n\ndef f_autograd(x):\n    return F.apply(x)\n";
static const char OTHER[] = "class G:\n    pass\n\n\ndef f_autograd(x):\n    return G.apply(x)\n";
static const char PATCH[] =
    "*** Begin Patch\n*** Update File: pair.py\n@@\n class F:\n-    scale = 1\n+    scale = 2\n"
    "*** End Patch\n";
static const char PATCHED[] = "class F:\n    scale = 2\n\n\ndef f_autograd(x):\n    return F.apply(x)\n";

static struct ka_buf out;
static struct ka_err err;

static int free_out(void **state)
{
    (void)state;
    ka_buf_free(&out);
    return 0;
}

static bool without_tools;

static int take(const struct ka_chat_answer *answer)
{
    ka_buf_clear(&out);
    err.msg[0] = '\0';
    return ka_answer_apply(answer, FORWARD, BACKWARD, !without_tools, &out, &err);
}

/* An answer of text only; %s in `format` is replaced by `code`. */
static int take_text(const char *format, const char *code, const char *finish)
{
    struct ka_buf text = {0};
    for (const char *at = format; *at; at++) {
        if (at[0] == '%' && at[1] == 's') {
            ka_buf_puts(&text, code);
            at++;
        } else {
            ka_buf_add(&text, at, 1);
        }
    }
    struct ka_chat_answer answer = {.text = text.data ? text.data : (char *)"",
                                    .finish_reason = (char *)finish};
    int rc = take(&answer);
    ka_buf_free(&text);
    return rc;
}

static char *arguments(const char *key, const char *value)
{
    json_t *root = json_pack("{s:s}", key, value);
    char *text = json_dumps(root, JSON_COMPACT);
    json_decref(root);
    return text;
}

static int take_call(const char *name, const char *args, const char *finish)
{
    struct ka_chat_call call = {.id = (char *)"1", .name = (char *)name, .arguments = (char *)args};
    struct ka_chat_answer answer = {
        .text = (char *)"", .finish_reason = (char *)finish, .calls = &call, .call_count = 1};
    return take(&answer);
}

static int take_tool(const char *name, const char *key, const char *value)
{
    char *args = arguments(key, value);
    int rc = take_call(name, args, "tool_calls");
    free(args);
    return rc;
}

static void assert_says(const char *part)
{
    if (!strstr(err.msg, part))
        fail_msg("'%s' is not in '%s'", part, err.msg);
}

static void answer__submit_file__replaces_the_backward(void **state)
{
    (void)state;
    assert_int_equal(take_tool("submit_file", "content", OTHER), 0);
    assert_string_equal(ka_buf_str(&out), OTHER);
}

static void answer__fence_in_tool_content__is_taken_off(void **state)
{
    (void)state;
    char fenced[400];
    snprintf(fenced, sizeof(fenced), "\n```python\n%s```\n", OTHER);
    assert_int_equal(take_tool("submit_file", "content", fenced), 0);
    assert_string_equal(ka_buf_str(&out), OTHER);
    snprintf(fenced, sizeof(fenced), "```\n%s```", PATCH);
    assert_int_equal(take_tool("submit_patch", "patch", fenced), 0);
    assert_string_equal(ka_buf_str(&out), PATCHED);
}

/* A person at a mailbox cannot call anything. */
static void answer__useless_without_tools__is_told_without_naming_them(void **state)
{
    (void)state;
    without_tools = true;
    assert_int_equal(take_text("I would not know.", "", "stop"), -ENODATA);
    assert_null(strstr(err.msg, "submit_"));
    assert_says("```python");
    assert_int_equal(take_text("```python\ndef f(", "", "length"), -EFBIG);
    assert_null(strstr(err.msg, "submit_"));
    without_tools = false;
    assert_int_equal(take_text("I would not know.", "", "stop"), -ENODATA);
    assert_says("submit_patch");
}

static void answer__numbers_of_the_listing__are_named_as_what_is_wrong(void **state)
{
    (void)state;
    static const char *const texts[] = {
        "```python\n   1| def f_autograd(x):\n   2|\n   3|     return x\n```\n",
        "*** Begin Patch\n*** Update File: x\n@@\n    1| a\n-   2| b\n+   2| c\n    3| d\n*** End Patch\n",
    };
    for (size_t i = 0; i < KA_COUNT(texts); i++) {
        struct ka_chat_answer answer = {.text = (char *)texts[i], .finish_reason = (char *)"stop"};
        struct ka_buf made = {0};
        struct ka_err why;
        assert_int_equal(ka_answer_apply(&answer, "f = 1\n", "a\nb\nd\n", false, &made, &why), -EINVAL);
        assert_non_null(strstr(why.msg, "numbers that the question shows"));
        ka_buf_free(&made);
    }
}

static void answer__thoughts__do_not_count(void **state)
{
    (void)state;
    static const char DECOY[] =
        "maybe\n```python\nclass H:\n    pass\n\n\ndef f_autograd(x):\n    return 1\n```\n";
    static const char *const formats[] = {"<think>\n%d</think>\n```python\n%s```\n",
                                          "%d</think>```python\n%s```",
                                          "\n<thinking>%d</thinking>\nHere:\n```\n%s```\nDone."};
    for (size_t i = 0; i < KA_COUNT(formats); i++) {
        const char *at = strstr(formats[i], "%d");
        char *format = ka_format("%.*s%s%s", (int)(at - formats[i]), formats[i], DECOY, at + 2);
        assert_int_equal(take_text(format, OTHER, "stop"), 0);
        assert_string_equal(ka_buf_str(&out), OTHER);
        free(format);
    }
    char *thoughts = ka_format("<think>\n%s", DECOY);
    assert_int_equal(take_text("%s", thoughts, "stop"), -ENODATA);
    assert_int_equal(take_text("%s", thoughts, "length"), -EFBIG);
    free(thoughts);
    /* a tag inside an answer is none of the model's thoughts */
    assert_int_equal(take_text("```python\n%s# <think> of it </think>\n```\n", OTHER, "stop"), 0);
}

static void answer__nothing_left__is_a_sentence_without_code(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        bool nothing;
    } rows[] = {
        {"The row is read once.\n\n**Nothing is left to gain.**", true},
        {"nothing is left to gain", true},
        {"I would not say so.", false},
        {"Nothing is left to gain but this:\n\n```python\ndef f_autograd(x):\n    return x\n```\n", false},
        {"Nothing is left to gain:\n*** Begin Patch\n*** Update File: x\n@@\n-a\n+b\n*** End Patch\n", false},
    };
    for (size_t i = 0; i < KA_COUNT(rows); i++) {
        struct ka_chat_answer answer = {.text = (char *)rows[i].text};
        assert_int_equal(ka_answer_is_nothing(&answer), rows[i].nothing);
    }
    struct ka_chat_call call = {(char *)"1", (char *)"submit_file", (char *)"{}"};
    struct ka_chat_answer answer = {.text = (char *)rows[1].text, .calls = &call, .call_count = 1};
    assert_false(ka_answer_is_nothing(&answer));
}

static void answer__whole_pair__is_cut_at_the_marker(void **state)
{
    (void)state;
    char whole[800];
    snprintf(whole, sizeof(whole), "import os  # not what the user wrote\n%s\n\n%s", KA_MARKER, OTHER);
    assert_int_equal(take_tool("submit_file", "content", whole), 0);
    assert_string_equal(ka_buf_str(&out), OTHER);
    snprintf(whole, sizeof(whole), "%s\n#--- backward ---\n%s", FORWARD, OTHER);
    assert_int_equal(take_tool("submit_file", "content", whole), 0);
    assert_string_equal(ka_buf_str(&out), OTHER);
    snprintf(whole, sizeof(whole), "%s\n%s", FORWARD, OTHER);
    assert_int_equal(take_tool("submit_file", "content", whole), -EINVAL);
    assert_says(KA_MARKER);
}

static void answer__submit_patch__is_applied_below_the_marker_only(void **state)
{
    (void)state;
    assert_int_equal(take_tool("submit_patch", "patch", PATCH), 0);
    assert_string_equal(ka_buf_str(&out), PATCHED);
    assert_int_equal(
        take_tool("submit_patch", "patch",
                  "*** Begin Patch\n*** Update File: p\n@@\n def f(x):\n-    return x\n+    return 0\n"
                  "*** End Patch\n"),
        -EPERM);
    assert_says("The patch did not apply: hunk 1");
    assert_says("forward part");
    assert_int_equal(out.len, 0);
}

static void answer__several_calls__apply_one_after_the_other_or_not_at_all(void **state)
{
    (void)state;
    char *first = arguments("patch", PATCH);
    char *second =
        arguments("patch", "*** Begin Patch\n*** Update File: p\n@@\n-    scale = 2\n+    scale = 3\n"
                           "*** End Patch\n");
    struct ka_chat_call calls[2] = {{(char *)"1", (char *)"submit_patch", first},
                                    {(char *)"2", (char *)"submit_patch", second}};
    struct ka_chat_answer answer = {
        .text = (char *)"", .finish_reason = (char *)"tool_calls", .calls = calls, .call_count = 2};
    assert_int_equal(take(&answer), 0);
    assert_non_null(strstr(ka_buf_str(&out), "scale = 3"));
    calls[1].arguments = first;
    assert_int_equal(take(&answer), -ENOENT);
    assert_says("Tool call 2 of 2 (none was applied)");
    assert_int_equal(out.len, 0);
    free(first);
    free(second);
}

static void answer__bad_arguments__say_where_and_what_to_send(void **state)
{
    (void)state;
    assert_int_equal(take_call("submit_patch", "{\"patch\": \"a\nb\"}", "tool_calls"), -EPROTO);
    assert_says("not valid JSON (line 1");
    assert_says("{\"patch\": \"...\"}");
    assert_int_equal(take_call("submit_file", "{\"code\": \"x\"}", "tool_calls"), -EPROTO);
    assert_says("lack the string \"content\"");
    assert_int_equal(take_call("submit_file", "[1]", "tool_calls"), -EPROTO);
    assert_int_equal(take_call("submit_file", NULL, "tool_calls"), -EPROTO);
    assert_int_equal(take_call("submit_file", "{\"content\": \"cla", "length"), -EFBIG);
    assert_says("cut before its end");
    assert_int_equal(take_call("run_shell", "{}", "tool_calls"), -EPROTO);
    assert_says("no tool 'run_shell'");
}

static void answer__fenced_block__is_taken(void **state)
{
    (void)state;
    assert_int_equal(take_text("Here:\n\n```python\n%s```\nGood luck.", OTHER, "stop"), 0);
    assert_string_equal(ka_buf_str(&out), OTHER);
    assert_int_equal(take_text("~~~~\n%s~~~~", OTHER, "stop"), 0);
    assert_int_equal(take_text("```python\n%s", OTHER, "stop"), 0);
    assert_string_equal(ka_buf_str(&out), OTHER);
}

static void answer__several_blocks__the_last_whole_one_counts(void **state)
{
    (void)state;
    assert_int_equal(
        take_text(
            "```python\ndef f_autograd(x):\n    return 1\n```\nbetter:\n```py\n%s```\n"
            "run it:\n```bash\npython pair.py && f_autograd( def \n```\n```python\n# try it, with a comment "
            "that makes this the longest block of the answer, longer than the code\nf(1)\n```\n",
            OTHER, "stop"),
        0);
    assert_string_equal(ka_buf_str(&out), OTHER);
}

static void answer__patch_in_a_fence_or_bare__is_applied(void **state)
{
    (void)state;
    assert_int_equal(take_text("```diff\n%s```", PATCH, "stop"), 0);
    assert_string_equal(ka_buf_str(&out), PATCHED);
    assert_int_equal(take_text("I change the scale.\n%s", PATCH, "stop"), 0);
    assert_string_equal(ka_buf_str(&out), PATCHED);
}

static void answer__fragment__is_no_backward_part(void **state)
{
    (void)state;
    assert_int_equal(take_text("```python\n%s```", "scale = 2\n", "stop"), -EINVAL);
    assert_says("not a whole backward part");
}

static void answer__cut_block__is_not_taken(void **state)
{
    (void)state;
    assert_int_equal(take_text("```python\n%s", OTHER, "length"), -EFBIG);
    assert_says("cut before its end");
    assert_int_equal(take_text("```python\n%s", OTHER, NULL), -EFBIG);
    assert_int_equal(take_text("*** Begin Patch\n@@\n-    scale", "", "length"), -EFBIG);
    assert_int_equal(take_text("let me think", "", "length"), -EFBIG);
}

static void answer__without_code__says_how_to_answer(void **state)
{
    (void)state;
    assert_int_equal(take_text("I would use atomics.", "", "stop"), -ENODATA);
    assert_says("submit_patch or submit_file");
    assert_int_equal(take_text("", "", "stop"), -ENODATA);
    struct ka_chat_answer nothing = {0};
    assert_int_equal(take(&nothing), -ENODATA);
}

static void answer__refusal__is_reported(void **state)
{
    (void)state;
    struct ka_chat_answer answer = {
        .text = (char *)"", .refusal = (char *)"I cannot help", .finish_reason = (char *)"stop"};
    assert_int_equal(take(&answer), -ECONNREFUSED);
    assert_says("I cannot help");
}

static void answer__same_file_again__changes_nothing(void **state)
{
    (void)state;
    assert_int_equal(take_tool("submit_file", "content", BACKWARD), -EALREADY);
    assert_int_equal(out.len, 0);
}

static void answer__too_long__is_refused(void **state)
{
    (void)state;
    char *big = malloc(KA_ANSWER_MAX_BYTES + 2);
    memset(big, '#', KA_ANSWER_MAX_BYTES + 1);
    big[KA_ANSWER_MAX_BYTES + 1] = '\0';
    assert_int_equal(take_tool("submit_file", "content", big), -EFBIG);
    free(big);
}

static void answer__tools__have_valid_schemas(void **state)
{
    (void)state;
    for (size_t i = 0; i < ka_answer_tool_count; i++) {
        json_error_t where;
        json_t *schema = json_loads(ka_answer_tools[i].parameters, 0, &where);
        assert_non_null(schema);
        const char *required = json_string_value(json_array_get(json_object_get(schema, "required"), 0));
        assert_non_null(json_object_get(json_object_get(schema, "properties"), required));
        json_decref(schema);
    }
    assert_int_equal(ka_answer_tool_count, 2);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_teardown(name, free_out)
    const struct CMUnitTest tests[] = {
        TEST(answer__submit_file__replaces_the_backward),
        TEST(answer__fence_in_tool_content__is_taken_off),
        TEST(answer__useless_without_tools__is_told_without_naming_them),
        TEST(answer__numbers_of_the_listing__are_named_as_what_is_wrong),
        TEST(answer__thoughts__do_not_count),
        TEST(answer__nothing_left__is_a_sentence_without_code),
        TEST(answer__whole_pair__is_cut_at_the_marker),
        TEST(answer__submit_patch__is_applied_below_the_marker_only),
        TEST(answer__several_calls__apply_one_after_the_other_or_not_at_all),
        TEST(answer__bad_arguments__say_where_and_what_to_send),
        TEST(answer__fenced_block__is_taken),
        TEST(answer__several_blocks__the_last_whole_one_counts),
        TEST(answer__patch_in_a_fence_or_bare__is_applied),
        TEST(answer__fragment__is_no_backward_part),
        TEST(answer__cut_block__is_not_taken),
        TEST(answer__without_code__says_how_to_answer),
        TEST(answer__refusal__is_reported),
        TEST(answer__same_file_again__changes_nothing),
        TEST(answer__too_long__is_refused),
        TEST(answer__tools__have_valid_schemas),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
