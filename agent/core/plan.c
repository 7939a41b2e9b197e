/* Cases of a check. Pure; see plan.h. */
#include "plan.h"

#include <string.h>

#include "base/each.h"
#include "fields.h"
#include "kinds.h"

#define ROOM_COSTS 16 /* times the smallest shape: what one without sizes of 1 may be */

/* One secret gives all the seeds of an attempt. */
static json_t *next_seed(uint64_t *state)
{
    return json_integer((json_int_t)(ka_random_next(state) >> 33)); /* fits every generator's seed */
}

double ka_plan_size(const json_t *dims)
{
    double size = 1;
    KA_EACH_MEMBER(dims, name, value) {
        if (json_is_integer(value) && json_integer_value(value) > 0)
            size *= (double)json_integer_value(value);
    }
    return size;
}

static double bytes_of(const json_t *plan, const json_t *shapes)
{
    KA_EACH(shapes, i, shape) {
        if (json_equal(json_object_get(shape, "dims"), json_object_get(plan, "dims")))
            return json_number_value(json_object_get(shape, "bytes"));
    }
    return 0;
}

size_t ka_plan_fit(const json_t *cases, const size_t *order, size_t from, size_t upto, const json_t *shapes,
                   double room)
{
    double bytes = 0;
    size_t at = from;
    for (; at < upto; at++) {
        bytes += bytes_of(json_array_get(cases, order[at]), shapes);
        if (at > from && bytes > room)
            break;
    }
    return at - from;
}

struct builder {
    json_t *cases;
    uint64_t random;
    bool check; /* for a candidate: every case asks what is asked in each */
    bool half;
    size_t subsets; /* cases of these so far */
};

static json_t *value_of(struct builder *builder, const struct ka_kind *kind, size_t n)
{
    const double *scales = builder->half ? kind->scales_half : kind->scales;
    return scales[0] != 0 ? json_pack("[f, f]", scales[0], scales[1])
                          : kind->value(n, ka_random_next(&builder->random));
}

static void ask(struct builder *builder, json_t *item, enum ka_kind_when when, size_t n)
{
    const struct ka_kind *kind;
    for (size_t i = 0; (kind = ka_kind_at(i)); i++)
        if (kind->when == when)
            json_object_set_new(item, kind->name, value_of(builder, kind, n));
}

static json_t *add_case(struct builder *builder, const json_t *shape, const char *upstream)
{
    json_t *item = json_object();
    json_object_set_new(item, "id", json_integer((json_int_t)json_array_size(builder->cases)));
    json_object_set(item, "dims", json_object_get(shape, "dims"));
    json_object_set(item, "class", json_object_get(shape, "class"));
    json_object_set(item, "kind", json_object_get(shape, "kind"));
    json_object_set_new(item, "seed", next_seed(&builder->random));
    json_t *up = json_object();
    json_object_set_new(up, "kind", json_string(upstream));
    json_object_set_new(up, "seed", next_seed(&builder->random));
    json_object_set_new(item, "upstream", up);
    if (builder->check)
        ask(builder, item, KA_KIND_EVERY, json_array_size(builder->cases));
    json_array_append_new(builder->cases, item);
    return item;
}

bool ka_plan_is(const json_t *shape, const char *class)
{
    return ka_is_text(shape, "class", class);
}

static size_t gradients_of(const json_t *shape)
{
    return json_array_size(json_object_get(shape, "grads"));
}

/* More gradients first: an optional input that is None on a shape leaves nothing of its own to test there. */
static bool is_better(const json_t *shape, const json_t *than)
{
    if (!than || gradients_of(shape) != gradients_of(than))
        return !than || gradients_of(shape) > gradients_of(than);
    return ka_plan_size(json_object_get(shape, "dims")) < ka_plan_size(json_object_get(than, "dims"));
}

json_t *ka_plan_smallest(const json_t *shapes)
{
    json_t *smallest = NULL;
    KA_EACH(shapes, i, shape) {
        if (ka_plan_is(shape, "required") && is_better(shape, smallest))
            smallest = shape;
    }
    return smallest;
}

static size_t ones_of(const json_t *shape)
{
    size_t ones = 0;
    KA_EACH_MEMBER(json_object_get(shape, "dims"), name, value)
        ones += json_integer_value(value) == 1;
    return ones;
}

double ka_plan_seconds(const json_t *shapes)
{
    double all = 0;
    KA_EACH(shapes, i, shape)
        all += json_number_value(json_object_get(shape, "processor_seconds"));
    return json_array_size(shapes) ? all / (double)json_array_size(shapes) : 0;
}

