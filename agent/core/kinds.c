/* The table of kinds. Knows no shape, no seed and no child; see kinds.h. */
#include "kinds.h"

#include <string.h>

static json_t *yes(void)
{
    return json_true();
}

static json_t *a_and_b(void)
{
    return json_pack("[f, f]", KA_KIND_LINEAR_U, KA_KIND_LINEAR_W);
}

/* So many more backwards over one graph show how far atomics let them vary. */
static json_t *four(void)
{
    return json_integer(4);
}

#define SCALED_MEANING                                                                                       \
    "an upstream of another magnitude: the backward must be linear in it, without clamps, thresholds or "    \
    "roundings"

static const struct ka_kind KINDS[] = {
    {"normal", KA_KIND_UPSTREAM, KA_KIND_ALWAYS, .label = "normal upstream"},
    {"ones", KA_KIND_UPSTREAM, KA_KIND_NEVER, .label = "ones upstream"},
    {"onehot", KA_KIND_UPSTREAM, KA_KIND_ONCE, .label = "onehot upstream", .unit = true,
     .meaning = "an upstream that is zero almost everywhere: nothing may divide by it"},
    {"scaled", KA_KIND_UPSTREAM, KA_KIND_ONCE, .label = "scaled upstream", .scale = 1e3, .scale_half = 16,
     .meaning = SCALED_MEANING},
    {"scaled", KA_KIND_UPSTREAM, KA_KIND_ONCE, .label = "scaled upstream", .scale = 1e-3,
     .scale_half = 1.0 / 16, .meaning = SCALED_MEANING},
    {"noncontiguous", KA_KIND_UPSTREAM, KA_KIND_ONCE, .label = "noncontiguous upstream",
     .meaning = "an upstream with other strides: read it through its strides, or call .contiguous()"},
    {"expanded", KA_KIND_UPSTREAM, KA_KIND_ONCE, .label = "expanded upstream",
     .meaning = "an upstream with stride 0, as .expand() makes it: read it through its strides, or call "
                ".contiguous()"},
    {"slice", KA_KIND_UPSTREAM, KA_KIND_ONCE, .label = "slice upstream",
     .meaning =
         "an upstream that is a part of a wider tensor, as the backward of torch.cat hands it out, its "
         "rows further apart than they are long: read it through its strides, or call .contiguous()"},
    {"none_one", KA_KIND_UPSTREAM, KA_KIND_EACH_OUTPUT, .label = "none_one upstream",
     .meaning = "an upstream that is None because only the other outputs are used: test for None, or leave "
                "set_materialize_grads on"},
    {"only_one", KA_KIND_UPSTREAM, KA_KIND_EACH_OF_MANY, .label = "upstream of one output",
     .meaning = "the upstreams of all outputs but one being None: test each for None, or leave "
                "set_materialize_grads on"},
    {"strided", KA_KIND_INPUTS, KA_KIND_TAKEN, .label = "strided inputs"},
    {"transposed", KA_KIND_INPUTS, KA_KIND_TAKEN, .label = "transposed inputs"},
    {"mixed", KA_KIND_INPUTS, KA_KIND_TAKEN, .label = "mixed inputs", .tolerate = ka_tolerance_coarsen,
     .only_against = true},
    {"tied", KA_KIND_INPUTS, KA_KIND_TAKEN, .label = "tied inputs", .tolerate = ka_tolerance_ties},
    {"needs", KA_KIND_QUESTION, KA_KIND_SUBSETS, .label = "only",
     .meaning = "some gradients not being wanted: see how ctx.needs_input_grad is used"},
    {"twice", KA_KIND_QUESTION, KA_KIND_PLAIN, .value = yes, .label = "second backward over the same graph",
     .meaning = "a second backward over the same graph: the first one used up or changed something that the "
                "forward saved"},
    {"noop", KA_KIND_QUESTION, KA_KIND_PLAIN, .value = yes},
    {"linear", KA_KIND_QUESTION, KA_KIND_PLAIN, .value = a_and_b},
    {"beside", KA_KIND_QUESTION, KA_KIND_LATER, .other = KA_KIND_FIRST, .label = "two graphs alive at once",
     .meaning =
         "two graphs of one shape alive at once: what a forward leaves for its backward belongs on its "
         "ctx, not into the module, and a default of the stub's is the entry's too"},
    {"kept", KA_KIND_QUESTION, KA_KIND_LATER, .value = yes, .label = "looked at after later calls",
     .meaning =
         "what a call had returned was written over by a later one: every call needs memory of its own"},
    {"stepped", KA_KIND_QUESTION, KA_KIND_LATER, .other = KA_KIND_FIRST,
     .label = "other values in the same tensors",
     .meaning = "inputs whose values were changed in place between two calls, as an optimizer does: nothing "
                "made from them may be kept for the next call"},
    {"stale", KA_KIND_QUESTION, KA_KIND_LATER, .other = KA_KIND_FIRST,
     .label = "inputs changed before the backward",
     .meaning = "inputs that were changed in place between forward and backward: keep them by "
                "ctx.save_for_backward, and autograd raises; an attribute of ctx it does not watch"},
    {"calls", KA_KIND_QUESTION, KA_KIND_LATER, .other = KA_KIND_CHEAPEST, .label = "after many calls",
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

const struct ka_kind *ka_kind_of(const json_t *item, enum ka_kind_sort sort)
{
    const json_t *name = sort == KA_KIND_UPSTREAM ? json_object_get(json_object_get(item, "upstream"), "kind")
                                                  : json_object_get(item, "inputs");
    return ka_kind_find(sort, json_string_value(name));
}

/* "only x wants a gradient", "only x and w want gradients". */
static void add_needs(const json_t *needs, struct ka_buf *out)
{
    size_t i, count = json_array_size(needs);
    json_t *name;
    ka_buf_printf(out, ", %s ", ka_kind_find(KA_KIND_QUESTION, "needs")->label);
    json_array_foreach((json_t *)needs, i, name)
    {
        const char *between = i == 0 ? "" : i + 1 == count ? " and " : ", ";
        ka_buf_printf(out, "%s%s", between, json_string_value(name));
    }
    ka_buf_puts(out, count == 1 ? " wants a gradient" : " want gradients");
}

void ka_kind_label(const json_t *item, struct ka_buf *out)
{
    const struct ka_kind *upstream = ka_kind_of(item, KA_KIND_UPSTREAM);
    const struct ka_kind *inputs = ka_kind_of(item, KA_KIND_INPUTS);
    const json_t *scale = json_object_get(json_object_get(item, "upstream"), "scale");
    const json_t *needs = json_object_get(item, "needs");
    const char *scalar = json_string_value(json_object_get(json_object_get(item, "scalar"), "name"));
    ka_buf_puts(out, upstream ? upstream->label : "unknown upstream");
    if (scale)
        ka_buf_printf(out, " (x%g)", json_number_value(scale));
    if (inputs)
        ka_buf_printf(out, ", %s", inputs->label);
    if (scalar)
        ka_buf_printf(out, ", another %s", scalar);
    if (json_array_size(needs))
        add_needs(needs, out);
}

bool ka_kind_is_plain(const char *label)
{
    return strcmp(label, ka_kind_find(KA_KIND_UPSTREAM, "normal")->label) == 0;
}

const char *ka_kind_meaning(const char *label)
{
    for (size_t i = 0; i < KA_COUNT(KINDS); i++)
        if (KINDS[i].meaning && strstr(label, KINDS[i].label))
            return KINDS[i].meaning;
    return NULL;
}
