/* Reads a module by its tokens. Knows no files and no other module. */
#include "module.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/lines.h"
#include "base/marker.h"

#define PIECES_MAX 4096
#define BINDINGS_MAX 4096

/* ---- pieces ---- */

static size_t line_end(const struct ka_tokens *t, size_t i)
{
    while (i < t->count && t->items[i].kind != KA_TOKEN_NEWLINE)
        i++;
    return i < t->count ? i + 1 : i;
}

static int add_piece(struct ka_module *m, size_t first, size_t end, size_t name, enum ka_piece_kind kind,
                     struct ka_err *err)
{
    if (m->count == PIECES_MAX)
        return ka_fail(err, -EFBIG, "it has more than %d definitions", PIECES_MAX);
    *KA_APPEND(m->pieces, m->count) = (struct ka_piece){first, end, name, kind, 0};
    return 0;
}

static int add_constants(struct ka_module *m, size_t from, size_t to, struct ka_err *err)
{
    int rc = 0;
    for (size_t i = from; i < to && rc == 0; i = line_end(&m->tokens, i))
        if (m->tokens.items[i].kind == KA_TOKEN_NAME && m->tokens.items[i].indent == 0 &&
            ka_token_is(&m->tokens, i + 1, "="))
            rc = add_piece(m, i, line_end(&m->tokens, i), i, KA_PIECE_CONSTANT, err);
    return rc;
}

static int find_pieces(struct ka_module *m, struct ka_err *err)
{
    struct ka_block block;
    size_t after = 0;
    int rc = 0;
    for (size_t at = 0; rc == 0 && ka_block_next(&m->tokens, &at, &block); after = block.end) {
        enum ka_piece_kind kind = block.is_class                                  ? KA_PIECE_CLASS
                                  : ka_block_decorated(&m->tokens, &block, "jit") ? KA_PIECE_KERNEL
                                                                                  : KA_PIECE_FUNCTION;
        rc = add_constants(m, after, block.first, err);
        if (rc == 0)
            rc = add_piece(m, block.first, block.end, block.name, kind, err);
    }
    return rc ? rc : add_constants(m, after, m->tokens.count, err);
}

bool ka_module_is_function(const struct ka_module *m, size_t class_token)
{
    for (size_t i = class_token + 2; i < m->tokens.count && !ka_token_is(&m->tokens, i, ":"); i++)
        if (m->tokens.items[i].kind == KA_TOKEN_NEWLINE)
            return false;
        else if (ka_token_is(&m->tokens, i, "Function"))
            return true;
    return false;
}

bool ka_module_method(const struct ka_module *m, const struct ka_piece *class, const char *name,
                      size_t *first, size_t *end)
{
    const struct ka_token *items = m->tokens.items;
    for (size_t i = class->name; i + 1 < class->end; i++) {
        if (!ka_token_is(&m->tokens, i, "def") || !ka_token_is(&m->tokens, i + 1, name))
            continue;
        size_t at = i + 2;
        while (at < class->end &&
               !(items[at - 1].kind == KA_TOKEN_NEWLINE && items[at].indent <= items[i].indent))
            at++;
        *first = i;
        *end = at;
        return true;
    }
    return false;
}

/* ---- imports ---- */

/* Names and dots from token *at on; "" where none is. */
static char *read_dotted(const struct ka_tokens *t, size_t *at)
{
    struct ka_buf name = {0};
    for (; *at < t->count; ++*at) {
        const struct ka_token *token = &t->items[*at];
        bool word =
            token->kind == KA_TOKEN_NAME && !ka_token_is(t, *at, "import") && !ka_token_is(t, *at, "as");
        if (!word && !ka_token_is(t, *at, ".") && !ka_token_is(t, *at, "..."))
            break;
        ka_buf_add(&name, t->source + token->start, token->len);
    }
    return name.data ? ka_buf_steal(&name) : ka_strdup("");
}

/* `as NAME`, or what it is called anyway. */
static char *read_alias(const struct ka_tokens *t, size_t *at, const char *otherwise)
{
    if (!ka_token_is(t, *at, "as") || *at + 1 >= t->count)
        return ka_strdup(otherwise);
    char *name = ka_token_text(t, *at + 1);
    *at += 2;
    return name;
}

/* "a.b as c, d": modules. */
static void read_modules(struct ka_module *m, size_t at, size_t end)
{
    while (at < end && m->binding_count < BINDINGS_MAX) {
        struct ka_binding *b = KA_APPEND(m->bindings, m->binding_count);
        b->module = read_dotted(&m->tokens, &at);
        b->name = read_alias(&m->tokens, &at, b->module);
        while (at < end && !ka_token_is(&m->tokens, at, ","))
            at++;
        at++;
    }
}

/* "M import (a as b, c)": members of a module. */
static void read_members(struct ka_module *m, size_t at, size_t end)
{
    KA_AUTO_FREE char *module = read_dotted(&m->tokens, &at);
    if (!ka_token_is(&m->tokens, at, "import"))
        return;
    for (at++; at < end && m->binding_count < BINDINGS_MAX; at++) {
        if (m->tokens.items[at].kind != KA_TOKEN_NAME && !ka_token_is(&m->tokens, at, "*"))
            continue;
        struct ka_binding *b = KA_APPEND(m->bindings, m->binding_count);
        b->module = ka_strdup(module);
        b->member = ka_token_text(&m->tokens, at++);
        b->name = read_alias(&m->tokens, &at, b->member);
    }
}

