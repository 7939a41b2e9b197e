/* A small Python lexer. Knows nothing of Triton, embeddings or pairs. */
#include "lex.h"

#include <ctype.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct lexer {
    const char *s;
    size_t len, at;
    uint32_t line, indent;
    size_t depth; /* of open brackets */
    struct ka_token *items;
    size_t count;
};

static bool is_name_byte(char c)
{
    return isalnum((unsigned char)c) || c == '_' || (unsigned char)c >= 0x80;
}

static void push(struct lexer *x, enum ka_token_kind kind, size_t start, size_t end)
{
    *KA_APPEND(x->items, x->count) =
        (struct ka_token){kind, (uint32_t)start, (uint32_t)(end - start), x->line, x->indent};
}

static bool at_line_start(const struct lexer *x)
{
    return x->count == 0 || x->items[x->count - 1].kind == KA_TOKEN_NEWLINE;
}

/* The end of a string whose opening quote is at `quote`; counts the lines inside. */
static size_t string_end(struct lexer *x, size_t quote, uint32_t *lines)
{
    char q = x->s[quote];
    bool triple = quote + 2 < x->len && x->s[quote + 1] == q && x->s[quote + 2] == q;
    size_t i = quote + (triple ? 3 : 1);
    for (; i < x->len; i++) {
        if (x->s[i] == '\\' && i + 1 < x->len) {
            i++;
            *lines += x->s[i] == '\n';
        } else if (x->s[i] == '\n') {
            if (!triple)
                return i;
            ++*lines;
        } else if (x->s[i] == q && (!triple || (i + 2 < x->len && x->s[i + 1] == q && x->s[i + 2] == q))) {
            return i + (triple ? 3 : 1);
        }
    }
    return x->len;
}

static bool is_string_prefix(const char *text, size_t len)
{
    for (size_t i = 0; i < len; i++)
        if (!strchr("rRbBfFuU", text[i]))
            return false;
    return len <= 2;
}

static size_t number_end(const struct lexer *x, size_t i)
{
    while (i < x->len && (is_name_byte(x->s[i]) || x->s[i] == '.' ||
                          ((x->s[i] == '+' || x->s[i] == '-') && (x->s[i - 1] == 'e' || x->s[i - 1] == 'E'))))
        i++;
    return i;
}

static size_t operator_end(const struct lexer *x, size_t i)
{
    static const char *const OPS[] = {
        "**=", "//=", ">>=", "<<=", "...", "->", ":=", "+=", "-=", "*=", "/=", "%=",
        "@=",  "&=",  "|=",  "^=",  "==",  "!=", "<=", ">=", "//", "**", "<<", ">>"};
    for (size_t k = 0; k < KA_COUNT(OPS); k++) {
        size_t n = strlen(OPS[k]);
        if (n <= x->len - i && memcmp(x->s + i, OPS[k], n) == 0)
            return i + n;
    }
    return i + 1;
}

static void track_brackets(struct lexer *x, char c)
{
    if (c == '(' || c == '[' || c == '{')
        x->depth++;
    else if ((c == ')' || c == ']' || c == '}') && x->depth)
        x->depth--;
}

static void lex_token(struct lexer *x)
{
    size_t start = x->at, i = start;
    char c = x->s[i];
    uint32_t lines = 0;
    enum ka_token_kind kind = KA_TOKEN_OP;
    if (isdigit((unsigned char)c) || (c == '.' && i + 1 < x->len && isdigit((unsigned char)x->s[i + 1]))) {
        kind = KA_TOKEN_NUMBER;
        i = number_end(x, i + 1);
    } else if (is_name_byte(c)) {
        kind = KA_TOKEN_NAME;
        while (i < x->len && is_name_byte(x->s[i]))
            i++;
        if (i < x->len && (x->s[i] == '"' || x->s[i] == '\'') && is_string_prefix(x->s + start, i - start)) {
            kind = KA_TOKEN_STRING;
            i = string_end(x, i, &lines);
        }
    } else if (c == '"' || c == '\'') {
        kind = KA_TOKEN_STRING;
        i = string_end(x, i, &lines);
    } else {
        i = operator_end(x, i);
        track_brackets(x, c);
    }
    push(x, kind, start, i);
    x->line += lines;
    x->at = i;
}

/* Blanks at the start of a line set the indentation, once a token follows. */
static void skip_blanks(struct lexer *x, uint32_t *column)
{
    while (x->at < x->len &&
           (x->s[x->at] == ' ' || x->s[x->at] == '\t' || x->s[x->at] == '\r' || x->s[x->at] == '\f')) {
        *column = x->s[x->at] == '\t' ? (*column | 7) + 1 : *column + 1;
        x->at++;
    }
}

