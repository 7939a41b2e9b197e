/* Prompts: which facts go into the templates, and what is left out when they do not fit. Must not know
 * endpoints, files or how an answer is read. */
#include "prompt.h"

#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/lines.h"
#include "place.h"

/* What of the input is shown: the first `pairs` of the ranked ones, the first lessons, the history from
 * `history_from` on. */
struct selection {
    const struct ka_prompt_pair **ranked;
    size_t pairs, lessons, history_from;
};

/* What is left of the budget is for what must be whole. */
const struct ka_prompt_share ka_prompt_shares[] = {
    {"inspect", 0.05}, {"verdict", 0.15}, {"facts", 0.05},   {"draft_report", 0.1},
    {"pairs", 0.25},   {"history", 0.1},  {"lessons", 0.05},
};
const size_t ka_prompt_share_count = KA_COUNT(ka_prompt_shares);

static const enum ka_prompt_file phase_files[] = {
    [KA_PROMPT_DRAFT] = KA_PROMPT_FILE_DRAFT,
    [KA_PROMPT_FIX] = KA_PROMPT_FILE_FIX,
    [KA_PROMPT_OPTIMISE] = KA_PROMPT_FILE_OPTIMISE,
};

static bool is_empty(const char *text)
{
    return !text || !*text;
}

static int more_similar(const void *a, const void *b)
{
    const struct ka_prompt_pair *x = *(const struct ka_prompt_pair *const *)a;
    const struct ka_prompt_pair *y = *(const struct ka_prompt_pair *const *)b;
    if (x->similarity != y->similarity)
        return x->similarity > y->similarity ? -1 : 1;
    return x < y ? -1 : x > y;
}

static void put_pairs(const struct selection *shown, struct ka_buf *out)
{
    for (size_t i = 0; i < shown->pairs; i++) {
        const struct ka_prompt_pair *pair = shown->ranked[i];
        ka_buf_printf(
            out, "### %s (similarity %.2f%s%s%s)\n\n", pair->id, pair->similarity,
            pair->distant ? ": the nearest there is, and not near" : "",
            is_empty(pair->schedule) ? "" : "; schedule: ", is_empty(pair->schedule) ? "" : pair->schedule);
        if (!is_empty(pair->math))
            ka_buf_printf(out, "%s\n", pair->math);
        ka_buf_puts(out, "```python\n");
        size_t len = strlen(pair->backward);
        while (len && pair->backward[len - 1] == '\n')
            len--;
        ka_buf_add(out, pair->backward, len);
        ka_buf_puts(out, "\n```\n\n");
    }
}

static void put_lessons(const struct ka_prompt_input *input, const struct selection *shown,
                        struct ka_buf *out)
{
    for (size_t i = 0; i < shown->lessons; i++) {
        const struct ka_prompt_lesson *lesson = &input->lessons[i];
        ka_buf_printf(out, "### %s\n\nWhat was found: %s\n\nWhat mended it:\n\n```diff\n%s```\n\n",
                      lesson->kind, lesson->finding, lesson->change);
    }
}

static void put_history(const struct ka_prompt_input *input, const struct selection *shown,
                        struct ka_buf *out)
{
    if (shown->history_from && shown->history_from < input->history_count)
        ka_buf_printf(out, "- (%zu older ones left out)\n", shown->history_from);
    for (size_t i = shown->history_from; i < input->history_count; i++)
        ka_buf_printf(out, "- %s\n", input->history[i]);
}

static double bytes_per_token(const struct ka_prompt_input *input)
{
    return input->bytes_per_token > 0 ? input->bytes_per_token : KA_PROMPT_BYTES_PER_TOKEN;
}

static size_t budget_of(const struct ka_prompt_input *input)
{
    return input->budget_tokens ? input->budget_tokens : KA_PROMPT_BUDGET;
}

/* Bytes that a part may have. */
static size_t share_of(const struct ka_prompt_input *input, const char *part)
{
    for (size_t i = 0; i < ka_prompt_share_count; i++)
        if (strcmp(ka_prompt_shares[i].part, part) == 0)
            return (size_t)((double)budget_of(input) * ka_prompt_shares[i].share * bytes_per_token(input));
    return KA_PROMPT_MAX_BYTES;
}

