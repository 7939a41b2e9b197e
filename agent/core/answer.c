/* Answers of models: tool calls, fenced blocks and bare patches become a new backward part. Must not know
 * endpoints, phases or verdicts; every message here is written for the model. */
#include "answer.h"

#include "base/lines.h"
#include "compose.h"
#include "patch.h"

#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>

#define MAX_CALLS 32

const struct ka_chat_tool ka_answer_tools[] = {
    {"submit_patch",
     "Change the current file. The patch is an envelope: '*** Begin Patch', '*** Update File: pair.py', "
     "then hunks, then '*** End Patch'. A hunk starts with '@@' (or '@@ def name' to say in which "
     "function), then unchanged lines with a leading space, removed lines with '-', added lines with '+'. "
     "Hunks are found by their context, not by line numbers; each must fit in exactly one place. Only "
     "lines below '" KA_MARKER "' may change.",
     "{\"type\": \"object\", \"required\": [\"patch\"], \"additionalProperties\": false, \"properties\": "
     "{\"patch\": {\"type\": \"string\", \"description\": \"the whole envelope\"}}}"},
    {"submit_file",
     "Replace the whole backward part: backward kernels, one torch.autograd.Function and "
     "<stub>_autograd with the stub's signature. Send only what belongs below '" KA_MARKER "'.",
     "{\"type\": \"object\", \"required\": [\"content\"], \"additionalProperties\": false, \"properties\": "
     "{\"content\": {\"type\": \"string\", \"description\": \"Python source without Markdown fences\"}}}"},
};
const size_t ka_answer_tool_count = KA_COUNT(ka_answer_tools);

/* Fenced blocks */

struct block {
    struct ka_line info; /* what follows the opening fence, stripped */
    const char *at;      /* the text between the fences */
    size_t len;
    bool closed;
};

/* The fence a line opens or closes with: its character and length, or length 0. */
static size_t fence_of(struct ka_line line, char *mark)
{
    size_t indent = ka_line_indent(line), n = 0;
    if (indent > 3 || indent == line.len)
        return 0;
    *mark = line.at[indent];
    if (*mark != '`' && *mark != '~')
        return 0;
    while (indent + n < line.len && line.at[indent + n] == *mark)
        n++;
    return n >= 3 ? n : 0;
}

/* The next fenced block from *cursor; false when there is none. A last block may lack its closing fence. */
static bool next_block(const char **cursor, const char *end, struct block *block)
{
    struct ka_line line;
    char mark = 0, closing = 0;
    size_t width = 0;
    while (!width) {
        if (!ka_line_next(cursor, end, &line))
            return false;
        width = fence_of(line, &mark);
    }
    struct ka_line text = ka_line_strip(line);
    *block = (struct block){.info = ka_line_strip((struct ka_line){text.at + width, text.len - width}),
                            .at = *cursor};
    const char *stop = *cursor;
    while (ka_line_next(cursor, end, &line)) {
        text = ka_line_strip(line);
        if (fence_of(line, &closing) >= width && closing == mark && fence_of(line, &closing) == text.len) {
            block->closed = true;
            break;
        }
        stop = *cursor;
    }
    block->len = (size_t)(stop - block->at);
    return true;
}

/* Tool content that is wrapped in one fence, as models like to do: the inside; else the text itself. */
static char *without_fence(const char *text)
{
    const char *cursor = text, *end = text + strlen(text);
    struct ka_line first = {text, 0};
    char mark;
    struct block block;
    while (ka_line_next(&cursor, end, &first) && !ka_line_strip(first).len)
        ;
    if (!fence_of(first, &mark))
        return ka_strdup(text);
    cursor = text;
    return next_block(&cursor, end, &block) ? ka_strndup(block.at, block.len) : ka_strdup(text);
}

static bool is_python_block(const struct block *block)
{
    static const char *const names[] = {"", "python", "py", "python3", "Python", "triton"};
    for (size_t i = 0; i < KA_COUNT(names); i++)
        if (ka_line_is(block->info, names[i]))
            return true;
    return false;
}

/* Taking over code and patches */

/* Lines as the question shows them, with their numbers ("  12| x"), also in a patch. */
static bool has_numbers(const char *text)
{
    const char *end = text + strlen(text);
    size_t numbered = 0;
    struct ka_line line;
    while (ka_line_next(&text, end, &line)) {
        size_t i = line.len && strchr("+-", line.at[0]) ? 1 : 0, digits = 0;
        while (i < line.len && line.at[i] == ' ')
            i++;
        while (i + digits < line.len && line.at[i + digits] >= '0' && line.at[i + digits] <= '9')
            digits++;
        numbered += digits && i + digits < line.len && line.at[i + digits] == '|';
    }
    return numbered > 2;
}

