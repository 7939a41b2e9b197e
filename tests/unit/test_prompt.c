/* Prompts: the template language, what the real templates show in each phase, and what gives way to the
 * budget. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <errno.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "agent/disk/prompt_files.h"

static struct ka_buf out;
static struct ka_err err;
static struct ka_prompts *prompts;
static struct ka_prompt_template templates[KA_PROMPT_FILE_COUNT];

static int load(void **state)
{
    (void)state;
    return ka_prompts_load("prompts", &prompts, templates, &err);
}

static int unload(void **state)
{
    (void)state;
    ka_prompts_free(prompts);
    return 0;
}

static int free_out(void **state)
{
    (void)state;
    ka_buf_free(&out);
    return 0;
}

static int render(const char *text)
{
    const struct ka_prompt_template template = {"t.md", text};
    const struct ka_prompt_var vars[] = {
        {"name", "softmax"}, {"code", "x = 1\n\n"}, {"empty", ""}, {"none", NULL}, {"braces", "{{name}}"}};
    ka_buf_clear(&out);
    err.msg[0] = '\0';
    return ka_prompt_render(&template, vars, KA_COUNT(vars), &out, &err);
}

static void assert_has(const char *text, const char *part)
{
    if (!text || !strstr(text, part))
        fail_msg("'%s' is not in:\n%.2000s", part, text ? text : "(nothing)");
}

static void assert_lacks(const char *text, const char *part)
{
    if (text && strstr(text, part))
        fail_msg("'%s' is in:\n%.2000s", part, text);
}

static void assert_renders(const char *text, const char *want)
{
    assert_int_equal(render(text), 0);
    assert_string_equal(ka_buf_str(&out), want);
}

static void assert_refused(const char *text, const char *where, const char *what)
{
    assert_int_equal(render(text), -EINVAL);
    assert_has(err.msg, where);
    assert_has(err.msg, what);
    assert_int_equal(out.len, 0);
}

static void template__names__are_replaced_once(void **state)
{
    (void)state;
    assert_renders("a {{name}} b {{ name }}.", "a softmax b softmax.");
    assert_renders("[{{empty}}{{none}}]", "[]");
    assert_renders("{{braces}}", "{{name}}");
    assert_renders("f'{x}' }} {", "f'{x}' }} {");
    assert_renders("", "");
}

static void template__values__lose_their_final_newlines(void **state)
{
    (void)state;
    assert_renders("```\n{{code}}\n```\n", "```\nx = 1\n```\n");
}

static void template__sections__are_shown_if_not_empty(void **state)
{
    (void)state;
    assert_renders("a{{#name}}[{{name}}]{{/name}}b", "a[softmax]b");
    assert_renders("a{{#empty}}[{{name}}]{{/empty}}{{#none}}x{{/none}}b", "ab");
    assert_renders("{{#name}}1{{#empty}}2{{/empty}}3{{/name}}", "13");
    assert_renders("{{#empty}}1{{#name}}2{{/name}}3{{/empty}}", "");
}

static void template__tags_alone_on_a_line__vanish_with_it(void **state)
{
    (void)state;
    assert_renders("a\n{{#name}}\nb\n  {{/name}}  \nc\n", "a\nb\nc\n");
    assert_renders("a\n{{#empty}}\nb\n{{/empty}}\nc\n", "a\nc\n");
    assert_renders("{{#name}}\nb\n{{/name}}", "b\n");
}

static void template__mistakes__are_named_with_file_and_line(void **state)
{
    (void)state;
    assert_refused("a\n\n{{nme}}", "t.md:3", "nme");
    assert_refused("{{#nme}}x{{/nme}}", "t.md:1", "nme");
    assert_refused("{{#empty}}\n{{nme}}\n{{/empty}}", "t.md:2", "nme");
    assert_refused("a\n{{#name}}\nb\n\n", "t.md:2", "never closed: 'name'");
    assert_refused("a\n{{/name}}", "t.md:2", "no section is open");
    assert_refused("{{#name}}\n{{#code}}\n{{/name}}", "t.md:3", "another section is open");
    assert_refused("a\n{{name\n}}", "t.md:2", "not closed on its line");
    assert_refused("{{}}", "t.md:1", "no name");
}

static void template__too_deep_or_too_long__is_refused(void **state)
{
    (void)state;
    struct ka_buf deep = {0};
    for (int i = 0; i < 9; i++)
        ka_buf_puts(&deep, "{{#name}}");
    assert_int_equal(render(ka_buf_str(&deep)), -EINVAL);
    assert_has(err.msg, "too many sections");
    ka_buf_clear(&deep);
    char *megabyte = ka_calloc(((size_t)1 << 20) + 1, 1);
    memset(megabyte, 'x', (size_t)1 << 20);
    for (int i = 0; i < 9; i++)
        ka_buf_puts(&deep, megabyte);
    assert_int_equal(render(ka_buf_str(&deep)), -EFBIG);
    free(megabyte);
    ka_buf_free(&deep);
}

static const struct ka_prompt_pair PAIRS[] = {
    {.id = "mid_pair", .schedule = "swap_owner", .backward = "mid = 1\n", .similarity = 0.5},
    {.id = "best_pair", .backward = "best = 1\n", .similarity = 0.9},
    {.id = "last_pair", .schedule = "atomic_accumulate", .backward = "last = 1\n", .similarity = 0.1},
};
static const char *const HISTORY[] = {"first move", "second move", "third move"};

static struct ka_prompt_input full_input(enum ka_prompt_phase phase)
{
    return (struct ka_prompt_input){.phase = phase,
                                    .tools = true,
                                    .stub = "softmax",
                                    .grads = "x, w",
                                    .device = "the interpreter",
                                    .forward = "FORWARD_SOURCE",
                                    .inspect = "INSPECT_TEXT",
                                    .draft = "DRAFT_SOURCE",
                                    .draft_report = "REPORT_TEXT",
                                    .candidate = "CANDIDATE_SOURCE",
                                    .verdict = "VERDICT_TEXT",
                                    .facts = "FACTS_TEXT",
                                    .pairs = PAIRS,
                                    .pair_count = KA_COUNT(PAIRS),
                                    .history = HISTORY,
                                    .history_count = KA_COUNT(HISTORY)};
}

static void prompt__each_phase__shows_its_facts(void **state)
{
    (void)state;
    static const struct {
        enum ka_prompt_phase phase;
        const char *shown[9];
    } cases[] = {
        {KA_PROMPT_DRAFT,
         {"FORWARD_SOURCE", "INSPECT_TEXT", "DRAFT_SOURCE", "REPORT_TEXT", "third move", "softmax_autograd"}},
        {KA_PROMPT_FIX,
         {"FORWARD_SOURCE", "INSPECT_TEXT", "DRAFT_SOURCE", "REPORT_TEXT", "CANDIDATE_SOURCE", "VERDICT_TEXT",
          "FACTS_TEXT", "third move"}},
        {KA_PROMPT_OPTIMISE,
         {"FORWARD_SOURCE", "INSPECT_TEXT", "REPORT_TEXT", "CANDIDATE_SOURCE", "VERDICT_TEXT", "FACTS_TEXT",
          "third move"}},
    };
    for (size_t i = 0; i < KA_COUNT(cases); i++) {
        struct ka_prompt_input input = full_input(cases[i].phase);
        struct ka_prompt prompt;
        assert_int_equal(ka_prompt_build(templates, &input, &prompt, &err), 0);
        assert_int_equal(prompt.count, 2);
        assert_int_equal(prompt.dropped_count, 0);
        assert_string_equal(prompt.messages[0].role, "system");
        assert_string_equal(prompt.messages[1].role, "user");
        const char *user = prompt.messages[1].content;
        for (size_t k = 0; cases[i].shown[k]; k++)
            assert_has(user, cases[i].shown[k]);
        assert_has(user, "x, w");
        assert_lacks(user, "{{");
        assert_lacks(prompt.messages[0].content, "{{");
        const char *best = strstr(user, "### best_pair (similarity 0.90)\n\n```python\nbest = 1\n```");
        const char *mid = strstr(user, "### mid_pair (similarity 0.50; schedule: swap_owner)");
        const char *last = strstr(user, "last_pair");
        assert_non_null(best);
        assert_true(best < mid && mid < last);
        ka_prompt_free(&prompt);
    }
}

static void prompt__draft_that_is_the_current_file__may_be_patched(void **state)
{
    (void)state;
    struct ka_prompt_input input = full_input(KA_PROMPT_DRAFT);
    struct ka_prompt prompt;
    assert_int_equal(ka_prompt_build(templates, &input, &prompt, &err), 0);
    assert_has(prompt.messages[1].content, "a patch applies to it");
    ka_prompt_free(&prompt);
    input.candidate = NULL;
    assert_int_equal(ka_prompt_build(templates, &input, &prompt, &err), 0);
    assert_lacks(prompt.messages[1].content, "a patch applies to it");
    ka_prompt_free(&prompt);
}

static void prompt__missing_facts__leave_no_empty_headings(void **state)
{
    (void)state;
    struct ka_prompt_input input = {.phase = KA_PROMPT_DRAFT, .stub = "f", .grads = "x", .forward = "SOURCE"};
    struct ka_prompt prompt;
    assert_int_equal(ka_prompt_build(templates, &input, &prompt, &err), 0);
    static const char *const headings[] = {"mechanical draft", "Similar pairs", "Tried so far",
                                           "What was found",   "checked on",    "report"};
    for (size_t i = 0; i < KA_COUNT(headings); i++)
        assert_lacks(prompt.messages[1].content, headings[i]);
    assert_lacks(prompt.messages[1].content, "\n\n\n");
    ka_prompt_free(&prompt);
}

/* What endpoints compute once: all that no turn changes comes first, byte for byte the same in each phase. */
static void prompt__beginning__is_the_same_in_every_turn(void **state)
{
    (void)state;
    static const enum ka_prompt_phase phases[] = {KA_PROMPT_DRAFT, KA_PROMPT_FIX, KA_PROMPT_OPTIMISE};
    struct ka_prompt made[KA_COUNT(phases)];
    for (size_t i = 0; i < KA_COUNT(phases); i++) {
        struct ka_prompt_input input = full_input(phases[i]);
        assert_int_equal(ka_prompt_build(templates, &input, &made[i], &err), 0);
    }
    const char *first = made[0].messages[1].content, *end = strstr(first, "# A mechanical draft");
    size_t len = (size_t)(end - first);
    assert_non_null(end);
    for (size_t i = 0; i < KA_COUNT(phases); i++) {
        assert_string_equal(made[i].messages[0].content, made[0].messages[0].content);
        assert_memory_equal(made[i].messages[1].content, first, len);
    }
    char *shared = ka_strndup(first, len);
    static const char *const held[] = {"# The forward", "What was found in it", "# Similar pairs",
                                       "best_pair"};
    for (size_t i = 0; i < KA_COUNT(held); i++)
        assert_has(shared, held[i]);
    free(shared);
    for (size_t i = 0; i < KA_COUNT(phases); i++)
        ka_prompt_free(&made[i]);
}

