/* An abstract run of a kernel's text: a value is known by the operations that made it. Knows no store. */
#include "kernel.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#define ORIGINS 6     /* operations that made a value; more are forgotten */
#define VARIABLES 512 /* slots for variables; more just share slots */
#define NEST_MAX 16
#define DEPTH_MAX 64 /* of brackets; what is deeper is skipped */

/* Features of two classes never meet. */
enum class { OPERATION = 1, FLOW, CARRY, AXIS, ADDRESS, LOOP, COUNT };

/* A value: what made it, and its shape as far as the text tells. */
struct value {
    uint64_t origins[ORIGINS];
    size_t count;
    int rank;    /* dimensions of the tile */
    bool loaded; /* made from a tl.load */
    bool pid;    /* made from a program's index */
};

struct variable {
    uint64_t name;
    struct value value;
};

struct nest {
    uint32_t indent;
    bool loop;
};

struct run {
    const struct ka_tokens *t;
    struct ka_found *out;
    struct variable variables[VARIABLES];
    struct nest nest[NEST_MAX];
    size_t depth, loops, brackets;
    size_t loads, stores, dots, reduces, most_loops;
    uint64_t carried; /* name that the statement at hand assigns, if the loop's last round did too */
    bool reads_carried;
};

static uint64_t token_hash(const struct run *x, size_t i)
{
    return ka_token_hash(x->t, i);
}

static bool is(const struct run *x, size_t i, const char *text)
{
    return ka_token_is(x->t, i, text);
}

static bool kind_is(const struct run *x, size_t i, enum ka_token_kind kind)
{
    return i < x->t->count && x->t->items[i].kind == kind;
}

static bool any_of(const struct run *x, size_t i, const char *const *list, size_t count)
{
    for (size_t k = 0; k < count; k++)
        if (is(x, i, list[k]))
            return true;
    return false;
}

static void add(struct run *x, enum class class, uint64_t hash)
{
    *KA_APPEND(x->out->items, x->out->count) = ka_word_join(hash, class);
}

/* ---- values ---- */

static void add_origin(struct value *v, uint64_t op)
{
    for (size_t i = 0; i < v->count; i++)
        if (v->origins[i] == op)
            return;
    if (v->count < ORIGINS)
        v->origins[v->count++] = op;
}

static void merge(struct value *into, const struct value *v)
{
    for (size_t i = 0; i < v->count; i++)
        add_origin(into, v->origins[i]);
    into->rank = v->rank > into->rank ? v->rank : into->rank;
    into->loaded |= v->loaded;
    into->pid |= v->pid;
}

static struct variable *variable_of(struct run *x, uint64_t name)
{
    struct variable *v = &x->variables[name % VARIABLES];
    if (v->name != name)
        *v = (struct variable){.name = name};
    return v;
}

/* ---- operations ---- */

/* Spellings of one operation; "" for what computes nothing. */
static const struct {
    const char *spelling, *op;
} SPELLINGS[] = {
    {"exp2", "exp"},      {"log2", "log"},        {"log1p", "log"},      {"rsqrt", "sqrt"},
    {"sqrt_rn", "sqrt"},  {"fast_expf", "exp"},   {"div_rn", "div"},     {"fdiv", "div"},
    {"clamp", "minimum"}, {"randint", "rand"},    {"rand4x", "rand"},    {"reduce", "sum"},
    {"argmin", "argmax"}, {"make_block_ptr", ""}, {"advance", ""},       {"cdiv", ""},
    {"multiple_of", ""},  {"max_contiguous", ""}, {"static_assert", ""}, {"debug_barrier", ""},
    {"static_print", ""}, {"device_assert", ""},  {"constexpr", ""},     {"broadcast_to", ""},
    {"reshape", ""},      {"view", ""},           {"full", "zeros"},     {"zeros_like", "zeros"}};

/* Operations that files also import by their bare names, or call as methods of a tile. */
static const char *const BARE[] = {"exp",  "log", "tanh", "erf", "sqrt", "rsqrt", "sigmoid", "exp2",
                                   "log2", "sum", "max",  "min", "cos",  "sin",   "abs",     "floor"};
static const char *const ROOTS[] = {"tl", "math", "libdevice", "triton"};