static int numbers_error(struct ka_err *err)
{
    return ka_fail(err, -EINVAL,
                   "The lines carry the numbers that the question shows at their left. Send them without.");
}

static int take_code(const char *code, struct ka_buf *current, struct ka_err *err)
{
    const char *after = ka_compose_after_marker(code, true);
    code = after ? after : code;
    size_t len = strlen(code);
    if (len > KA_ANSWER_MAX_BYTES)
        return ka_fail(err, -EFBIG, "The code has %zu bytes; a backward part may have at most %zu.", len,
                       KA_ANSWER_MAX_BYTES);
    if (has_numbers(code))
        return numbers_error(err);
    if (strstr(code, "kernel_agent import"))
        return ka_fail(err, -EINVAL,
                       "The code repeats the forward part without the line '%s'. Send only what belongs "
                       "below that line.",
                       KA_MARKER);
    if (!strstr(code, "_autograd("))
        return ka_fail(err, -EINVAL,
                       "The code defines no `<stub>_autograd(...)`, so it is not a whole backward part. "
                       "Send all of it, or change the current one by a patch.");
    struct ka_buf tidy = {0};
    ka_compose_tidy(code, len, &tidy);
    ka_buf_free(current);
    *current = tidy;
    return 0;
}

/* The pair as the model saw it: forward part, marker, backward part. The forward is taken byte by byte, so
 * that its lines can be context of a hunk. */
static void join(const char *forward, const char *backward, struct ka_buf *pair)
{
    const char *after = ka_compose_after_marker(forward, false),
               *end = after ? after : forward + strlen(forward);
    ka_buf_printf(pair, "%.*s%s%s\n\n%s", (int)(end - forward), forward,
                  end > forward && end[-1] != '\n' ? "\n" : "", after ? "" : "\n" KA_MARKER "\n", backward);
}

static int take_patch(const char *patch, const char *forward, struct ka_buf *current, struct ka_err *err)
{
    KA_AUTO_BUF struct ka_buf pair = {0}, changed = {0};
    struct ka_err why = {{0}};
    if (has_numbers(patch))
        return numbers_error(err);
    join(forward, ka_buf_str(current), &pair);
    int rc =
        ka_patch_apply(ka_buf_str(&pair), patch, ka_compose_forward_lines(ka_buf_str(&pair)), &changed, &why);
    return rc ? ka_fail(err, rc, "The patch did not apply: %s.", why.msg)
              : take_code(ka_buf_str(&changed), current, err);
}

/* The ways to answer */

/* Did the endpoint say so? */
static bool hit_limit(const struct ka_chat_answer *answer)
{
    return answer->finish_reason && strcmp(answer->finish_reason, "length") == 0;
}

/* Something is unfinished: is that because the answer was? */
static bool was_cut(const struct ka_chat_answer *answer)
{
    return !answer->finish_reason || hit_limit(answer);
}

static int cut_error(bool tools, struct ka_err *err)
{
    return ka_fail(
        err, -EFBIG,
        "The answer was cut before its end. Answer with less: a %s with only the changed lines, and "
        "no explanation.",
        tools ? "submit_patch" : "patch");
}

static int take_call(const struct ka_chat_answer *answer, const struct ka_chat_call *call,
                     const char *forward, struct ka_buf *current, struct ka_err *err)
{
    bool file = strcmp(call->name, "submit_file") == 0;
    if (!file && strcmp(call->name, "submit_patch") != 0)
        return ka_fail(err, -EPROTO, "There is no tool '%.60s'. Call submit_patch or submit_file.",
                       call->name);
    const char *key = file ? "content" : "patch", *arguments = call->arguments ? call->arguments : "";
    if (strlen(arguments) > 4 * KA_ANSWER_MAX_BYTES)
        return ka_fail(err, -EFBIG, "The arguments of %s are longer than %zu bytes.", call->name,
                       4 * KA_ANSWER_MAX_BYTES);
    json_error_t where;
    json_auto_t *root = json_loads(arguments, 0, &where);
    if (!root && was_cut(answer))
        return cut_error(true, err);
    if (!root)
        return ka_fail(err, -EPROTO,
                       "The arguments of %s are not valid JSON (line %d, column %d: %s). Send "
                       "{\"%s\": \"...\"} with newlines written as \\n.",
                       call->name, where.line, where.column, where.text, key);
    const char *given = json_string_value(json_object_get(root, key));
    if (!given)
        return ka_fail(err, -EPROTO, "The arguments of %s lack the string \"%s\".", call->name, key);
    KA_AUTO_FREE char *text = without_fence(given);
    return file && !ka_patch_is_in(text) ? take_code(text, current, err)
                                         : take_patch(text, forward, current, err);
}

