/* Pairs as text. Follows Python's strings and comments just enough to know where a line of code begins; must
 * not know anything else of Python. */
#include "compose.h"

#include "base/lines.h"

#include <ctype.h>
#include <errno.h>
#include <string.h>

/* Is a line inside a triple-quoted string or a continued one? Feed the lines in order. */
struct python_lines {
    char quote;  /* the quote character of an open string, or 0 */
    bool triple; /* else it can only go on after a backslash */
};

static void skip_line(struct python_lines *state, struct ka_line line)
{
    for (size_t i = 0; i < line.len; i++) {
        char c = line.at[i];
        bool three = i + 2 < line.len && line.at[i + 1] == c && line.at[i + 2] == c;
        if (state->quote) {
            if (c == '\\') {
                i++;
                if (i >= line.len)
                    return; /* the string goes on */
            } else if (c == state->quote && (!state->triple || three)) {
                i += state->triple ? 2 : 0;
                state->quote = 0;
            }
        } else if (c == '#') {
            return;
        } else if (c == '"' || c == '\'') {
            state->quote = c;
            state->triple = three;
            i += three ? 2 : 0;
        }
    }
    if (state->quote && !state->triple)
        state->quote = 0; /* an unclosed string: Python will complain, we go on */
}

/* "# ---- backward ----", also with other dashes, blanks or case. */
static bool is_loose_marker(struct ka_line line)
{
    static const char word[] = "backward";
    size_t matched = 0, dashes = 0;
    line = ka_line_strip(line);
    if (!ka_line_starts(line, "#"))
        return false;
    for (size_t i = 0; i < line.len; i++) {
        char c = (char)tolower((unsigned char)line.at[i]);
        if (strchr("#-=_ \t", c) && (matched == 0 || matched == sizeof(word) - 1))
            dashes += c == '-' || c == '=';
        else if (matched < sizeof(word) - 1 && c == word[matched])
            matched++;
        else
            return false;
    }
    return matched == sizeof(word) - 1 && dashes >= 2;
}

const char *ka_compose_after_marker(const char *text, bool loose)
{
    const char *cursor = text, *end = text + strlen(text), *after = NULL;
    struct ka_line line;
    if (ka_marker_find(text, strlen(text), &after) || !loose)
        return after;
    while (ka_line_next(&cursor, end, &line))
        if (is_loose_marker(line))
            return cursor;
    return NULL;
}

size_t ka_compose_forward_lines(const char *text)
{
    const char *stop = ka_compose_after_marker(text, false), *cursor = text;
    struct ka_line line;
    size_t count = 0;
    while (stop && cursor < stop && ka_line_next(&cursor, stop, &line))
        count++;
    return count;
}

void ka_compose_tidy(const char *text, size_t len, struct ka_buf *out)
{
    const char *cursor = text, *end = text + len;
    struct ka_line line;
    size_t blank = 0;
    bool begun = false;
    while (ka_line_next(&cursor, end, &line)) {
        if (!ka_line_strip(line).len) {
            blank++;
            continue;
        }
        for (; begun && blank; blank--)
            ka_buf_puts(out, "\n");
        blank = 0;
        begun = true;
        ka_line_put(line, out);
    }
}

int ka_compose_split(const char *text, struct ka_buf *forward, struct ka_buf *backward, struct ka_err *err)
{
    const char *after = NULL, *marker = ka_marker_find(text, strlen(text), &after);
    if (!marker)
        return ka_fail(err, -ENOENT, "there is no line '%s'", KA_MARKER);
    ka_compose_tidy(text, (size_t)(marker - text), forward);
    ka_compose_tidy(after, strlen(after), backward);
    return 0;
}

static bool is_name_char(char c)
{
    return isalnum((unsigned char)c) || c == '_';
}

static bool is_name(struct ka_line text)
{
    for (size_t i = 0; i < text.len; i++)
        if (!is_name_char(text.at[i]))
            return false;
    return text.len > 0 && !isdigit((unsigned char)text.at[0]);
}

/* Cut the first word (up to a blank) off the line and return it; empty at the end of the line. */
static struct ka_line take_word(struct ka_line *line)
{
    struct ka_line rest = ka_line_strip(*line), word = {rest.at, 0};
    while (word.len < rest.len && rest.at[word.len] != ' ' && rest.at[word.len] != '\t')
        word.len++;
    *line = ka_line_strip((struct ka_line){rest.at + word.len, rest.len - word.len});
    return word;
}

/* Does the text name the package itself, not a longer name that contains it? */
static bool names_package(struct ka_line text)
{
    static const char package[] = "kernel_agent";
    size_t len = sizeof(package) - 1;
    for (size_t i = 0; i + len <= text.len; i++) {
        bool starts = i == 0 || !is_name_char(text.at[i - 1]);
        bool ends = i + len == text.len || !is_name_char(text.at[i + len]);
        if (starts && ends && memcmp(text.at + i, package, len) == 0)
            return true;
    }
    return false;
}