/* The word that names the operation called at `i`, or 0; tl.math.exp(, libdevice.exp(, exp(. */
static size_t called(const struct run *x, size_t i)
{
    size_t last = i;
    while (is(x, last + 1, ".") && kind_is(x, last + 2, KA_TOKEN_NAME))
        last += 2;
    if (!is(x, last + 1, "("))
        return 0;
    bool rooted = last > i && any_of(x, i, ROOTS, KA_COUNT(ROOTS));
    return rooted || (last == i && any_of(x, i, BARE, KA_COUNT(BARE))) ? last : 0;
}

static uint64_t op_of(const struct run *x, size_t word)
{
    for (size_t k = 0; k < KA_COUNT(SPELLINGS); k++)
        if (is(x, word, SPELLINGS[k].spelling))
            return *SPELLINGS[k].op ? ka_word_hash(SPELLINGS[k].op) : 0;
    return token_hash(x, word);
}

static void note_op(struct run *x, uint64_t op)
{
    size_t loops = x->loops < 2 ? x->loops : 2;
    add(x, OPERATION, op);
    add(x, OPERATION, ka_word_join(op, 11 + loops));
}

static void flow(struct run *x, const struct value *from, uint64_t into)
{
    for (size_t i = 0; i < from->count; i++)
        add(x, FLOW, ka_word_join(from->origins[i], into));
}

/* ---- expressions ---- */

static struct value expression(struct run *x, size_t from, size_t to);

/* One past the bracket that closes the one at `i`; never beyond `to`. */
static size_t closing(const struct run *x, size_t i, size_t to)
{
    size_t depth = 0;
    for (; i < to; i++) {
        char c = x->t->items[i].len == 1 ? x->t->source[x->t->items[i].start] : 0;
        if (c == '(' || c == '[' || c == '{')
            depth++;
        else if ((c == ')' || c == ']' || c == '}') && --depth == 0)
            return i + 1;
    }
    return to;
}

/* The end of the argument that begins at `i`: its comma, or `to`. */
static size_t argument_end(const struct run *x, size_t i, size_t to)
{
    while (i < to && !is(x, i, ",")) {
        bool open = is(x, i, "(") || is(x, i, "[") || is(x, i, "{");
        i = open ? closing(x, i, to) : i + 1;
    }
    return i;
}

static struct value inside(struct run *x, size_t from, size_t to)
{
    struct value v = {0};
    if (x->brackets == DEPTH_MAX)
        return v;
    x->brackets++;
    v = expression(x, from, to);
    x->brackets--;
    return v;
}

static size_t elements(const struct run *x, size_t from, size_t to)
{
    size_t n = 0;
    for (size_t i = from; i < to; i = argument_end(x, i, to) + 1)
        n++;
    return n;
}

/* What the arguments of an operation say beside their values. */
struct call {
    uint64_t op;
    size_t word, from, to; /* arguments: tokens [from, to) */
    struct value address, all;
    uint64_t axis;
};

static bool is_memory(const struct run *x, size_t word)
{
    const struct ka_token *t = &x->t->items[word];
    return is(x, word, "load") || is(x, word, "store") ||
           (t->len > 7 && memcmp(x->t->source + t->start, "atomic_", 7) == 0);
}

static void read_arguments(struct run *x, struct call *c)
{
    bool memory = is_memory(x, c->word);
    size_t n = 0;
    for (size_t i = c->from, end; i < c->to; i = end + 1, n++) {
        end = argument_end(x, i, c->to);
        bool keyword = is(x, i + 1, "=") && kind_is(x, i, KA_TOKEN_NAME);
        if (keyword && is(x, i, "axis"))
            c->axis = token_hash(x, i + 2);
        if (!keyword && n == 1 && end == i + 1 && kind_is(x, i, KA_TOKEN_NUMBER))
            c->axis = token_hash(x, i);
        struct value v = inside(x, keyword ? i + 2 : i, end);
        bool is_mask = memory && !is(x, c->word, "load") ? n > 1 : n > 0;
        if (memory && n == 0)
            c->address = v;
        else if (!(memory && is_mask))
            merge(&c->all, &v);
    }
}

static void note_memory(struct run *x, const struct call *c, bool load)
{
    int rank = c->address.rank < 2 ? c->address.rank : 2;
    uint64_t how = ka_word_join(c->op, (uint64_t)rank * 4 + (c->address.loaded ? 2u : 0u) + (x->loops > 0));
    add(x, ADDRESS, how);
    if (c->address.loaded)
        add(x, ADDRESS, ka_word_join(c->op, 99));
    x->out->classes[KA_CLASS_INDIRECT] |= c->address.loaded;
    x->loads += load;
    x->stores += !load;
}