json_t *ka_plan_roomy(const json_t *shapes)
{
    json_t *smallest = ka_plan_smallest(shapes), *found = smallest;
    double most = ROOM_COSTS * ka_plan_size(json_object_get(smallest, "dims"));
    KA_EACH(shapes, i, shape) {
        double size = ka_plan_size(json_object_get(shape, "dims"));
        if (ka_plan_is(shape, "required") && gradients_of(shape) == gradients_of(smallest) && size <= most &&
            (ones_of(shape) < ones_of(found) ||
             (ones_of(shape) == ones_of(found) && size < ka_plan_size(json_object_get(found, "dims")))))
            found = shape;
    }
    json_t *variants = ka_plan_variants(shapes);
    return variants == smallest ? found : variants;
}

json_t *ka_plan_variants(const json_t *shapes)
{
    KA_EACH(shapes, i, shape) {
        if (json_is_true(json_object_get(shape, "stand_in")))
            return shape;
    }
    return ka_plan_smallest(shapes);
}

json_t *ka_plan_cheapest(const json_t *shapes)
{
    json_t *found = NULL;
    KA_EACH(shapes, i, shape) {
        if (ka_plan_is(shape, "required") && (!found || ka_plan_size(json_object_get(shape, "dims")) <
                                                            ka_plan_size(json_object_get(found, "dims"))))
            found = shape;
    }
    return found;
}

static bool is_varied(const json_t *item)
{
    return json_object_get(item, "layouts") || json_object_get(item, "values") ||
           json_object_get(item, "scalar");
}

static bool is_plain(const json_t *item, const json_t *shape)
{
    const struct ka_kind *upstream = ka_kind_of_upstream(item);
    return upstream && upstream->when == KA_KIND_ALWAYS && !json_object_get(item, "needs") &&
           !is_varied(item) && json_equal(json_object_get(item, "dims"), json_object_get(shape, "dims"));
}

/* The plain cases there in turn; there is one at least. */
static json_t *plain_in_turn(const struct builder *builder, const json_t *shape)
{
    json_auto_t *plain = json_array(); /* the cases are the builder's too */
    KA_EACH(builder->cases, i, item) {
        if (is_plain(item, shape))
            json_array_append(plain, item);
    }
    size_t count = json_array_size(plain);
    return count ? json_array_get(plain, builder->subsets % count) : NULL;
}

/* A case that wants the gradients whose bits are set in `wanted`. What is right does not hang on that, so
 * the oracle's answer to another case is the answer to this one. */
static void add_needs(struct builder *builder, const json_t *shape, const json_t *grads, uint64_t wanted)
{
    json_t *needs = json_array(), *like = plain_in_turn(builder, shape);
    KA_EACH(grads, i, name) {
        if (i < 64 && wanted >> i & 1)
            json_array_append(needs, name);
    }
    json_t *item = add_case(builder, shape, "normal");
    json_object_set_new(item, "needs", needs);
    json_object_set(item, "like", like);
    builder->subsets++;
}

#define SUBSETS_OF 16 /* gradients; of more only the first, and none beyond the 64th */

/* Each alone, each two, each left out. */
static void add_subsets(struct builder *builder, const json_t *shape, const json_t *grads)
{
    size_t all = json_array_size(grads), count = all < SUBSETS_OF ? all : SUBSETS_OF;
    for (size_t i = 0; i < count && count > 1; i++)
        add_needs(builder, shape, grads, (uint64_t)1 << i);
    for (size_t i = 0; i < count && count > 2; i++)
        add_needs(builder, shape, grads, ~((uint64_t)1 << i));
    for (size_t i = 0; i < count && count > 3; i++)
        for (size_t k = i + 1; k < count && builder->subsets < KA_PLAN_MAX_SUBSETS; k++)
            add_needs(builder, shape, grads, (uint64_t)1 << i | (uint64_t)1 << k);
}

/* The upstream of the new case. */
static json_t *add_variant(struct builder *builder, const json_t *shape, const struct ka_kind *kind)
{
    return json_object_get(add_case(builder, shape, kind->name), "upstream");
}

/* A case for each output: its number is what the seed leaves over, and told with the case. */
static void add_for_outputs(struct builder *builder, const json_t *shape, const struct ka_kind *kind,
                            int outputs)
{
    int least = kind->when == KA_KIND_EACH_OF_MANY ? 3 : 2;
    for (int i = 0; i < outputs && outputs >= least; i++) {
        json_t *upstream = add_variant(builder, shape, kind);
        json_int_t seed = json_integer_value(json_object_get(upstream, "seed"));
        json_object_set_new(upstream, "seed", json_integer(seed - seed % outputs + i));
        json_object_set_new(upstream, "output", json_integer(i));
    }
}

