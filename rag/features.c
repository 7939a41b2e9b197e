/* What is launched, its words, and the hash of all tokens. Knows no store and no vector. */
#include "features.h"

#include <ctype.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "lex.h"
#include "pair.h"

struct extract {
    const struct ka_tokens *t;
    struct ka_found found, words;
    uint64_t stream; /* running hash of all normalised tokens */
    uint64_t jit_names[64];
    size_t jit_count;
};

/* ---- normalisation ---- */

static const char *const KEPT_NAMES[] = {
    "and",       "as",    "assert", "break",  "continue", "def",       "elif",       "else",
    "False",     "for",   "if",     "in",     "is",       "lambda",    "None",       "not",
    "or",        "pass",  "raise",  "return", "True",     "while",     "with",       "range",
    "min",       "max",   "float",  "int",    "len",      "sum",       "abs",        "tuple",
    "mask",      "other", "axis",   "dtype",  "device",   "num_warps", "num_stages", "input_precision",
    "allow_tf32"};

static const char *const ROOTS[] = {"tl", "triton", "torch", "math", "libdevice"};

static const char *const KEPT_NUMBERS[] = {"0", "1", "2", "0.0", "1.0", "0.5", "2.0"};

static bool listed(const struct ka_tokens *t, size_t i, const char *const *list, size_t count)
{
    for (size_t k = 0; k < count; k++)
        if (ka_token_is(t, i, list[k]))
            return true;
    return false;
}

static bool starts(const struct ka_tokens *t, size_t i, const char *prefix)
{
    size_t n = strlen(prefix);
    return t->items[i].len >= n && memcmp(t->source + t->items[i].start, prefix, n) == 0;
}

static uint64_t number_word(const struct ka_tokens *t, size_t i)
{
    if (listed(t, i, KEPT_NUMBERS, KA_COUNT(KEPT_NUMBERS)))
        return ka_token_hash(t, i);
    if (starts(t, i, "1.442695"))
        return ka_word_hash("LOG2E");
    if (starts(t, i, "0.693147"))
        return ka_word_hash("LN2");
    bool is_float = memchr(t->source + t->items[i].start, '.', t->items[i].len) != NULL;
    return ka_word_hash(is_float ? "FLOAT" : "INT");
}

/* Written in capitals: a compile-time constant by convention. */
static bool is_constant(const struct ka_tokens *t, size_t i)
{
    bool upper = false;
    for (size_t k = 0; k < t->items[i].len; k++) {
        char c = t->source[t->items[i].start + k];
        if (islower((unsigned char)c))
            return false;
        upper = upper || isupper((unsigned char)c);
    }
    return upper;
}

static uint64_t name_word(const struct extract *x, size_t i)
{
    const struct ka_tokens *t = x->t;
    if (listed(t, i, KEPT_NAMES, KA_COUNT(KEPT_NAMES)) || (i > 0 && ka_token_is(t, i - 1, ".")))
        return ka_token_hash(t, i);
    uint64_t name = ka_token_hash(t, i);
    for (size_t k = 0; k < x->jit_count; k++)
        if (x->jit_names[k] == name)
            return ka_word_hash("CALL");
    bool constexpr =
        ka_token_is(t, i + 1, ":") && ka_token_is(t, i + 2, "tl") && ka_token_is(t, i + 4, "constexpr");
    return ka_word_hash(constexpr || is_constant(t, i) ? "CONST" : "ID");
}

/* tl.load, triton.language.load (the same), torch.empty_like: one word; returns the number of tokens it
 * takes, or 0. */
static size_t chain_word(const struct ka_tokens *t, size_t i, uint64_t *out)
{
    if (t->items[i].kind != KA_TOKEN_NAME || !listed(t, i, ROOTS, KA_COUNT(ROOTS)) ||
        !ka_token_is(t, i + 1, ".") || (i > 0 && ka_token_is(t, i - 1, ".")))
        return 0;
    size_t n = ka_token_is(t, i, "triton") && ka_token_is(t, i + 2, "language") && ka_token_is(t, i + 3, ".")
                   ? 2
                   : 0;
    uint64_t hash = n ? ka_word_hash("tl") : ka_token_hash(t, i);
    while (ka_token_is(t, i + n + 1, ".") && i + n + 2 < t->count) {
        hash = ka_word_join(hash, ka_token_hash(t, i + n + 2));
        n += 2;
    }
    *out = hash;
    return n + 1;
}

static bool is_docstring(const struct ka_tokens *t, size_t i)
{
    return t->items[i].kind == KA_TOKEN_STRING && (i == 0 || t->items[i - 1].kind == KA_TOKEN_NEWLINE) &&
           t->items[i + 1].kind == KA_TOKEN_NEWLINE;
}

static uint64_t word_of(const struct extract *x, size_t i)
{
    const struct ka_tokens *t = x->t;
    switch (t->items[i].kind) {
    case KA_TOKEN_NAME:
        return name_word(x, i);
    case KA_TOKEN_NUMBER:
        return number_word(t, i);
    case KA_TOKEN_STRING:
        return t->items[i].len <= 8 ? ka_token_hash(t, i) : ka_word_hash("STRING");
    case KA_TOKEN_OP:
        return ka_token_hash(t, i);
    case KA_TOKEN_NEWLINE:
        break;
    }
    return 0;
}

static void hash_tokens(struct extract *x, size_t from, size_t to)
{
    for (size_t i = from; i < to;) {
        uint64_t word;
        size_t taken = chain_word(x->t, i, &word);
        if (is_docstring(x->t, i)) {
            i += 2;
            continue;
        }
        x->stream = ka_word_join(x->stream, taken ? word : word_of(x, i));
        i += taken ? taken : 1;
    }
}

/* ---- what is launched ---- */