/* The lines of `text` that its share holds, from the first on. */
static void put_share(const struct ka_prompt_input *input, const char *part, const char *text,
                      struct ka_buf *out)
{
    size_t room = share_of(input, part), left = 0;
    if (is_empty(text))
        return;
    const char *cursor = text, *end = text + strlen(text);
    struct ka_line line;
    while (ka_line_next(&cursor, end, &line)) {
        if (left || out->len + line.len + 1 > room)
            left++;
        else
            ka_line_put(line, out);
    }
    if (left)
        ka_buf_printf(out, "(%zu more lines are left out)\n", left);
}

/* The values of a prompt's names, made for one selection. */
struct values {
    struct ka_buf pairs, lessons, history, forward, candidate, inspect, verdict, facts, draft_report;
    char *entry;
    struct ka_prompt_var vars[18];
};

static void values_free(struct values *values)
{
    struct ka_buf *const all[] = {&values->pairs,     &values->history,      &values->forward,
                                  &values->candidate, &values->inspect,      &values->verdict,
                                  &values->facts,     &values->draft_report, &values->lessons};
    for (size_t i = 0; i < KA_COUNT(all); i++)
        ka_buf_free(all[i]);
    free(values->entry);
}

static void values_make(const struct ka_prompt_input *input, const struct selection *shown,
                        struct values *values)
{
    values->entry = ka_format("%s_autograd", input->stub);
    put_pairs(shown, &values->pairs);
    put_lessons(input, shown, &values->lessons);
    put_history(input, shown, &values->history);
    ka_place_number(input->forward, &values->forward);
    ka_place_number(input->candidate ? input->candidate : "", &values->candidate);
    put_share(input, "inspect", input->inspect, &values->inspect);
    put_share(input, "verdict", input->verdict, &values->verdict);
    put_share(input, "facts", input->facts, &values->facts);
    put_share(input, "draft_report", input->draft_report, &values->draft_report);
    const struct ka_prompt_var vars[] = {
        {"stub", input->stub},
        {"entry", values->entry},
        {"grads", input->grads},
        {"device", input->device},
        {"tools", input->tools ? "yes" : ""},
        {"no_tools", input->tools ? "" : "yes"},
        {"repair", input->repair ? "yes" : ""},
        {"forward", values->forward.data},
        {"inspect", values->inspect.data},
        {"draft", input->draft},
        {"draft_report", values->draft_report.data},
        {"candidate", values->candidate.data},
        {"verdict", values->verdict.data},
        {"facts", values->facts.data},
        {"pairs", values->pairs.data},
        {"lessons", values->lessons.data},
        {"history", values->history.data},
        {"direction", input->direction},
    };
    memcpy(values->vars, vars, sizeof(vars));
}
#define FIRST_PART 7 /* of these: what comes of the run, not of the question */

static int render_user(const struct ka_prompt_template *templates, const struct ka_prompt_input *input,
                       const struct values *values, struct ka_buf *user, struct ka_err *err)
{
    return ka_prompt_render(&templates[phase_files[input->phase]], values->vars, KA_COUNT(values->vars), user,
                            err);
}

/* Each part is what its absence takes away. */
static void measure_parts(const struct ka_prompt_template *templates, const struct ka_prompt_input *input,
                          struct values *values, size_t system, size_t user, struct ka_prompt *prompt)
{
    size_t rest = user;
    prompt->part_count = 0;
    prompt->parts[prompt->part_count++] =
        (struct ka_prompt_part){"system", (size_t)((double)system / bytes_per_token(input))};
    for (size_t i = FIRST_PART; i < KA_COUNT(values->vars); i++) {
        KA_AUTO_BUF struct ka_buf without = {0};
        struct ka_prompt_var kept = values->vars[i];
        values->vars[i].value = NULL;
        int rc = render_user(templates, input, values, &without, NULL);
        values->vars[i] = kept;
        if (rc || without.len >= user)
            continue;
        size_t bytes = user - without.len;
        prompt->parts[prompt->part_count++] =
            (struct ka_prompt_part){kept.name, (size_t)((double)bytes / bytes_per_token(input))};
        rest -= bytes < rest ? bytes : rest;
    }
    prompt->parts[prompt->part_count++] =
        (struct ka_prompt_part){"instructions", (size_t)((double)rest / bytes_per_token(input))};
}

static void drop_pair(struct selection *shown, struct ka_prompt *prompt)
{
    const struct ka_prompt_pair *pair = shown->ranked[--shown->pairs];
    *KA_APPEND(prompt->dropped, prompt->dropped_count) =
        ka_format("pair %s (similarity %.2f)", pair->id, pair->similarity);
}