static void prompt__way_to_answer__depends_on_tools(void **state)
{
    (void)state;
    struct ka_prompt_input input = full_input(KA_PROMPT_FIX);
    struct ka_prompt prompt;
    assert_int_equal(ka_prompt_build(templates, &input, &prompt, &err), 0);
    assert_has(prompt.messages[0].content, "Call a tool. `submit_patch`");
    assert_has(prompt.messages[0].content, "softmax_autograd");
    ka_prompt_free(&prompt);
    input.tools = false;
    assert_int_equal(ka_prompt_build(templates, &input, &prompt, &err), 0);
    assert_lacks(prompt.messages[0].content, "Call a tool.");
    assert_has(prompt.messages[0].content, "one fenced `python` block");
    ka_prompt_free(&prompt);
}

static void prompt__over_budget__drops_pairs_then_history(void **state)
{
    (void)state;
    char big[3][2000];
    struct ka_prompt_pair pairs[3];
    for (int i = 0; i < 3; i++) {
        memset(big[i], 'x', sizeof(big[i]) - 1);
        big[i][sizeof(big[i]) - 1] = '\0';
        pairs[i] = PAIRS[i];
        pairs[i].backward = big[i];
    }
    struct ka_prompt_input input = full_input(KA_PROMPT_OPTIMISE);
    struct ka_prompt prompt;
    input.bytes_per_token = 1;
    input.budget_tokens = 1000000;
    input.pairs = pairs;
    assert_int_equal(ka_prompt_build(templates, &input, &prompt, &err), 0);
    size_t all = prompt.tokens;
    assert_int_equal(all, strlen(prompt.messages[0].content) + strlen(prompt.messages[1].content) + 1);
    ka_prompt_free(&prompt);

    input.budget_tokens = all - 1;
    assert_int_equal(ka_prompt_build(templates, &input, &prompt, &err), 0);
    assert_int_equal(prompt.dropped_count, 1);
    assert_string_equal(prompt.dropped[0], "pair last_pair (similarity 0.10)");
    assert_lacks(prompt.messages[1].content, "last_pair");
    assert_has(prompt.messages[1].content, "mid_pair");
    ka_prompt_free(&prompt);

    input.budget_tokens = all - 3 * 2000 - 600;
    assert_int_equal(ka_prompt_build(templates, &input, &prompt, &err), 0);
    assert_true(prompt.tokens <= input.budget_tokens);
    assert_true(prompt.dropped_count > 3);
    assert_string_equal(prompt.dropped[2], "pair best_pair (similarity 0.90)");
    assert_string_equal(prompt.dropped[3], "history 1: first move");
    assert_lacks(prompt.messages[1].content, "first move");
    assert_lacks(prompt.messages[1].content, "Similar pairs");
    ka_prompt_free(&prompt);

    input.budget_tokens = 100;
    assert_int_equal(ka_prompt_build(templates, &input, &prompt, &err), -E2BIG);
    assert_has(err.msg, "budget is 100");
}

