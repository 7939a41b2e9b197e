/* The table of kinds. Knows no shape, no seed and no child; see kinds.h. */
#include "kinds.h"

#include <string.h>

#include "base/each.h"

static json_t *yes(size_t n, uint64_t secret)
{
    (void)n;
    (void)secret;
    return json_true();
}

static json_t *a_and_b(size_t n, uint64_t secret)
{
    (void)n;
    (void)secret;
    return json_pack("[f, f]", KA_KIND_LINEAR_U, KA_KIND_LINEAR_W);
}

/* So many more backwards over one graph show how far atomics let them vary. */
static json_t *four(size_t n, uint64_t secret)
{
    (void)n;
    (void)secret;
    return json_integer(4);
}

/* From the last program to the first, and then as drawn. */
static json_t *another_order(size_t n, uint64_t secret)
{
    return n == 0 ? json_string("reversed") : json_integer((json_int_t)(secret >> 33));
}

#define READ ": read it through its strides, or call .contiguous()"

static const struct ka_kind KINDS[] = {
    {"normal", KA_KIND_UPSTREAM, KA_KIND_ALWAYS, .label = "normal upstream"},
    {"ones", KA_KIND_UPSTREAM, KA_KIND_ONCE, .label = "ones upstream", .tolerate = ka_tolerance_loosen,
     .only_against = true, .meaning = "an upstream of ones, as y.sum().backward() sends it"},
    {"onehot", KA_KIND_UPSTREAM, KA_KIND_ONCE, .label = "onehot upstream", .unit = true,
     .meaning = "an upstream that is zero almost everywhere: nothing may divide by it"},
    {"none_one", KA_KIND_UPSTREAM, KA_KIND_EACH_OUTPUT, .label = "none_one upstream",
     .meaning =
         "the upstream of that output being None because only the others are used: test for None, or leave "
         "set_materialize_grads on"},
    {"only_one", KA_KIND_UPSTREAM, KA_KIND_EACH_OF_MANY, .label = "upstream of one output",
     .meaning = "the upstreams of all outputs but that one being None: test each for None, or leave "
                "set_materialize_grads on"},
    {"slice", KA_KIND_LAYOUT, KA_KIND_TAKEN, .label = "slice",
     .meaning =
         "a part of a wider tensor, as torch.chunk and the backward of torch.cat hand it out, its rows "
         "further apart than they are long" READ},
    {"stacked", KA_KIND_LAYOUT, KA_KIND_TAKEN, .label = "stacked",
     .meaning = "every second element of a wider tensor, as the backward of torch.stack hands it out" READ},
    {"transposed", KA_KIND_LAYOUT, KA_KIND_TAKEN, .label = "transposed",
     .meaning = "axes in another order in memory, as .t() makes them" READ},
    {"expanded", KA_KIND_LAYOUT, KA_KIND_TAKEN, .label = "expanded", .tolerate = ka_tolerance_loosen,
     .only_against = true,
     .meaning = "stride 0 along the first axis, as .expand() and the backward of y.sum(0) make it" READ},
    {"spanned", KA_KIND_LAYOUT, KA_KIND_TAKEN, .label = "spanned", .tolerate = ka_tolerance_loosen,
     .only_against = true,
     .meaning = "stride 0 along the last axis, as the backward of y.sum(-1) makes it" READ},
    {"shifted", KA_KIND_LAYOUT, KA_KIND_TAKEN, .label = "shifted",
     .meaning = "all but the first along an axis of a larger tensor, as x[:, 1:] is" READ},
    {"swapped", KA_KIND_LAYOUT, KA_KIND_TAKEN, .label = "swapped",
     .meaning = "outer axes in another order in memory, as x.transpose(1, 2) makes them" READ},
    /* a softmax of scores of a tensor with itself is saturated */
    {"shared", KA_KIND_LAYOUT, KA_KIND_TAKEN, .label = "shared", .tolerate = ka_tolerance_loosen,
     .only_against = true,
     .meaning = "one tensor passed for two inputs: nothing may be kept or found by its address"},
    {"unsqueezed", KA_KIND_LAYOUT, KA_KIND_TAKEN, .label = "unsqueezed",
     .meaning = "one axis more, of length 1, in front, as of one batch of rows: x[None]" READ},
    {"mixed", KA_KIND_VALUES, KA_KIND_TAKEN, .label = "mixed", .tolerate = ka_tolerance_coarsen,
     .instead = "uneven", .only_against = true, .meaning = "rows times 100 beside rows times 0.01"},
    {"uneven", KA_KIND_VALUES, KA_KIND_TAKEN, .label = "uneven", .tolerate = ka_tolerance_coarsen,
     .instead = "mixed", .only_against = true,
     .meaning = "rows times 8 beside rows times 1/8, where products are in TF32"},
    {"tied", KA_KIND_VALUES, KA_KIND_TAKEN, .label = "tied", .tolerate = ka_tolerance_ties,
     .meaning = "rows that have their greatest value twice, and every two rows the same one"},
    {"flat", KA_KIND_VALUES, KA_KIND_TAKEN, .label = "flat", .tolerate = ka_tolerance_loosen,
     .only_against = true,
     .meaning = "rows that are constant, zero or nearly constant: nothing may divide by what is zero there"},
    {"large", KA_KIND_VALUES, KA_KIND_TAKEN, .label = "large", .tolerate = ka_tolerance_loosen,
     .only_against = true, .meaning = "values up to 8.5: formulas cut off in their tails are wrong there"},
    {"small", KA_KIND_VALUES, KA_KIND_NEVER,
     .label = "small", /* beside another number: preflight_scalars.c */
     .meaning = "values a hundredth of the usual: what guards against a division by little is at work"},
    {"masked", KA_KIND_VALUES, KA_KIND_TAKEN, .label = "masked", .tolerate = ka_tolerance_loosen,
     .only_against = true, .meaning = "elements that are -inf, as masked logits are"},
    {"needs", KA_KIND_QUESTION, KA_KIND_SUBSETS, .label = "only",
     .meaning = "some gradients not being wanted: see how ctx.needs_input_grad is used"},
    {"twice", KA_KIND_QUESTION, KA_KIND_PLAIN, .value = yes, .label = "second backward over the same graph",
     .meaning = "a second backward over the same graph: the first one used up or changed something that the "
                "forward saved"},
    {"noop", KA_KIND_QUESTION, KA_KIND_EVERY, .value = yes},
    {"order", KA_KIND_QUESTION, KA_KIND_FURTHER, .value = another_order, .label = "programs in another order",
     .meaning = "programs that run in another order: what one of them needs of another must come from an "
                "earlier launch"},
    {"linear", KA_KIND_QUESTION, KA_KIND_PLAIN, .value = a_and_b},
    {"powers", KA_KIND_QUESTION, KA_KIND_PLAIN, .scales = {65536, 0x1p-24}, .scales_half = {256, 0x1p-8}},
    {"spoilt", KA_KIND_QUESTION, KA_KIND_PLAIN, .value = yes},
    {"beside", KA_KIND_QUESTION, KA_KIND_LATER, .other = KA_KIND_FIRST, .label = "two graphs alive at once",
     .meaning =
         "two graphs of one shape alive at once: what a forward leaves for its backward belongs on its "
         "ctx, not into the module, and a default of the stub's is the entry's too"},
    {"kept", KA_KIND_QUESTION, KA_KIND_LATER, .value = yes, .label = "looked at after later calls",
     .meaning =
         "what a call had returned was written over by a later one: every call needs memory of its own"},
    {"quiet", KA_KIND_QUESTION, KA_KIND_LATER, .value = yes, .label = "without a graph",
     .meaning = "a call under torch.no_grad(), or with inputs that want no gradient: outputs are the same"},
    {"stepped", KA_KIND_QUESTION, KA_KIND_LATER, .other = KA_KIND_FIRST,
     .label = "other values in the same tensors",
     .meaning = "inputs whose values were changed in place between two calls, as an optimizer does: nothing "
                "made from them may be kept for the next call"},
    {"stale", KA_KIND_QUESTION, KA_KIND_LATER, .other = KA_KIND_FIRST,
     .label = "inputs changed before the backward",
     .meaning = "inputs or outputs that were changed in place between forward and backward: keep them by "
                "ctx.save_for_backward, and autograd raises; an attribute of ctx it does not watch"},
    {"calls", KA_KIND_QUESTION, KA_KIND_LATER, .other = KA_KIND_CHEAPEST, .label = "after many calls",
     .seconds = 1, /* questions.py has the number */
     .meaning = "many calls before this one: nothing may depend on how many there were"},
    {"repeats", KA_KIND_QUESTION, KA_KIND_COMPILED, .value = four},
};

