/* From Python tokens to weighted features. Knows no store and no vector. */
#include "features.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "lex.h"
#include "pair.h"

/* Weight of each class of features; a host function's count half. */
enum class { CLASS_NGRAM, CLASS_STRUCTURE, CLASS_FLOW, CLASS_COUNT, CLASS_INDIRECT };
static const float CLASS_WEIGHT[] = {1.0f, 2.0f, 1.5f, 2.0f, 3.0f};

enum count {
    COUNT_DOT,
    COUNT_LOAD,
    COUNT_STORE,
    COUNT_ATOMIC,
    COUNT_REDUCE,
    COUNT_PROGRAM_ID,
    COUNT_WHERE,
    COUNTS
};

#define NEST_MAX 16
#define VARIABLES 512 /* slots for the variables of one function; more just share slots */

/* A token after normalisation. */
struct norm {
    uint64_t hash;
    uint32_t token; /* the first token it stands for */
    bool is_op;     /* a tl.* or math chain */
};

struct variable {
    uint64_t name, op; /* hash of the operation that made it; 0 when unknown */
    bool loaded;       /* derived from a tl.load */
};

struct nest {
    uint64_t kind;
    uint32_t indent;
    bool loop;
};

struct extract {
    const struct ka_tokens *t;
    struct ka_feature *found; /* as they come: one each time it occurs, with its weight alone */
    size_t count;
    struct norm *norms;
    size_t norm_count;
    uint64_t stream; /* running hash of all normalised tokens */
    uint64_t jit_names[64];
    size_t jit_count;
    struct variable variables[VARIABLES];
    struct nest nest[NEST_MAX];
    size_t nest_depth;
    size_t counts[COUNTS];
    float scale; /* of the function at hand */
};

static uint64_t hash_bytes(const char *bytes, size_t len)
{
    uint64_t h = 0xcbf29ce484222325u;
    for (size_t i = 0; i < len; i++)
        h = (h ^ (unsigned char)bytes[i]) * 0x100000001b3u;
    return ka_mix64(h);
}

static uint64_t hash_text(const char *text)
{
    return hash_bytes(text, strlen(text));
}

static uint64_t join(uint64_t a, uint64_t b)
{
    return ka_mix64(a * 3 + b);
}

static void add(struct extract *x, enum class class, uint64_t hash)
{
    *KA_APPEND(x->found, x->count) =
        (struct ka_feature){join(hash, class + 1), CLASS_WEIGHT[class] * x->scale};
}

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

static uint64_t token_hash(const struct ka_tokens *t, size_t i)
{
    return hash_bytes(t->source + t->items[i].start, t->items[i].len);
}

static bool starts(const struct ka_tokens *t, size_t i, const char *prefix)
{
    size_t n = strlen(prefix);
    return t->items[i].len >= n && memcmp(t->source + t->items[i].start, prefix, n) == 0;
}

static uint64_t number_word(const struct ka_tokens *t, size_t i)
{
    if (listed(t, i, KEPT_NUMBERS, KA_COUNT(KEPT_NUMBERS)))
        return token_hash(t, i);
    if (starts(t, i, "1.442695"))
        return hash_text("LOG2E");
    if (starts(t, i, "0.693147"))
        return hash_text("LN2");
    bool is_float = memchr(t->source + t->items[i].start, '.', t->items[i].len) != NULL;
    return hash_text(is_float ? "FLOAT" : "INT");
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
        return token_hash(t, i);
    uint64_t name = token_hash(t, i);
    for (size_t k = 0; k < x->jit_count; k++)
        if (x->jit_names[k] == name)
            return hash_text("CALL");
    bool constexpr =
        ka_token_is(t, i + 1, ":") && ka_token_is(t, i + 2, "tl") && ka_token_is(t, i + 4, "constexpr");
    return hash_text(constexpr || is_constant(t, i) ? "CONST" : "ID");
}

/* tl.load, triton.language.load (the same), torch.empty_like: one word; returns the number of tokens it
 * takes, or 0. */
