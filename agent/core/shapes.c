/* Scaled and hidden shapes. Guesses are made here and nowhere else; must not know how a shape is run or
 * judged. */
#include "shapes.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "base/each.h"

enum role {
    ROLE_FIXED, /* not a size */
    ROLE_SIZE,
    ROLE_BATCH,
    ROLE_HEADS,
    ROLE_HEAD_SIZE,
};

struct dim {
    const char *name;
    enum role role;
    int64_t value, scaled;
};

struct shape {
    struct dim dims[KA_SHAPES_MAX_DIMS];
    size_t count;
};

#define SMALL 16 /* sizes up to this one are kept: taps, groups, strides */

static bool is_one_of(const char *name, const char *const *names, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        if (strcasecmp(name, names[i]) == 0)
            return true;
    }
    return false;
}

static enum role role_of(const char *name, int64_t value, bool image)
{
    static const char *const batch[] = {"b", "z", "bs", "bsz", "batch", "batch_size", "batches", "n_batch"};
    static const char *const heads[] = {
        "h",        "nh",      "hq",         "hk",           "hv",     "hkv",
        "kvh",      "heads",   "n_heads",    "num_heads",    "nheads", "n_head",
        "kv_heads", "q_heads", "n_kv_heads", "num_kv_heads", "h_kv",   "h_q"};
    static const char *const head_size[] = {"d",        "dk",      "dv",     "dh",      "hd",
                                            "head_dim", "headdim", "d_head", "dim_head"};
    if (value <= 0 || strcasestr(name, "seed"))
        return ROLE_FIXED;
    if (value <= 256 && is_one_of(name, batch, KA_COUNT(batch)))
        return ROLE_BATCH;
    if (value <= 256 && is_one_of(name, heads, KA_COUNT(heads)) && !(image && strcasecmp(name, "h") == 0))
        return ROLE_HEADS;
    if (is_one_of(name, head_size, KA_COUNT(head_size)))
        return ROLE_HEAD_SIZE;
    return ROLE_SIZE;
}

static int read_shape(const json_t *dims, struct shape *shape)
{
    if (!json_is_object(dims))
        return -EINVAL;
    if (json_object_size(dims) > KA_SHAPES_MAX_DIMS)
        return -EFBIG;
    /* a height beside a width is not a number of heads */
    bool image = json_object_get(dims, "W") || json_object_get(dims, "w") || json_object_get(dims, "width");
    shape->count = 0;
    KA_EACH_MEMBER(dims, name, value) {
        if (!json_is_integer(value))
            continue;
        struct dim *dim = &shape->dims[shape->count++];
        dim->name = name;
        dim->value = dim->scaled = json_integer_value(value);
        dim->role = role_of(name, dim->value, image);
    }
    return 0;
}

/* Product of the sizes, UINT64_MAX when it is larger than that. */
static uint64_t elements(const struct shape *shape)
{
    uint64_t product = 1;
    for (size_t i = 0; i < shape->count; i++) {
        if (shape->dims[i].role != ROLE_FIXED &&
            __builtin_mul_overflow(product, (uint64_t)shape->dims[i].scaled, &product))
            return UINT64_MAX;
    }
    return product;
}

/* A copy of `dims` with the scaled sizes; a new reference. */
static json_t *write_shape(const json_t *dims, const struct shape *shape)
{
    json_t *copy = json_deep_copy(dims);
    for (size_t i = 0; copy && i < shape->count; i++) {
        if (json_object_set_new(copy, shape->dims[i].name, json_integer(shape->dims[i].scaled))) {
            json_decref(copy);
            copy = NULL;
        }
    }
    return copy;
}

/* Scaling */

struct step {
    int64_t cap, batch, small;
};
static const struct step ladder[] = {{INT64_MAX, INT64_MAX, SMALL},
                                     {128, 2, SMALL},
                                     {64, 2, SMALL},
                                     {32, 2, SMALL},
                                     {32, 1, SMALL},
                                     {16, 1, SMALL}};
/* Only for shapes of so many dimensions that nothing above fits. */
static const struct step last_resort[] = {{8, 1, 8}, {4, 1, 4}, {2, 1, 2}, {1, 1, 1}};