static int rank_of(const struct run *x, const struct call *c)
{
    static const char *const REDUCE[] = {"sum", "max", "min", "argmax", "argmin", "reduce", "xor_sum"};
    if (is(x, c->word, "arange"))
        return 1;
    if (is(x, c->word, "dot") || is(x, c->word, "trans"))
        return 2;
    if (is(x, c->word, "zeros") || is(x, c->word, "full"))
        return is(x, c->from, "(") || is(x, c->from, "[")
                   ? (int)elements(x, c->from + 1, closing(x, c->from, c->to) - 1)
                   : 1;
    if (any_of(x, c->word, REDUCE, KA_COUNT(REDUCE)))
        return c->all.rank > 0 ? c->all.rank - 1 : 0;
    return c->all.rank > c->address.rank ? c->all.rank : c->address.rank;
}

static bool is_one(const struct run *x, size_t i)
{
    return is(x, i, "1") || is(x, i, "1.0") || is(x, i, "1.");
}

static bool is_two(const struct run *x, size_t i)
{
    return is(x, i, "2") || is(x, i, "2.0") || is(x, i, "2.");
}

/* tanh(x) is often written as 2 sigmoid(2 x) - 1. */
static bool is_tanh(const struct run *x, size_t word)
{
    return is(x, word, "sigmoid") && is_two(x, word + 2) && is(x, word + 3, "*");
}

/* ... / (1 + exp(-x)): the bracket at `i`. */
static bool is_logistic(const struct run *x, size_t i)
{
    size_t word = is(x, i, "(") && is_one(x, i + 1) && is(x, i + 2, "+") ? called(x, i + 3) : 0;
    return word && op_of(x, word) == ka_word_hash("exp") && is(x, word + 2, "-");
}

/* ... / (exp(2 x) + 1), from which tanh(x) is made too. */
static bool is_tanh_part(const struct run *x, size_t i, size_t close)
{
    size_t word = is(x, i, "(") ? called(x, i + 1) : 0;
    return word && op_of(x, word) == ka_word_hash("exp") && is_two(x, word + 2) && is(x, close - 3, "+") &&
           is_one(x, close - 2);
}

static struct value block_pointer(const struct run *x, struct value v, size_t from, size_t to)
{
    while (from < to && !is(x, from, "(") && !is(x, from, "["))
        from++;
    v.rank = from < to ? (int)elements(x, from + 1, closing(x, from, to) - 1) : 0;
    return v;
}

static struct value operation(struct run *x, size_t word, size_t close)
{
    struct call c = {.op = op_of(x, word), .word = word, .from = word + 2, .to = close - 1};
    c.op = is_tanh(x, word) ? ka_word_hash("tanh") : c.op;
    read_arguments(x, &c);
    if (is(x, word, "make_block_ptr"))
        return block_pointer(x, c.all, c.from, c.to);
    struct value v = {.loaded = c.all.loaded || c.address.loaded, .pid = c.all.pid};
    if (c.op == 0)
        return c.all;
    v.rank = rank_of(x, &c);
    if (is(x, word, "program_id")) {
        add(x, OPERATION, ka_word_join(c.op, token_hash(x, close - 2)));
        v.pid = true;
        return v;
    }
    if (is(x, word, "arange") || is(x, word, "num_programs"))
        return v;
    note_op(x, c.op);
    bool load = is(x, word, "load"), reduce = v.rank < c.all.rank && !load;
    if (is_memory(x, word))
        note_memory(x, &c, load);
    if (load) {
        v.loaded = true;
    } else {
        flow(x, &c.all, c.op);
    }
    if (reduce || c.axis) {
        add(x, AXIS, ka_word_join(c.op, ka_word_join(c.axis, (uint64_t)(c.all.rank * 2) + (x->loops > 0))));
        x->reduces++;
        x->out->classes[KA_CLASS_REDUCTION] = true;
    }
    bool dot = is(x, word, "dot");
    x->dots += dot;
    x->out->classes[KA_CLASS_PRODUCT] |= dot;
    x->out->classes[KA_CLASS_EXPONENTIAL] |= c.op == ka_word_hash("exp");
    add_origin(&v, c.op);
    return v;
}

