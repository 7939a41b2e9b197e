/* Takes a module apart by its top-level definitions and who mentions whom. Knows no store and no licences. */
#include "import.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/hash.h"
#include "lex.h"
#include "pair.h"

#define BLOCKS_MAX 4096

struct range {
    size_t first, end; /* tokens */
};

struct module {
    struct ka_tokens tokens;
    struct ka_block *blocks;
    size_t count;
    const char *source;
    size_t len;
};

static bool same_name(const struct module *m, size_t a, size_t b)
{
    const struct ka_token *x = &m->tokens.items[a], *y = &m->tokens.items[b];
    return x->len == y->len && memcmp(m->source + x->start, m->source + y->start, x->len) == 0;
}

static bool is_kernel(const struct module *m, size_t block)
{
    return !m->blocks[block].is_class && ka_block_decorated(&m->tokens, &m->blocks[block], "jit");
}

/* class X(torch.autograd.Function): or class X(Function): */
static bool is_function(const struct module *m, const struct ka_block *block)
{
    if (!block->is_class)
        return false;
    for (size_t i = block->name + 1; i < block->end && !ka_token_is(&m->tokens, i, ":"); i++)
        if (ka_token_is(&m->tokens, i, "Function"))
            return true;
    return false;
}

/* The method of that name: from its `def` to the next line that is indented no deeper. */
static bool find_method(const struct module *m, const struct ka_block *class, const char *name,
                        struct range *out)
{
    const struct ka_token *items = m->tokens.items;
    for (size_t i = class->name; i + 1 < class->end; i++) {
        if (!ka_token_is(&m->tokens, i, "def") || !ka_token_is(&m->tokens, i + 1, name))
            continue;
        size_t end = i + 2;
        while (end < class->end &&
               !(items[end - 1].kind == KA_TOKEN_NEWLINE && items[end].indent <= items[i].indent))
            end++;
        *out = (struct range){i, end};
        return true;
    }
    return false;
}

/* Mark every definition that the range mentions, and what those mention. */
static void reach(const struct module *m, struct range range, bool *reached)
{
    for (size_t i = range.first; i < range.end; i++) {
        if (m->tokens.items[i].kind != KA_TOKEN_NAME)
            continue;
        for (size_t b = 0; b < m->count; b++) {
            if (reached[b] || !same_name(m, i, m->blocks[b].name))
                continue;
            reached[b] = true;
            reach(m, (struct range){m->blocks[b].first, m->blocks[b].end}, reached);
        }
    }
}

static bool reaches_kernel(const struct module *m, const bool *reached)
{
    for (size_t b = 0; b < m->count; b++)
        if (reached[b] && is_kernel(m, b))
            return true;
    return false;
}

/* ---- texts */

static size_t start_of(const struct module *m, size_t token)
{
    return token < m->tokens.count ? m->tokens.items[token].start : m->len;
}

/* Without the blank lines and comments at the end: those stand above what comes next. */
static size_t trimmed_end(const struct module *m, size_t from, size_t to)
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

static void put_range(struct ka_buf *out, const struct module *m, size_t from, size_t to)
{
    size_t end = trimmed_end(m, from, to);
    if (end == from)
        return;
    ka_buf_add(out, m->source + from, end - from);
    ka_buf_puts(out, m->source[end - 1] == '\n' ? "\n\n" : "\n\n\n");
}

static void put_block(struct ka_buf *out, const struct module *m, size_t block)
{
    put_range(out, m, start_of(m, m->blocks[block].first), start_of(m, m->blocks[block].end));
}

/* What stands between the definitions: imports and constants, up to `if __name__`. Not the module's
 * docstring. */