/* `value` brought down to about `cap`, which is a power of two. */
static int64_t shrink(int64_t value, int64_t cap)
{
    if (value <= cap)
        return value;
    if (value % 16 == 0 || cap < 16) {
        int64_t odd = value;
        while (odd % 2 == 0)
            odd /= 2;
        int64_t best = cap; /* a power of two, hence a multiple of 16 when it is at least 16 */
        for (int64_t size = odd; size <= cap; size *= 2)
            best = size % 16 == 0 || cap < 16 ? size : best;
        return best;
    }
    int64_t rest = value % 16;
    if (cap >= 32)
        return cap - 16 + rest;
    return rest > 2 ? rest : 16 + rest;
}

/* Heads become few, but the larger numbers stay multiples of the smallest (grouped-query attention). */
static void scale_heads(struct shape *shape, int64_t batch)
{
    int64_t least = INT64_MAX;
    for (size_t i = 0; i < shape->count; i++) {
        if (shape->dims[i].role == ROLE_HEADS && shape->dims[i].value < least)
            least = shape->dims[i].value;
    }
    for (size_t i = 0; i < shape->count; i++) {
        struct dim *dim = &shape->dims[i];
        if (dim->role != ROLE_HEADS || batch == INT64_MAX)
            continue;
        int64_t base = least < batch ? least : batch;
        bool grouped = dim->value > least && dim->value % least == 0;
        dim->scaled = grouped ? 2 * base : base;
        if (dim->scaled > dim->value)
            dim->scaled = dim->value;
    }
}

/* What was at least twice as large stays larger. */
static void keep_order(struct shape *shape)
{
    for (size_t round = 0; round < shape->count; round++) {
        for (size_t i = 0; i < shape->count; i++) {
            for (size_t j = 0; j < shape->count; j++) {
                struct dim *a = &shape->dims[i], *b = &shape->dims[j];
                if (a->role != ROLE_SIZE || b->role != ROLE_SIZE || a->value / 2 < b->value ||
                    a->scaled > b->scaled || b->scaled == b->value || b->scaled <= SMALL)
                    continue;
                int64_t cap = 16;
                while (cap * 2 < a->scaled)
                    cap *= 2;
                int64_t smaller = shrink(b->value, cap);
                b->scaled = smaller < b->scaled ? smaller : b->scaled;
            }
        }
    }
}

/* What was a multiple of another size stays one, with the same raggedness if it can be. */
static void keep_multiples(struct shape *shape)
{
    for (size_t i = 0; i < shape->count; i++) {
        for (size_t j = 0; j < shape->count; j++) {
            struct dim *a = &shape->dims[i];
            const struct dim *b = &shape->dims[j];
            if (a->role != ROLE_SIZE || b->role == ROLE_FIXED || a->scaled == a->value || b->scaled < 2 ||
                a->value % b->value || a->scaled % b->scaled == 0 || a->scaled < b->scaled)
                continue;
            int64_t down = a->scaled - a->scaled % b->scaled, same = down;
            while (same > 0 && (same % 16 == 0) != (a->value % 16 == 0))
                same -= b->scaled;
            a->scaled = same > 0 ? same : down;
        }
    }
}

static void scale(struct shape *shape, const struct step *step)
{
    for (size_t i = 0; i < shape->count; i++) {
        struct dim *dim = &shape->dims[i];
        dim->scaled = dim->value;
        if (dim->role == ROLE_BATCH)
            dim->scaled = dim->value < step->batch ? dim->value : step->batch;
        else if (dim->role == ROLE_HEAD_SIZE && dim->value <= 64 && step->cap >= 16)
            continue;
        else if (dim->role != ROLE_FIXED && dim->value > step->small)
            dim->scaled = shrink(dim->value, step->cap);
    }
    scale_heads(shape, step->batch);
    if (step->cap == INT64_MAX || step->cap < 16)
        return;
    keep_order(shape);
    keep_multiples(shape);
}

