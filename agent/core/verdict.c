/* Collects results case by case and decides. Knows no tensor, no process and no prompt template. */
#include "verdict.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/each.h"
#include "fields.h"
#include "base/utf8.h"
#include "kinds.h"
#include "plan.h"

#define ORDERED_MAX 16 /* kernels that are named for it */
#define REMARKS_MAX 16
#define RIGHT_MAX 12  /* kinds of right cases of a shape that are named */
#define WHOLE_MAX 100 /* failures of the candidate as a whole that are kept */

struct failure {
    char *subject; /* "the gradient of x"; NULL for a rule */
    char *rule;
    char *text;  /* the rule's sentence; NULL for a comparison */
    char *known; /* what may be said of it on a hidden shape; NULL: the rule */
    char *label;
    struct ka_diff diff;
};

/* The worst comparison of one gradient; error is negative before the first, infinite when there was nothing
 * to measure. */
struct worst {
    double error, base_error, limit;
    size_t compared, right; /* cases in which it was, and was right */
};

struct shape {
    struct worst *worst; /* on this shape, of the first `worst_count` gradients */
    size_t worst_count;
    enum ka_shape_kind kind;
    json_t *dims;
    char *hint, *skipped;
    bool open; /* why it is skipped may be told */
    size_t cases, cases_failed;
    struct failure *failures;
    size_t failure_count;
};

struct a_case {
    size_t shape;
    char *label;
    bool failed;
};

struct gradient {
    char *name;
    size_t judged; /* comparisons with what is neither zero nor noise */
    size_t seen;
    size_t noise;
    struct worst worst;
    size_t worst_shape;
    size_t runs; /* of one backward; 0: not repeated */
    double spread_abs, spread_of_limit;
};

struct ka_verdict {
    struct shape *shapes;
    struct a_case *cases;
    struct gradient *grads;
    struct shape whole;         /* failures that belong to no shape */
    char *ordered[ORDERED_MAX]; /* names of kernels */
    char *remarks[REMARKS_MAX]; /* sentences */
    size_t shape_count, case_count, grad_count;
};

/* What others measured may come cut at a number of bytes; what leaves here goes into JSON. */
static char *copy_text(const char *text)
{
    return ka_utf8_clean(ka_strdup(text));
}

struct ka_verdict *ka_verdict_new(const char *const *grads, size_t count)
{
    struct ka_verdict *v = ka_calloc(1, sizeof(*v));
    for (size_t i = 0; i < count; i++) {
        struct gradient *g = KA_APPEND(v->grads, v->grad_count);
        g->name = copy_text(grads[i]);
        g->worst.error = -1;
    }
    return v;
}

static void free_shape(struct shape *shape)
{
    for (size_t i = 0; i < shape->failure_count; i++) {
        free(shape->failures[i].subject);
        free(shape->failures[i].rule);
        free(shape->failures[i].text);
        free(shape->failures[i].known);
        free(shape->failures[i].label);
    }
    free(shape->failures);
    free(shape->worst);
    free(shape->hint);
    free(shape->skipped);
    json_decref(shape->dims);
}

void ka_verdict_free(struct ka_verdict *v)
{
    if (!v)
        return;
    for (size_t i = 0; i < v->shape_count; i++)
        free_shape(&v->shapes[i]);
    for (size_t i = 0; i < v->case_count; i++)
        free(v->cases[i].label);
    for (size_t i = 0; i < v->grad_count; i++)
        free(v->grads[i].name);
    free_shape(&v->whole);
    for (size_t i = 0; i < ORDERED_MAX; i++)
        free(v->ordered[i]);
    for (size_t i = 0; i < REMARKS_MAX; i++)
        free(v->remarks[i]);
    free(v->shapes);
    free(v->cases);
    free(v->grads);
    free(v);
}

/* ---- collecting ---- */

size_t ka_verdict_shape(struct ka_verdict *v, enum ka_shape_kind kind, const json_t *dims, const char *hint)
{
    struct shape *shape = KA_APPEND(v->shapes, v->shape_count);
    shape->kind = kind;
    shape->dims = json_deep_copy(dims);
    shape->hint = copy_text(hint);
    return v->shape_count - 1;
}