static size_t tokens_of(const struct ka_prompt *prompt, const char *part)
{
    for (size_t i = 0; i < prompt->part_count; i++)
        if (strcmp(prompt->parts[i].name, part) == 0)
            return prompt->parts[i].tokens;
    return 0;
}

/* A heading and a sentence come with most parts. */
#define AROUND 260

static void prompt__each_part__keeps_to_its_share_of_the_budget(void **state)
{
    (void)state;
    struct ka_buf lines = {0};
    const char *moves[400];
    struct ka_prompt_pair pairs[30];
    struct ka_prompt_lesson lessons[30];
    for (size_t i = 0; i < 4000; i++)
        ka_buf_printf(&lines, "line %04zu of something long\n", i);
    for (size_t i = 0; i < KA_COUNT(moves); i++)
        moves[i] = "a move that was tried, and what came of it in so many words";
    for (size_t i = 0; i < KA_COUNT(pairs); i++) {
        pairs[i] = PAIRS[0];
        pairs[i].backward = ka_buf_str(&lines) + lines.len - 4000;
        lessons[i] =
            (struct ka_prompt_lesson){"raised, TypeError", "no 'to'", ka_buf_str(&lines) + lines.len - 400};
    }
    for (int phase = KA_PROMPT_DRAFT; phase <= KA_PROMPT_OPTIMISE; phase++) {
        struct ka_prompt_input input = full_input((enum ka_prompt_phase)phase);
        struct ka_prompt prompt;
        input.inspect = input.draft_report = input.verdict = input.facts = ka_buf_str(&lines);
        input.pairs = pairs;
        input.pair_count = KA_COUNT(pairs);
        input.lessons = lessons;
        input.lesson_count = KA_COUNT(lessons);
        input.history = moves;
        input.history_count = KA_COUNT(moves);
        input.budget_tokens = 20000;
        assert_int_equal(ka_prompt_build(templates, &input, &prompt, &err), 0);
        size_t sum = 0, shared = 0;
        for (size_t i = 0; i < prompt.part_count; i++)
            sum += prompt.parts[i].tokens;
        assert_in_range(sum, prompt.tokens - 20, prompt.tokens + 20);
        for (size_t i = 0; i < ka_prompt_share_count; i++) {
            size_t most = (size_t)(ka_prompt_shares[i].share * 20000),
                   tokens = tokens_of(&prompt, ka_prompt_shares[i].part);
            shared += most;
            assert_true(tokens <= most + AROUND);
            assert_true(tokens == 0 || tokens > most / 2); /* not less than there is room for */
        }
        assert_true(shared <= 20000 * 3 / 4);
        assert_has(prompt.messages[1].content, "more lines are left out)");
        ka_prompt_free(&prompt);
    }
    ka_buf_free(&lines);
}