static bool is_harness(const struct ka_tokens *t, const struct ka_block *b)
{
    static const char *const NAMES[] = {"make_args", "reference", "flops", "setup", "autodiff"};
    return b->is_class || listed(t, b->name, NAMES, KA_COUNT(NAMES));
}

struct function {
    struct ka_block block;
    uint64_t name;
    bool jit, reached;
};

struct functions {
    struct function *items;
    size_t count;
};

static void list_functions(const struct ka_tokens *t, struct functions *f)
{
    struct ka_block b;
    for (size_t at = 0; ka_block_next(t, &at, &b);)
        *KA_APPEND(f->items, f->count) =
            (struct function){b, ka_token_hash(t, b.name), ka_block_decorated(t, &b, "jit"),
                              ka_block_decorated(t, &b, "autodiff")};
}

static int by_name(const void *a, const void *b)
{
    uint64_t x = ((const struct function *)a)->name, y = ((const struct function *)b)->name;
    return x < y ? -1 : x > y;
}

/* What a function that is reached names is reached too. Each is read once. */
static void reach(const struct ka_tokens *t, struct functions *f)
{
    KA_AUTO_FREE size_t *open = ka_calloc(f->count + 1, sizeof(*open));
    size_t count = 0;
    for (size_t i = 0; i < f->count; i++)
        if (f->items[i].reached)
            open[count++] = i;
    while (count) {
        struct ka_block b = f->items[open[--count]].block;
        for (size_t i = b.name + 1; i < b.end; i++) {
            if (t->items[i].kind != KA_TOKEN_NAME)
                continue;
            struct function key = {.name = ka_token_hash(t, i)};
            struct function *found = bsearch(&key, f->items, f->count, sizeof(key), by_name);
            if (found && !found->reached) {
                found->reached = true;
                open[count++] = (size_t)(found - f->items);
            }
        }
    }
}

/* Runs of letters: "softmax_fwd2" has two. Bytes of other alphabets are letters. */
static void add_words(struct extract *x, size_t token)
{
    const char *text = x->t->source + x->t->items[token].start;
    size_t len = x->t->items[token].len;
    uint64_t h = 0;
    for (size_t i = 0; i <= len; i++) {
        bool letter = i < len && (isalpha((unsigned char)text[i]) || (unsigned char)text[i] >= 0x80);
        if (letter)
            h = ka_word_join(h, (uint64_t)tolower((unsigned char)text[i]) + 1);
        else if (h)
            *KA_APPEND(x->words.items, x->words.count) = h;
        h = letter ? h : 0;
    }
}

static void add_function(struct extract *x, const struct function *f)
{
    if (f->jit)
        ka_kernel_features(x->t, f->block.keyword, f->block.end, &x->found);
    for (size_t i = f->block.first; i < f->block.end; i++)
        if (x->t->items[i].kind == KA_TOKEN_NAME)
            add_words(x, i);
}

/* A file without a stub that launches a kernel is described whole. */
static void add_functions(struct extract *x, const struct functions *f)
{
    bool launches = false;
    for (size_t i = 0; i < f->count; i++)
        launches |= f->items[i].jit && f->items[i].reached;
    for (size_t i = 0; i < f->count; i++)
        if (launches ? f->items[i].reached : !is_harness(x->t, &f->items[i].block))
            add_function(x, &f->items[i]);
}

static void read_all(struct extract *x)
{
    KA_AUTO_FREE struct function *items = NULL;
    struct functions f = {0};
    list_functions(x->t, &f);
    items = f.items;
    for (size_t i = 0; i < f.count; i++)
        if (f.items[i].jit && x->jit_count < KA_COUNT(x->jit_names))
            x->jit_names[x->jit_count++] = f.items[i].name;
    for (size_t i = 0; i < f.count; i++)
        if (!is_harness(x->t, &f.items[i].block))
            hash_tokens(x, f.items[i].block.keyword, f.items[i].block.end);
    if (f.count)
        qsort(f.items, f.count, sizeof(*f.items), by_name);
    reach(x->t, &f);
    add_functions(x, &f);
}

static int by_hash(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

/* Sorted, each once. */
static void make_set(struct ka_found *found)
{
    size_t count = 0;
    if (found->count)
        qsort(found->items, found->count, sizeof(*found->items), by_hash);
    for (size_t i = 0; i < found->count; i++)
        if (count == 0 || found->items[i] != found->items[count - 1])
            found->items[count++] = found->items[i];
    found->count = count;
}

static void take_features(struct extract *x, struct ka_features *out)
{
    make_set(&x->found);
    make_set(&x->words);
    *out = (struct ka_features){.items = x->found.items,
                                .count = x->found.count,
                                .words = x->words.items,
                                .word_count = x->words.count,
                                .tokens_hash = x->stream};
    memcpy(out->classes, x->found.classes, sizeof(out->classes));
}

int ka_features_of(const char *source, size_t len, struct ka_features *out, struct ka_err *err)
{
    struct ka_tokens tokens = {0};
    const char *after, *marker = ka_marker_find(source, len, &after);
    int rc = ka_lex(source, marker ? (size_t)(marker - source) : len, &tokens, err);
    if (rc)
        return rc;
    KA_AUTO_FREE struct extract *x = ka_calloc(1, sizeof(*x));
    x->t = &tokens;
    read_all(x);
    if (x->found.count == 0)
        rc = ka_fail(err, -EINVAL, "no function to compare with the store's pairs");
    else
        take_features(x, out);
    if (rc) {
        free(x->found.items);
        free(x->words.items);
    }
    ka_tokens_free(&tokens);
    return rc;
}

void ka_features_free(struct ka_features *features)
{
    free(features->items);
    free(features->words);
    *features = (struct ka_features){0};
}
