/* Patches: parse into hunks, find each hunk in the original lines, mark deletions and insertions, write the
 * result. Must not know files, tools or Python. Every number taken from a patch is only a hint. */
#include "patch.h"

#include "base/lines.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#define MAX_HEADERS 4 /* nested `@@ text` lines of one hunk */

struct hunk_line {
    char op; /* ' ', '-' or '+' */
    struct ka_line text;
    bool bare;     /* not even the leading space of a context line */
    size_t number; /* line of the patch, from 1 */
};

struct hunk {
    size_t first, count; /* its lines in patch.lines */
    size_t old;          /* how many of them are context or removed */
    struct ka_line headers[MAX_HEADERS];
    size_t header_count;
    size_t number; /* line of the patch where it starts */
    size_t hint;   /* 1-based line of a unified header; 0: none */
    bool at_end;   /* "*** End of File" */
    size_t place;  /* first matched line of the text */
    long shift;    /* indentation of the text minus that of the patch */
};

struct parsed {
    struct hunk_line *lines;
    size_t count;
    struct hunk *hunks;
    size_t hunk_count;
    bool replaces; /* Add File: its '+' lines are everything after the protected part */
};

struct insertion {
    size_t gap, order; /* before line `gap`; kept in the order they were written */
    size_t hunk;
    struct ka_line text;
    long shift;
};

struct document {
    struct ka_line *lines;
    size_t count;
    size_t guarded;     /* protected lines */
    size_t *deleted_by; /* per line: hunk number from 1, or 0 */
    struct insertion *insertions;
    size_t insertion_count;
};

static int split_lines(const char *text, size_t len, struct ka_line **lines, size_t *count,
                       struct ka_err *err)
{
    const char *cursor = text, *end = text + len;
    struct ka_line line;
    size_t n = 0;
    while (ka_line_next(&cursor, end, &line))
        n++;
    if (n > KA_PATCH_MAX_LINES)
        return ka_fail(err, -EFBIG, "%zu lines are more than a patch may deal with (%zu)", n,
                       KA_PATCH_MAX_LINES);
    *lines = ka_calloc(n, sizeof(**lines));
    *count = n;
    cursor = text;
    for (size_t i = 0; ka_line_next(&cursor, end, &line); i++)
        (*lines)[i] = line;
    return 0;
}

/* Parsing */

static struct hunk *add_hunk(struct parsed *p, size_t number)
{
    if (p->hunk_count == KA_PATCH_MAX_HUNKS)
        return NULL;
    struct hunk *hunk = &p->hunks[p->hunk_count++];
    *hunk = (struct hunk){.first = p->count, .number = number};
    return hunk;
}

/* The hunk's closing blank lines are the model's layout, not context: a context line has at least its space.
 */
static void close_hunk(struct parsed *p)
{
    if (!p->hunk_count)
        return;
    struct hunk *hunk = &p->hunks[p->hunk_count - 1];
    while (hunk->count && p->lines[p->count - 1].bare) {
        p->count--;
        hunk->count--;
        hunk->old--;
    }
    if (!hunk->count && !hunk->header_count)
        p->hunk_count--; /* a bare "@@" with nothing below */
}

static int add_line(struct parsed *p, struct hunk *hunk, struct ka_line raw, size_t number,
                    struct ka_err *err)
{
    struct hunk_line line = {.op = ' ', .text = raw, .bare = !raw.len, .number = number};
    if (raw.len) {
        line.op = raw.at[0];
        line.text = (struct ka_line){raw.at + 1, raw.len - 1};
    }
    if (line.op != ' ' && line.op != '-' && line.op != '+')
        return ka_fail(
            err, -EINVAL,
            "hunk %zu, patch line %zu: every line of a hunk starts with ' ' (context), '-' or '+'; "
            "this one starts with '%.*s'",
            p->hunk_count, number, (int)(raw.len < 12 ? raw.len : 12), raw.at);
    p->lines[p->count++] = line;
    hunk->count++;
    hunk->old += line.op != '+';
    return 0;
}

/* "@@ -12,4 +12,5 @@ ..." gives 12; anything else 0. */
static size_t unified_hint(struct ka_line line)
{
    if (!ka_line_starts(line, "@@ -"))
        return 0;
    size_t value = 0;
    for (size_t i = 4; i < line.len && line.at[i] >= '0' && line.at[i] <= '9'; i++)
        value = value < KA_PATCH_MAX_LINES * 10 ? value * 10 + (size_t)(line.at[i] - '0') : value;
    return value;
}

