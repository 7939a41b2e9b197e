/* Lines of a pair and tracebacks in the model's words. Knows the layout of a traceback, not what raised. */
#include "place.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/lines.h"
#include "base/marker.h"
#include "fields.h"

#define QUOTED_MAX 120 /* bytes of a line of code */
#define TEXT_MAX 2000  /* bytes of a message */
#define TRACE_MAX 3000 /* bytes of a traceback: its end, which says what happened */

/* The first line that is not blank, from `text` on. */
static const char *first_line(const char *text)
{
    const char *cursor = text, *end = text + strlen(text);
    struct ka_line line;
    while (ka_line_next(&cursor, end, &line))
        if (ka_line_strip(line).len)
            return line.at;
    return end;
}

void ka_place_number(const char *text, struct ka_buf *out)
{
    const char *cursor = text, *end = text + strlen(text);
    struct ka_line line;
    size_t blank = 0, number = 0; /* of the last line that was put, or passed over */
    while (ka_line_next(&cursor, end, &line)) {
        if (!ka_line_strip(line).len) {
            blank++;
            continue;
        }
        for (; blank && number; blank--)
            ka_buf_printf(out, "%4zu|\n", ++number);
        number += blank + 1;
        blank = 0;
        ka_buf_printf(out, "%4zu| ", number);
        ka_line_put(line, out);
    }
}

/* Line `number`, from 1; false without it. */
static bool line_at(const char *text, const char *end, json_int_t number, struct ka_line *line)
{
    bool found = number > 0;
    while (found && number--)
        found = ka_line_next(&text, end, line);
    return found;
}

static json_int_t count_lines(const char *text, const char *end)
{
    struct ka_line line;
    json_int_t count = 0;
    while (ka_line_next(&text, end, &line))
        count++;
    return count;
}

/* The number in the forward as it is shown: below its imports, lines of a pair have moved. 0: not there. */
static json_int_t line_of_forward(const char *forward, struct ka_line wanted, json_int_t number,
                                  json_int_t from_end)
{
    const char *after, *text = forward, *end = forward + strlen(forward);
    const char *marker = ka_marker_find(forward, strlen(forward), &after);
    json_int_t blank = count_lines(forward, first_line(forward));
    struct ka_line line;
    end = marker ? marker : end;
    while (end > text && isspace((unsigned char)end[-1]))
        end--;
    json_int_t places[] = {number + blank, count_lines(text, end) - from_end};
    for (size_t i = 0; i < KA_COUNT(places); i++)
        if (line_at(text, end, places[i], &line) && ka_line_same(line, wanted))
            return places[i];
    return 0;
}

static void quote(struct ka_line line, struct ka_buf *out)
{
    line = ka_line_strip(line);
    if (line.len)
        ka_buf_printf(out, ", `%.*s%s`", (int)(line.len < QUOTED_MAX ? line.len : QUOTED_MAX), line.at,
                      line.len < QUOTED_MAX ? "" : "...");
}

/* "line 7 of the backward part"; false, and nothing, for no line of the pair. */
static bool put_line(const struct ka_place *place, json_int_t number, struct ka_line *line,
                     struct ka_buf *out)
{
    const char *pair = place->pair, *after = NULL, *end = pair + strlen(pair);
    const char *marker = ka_marker_find(pair, strlen(pair), &after);
    if (!line_at(pair, end, number, line))
        return false;
    if (place->whole) {
        ka_buf_printf(out, "line %lld", (long long)number);
        return true;
    }
    if (marker && line->at > marker) {
        json_int_t before = count_lines(pair, first_line(after));
        if (number > before)
            ka_buf_printf(out, "line %lld of the backward part", (long long)(number - before));
        return number > before;
    }
    const char *stop = marker ? marker : end;
    while (stop > pair && isspace((unsigned char)stop[-1]))
        stop--;
    json_int_t own = !place->forward
                         ? number
                         : line_of_forward(place->forward, *line, number, count_lines(pair, stop) - number);
    if (own)
        ka_buf_printf(out, "line %lld of the forward", (long long)own);
    else
        ka_buf_puts(out, "a line of the forward");
    return true;
}

void ka_place_line(const struct ka_place *place, json_int_t line, struct ka_buf *out)
{
    struct ka_line found;
    if (put_line(place, line, &found, out))
        quote(found, out);
}

void ka_place_retell(const struct ka_place *place, const char *text, struct ka_buf *out)
{
    static const char word[] = "line ";
    KA_AUTO_FREE char *start = ka_strndup(text, strnlen(text, TEXT_MAX));
    struct ka_line found;
    for (text = start; *text;) {
        const char *at = strstr(text, word), *digits = at ? at + strlen(word) : NULL;
        if (!at || !place || place->whole) {
            ka_buf_puts(out, text);
            return;
        }
        bool begins = at == text || !isalnum((unsigned char)at[-1]);
        size_t len = begins ? strspn(digits, "0123456789") : 0;
        ka_buf_add(out, text, (size_t)(at - text));
        if (!len || len > 9 || !put_line(place, strtoll(digits, NULL, 10), &found, out))
            ka_buf_add(out, at, strlen(word) + len);
        text = digits + len;
    }
}