const struct ka_kind *ka_kind_at(size_t i)
{
    return i < KA_COUNT(KINDS) ? &KINDS[i] : NULL;
}

const struct ka_kind *ka_kind_find(enum ka_kind_sort sort, const char *name)
{
    for (size_t i = 0; i < KA_COUNT(KINDS) && name; i++)
        if (KINDS[i].sort == sort && strcmp(KINDS[i].name, name) == 0)
            return &KINDS[i];
    return NULL;
}

const struct ka_kind *ka_kind_of_upstream(const json_t *item)
{
    const json_t *name = json_object_get(json_object_get(item, "upstream"), "kind");
    return ka_kind_find(KA_KIND_UPSTREAM, json_string_value(name));
}

const json_t *ka_kind_other_case(const json_t *item)
{
    const struct ka_kind *kind;
    const json_t *other = NULL;
    for (size_t k = 0; (kind = ka_kind_at(k)) && !other; k++)
        if (kind->other == KA_KIND_FIRST)
            other = json_object_get(item, kind->name);
    return other;
}

double ka_kind_seconds(const json_t *item)
{
    const struct ka_kind *kind;
    double seconds = 0;
    for (size_t k = 0; (kind = ka_kind_at(k)); k++)
        if (kind->seconds > 0 && json_object_get(item, kind->name))
            seconds += kind->seconds;
    return seconds;
}

