/* A verdict in words for the model: what fails, what is right, and nothing that a hidden shape keeps secret.
 * Decides nothing. */
#include "verdict_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/each.h"
#include "fields.h"
#include "kinds.h"
#include "plan.h"

#define RIGHT_MAX 12 /* kinds of right cases of a shape that are named */
#define RIGHT_SHAPES_MAX 16

/* Smallest first; hidden shapes come last and in the order given, so that their sizes do not show. */
static int by_size(const void *a, const void *b)
{
    const struct shape *x = *(const struct shape *const *)a, *y = *(const struct shape *const *)b;
    bool x_hidden = x->kind == KA_SHAPE_HIDDEN, y_hidden = y->kind == KA_SHAPE_HIDDEN;
    if (x_hidden != y_hidden)
        return x_hidden - y_hidden;
    double x_size = x_hidden ? 0 : ka_plan_size(x->dims), y_size = y_hidden ? 0 : ka_plan_size(y->dims);
    if (x_size != y_size)
        return x_size < y_size ? -1 : 1;
    return x < y ? -1 : x > y;
}

/* Failing shapes in the order above; free() the list. */
const struct shape **ka_verdict_failing(const struct ka_verdict *v, size_t *count)
{
    const struct shape **list = ka_calloc(v->shape_count, sizeof(const struct shape *));
    *count = 0;
    for (size_t i = 0; i < v->shape_count; i++)
        if (v->shapes[i].failure_count)
            list[(*count)++] = &v->shapes[i];
    qsort(list, *count, sizeof(const struct shape *), by_size);
    return list;
}

/* How many sizes of a shape are others than those of `known`. */
static size_t sizes_apart(const struct shape *shape, const struct shape *known)
{
    size_t apart = 0;
    KA_EACH_MEMBER(shape->dims, name, size) {
        apart += !json_equal(size, json_object_get(known->dims, name));
    }
    return apart;
}

/* ": H" for a hidden shape that differs in H alone from the known shape that it was made of. What the size is
 * there stays hidden. */
static void name_varied(const struct ka_verdict *v, const struct shape *shape, struct ka_buf *out)
{
    const struct shape *nearest = NULL;
    for (size_t i = 0; i < v->shape_count; i++) {
        const struct shape *known = &v->shapes[i];
        if (known->kind != KA_SHAPE_HIDDEN &&
            (!nearest || sizes_apart(shape, known) < sizes_apart(shape, nearest)))
            nearest = known;
    }
    if (!nearest || sizes_apart(shape, nearest) != 1)
        return;
    KA_EACH_MEMBER(shape->dims, name, size) {
        if (!json_equal(size, json_object_get(nearest->dims, name)))
            ka_buf_printf(out, ": %s", name);
    }
}

static void name_shape(const struct ka_verdict *v, const struct shape *shape, struct ka_buf *out)
{
    if (shape->kind == KA_SHAPE_HIDDEN) {
        ka_buf_puts(out, "a hidden shape");
        if (shape->hint) {
            ka_buf_printf(out, " (%s", shape->hint);
            name_varied(v, shape, out);
            ka_buf_puts(out, ")");
        }
        return;
    }
    KA_AUTO_FREE char *dims = ka_text_of_value(shape->dims, 0);
    ka_buf_printf(out, "%sshape %s", shape->kind == KA_SHAPE_OPTIONAL ? "optional " : "", dims ? dims : "?");
}

/* Where most cases are right, a formula is: what the failing one has of its own is not looked for in it. */
static void without_formula(struct ka_diff *diff)
{
    size_t kept = 0;
    for (size_t i = 0; i < diff->pattern_count; i++)
        if (diff->patterns[i].kind != KA_PATTERN_CORRELATION)
            diff->patterns[kept++] = diff->patterns[i];
    diff->pattern_count = kept;
}