static int take_calls(const struct ka_chat_answer *answer, const char *forward, struct ka_buf *current,
                      struct ka_err *err)
{
    if (answer->call_count > MAX_CALLS)
        return ka_fail(err, -EPROTO,
                       "%zu tool calls in one answer are too many; make one submit_patch of them.",
                       answer->call_count);
    int rc = 0;
    for (size_t i = 0; i < answer->call_count && rc == 0; i++) {
        struct ka_err why = {{0}};
        rc = take_call(answer, &answer->calls[i], forward, current, &why);
        if (rc && answer->call_count > 1)
            ka_fail(err, rc, "Tool call %zu of %zu (none was applied): %s", i + 1, answer->call_count,
                    why.msg);
        else if (rc)
            ka_fail(err, rc, "%s", why.msg);
    }
    return rc;
}

/* The last block that is a patch or a whole backward part, else the largest Python block. */
static bool choose_block(const char *text, struct block *chosen, bool *patch)
{
    const char *cursor = text, *end = text + strlen(text);
    struct block block;
    bool found = false, good = false;
    while (next_block(&cursor, end, &block)) {
        KA_AUTO_FREE char *code = ka_strndup(block.at, block.len);
        bool is_patch = ka_patch_is_in(code);
        bool whole =
            !is_patch && is_python_block(&block) && strstr(code, "_autograd(") && strstr(code, "def ");
        bool larger = is_python_block(&block) && (!found || block.len > chosen->len);
        if (is_patch || whole || (!good && larger)) {
            *chosen = block;
            *patch = is_patch;
            found = true;
            good = good || is_patch || whole;
        }
    }
    return found;
}

/* The text without what was thought before it; chat templates often leave out the opening tag. What has no
 * end holds no answer. */
static const char *after_thinking(const char *text)
{
    static const char *const tags[] = {"think", "thinking"};
    const char *rest = text + strspn(text, " \t\r\n");
    for (size_t i = 0; i < KA_COUNT(tags); i++) {
        char opening[16], closing[16];
        snprintf(opening, sizeof(opening), "<%s>", tags[i]);
        snprintf(closing, sizeof(closing), "</%s>", tags[i]);
        bool opened = strncmp(rest, opening, strlen(opening)) == 0;
        const char *end = strstr(rest, closing), *other = strstr(rest, opening);
        if (end && (opened || !other || other > end))
            return end + strlen(closing);
        if (opened)
            return rest + strlen(rest);
    }
    return text;
}

static const char *text_of(const struct ka_chat_answer *answer)
{
    return answer->text ? after_thinking(answer->text) : "";
}

static int take_text(const struct ka_chat_answer *answer, const char *forward, bool tools,
                     struct ka_buf *current, struct ka_err *err)
{
    const char *text = text_of(answer);
    struct block block;
    bool patch = false;
    if (choose_block(text, &block, &patch)) {
        if (!block.closed && was_cut(answer))
            return cut_error(tools, err);
        KA_AUTO_FREE char *code = ka_strndup(block.at, block.len);
        return patch ? take_patch(code, forward, current, err) : take_code(code, current, err);
    }
    if (ka_patch_is_in(text))
        return was_cut(answer) && !strstr(text, "*** End Patch") ? cut_error(tools, err)
                                                                 : take_patch(text, forward, current, err);
    if (hit_limit(answer))
        return cut_error(tools, err);
    return ka_fail(
        err, -ENODATA,
        "There is no code in the answer. %s one fenced ```python block with the whole backward part%s.",
        tools ? "Call submit_patch or submit_file, or send" : "It has to hold",
        tools ? "" : ", or a patch in the form that the question shows");
}

bool ka_answer_is_nothing(const struct ka_chat_answer *answer)
{
    struct block block;
    bool patch = false;
    const char *text = text_of(answer);
    return !answer->call_count && strcasestr(text, KA_ANSWER_NOTHING) && !ka_patch_is_in(text) &&
           !choose_block(text, &block, &patch);
}

int ka_answer_apply(const struct ka_chat_answer *answer, const char *forward, const char *backward,
                    bool tools, struct ka_buf *out, struct ka_err *err)
{
    if (answer->refusal && *answer->refusal && !answer->call_count)
        return ka_fail(err, -ECONNREFUSED, "The model refused: %.300s", answer->refusal);
    KA_AUTO_BUF struct ka_buf before = {0}, current = {0};
    ka_compose_tidy(backward, strlen(backward), &before);
    ka_buf_add(&current, ka_buf_str(&before), before.len);
    int rc = answer->call_count ? take_calls(answer, forward, &current, err)
                                : take_text(answer, forward, tools, &current, err);
    if (rc)
        return rc;
    if (current.len == before.len && memcmp(ka_buf_str(&current), ka_buf_str(&before), before.len) == 0)
        return ka_fail(err, -EALREADY, "The answer changes nothing: the file is the same as before.");
    return ka_buf_add(out, ka_buf_str(&current), current.len);
}
