/* Python source as tokens, enough to describe a kernel: names, numbers, strings, operators, and where blocks
 * begin and end.
 *
 * Comments, blank lines and line continuations vanish. Never fails on strange text: an unknown byte is an
 * operator, an unclosed string ends with its line or the file. Tokens point into the source, which must
 * outlive them. */
#ifndef KA_LEX_H
#define KA_LEX_H

#include "base/base.h"

enum ka_token_kind { KA_TOKEN_NAME, KA_TOKEN_NUMBER, KA_TOKEN_STRING, KA_TOKEN_OP, KA_TOKEN_NEWLINE };

struct ka_token {
    enum ka_token_kind kind;
    uint32_t start, len; /* bytes of the source; empty for NEWLINE */
    uint32_t line;       /* from 1 */
    uint32_t indent;     /* columns before the first token of its logical line */
};

struct ka_tokens {
    const char *source;
    struct ka_token *items; /* ends with a NEWLINE unless empty */
    size_t count;
};

#define KA_LEX_MAX ((size_t)4 << 20)

/* -EFBIG beyond KA_LEX_MAX bytes. Free with ka_tokens_free(). */
int ka_lex(const char *source, size_t len, struct ka_tokens *out, struct ka_err *err);
void ka_tokens_free(struct ka_tokens *tokens); /* leaves it empty */

/* The token has this spelling. False past the end. */
bool ka_token_is(const struct ka_tokens *tokens, size_t i, const char *text);

/* Hashes of words, the same on every machine: of a text, of a token's spelling, of two of them in order. */
uint64_t ka_word_hash(const char *text);
uint64_t ka_token_hash(const struct ka_tokens *tokens, size_t i);
uint64_t ka_word_join(uint64_t a, uint64_t b);

/* The same tokens with the same indentation: the texts differ in comments and blank lines at most. False for
 * texts that are too long. */
bool ka_lex_same_code(const char *a, const char *b);

/* Its spelling; free() it. */
char *ka_token_text(const struct ka_tokens *tokens, size_t i);

/* A function or class at module level: lines `def name`, its decorators above it, its body below. */
struct ka_block {
    size_t first, keyword, end; /* token indices: first decorator, `def` or `class`, one past the body */
    size_t name;                /* token index of its name */
    bool is_class;
};

/* The next one at or after token *at, which is moved past it. False when there is none. */
bool ka_block_next(const struct ka_tokens *tokens, size_t *at, struct ka_block *out);

/* One of its decorators ends in `.name` or is `name` (with or without a call). */
bool ka_block_decorated(const struct ka_tokens *tokens, const struct ka_block *block, const char *name);

#endif
