/* Verdicts and changes in the short form of a lesson. Knows neither store nor prompt. */
#include "lesson.h"

#include <string.h>

#include "base/each.h"
#include "base/lines.h"
#include "base/utf8.h"
#include "describe.h"
#include "fields.h"
#include "kinds.h"
#include "place.h"
#include "short_diff.h"
#include "verdict.h"

#define FINDING_MAX 400 /* bytes */
#define WRONG "wrong "
#define LINE_MAX 120 /* columns of code */

/* ---- kind */

/* Of "raised: TypeError: ...". A name of the candidate's own making could tell a size. */
static void put_type(const char *text, struct ka_buf *out)
{
    const char *message = strstr(text, ": ");
    ka_buf_printf(out, ", %s", ka_place_known_type(message ? message + 2 : ""));
}

static bool fails_plainly(const json_t *failures)
{
    KA_EACH(failures, i, failure) {
        const char *label = json_string_value(json_object_get(failure, "case"));
        if (!label || ka_kind_is_plain(label))
            return true;
    }
    return false;
}

void ka_lesson_kind(const json_t *verdict, struct ka_buf *out)
{
    const json_t *failures = json_object_get(verdict, "failures");
    const json_t *first = json_array_get(failures, 0);
    const json_t *patterns = json_object_get(json_object_get(first, "facts"), "patterns");
    const char *rule = ka_text_of(first, "rule", ""), *text = ka_text_of(first, "text", "");
    const char *tensor = ka_text_of(first, "tensor", NULL);
    if (json_is_true(json_object_get(verdict, "verified")))
        return;
    if (!first) {
        ka_buf_puts(out, "unproved");
        return;
    }
    if (tensor) /* what pattern the error has says more than which bound it breaks */
        ka_buf_printf(out, WRONG "%s, %s", ka_starts_with(tensor, "the gradient") ? "gradient" : "output",
                      ka_text_of(json_array_get(patterns, 0), "kind", rule));
    else
        ka_buf_puts(out, rule);
    if (strcmp(rule, KA_VERDICT_RAISED) == 0)
        put_type(text, out);
    if (!fails_plainly(failures))
        ka_buf_puts(out, ", plain cases right");
}

bool ka_lesson_is_comparison(const char *kind)
{
    return ka_starts_with(kind, WRONG);
}

/* ---- finding */

/* The length of "line 7 of the backward part, `x = y`: " at the start of the text, however much of it is
 * there; 0 for no place. */
static size_t place_length(const char *text)
{
    static const char *const parts[] = {" of the backward part", " of the forward"};
    const char *at = text;
    if (!ka_starts_with(at, "line "))
        return 0;
    at += strlen("line ");
    size_t digits = strspn(at, "0123456789");
    for (size_t i = 0; i < KA_COUNT(parts) && digits; i++) {
        if (!ka_starts_with(at + digits, parts[i]))
            continue;
        at += digits + strlen(parts[i]);
        const char *end = ka_starts_with(at, ", `") ? strchr(at + 3, '`') : NULL;
        at = end ? end + 1 : at;
        return (size_t)(at - text) + (ka_starts_with(at, ": ") ? 2 : 0);
    }
    return 0;
}

/* The length of a sentence that gives the numbers of a comparison (sandbox/compare_text.c), with the blank
 * behind it; 0 for any other. */
static size_t numbers_length(const char *sentence)
{
    static const char *const begin[] = {
        "Norm-relative error ", "Worst at index ", "First at index ", "Row [", "Element [", "Elements ["};
    const char *end = strstr(sentence, ". ");
    bool numbers = ka_starts_with(sentence + strspn(sentence, "0123456789"), " of ");
    for (size_t i = 0; i < KA_COUNT(begin); i++)
        numbers = numbers || ka_starts_with(sentence, begin[i]);
    return !numbers ? 0 : end ? (size_t)(end - sentence) + 2 : strlen(sentence);
}

void ka_lesson_finding(const char *facts, struct ka_buf *out)
{
    KA_AUTO_BUF struct ka_buf all = {0}, kept = {0};
    char line[FINDING_MAX];
    ka_describe_finding(facts, &all);
    for (const char *at = ka_buf_str(&all); *at;) {
        bool begins = ka_ends_with(ka_buf_str(&kept), ". ");
        size_t left_out = begins ? numbers_length(at) : place_length(at);
        if (!left_out)
            ka_buf_add(&kept, at, 1);
        at += left_out ? left_out : 1;
    }
    ka_utf8_line(ka_buf_str(&kept), kept.len, line, sizeof(line));
    ka_buf_puts(out, line);
}

/* ---- change */

/* A line of the diff that holds code, or ".." between such. */
static bool is_told(struct ka_line line)
{
    bool changed = line.len && (*line.at == '-' || *line.at == '+');
    struct ka_line code = ka_line_strip((struct ka_line){line.at + changed, line.len - changed});
    return code.len && !(changed && *code.at == '#');
}

bool ka_lesson_change(const char *wrong, const char *mended, struct ka_buf *out)
{
    KA_AUTO_BUF struct ka_buf diff = {0}, told = {0};
    ka_short_diff(wrong, mended, SIZE_MAX, &diff);
    const char *cursor = ka_buf_str(&diff), *end = cursor + diff.len;
    struct ka_line line;
    size_t changed = 0;
    bool gap = false; /* since the last line that is told */
    while (ka_line_next(&cursor, end, &line)) {
        char text[LINE_MAX];
        if (!is_told(line))
            continue;
        if (*line.at == '.' || memmem(line.at, line.len, "```", 3)) {
            if (*line.at != '.' || line.len > 2)
                return false; /* changed all over, or what would end the block that it is shown in */
            gap = changed > 0;
            continue;
        }
        /* indentation stays as it is */
        size_t blanks = ka_line_indent((struct ka_line){line.at + 1, line.len - 1}) + 1;
        ka_utf8_line(line.at + blanks, line.len - blanks, text, sizeof(text));
        ka_buf_printf(&told, "%s%.*s%s\n", gap ? "..\n" : "", (int)blanks, line.at, text);
        gap = false;
        if (++changed > KA_LESSON_LINES)
            return false;
    }
    if (changed)
        ka_buf_add(out, ka_buf_str(&told), told.len);
    return changed > 0;
}