static void put_module_lines(struct ka_buf *out, const struct module *m)
{
    size_t token = 0, block = 0;
    if (m->tokens.count && m->tokens.items[0].kind == KA_TOKEN_STRING)
        token = 2;
    while (token < m->tokens.count) {
        if (block < m->count && token == m->blocks[block].first) {
            token = m->blocks[block++].end;
            continue;
        }
        size_t end = token;
        while (end < m->tokens.count && !(block < m->count && end == m->blocks[block].first))
            end++;
        if (ka_token_is(&m->tokens, token, "if") && ka_token_is(&m->tokens, token + 1, "__name__"))
            break;
        put_range(out, m, start_of(m, token), start_of(m, end));
        token = end;
    }
}

static char *compose(const struct module *m, size_t class, const char *shown, const char *license,
                     const bool *forward, const bool *backward)
{
    struct ka_buf text = {0};
    char hash[KA_HASH_HEX];
    size_t name = m->blocks[class].name;
    ka_hash_hex(m->source, m->len, hash);
    ka_buf_printf(&text, "\"\"\"%.*s of %s.\n\nimported: %s sha256 %s\nop: %.*s\nlicense: %s\n\"\"\"\n\n",
                  (int)m->tokens.items[name].len, m->source + m->tokens.items[name].start, shown, shown, hash,
                  (int)m->tokens.items[name].len, m->source + m->tokens.items[name].start, license);
    put_module_lines(&text, m);
    for (size_t b = 0; b < m->count; b++)
        if (forward[b] && b != class)
            put_block(&text, m, b);
    ka_buf_puts(&text, KA_MARKER "\n\n\n");
    for (size_t b = 0; b < m->count; b++)
        if ((backward[b] && !forward[b]) || b == class)
            put_block(&text, m, b);
    return ka_buf_steal(&text);
}

/* ---- units */

static void take_class(const struct module *m, size_t class, const char *shown, const char *license,
                       struct ka_import_unit *unit)
{
    KA_AUTO_FREE bool *forward = ka_calloc(m->count, sizeof(bool)),
                      *backward = ka_calloc(m->count, sizeof(bool));
    struct range range;
    const char *why = NULL;
    unit->name = ka_token_text(&m->tokens, m->blocks[class].name);
    if (!find_method(m, &m->blocks[class], "forward", &range))
        why = "it has no forward of its own";
    else
        reach(m, range, forward);
    if (!why && !find_method(m, &m->blocks[class], "backward", &range))
        why = "it has no backward of its own";
    else if (!why)
        reach(m, range, backward);
    if (!why && !reaches_kernel(m, forward))
        why = "its forward launches no Triton kernel of this file";
    if (!why && !reaches_kernel(m, backward))
        why = "its backward launches no Triton kernel of this file";
    unit->why = ka_strdup(why);
    unit->source = why ? NULL : compose(m, class, shown, license, forward, backward);
}

int ka_import_split(const char *shown, const char *source, const char *license, struct ka_import_units *out,
                    struct ka_err *err)
{
    struct module m = {.source = source, .len = strlen(source)};
    struct ka_import_units units = {0};
    struct ka_block block;
    int rc = ka_lex(source, m.len, &m.tokens, err);
    if (rc)
        return rc;
    for (size_t at = 0; ka_block_next(&m.tokens, &at, &block);) {
        if (m.count == BLOCKS_MAX) {
            rc = ka_fail(err, -EFBIG, "%s: more than %d definitions", shown, BLOCKS_MAX);
            break;
        }
        *KA_APPEND(m.blocks, m.count) = block;
    }
    for (size_t b = 0; b < m.count && rc == 0; b++) {
        units.kernels = units.kernels || is_kernel(&m, b);
        if (!is_function(&m, &m.blocks[b]))
            continue;
        take_class(&m, b, shown, license, KA_APPEND(units.items, units.count));
    }
    free(m.blocks);
    ka_tokens_free(&m.tokens);
    if (rc)
        ka_import_free(&units);
    else
        *out = units;
    return rc;
}

void ka_import_free(struct ka_import_units *units)
{
    for (size_t i = 0; i < units->count; i++) {
        free(units->items[i].name);
        free(units->items[i].source);
        free(units->items[i].why);
    }
    free(units->items);
    *units = (struct ka_import_units){0};
}