/* An operation of one argument, tokens [from, to), that is spelled out. */
static struct value composed(struct run *x, const char *name, size_t from, size_t to)
{
    uint64_t op = ka_word_hash(name);
    struct value of = inside(x, from, to);
    struct value v = {.rank = of.rank, .loaded = of.loaded, .pid = of.pid};
    note_op(x, op);
    flow(x, &of, op);
    add_origin(&v, op);
    return v;
}

/* A name, a number, a call or a bracket, with what is attached to it; *at is moved past it. */
static struct value primary(struct run *x, size_t *at, size_t to)
{
    struct value v = {0};
    size_t i = *at, word = called(x, i);
    if (word && word < to) {
        size_t close = closing(x, word + 1, to);
        v = operation(x, word, close);
        i = close;
    } else if (is(x, i, "(") || is(x, i, "[")) {
        size_t close = closing(x, i, to);
        if (is_logistic(x, i))
            v = composed(x, "sigmoid", called(x, i + 3) + 3, close - 2);
        else if (is_tanh_part(x, i, close))
            v = composed(x, "tanh", called(x, i + 1) + 2, close - 4);
        else
            v = inside(x, i + 1, close - 1);
        i = close;
    } else {
        if (kind_is(x, i, KA_TOKEN_NAME)) {
            uint64_t name = token_hash(x, i);
            const struct variable *known = variable_of(x, name);
            v = known->value;
            x->reads_carried |= x->carried && name == x->carried;
        }
        i++;
    }
    while (i < to && (is(x, i, ".") || is(x, i, "[") || is(x, i, "("))) {
        if (is(x, i, ".")) {
            if (is(x, i + 1, "T"))
                v.rank = 2;
            i += 2;
            continue;
        }
        size_t close = closing(x, i, to);
        if (is(x, i, "[")) {
            for (size_t k = i + 1; k + 1 < close; k++)
                if (is(x, k, "None")) {
                    v.rank = v.rank < 2 ? 2 : 3;
                    break;
                }
        } else if (!is(x, i - 1, "to")) { /* of a function of the file's, or a method */
            struct value given = inside(x, i + 1, close - 1);
            merge(&v, &given);
        }
        i = close;
    }
    *at = i;
    return v;
}

static struct value expression(struct run *x, size_t from, size_t to)
{
    static const char *const MARKED[] = {"/", "-", "*",  "%",  "//", ">>", "&",
                                         "|", "^", ">=", "<=", "==", ">"};
    struct value all = {0}, left = {0};
    size_t sign = 0;
    for (size_t i = from; i < to;) {
        if (kind_is(x, i, KA_TOKEN_OP) && !is(x, i, "(") && !is(x, i, "[")) {
            sign = any_of(x, i, MARKED, KA_COUNT(MARKED)) ? i : 0;
            i++;
            continue;
        }
        struct value v = primary(x, &i, to);
        if (sign) {
            uint64_t op = token_hash(x, sign);
            bool even = is(x, sign, "*") || is(x, sign, "&") || is(x, sign, "|");
            flow(x, &v, op);
            if (even)
                flow(x, &left, op);
            if (v.rank == 2 && left.rank == 2 && !even && !is(x, sign, "-"))
                add(x, OPERATION, ka_word_join(op, 77)); /* tiles compared: a causal mask, equal labels */
            if (is(x, sign, "%") || is(x, sign, "//") || is(x, sign, ">>"))
                add(x, OPERATION, op);
        }
        sign = 0;
        left = v;
        merge(&all, &v);
    }
    return all;
}

/* ---- statements ---- */

/* The token of the `=`, or of an augmented one, at depth 0; `to` where there is none. */
static size_t assignment(const struct run *x, size_t from, size_t to, bool *augmented)
{
    static const char *const AUGMENTED[] = {"+=", "-=", "*=", "/=", "|=", "&=", "^="};
    for (size_t i = from; i < to; i++) {
        if (is(x, i, "(") || is(x, i, "[") || is(x, i, "{")) {
            i = closing(x, i, to) - 1;
            continue;
        }
        *augmented = any_of(x, i, AUGMENTED, KA_COUNT(AUGMENTED));
        if (*augmented || is(x, i, "="))
            return i;
    }
    return to;
}

