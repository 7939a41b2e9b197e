/* Collects results case by case and decides. Knows no tensor, no process and no prompt template. */
#include "verdict_internal.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/each.h"
#include "fields.h"
#include "base/utf8.h"

#define WHOLE_MAX 100 /* failures of the candidate as a whole that are kept */

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
    KA_AUTO_FREE char *subject = ka_format(SUBJECT, name);
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

bool ka_verdict_shape_passed(const struct shape *shape)
{
    return !shape->skipped && shape->cases > 0 && shape->failure_count == 0;
}

struct ka_verdict_counts ka_verdict_count(const struct ka_verdict *v)
{
    struct ka_verdict_counts n = {0};
    for (size_t i = 0; i < v->shape_count; i++) {
        const struct shape *shape = &v->shapes[i];
        bool passed = ka_verdict_shape_passed(shape);
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
bool ka_verdict_unproved(const struct gradient *g)
{
    return g->judged == 0;
}

bool ka_verdict_verified(const struct ka_verdict *v)
{
    struct ka_verdict_counts n = ka_verdict_count(v);
    for (size_t i = 0; i < v->grad_count; i++)
        if (ka_verdict_unproved(&v->grads[i]))
            return false;
    return v->grad_count > 0 && n.required > 0 && n.passed == n.required && n.hidden_passed == n.hidden &&
           v->whole.failure_count == 0;
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
    ka_verdict_tell(f, secret ? KA_DESCRIBE_HIDDEN : KA_DESCRIBE_FULL, false, &text);
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
    const struct shape **failing = ka_verdict_failing(v, &count);
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
