/* Self-reports of a candidate's process. Knows nothing of tensors or processes; see conduct.h. */
#include "conduct.h"

#include <stdio.h>
#include <string.h>

#include "base/each.h"
#include "fields.h"

#define NAMED_MAX 8 /* items of one list */

/* Without "aten::" and the trailing underscore of in-place operations: allocation, views, copies and casts,
 * and sums of partial results. */
static const char ALLOWED[] =
    " empty empty_like empty_strided empty_permuted new_empty new_empty_strided zeros zeros_like new_zeros "
    "_efficientzerotensor"
    " ones ones_like new_ones full full_like new_full scalar_tensor arange zero fill"
    " view _unsafe_view reshape _reshape_alias view_as as_strided expand permute transpose t select slice "
    "squeeze unsqueeze"
    " unbind split split_with_sizes chunk narrow diagonal unfold movedim flatten unflatten alias detach "
    "view_as_real"
    " view_as_complex lift lift_fresh"
    " clone copy _to_copy contiguous to cat stack constant_pad_nd flip repeat index index_select"
    " sum ";

bool ka_conduct_allowed(const char *name)
{
    const char *prefix = "aten::";
    if (!ka_starts_with(name, prefix))
        return false;
    name += strlen(prefix);
    size_t len = strlen(name);
    if (len > 1 && name[len - 1] == '_')
        len--;
    for (const char *at = ALLOWED + 1; *at; at += strcspn(at, " ") + 1)
        if (strcspn(at, " ") == len && strncmp(at, name, len) == 0)
            return true;
    return false;
}

static const char *text_of(const json_t *item)
{
    return json_is_string(item) ? json_string_value(item) : "?";
}

/* Of a gradient that the forward's kernels made: times the upstream, which is one number, unless that is 1.
 * Where it was made is seen by ka_conduct_traces() and by a call without launches. */
static bool is_scaling(const char *name)
{
    static const char *const names[] = {"aten::mul", "aten::equal"};
    for (size_t i = 0; i < KA_COUNT(names); i++)
        if (strcmp(names[i], name) == 0)
            return true;
    return false;
}

/* One failure for the phase, naming every operation; some are harmless where a backward `scales`. */
static void judge_operations(const json_t *report, const char *phase, bool scales, struct ka_verdict *verdict,
                             size_t at)
{
    char key[32], text[512];
    KA_AUTO_BUF struct ka_buf names = {0};
    size_t more = 0;
    snprintf(key, sizeof(key), "torch_ops_%s", phase);
    const json_t *operations = json_object_get(report, key);
    if (!json_is_object(operations))
        ka_buf_puts(&names, "operations that it does not report");
    KA_EACH_MEMBER(operations, name, count) {
        if (ka_conduct_allowed(name) || (scales && is_scaling(name)))
            continue;
        if (names.len < 200)
            ka_buf_printf(&names, "%s%.60s", names.len ? ", " : "", name);
        else
            more++;
    }
    if (more)
        ka_buf_printf(&names, ", and %zu more", more);
    if (names.len) {
        snprintf(text, sizeof(text), "the %s computes with torch (%s); kernels must compute the gradient",
                 phase, ka_buf_str(&names));
        ka_verdict_fail(verdict, at, "torch_math", text);
    }
}

/* Members that are lists of confessions: what stands before and after each item. */
static const struct {
    const char *rule, *key, *before, *after;
    bool interpreted; /* null where kernels are compiled: nobody saw it */
} LISTS[] = {
    {"modified", "modified", "", " was modified in place", false},
    {"alias", "aliases", "a returned gradient shares memory: ", "", false},
    {"kernel", "kernels", "", "", false},
    {"race", "races", "", "", true},
};

/* What it is that was modified. */
static const char *hazard_of(const char *name)
{
    return ka_starts_with(name, "upstream/")
               ? ": the backward overwrites the upstream gradient, which others use"
           : ka_starts_with(name, "saved/")
               ? ": a tensor saved for the backward is overwritten, so that a second "
                 "backward is wrong"
               : "";
}

/* `grad/NAME=upstream/INDEX`, where a free gradient is an upstream: autograd hands such on itself. */
static bool is_handed_on(const json_t *alias, const json_t *free)
{
    static const char grad[] = "grad/";
    const char *text = text_of(alias), *end = strstr(text, "=upstream/");
    if (!end || !ka_starts_with(text, grad))
        return false;
    KA_AUTO_FREE char *name = ka_strndup(text + strlen(grad), (size_t)(end - text) - strlen(grad));
    return ka_has_text(free, name);
}