void ka_verdict_skip(struct ka_verdict *v, size_t shape, const char *reason)
{
    free(v->shapes[shape].skipped);
    v->shapes[shape].skipped = copy_text(reason);
}

void ka_verdict_skip_openly(struct ka_verdict *v, size_t shape, const char *reason)
{
    ka_verdict_skip(v, shape, reason);
    v->shapes[shape].open = true;
}

size_t ka_verdict_case(struct ka_verdict *v, size_t shape, const char *label)
{
    struct a_case *c = KA_APPEND(v->cases, v->case_count);
    c->shape = shape;
    c->label = copy_text(label);
    v->shapes[shape].cases++;
    return v->case_count - 1;
}

static struct failure *add_failure(struct ka_verdict *v, size_t at, const char *rule)
{
    struct a_case *c = &v->cases[at];
    struct shape *shape = &v->shapes[c->shape];
    shape->cases_failed += !c->failed;
    c->failed = true;
    struct failure *f = KA_APPEND(shape->failures, shape->failure_count);
    f->rule = copy_text(rule);
    f->label = ka_strdup(c->label);
    return f;
}

static void add_comparison(struct ka_verdict *v, size_t at, const char *subject, const struct ka_diff *diff)
{
    if (diff->pass)
        return;
    struct failure *f = add_failure(v, at, ka_diff_reason_name(diff->reason));
    f->subject = copy_text(subject);
    f->diff = *diff;
}

static struct gradient *find_gradient(struct ka_verdict *v, const char *name)
{
    for (size_t i = 0; i < v->grad_count; i++)
        if (strcmp(v->grads[i].name, name) == 0)
            return &v->grads[i];
    struct gradient *g = KA_APPEND(v->grads, v->grad_count);
    g->name = copy_text(name);
    g->worst.error = -1;
    return g;
}

static bool keep_worse(struct worst *worst, const struct worst *other)
{
    bool worse = other->error > worst->error;
    if (worse) {
        worst->error = other->error;
        worst->base_error = other->base_error;
        worst->limit = other->limit;
    }
    return worse;
}

static struct worst *worst_on(struct shape *shape, size_t grad)
{
    while (shape->worst_count <= grad) {
        struct worst *worst = KA_APPEND(shape->worst, shape->worst_count);
        worst->error = -1;
    }
    return &shape->worst[grad];
}

void ka_verdict_gradient(struct ka_verdict *v, size_t at, const char *name, const struct ka_diff *diff)
{
    char subject[160];
    snprintf(subject, sizeof(subject), "the gradient of %s", name);
    struct gradient *g = find_gradient(v, name);
    if (diff->reason == KA_DIFF_MISSING && diff->want_zero)
        return; /* None stands for zero */
    add_comparison(v, at, subject, diff);
    struct worst *here = worst_on(&v->shapes[v->cases[at].shape], (size_t)(g - v->grads));
    here->compared++;
    here->right += diff->pass;
    g->seen++;
    g->noise += diff->vacuous && diff->pass;
    if (diff->vacuous && diff->pass)
        return;
    g->judged += !(diff->nothing && diff->pass);
    bool measured = isfinite(diff->error) && (diff->reason == KA_DIFF_OK || diff->reason > KA_DIFF_NONFINITE);
    struct worst now = {
        .error = measured ? diff->error : INFINITY, .base_error = diff->base_error, .limit = diff->limit};
    keep_worse(here, &now);
    if (keep_worse(&g->worst, &now))
        g->worst_shape = v->cases[at].shape;
}

void ka_verdict_repeated(struct ka_verdict *v, const char *name, size_t runs, double max_abs, double of_limit)
{
    struct gradient *g = find_gradient(v, name);
    g->runs = runs;
    g->spread_abs = max_abs;
    g->spread_of_limit = of_limit;
}