/* What is said to every model, whatever the run: tokens that are paid for with each question. */
static void prompt__what_is_always_said__is_short(void **state)
{
    (void)state;
    for (int phase = KA_PROMPT_DRAFT; phase <= KA_PROMPT_OPTIMISE; phase++) {
        struct ka_prompt_input input = full_input((enum ka_prompt_phase)phase);
        struct ka_prompt prompt;
        assert_int_equal(ka_prompt_build(templates, &input, &prompt, &err), 0);
        assert_in_range(tokens_of(&prompt, "system"), 1000, 3500);
        assert_in_range(tokens_of(&prompt, "instructions"), 100, 1000);
        assert_int_equal(prompt.budget, KA_PROMPT_BUDGET);
        ka_prompt_free(&prompt);
    }
}

static void prompt__lessons__are_shown_where_something_is_written_or_mended(void **state)
{
    (void)state;
    static const struct ka_prompt_lesson lessons[] = {{"raised, TypeError", "no 'to'", "-r.to(x)\n+x\n"},
                                                      {"syntax", "invalid", "+y\n"}};
    for (int phase = KA_PROMPT_DRAFT; phase <= KA_PROMPT_OPTIMISE; phase++) {
        struct ka_prompt_input input = full_input((enum ka_prompt_phase)phase);
        struct ka_prompt prompt;
        input.lessons = lessons;
        input.lesson_count = KA_COUNT(lessons);
        bool shown = phase != KA_PROMPT_OPTIMISE;
        assert_int_equal(ka_prompt_build(templates, &input, &prompt, &err), 0);
        assert_int_equal(prompt.lessons, shown ? 2 : 0);
        assert_int_equal(tokens_of(&prompt, "lessons") > 0, shown);
        assert_int_equal(strstr(prompt.messages[1].content,
                                "### raised, TypeError\n\nWhat was found: no 'to'\n\n"
                                "What mended it:\n\n```diff\n-r.to(x)\n+x\n```\n\n"
                                "### syntax\n") != NULL,
                         shown);
        input.pair_count = input.history_count = 0;
        input.bytes_per_token = 1;
        input.budget_tokens = shown ? prompt.tokens * 4 : 1000000;
        ka_prompt_free(&prompt);
        assert_int_equal(ka_prompt_build(templates, &input, &prompt, &err), 0);
        size_t all = prompt.tokens;
        ka_prompt_free(&prompt);
        input.budget_tokens = all - 1;
        assert_int_equal(ka_prompt_build(templates, &input, &prompt, &err), shown ? 0 : -E2BIG);
        if (!shown)
            continue;
        assert_int_equal(prompt.lessons, 1); /* the last goes first */
        assert_string_equal(prompt.dropped[0], "lesson on syntax");
        ka_prompt_free(&prompt);
    }
}

