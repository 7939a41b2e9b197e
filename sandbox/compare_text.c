/* The wording of a difference: for the LLM, for reports, and as JSON. Computes nothing. */
#include <errno.h>
#include <math.h>
#include <string.h>

#include "compare_internal.h"

static const char *const REASONS[] = {
    [KA_DIFF_OK] = "ok",       [KA_DIFF_MISSING] = "missing",     [KA_DIFF_SHAPE] = "shape",
    [KA_DIFF_DTYPE] = "dtype", [KA_DIFF_NONFINITE] = "nonfinite", [KA_DIFF_NOT_ZERO] = "not_zero",
    [KA_DIFF_ZERO] = "zero",   [KA_DIFF_NORM] = "norm",           [KA_DIFF_ELEMENTS] = "elements",
    [KA_DIFF_PART] = "part",
};

static const char *const KINDS[] = {
    [KA_PATTERN_FACTOR] = "factor",
    [KA_PATTERN_SIGN] = "sign",
    [KA_PATTERN_TRANSPOSED] = "transposed",
    [KA_PATTERN_OTHER] = "other_tensor",
    [KA_PATTERN_SHIFTED] = "shifted",
    [KA_PATTERN_ZERO_SLICES] = "zero_slices",
    [KA_PATTERN_LAST_TILE] = "last_tile",
    [KA_PATTERN_FIRST_TILE] = "first_tile",
    [KA_PATTERN_RANGE] = "range",
    [KA_PATTERN_SAME_ALONG] = "same_along",
    [KA_PATTERN_NONFINITE] = "nonfinite",
    [KA_PATTERN_ROUNDING] = "rounding",
    [KA_PATTERN_LINES] = "lines",
    [KA_PATTERN_SIGNS] = "signs",
    [KA_PATTERN_CORRELATION] = "correlation",
};

const char *ka_diff_reason_name(enum ka_diff_reason reason)
{
    return REASONS[reason];
}

/* ---- patterns ---- */

struct hint {
    double value;
    const char *text;
};

static const struct hint FACTORS[] = {
    {2.0, "it is accumulated twice, or the derivative of a square lost its 1/2"},
    {0.5, "half of it is missing"},
    {1.4426950408889634,
     "that is log2(e): exp2 is differentiated without the factor ln(2), or a scale carries log2(e)"},
    {0.6931471805599453, "that is ln(2): a scale between exp and exp2 is lost or applied twice"},
};

static bool is_near(double value, double other)
{
    return fabs(value / other - 1) < 1e-3;
}

/* Every usual meaning of a constant factor; sizes of axes are named only for shapes that may be shown. */
static void describe_factor(const struct ka_diff *diff, double value, enum ka_describe how,
                            struct ka_buf *out)
{
    const char *lead = " (";
    for (size_t i = 0; i < KA_COUNT(FACTORS); i++) {
        if (!is_near(value, FACTORS[i].value))
            continue;
        ka_buf_printf(out, "%s%s", lead, FACTORS[i].text);
        lead = "; or ";
    }
    for (size_t at = 0; at < diff->rank && how == KA_DESCRIBE_FULL; at++) {
        double n = (double)diff->dims[at];
        const struct hint sizes[] = {{n, "the size"},
                                     {1 / n, "1 / the size"},
                                     {sqrt(n), "the root of the size"},
                                     {1 / sqrt(n), "1 / the root of the size"}};
        for (size_t i = 0; i < KA_COUNT(sizes) && diff->dims[at] > 1; i++) {
            if (!is_near(value, sizes[i].value))
                continue;
            ka_buf_printf(out, "%s%s of axis %zu: a mean or a scale", lead, sizes[i].text, at);
            lead = "; or ";
        }
    }
    ka_buf_puts(out, lead[0] == ';' ? ")" : "");
}

/* Nothing simpler explains it: how near the whole is. */
static void describe_correlation(double cosine, struct ka_buf *out)
{
    if (cosine > 0.5)
        ka_buf_printf(
            out,
            "It points mostly the right way (cosine %.2f with the expected values): a term, or the part of "
            "some programs or loop steps, is missing or wrong.",
            cosine);
    else if (cosine < -0.5)
        ka_buf_printf(out, "It points mostly the opposite way (cosine %.2f): look at the signs of the terms.",
                      cosine);
    else
        ka_buf_printf(out,
                      "It has little to do with the expected values (cosine %.2f): the formula, an index, "
                      "a stride or the upstream gradient is wrong.",
                      cosine);
}