bool ka_kind_is_upstream(const char *tensor)
{
    return strncmp(tensor, "upstream/", 9) == 0;
}

const struct ka_kind *ka_kind_of_input(const json_t *item, size_t i)
{
    size_t at = 0;
    KA_EACH_MEMBER(json_object_get(item, "values"), tensor, name) {
        if (at++ == i)
            return ka_kind_find(KA_KIND_VALUES, json_string_value(name));
    }
    KA_EACH_MEMBER(json_object_get(item, "layouts"), tensor, name) {
        if (!ka_kind_is_upstream(tensor) && at++ == i)
            return ka_kind_find(KA_KIND_LAYOUT, json_string_value(name));
    }
    return NULL;
}

static const char *label_of(enum ka_kind_sort sort, const json_t *name)
{
    const struct ka_kind *kind = ka_kind_find(sort, json_string_value(name));
    return kind ? kind->label : "?";
}

static void put(struct ka_buf *out, const char *between, const char *text)
{
    ka_buf_printf(out, "%s%s", out->len ? between : "", text);
}

void ka_kind_variation_label(const json_t *variation, struct ka_buf *out)
{
    json_t *layouts = json_object_get(variation, "layouts"), *values = json_object_get(variation, "values");
    KA_EACH_MEMBER(layouts, tensor, kind) {
        if (!ka_kind_is_upstream(tensor))
            continue;
        put(out, ", ", label_of(KA_KIND_LAYOUT, kind));
        ka_buf_printf(out, " upstream%s%s", strcmp(tensor, "upstream/0") ? " " : "",
                      strcmp(tensor, "upstream/0") ? tensor + 9 : "");
    }
    KA_EACH_MEMBER(layouts, tensor, kind) {
        if (ka_kind_is_upstream(tensor))
            continue;
        put(out, ", ", tensor);
        ka_buf_printf(out, " %s", label_of(KA_KIND_LAYOUT, kind));
    }
    KA_EACH_MEMBER(values, tensor, kind) {
        put(out, ", ", tensor);
        ka_buf_printf(out, " %s", label_of(KA_KIND_VALUES, kind));
    }
}

/* "only x wants a gradient", "only x and w want gradients". */
static void add_needs(const json_t *needs, struct ka_buf *out)
{
    size_t count = json_array_size(needs);
    ka_buf_printf(out, ", %s ", ka_kind_find(KA_KIND_QUESTION, "needs")->label);
    KA_EACH(needs, i, name) {
        const char *between = i == 0 ? "" : i + 1 == count ? " and " : ", ";
        ka_buf_printf(out, "%s%s", between, json_string_value(name));
    }
    ka_buf_puts(out, count == 1 ? " wants a gradient" : " want gradients");
}

void ka_kind_label(const json_t *item, struct ka_buf *out)
{
    const struct ka_kind *upstream = ka_kind_of_upstream(item);
    const json_t *needs = json_object_get(item, "needs");
    const char *scalar = json_string_value(json_object_get(json_object_get(item, "scalar"), "name"));
    KA_AUTO_BUF struct ka_buf varied = {0};
    ka_kind_variation_label(item, &varied);
    const json_t *output = json_object_get(json_object_get(item, "upstream"), "output");
    ka_buf_puts(out, upstream ? upstream->label : "unknown upstream");
    if (output)
        ka_buf_printf(out, " (output %lld)", (long long)json_integer_value(output));
    if (varied.len)
        ka_buf_printf(out, ", %s", ka_buf_str(&varied));
    if (scalar)
        ka_buf_printf(out, ", another %s", scalar);
    if (json_object_get(item, "order"))
        ka_buf_printf(out, ", %s", ka_kind_find(KA_KIND_QUESTION, "order")->label);
    if (json_array_size(needs))
        add_needs(needs, out);
}

bool ka_kind_is_plain(const char *label)
{
    return strcmp(label, ka_kind_find(KA_KIND_UPSTREAM, "normal")->label) == 0;
}

/* Whether a part of a label is the kind's: layouts and values end it, but that of an upstream comes first. */
static bool names(const char *part, size_t length, const struct ka_kind *kind)
{
    size_t size = strlen(kind->label);
    bool first = size <= length && strncmp(part, kind->label, size) == 0;
    bool last = size < length && part[length - size - 1] == ' ' &&
                strncmp(part + length - size, kind->label, size) == 0;
    switch (kind->sort) {
    case KA_KIND_LAYOUT:
        return last || (first && strncmp(part + size, " upstream", 9) == 0);
    case KA_KIND_VALUES:
        return last;
    case KA_KIND_UPSTREAM:
    case KA_KIND_QUESTION:
        break;
    }
    return first;
}

const char *ka_kind_meaning(const char *part)
{
    const char *comma = strstr(part, ", ");
    size_t length = comma ? (size_t)(comma - part) : strlen(part);
    for (size_t i = 0; i < KA_COUNT(KINDS); i++)
        if (KINDS[i].meaning && names(part, length, &KINDS[i]))
            return KINDS[i].meaning;
    return NULL;
}
