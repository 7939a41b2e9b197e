/* Follows names from the backward into the forward. Knows tokens and blocks, not what they compute. */
#include "excerpt.h"

#include <stdlib.h>
#include <string.h>

#include "base/lines.h"
#include "lex.h"

/* The part of the source with statements of the forward: a block, or a line that gives a constant a name. */
struct piece {
    size_t first, end; /* tokens */
    size_t name;       /* token */
    bool shown;
};

struct pieces {
    struct ka_tokens tokens;
    struct piece *items;
    size_t count;
};

void ka_excerpt_docstring(const struct ka_pair *pair, struct ka_buf *out)
{
    static const char *const keys[] = {"op:", "schedule:", "difficulty:", "dtypes:", "license:", "imported:"};
    const char *text = pair->source + strspn(pair->source, " \t\r\n");
    const char *end = ka_starts_with(text, "\"\"\"") ? strstr(text + 3, "\"\"\"") : NULL, *stop = end;
    KA_AUTO_BUF struct ka_buf told = {0};
    struct ka_line line;
    if (!end)
        return;
    for (const char *at = end; at > text + 3; stop = at) { /* from the last line up */
        const char *start = memrchr(text + 3, '\n', (size_t)(at - text - 3));
        const char *from = start ? start + 1 : text + 3;
        bool is_key = false;
        line = ka_line_strip((struct ka_line){from, (size_t)(at - from)});
        for (size_t i = 0; i < KA_COUNT(keys); i++)
            is_key = is_key || ka_line_starts(line, keys[i]);
        if (!start || (line.len && !is_key))
            break;
        at = start;
    }
    for (const char *cursor = text + 3; ka_line_next(&cursor, stop, &line);)
        ka_line_put(ka_line_rstrip(line), &told);
    ka_buf_add(out, ka_buf_str(&told), told.len);
}

static void add_piece(struct pieces *pieces, size_t first, size_t end, size_t name, bool shown)
{
    *KA_APPEND(pieces->items, pieces->count) = (struct piece){first, end, name, shown};
}

static size_t end_of_line(const struct ka_tokens *t, size_t i)
{
    while (i < t->count && t->items[i].kind != KA_TOKEN_NEWLINE)
        i++;
    return i;
}

/* "NAME = ..." at the top level, in [from, upto). */
static void add_constants(struct pieces *pieces, size_t from, size_t upto)
{
    const struct ka_tokens *t = &pieces->tokens;
    for (size_t i = from; i < upto; i = end_of_line(t, i) + 1)
        if (t->items[i].kind == KA_TOKEN_NAME && t->items[i].indent == 0 && ka_token_is(t, i + 1, "="))
            add_piece(pieces, i, end_of_line(t, i), i, false);
}

static void find_pieces(struct pieces *pieces)
{
    const struct ka_tokens *t = &pieces->tokens;
    struct ka_block block;
    size_t after = 0;
    for (size_t at = 0; ka_block_next(t, &at, &block); after = block.end) {
        add_constants(pieces, after, block.first);
        if (!ka_block_decorated(t, &block, "autodiff"))
            add_piece(pieces, block.first, block.end, block.name, false);
    }
    add_constants(pieces, after, t->count);
}

static bool same_text(const struct ka_tokens *a, size_t i, const struct ka_tokens *b, size_t k)
{
    const struct ka_token *x = &a->items[i], *y = &b->items[k];
    return x->len == y->len && memcmp(a->source + x->start, b->source + y->start, x->len) == 0;
}

/* Show what tokens [first, end) of `t` name. */
static bool follow(struct pieces *pieces, const struct ka_tokens *t, size_t first, size_t end)
{
    bool more = false;
    for (size_t i = first; i < end; i++) {
        bool member = i > 0 && ka_token_is(t, i - 1, "."), keyword = ka_token_is(t, i + 1, "=");
        if (t->items[i].kind != KA_TOKEN_NAME || member || keyword)
            continue;
        for (size_t k = 0; k < pieces->count; k++) {
            struct piece *piece = &pieces->items[k];
            if (!piece->shown && same_text(t, i, &pieces->tokens, piece->name))
                piece->shown = more = true;
        }
    }
    return more;
}

static void follow_all(struct pieces *pieces, const struct ka_tokens *backward)
{
    bool more = follow(pieces, backward, 0, backward->count);
    while (more) {
        more = false;
        for (size_t k = 0; k < pieces->count; k++)
            if (pieces->items[k].shown)
                more = follow(pieces, &pieces->tokens, pieces->items[k].first, pieces->items[k].end) || more;
    }
}

static void put_piece(const struct ka_tokens *t, const struct piece *piece, struct ka_buf *out)
{
    size_t last = piece->end - 1;
    while (last > piece->first && t->items[last].kind == KA_TOKEN_NEWLINE)
        last--;
    const char *from = t->source + t->items[piece->first].start;
    const char *end = t->source + t->items[last].start + t->items[last].len;
    ka_buf_add(out, from, (size_t)(end - from));
    ka_buf_add(out, end, strcspn(end, "\n")); /* its comment */
    ka_buf_puts(out, "\n\n\n");
}

void ka_excerpt_code(const struct ka_pair *pair, struct ka_buf *out)
{
    struct pieces pieces = {0};
    struct ka_tokens backward = {0};
    const char *text = pair->backward + strspn(pair->backward, "\n");
    int rc = ka_lex(pair->forward, strlen(pair->forward), &pieces.tokens, NULL);
    if (rc == 0)
        rc = ka_lex(pair->backward, strlen(pair->backward), &backward, NULL);
    if (rc == 0) {
        find_pieces(&pieces);
        follow_all(&pieces, &backward);
    }
    size_t before = out->len;
    for (size_t i = 0; i < pieces.count; i++)
        if (pieces.items[i].shown)
            put_piece(&pieces.tokens, &pieces.items[i], out);
    if (out->len > before)
        ka_buf_puts(out, KA_MARKER "\n\n\n");
    ka_buf_puts(out, text);
    free(pieces.items);
    ka_tokens_free(&pieces.tokens);
    ka_tokens_free(&backward);
}