/* Walk the levels; stop at `level` with the shape in place and return true, or count them all. */
static bool walk_levels(struct shape *shape, uint64_t budget, size_t level, size_t *levels)
{
    uint64_t before = UINT64_MAX;
    size_t found = 0;
    for (size_t i = 0; i < KA_COUNT(ladder) + KA_COUNT(last_resort); i++) {
        bool desperate = i >= KA_COUNT(ladder);
        if (desperate && found)
            break;
        scale(shape, desperate ? &last_resort[i - KA_COUNT(ladder)] : &ladder[i]);
        uint64_t size = elements(shape);
        if (size > budget || (found && size >= before))
            continue;
        before = size;
        if (found++ == level)
            return true;
    }
    *levels = found;
    return false;
}

int ka_shapes_scale(const json_t *dims, uint64_t budget, size_t level, json_t **out)
{
    struct shape shape;
    size_t levels;
    int rc = read_shape(dims, &shape);
    if (rc)
        return rc;
    if (!walk_levels(&shape, budget, level, &levels))
        return -ERANGE;
    json_t *scaled = write_shape(dims, &shape);
    if (!scaled)
        return -ENOMEM;
    *out = scaled;
    return 0;
}

size_t ka_shapes_levels(const json_t *dims, uint64_t budget)
{
    struct shape shape;
    size_t levels = 0;
    if (read_shape(dims, &shape) == 0)
        walk_levels(&shape, budget, SIZE_MAX, &levels);
    return levels;
}

/* Hidden shapes */

enum variation {
    VARY_ONE,
    VARY_PRIME,
    VARY_LESS,
    VARY_MORE,
    VARY_BLOCK_LESS,
    VARY_BLOCK_MORE,
    VARY_ODD_BATCH,
    VARY_SEVERAL,
    VARY_PAST_BLOCK, /* takes no turns: see add_past_blocks() */
    VARY_COUNT,
};
static const char *const variation_names[VARY_COUNT] = {"one",       "prime",          "one_less",
                                                        "one_more",  "block_less_one", "block_plus_one",
                                                        "odd_batch", "several",        "past_block"};

static size_t draw_below(uint64_t *state, size_t bound)
{
    return (size_t)(ka_random_next(state) % bound);
}

static int64_t draw_prime(uint64_t *state, int64_t value)
{
    static const int primes[] = {2,  3,  5,  7,  11, 13, 17, 19, 23, 29,  31,  37,  41,  43,  47, 53,
                                 59, 61, 67, 71, 73, 79, 83, 89, 97, 101, 103, 107, 109, 113, 127};
    int64_t most = value > 23 ? value : 23;
    size_t usable = 0;
    while (usable < KA_COUNT(primes) && primes[usable] <= most)
        usable++;
    return primes[draw_below(state, usable)];
}

/* The block that a kernel for this size would take; INT64_MAX / 2 at most. */
static int64_t next_power_of_two(int64_t value)
{
    int64_t block = 1;
    while (block < value && block < INT64_MAX / 4)
        block *= 2;
    return block;
}

/* Another value for one size; the same value where the variation does not apply. */
static int64_t vary(const struct dim *dim, enum variation kind, uint64_t *state)
{
    static const int64_t blocks[] = {16, 32, 64};
    int64_t block = blocks[draw_below(state, dim->value > 32 ? 3 : dim->value > 16 ? 2 : 1)];
    switch (kind) {
    case VARY_ONE:
        return 1;
    case VARY_PRIME:
        return draw_prime(state, dim->value);
    case VARY_LESS:
        return dim->value > 1 ? dim->value - 1 : 1;
    case VARY_MORE:
        return dim->value + 1;
    case VARY_BLOCK_LESS:
        return block - 1;
    case VARY_BLOCK_MORE:
        return block + 1;
    case VARY_ODD_BATCH:
        return dim->role == ROLE_BATCH || dim->role == ROLE_HEADS ? 3 + 2 * (int64_t)draw_below(state, 2)
                                                                  : dim->value;
    case VARY_PAST_BLOCK:
        return next_power_of_two(dim->value) + 1;
    case VARY_SEVERAL:
    case VARY_COUNT:
        break;
    }
    return dim->value;
}