static void add_variants(struct builder *builder, const json_t *shape, const json_t *grads, int outputs)
{
    const json_t *own = json_object_get(shape, "grads");
    const struct ka_kind *kind;
    for (size_t i = 0; (kind = ka_kind_at(i)); i++) {
        if (kind->when == KA_KIND_ONCE)
            add_variant(builder, shape, kind);
        else if (kind->when == KA_KIND_EACH_OUTPUT || kind->when == KA_KIND_EACH_OF_MANY)
            add_for_outputs(builder, shape, kind, outputs);
        else if (kind->when == KA_KIND_SUBSETS)
            add_subsets(builder, shape, own ? own : grads);
    }
}

/* What has to do with an earlier case is asked in the second plain one there: both are known by then. */
static void ask_later(struct builder *builder, const json_t *shape)
{
    json_t *first = NULL, *second = NULL, *least = NULL;
    const struct ka_kind *kind;
    KA_EACH(builder->cases, i, item) {
        if (!least ||
            ka_plan_size(json_object_get(item, "dims")) < ka_plan_size(json_object_get(least, "dims")))
            least = item;
        if (!is_plain(item, shape))
            continue;
        if (!first)
            first = item;
        else if (!second)
            second = item;
    }
    if (!second)
        second = add_case(builder, shape, "normal");
    for (size_t i = 0; (kind = ka_kind_at(i)); i++) {
        if (kind->when != KA_KIND_LATER)
            continue;
        if (kind->value)
            json_object_set_new(second, kind->name, kind->value(0, ka_random_next(&builder->random)));
        else
            json_object_set(second, kind->name, kind->other == KA_KIND_FIRST ? first : least);
    }
}

/* What memory holds that a candidate allocates: NaN in most cases, what fresh memory may hold as well in the
 * rest, so that code which looks whether it is judged meets both. Zeros go to one case alone, to the shape of
 * the variants: what nobody wrote may pass for right there, and kernels that do nothing leave it. It is a
 * plain one: whatever code does to a gradient where it finds them, an upstream of zeros would hide. */
static void draw_memory(struct builder *builder, const json_t *shape)
{
    static const char *const memories[] = {"zero", "large", "bits"};
    json_auto_t *there = json_array(), *plain = json_array(); /* the cases are the builder's too */
    KA_EACH(builder->cases, i, item) {
        uint64_t draw = ka_random_next(&builder->random) >> 61; /* of eight */
        if (json_object_get(item, "twice"))
            continue;
        if (draw == 1 || draw == 2)
            json_object_set_new(item, "memory", json_string(memories[draw]));
        if (json_equal(json_object_get(item, "dims"), json_object_get(shape, "dims")))
            json_array_append(is_plain(item, shape) ? plain : there, item);
    }
    uint64_t first = ka_random_next(&builder->random) >> 33;
    for (size_t i = 0; i < KA_COUNT(memories); i++) {
        const json_t *among = i == 0 ? plain : there;
        if (!json_array_size(among))
            continue;
        json_t *item = json_array_get(among, (first + i) % json_array_size(among));
        json_object_set_new(item, "memory", json_string(memories[i]));
        if (i == 0)
            json_object_del(item, "noop");
    }
}

json_t *ka_plan_check(const json_t *shapes, const json_t *grads, int outputs, bool half, uint64_t secret)
{
    struct builder builder = {.cases = json_array(), .random = secret, .check = true, .half = half};
    const json_t *smallest = ka_plan_smallest(shapes), *variants = ka_plan_variants(shapes);
    const json_t *again = variants == smallest ? smallest : ka_plan_cheapest(shapes);
    size_t required = 0;
    KA_EACH(shapes, i, shape)
        required += ka_plan_is(shape, "required");
    size_t more = required < KA_PLAN_MIN_SEEDS ? KA_PLAN_MIN_SEEDS - required : 1;
    KA_EACH(shapes, i, shape) {
        size_t times = shape == again ? 1 + more : 1;
        for (size_t n = 0; n < times; n++) {
            json_t *item = add_case(&builder, shape, "normal");
            if (shape == variants && n == 0)
                ask(&builder, item, KA_KIND_PLAIN, 0);
            if (n > 0)
                ask(&builder, item, KA_KIND_FURTHER, n - 1);
        }
    }
    if (variants) {
        add_variants(&builder, variants, grads, outputs);
        ask_later(&builder, variants);
        draw_memory(&builder, variants);
    }
    return builder.cases;
}

void ka_plan_varied(json_t *cases, const json_t *shape, const json_t *variations, uint64_t secret)
{
    struct builder builder = {.cases = cases, .random = secret, .check = true};
    KA_EACH(variations, i, variation) {
        if (shape && json_is_object(variation))
            json_object_update(add_case(&builder, shape, "normal"), variation);
    }
}

void ka_plan_scalars(json_t *cases, const json_t *shape, const json_t *scalars, uint64_t secret)
{
    struct builder builder = {.cases = cases, .random = secret, .check = true};
    KA_EACH(scalars, i, scalar) {
        json_t *values = json_object_get(scalar, "values");
        json_t *item = shape ? add_case(&builder, shape, "normal") : NULL;
        if (item)
            json_object_set_new(item, "scalar",
                                json_pack("{s:O, s:O}", "name", json_object_get(scalar, "name"), "way",
                                          json_object_get(scalar, "way")));
        if (item && values)
            json_object_set(item, "values", values);
    }
}