static bool is_unified_header(struct ka_line line)
{
    return ka_line_starts(line, "@@ -") && ka_line_has(line, " +");
}

/* "--- a/x" followed by "+++ b/x". */
static bool is_file_header(const struct ka_line *lines, size_t count, size_t i)
{
    return i + 1 < count && ka_line_starts(lines[i], "--- ") && ka_line_starts(lines[i + 1], "+++ ");
}

/* One "@@" line: opens a hunk, or nests another header in one that has no lines yet. */
static int parse_at_line(struct parsed *p, struct hunk **hunk, struct ka_line line, size_t number,
                         struct ka_err *err)
{
    bool nests = *hunk && !(*hunk)->count && (*hunk)->header_count && !is_unified_header(line);
    if (!nests) {
        close_hunk(p);
        *hunk = add_hunk(p, number);
        if (!*hunk)
            return ka_fail(err, -EFBIG, "patch line %zu: more than %zu hunks", number, KA_PATCH_MAX_HUNKS);
    }
    if (is_unified_header(line)) {
        (*hunk)->hint = unified_hint(line);
        return 0;
    }
    struct ka_line text = ka_line_strip((struct ka_line){line.at + 2, line.len - 2});
    if (text.len >= 2 && memcmp(text.at + text.len - 2, "@@", 2) == 0)
        text = ka_line_rstrip((struct ka_line){text.at, text.len - 2});
    if (!text.len)
        return 0;
    if ((*hunk)->header_count == MAX_HEADERS)
        return ka_fail(err, -EINVAL, "patch line %zu: more than %d nested '@@' lines", number, MAX_HEADERS);
    (*hunk)->headers[(*hunk)->header_count++] = text;
    return 0;
}

static int parse_body(struct parsed *p, const struct ka_line *lines, size_t count, size_t first,
                      bool envelope, struct ka_err *err)
{
    struct hunk *hunk = NULL;
    bool ended = !envelope;
    int rc = 0;
    for (size_t i = first; i < count && rc == 0; i++) {
        struct ka_line line = lines[i];
        size_t number = i + 1;
        if (envelope && ka_line_is(ka_line_rstrip(line), "*** End Patch")) {
            ended = true;
            break;
        }
        if (is_file_header(lines, count, i)) {
            hunk = NULL;
            i++;
        } else if (ka_line_starts(line, "*** Update File:") || ka_line_starts(line, "diff --git ")) {
            hunk = NULL;
        } else if (ka_line_starts(line, "*** Add File:")) {
            if (p->hunk_count)
                return ka_fail(err, -EINVAL,
                               "patch line %zu: 'Add File' replaces the whole backward part and must "
                               "stand alone in its patch",
                               number);
            p->replaces = true;
            hunk = add_hunk(p, number);
        } else if (ka_line_is(ka_line_rstrip(line), "*** End of File")) {
            if (hunk)
                hunk->at_end = true;
        } else if (ka_line_starts(line, "*** ")) {
            return ka_fail(err, -EINVAL,
                           "patch line %zu: '%.*s' is not understood; only 'Update File' and 'Add "
                           "File' are",
                           number, (int)(line.len < 40 ? line.len : 40), line.at);
        } else if (ka_line_starts(line, "@@") && !p->replaces) {
            rc = parse_at_line(p, &hunk, line, number, err);
        } else if (ka_line_starts(line, "\\ No newline") || (!hunk && !ka_line_strip(line).len)) {
            continue;
        } else if (!hunk && !envelope) {
            continue; /* "index 12..34", prose between files */
        } else {
            if (!hunk && !(hunk = add_hunk(p, number)))
                return ka_fail(err, -EFBIG, "patch line %zu: more than %zu hunks", number,
                               KA_PATCH_MAX_HUNKS);
            rc = add_line(p, hunk, line, number, err);
        }
    }
    if (rc == 0 && !ended)
        rc = ka_fail(err, -EINVAL, "the patch has no '*** End Patch' line: was the answer cut?");
    close_hunk(p);
    return rc;
}

/* Where hunks begin, and in which spelling. */
static bool find_start(const struct ka_line *lines, size_t count, size_t *first, bool *envelope)
{
    for (size_t i = 0; i < count; i++) {
        if (ka_line_is(ka_line_strip(lines[i]), "*** Begin Patch")) {
            *first = i + 1;
            *envelope = true;
            return true;
        }
    }
    for (size_t i = 0; i < count; i++) {
        if (is_file_header(lines, count, i) || is_unified_header(lines[i])) {
            *first = i;
            *envelope = false;
            return true;
        }
    }
    return false;
}