static void drop_lesson(const struct ka_prompt_input *input, struct selection *shown,
                        struct ka_prompt *prompt)
{
    *KA_APPEND(prompt->dropped, prompt->dropped_count) =
        ka_format("lesson on %s", input->lessons[--shown->lessons].kind);
}

static void drop_attempt(const struct ka_prompt_input *input, struct selection *shown,
                         struct ka_prompt *prompt)
{
    size_t i = shown->history_from++;
    const char *text = input->history[i];
    *KA_APPEND(prompt->dropped, prompt->dropped_count) =
        ka_format("history %zu: %.*s", i + 1, (int)strcspn(text, "\n"), text);
}

/* Leave one thing more out. False when nothing is left to leave out. */
static bool drop_one(const struct ka_prompt_input *input, struct selection *shown, struct ka_prompt *prompt)
{
    if (shown->pairs)
        drop_pair(shown, prompt);
    else if (shown->lessons)
        drop_lesson(input, shown, prompt);
    else if (shown->history_from < input->history_count)
        drop_attempt(input, shown, prompt);
    else
        return false;
    return true;
}

static void add_message(struct ka_prompt *prompt, const char *role, const char *content)
{
    *KA_APPEND(prompt->messages, prompt->count) =
        (struct ka_chat_message){.role = ka_strdup(role), .content = ka_strdup(content)};
}

/* Pairs but the first, lessons and history, until each keeps to its share. */
static void hold_shares(const struct ka_prompt_input *input, struct selection *shown,
                        struct ka_prompt *prompt)
{
    for (;;) {
        KA_AUTO_BUF struct ka_buf pairs = {0}, lessons = {0}, history = {0};
        put_pairs(shown, &pairs);
        put_lessons(input, shown, &lessons);
        put_history(input, shown, &history);
        if (shown->pairs > 1 && pairs.len > share_of(input, "pairs"))
            drop_pair(shown, prompt);
        else if (shown->lessons && lessons.len > share_of(input, "lessons"))
            drop_lesson(input, shown, prompt);
        else if (shown->history_from < input->history_count && history.len > share_of(input, "history"))
            drop_attempt(input, shown, prompt);
        else
            return;
    }
}

/* Render with less and less until it fits. */
static int fit(const struct ka_prompt_template *templates, const struct ka_prompt_input *input,
               struct selection *shown, struct ka_prompt *prompt, struct ka_err *err)
{
    KA_AUTO_BUF struct ka_buf system = {0}, user = {0};
    prompt->budget = budget_of(input);
    hold_shares(input, shown, prompt);
    for (bool fits = false; !fits;) {
        struct values values = {0};
        ka_buf_clear(&system);
        ka_buf_clear(&user);
        values_make(input, shown, &values);
        int rc = ka_prompt_render(&templates[KA_PROMPT_FILE_SYSTEM], values.vars, KA_COUNT(values.vars),
                                  &system, err);
        if (rc == 0)
            rc = render_user(templates, input, &values, &user, err);
        prompt->tokens = (size_t)((double)(system.len + user.len) / bytes_per_token(input)) + 1;
        fits = rc == 0 && prompt->tokens <= prompt->budget;
        if (fits)
            measure_parts(templates, input, &values, system.len, user.len, prompt);
        values_free(&values);
        if (rc)
            return rc;
        if (!fits && !drop_one(input, shown, prompt))
            return ka_fail(err, -E2BIG,
                           "the prompt needs about %zu tokens without any pair, lesson or history, and the "
                           "budget is %zu; "
                           "raise the budget or use a model with a longer context",
                           prompt->tokens, prompt->budget);
    }
    add_message(prompt, "system", ka_buf_str(&system));
    add_message(prompt, "user", ka_buf_str(&user));
    return 0;
}

int ka_prompt_build(const struct ka_prompt_template templates[KA_PROMPT_FILE_COUNT],
                    const struct ka_prompt_input *input, struct ka_prompt *out, struct ka_err *err)
{
    if (is_empty(input->stub) || is_empty(input->forward))
        return ka_fail(err, -EINVAL, "a prompt needs the stub's name and the forward source");
    struct ka_prompt prompt = {0};
    KA_AUTO_FREE const struct ka_prompt_pair **ranked = ka_calloc(input->pair_count, sizeof(*ranked));
    for (size_t i = 0; i < input->pair_count; i++)
        ranked[i] = &input->pairs[i];
    qsort(ranked, input->pair_count, sizeof(*ranked), more_similar);
    struct selection shown = {.ranked = ranked, .pairs = input->pair_count, .lessons = input->lesson_count};
    int rc = fit(templates, input, &shown, &prompt, err);
    for (size_t i = 0; i < prompt.part_count; i++) /* a template may have no place for them */
        if (strcmp(prompt.parts[i].name, "lessons") == 0)
            prompt.lessons = shown.lessons;
    if (rc)
        ka_prompt_free(&prompt);
    else
        *out = prompt;
    return rc;
}