static void vary_shape(struct shape *shape, enum variation kind, uint64_t *state)
{
    for (size_t i = 0; i < shape->count; i++)
        shape->dims[i].scaled = shape->dims[i].value;
    size_t changes = kind == VARY_SEVERAL ? 2 + draw_below(state, shape->count) : 1;
    for (size_t n = 0; n < changes; n++) {
        struct dim *dim = &shape->dims[draw_below(state, shape->count)];
        enum variation how = kind == VARY_SEVERAL ? (enum variation)draw_below(state, VARY_SEVERAL) : kind;
        if (dim->role != ROLE_FIXED && dim->value < INT64_MAX)
            dim->scaled = vary(dim, how, state);
    }
}

static bool is_known(const json_t *dims, const json_t *sweep, const json_t *hidden, const json_t *shape)
{
    if (json_equal(dims, shape))
        return true;
    KA_EACH(sweep, i, other) {
        if (json_equal(other, shape))
            return true;
    }
    KA_EACH(hidden, i, other) {
        if (json_equal(json_object_get(other, "dims"), shape))
            return true;
    }
    return false;
}

/* Adds the shape as it is varied now, unless it is too large or known. False without memory. */
static bool add_hidden(const struct shape *shape, const json_t *dims, const json_t *sweep,
                       enum variation kind, uint64_t limit, json_t *hidden)
{
    if (elements(shape) > limit)
        return true;
    json_t *varied = write_shape(dims, shape);
    if (varied && is_known(dims, sweep, hidden, varied)) {
        json_decref(varied);
        return true;
    }
    return json_array_append_new(hidden,
                                 json_pack("{s:o,s:s}", "dims", varied, "kind", variation_names[kind])) == 0;
}

/* A third of the shapes has one size just beyond the block that covers the given one: a block of a fixed size
 * passes all others. Every size gets its turn before one gets a second. */
static bool add_past_blocks(struct shape *shape, const json_t *dims, const json_t *sweep, uint64_t *state,
                            size_t count, uint64_t limit, json_t *hidden)
{
    size_t first = shape->count ? draw_below(state, shape->count) : 0;
    bool ok = true;
    for (size_t n = 0; n < shape->count && json_array_size(hidden) < (count + 2) / 3 && ok; n++) {
        struct dim *dim = &shape->dims[(first + n) % shape->count];
        for (size_t i = 0; i < shape->count; i++)
            shape->dims[i].scaled = shape->dims[i].value;
        if (dim->role == ROLE_FIXED || dim->role == ROLE_BATCH || dim->role == ROLE_HEADS ||
            dim->value >= INT64_MAX / 4)
            continue;
        dim->scaled = vary(dim, VARY_PAST_BLOCK, state);
        ok = add_hidden(shape, dims, sweep, VARY_PAST_BLOCK, limit, hidden);
    }
    return ok;
}

int ka_shapes_hidden(const json_t *dims, const json_t *sweep, uint64_t seed, size_t count, uint64_t budget,
                     json_t **out)
{
    struct shape shape;
    int rc = read_shape(dims, &shape);
    if (rc)
        return rc;
    if (count > KA_SHAPES_MAX_HIDDEN)
        return -EFBIG;
    uint64_t own = elements(&shape), state = seed, limit = own > UINT64_MAX / 2 ? own : 2 * own;
    limit = limit > budget ? limit : budget;
    json_t *hidden = json_array();
    size_t first_kind = draw_below(&state, VARY_PAST_BLOCK), tries = 64 * (count + VARY_COUNT);
    bool ok = hidden && add_past_blocks(&shape, dims, sweep, &state, count, limit, hidden);
    /* kinds take turns, so that few shapes are still of many kinds */
    for (size_t turn = 0; ok && shape.count && turn < tries && json_array_size(hidden) < count; turn++) {
        enum variation kind = (enum variation)((first_kind + turn) % VARY_PAST_BLOCK);
        vary_shape(&shape, kind, &state);
        ok = add_hidden(&shape, dims, sweep, kind, limit, hidden);
    }
    if (!ok) {
        json_decref(hidden);
        return -ENOMEM;
    }
    *out = hidden;
    return 0;
}

/* Covering shapes */