static void describe_lines(const struct ka_pattern *p, bool full, struct ka_buf *out)
{
    ka_buf_printf(out, "Along axis %d every index is right up to a factor of its own", p->axis);
    if (p->value > 0 && full)
        ka_buf_printf(out, ", which is within %.2g of 1", p->value);
    else if (p->value > 0)
        ka_buf_puts(out, ", which is close to 1");
    ka_buf_puts(out,
                p->value > 0
                    ? ": rounding that added up on the way to what multiplies that row (many steps of a "
                      "loop, a difference of large values, a value that was stored in a narrow dtype), or "
                      "a small term of it that is missing."
                    : ": what multiplies that row (the upstream gradient, a statistic, a scale) is "
                      "wrong.");
}

static void describe_value(const struct ka_diff *diff, const struct ka_pattern *p, enum ka_describe how,
                           struct ka_buf *out)
{
    bool full = how == KA_DESCRIBE_FULL;
    switch ((int)p->kind) {
    case KA_PATTERN_FACTOR:
        if (full)
            ka_buf_printf(out, "It equals %.6g times the expected values", p->value);
        else
            ka_buf_puts(out, "It equals a constant times the expected values");
        describe_factor(diff, p->value, how, out);
        ka_buf_puts(out, ".");
        break;
    case KA_PATTERN_SIGN:
        ka_buf_puts(out, "Its sign is flipped: every value is the negative of the expected one.");
        break;
    case KA_PATTERN_TRANSPOSED:
        ka_buf_puts(out, "It is transposed: its last two axes are exchanged (strides or indices swapped).");
        break;
    case KA_PATTERN_OTHER:
        ka_buf_printf(
            out, "It equals the expected value of %s: the two are swapped or stored to the wrong buffer.",
            p->other);
        break;
    case KA_PATTERN_SHIFTED:
        ka_buf_printf(out,
                      "It is shifted by one along axis %d: the expected value of index i is found at i %c 1.",
                      p->axis, p->value < 0 ? '-' : '+');
        break;
    case KA_PATTERN_SAME_ALONG:
        ka_buf_printf(out,
                      "The error does not vary along axis %d: a term that is reduced or broadcast over this "
                      "axis is missing or counted twice.",
                      p->axis);
        break;
    case KA_PATTERN_ROUNDING:
        ka_buf_puts(out,
                    "It is a little off everywhere: this looks like rounding (accumulate in float32, do not "
                    "store partial sums in a narrow dtype), or like a small missing term.");
        break;
    case KA_PATTERN_LINES:
        describe_lines(p, full, out);
        break;
    case KA_PATTERN_SIGNS:
        ka_buf_puts(out, "All magnitudes are right, but signs are wrong");
        if (full)
            ka_buf_printf(out, " in %zu elements", p->hits);
        ka_buf_puts(out, ": an absolute value, a square or a comparison loses the sign.");
        break;
    case KA_PATTERN_CORRELATION:
        describe_correlation(p->value, out);
    }
}

static void describe_place(const struct ka_pattern *p, enum ka_describe how, struct ka_buf *out)
{
    bool full = how == KA_DESCRIBE_FULL;
    switch ((int)p->kind) {
    case KA_PATTERN_ZERO_SLICES:
        ka_buf_printf(out, "Along axis %d, whole slices are zero that should not be", p->axis);
        if (full)
            ka_buf_printf(out, ": %zu of %zu indices, from %zu to %zu", p->hits, p->dim, p->from, p->to);
        ka_buf_puts(out, " (never written, or masked away).");
        break;
    case KA_PATTERN_LAST_TILE:
        if (full)
            ka_buf_printf(out,
                          "Only indices %zu to %zu of axis %d (size %zu) are wrong: the last%s tile if tiles "
                          "have %zu (loop bound or mask).",
                          p->from, p->to, p->axis, p->dim, p->dim % p->tile ? ", partial," : "", p->tile);
        else
            ka_buf_printf(out, "Only the end of axis %d is wrong: its last tile (loop bound or mask).",
                          p->axis);
        break;
    case KA_PATTERN_FIRST_TILE:
        if (full)
            ka_buf_printf(
                out,
                "Along axis %d only the first tile (indices 0 to %zu of %zu) is right: the loop or the "
                "grid covers one tile, or its pointers do not advance.",
                p->axis, p->tile - 1, p->dim);
        else
            ka_buf_printf(out, "Along axis %d only the first tile is right (loop or grid covers one tile).",
                          p->axis);
        break;
    case KA_PATTERN_RANGE:
        if (full)
            ka_buf_printf(out, "Only indices %zu to %zu of axis %d (size %zu) hold wrong elements.", p->from,
                          p->to, p->axis, p->dim);
        else
            ka_buf_printf(out, "Only a part of axis %d is wrong.", p->axis);
        break;
    case KA_PATTERN_NONFINITE:
        ka_buf_puts(out, "NaN or infinity is where it should not be, or missing where it should be");
        if (p->axis >= 0 && full)
            ka_buf_printf(out, ": only on indices %zu to %zu of axis %d (size %zu)", p->from, p->to, p->axis,
                          p->dim);
        else if (p->axis >= 0)
            ka_buf_printf(out, ": only on a part of axis %d", p->axis);
        ka_buf_puts(out, ".");
    }
}