/* Each text once, as long as there is room. */
static void add_text(char **list, size_t max, const char *text)
{
    size_t i = 0;
    while (i < max && list[i] && strcmp(list[i], text) != 0)
        i++;
    if (i < max && !list[i])
        list[i] = copy_text(text);
}

void ka_verdict_ordered(struct ka_verdict *v, const char *kernel)
{
    add_text(v->ordered, ORDERED_MAX, kernel);
}

void ka_verdict_remark(struct ka_verdict *v, const char *text)
{
    add_text(v->remarks, REMARKS_MAX, text);
}

void ka_verdict_output(struct ka_verdict *v, size_t at, size_t index, const struct ka_diff *diff)
{
    char subject[64];
    snprintf(subject, sizeof(subject), "output %zu of the forward", index);
    add_comparison(v, at, subject, diff);
}

void ka_verdict_fail(struct ka_verdict *v, size_t at, const char *rule, const char *text)
{
    add_failure(v, at, rule)->text = copy_text(text);
}

void ka_verdict_fail_known(struct ka_verdict *v, size_t at, const char *rule, const char *text,
                           const char *known)
{
    struct failure *f = add_failure(v, at, rule);
    f->text = copy_text(text);
    f->known = copy_text(known);
}

void ka_verdict_fail_whole(struct ka_verdict *v, const char *rule, const char *text)
{
    if (v->whole.failure_count > WHOLE_MAX)
        return;
    bool last = v->whole.failure_count == WHOLE_MAX;
    struct failure *f = KA_APPEND(v->whole.failures, v->whole.failure_count);
    f->rule = copy_text(rule);
    f->text = copy_text(last ? "and more than are listed here" : text);
}

/* ---- parts ---- */

struct ka_verdict *ka_verdict_part(const struct ka_verdict *v)
{
    struct ka_verdict *part = ka_verdict_new(NULL, 0);
    for (size_t i = 0; i < v->grad_count; i++)
        find_gradient(part, v->grads[i].name);
    part->shapes = ka_calloc(v->shape_count, sizeof(*part->shapes));
    part->shape_count = v->shape_count;
    return part;
}

static void join_failures(struct shape *shape, struct shape *part)
{
    for (size_t i = 0; i < part->failure_count; i++)
        *KA_APPEND(shape->failures, shape->failure_count) = part->failures[i];
    part->failure_count = 0;
}

static void join_shape(struct ka_verdict *v, size_t at, struct ka_verdict *of)
{
    struct shape *shape = &v->shapes[at], *part = &of->shapes[at];
    shape->cases += part->cases;
    shape->cases_failed += part->cases_failed;
    join_failures(shape, part);
    if (part->skipped)
        (part->open ? ka_verdict_skip_openly : ka_verdict_skip)(v, at, part->skipped);
    for (size_t i = 0; i < part->worst_count; i++) {
        struct gradient *g = find_gradient(v, of->grads[i].name);
        struct worst *worst = worst_on(shape, (size_t)(g - v->grads));
        keep_worse(worst, &part->worst[i]);
        worst->compared += part->worst[i].compared;
        worst->right += part->worst[i].right;
    }
}

static void join_gradient(struct ka_verdict *v, const struct gradient *part)
{
    struct gradient *g = find_gradient(v, part->name);
    g->judged += part->judged;
    g->seen += part->seen;
    g->noise += part->noise;
    if (keep_worse(&g->worst, &part->worst))
        g->worst_shape = part->worst_shape;
    if (part->runs)
        ka_verdict_repeated(v, g->name, part->runs, part->spread_abs, part->spread_of_limit);
}

void ka_verdict_join(struct ka_verdict *v, struct ka_verdict *part)
{
    for (size_t i = 0; i < part->case_count; i++)
        *KA_APPEND(v->cases, v->case_count) = part->cases[i];
    part->case_count = 0;
    for (size_t i = 0; i < part->grad_count; i++)
        join_gradient(v, &part->grads[i]);
    for (size_t i = 0; i < part->shape_count; i++)
        join_shape(v, i, part);
    for (size_t i = 0; i < part->whole.failure_count; i++)
        ka_verdict_fail_whole(v, part->whole.failures[i].rule, part->whole.failures[i].text);
    for (size_t i = 0; i < ORDERED_MAX && part->ordered[i]; i++)
        ka_verdict_ordered(v, part->ordered[i]);
    for (size_t i = 0; i < REMARKS_MAX && part->remarks[i]; i++)
        ka_verdict_remark(v, part->remarks[i]);
    ka_verdict_free(part);
}