static void assign(struct run *x, size_t from, size_t to, size_t equals, bool augmented)
{
    uint64_t name = token_hash(x, from);
    const struct variable *before = variable_of(x, name);
    bool known = before->value.count || before->value.rank || before->value.loaded;
    x->carried = x->loops && known ? name : 0;
    x->reads_carried = false;
    struct value v = expression(x, equals + 1, to);
    if (x->carried && (augmented || x->reads_carried) && (v.count || before->value.count)) {
        uint64_t how = augmented ? token_hash(x, equals) : ka_word_hash("self");
        add(x, CARRY, ka_word_join(how, 5));
        add(x, CARRY,
            ka_word_join(ka_word_hash("rank"), (uint64_t)v.rank * 4 + (x->loops < 3 ? x->loops : 3)));
        for (size_t i = 0; i < v.count; i++)
            add(x, CARRY, ka_word_join(v.origins[i], 6));
    }
    x->carried = 0;
    for (size_t i = from; i < equals; i++) {
        if (!kind_is(x, i, KA_TOKEN_NAME) || is(x, i - 1, "."))
            continue;
        struct variable *to_set = variable_of(x, token_hash(x, i));
        struct value old = to_set->value;
        to_set->value = v;
        if (augmented)
            merge(&to_set->value, &old);
        if (is(x, i + 1, ":"))
            break; /* an annotation */
    }
}

static void open_loop(struct run *x, size_t from, size_t to)
{
    size_t in = from;
    while (in < to && !is(x, in, "in"))
        in++;
    struct value v = expression(x, in < to ? in + 1 : from + 1, to);
    add(x, LOOP, ka_word_join(ka_word_hash(v.loaded ? "loaded bounds" : "loop"), x->loops));
    if (in < to) {
        variable_of(x, token_hash(x, from + 1))->value = v;
        x->most_loops = x->loops + 1 > x->most_loops ? x->loops + 1 : x->most_loops;
    }
}

/* Leave blocks that ended. */
static void leave(struct run *x, uint32_t indent)
{
    while (x->depth && x->nest[x->depth - 1].indent >= indent) {
        x->depth--;
        x->loops -= x->nest[x->depth].loop;
    }
}

static void statement(struct run *x, size_t from, size_t to)
{
    uint32_t indent = x->t->items[from].indent;
    leave(x, indent);
    bool loop = is(x, from, "for") || is(x, from, "while");
    bool branch = is(x, from, "if") || is(x, from, "elif") || is(x, from, "else");
    bool augmented = false;
    size_t equals = assignment(x, from, to, &augmented);
    if (loop)
        open_loop(x, from, to);
    else if (branch)
        expression(x, from + 1, to);
    else if (equals < to && kind_is(x, from, KA_TOKEN_NAME))
        assign(x, from, to, equals, augmented);
    else if (!kind_is(x, from, KA_TOKEN_STRING))
        expression(x, from, to);
    if ((loop || branch) && x->depth < NEST_MAX) {
        x->nest[x->depth++] = (struct nest){indent, loop};
        x->loops += loop;
    }
}

/* ---- the whole ---- */

static size_t coarse(size_t n)
{
    return n < 5 ? n : n < 8 ? 5 : 6;
}

static void sum_up(struct run *x)
{
    add(x, COUNT, ka_word_join(ka_word_hash("loads"), coarse(x->loads)));
    add(x, COUNT, ka_word_join(ka_word_hash("stores"), coarse(x->stores)));
    add(x, COUNT, ka_word_join(ka_word_hash("dots"), coarse(x->dots)));
    add(x, COUNT, ka_word_join(ka_word_hash("reductions"), coarse(x->reduces)));
    add(x, COUNT, ka_word_join(ka_word_hash("loops"), x->most_loops));
}

void ka_kernel_features(const struct ka_tokens *tokens, size_t from, size_t to, struct ka_found *out)
{
    KA_AUTO_FREE struct run *x = ka_calloc(1, sizeof(*x));
    x->t = tokens;
    x->out = out;
    size_t i = from; /* past the signature, which ends in a colon outside of brackets */
    while (i < to && !is(x, i, ":"))
        i = is(x, i, "(") ? closing(x, i, to) : i + 1;
    for (size_t end = i + 1; i < to; i = end + 1) {
        i = i == end - 1 && is(x, i, ":") ? i + 1 : i;
        end = i;
        while (end < to && !kind_is(x, end, KA_TOKEN_NEWLINE) && !is(x, end, ";"))
            end++;
        if (end > i)
            statement(x, i, end);
    }
    sum_up(x);
}