/* `mostly_right`: the same gradient is right in more cases than not. */
void ka_verdict_tell(const struct failure *f, enum ka_describe how, bool mostly_right, struct ka_buf *out)
{
    struct ka_diff diff = f->diff;
    if (mostly_right)
        without_formula(&diff);
    if (f->subject)
        ka_diff_describe(&diff, f->subject, how, out);
    else if (how == KA_DESCRIBE_HIDDEN && f->known)
        ka_buf_printf(out, "%s: %s.", f->rule, f->known);
    else if (how == KA_DESCRIBE_HIDDEN)
        ka_buf_printf(out, "Rule broken: %s.", f->rule);
    else
        ka_buf_printf(out, "%s: %s", f->rule, f->text);
}

/* One line for each thing that failed, at its first case. */
static bool said_before(const struct shape *shape, size_t i)
{
    for (size_t k = 0; k < i; k++) {
        const struct failure *a = &shape->failures[k], *b = &shape->failures[i];
        bool same_subject = a->subject && b->subject && strcmp(a->subject, b->subject) == 0;
        bool same_rule = !a->subject && !b->subject && strcmp(a->rule, b->rule) == 0;
        if (same_subject || same_rule)
            return true;
    }
    return false;
}

/* The length of the first part of a label: what else differs from a plain case is said after a comma. */
static size_t part_of(const char *label)
{
    const char *comma = strstr(label, ", ");
    return comma && strncmp(label, "only ", 5) != 0 ? (size_t)(comma - label) : strlen(label);
}

/* The next part of a label; NULL after the last. */
static const char *next_part(const char *part)
{
    const char *end = part + part_of(part);
    return *end ? end + 2 : NULL;
}

/* Whether a case of the shape is right that has this part of a label too. */
static bool is_right_with(const struct ka_verdict *v, size_t shape, const char *wanted)
{
    for (size_t i = 0; i < v->case_count; i++) {
        if (v->cases[i].shape != shape || v->cases[i].failed)
            continue;
        for (const char *part = v->cases[i].label; part; part = next_part(part))
            if (part_of(part) == part_of(wanted) && strncmp(part, wanted, part_of(part)) == 0)
                return true;
    }
    return false;
}

/* What the failing case has and no right one, with what it means if that is one thing. */
static void only_there(const struct ka_verdict *v, const struct shape *shape, const struct failure *f,
                       struct ka_buf *out)
{
    const char *suspect = NULL;
    size_t suspects = 0;
    for (size_t k = 0; k < shape->failure_count; k++) {
        if (ka_kind_is_plain(shape->failures[k].label))
            return;
    }
    for (const char *part = f->label; part; part = next_part(part)) {
        if (ka_kind_is_plain(part) || is_right_with(v, (size_t)(shape - v->shapes), part) ||
            !ka_kind_meaning(part))
            continue;
        ka_buf_printf(out, "%s%.*s",
                      suspects++ ? ", " : " It is right for a plain upstream, and fails only with ",
                      (int)part_of(part), part);
        suspect = part;
    }
    if (suspects == 1)
        ka_buf_printf(out, ": %s", ka_kind_meaning(suspect));
    ka_buf_puts(out, suspects ? "." : "");
}

/* Of a gradient, over all shapes. */
static struct worst everywhere(const struct ka_verdict *v, size_t grad)
{
    struct worst sum = {0};
    for (size_t i = 0; i < v->shape_count; i++) {
        const struct shape *shape = &v->shapes[i];
        sum.compared += grad < shape->worst_count ? shape->worst[grad].compared : 0;
        sum.right += grad < shape->worst_count ? shape->worst[grad].right : 0;
    }
    return sum;
}

/* A comparison that failed, of a gradient that is right in more cases than not. */
static bool is_mostly_right(const struct ka_verdict *v, const struct failure *f)
{
    for (size_t i = 0; i < v->grad_count && f->subject; i++) {
        KA_AUTO_FREE char *subject = ka_format(SUBJECT, v->grads[i].name);
        struct worst sum = everywhere(v, i);
        if (strcmp(subject, f->subject) == 0)
            return 2 * sum.right > sum.compared;
    }
    return false;
}