#define ALONE 16 /* blocks of what has one dimension are so much larger */
/* Taps of a filter, say, beside far larger sizes: a loop over them is often unrolled, and minutes in a
 * compiler with a hundred. */
#define FEW 8
#define FAR_LARGER 8 /* times */
#define FEW_MULTIPLE 16

static bool is_few(const struct shape *shape, size_t at)
{
    int64_t value = shape->dims[at].value, largest = 0;
    for (size_t i = 0; i < shape->count; i++)
        largest = shape->dims[i].value > largest ? shape->dims[i].value : largest;
    return value <= FEW && largest >= FAR_LARGER * value;
}

/* The shape with the sizes of `wants` (stolen), unless it is too large, or is the given one. */
static void add_covering(const struct shape *shape, const json_t *dims, const char *kind, uint64_t limit,
                         json_t *wants, json_t *list)
{
    struct shape made = *shape;
    for (size_t i = 0; i < made.count; i++) {
        const json_t *size = json_object_get(wants, made.dims[i].name);
        made.dims[i].scaled = size ? json_integer_value(size) : made.dims[i].value;
    }
    json_auto_t *varied = elements(&made) <= limit ? write_shape(dims, &made) : NULL;
    if (varied && !json_equal(varied, dims))
        json_array_append_new(list,
                              json_pack("{s:O, s:s, s:O}", "dims", varied, "kind", kind, "wants", wants));
    json_decref(wants);
}

#define HALVINGS 4

/* Sizes one short of multiples: what a mask leaves of a block is nearly all of it. Of smaller multiples where
 * all together are too large. */
static json_t *short_of(const struct shape *shape, const int64_t *multiples, uint64_t limit)
{
    json_t *sizes = NULL;
    for (int halved = 0; halved < HALVINGS; halved++) {
        struct shape made = *shape;
        json_decref(sizes);
        sizes = json_object();
        for (size_t i = 0; i < made.count; i++) {
            struct dim *dim = &made.dims[i];
            int64_t multiple = multiples[i] >> halved;
            dim->scaled = dim->value;
            if (!multiples[i])
                continue;
            dim->scaled = (multiple > SMALL ? multiple : SMALL) - 1;
            json_object_set_new(sizes, dim->name, json_integer(dim->scaled));
        }
        if (elements(&made) <= limit)
            break;
    }
    return sizes;
}

int ka_shapes_cover(const json_t *dims, int64_t tile, uint64_t budget, json_t **out)
{
    struct shape shape;
    int rc = read_shape(dims, &shape);
    if (rc)
        return rc;
    uint64_t own = elements(&shape), limit = own > UINT64_MAX / 2 ? own : 2 * own;
    limit = limit > budget ? limit : budget;
    json_t *list = json_array(), *twos = json_object();
    int64_t multiples[KA_SHAPES_MAX_DIMS] = {0};
    bool emptied = false;
    for (size_t i = 0; i < shape.count; i++) {
        const struct dim *dim = &shape.dims[i];
        if (dim->role == ROLE_FIXED)
            continue;
        json_object_set_new(twos, dim->name, json_integer(2));
        add_covering(&shape, dims, "one", limit, json_pack("{s:i}", dim->name, 1), list);
        if (!emptied) /* rows or a batch: what comes first; of no features nobody asks */
            add_covering(&shape, dims, "zero", limit, json_pack("{s:i}", dim->name, 0), list);
        emptied = true;
        if (dim->role != ROLE_SIZE && dim->role != ROLE_HEAD_SIZE)
            continue;
        int64_t multiple = shape.count == 1 ? ALONE * tile : is_few(&shape, i) ? FEW_MULTIPLE : tile;
        while (multiple > SMALL && own / (uint64_t)dim->value * (uint64_t)multiple > limit)
            multiple /= 2;
        multiples[i] = is_few(&shape, i) ? 0 : multiple;
        add_covering(&shape, dims, "multiple", limit, json_pack("{s:I}", dim->name, (json_int_t)multiple),
                     list);
    }
    add_covering(&shape, dims, "short", limit, short_of(&shape, multiples, limit), list);
    add_covering(&shape, dims, "two", limit, twos, list);
    *out = list;
    return 0;
}