static int parse(struct parsed *p, const struct ka_line *lines, size_t count, struct ka_err *err)
{
    size_t first;
    bool envelope;
    if (!find_start(lines, count, &first, &envelope))
        return ka_fail(err, -EINVAL,
                       "this is no patch: neither '*** Begin Patch' nor a unified diff is in it");
    p->lines = ka_calloc(count, sizeof(*p->lines));
    p->hunks = ka_calloc(KA_PATCH_MAX_HUNKS, sizeof(*p->hunks));
    int rc = parse_body(p, lines, count, first, envelope, err);
    if (rc == 0 && !p->hunk_count)
        rc = ka_fail(err, -EINVAL, "the patch holds no hunk");
    return rc;
}

/* Finding a hunk */

enum pass { PASS_EXACT, PASS_TRAILING, PASS_INDENT, PASS_COUNT };

/* Does the old line agree with the text line in this pass? `shift` is LONG_MIN until a line with content sets
 * it. */
static bool line_agrees(struct ka_line text, struct ka_line old, enum pass pass, long *shift)
{
    if (pass == PASS_EXACT)
        return ka_line_same(text, old);
    if (pass == PASS_TRAILING)
        return ka_line_same(ka_line_rstrip(text), ka_line_rstrip(old));
    if (!ka_line_same(ka_line_strip(text), ka_line_strip(old)))
        return false;
    if (!ka_line_strip(text).len)
        return true;
    long here = (long)ka_line_indent(text) - (long)ka_line_indent(old);
    if (*shift == LONG_MIN)
        *shift = here;
    return *shift == here;
}

static bool matches_at(const struct document *doc, const struct parsed *p, const struct hunk *hunk,
                       size_t place, enum pass pass, long *shift)
{
    if (hunk->old > doc->count - place)
        return false;
    long indent = LONG_MIN;
    size_t at = place;
    for (size_t i = hunk->first; i < hunk->first + hunk->count; i++) {
        if (p->lines[i].op == '+')
            continue;
        if (!line_agrees(doc->lines[at++], p->lines[i].text, pass, &indent))
            return false;
    }
    if (hunk->at_end) {
        while (at < doc->count && !ka_line_strip(doc->lines[at]).len)
            at++;
        if (at < doc->count)
            return false;
    }
    *shift = indent == LONG_MIN ? 0 : indent;
    return true;
}

/* Would the hunk, placed here, delete or insert inside the protected lines? */
static bool touches_guarded(const struct document *doc, const struct parsed *p, const struct hunk *hunk,
                            size_t place)
{
    for (size_t i = hunk->first; i < hunk->first + hunk->count; i++) {
        if (p->lines[i].op != ' ' && place < doc->guarded)
            return true;
        place += p->lines[i].op != '+';
    }
    return false;
}

/* The block that a header line opens ends before the next line that is indented no deeper (closing brackets
 * aside). */
static size_t block_end(const struct document *doc, size_t header)
{
    size_t depth = ka_line_indent(doc->lines[header]), i = header + 1;
    for (; i < doc->count; i++) {
        struct ka_line line = ka_line_strip(doc->lines[i]);
        if (line.len && !memchr(")]}", line.at[0], 3) && ka_line_indent(doc->lines[i]) <= depth)
            break;
    }
    return i;
}

/* The line a chain of headers leads to: equal when stripped, else one that starts with it. Later blocks win
 * over none. */
static int find_header(const struct document *doc, const struct hunk *hunk, size_t number, size_t *from,
                       size_t *to, struct ka_err *err)
{
    size_t at = 0;
    for (size_t h = 0; h < hunk->header_count; h++) {
        struct ka_line want = hunk->headers[h];
        size_t found = SIZE_MAX;
        for (int loose = 0; loose < 2 && found == SIZE_MAX; loose++) {
            /* a header in the backward part is what a model means, even if the forward has the same line */
            for (int guarded = 0; guarded < 2 && found == SIZE_MAX; guarded++) {
                size_t first = (guarded || at > doc->guarded) ? at : doc->guarded;
                for (size_t i = first; i < doc->count && found == SIZE_MAX; i++) {
                    struct ka_line line = ka_line_strip(doc->lines[i]);
                    if (loose && line.len > want.len)
                        line.len = want.len;
                    if (ka_line_same(line, want))
                        found = i;
                }
            }
        }
        if (found == SIZE_MAX)
            return ka_fail(err, -ENOENT, "hunk %zu (patch line %zu): no line '%.*s' as its '@@' header names",
                           number, hunk->number, (int)(want.len < 80 ? want.len : 80), want.at);
        *from = found;
        *to = block_end(doc, found);
        at = found + 1;
    }
    return 0;
}