/* ---- deciding ---- */

static bool shape_passed(const struct shape *shape)
{
    return !shape->skipped && shape->cases > 0 && shape->failure_count == 0;
}

struct ka_verdict_counts ka_verdict_count(const struct ka_verdict *v)
{
    struct ka_verdict_counts n = {0};
    for (size_t i = 0; i < v->shape_count; i++) {
        const struct shape *shape = &v->shapes[i];
        bool passed = shape_passed(shape);
        n.cases += shape->cases;
        n.cases_failed += shape->cases_failed;
        n.skipped += shape->skipped != NULL;
        switch (shape->kind) {
        case KA_SHAPE_REQUIRED:
            n.required++;
            n.passed += passed;
            break;
        case KA_SHAPE_HIDDEN:
            n.hidden += !shape->skipped;
            n.hidden_passed += passed;
            break;
        case KA_SHAPE_OPTIONAL:
            n.optional += !shape->skipped;
            n.optional_passed += passed;
            break;
        }
    }
    return n;
}

/* Seen, but compared with nothing but zeros and noise, or never seen at all. */
static bool gradient_unproved(const struct gradient *g)
{
    return g->judged == 0;
}

bool ka_verdict_verified(const struct ka_verdict *v)
{
    struct ka_verdict_counts n = ka_verdict_count(v);
    for (size_t i = 0; i < v->grad_count; i++)
        if (gradient_unproved(&v->grads[i]))
            return false;
    return v->grad_count > 0 && n.required > 0 && n.passed == n.required && n.hidden_passed == n.hidden &&
           v->whole.failure_count == 0;
}

/* ---- text for the LLM ---- */

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
static const struct shape **failing_shapes(const struct ka_verdict *v, size_t *count)
{
    const struct shape **list = ka_calloc(v->shape_count, sizeof(const struct shape *));
    *count = 0;
    for (size_t i = 0; i < v->shape_count; i++)
        if (v->shapes[i].failure_count)
            list[(*count)++] = &v->shapes[i];
    qsort(list, *count, sizeof(const struct shape *), by_size);
    return list;
}

static void name_shape(const struct shape *shape, struct ka_buf *out)
{
    if (shape->kind == KA_SHAPE_HIDDEN) {
        ka_buf_puts(out, "a hidden shape");
        if (shape->hint)
            ka_buf_printf(out, " (%s)", shape->hint);
        return;
    }
    KA_AUTO_FREE char *dims = json_dumps(shape->dims, JSON_ENCODE_ANY);
    ka_buf_printf(out, "%sshape %s", shape->kind == KA_SHAPE_OPTIONAL ? "optional " : "", dims ? dims : "?");
}

/* Where most cases of a shape are right, a formula is: what the failing one has of its own is not looked for
 * in it. */
static void without_formula(struct ka_diff *diff)
{
    size_t kept = 0;
    for (size_t i = 0; i < diff->pattern_count; i++)
        if (diff->patterns[i].kind != KA_PATTERN_CORRELATION)
            diff->patterns[kept++] = diff->patterns[i];
    diff->pattern_count = kept;
}

/* `mostly_right`: the same gradient is right in more cases of the shape than not. */
static void failure_text(const struct failure *f, enum ka_describe how, bool mostly_right, struct ka_buf *out)
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