static void prompt__most_similar_pair__stays_however_long(void **state)
{
    (void)state;
    struct ka_prompt_input input = full_input(KA_PROMPT_DRAFT);
    struct ka_prompt prompt;
    char *big = ka_calloc(40001, 1);
    memset(big, 'x', 40000);
    struct ka_prompt_pair pairs[] = {PAIRS[0], PAIRS[1]};
    pairs[1].backward = big;
    pairs[1].distant = true;
    pairs[1].math = "dx = dy * w\n";
    input.pairs = pairs;
    input.pair_count = 2;
    input.budget_tokens = 20000;
    assert_int_equal(ka_prompt_build(templates, &input, &prompt, &err), 0);
    assert_has(
        prompt.messages[1].content,
        "### best_pair (similarity 0.90: the nearest there is, and not near)\n\ndx = dy * w\n\n```python\n");
    assert_lacks(prompt.messages[1].content, "### mid_pair");
    ka_prompt_free(&prompt);
    free(big);
}

static void prompt__without_stub_or_forward__is_refused(void **state)
{
    (void)state;
    struct ka_prompt_input input = {.phase = KA_PROMPT_DRAFT, .stub = "f"};
    struct ka_prompt prompt;
    assert_int_equal(ka_prompt_build(templates, &input, &prompt, &err), -EINVAL);
}

static void prompt__retry__answers_the_tool_call(void **state)
{
    (void)state;
    struct ka_prompt_input input = full_input(KA_PROMPT_FIX);
    struct ka_prompt prompt;
    struct ka_chat_call call = {(char *)"c1", (char *)"submit_patch", (char *)"{\"patch\":\"p\"}"};
    struct ka_chat_answer answer = {.text = (char *)"", .calls = &call, .call_count = 1};
    assert_int_equal(ka_prompt_build(templates, &input, &prompt, &err), 0);
    ka_prompt_add_retry(&prompt, &answer, "it did not apply");
    assert_int_equal(prompt.count, 4);
    assert_string_equal(prompt.messages[2].role, "assistant");
    json_t *calls = json_loads(prompt.messages[2].tool_calls, 0, NULL);
    assert_string_equal(json_string_value(json_object_get(
                            json_object_get(json_array_get(calls, 0), "function"), "arguments")),
                        call.arguments);
    json_decref(calls);
    assert_string_equal(prompt.messages[3].role, "tool");
    assert_string_equal(prompt.messages[3].tool_call_id, "c1");
    assert_string_equal(prompt.messages[3].content, "it did not apply");

    call.arguments = (char *)"{\"patch\": ";
    ka_prompt_add_retry(&prompt, &answer, "no JSON");
    assert_int_equal(prompt.count, 6);
    assert_null(prompt.messages[4].tool_calls);
    assert_string_equal(prompt.messages[4].content, "submit_patch: {\"patch\": ");
    assert_string_equal(prompt.messages[5].role, "user");
    ka_prompt_free(&prompt);
}