/* ---- the whole difference ---- */

static void shape_text(const size_t *dims, size_t rank, struct ka_buf *out)
{
    struct ka_tensor shape = {.rank = rank};
    memcpy(shape.dims, dims, sizeof(shape.dims));
    ka_tensor_shape_text(&shape, out);
}

static void describe_shape(const struct ka_diff *diff, const char *name, enum ka_describe how,
                           struct ka_buf *out)
{
    if (how == KA_DESCRIBE_HIDDEN) {
        ka_buf_printf(out, "%s has the wrong shape; it must have that of its input.", name);
        return;
    }
    ka_buf_printf(out, "%s has shape ", name);
    shape_text(diff->got_dims, diff->got_rank, out);
    ka_buf_puts(out, ", expected ");
    shape_text(diff->dims, diff->rank, out);
    ka_buf_puts(out, ".");
}

static void index_of(const struct ka_diff *diff, size_t element, size_t *at)
{
    for (size_t i = diff->rank; i-- > 0;) {
        at[i] = element % diff->dims[i];
        element /= diff->dims[i];
    }
}

static void describe_worst(const struct ka_diff *diff, struct ka_buf *out)
{
    size_t at[KA_TENSOR_RANK_MAX] = {0};
    index_of(diff, diff->worst, at);
    ka_buf_puts(out, diff->mask_differs ? " First at index " : " Worst at index ");
    shape_text(at, diff->rank, out);
    ka_buf_printf(out, ": found %.6g, expected %.6g.", diff->worst_got, diff->worst_want);
}

/* "[1, 3, :]" for a row, "[1, 3, 64] to [1, 3, 127]" for a block. */
static void describe_place_of(const struct ka_diff *diff, const struct ka_part *part, struct ka_buf *out)
{
    size_t at[KA_TENSOR_RANK_MAX] = {0};
    index_of(diff, part->first, at);
    if (part->kind == KA_PART_ROW && diff->rank > 0) {
        ka_buf_puts(out, "[");
        for (size_t i = 0; i + 1 < diff->rank; i++)
            ka_buf_printf(out, "%zu, ", at[i]);
        ka_buf_puts(out, ":]");
        return;
    }
    shape_text(at, diff->rank, out);
    if (part->kind != KA_PART_BLOCK)
        return;
    index_of(diff, part->first + part->count - 1, at);
    ka_buf_puts(out, " to ");
    shape_text(at, diff->rank, out);
}

static void describe_part(const struct ka_diff *diff, enum ka_describe how, struct ka_buf *out)
{
    static const char *const words[] = {[KA_PART_NONE] = "Part",
                                        [KA_PART_ELEMENT] = "Element",
                                        [KA_PART_BLOCK] = "Elements",
                                        [KA_PART_ROW] = "Row"};
    const struct ka_part *part = &diff->part;
    if (how != KA_DESCRIBE_FULL) {
        ka_buf_puts(out, part->kind == KA_PART_ELEMENT ? " Single elements are wrong."
                                                       : " Whole rows, or blocks of rows, are wrong.");
        return;
    }
    ka_buf_printf(out, " %s ", words[part->kind]);
    describe_place_of(diff, part, out);
    ka_buf_printf(out,
                  part->relative ? ": norm-relative error %.3g there, allowed %.3g."
                                 : ": must be zero, and is off by %.3g there, allowed %.3g.",
                  part->error, part->limit);
    if (diff->parts_off > 1)
        ka_buf_printf(out, " It is the worst of %zu rows or blocks.", diff->parts_off);
}

static void describe_numbers(const struct ka_diff *diff, enum ka_describe how, struct ka_buf *out)
{
    bool relative = diff->reason != KA_DIFF_NOT_ZERO && !diff->mask_differs;
    if (relative)
        ka_buf_printf(out, " Norm-relative error %.3g, allowed %.3g (eager PyTorch: %.3g).", diff->error,
                      diff->limit, diff->base_error);
    if (diff->reason == KA_DIFF_PART)
        describe_part(diff, how, out);
    if (how != KA_DESCRIBE_FULL || diff->reason == KA_DIFF_PART)
        return;
    ka_buf_printf(out, " %zu of %zu elements are off (%.3g%%).", diff->off, diff->count,
                  100.0 * (double)diff->off / (double)diff->count);
    describe_worst(diff, out);
}