static void lex_all(struct lexer *x)
{
    uint32_t column = 0;
    while (x->at < x->len) {
        skip_blanks(x, &column);
        if (x->at == x->len)
            break;
        char c = x->s[x->at];
        if (c == '#') {
            while (x->at < x->len && x->s[x->at] != '\n')
                x->at++;
        } else if (c == '\\' && x->at + 1 < x->len && x->s[x->at + 1] == '\n') {
            x->at += 2;
            x->line++;
        } else if (c == '\n') {
            if (x->depth == 0 && !at_line_start(x))
                push(x, KA_TOKEN_NEWLINE, x->at, x->at);
            x->at++;
            x->line++;
            column = 0;
        } else {
            if (at_line_start(x))
                x->indent = column;
            lex_token(x);
        }
    }
    if (!at_line_start(x))
        push(x, KA_TOKEN_NEWLINE, x->at, x->at);
}

int ka_lex(const char *source, size_t len, struct ka_tokens *out, struct ka_err *err)
{
    if (len > KA_LEX_MAX)
        return ka_fail(err, -EFBIG, "source of %zu bytes is too long to read as a kernel", len);
    struct lexer x = {.s = source, .len = len, .line = 1};
    lex_all(&x);
    *out = (struct ka_tokens){source, x.items, x.count};
    return 0;
}

void ka_tokens_free(struct ka_tokens *tokens)
{
    free(tokens->items);
    *tokens = (struct ka_tokens){0};
}

bool ka_token_is(const struct ka_tokens *tokens, size_t i, const char *text)
{
    if (i >= tokens->count)
        return false;
    const struct ka_token *t = &tokens->items[i];
    return strlen(text) == t->len && memcmp(tokens->source + t->start, text, t->len) == 0;
}

char *ka_token_text(const struct ka_tokens *tokens, size_t i)
{
    return ka_strndup(tokens->source + tokens->items[i].start, tokens->items[i].len);
}

/* ---- blocks at module level ---- */

static size_t line_end(const struct ka_tokens *t, size_t i)
{
    while (i < t->count && t->items[i].kind != KA_TOKEN_NEWLINE)
        i++;
    return i < t->count ? i + 1 : i;
}

bool ka_block_next(const struct ka_tokens *t, size_t *at, struct ka_block *out)
{
    size_t decorators = SIZE_MAX;
    for (size_t i = *at, next; i < t->count; i = next) {
        next = line_end(t, i);
        if (t->items[i].indent == 0 && ka_token_is(t, i, "@")) {
            decorators = decorators == SIZE_MAX ? i : decorators;
            continue;
        }
        size_t keyword = i + ka_token_is(t, i, "async");
        bool is_class = ka_token_is(t, keyword, "class");
        if (t->items[i].indent == 0 && (is_class || ka_token_is(t, keyword, "def")) && keyword + 1 < next) {
            while (next < t->count && t->items[next].indent > 0)
                next = line_end(t, next);
            *out = (struct ka_block){decorators == SIZE_MAX ? i : decorators, keyword, next, keyword + 1,
                                     is_class};
            *at = next;
            return true;
        }
        decorators = SIZE_MAX;
    }
    *at = t->count;
    return false;
}

bool ka_block_decorated(const struct ka_tokens *t, const struct ka_block *block, const char *name)
{
    for (size_t i = block->first; i < block->keyword; i = line_end(t, i)) {
        size_t k = i + 1; /* past the @ */
        while (ka_token_is(t, k + 1, "."))
            k += 2;
        if (ka_token_is(t, i, "@") && ka_token_is(t, k, name))
            return true;
    }
    return false;
}

static uint64_t hash_bytes(const char *bytes, size_t len)
{
    uint64_t h = 0xcbf29ce484222325u;
    for (size_t i = 0; i < len; i++)
        h = (h ^ (unsigned char)bytes[i]) * 0x100000001b3u;
    return ka_mix64(h);
}

uint64_t ka_word_hash(const char *text)
{
    return hash_bytes(text, strlen(text));
}

uint64_t ka_token_hash(const struct ka_tokens *tokens, size_t i)
{
    return hash_bytes(tokens->source + tokens->items[i].start, tokens->items[i].len);
}

uint64_t ka_word_join(uint64_t a, uint64_t b)
{
    return ka_mix64(a * 3 + b);
}

bool ka_lex_same_code(const char *a, const char *b)
{
    struct ka_tokens x = {0}, y = {0};
    bool same =
        ka_lex(a, strlen(a), &x, NULL) == 0 && ka_lex(b, strlen(b), &y, NULL) == 0 && x.count == y.count;
    for (size_t i = 0; i < x.count && same; i++) {
        const struct ka_token *p = &x.items[i], *q = &y.items[i];
        same = p->kind == q->kind && p->len == q->len && p->indent == q->indent &&
               memcmp(a + p->start, b + q->start, p->len) == 0;
    }
    ka_tokens_free(&x);
    ka_tokens_free(&y);
    return same;
}