static bool is_mostly_right(const struct ka_verdict *v, const struct shape *shape, const struct failure *f)
{
    for (size_t i = 0; i < shape->worst_count && f->subject; i++) {
        size_t name = strlen(v->grads[i].name), all = strlen(f->subject);
        if (all > name && strcmp(f->subject + all - name, v->grads[i].name) == 0 &&
            f->subject[all - name - 1] == ' ')
            return 2 * shape->worst[i].right > shape->worst[i].compared;
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
    name_shape(shape, out);
    ka_buf_printf(out, ", %zu of %zu cases fail:\n", shape->cases_failed, shape->cases);
    for (size_t i = 0; i < shape->failure_count; i++) {
        if (said_before(shape, i))
            continue;
        ka_buf_printf(out, "- (%s) ", shape->failures[i].label);
        failure_text(&shape->failures[i], how, is_mostly_right(v, shape, &shape->failures[i]), out);
        only_there(v, shape, &shape->failures[i], out);
        ka_buf_puts(out, "\n");
    }
    right_facts(v, shape, out);
}

/* Did a case end before it had anything to compare? Then nothing follows from what was not returned. */
static bool was_cut_short(const struct ka_verdict *v)
{
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
        if (!gradient_unproved(g) || (!g->seen && cut_short))
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
        failure_text(&v->whole.failures[i], KA_DESCRIBE_FULL, false, out);
        ka_buf_puts(out, "\n");
    }
    size_t count;
    const struct shape **failing = failing_shapes(v, &count);
    for (size_t i = 0; i < count && i < max_shapes; i++)
        shape_facts(v, failing[i], out);
    if (count > max_shapes)
        ka_buf_printf(out, "%zu more shapes fail.\n", count - max_shapes);
    free(failing);
    if (!v->whole.failure_count)
        unproved_facts(v, out);
    return out->failed;
}

/* ---- JSON ---- */

static json_t *shape_json(const struct shape *shape, bool hidden)
{
    return shape->kind == KA_SHAPE_HIDDEN && !hidden ? json_string("hidden") : json_deep_copy(shape->dims);
}

static json_t *number_or_null(double value)
{
    return isfinite(value) ? json_real(value) : json_null();
}

static json_t *counts_json(const struct ka_verdict *v, bool hidden)
{
    struct ka_verdict_counts n = ka_verdict_count(v);
    json_t *skipped = json_array();
    for (size_t i = 0; i < v->shape_count; i++)
        if (v->shapes[i].skipped)
            json_array_append_new(
                skipped, json_pack("{s:o,s:s}", "shape", shape_json(&v->shapes[i], hidden), "reason",
                                   v->shapes[i].kind == KA_SHAPE_HIDDEN && !hidden && !v->shapes[i].open
                                       ? "not accepted by the forward or the oracle"
                                       : v->shapes[i].skipped));
    return json_pack("{s:I,s:I,s:I,s:I,s:I,s:I,s:o}", "required", (json_int_t)n.required, "passed",
                     (json_int_t)n.passed, "hidden", (json_int_t)n.hidden, "hidden_passed",
                     (json_int_t)n.hidden_passed, "optional", (json_int_t)n.optional, "optional_passed",
                     (json_int_t)n.optional_passed, "skipped", skipped);
}

static json_t *worst_json(const char *name, const struct worst *worst)
{
    bool known = worst->error >= 0;
    return json_pack("{s:s,s:o,s:o,s:o}", "name", name, "error",
                     known ? number_or_null(worst->error) : json_null(), "baseline_error",
                     known ? number_or_null(worst->base_error) : json_null(), "limit",
                     known ? number_or_null(worst->limit) : json_null());
}

/* null where nothing was repeated: no claim. */
static json_t *repeats_json(const struct gradient *g)
{
    if (!g->runs)
        return json_null();
    return json_pack("{s:I, s:b, s:o, s:o}", "runs", (json_int_t)g->runs, "bit_for_bit", g->spread_abs == 0,
                     "max_abs", number_or_null(g->spread_abs), "of_limit",
                     number_or_null(g->spread_of_limit));
}