struct search {
    size_t found, place; /* allowed places */
    size_t second;       /* where the second one is, for the message */
    size_t forbidden, forbidden_at;
    long shift;
    bool tie; /* two places are equally near to the hint */
};

static size_t distance(size_t a, size_t b)
{
    return a > b ? a - b : b - a;
}

static struct search search_range(const struct document *doc, const struct parsed *p, const struct hunk *hunk,
                                  size_t from, size_t to, enum pass pass)
{
    struct search s = {0};
    for (size_t i = from; i < to; i++) {
        long shift;
        if (!matches_at(doc, p, hunk, i, pass, &shift))
            continue;
        if (touches_guarded(doc, p, hunk, i)) {
            s.forbidden_at = s.forbidden++ ? s.forbidden_at : i;
            continue;
        }
        size_t target = hunk->hint ? hunk->hint - 1 : 0;
        if (s.found && distance(i, target) == distance(s.place, target))
            s.tie = true;
        if (s.found == 1)
            s.second = i;
        if (!s.found || (hunk->hint && distance(i, target) < distance(s.place, target))) {
            s.place = i;
            s.shift = shift;
            s.tie = false;
        }
        s.found++;
    }
    return s;
}

/* The first old line that stands nowhere in the text: the most useful thing to tell. */
static const struct hunk_line *first_missing(const struct document *doc, const struct parsed *p,
                                             const struct hunk *hunk)
{
    for (size_t i = hunk->first; i < hunk->first + hunk->count; i++) {
        struct ka_line want = ka_line_strip(p->lines[i].text);
        bool there = p->lines[i].op == '+' || !want.len;
        for (size_t j = 0; j < doc->count && !there; j++)
            there = ka_line_same(ka_line_strip(doc->lines[j]), want);
        if (!there)
            return &p->lines[i];
    }
    return NULL;
}

static int not_found(const struct document *doc, const struct parsed *p, const struct hunk *hunk,
                     size_t number, struct ka_err *err)
{
    const struct hunk_line *line = first_missing(doc, p, hunk);
    if (!line)
        return ka_fail(err, -ENOENT,
                       "hunk %zu (patch line %zu): its lines exist, but not one after the other as the "
                       "hunk has them; copy context from the current file without leaving lines out",
                       number, hunk->number);
    return ka_fail(err, -ENOENT, "hunk %zu, patch line %zu: the current file has no line '%.*s'", number,
                   line->number, (int)(line->text.len < 120 ? line->text.len : 120), line->text.at);
}

static int conclude(const struct document *doc, struct hunk *hunk, const struct search *s, size_t number,
                    struct ka_err *err)
{
    if (s->found == 1 || (s->found > 1 && hunk->hint && !s->tie)) {
        hunk->place = s->place;
        hunk->shift = s->shift;
        return 0;
    }
    if (s->found > 1)
        return ka_fail(err, -EEXIST,
                       "hunk %zu (patch line %zu) fits in %zu places (lines %zu and %zu are two); add "
                       "context lines, or an '@@ def name' line above it",
                       number, hunk->number, s->found, s->place + 1, s->second + 1);
    return ka_fail(err, -EPERM,
                   "hunk %zu (patch line %zu) changes the forward part (line %zu of the file, before line "
                   "%zu); only what stands after it may change",
                   number, hunk->number, s->forbidden_at + 1, doc->guarded + 1);
}

/* The line after the statement that begins at `line`: a signature may go over several. */
static size_t after_statement(const struct document *doc, size_t line)
{
    long depth = 0;
    for (; line < doc->count; line++) {
        for (size_t i = 0; i < doc->lines[line].len && doc->lines[line].at[i] != '#'; i++) {
            char c = doc->lines[line].at[i];
            depth += (c == '(' || c == '[' || c == '{') - (c == ')' || c == ']' || c == '}');
        }
        if (depth <= 0)
            return line + 1;
    }
    return doc->count;
}