/* Without what is handed on, which is worth a remark: a new reference. */
static json_t *unfair_aliases(const json_t *list, const json_t *free, struct ka_verdict *verdict)
{
    json_t *left = json_array();
    KA_EACH(list, i, alias) {
        char text[300];
        if (!is_handed_on(alias, free)) {
            json_array_append(left, alias);
            continue;
        }
        snprintf(text, sizeof(text),
                 "a gradient is the upstream gradient itself (%.200s): whoever changes one in place changes "
                 "both",
                 text_of(alias));
        ka_verdict_remark(verdict, text);
    }
    return left;
}

/* Of the first items, a failure each; the first says how many there are. */
static void judge_list(const json_t *report, size_t which, const struct ka_conduct_of *of,
                       struct ka_verdict *verdict, size_t at)
{
    char text[640], others[40] = "";
    const char *rule = LISTS[which].rule;
    const json_t *list = json_object_get(report, LISTS[which].key);
    json_auto_t *aliases = NULL;
    if (strcmp(rule, "alias") == 0 && json_is_array(list))
        list = aliases = unfair_aliases(list, of->free, verdict);
    size_t count = json_array_size(list);
    if (!json_is_array(list) && !(of->compiled && LISTS[which].interpreted))
        ka_verdict_fail(verdict, at, rule, "the report says nothing about it");
    if (count > 1)
        snprintf(others, sizeof(others), ", and %zu more", count - 1);
    for (size_t i = 0; i < count && i < NAMED_MAX; i++) {
        const char *item = text_of(json_array_get(list, i));
        KA_AUTO_BUF struct ka_buf told = {0};
        ka_place_retell(of->place, item, &told);
        snprintf(text, sizeof(text), "%s%.400s%s%s%s", LISTS[which].before, ka_buf_str(&told),
                 LISTS[which].after, others, which ? "" : hazard_of(item));
        ka_verdict_fail(verdict, at, rule, text);
        others[0] = '\0';
    }
}

/* Gradients beside those that were asked for: whoever uses them takes them for verified. */
static void judge_unnamed(const json_t *report, struct ka_verdict *verdict, size_t at)
{
    KA_EACH(json_object_get(report, "unnamed"), i, name) {
        char text[300];
        snprintf(text, sizeof(text),
                 "the backward returns a gradient for %.100s, which no position names, so that nobody checks "
                 "it: name it in inputs_require_grad, or return None",
                 text_of(name));
        if (i < NAMED_MAX)
            ka_verdict_fail(verdict, at, "unnamed", text);
    }
}

bool ka_conduct_may_scale(const json_t *outputs)
{
    bool any = false;
    KA_EACH(outputs, i, output) {
        const json_t *shape = json_object_get(output, "shape");
        if (!json_is_true(json_object_get(output, "differentiable")))
            continue;
        any = true;
        if (!json_is_array(shape))
            return false;
        KA_EACH(shape, k, size) {
            if (json_integer_value(size) != 1)
                return false;
        }
    }
    return any;
}

static bool has_elements(const json_t *output)
{
    const json_t *shape = json_object_get(output, "shape");
    if (!json_is_true(json_object_get(output, "differentiable")))
        return false;
    KA_EACH(shape, i, size) {
        if (json_integer_value(size) == 0)
            return false;
    }
    return true;
}

bool ka_conduct_nothing_to_launch(const json_t *outputs)
{
    if (json_array_size(outputs) == 0)
        return false;
    KA_EACH(outputs, i, output) {
        if (has_elements(output))
            return false;
    }
    return true;
}

/* No fault, and worth knowing. */
static void remark(const json_t *report, bool scales, struct ka_verdict *verdict)
{
    json_t *backward = json_object_get(report, "torch_ops_backward");
    KA_EACH(json_object_get(report, "same"), i, pair) {
        char text[300];
        snprintf(text, sizeof(text),
                 "two gradients are one tensor (%.200s): whoever changes one in place changes both",
                 text_of(pair));
        ka_verdict_remark(verdict, text);
    }
    if (scales && json_object_get(backward, "aten::mul"))
        ka_verdict_remark(verdict,
                          "the forward's kernels make the gradient, and the backward multiplies it by "
                          "the upstream, which is one number, with torch");
}

/* How often it launched, in either direction. */
static bool launched(const json_t *report, const char *phase)
{
    json_t *launches = json_object_get(report, phase);
    return json_is_integer(launches) && json_integer_value(launches) >= 1;
}