static void describe_reason(const struct ka_diff *diff, const char *name, enum ka_describe how,
                            struct ka_buf *out)
{
    static const char *const words[] = {
        [KA_DIFF_OK] = "is right.",
        [KA_DIFF_MISSING] = "was not returned.",
        [KA_DIFF_NONFINITE] = "is not finite in the same places as the expected value.",
        [KA_DIFF_NOT_ZERO] = "must be zero everywhere, and is not.",
        [KA_DIFF_ZERO] = "is zero everywhere, and must not be.",
        [KA_DIFF_NORM] = "is wrong.",
        [KA_DIFF_ELEMENTS] = "is close on the whole, but single elements are wrong.",
        [KA_DIFF_PART] = "is close on the whole, but wrong in some places.",
    };
    if (diff->reason == KA_DIFF_SHAPE)
        describe_shape(diff, name, how, out);
    else if (diff->reason == KA_DIFF_DTYPE)
        ka_buf_printf(out, "%s has dtype %s, expected %s.", name, ka_dtype_name(diff->got_dtype),
                      ka_dtype_name(diff->dtype));
    else
        ka_buf_printf(out, "%s %s", name, words[diff->reason]);
}

int ka_diff_describe(const struct ka_diff *diff, const char *name, enum ka_describe how, struct ka_buf *out)
{
    describe_reason(diff, name, how, out);
    if (diff->reason <= KA_DIFF_DTYPE) /* right, or nothing was compared */
        return out->failed;
    describe_numbers(diff, how, out);
    for (size_t i = 0; i < diff->pattern_count; i++) {
        ka_buf_puts(out, " ");
        describe_value(diff, &diff->patterns[i], how, out);
        describe_place(&diff->patterns[i], how, out);
    }
    return out->failed;
}

/* ---- JSON ---- */

/* JSON has no NaN or infinity; those become text. */
static json_t *number(double value)
{
    if (isfinite(value))
        return json_real(value);
    return json_string(isnan(value) ? "nan" : value < 0 ? "-inf" : "inf");
}

static json_t *size_list(const size_t *sizes, size_t n)
{
    json_t *list = json_array();
    for (size_t i = 0; i < n; i++)
        json_array_append_new(list, json_integer((json_int_t)sizes[i]));
    return list;
}

static json_t *pattern_json(const struct ka_pattern *p)
{
    json_t *o = json_pack("{s:s}", "kind", KINDS[p->kind]);
    if (o && p->axis >= 0)
        json_object_update_new(o, json_pack("{s:i,s:I,s:I,s:I}", "axis", p->axis, "from", (json_int_t)p->from,
                                            "to", (json_int_t)p->to, "indices", (json_int_t)p->hits));
    if (o && p->tile)
        json_object_set_new(o, "tile", json_integer((json_int_t)p->tile));
    if (o && p->value != 0)
        json_object_set_new(o, "value", number(p->value));
    if (o && p->other[0])
        json_object_set_new(o, "other", json_string(p->other));
    return o;
}

static json_t *part_json(const struct ka_diff *diff)
{
    static const char *const kinds[] = {
        [KA_PART_ELEMENT] = "element", [KA_PART_BLOCK] = "block", [KA_PART_ROW] = "row"};
    const struct ka_part *part = &diff->part;
    if (part->kind == KA_PART_NONE)
        return json_null();
    return json_pack("{s:s,s:I,s:I,s:b,s:o,s:o,s:I}", "kind", kinds[part->kind], "first",
                     (json_int_t)part->first, "elements", (json_int_t)part->count, "relative", part->relative,
                     "error", number(part->error), "limit", number(part->limit), "parts",
                     (json_int_t)diff->parts_off);
}

json_t *ka_diff_json(const struct ka_diff *diff)
{
    json_t *patterns = json_array();
    for (size_t i = 0; i < diff->pattern_count; i++)
        json_array_append_new(patterns, pattern_json(&diff->patterns[i]));
    return json_pack("{s:b,s:b,s:s,s:o,s:o,s:o,s:o,s:I,s:I,s:I,s:I,s:o,s:o,s:o,s:o}", "pass", diff->pass,
                     "vacuous", diff->vacuous, "reason", REASONS[diff->reason], "shape",
                     size_list(diff->dims, diff->rank), "error", number(diff->error), "baseline_error",
                     number(diff->base_error), "limit", number(diff->limit), "elements",
                     (json_int_t)diff->count, "off", (json_int_t)diff->off, "baseline_off",
                     (json_int_t)diff->base_off, "worst_index", (json_int_t)diff->worst, "worst_found",
                     number(diff->worst_got), "worst_expected", number(diff->worst_want), "part",
                     part_json(diff), "patterns", patterns);
}