static void find_imports(struct ka_module *m)
{
    for (size_t i = 0, next; i < m->tokens.count; i = next) {
        next = line_end(&m->tokens, i);
        if (ka_token_is(&m->tokens, i, "import"))
            read_modules(m, i + 1, next - 1);
        else if (ka_token_is(&m->tokens, i, "from"))
            read_members(m, i + 1, next - 1);
    }
}

/* ---- texts ---- */

static size_t start_of(const struct ka_module *m, size_t token)
{
    return token < m->tokens.count ? m->tokens.items[token].start : m->len;
}

static size_t trimmed_end(const struct ka_module *m, size_t from, size_t to)
{
    size_t end = from;
    for (size_t at = from; at < to;) {
        const char *newline = memchr(m->source + at, '\n', to - at);
        size_t next = newline ? (size_t)(newline - m->source) + 1 : to, first = at;
        while (first < next && strchr(" \t\r\n", m->source[first]))
            first++;
        if (first < next && (m->source[first] != '#' || first > at))
            end = next;
        at = next;
    }
    return end;
}

void ka_module_put(const struct ka_module *m, size_t from, size_t to, struct ka_buf *out)
{
    size_t end = trimmed_end(m, from, to);
    if (end == from)
        return;
    ka_buf_add(out, m->source + from, end - from);
    ka_buf_puts(out, m->source[end - 1] == '\n' ? "\n\n" : "\n\n\n");
}

void ka_module_put_piece(const struct ka_module *m, const struct ka_piece *piece, struct ka_buf *out)
{
    ka_module_put(m, start_of(m, piece->first), start_of(m, piece->end), out);
}

static bool has_docstring(const struct ka_module *m)
{
    return m->tokens.count && m->tokens.items[0].kind == KA_TOKEN_STRING;
}

void ka_module_put_lines(const struct ka_module *m, struct ka_buf *out)
{
    size_t token = has_docstring(m) ? 2 : 0, piece = 0;
    while (token < m->tokens.count) {
        while (piece < m->count &&
               (m->pieces[piece].kind == KA_PIECE_CONSTANT || m->pieces[piece].first < token))
            piece++;
        if (piece < m->count && token == m->pieces[piece].first) {
            token = m->pieces[piece++].end;
            continue;
        }
        size_t end = piece < m->count ? m->pieces[piece].first : m->tokens.count;
        if (ka_token_is(&m->tokens, token, "if") && ka_token_is(&m->tokens, token + 1, "__name__"))
            break;
        ka_module_put(m, start_of(m, token), start_of(m, end), out);
        token = end;
    }
}

/* ---- notices ---- */

/* A line of a comment or a docstring as a comment. One that reads like a pair's marker is none of a notice.
 */
static void put_comment(struct ka_line line, struct ka_buf *out)
{
    line = ka_line_rstrip(line);
    struct ka_line text = ka_line_strip(line);
    if (ka_line_starts(text, "#!") || ka_line_has(text, "-*- coding") || ka_line_has(text, "---- backward"))
        return;
    ka_buf_puts(out, ka_line_starts(text, "#") ? "" : line.len ? "# " : "#");
    ka_line_put(ka_line_starts(text, "#") ? text : line, out);
}

static void put_comments(const struct ka_module *m, size_t from, size_t to, bool all, struct ka_buf *out)
{
    const char *cursor = m->source + from;
    struct ka_line line;
    while (ka_line_next(&cursor, m->source + to, &line))
        if (all || ka_line_starts(ka_line_strip(line), "#"))
            put_comment(line, out);
}

void ka_module_notices(const struct ka_module *m, struct ka_buf *out)
{
    size_t first = start_of(m, 0);
    put_comments(m, 0, first, false, out);
    if (!has_docstring(m))
        return;
    size_t end = first + m->tokens.items[0].len, quotes = strspn(m->source + first, "rRbBfFuU\"'");
    KA_AUTO_FREE char *text = ka_strndup(m->source + first, end - first);
    if (strcasestr(text, "copyright") || strcasestr(text, "licen")) {
        size_t last = end;
        while (last > first + quotes && strchr("\"'", m->source[last - 1]))
            last--;
        if (last > first + quotes)
            put_comments(m, first + quotes, last, true, out);
    }
    put_comments(m, end, start_of(m, 2), false, out);
}

/* ---- the whole ---- */

int ka_module_parse(const char *path, const char *source, struct ka_module *out, struct ka_err *err)
{
    struct ka_module m = {.path = ka_strdup(path), .source = ka_strdup(source), .len = strlen(source)};
    int rc = ka_lex(m.source, m.len, &m.tokens, err);
    if (rc == 0)
        rc = find_pieces(&m, err);
    if (rc == 0)
        find_imports(&m);
    if (rc)
        ka_module_free(&m);
    else
        *out = m;
    return rc;
}

void ka_module_free(struct ka_module *m)
{
    for (size_t i = 0; i < m->binding_count; i++) {
        free(m->bindings[i].name);
        free(m->bindings[i].module);
        free(m->bindings[i].member);
    }
    free(m->bindings);
    free(m->pieces);
    ka_tokens_free(&m->tokens);
    free(m->path);
    free(m->source);
    *m = (struct ka_module){0};
}