/* Where a forward may make gradients, its kernels must. */
static void judge_prepared(const json_t *report, bool scales, struct ka_verdict *verdict, size_t at)
{
    if (scales && !json_is_array(json_object_get(report, "prepared")))
        ka_verdict_fail(verdict, at, "prepared", "the report says nothing about it");
    KA_EACH(json_object_get(report, "prepared"), i, name) {
        char text[300];
        snprintf(
            text, sizeof(text),
            "the forward makes the gradient of %.100s with torch, and the backward scales it: kernels must "
            "compute the gradient",
            text_of(name));
        if (i < NAMED_MAX)
            ka_verdict_fail(verdict, at, "prepared", text);
    }
}

void ka_conduct_judge(const json_t *report, const struct ka_conduct_of *of, struct ka_verdict *verdict,
                      size_t at)
{
    remark(report, of->scales, verdict);
    judge_unnamed(report, verdict, at);
    judge_prepared(report, of->scales, verdict, at);
    for (size_t i = 0; i < KA_COUNT(LISTS); i++)
        judge_list(report, i, of, verdict, at);
    judge_operations(report, "forward", false, verdict, at);
    judge_operations(report, "backward", of->scales, verdict, at);
    const json_t *ordered = json_object_get(report, "ordered_by_atomics");
    for (size_t i = 0; i < json_array_size(ordered) && i < NAMED_MAX; i++)
        ka_verdict_ordered(verdict, text_of(json_array_get(ordered, i)));
    if (!of->empty && !launched(report, "launches_backward") &&
        !(of->scales && launched(report, "launches_forward")))
        ka_verdict_fail(verdict, at, "no_launch", "the backward launched no Triton kernel");
}

void ka_conduct_traces(const json_t *report, const json_t *nowhere, struct ka_verdict *verdict, size_t at)
{
    const json_t *untraced = json_object_get(report, "untraced");
    if (!json_is_array(untraced))
        ka_verdict_fail(verdict, at, "decoy_kernel", "the report does not say where gradients come from");
    KA_EACH(untraced, i, item) {
        const char *name = text_of(item);
        char text[300];
        if (ka_has_text(nowhere, name) || i >= NAMED_MAX)
            continue;
        snprintf(text, sizeof(text),
                 "the gradient of %.100s comes from no kernel that read the upstream gradient", name);
        ka_verdict_fail(verdict, at, "decoy_kernel", text);
    }
}

static void judge_interpreted(const json_t *entry, const struct ka_conduct_of *of, struct ka_verdict *verdict,
                              size_t shape)
{
    const json_t *conduct = json_object_get(entry, "conduct");
    bool ran = json_is_true(json_object_get(entry, "ok"));
    if (!ran && strcmp(ka_text_of(entry, "raised_in", ""), "host") != 0)
        return;
    size_t at = ka_verdict_case(verdict, shape, "normal upstream, interpreted at a small size");
    if (!ran) {
        KA_AUTO_BUF struct ka_buf text = {0};
        ka_buf_puts(&text,
                    "the backward raised on the CPU, where the interpreter looks for races and for what "
                    "gradients are made of, and the forward did not: ");
        ka_place_error(of->place, json_object_get(entry, "error"), &text);
        ka_verdict_fail(verdict, at, KA_VERDICT_RAISED, ka_buf_str(&text));
        return;
    }
    const struct ka_conduct_of own = {
        .scales = of->scales, .empty = of->empty, .free = of->free, .place = of->place};
    ka_conduct_judge(conduct, &own, verdict, at);
    ka_conduct_traces(conduct, of->free, verdict, at);
}

void ka_conduct_interpreted(json_t *facts, const struct ka_conduct_of *of, struct ka_verdict *verdict,
                            size_t shape)
{
    KA_EACH(json_object_get(facts, "cases"), i, entry) {
        judge_interpreted(entry, of, verdict, shape);
        json_object_del(entry, "conduct");
    }
}

bool ka_conduct_watched(const json_t *facts)
{
    KA_EACH(json_object_get(facts, "cases"), i, entry) {
        if (json_is_true(json_object_get(entry, "ok")))
            return true;
    }
    return false;
}

void ka_conduct_unlaunched(const json_t *launches, const json_t *seen, struct ka_verdict *verdict)
{
    KA_EACH(launches, i, name) {
        char text[300];
        if (!json_is_string(name) || json_object_get(seen, json_string_value(name)))
            continue;
        snprintf(text, sizeof(text),
                 "no case launched %.100s: what it computes was not looked at; a size in SWEEP that launches "
                 "it would be",
                 json_string_value(name));
        ka_verdict_remark(verdict, text);
    }
}