static bool has_size(const json_t *shapes, const char *name, const json_t *size)
{
    KA_EACH(shapes, i, entry) {
        if (json_equal(json_object_get(json_object_get(entry, "dims"), name), size))
            return true;
    }
    return false;
}

json_t *ka_shapes_singles(const json_t *dims, const char *kind, const json_t *wants, const json_t *shapes)
{
    json_t *list = json_array();
    KA_EACH_MEMBER(wants, name, size) {
        if (has_size(shapes, name, size))
            continue;
        json_t *made = json_deep_copy(dims);
        json_object_set(made, name, size);
        json_array_append_new(
            list, json_pack("{s:o, s:s, s:{s:O}}", "dims", made, "kind", kind, "wants", name, size));
    }
    return list;
}

/* Between */

#define LEAST_GAP 32 /* below, every size is nearly its neighbour */
#define SIZES_MAX 256

static int by_size(const void *a, const void *b)
{
    int64_t left = *(const int64_t *)a, right = *(const int64_t *)b;
    return (left > right) - (left < right);
}

/* The sizes of a dimension in `shapes`, sorted; returns how many. */
static size_t sizes_of(const char *name, const json_t *shapes, int64_t sizes[SIZES_MAX])
{
    size_t count = 0;
    KA_EACH(shapes, i, entry) {
        json_int_t size = json_integer_value(json_object_get(json_object_get(entry, "dims"), name));
        if (size > 0 && count < SIZES_MAX)
            sizes[count++] = size;
    }
    qsort(sizes, count, sizeof(*sizes), by_size);
    return count;
}

static double largest_size(const struct shape *shape)
{
    int64_t found = 1;
    for (size_t i = 0; i < shape->count; i++)
        found = shape->dims[i].scaled > found ? shape->dims[i].scaled : found;
    return (double)found;
}

static bool fits(const struct shape *shape, struct ka_shapes_limits limits)
{
    uint64_t all = elements(shape);
    return all <= limits.budget && (double)all * largest_size(shape) <= limits.square;
}

bool ka_shapes_fit(const json_t *dims, struct ka_shapes_limits limits)
{
    struct shape shape;
    return read_shape(dims, &shape) == 0 && fits(&shape, limits);
}

/* The largest size of a dimension, from `low` on, with which the shape fits; `low` where none does. */
static int64_t most_of(struct shape *shape, size_t at, int64_t low, int64_t high,
                       struct ka_shapes_limits limits)
{
    int64_t kept = shape->dims[at].scaled;
    high = high < limits.most ? high : limits.most;
    while (low < high) {
        int64_t middle = high - (high - low) / 2;
        shape->dims[at].scaled = middle;
        if (fits(shape, limits))
            low = middle;
        else
            high = middle - 1;
    }
    shape->dims[at].scaled = kept;
    return low;
}

/* Sizes in gaps of a factor of two and more: one for each such factor. Returns how many are in `drawn`. */
static size_t draw_between(struct shape *shape, size_t at, const json_t *shapes,
                           struct ka_shapes_limits limits, uint64_t *state, int64_t drawn[KA_SHAPES_BETWEEN])
{
    const struct dim *dim = &shape->dims[at];
    int64_t sizes[SIZES_MAX];
    size_t known = sizes_of(dim->name, shapes, sizes), count = 0;
    for (size_t i = 1; i < known; i++) {
        int64_t low = sizes[i - 1] > LEAST_GAP ? sizes[i - 1] : LEAST_GAP;
        for (int64_t high; sizes[i] / 2 >= low && count < KA_SHAPES_BETWEEN; low = high) {
            high = sizes[i] / 4 < low ? sizes[i] : 2 * low;
            int64_t first = low + 1 + ((dim->value - low - 1) % 16 + 16) % 16; /* as ragged as `dim` */
            int64_t last = most_of(shape, at, low, high - 1, limits);
            if (first <= last)
                drawn[count++] = first + 16 * (int64_t)draw_below(state, (size_t)((last - first) / 16 + 1));
        }
    }
    return count;
}