/* A hunk of additions only has nothing to be found by. It is welcome below the line that its '@@' header
 * names (`header`, SIZE_MAX: none), at a named end of the file, at a unified line number, or where there is
 * no text yet. */
static int place_addition(const struct document *doc, struct hunk *hunk, size_t header, size_t number,
                          struct ka_err *err)
{
    if (hunk->at_end || doc->count <= doc->guarded)
        hunk->place = doc->count;
    else if (hunk->hint && hunk->hint <= doc->count)
        hunk->place = hunk->hint;
    else if (header != SIZE_MAX)
        hunk->place = after_statement(doc, header);
    else
        return ka_fail(err, -EINVAL,
                       "hunk %zu (patch line %zu) has neither a context line nor a removed line to find "
                       "its place by; add one or more unchanged lines around it, or an '@@ def name' line "
                       "above it",
                       number, hunk->number);
    if (hunk->place < doc->guarded)
        return ka_fail(err, -EPERM,
                       "hunk %zu (patch line %zu) inserts into the forward part, which may not change",
                       number, hunk->number);
    return 0;
}

/* `@@ def name` means the function with its decorators: a hunk may begin at them. */
static size_t first_decorator(const struct document *doc, size_t header)
{
    while (header > 0 && ka_line_starts(ka_line_strip(doc->lines[header - 1]), "@"))
        header--;
    return header;
}

static int locate(const struct document *doc, const struct parsed *p, struct hunk *hunk, size_t number,
                  struct ka_err *err)
{
    size_t from = 0, to = doc->count;
    int rc = find_header(doc, hunk, number, &from, &to, err);
    if (rc)
        return rc;
    if (!hunk->old)
        return place_addition(doc, hunk, hunk->header_count ? from : SIZE_MAX, number, err);
    from = first_decorator(doc, from);
    /* inside the named block first, then anywhere after the header */
    for (int wide = 0; wide < 2; wide++) {
        for (enum pass pass = PASS_EXACT; pass < PASS_COUNT; pass++) {
            struct search s = search_range(doc, p, hunk, from, wide ? doc->count : to, pass);
            if (s.found || s.forbidden)
                return conclude(doc, hunk, &s, number, err);
        }
    }
    return not_found(doc, p, hunk, number, err);
}

/* Marking and writing */

static int mark(struct document *doc, const struct parsed *p, const struct hunk *hunk, size_t number,
                struct ka_err *err)
{
    size_t at = hunk->place;
    for (size_t i = hunk->first; i < hunk->first + hunk->count; i++) {
        const struct hunk_line *line = &p->lines[i];
        if (line->op == '+') {
            size_t n = doc->insertion_count++;
            doc->insertions[n] = (struct insertion){at, n, number, line->text, hunk->shift};
            continue;
        }
        if (line->op == '-') {
            if (doc->deleted_by[at])
                return ka_fail(err, -EBUSY,
                               "hunks %zu and %zu overlap: both remove line %zu; join them into one",
                               doc->deleted_by[at], number, at + 1);
            doc->deleted_by[at] = number;
        }
        at++;
    }
    return 0;
}

static int by_gap(const void *a, const void *b)
{
    const struct insertion *x = a, *y = b;
    if (x->gap != y->gap)
        return x->gap < y->gap ? -1 : 1;
    return x->order < y->order ? -1 : x->order > y->order;
}

/* After all hunks are marked: no context line was removed by another hunk, no two hunks insert at one place.
 */
static int check_overlap(const struct document *doc, const struct parsed *p, struct ka_err *err)
{
    for (size_t h = 0; h < p->hunk_count; h++) {
        size_t at = p->hunks[h].place;
        for (size_t i = p->hunks[h].first; i < p->hunks[h].first + p->hunks[h].count; i++) {
            if (p->lines[i].op == ' ' && doc->deleted_by[at])
                return ka_fail(err, -EBUSY,
                               "hunks %zu and %zu overlap: one removes line %zu, the other needs it as "
                               "context; join them into one",
                               doc->deleted_by[at], h + 1, at + 1);
            at += p->lines[i].op != '+';
        }
    }
    for (size_t i = 1; i < doc->insertion_count; i++) {
        const struct insertion *a = &doc->insertions[i - 1], *b = &doc->insertions[i];
        if (a->gap == b->gap && a->hunk != b->hunk)
            return ka_fail(err, -EBUSY,
                           "hunks %zu and %zu overlap: both add lines before line %zu; join them into one",
                           a->hunk, b->hunk, a->gap + 1);
    }
    return 0;
}