static json_t *gradients_json(const struct ka_verdict *v, bool hidden)
{
    json_t *list = json_array();
    for (size_t i = 0; i < v->grad_count; i++) {
        const struct gradient *g = &v->grads[i];
        json_t *entry = worst_json(g->name, &g->worst);
        json_object_set_new(entry, "worst_shape",
                            g->worst.error >= 0 ? shape_json(&v->shapes[g->worst_shape], hidden)
                                                : json_null());
        json_object_set_new(entry, "repeats", repeats_json(g));
        json_array_append_new(list, entry);
    }
    return list;
}

static json_t *per_shape_json(const struct ka_verdict *v, bool hidden)
{
    static const char *const kinds[] = {"required", "hidden", "optional"};
    json_t *list = json_array();
    for (size_t i = 0; i < v->shape_count; i++) {
        const struct shape *shape = &v->shapes[i];
        json_t *gradients = json_array();
        for (size_t k = 0; k < shape->worst_count; k++)
            if (shape->worst[k].error >= 0)
                json_array_append_new(gradients, worst_json(v->grads[k].name, &shape->worst[k]));
        json_array_append_new(list, json_pack("{s:o,s:s,s:b,s:I,s:I,s:o}", "shape", shape_json(shape, hidden),
                                              "kind", kinds[shape->kind], "skipped", shape->skipped != NULL,
                                              "cases", (json_int_t)shape->cases, "cases_failed",
                                              (json_int_t)shape->cases_failed, "gradients", gradients));
    }
    return list;
}

/* How many cases there were of each label, in the order of the first. */
static json_t *kinds_json(const struct ka_verdict *v)
{
    json_auto_t *counts = json_object();
    json_t *list = json_array();
    for (size_t i = 0; i < v->case_count; i++)
        ka_number_add(counts, v->cases[i].label, 1);
    KA_EACH_MEMBER(counts, label, count)
        json_array_append_new(list, json_pack("{s:s, s:O}", "name", label, "cases", count));
    return list;
}

static json_t *failure_json(const struct shape *shape, const struct failure *f, bool hidden)
{
    bool whole = shape->dims == NULL, secret = !whole && shape->kind == KA_SHAPE_HIDDEN && !hidden;
    KA_AUTO_BUF struct ka_buf text = {0};
    failure_text(f, secret ? KA_DESCRIBE_HIDDEN : KA_DESCRIBE_FULL, false, &text);
    json_t *o = json_pack("{s:o,s:s*,s:s,s:s*,s:s}", "shape", whole ? json_null() : shape_json(shape, hidden),
                          "case", f->label, "rule", f->rule, "tensor", f->subject, "text", ka_buf_str(&text));
    if (f->subject && !secret)
        json_object_set_new(o, "facts", ka_diff_json(&f->diff));
    return o;
}

static json_t *failures_json(const struct ka_verdict *v, bool hidden)
{
    json_t *list = json_array();
    for (size_t i = 0; i < v->whole.failure_count; i++)
        json_array_append_new(list, failure_json(&v->whole, &v->whole.failures[i], hidden));
    size_t count;
    const struct shape **failing = failing_shapes(v, &count);
    for (size_t i = 0; i < count; i++)
        for (size_t k = 0; k < failing[i]->failure_count; k++)
            json_array_append_new(list, failure_json(failing[i], &failing[i]->failures[k], hidden));
    free(failing);
    return list;
}

static json_t *texts_json(char *const *texts, size_t max)
{
    json_t *list = json_array();
    for (size_t i = 0; i < max && texts[i]; i++)
        json_array_append_new(list, json_string(texts[i]));
    return list;
}

json_t *ka_verdict_json(const struct ka_verdict *v, bool hidden)
{
    return json_pack("{s:b,s:o,s:o,s:o,s:o,s:o,s:o,s:o}", "verified", ka_verdict_verified(v), "shapes",
                     counts_json(v, hidden), "gradients", gradients_json(v, hidden), "per_shape",
                     per_shape_json(v, hidden), "kinds", kinds_json(v), "failures", failures_json(v, hidden),
                     "ordered_by_atomics", texts_json(v->ordered, ORDERED_MAX), "remarks",
                     texts_json(v->remarks, REMARKS_MAX));
}