void ka_plan_compiled(json_t *cases)
{
    json_t *largest = NULL;
    KA_EACH(cases, i, item) {
        const char *kind = json_string_value(json_object_get(json_object_get(item, "upstream"), "kind"));
        json_object_del(item, "order"); /* a GPU has its own */
        if (!ka_plan_is(item, "required") || json_object_get(item, "needs") || is_varied(item) || !kind ||
            strcmp(kind, "normal") != 0)
            continue;
        if (!largest ||
            ka_plan_size(json_object_get(item, "dims")) > ka_plan_size(json_object_get(largest, "dims")))
            largest = item;
    }
    struct builder builder = {.cases = cases};
    if (largest)
        ask(&builder, largest, KA_KIND_COMPILED, 0);
}

json_t *ka_plan_preflight(const json_t *shapes, uint64_t secret)
{
    struct builder builder = {.cases = json_array(), .random = secret};
    KA_EACH(shapes, i, shape)
        add_case(&builder, shape, "normal");
    return builder.cases;
}

json_t *ka_plan_facts(const json_t *shapes, const char *entry, uint64_t secret)
{
    json_auto_t *required = json_array();
    KA_EACH(shapes, i, shape) {
        if (ka_plan_is(shape, "required"))
            json_array_append(required, shape);
    }
    json_auto_t *cases = ka_plan_preflight(required, secret);
    return json_pack("{s:o, s:b, s:s}", "cases", ka_plan_for_candidate(cases), "compile", 1, "entry", entry);
}

/* Takes over `variant`; NULL if it was tried. */
static json_t *unless_tried(const json_t *tried, json_t *variant)
{
    KA_EACH(tried, i, old) {
        if (json_equal(old, variant)) {
            json_decref(variant);
            return NULL;
        }
    }
    return variant;
}

/* A configuration on offer, and what the best one has beside it (new reference). */
static json_t *beside(const json_t *best, const json_t *offered)
{
    json_t *config = json_is_object(best) ? json_copy((json_t *)best) : json_object();
    json_object_update(config, (json_t *)offered);
    return config;
}

bool ka_plan_late(double seconds, int max_seconds, bool ahead)
{
    return max_seconds && seconds * (ahead ? 2 : 1) > max_seconds;
}

json_t *ka_plan_variant(const json_t *report, const json_t *tried, const json_t *best)
{
    if (json_array_size(tried) >= KA_PLAN_MAX_VARIANTS)
        return NULL;
    json_t *variant;
    KA_EACH(json_object_get(report, "alternatives"), i, item) {
        if (json_is_string(item) &&
            (variant = unless_tried(tried, json_pack("{s:O, s:n}", "schedule", item, "config"))))
            return variant;
    }
    json_t *schedule = json_object_get(best, "schedule");
    KA_EACH(json_object_get(report, "configs"), i, item) {
        if (json_is_object(item) && json_is_string(schedule) &&
            (variant = unless_tried(tried, json_pack("{s:O, s:o}", "schedule", schedule, "config",
                                                     beside(json_object_get(best, "config"), item)))))
            return variant;
    }
    return NULL;
}

static void tell(json_t *to, const json_t *item, const char *member)
{
    if (json_object_get(item, member))
        json_object_set(to, member, json_object_get(item, member));
}

/* What a child draws a case from (new reference). */
static json_t *to_draw(const json_t *item)
{
    static const char *const members[] = {"id", "dims", "seed", "upstream", "layouts", "values", "scalar"};
    json_t *to = json_object();
    for (size_t k = 0; k < KA_COUNT(members); k++)
        tell(to, item, members[k]);
    return to;
}

static json_t *for_child(const json_t *cases, bool questions)
{
    const struct ka_kind *kind;
    json_t *told = json_array();
    size_t k;
    KA_EACH(cases, i, item) {
        json_t *to = to_draw(item);
        for (k = 0; questions && (kind = ka_kind_at(k)); k++) {
            if (kind->sort == KA_KIND_QUESTION && kind->other && json_object_get(item, kind->name))
                json_object_set_new(to, kind->name, to_draw(json_object_get(item, kind->name)));
            else if (kind->sort == KA_KIND_QUESTION)
                tell(to, item, kind->name);
        }
        if (questions)
            tell(to, item, "memory");
        json_array_append_new(told, to);
    }
    return told;
}

json_t *ka_plan_for_oracle(const json_t *cases)
{
    return for_child(cases, false);
}

json_t *ka_plan_for_candidate(const json_t *cases)
{
    return for_child(cases, true);
}