static bool is_path_char(char c)
{
    return isalnum((unsigned char)c) || (c && strchr("/._-+@~", c));
}

void ka_place_without_paths(const char *text, struct ka_buf *out)
{
    const char *at = text;
    while (*at) {
        bool begins = *at == '/' && (at == text || strchr(" \t\n\"'`(=:,[<", at[-1])) &&
                      (isalnum((unsigned char)at[1]) || at[1] == '.' || at[1] == '_');
        size_t len = 0, name = 0, slashes = 0;
        while (begins && is_path_char(at[len])) {
            slashes += at[len] == '/';
            name = at[len++] == '/' ? len : name;
        }
        if (slashes < 2)
            name = 0, len = len ? len : 1;
        ka_buf_add(out, at + name, len - name);
        at += len;
    }
}

/* "  File "x.py", line 7, in f": its number and, in *name, what follows "in". */
static bool is_frame(struct ka_line line, json_int_t *number, struct ka_line *name)
{
    static const char word[] = "\", line ", in[] = ", in ";
    char text[24];
    line = ka_line_strip(line);
    if (!ka_line_starts(line, "File \""))
        return false;
    const char *end = line.at + line.len;
    const char *at = memmem(line.at, line.len, word, strlen(word));
    if (!at)
        return false;
    at += strlen(word);
    snprintf(text, sizeof(text), "%.*s", (int)(end - at), at);
    *number = strtoll(text, NULL, 10);
    at = memmem(at, (size_t)(end - at), in, strlen(in));
    *name =
        at ? (struct ka_line){at + strlen(in), (size_t)(end - at) - strlen(in)} : (struct ka_line){end, 0};
    return true;
}

static void put_trace(const struct ka_place *place, const char *trace, struct ka_buf *out)
{
    const char *cursor = trace, *end = trace + strlen(trace);
    KA_AUTO_BUF struct ka_buf told = {0};
    struct ka_line line, name, found;
    json_int_t number;
    while (ka_line_next(&cursor, end, &line)) {
        if (!is_frame(line, &number, &name)) {
            ka_line_put(line, &told);
            continue;
        }
        ka_buf_puts(&told, "  ");
        if (!put_line(place, number, &found, &told))
            ka_buf_puts(&told, "another place");
        if (name.len)
            ka_buf_printf(&told, ", in %.*s", (int)name.len, name.at);
        ka_buf_puts(&told, ":\n");
    }
    ka_place_without_paths(ka_buf_str(&told), out);
}

void ka_place_error(const struct ka_place *place, const json_t *error, struct ka_buf *out)
{
    const char *trace = ka_text_of(error, "traceback", "");
    const char *given = ka_text_of(error, "message", "an error without a message");
    KA_AUTO_FREE char *message = ka_strndup(given, strnlen(given, TEXT_MAX));
    size_t len = strlen(trace);
    const char *from = len > TRACE_MAX ? trace + len - TRACE_MAX : trace;
    if (from > trace)
        from += strcspn(from, "\n");
    if (!place || place->whole) {
        ka_buf_printf(out, "%s%s%s", message, *trace ? "\n" : "", from);
        return;
    }
    ka_place_without_paths(message, out);
    ka_buf_puts(out, *trace ? "\n" : "");
    put_trace(place, from, out);
}

/* A name of the candidate's own making could tell a size. */
const char *ka_place_known_type(const char *message)
{
    static const char *const names[] = {
        "ArithmeticError",
        "AssertionError",
        "AttributeError",
        "CompilationError",
        "FloatingPointError",
        "ImportError",
        "IndexError",
        "InterpreterError",
        "KeyError",
        "LookupError",
        "MemoryError",
        "NameError",
        "NotImplementedError",
        "OutOfMemoryError",
        "OutOfResources",
        "OverflowError",
        "RecursionError",
        "RuntimeError",
        "StopIteration",
        "SystemExit",
        "TypeError",
        "UnboundLocalError",
        "UnsupportedLanguageConstruct",
        "ValueError",
        "ZeroDivisionError",
    };
    size_t len = strspn(message, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ");
    for (size_t i = 0; i < KA_COUNT(names); i++)
        if (strlen(names[i]) == len && strncmp(names[i], message, len) == 0)
            return names[i];
    return "an exception";
}

void ka_place_hidden_error(const struct ka_place *place, const json_t *error, struct ka_buf *out)
{
    KA_AUTO_BUF struct ka_buf where = {0};
    ka_place_line(place, json_integer_value(json_object_get(error, "line")), &where);
    ka_buf_printf(out, "%s%s%s", ka_place_known_type(ka_text_of(error, "message", "")),
                  where.len ? " at " : "", ka_buf_str(&where));
}