static size_t chain_word(const struct ka_tokens *t, size_t i, struct norm *out)
{
    if (t->items[i].kind != KA_TOKEN_NAME || !listed(t, i, ROOTS, KA_COUNT(ROOTS)) ||
        !ka_token_is(t, i + 1, ".") || (i > 0 && ka_token_is(t, i - 1, ".")))
        return 0;
    size_t n = ka_token_is(t, i, "triton") && ka_token_is(t, i + 2, "language") && ka_token_is(t, i + 3, ".")
                   ? 2
                   : 0;
    bool device = n > 0 || !(ka_token_is(t, i, "torch") || ka_token_is(t, i, "triton"));
    uint64_t hash = n ? hash_text("tl") : token_hash(t, i);
    while (ka_token_is(t, i + n + 1, ".") && i + n + 2 < t->count) {
        hash = join(hash, token_hash(t, i + n + 2));
        n += 2;
    }
    *out =
        (struct norm){.hash = hash, .token = (uint32_t)i, .is_op = device && ka_token_is(t, i + n + 1, "(")};
    return n + 1;
}

static bool is_docstring(const struct ka_tokens *t, size_t i)
{
    return t->items[i].kind == KA_TOKEN_STRING && (i == 0 || t->items[i - 1].kind == KA_TOKEN_NEWLINE) &&
           t->items[i + 1].kind == KA_TOKEN_NEWLINE;
}

/* The function's tokens as words; NEWLINE stays as hash 0. */
static void normalise(struct extract *x, size_t from, size_t to)
{
    const struct ka_tokens *t = x->t;
    x->norm_count = 0;
    for (size_t i = from; i < to;) {
        struct norm word = {.token = (uint32_t)i};
        size_t taken = chain_word(t, i, &word);
        if (is_docstring(t, i)) {
            i += 2;
            continue;
        }
        if (!taken) {
            taken = 1;
            switch (t->items[i].kind) {
            case KA_TOKEN_NAME:
                word.hash = name_word(x, i);
                break;
            case KA_TOKEN_NUMBER:
                word.hash = number_word(t, i);
                break;
            case KA_TOKEN_STRING:
                word.hash = t->items[i].len <= 8 ? token_hash(t, i) : hash_text("STRING");
                break;
            case KA_TOKEN_OP:
                word.hash = token_hash(t, i);
                break;
            case KA_TOKEN_NEWLINE:
                break;
            }
        }
        x->stream = join(x->stream, word.hash);
        x->norms[x->norm_count++] = word;
        i += taken;
    }
}

/* ---- features of one statement ---- */

struct statement {
    const struct norm *words;
    size_t count;
    size_t assign; /* index of its `=` or augmented `+=`, or count */
    bool augmented;
    size_t loops, branches; /* around it */
};

static bool word_is(const struct extract *x, const struct statement *s, size_t i, const char *text)
{
    return i < s->count && ka_token_is(x->t, s->words[i].token, text);
}

static void add_ngrams(struct extract *x, const struct statement *s)
{
    for (size_t i = 0; i < s->count; i++) {
        uint64_t hash = s->words[i].hash;
        add(x, CLASS_NGRAM, hash);
        for (size_t n = 1; n < 3 && i + n < s->count; n++) {
            hash = join(hash, s->words[i + n].hash);
            add(x, CLASS_NGRAM, hash);
        }
    }
}

static void count_op(struct extract *x, const struct norm *word)
{
    static const struct {
        const char *name;
        enum count count;
    } OPS[] = {{"dot", COUNT_DOT},
               {"load", COUNT_LOAD},
               {"store", COUNT_STORE},
               {"sum", COUNT_REDUCE},
               {"max", COUNT_REDUCE},
               {"min", COUNT_REDUCE},
               {"argmax", COUNT_REDUCE},
               {"reduce", COUNT_REDUCE},
               {"cumsum", COUNT_REDUCE},
               {"associative_scan", COUNT_REDUCE},
               {"program_id", COUNT_PROGRAM_ID},
               {"where", COUNT_WHERE}};
    size_t last = word->token + 2;
    for (size_t i = 0; i < KA_COUNT(OPS); i++)
        x->counts[OPS[i].count] += ka_token_is(x->t, last, OPS[i].name);
    x->counts[COUNT_ATOMIC] += last < x->t->count && starts(x->t, last, "atomic_");
}