static void put_shifted(struct ka_buf *out, struct ka_line line, long shift)
{
    size_t indent = ka_line_indent(line), cut = 0;
    if (!ka_line_strip(line).len)
        cut = line.len;
    else if (shift > 0)
        ka_buf_printf(out, "%*s", (int)shift, "");
    else
        cut = (size_t)-shift < indent ? (size_t)-shift : indent;
    ka_line_put((struct ka_line){line.at + cut, line.len - cut}, out);
}

static void write_result(const struct document *doc, struct ka_buf *out)
{
    size_t next = 0;
    for (size_t i = 0; i <= doc->count; i++) {
        for (; next < doc->insertion_count && doc->insertions[next].gap == i; next++)
            put_shifted(out, doc->insertions[next].text, doc->insertions[next].shift);
        if (i < doc->count && !doc->deleted_by[i])
            ka_line_put(doc->lines[i], out);
    }
}

/* Add File: what it holds replaces all that is not protected. Should it repeat the protected part, it is cut
 * after the line which ends that part. */
static int write_added(const struct document *doc, const struct parsed *p, struct ka_buf *out,
                       struct ka_err *err)
{
    size_t first = 0;
    for (size_t i = 0; i < p->count; i++) {
        if (p->lines[i].op != '+')
            return ka_fail(err, -EINVAL, "patch line %zu: every line of an added file starts with '+'",
                           p->lines[i].number);
        if (doc->guarded && ka_line_same(p->lines[i].text, doc->lines[doc->guarded - 1]))
            first = i + 1;
    }
    for (size_t i = 0; i < doc->guarded; i++)
        ka_line_put(doc->lines[i], out);
    for (size_t i = first; i < p->count; i++)
        put_shifted(out, p->lines[i].text, 0);
    return 0;
}

static int apply(struct document *doc, struct parsed *p, struct ka_buf *out, struct ka_err *err)
{
    if (p->replaces)
        return write_added(doc, p, out, err);
    int rc = 0;
    for (size_t h = 0; h < p->hunk_count && rc == 0; h++) {
        rc = locate(doc, p, &p->hunks[h], h + 1, err);
        rc = rc ? rc : mark(doc, p, &p->hunks[h], h + 1, err);
    }
    if (rc)
        return rc;
    qsort(doc->insertions, doc->insertion_count, sizeof(*doc->insertions), by_gap);
    rc = check_overlap(doc, p, err);
    if (rc == 0)
        write_result(doc, out);
    return rc;
}

int ka_patch_apply(const char *text, const char *patch, size_t protected_lines, struct ka_buf *out,
                   struct ka_err *err)
{
    size_t text_len = strlen(text), patch_len = strlen(patch);
    if (text_len > KA_PATCH_MAX_BYTES || patch_len > KA_PATCH_MAX_BYTES)
        return ka_fail(err, -EFBIG, "the %s is longer than %zu bytes",
                       text_len > KA_PATCH_MAX_BYTES ? "file" : "patch", KA_PATCH_MAX_BYTES);
    struct document doc = {0};
    struct parsed parsed = {0};
    KA_AUTO_FREE struct ka_line *patch_lines = NULL;
    size_t patch_count = 0;
    int rc = split_lines(text, text_len, &doc.lines, &doc.count, err);
    if (rc == 0)
        rc = split_lines(patch, patch_len, &patch_lines, &patch_count, err);
    if (rc == 0)
        rc = parse(&parsed, patch_lines, patch_count, err);
    doc.guarded = protected_lines < doc.count ? protected_lines : doc.count;
    doc.deleted_by = ka_calloc(doc.count, sizeof(*doc.deleted_by));
    doc.insertions = ka_calloc(parsed.count, sizeof(*doc.insertions));
    if (rc == 0)
        rc = apply(&doc, &parsed, out, err);
    free(doc.lines);
    free(doc.deleted_by);
    free(doc.insertions);
    free(parsed.lines);
    free(parsed.hunks);
    return rc ? rc : out->failed;
}

bool ka_patch_is_in(const char *text)
{
    const char *cursor = text, *end = text + strlen(text);
    struct ka_line line;
    bool old_name = false;
    while (ka_line_next(&cursor, end, &line)) {
        if (ka_line_is(ka_line_strip(line), "*** Begin Patch") || is_unified_header(line))
            return true;
        if (old_name && ka_line_starts(line, "+++ "))
            return true;
        old_name = ka_line_starts(line, "--- ");
    }
    return false;
}