enum import_kind { IMPORT_NONE, IMPORT_AUTODIFF, IMPORT_OTHER };

/* What a stripped line of code imports of kernel_agent; for IMPORT_AUTODIFF also the name it is bound to. */
static enum import_kind classify_import(struct ka_line code, struct ka_line *name)
{
    const char *comment = code.len ? memchr(code.at, '#', code.len) : NULL;
    if (comment)
        code.len = (size_t)(comment - code.at);
    struct ka_line verb = take_word(&code);
    if (ka_line_is(verb, "import"))
        return names_package(code) ? IMPORT_OTHER : IMPORT_NONE;
    struct ka_line module = take_word(&code);
    if (!ka_line_is(verb, "from") || !names_package(module))
        return IMPORT_NONE;
    bool known = ka_line_is(module, "kernel_agent") || ka_line_is(module, "kernel_agent.autodiff");
    if (!known || !ka_line_is(take_word(&code), "import"))
        return IMPORT_OTHER;
    if (code.len > 2 && code.at[0] == '(' && code.at[code.len - 1] == ')')
        code = ka_line_strip((struct ka_line){code.at + 1, code.len - 2});
    *name = take_word(&code);
    if (!ka_line_is(*name, "autodiff"))
        return IMPORT_OTHER;
    if (!code.len)
        return IMPORT_AUTODIFF;
    bool renamed = ka_line_is(take_word(&code), "as");
    *name = take_word(&code);
    return renamed && is_name(*name) && !code.len ? IMPORT_AUTODIFF : IMPORT_OTHER;
}

/* `older`: the forward spells its argument as the earlier program did. */
static void put_marker_function(struct ka_buf *out, struct ka_line line, struct ka_line name, bool older)
{
    int indent = (int)ka_line_indent(line);
    ka_buf_printf(out,
                  "%.*sdef %.*s(inputs_require_grad=()%s):  # marks the stub for kernel-agent\n"
                  "%.*s    return lambda stub: stub\n",
                  indent, line.at, (int)name.len, name.at, older ? ", idxs_buffers=()" : "", indent, line.at);
}

/* Blank lines until there are two since the last code: what stands around a function at the top level. */
static void put_gap(struct ka_buf *out)
{
    size_t blank = 0;
    while (blank < 2 && blank + 1 < out->len && out->data[out->len - 2 - blank] == '\n')
        blank++;
    ka_buf_add(out, "\n\n", out->len ? 2 - blank : 0);
}

/* The forward part with its imports of kernel_agent replaced. */
static int put_forward(const char *text, size_t len, struct ka_buf *out, struct ka_err *err)
{
    const char *cursor = text, *end = text + len;
    struct python_lines state = {0};
    struct ka_line line, name;
    bool gap = false; /* the marker function was the last code */
    bool older = memmem(text, len, "idxs_buffers", strlen("idxs_buffers"));
    for (size_t number = 1; ka_line_next(&cursor, end, &line); number++) {
        bool in_string = state.quote != 0;
        skip_line(&state, line);
        enum import_kind kind = in_string ? IMPORT_NONE : classify_import(ka_line_strip(line), &name);
        if (kind == IMPORT_OTHER)
            return ka_fail(
                err, -EINVAL,
                "line %zu: '%.*s' cannot stay in a finished pair; import only the decorator, by 'from "
                "kernel_agent import autodiff'",
                number, (int)(line.len < 100 ? line.len : 100), line.at);
        bool blank = !ka_line_strip(line).len, top = !ka_line_indent(line);
        if (!blank && top && (gap || kind == IMPORT_AUTODIFF))
            put_gap(out);
        gap = (gap && blank) || (kind == IMPORT_AUTODIFF && top);
        if (kind == IMPORT_AUTODIFF)
            put_marker_function(out, line, name, older);
        else
            ka_line_put(line, out);
    }
    return 0;
}

int ka_compose_pair(const char *forward, const char *backward, struct ka_buf *out, struct ka_err *err)
{
    KA_AUTO_BUF struct ka_buf front = {0}, back = {0}, code = {0};
    if (ka_compose_split(forward, &front, &back, NULL))
        ka_compose_tidy(forward, strlen(forward), &front);
    int rc = put_forward(ka_buf_str(&front), front.len, &code, err);
    if (rc)
        return rc;
    if (*backward) {
        ka_buf_puts(&code, "\n\n" KA_MARKER "\n\n\n");
        ka_compose_tidy(backward, strlen(backward), &code);
    }
    return ka_buf_add(out, ka_buf_str(&code), code.len);
}

bool ka_compose_by_hand(const char *text)
{
    return strstr(text, "autograd") && strstr(text, "Function)") && strstr(text, "def backward(");
}