static void prompt__retry__reads_the_answer_back_within_its_cap(void **state)
{
    (void)state;
    struct ka_prompt prompt = {0};
    struct ka_chat_answer answer = {.text = (char *)"I would rather not."};
    ka_prompt_add_retry(&prompt, &answer, "no code");
    assert_string_equal(prompt.messages[0].content, "I would rather not.");
    assert_string_equal(prompt.messages[1].content, "no code");
    ka_prompt_add_retry(&prompt, NULL, "no UTF-8");
    assert_has(prompt.messages[2].content, "could not be read");
    ka_prompt_free(&prompt);

    size_t len = KA_PROMPT_RETRY_BYTES + 100;
    char *text = ka_calloc(len + 1, 1);
    memset(text, 'x', len);
    memcpy(text + KA_PROMPT_RETRY_BYTES - 1, "\xc3\xa9", 2); /* across the cap */
    answer.text = text;
    ka_prompt_add_retry(&prompt, &answer, "too long");
    const char *back = prompt.messages[0].content;
    assert_has(back, "x\n(the rest is left out)");
    assert_true(strlen(back) < KA_PROMPT_RETRY_BYTES + 40);
    ka_prompt_free(&prompt);

    memset(text, '1', len); /* JSON, but too long to travel as a call */
    struct ka_chat_call call = {(char *)"c1", (char *)"submit_file", text};
    answer = (struct ka_chat_answer){.calls = &call, .call_count = 1};
    ka_prompt_add_retry(&prompt, &answer, "too long");
    assert_null(prompt.messages[0].tool_calls);
    assert_has(prompt.messages[0].content, "submit_file: 111");
    ka_prompt_free(&prompt);
    free(text);
}

static void prompts__missing_folder__is_an_error_with_its_path(void **state)
{
    (void)state;
    struct ka_prompts *none = NULL;
    struct ka_prompt_template untouched[KA_PROMPT_FILE_COUNT] = {{NULL, NULL}};
    assert_int_equal(ka_prompts_load("/nonexistent/prompts", &none, untouched, &err), -ENOENT);
    assert_null(none);
    assert_null(untouched[0].text);
    assert_has(err.msg, "/nonexistent/prompts/system.md");
}

int main(void)
{
#define TEST(name) cmocka_unit_test_teardown(name, free_out)
    const struct CMUnitTest tests[] = {
        TEST(template__names__are_replaced_once),
        TEST(template__values__lose_their_final_newlines),
        TEST(template__sections__are_shown_if_not_empty),
        TEST(template__tags_alone_on_a_line__vanish_with_it),
        TEST(template__mistakes__are_named_with_file_and_line),
        TEST(template__too_deep_or_too_long__is_refused),
        TEST(prompt__each_phase__shows_its_facts),
        TEST(prompt__draft_that_is_the_current_file__may_be_patched),
        TEST(prompt__missing_facts__leave_no_empty_headings),
        TEST(prompt__beginning__is_the_same_in_every_turn),
        TEST(prompt__way_to_answer__depends_on_tools),
        TEST(prompt__over_budget__drops_pairs_then_history),
        TEST(prompt__each_part__keeps_to_its_share_of_the_budget),
        TEST(prompt__lessons__are_shown_where_something_is_written_or_mended),
        TEST(prompt__what_is_always_said__is_short),
        TEST(prompt__most_similar_pair__stays_however_long),
        TEST(prompt__without_stub_or_forward__is_refused),
        TEST(prompt__retry__answers_the_tool_call),
        TEST(prompt__retry__reads_the_answer_back_within_its_cap),
        TEST(prompts__missing_folder__is_an_error_with_its_path),
    };
    return cmocka_run_group_tests(tests, load, unload);
}