static void reset(struct shape *shape)
{
    for (size_t i = 0; i < shape->count; i++)
        shape->dims[i].scaled = shape->dims[i].value;
}

/* The shape as it is now, if it is new and fits, and then with its own sizes again. Whether it was added. */
static bool add_between(struct shape *shape, const json_t *dims, struct ka_shapes_limits limits, json_t *list)
{
    json_auto_t *made = fits(shape, limits) ? write_shape(dims, shape) : NULL;
    bool added = made && !json_equal(made, dims);
    if (added)
        json_array_append_new(list, json_pack("{s:O, s:s}", "dims", made, "kind", "between"));
    reset(shape);
    return added;
}

int ka_shapes_between(const json_t *dims, const json_t *shapes, struct ka_shapes_limits limits, uint64_t seed,
                      json_t **out)
{
    struct shape shape;
    int rc = read_shape(dims, &shape);
    if (rc)
        return rc;
    int64_t drawn[KA_SHAPES_MAX_DIMS][KA_SHAPES_BETWEEN];
    size_t counts[KA_SHAPES_MAX_DIMS] = {0}, all = 0;
    reset(&shape);
    for (size_t i = 0; i < shape.count; i++) {
        if (shape.dims[i].role == ROLE_SIZE)
            counts[i] = draw_between(&shape, i, shapes, limits, &seed, drawn[i]);
        all += counts[i];
    }
    json_t *list = json_array();
    bool shared = all > KA_SHAPES_BETWEEN;
    for (size_t turn = 0; turn < KA_SHAPES_BETWEEN; turn++) {
        for (size_t i = 0; i < shape.count && shared; i++)
            shape.dims[i].scaled = turn < counts[i] ? drawn[i][turn] : shape.dims[i].value;
        if (shared && add_between(&shape, dims, limits, list))
            continue;
        for (size_t i = 0; i < shape.count; i++) {
            if (turn < counts[i]) {
                shape.dims[i].scaled = drawn[i][turn];
                add_between(&shape, dims, limits, list);
            }
        }
    }
    *out = list;
    return 0;
}

/* Long shapes */

static int64_t long_value(int64_t value)
{
    if (value <= KA_SHAPES_LONG + 16)
        return value;
    return KA_SHAPES_LONG + (value % 16 ? value % 16 : 16);
}

/* The shape with one size replaced (new reference), NULL where that is too large. */
static json_t *with_size(struct shape *shape, const json_t *dims, size_t at, int64_t size, uint64_t budget)
{
    int64_t kept = shape->dims[at].scaled;
    shape->dims[at].scaled = size;
    json_t *made = elements(shape) <= budget ? write_shape(dims, shape) : NULL;
    shape->dims[at].scaled = kept;
    return made;
}

int ka_shapes_long(const json_t *dims, uint64_t budget, json_t **out)
{
    struct shape shape;
    int rc = read_shape(dims, &shape);
    if (rc)
        return rc;
    json_t *list = json_array();
    size_t levels = ka_shapes_levels(dims, KA_SHAPES_BUDGET);
    struct shape first = shape;
    if (levels && walk_levels(&first, KA_SHAPES_BUDGET, 0, &levels) &&
        walk_levels(&shape, KA_SHAPES_BUDGET, levels - 1, &levels)) {
        for (size_t i = 0; i < shape.count; i++) {
            const struct dim *dim = &shape.dims[i];
            if (dim->role != ROLE_SIZE && dim->role != ROLE_BATCH)
                continue;
            json_t *probe = with_size(&shape, dims, i, 2 * dim->scaled, budget), *longer = NULL;
            if (dim->role == ROLE_SIZE &&
                dim->value >= 2 * first.dims[i].scaled) /* else about as large in what is checked anyway */
                longer = with_size(&shape, dims, i, long_value(dim->value), budget);
            if (probe && !json_array_size(list))
                json_array_append_new(list, json_pack("{s:o}", "dims", write_shape(dims, &shape)));
            if (probe)
                json_array_append_new(
                    list, json_pack("{s:O, s:s, s:O*}", "dims", probe, "dim", dim->name, "long", longer));
            json_decref(longer);
            json_decref(probe);
        }
    }
    *out = list;
    return 0;
}