/* "x in 3 of 4 cases, w": the gradients that are right, and where. */
static void right_gradients(const struct ka_verdict *v, const struct shape *shape, struct ka_buf *out)
{
    const char *lead = "  Right: ";
    for (size_t i = 0; i < shape->worst_count; i++) {
        const struct worst *w = &shape->worst[i];
        if (!w->right)
            continue;
        ka_buf_printf(out, "%sthe gradient of %s in ", lead, v->grads[i].name);
        if (w->right == w->compared)
            ka_buf_puts(out, w->compared == 1 ? "the one case in which it was compared"
                                              : "every case in which it was compared");
        else
            ka_buf_printf(out, "%zu of %zu cases", w->right, w->compared);
        lead = "; ";
    }
    ka_buf_puts(out, *lead == ';' ? ".\n" : "");
}

/* "normal upstream (2), ones upstream": the cases of the shape in which nothing failed. */
static void right_cases(const struct ka_verdict *v, size_t shape, struct ka_buf *out)
{
    const char *lead = "  Nothing failed with: ";
    size_t named = 0;
    for (size_t i = 0; i < v->case_count; i++) {
        size_t before = 0, alike = 0;
        for (size_t k = 0; k < v->case_count; k++) {
            bool same = v->cases[k].shape == shape && !v->cases[k].failed &&
                        strcmp(v->cases[k].label, v->cases[i].label) == 0;
            before += same && k < i;
            alike += same;
        }
        if (v->cases[i].shape != shape || v->cases[i].failed || before || named == RIGHT_MAX)
            continue;
        ka_buf_printf(out, "%s%s", lead, v->cases[i].label);
        if (alike > 1)
            ka_buf_printf(out, " (%zu cases)", alike);
        if (++named == RIGHT_MAX)
            ka_buf_puts(out, "; and more");
        lead = "; ";
    }
    ka_buf_puts(out, named ? ".\n" : "");
}

static void right_facts(const struct ka_verdict *v, const struct shape *shape, struct ka_buf *out)
{
    right_gradients(v, shape, out);
    if (shape->kind != KA_SHAPE_HIDDEN)
        right_cases(v, (size_t)(shape - v->shapes), out);
}

static void shape_facts(const struct ka_verdict *v, const struct shape *shape, struct ka_buf *out)
{
    enum ka_describe how = shape->kind == KA_SHAPE_HIDDEN ? KA_DESCRIBE_HIDDEN : KA_DESCRIBE_FULL;
    ka_buf_puts(out, "On ");
    name_shape(v, shape, out);
    ka_buf_printf(out, ", %zu of %zu cases fail:\n", shape->cases_failed, shape->cases);
    for (size_t i = 0; i < shape->failure_count; i++) {
        if (said_before(shape, i))
            continue;
        ka_buf_printf(out, "- (%s) ", shape->failures[i].label);
        ka_verdict_tell(&shape->failures[i], how, is_mostly_right(v, &shape->failures[i]), out);
        only_there(v, shape, &shape->failures[i], out);
        ka_buf_puts(out, "\n");
    }
    right_facts(v, shape, out);
}

/* "Nothing fails on shape {...}; a hidden shape (prime)." Each name once, of the first ones. */
static void right_shapes(const struct ka_verdict *v, struct ka_buf *out)
{
    KA_AUTO_BUF struct ka_buf names = {0};
    size_t named = 0;
    for (size_t i = 0; i < v->shape_count && named <= RIGHT_SHAPES_MAX; i++) {
        KA_AUTO_BUF struct ka_buf name = {0};
        if (!ka_verdict_shape_passed(&v->shapes[i]))
            continue;
        name_shape(v, &v->shapes[i], &name);
        if (strstr(ka_buf_str(&names), ka_buf_str(&name)))
            continue;
        ka_buf_printf(&names, "%s%s", named ? "; " : "",
                      named < RIGHT_SHAPES_MAX ? ka_buf_str(&name) : "and others");
        named++;
    }
    if (named)
        ka_buf_printf(out, "Nothing fails on %s.\n", ka_buf_str(&names));
}