static void add_structure(struct extract *x, const struct statement *s)
{
    size_t loops = s->loops < 3 ? s->loops : 3;
    for (size_t i = 0; i < s->count; i++) {
        if (!s->words[i].is_op)
            continue;
        add(x, CLASS_STRUCTURE, join(s->words[i].hash, 2 * loops + (s->branches > 0)));
        count_op(x, &s->words[i]);
    }
    bool carried = s->augmented;
    for (size_t i = s->assign + 1; i < s->count && !carried; i++)
        carried =
            s->assign == 1 && token_hash(x->t, s->words[i].token) == token_hash(x->t, s->words[0].token);
    if (loops && carried)
        add(x, CLASS_STRUCTURE, join(hash_text("carried"), loops));
}

static struct variable *variable_of(struct extract *x, uint64_t name)
{
    struct variable *v = &x->variables[name % VARIABLES];
    if (v->name != name)
        *v = (struct variable){.name = name};
    return v;
}

static bool is_plain_name(const struct extract *x, const struct norm *word)
{
    return x->t->items[word->token].kind == KA_TOKEN_NAME && !word->is_op &&
           !(word->token > 0 && ka_token_is(x->t, word->token - 1, "."));
}

/* The address of a load, store or atomic at word `i` is its first argument: is it made from loaded values? */
static bool address_loaded(struct extract *x, const struct statement *s, size_t i)
{
    size_t depth = 0;
    for (size_t k = i + 1; k < s->count; k++) {
        if (word_is(x, s, k, "(") || word_is(x, s, k, "["))
            depth++;
        else if ((word_is(x, s, k, ")") || word_is(x, s, k, "]")) && --depth == 0)
            return false;
        else if (word_is(x, s, k, ",") && depth == 1)
            return false;
        else if (is_plain_name(x, &s->words[k]) &&
                 variable_of(x, token_hash(x->t, s->words[k].token))->loaded)
            return true;
        if (depth == 0)
            return false;
    }
    return false;
}

static bool op_named(const struct extract *x, const struct norm *word, const char *prefix)
{
    return word->is_op && word->token + 2 < x->t->count && starts(x->t, word->token + 2, prefix);
}

static void add_flow(struct extract *x, const struct statement *s)
{
    size_t from = s->assign < s->count ? s->assign + 1 : 0;
    uint64_t main_op = 0;
    bool loads = false;
    for (size_t i = from; i < s->count; i++) {
        const struct norm *word = &s->words[i];
        if (!word->is_op)
            continue;
        main_op = main_op ? main_op : word->hash;
        loads = loads || op_named(x, word, "load");
        if ((op_named(x, word, "load") || op_named(x, word, "store") || op_named(x, word, "atomic_")) &&
            address_loaded(x, s, i))
            add(x, CLASS_INDIRECT, word->hash);
    }
    uint64_t made_by = main_op ? main_op : hash_text("arithmetic");
    for (size_t i = from; i < s->count; i++) {
        if (!is_plain_name(x, &s->words[i]))
            continue;
        const struct variable *v = variable_of(x, token_hash(x->t, s->words[i].token));
        loads = loads || v->loaded;
        if (v->op)
            add(x, CLASS_FLOW, join(v->op, made_by));
    }
    for (size_t i = 0; i < s->assign && s->assign < s->count; i++) {
        if (!is_plain_name(x, &s->words[i]))
            continue;
        struct variable *v = variable_of(x, token_hash(x->t, s->words[i].token));
        v->loaded = loads || (s->augmented && v->loaded);
        v->op = s->augmented && v->op ? v->op : made_by;
    }
}

/* ---- functions ---- */

static void find_assignment(const struct extract *x, struct statement *s)
{
    static const char *const AUGMENTED[] = {"+=", "-=", "*=", "/=", "|=", "&="};
    size_t depth = 0;
    s->assign = s->count;
    for (size_t i = 0; i < s->count && s->assign == s->count; i++) {
        uint32_t token = s->words[i].token;
        if (word_is(x, s, i, "(") || word_is(x, s, i, "["))
            depth++;
        else if ((word_is(x, s, i, ")") || word_is(x, s, i, "]")) && depth)
            depth--;
        s->augmented = listed(x->t, token, AUGMENTED, KA_COUNT(AUGMENTED));
        if (depth == 0 && (s->augmented || ka_token_is(x->t, token, "=")))
            s->assign = i;
    }
}

