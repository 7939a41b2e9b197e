/* Puts together what a verdict rests on. Decides nothing; see checked.h. */
#include "checked.h"

#include <stdio.h>
#include <string.h>

#include "base/each.h"
#include "conduct.h"
#include "describe.h"
#include "kinds.h"

static json_t *list_of(const json_t *object, const char *name)
{
    json_t *list = json_object_get(object, name);
    return json_is_array(list) ? json_incref(list) : json_array();
}

static bool has_label(const json_t *kinds, const char *label)
{
    KA_EACH(kinds, i, kind) {
        const char *name = json_string_value(json_object_get(kind, "name"));
        if (name && strstr(name, label))
            return true;
    }
    return false;
}

/* Why a check may be without a kind, where nothing else says it. */
static const char *usual_reason(const struct ka_kind *kind)
{
    if (kind->when == KA_KIND_EACH_OUTPUT)
        return "the forward has one differentiable output";
    if (kind->when == KA_KIND_SUBSETS)
        return "one input wants a gradient";
    return kind->when == KA_KIND_TAKEN ? "not looked for in this run"
                                       : "the check ended before it, or had no shape for it";
}

/* Layouts and values by the tensor that the forward does not take them of, and kinds without a case. */
static json_t *left_out(const json_t *kinds, const json_t *inputs)
{
    json_t *list = json_array(), *reasons = json_object_get(inputs, "left_out");
    const struct ka_kind *kind;
    KA_EACH_MEMBER(reasons, name, reason) {
        const char *why = json_string_value(reason);
        json_array_append_new(list, json_pack("{s:s, s:s}", "name", name, "reason", why ? why : "?"));
    }
    for (size_t i = 0; (kind = ka_kind_at(i)); i++) {
        const char *instead = kind->instead;
        if (kind->label && kind->when != KA_KIND_NEVER && !has_label(kinds, kind->label) &&
            !has_label(list, kind->label) &&
            !(instead && (has_label(kinds, instead) || has_label(list, instead))))
            json_array_append_new(list,
                                  json_pack("{s:s, s:s}", "name", kind->label, "reason", usual_reason(kind)));
    }
    return list;
}

static json_t *not_seen(const struct ka_checked_of *of)
{
    json_t *list = json_array();
    struct ka_describe_sums sums;
    ka_describe_sum(of->facts, &sums);
    if (of->device && strcmp(of->device, "cuda") == 0) {
        json_array_append_new(
            list,
            json_string(ka_conduct_watched(of->facts)
                            ? "races between programs, and what gradients are made of, on sizes larger "
                              "than those that the interpreter was given"
                            : "races between programs, and what gradients are made of: the interpreter, "
                              "which sees who accesses what, could not run this"));
        json_array_append_new(list,
                              json_string("of an autotuner's configurations all but the first that fits, "
                                          "beyond the first shape of a process, which runs them all"));
        return list;
    }
    json_array_append_new(list, json_string("races that timing decides among kernels ordered by atomics: "
                                            "without a GPU programs run one after another"));
    json_array_append_new(list, json_string("the rounding of compiled code: fused products and sums, TF32, "
                                            "approximate functions, other orders of summation"));
    if (sums.kernels < 1 || sums.registers < 0) {
        char text[160];
        snprintf(text, sizeof(text), "whether the kernels compile for %.60s: nothing compiled them here",
                 of->target ? of->target : "the target");
        json_array_append_new(list, json_string(text));
    }
    return list;
}

static json_t *notes_of(const json_t *verdict)
{
    json_t *list = json_array();
    KA_EACH(json_object_get(verdict, "notes"), i, note) {
        const char *text = json_string_value(json_object_get(note, "message"));
        json_int_t line = json_integer_value(json_object_get(note, "line"));
        if (text)
            json_array_append_new(list, json_sprintf("line %lld: %s", (long long)line, text));
    }
    return list;
}

/* Scalars and flags that every case had as they are, and why. */
static json_t *never_varied(const json_t *oracles)
{
    json_t *list = json_array();
    KA_EACH_MEMBER(json_object_get(json_object_get(oracles, "scalars"), "never_varied"), name, reason) {
        const char *why = json_string_value(reason);
        json_array_append_new(list, json_sprintf("%s: %s", name, why ? why : "?"));
    }
    return list;
}

json_t *ka_checked_json(const struct ka_checked_of *of)
{
    json_t *kinds = list_of(of->verdict, "kinds");
    return json_pack("{s:o, s:o, s:o, s:o, s:o, s:o, s:o}", "kinds", kinds, "left_out",
                     left_out(kinds, json_object_get(of->oracles, "inputs")), "scaled",
                     list_of(of->oracles, "scaled"), "not_seen", not_seen(of), "never_varied",
                     never_varied(of->oracles), "notes", notes_of(of->verdict), "remarks",
                     list_of(of->verdict, "remarks"));
}