/* What holds over all shapes, where more than one was judged. */
static void overall_facts(const struct ka_verdict *v, struct ka_buf *out)
{
    size_t judged = 0;
    for (size_t i = 0; i < v->shape_count; i++)
        judged += v->shapes[i].cases > 0;
    if (judged < 2)
        return;
    right_shapes(v, out);
    for (size_t i = 0; i < v->grad_count; i++) {
        struct worst sum = everywhere(v, i);
        if (sum.compared)
            ka_buf_printf(out, "Over all %zu shapes, the gradient of %s is right in %zu of %zu cases.\n",
                          judged, v->grads[i].name, sum.right, sum.compared);
    }
}

static bool is_left_open(const struct shape *shape)
{
    return shape->kind == KA_SHAPE_REQUIRED && shape->skipped;
}

/* What a required shape could not be judged for. It is no fault of the backward's. */
static void skipped_facts(const struct ka_verdict *v, struct ka_buf *out)
{
    for (size_t i = 0; i < v->shape_count; i++) {
        if (!is_left_open(&v->shapes[i]))
            continue;
        KA_AUTO_FREE char *dims = ka_text_of_value(v->shapes[i].dims, 0);
        ka_buf_printf(out, "Nothing is said of required shape %s: %s.\n", dims ? dims : "?",
                      v->shapes[i].skipped);
    }
}

/* Did a case end before it had anything to compare? Then nothing follows from what was not returned. */
static bool was_cut_short(const struct ka_verdict *v)
{
    for (size_t i = 0; i < v->shape_count; i++)
        if (is_left_open(&v->shapes[i]))
            return true;
    for (size_t i = 0; i < v->shape_count; i++)
        for (size_t k = 0; k < v->shapes[i].failure_count; k++)
            if (strcmp(v->shapes[i].failures[k].rule, KA_VERDICT_RAISED) == 0)
                return true;
    return false;
}

/* What follows from a cause comes after it, and not at all where nothing was run. */
static void unproved_facts(const struct ka_verdict *v, struct ka_buf *out)
{
    bool cut_short = was_cut_short(v);
    for (size_t i = 0; i < v->grad_count; i++) {
        const struct gradient *g = &v->grads[i];
        if (!ka_verdict_unproved(g) || (!g->seen && cut_short))
            continue;
        if (g->seen > g->noise)
            ka_buf_printf(out,
                          "The gradient of %s was never compared with anything but zero: nothing proves it. "
                          "If it has none, leave it out of inputs_require_grad.\n",
                          g->name);
        else
            ka_buf_printf(out,
                          g->seen ? "The gradient of %s is rounding noise in every case: nothing proves it.\n"
                                  : "The gradient of %s was never returned.\n",
                          g->name);
    }
}

int ka_verdict_facts(const struct ka_verdict *v, size_t max_shapes, struct ka_buf *out)
{
    for (size_t i = 0; i < v->whole.failure_count; i++) {
        ka_verdict_tell(&v->whole.failures[i], KA_DESCRIBE_FULL, false, out);
        ka_buf_puts(out, "\n");
    }
    size_t count;
    const struct shape **failing = ka_verdict_failing(v, &count);
    for (size_t i = 0; i < count && i < max_shapes; i++)
        shape_facts(v, failing[i], out);
    if (count > max_shapes)
        ka_buf_printf(out, "%zu more shapes fail.\n", count - max_shapes);
    free(failing);
    if (count)
        overall_facts(v, out);
    if (!v->whole.failure_count) {
        skipped_facts(v, out);
        unproved_facts(v, out);
    }
    return out->failed;
}