int ka_prompt_check(const struct ka_prompt_template templates[KA_PROMPT_FILE_COUNT], struct ka_err *err)
{
    int rc = 0;
    for (int phase = KA_PROMPT_DRAFT; phase <= KA_PROMPT_OPTIMISE && rc == 0; phase++) {
        struct ka_prompt_input input = {.phase = (enum ka_prompt_phase)phase, .stub = "f", .forward = "f"};
        struct ka_prompt prompt = {0};
        rc = ka_prompt_build(templates, &input, &prompt, err);
        ka_prompt_free(&prompt);
    }
    return rc;
}

/* Retries */

/* The calls as an API wants them back; NULL when there are none, or one has no id, is too long, or has
 * arguments that are no JSON. */
static char *calls_as_json(const struct ka_chat_answer *answer)
{
    json_auto_t *calls = json_array();
    for (size_t i = 0; i < answer->call_count; i++) {
        const struct ka_chat_call *call = &answer->calls[i];
        bool fits = call->arguments && strlen(call->arguments) <= KA_PROMPT_RETRY_BYTES;
        json_auto_t *arguments = fits ? json_loads(call->arguments, 0, NULL) : NULL;
        if (!arguments || is_empty(call->id) ||
            json_array_append_new(calls,
                                  json_pack("{s:s,s:s,s:{s:s,s:s}}", "id", call->id, "type", "function",
                                            "function", "name", call->name, "arguments", call->arguments)))
            return NULL;
    }
    return answer->call_count ? json_dumps(calls, JSON_COMPACT) : NULL;
}

/* What the model said, to be read back to it: its text or refusal, and with `calls` what it called; a long
 * one without its end. free() it. */
static char *words_of(const struct ka_chat_answer *answer, bool calls)
{
    struct ka_buf words = {0};
    ka_buf_puts(&words, !is_empty(answer->text) ? answer->text : answer->refusal ? answer->refusal : "");
    for (size_t i = 0; i < answer->call_count && calls; i++)
        ka_buf_printf(&words, "%s%s: %s", words.len ? "\n\n" : "", answer->calls[i].name,
                      answer->calls[i].arguments ? answer->calls[i].arguments : "");
    if (words.len > KA_PROMPT_RETRY_BYTES) {
        size_t end = KA_PROMPT_RETRY_BYTES;
        while (end && (words.data[end] & 0xc0) == 0x80) /* not inside a UTF-8 sequence */
            end--;
        words.data[words.len = end] = '\0';
        ka_buf_puts(&words, "\n(the rest is left out)");
    }
    return ka_buf_steal(&words);
}

void ka_prompt_add_retry(struct ka_prompt *prompt, const struct ka_chat_answer *answer, const char *problem)
{
    static const struct ka_chat_answer unknown = {0};
    answer = answer ? answer : &unknown;
    char *calls = calls_as_json(answer);
    KA_AUTO_FREE char *words = words_of(answer, !calls);
    add_message(prompt, "assistant",
                is_empty(words) && !calls ? "(an answer that could not be read)" : words);
    if (!calls) {
        add_message(prompt, "user", problem);
        return;
    }
    prompt->messages[prompt->count - 1].tool_calls = calls;
    for (size_t i = 0; i < answer->call_count; i++) {
        add_message(prompt, "tool", problem);
        prompt->messages[prompt->count - 1].tool_call_id = ka_strdup(answer->calls[i].id);
    }
}

void ka_prompt_free(struct ka_prompt *prompt)
{
    for (size_t i = 0; i < prompt->count; i++)
        ka_chat_message_free(&prompt->messages[i]);
    for (size_t i = 0; i < prompt->dropped_count; i++)
        free(prompt->dropped[i]);
    free(prompt->messages);
    free(prompt->dropped);
    *prompt = (struct ka_prompt){0};
}