/* Leave blocks that ended, and enter the one that this line opens. */
static void track_nest(struct extract *x, const struct norm *first)
{
    uint32_t indent = x->t->items[first->token].indent;
    while (x->nest_depth && x->nest[x->nest_depth - 1].indent >= indent)
        x->nest_depth--;
    bool loop = ka_token_is(x->t, first->token, "for") || ka_token_is(x->t, first->token, "while");
    bool branch = ka_token_is(x->t, first->token, "if") || ka_token_is(x->t, first->token, "elif") ||
                  ka_token_is(x->t, first->token, "else");
    if (!(loop || branch) || x->nest_depth == NEST_MAX)
        return;
    x->nest[x->nest_depth++] = (struct nest){token_hash(x->t, first->token), indent, loop};
    uint64_t path = hash_text("nest");
    for (size_t i = 0; i < x->nest_depth; i++)
        path = join(path, x->nest[i].kind);
    add(x, CLASS_STRUCTURE, path);
}

static void add_function(struct extract *x)
{
    memset(x->variables, 0, sizeof(x->variables));
    x->nest_depth = 0;
    for (size_t i = 0; i < x->norm_count;) {
        struct statement s = {.words = &x->norms[i]};
        while (i + s.count < x->norm_count && s.words[s.count].hash)
            s.count++;
        i += s.count + 1;
        if (s.count == 0)
            continue;
        track_nest(x, s.words);
        for (size_t k = 0; k < x->nest_depth; k++) {
            s.loops += x->nest[k].loop;
            s.branches += !x->nest[k].loop;
        }
        find_assignment(x, &s);
        add_ngrams(x, &s);
        add_structure(x, &s);
        add_flow(x, &s);
    }
}

static bool is_harness(const struct ka_tokens *t, const struct ka_block *b)
{
    static const char *const NAMES[] = {"make_args", "reference", "flops", "setup", "autodiff"};
    return b->is_class || listed(t, b->name, NAMES, KA_COUNT(NAMES));
}

static void add_counts(struct extract *x)
{
    x->scale = 1;
    for (size_t i = 0; i < COUNTS; i++) {
        size_t bucket = x->counts[i] < 4 ? x->counts[i] : x->counts[i] < 8 ? 4 : 5;
        add(x, CLASS_COUNT, join(i + 101, bucket));
    }
    add(x, CLASS_COUNT, join(201, x->jit_count < 4 ? x->jit_count : 4));
}

static void add_all(struct extract *x)
{
    struct ka_block b;
    for (size_t at = 0; ka_block_next(x->t, &at, &b);)
        if (ka_block_decorated(x->t, &b, "jit") && x->jit_count < KA_COUNT(x->jit_names))
            x->jit_names[x->jit_count++] = token_hash(x->t, b.name);
    for (size_t at = 0; ka_block_next(x->t, &at, &b);) {
        if (is_harness(x->t, &b))
            continue;
        x->scale = ka_block_decorated(x->t, &b, "jit") ? 1.0f : 0.5f;
        normalise(x, b.keyword, b.end);
        add_function(x);
    }
    if (x->count)
        add_counts(x);
}

static int by_hash(const void *a, const void *b)
{
    uint64_t x = ((const struct ka_feature *)a)->hash, y = ((const struct ka_feature *)b)->hash;
    return x < y ? -1 : x > y;
}

/* What was found, each once: with its greatest weight, and by how often it occurs. */
static struct ka_features sum_up(struct extract *x)
{
    struct ka_features sum = {.items = x->found, .tokens_hash = x->stream};
    qsort(x->found, x->count, sizeof(*x->found), by_hash);
    for (size_t i = 0, next; i < x->count; i = next) {
        struct ka_feature f = x->found[i];
        for (next = i + 1; next < x->count && x->found[next].hash == f.hash; next++)
            f.weight = fmaxf(f.weight, x->found[next].weight);
        f.weight *= logf(1.0f + (float)(next - i));
        sum.items[sum.count++] = f;
    }
    return sum;
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
    x->norms = ka_calloc(tokens.count, sizeof(*x->norms));
    add_all(x);
    if (x->count == 0)
        rc = ka_fail(err, -EINVAL, "no function to compare with the store's pairs");
    else
        *out = sum_up(x);
    free(x->norms);
    ka_tokens_free(&tokens);
    return rc;
}

void ka_features_free(struct ka_features *features)
{
    free(features->items);
    *features = (struct ka_features){0};
}
