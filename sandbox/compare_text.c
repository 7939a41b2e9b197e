/* The wording of a difference: for the LLM, for reports, and as JSON. Computes nothing. */
#include <errno.h>
#include <math.h>
#include <string.h>

#include "compare_internal.h"

static const char *const REASONS[] = {
    [KA_DIFF_OK] = "ok",       [KA_DIFF_MISSING] = "missing",     [KA_DIFF_SHAPE] = "shape",
    [KA_DIFF_DTYPE] = "dtype", [KA_DIFF_NONFINITE] = "nonfinite", [KA_DIFF_NOT_ZERO] = "not_zero",
    [KA_DIFF_ZERO] = "zero",   [KA_DIFF_NORM] = "norm",           [KA_DIFF_ELEMENTS] = "elements",
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

/* Every usual meaning of a constant factor; sizes of axes are named only for shapes that may be shown. */
static int describe_factor(const struct ka_diff *diff, double value, enum ka_describe how, struct ka_buf *out)
{
    int rc = 0;
    bool said = false;
    for (size_t i = 0; i < KA_COUNT(FACTORS) && rc == 0; i++) {
        if (fabs(value / FACTORS[i].value - 1) >= 1e-3)
            continue;
        rc = ka_buf_printf(out, "%s%s", said ? "; or " : " (", FACTORS[i].text);
        said = true;
    }
    for (size_t at = 0; at < diff->rank && how == KA_DESCRIBE_FULL && rc == 0; at++) {
        double n = (double)diff->dims[at];
        const struct hint sizes[] = {{n, "the size"},
                                     {1 / n, "1 / the size"},
                                     {sqrt(n), "the root of the size"},
                                     {1 / sqrt(n), "1 / the root of the size"}};
        for (size_t i = 0; i < KA_COUNT(sizes) && diff->dims[at] > 1 && rc == 0; i++) {
            if (fabs(value / sizes[i].value - 1) >= 1e-3)
                continue;
            rc = ka_buf_printf(out, "%s%s of axis %zu: a mean or a scale", said ? "; or " : " (",
                               sizes[i].text, at);
            said = true;
        }
    }
    return rc || !said ? rc : ka_buf_puts(out, ")");
}

/* Nothing simpler explains it: how near the whole is. */
static int describe_correlation(double cosine, struct ka_buf *out)
{
    if (cosine > 0.5)
        return ka_buf_printf(
            out,
            "It points mostly the right way (cosine %.2f with the expected values): a term, or the part of "
            "some programs or loop steps, is missing or wrong.",
            cosine);
    if (cosine < -0.5)
        return ka_buf_printf(
            out, "It points mostly the opposite way (cosine %.2f): look at the signs of the terms.", cosine);
    return ka_buf_printf(out,
                         "It has little to do with the expected values (cosine %.2f): the formula, an index, "
                         "a stride or the upstream "
                         "gradient is wrong.",
                         cosine);
}

static int describe_value(const struct ka_diff *diff, const struct ka_pattern *p, enum ka_describe how,
                          struct ka_buf *out)
{
    bool full = how == KA_DESCRIBE_FULL;
    int rc;
    switch ((int)p->kind) {
    case KA_PATTERN_FACTOR:
        rc = full ? ka_buf_printf(out, "It equals %.6g times the expected values", p->value)
                  : ka_buf_puts(out, "It equals a constant times the expected values");
        if (rc == 0)
            rc = describe_factor(diff, p->value, how, out);
        return rc ? rc : ka_buf_puts(out, ".");
    case KA_PATTERN_SIGN:
        return ka_buf_puts(out, "Its sign is flipped: every value is the negative of the expected one.");
    case KA_PATTERN_TRANSPOSED:
        return ka_buf_puts(out,
                           "It is transposed: its last two axes are exchanged (strides or indices swapped).");
    case KA_PATTERN_OTHER:
        return ka_buf_printf(
            out, "It equals the expected value of %s: the two are swapped or stored to the wrong buffer.",
            p->other);
    case KA_PATTERN_SHIFTED:
        return ka_buf_printf(
            out, "It is shifted by one along axis %d: the expected value of index i is found at i %c 1.",
            p->axis, p->value < 0 ? '-' : '+');
    case KA_PATTERN_SAME_ALONG:
        return ka_buf_printf(
            out,
            "The error does not vary along axis %d: a term that is reduced or broadcast over this axis "
            "is missing or counted twice.",
            p->axis);
    case KA_PATTERN_ROUNDING:
        return ka_buf_puts(
            out, "It is a little off everywhere: this looks like rounding (accumulate in float32, do not "
                 "store partial sums in a narrow dtype), or like a small missing term.");
    case KA_PATTERN_LINES:
        return ka_buf_printf(
            out,
            "Along axis %d every index is right up to a factor of its own: what multiplies that row "
            "(the upstream gradient, a statistic, a scale) is wrong.",
            p->axis);
    case KA_PATTERN_SIGNS:
        rc = ka_buf_puts(out, "All magnitudes are right, but signs are wrong");
        if (rc == 0 && full)
            rc = ka_buf_printf(out, " in %zu elements", p->hits);
        return rc ? rc : ka_buf_puts(out, ": an absolute value, a square or a comparison loses the sign.");
    case KA_PATTERN_CORRELATION:
        return describe_correlation(p->value, out);
    }
    return 0;
}

static int describe_place(const struct ka_pattern *p, enum ka_describe how, struct ka_buf *out)
{
    bool full = how == KA_DESCRIBE_FULL;
    int rc;
    switch ((int)p->kind) {
    case KA_PATTERN_ZERO_SLICES:
        rc = ka_buf_printf(out, "Along axis %d, whole slices are zero that should not be", p->axis);
        if (rc == 0 && full)
            rc = ka_buf_printf(out, ": %zu of %zu indices, from %zu to %zu", p->hits, p->dim, p->from, p->to);
        return rc ? rc : ka_buf_puts(out, " (never written, or masked away).");
    case KA_PATTERN_LAST_TILE:
        if (!full)
            return ka_buf_printf(out, "Only the end of axis %d is wrong: its last tile (loop bound or mask).",
                                 p->axis);
        return ka_buf_printf(
            out,
            "Only indices %zu to %zu of axis %d (size %zu) are wrong: the last%s tile if tiles "
            "have %zu (loop bound or mask).",
            p->from, p->to, p->axis, p->dim, p->dim % p->tile ? ", partial," : "", p->tile);
    case KA_PATTERN_FIRST_TILE:
        if (!full)
            return ka_buf_printf(
                out, "Along axis %d only the first tile is right (loop or grid covers one tile).", p->axis);
        return ka_buf_printf(
            out,
            "Along axis %d only the first tile (indices 0 to %zu of %zu) is right: the loop or the "
            "grid covers one tile, or its pointers do not advance.",
            p->axis, p->tile - 1, p->dim);
    case KA_PATTERN_RANGE:
        if (!full)
            return ka_buf_printf(out, "Only a part of axis %d is wrong.", p->axis);
        return ka_buf_printf(out, "Only indices %zu to %zu of axis %d (size %zu) hold wrong elements.",
                             p->from, p->to, p->axis, p->dim);
    case KA_PATTERN_NONFINITE:
        rc = ka_buf_puts(out, "NaN or infinity is where it should not be, or missing where it should be");
        if (rc == 0 && p->axis >= 0)
            rc = full ? ka_buf_printf(out, ": only on indices %zu to %zu of axis %d (size %zu)", p->from,
                                      p->to, p->axis, p->dim)
                      : ka_buf_printf(out, ": only on a part of axis %d", p->axis);
        return rc ? rc : ka_buf_puts(out, ".");
    }
    return 0;
}

/* ---- the whole difference ---- */

static int shape_text(const size_t *dims, size_t rank, struct ka_buf *out)
{
    struct ka_tensor shape = {.rank = rank};
    memcpy(shape.dims, dims, sizeof(shape.dims));
    return ka_tensor_shape_text(&shape, out);
}

static int describe_shape(const struct ka_diff *diff, const char *name, enum ka_describe how,
                          struct ka_buf *out)
{
    if (how == KA_DESCRIBE_HIDDEN)
        return ka_buf_printf(out, "%s has the wrong shape; it must have that of its input.", name);
    int rc = ka_buf_printf(out, "%s has shape ", name);
    if (rc == 0)
        rc = shape_text(diff->got_dims, diff->got_rank, out);
    if (rc == 0)
        rc = ka_buf_puts(out, ", expected ");
    if (rc == 0)
        rc = shape_text(diff->dims, diff->rank, out);
    return rc ? rc : ka_buf_puts(out, ".");
}

static int describe_worst(const struct ka_diff *diff, struct ka_buf *out)
{
    struct ka_tensor at = {.rank = diff->rank};
    size_t rest = diff->worst;
    for (size_t i = diff->rank; i-- > 0;) {
        at.dims[i] = rest % diff->dims[i];
        rest /= diff->dims[i];
    }
    int rc = ka_buf_puts(out, diff->mask_differs ? " First at index " : " Worst at index ");
    if (rc == 0)
        rc = ka_tensor_shape_text(&at, out);
    return rc ? rc : ka_buf_printf(out, ": found %.6g, expected %.6g.", diff->worst_got, diff->worst_want);
}

static int describe_numbers(const struct ka_diff *diff, enum ka_describe how, struct ka_buf *out)
{
    bool relative = diff->reason != KA_DIFF_NOT_ZERO && !diff->mask_differs;
    int rc = 0;
    if (relative)
        rc = ka_buf_printf(out, " Norm-relative error %.3g, allowed %.3g (eager PyTorch: %.3g).", diff->error,
                           diff->limit, diff->base_error);
    if (rc == 0 && how == KA_DESCRIBE_FULL)
        rc = ka_buf_printf(out, " %zu of %zu elements are off (%.3g%%).", diff->off, diff->count,
                           100.0 * (double)diff->off / (double)diff->count);
    return rc || how != KA_DESCRIBE_FULL ? rc : describe_worst(diff, out);
}

static int describe_reason(const struct ka_diff *diff, const char *name, enum ka_describe how,
                           struct ka_buf *out)
{
    switch (diff->reason) {
    case KA_DIFF_OK:
        return ka_buf_printf(out, "%s is right.", name);
    case KA_DIFF_MISSING:
        return ka_buf_printf(out, "%s was not returned.", name);
    case KA_DIFF_SHAPE:
        return describe_shape(diff, name, how, out);
    case KA_DIFF_DTYPE:
        return ka_buf_printf(out, "%s has dtype %s, expected %s.", name, ka_dtype_name(diff->got_dtype),
                             ka_dtype_name(diff->dtype));
    case KA_DIFF_NONFINITE:
        return ka_buf_printf(out, "%s is not finite in the same places as the expected value.", name);
    case KA_DIFF_NOT_ZERO:
        return ka_buf_printf(out, "%s must be zero everywhere, and is not.", name);
    case KA_DIFF_ZERO:
        return ka_buf_printf(out, "%s is zero everywhere, and must not be.", name);
    case KA_DIFF_NORM:
        return ka_buf_printf(out, "%s is wrong.", name);
    case KA_DIFF_ELEMENTS:
        return ka_buf_printf(out, "%s is close on the whole, but single elements are wrong.", name);
    }
    return 0;
}

int ka_diff_describe(const struct ka_diff *diff, const char *name, enum ka_describe how, struct ka_buf *out)
{
    int rc = describe_reason(diff, name, how, out);
    if (diff->reason <= KA_DIFF_DTYPE) /* right, or nothing was compared */
        return rc;
    if (rc == 0)
        rc = describe_numbers(diff, how, out);
    for (size_t i = 0; i < diff->pattern_count && rc == 0; i++) {
        rc = ka_buf_puts(out, " ");
        if (rc == 0)
            rc = describe_value(diff, &diff->patterns[i], how, out);
        if (rc == 0)
            rc = describe_place(&diff->patterns[i], how, out);
    }
    return rc;
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

json_t *ka_diff_json(const struct ka_diff *diff)
{
    json_t *patterns = json_array();
    for (size_t i = 0; i < diff->pattern_count; i++)
        json_array_append_new(patterns, pattern_json(&diff->patterns[i]));
    return json_pack(
        "{s:b,s:b,s:s,s:o,s:o,s:o,s:o,s:I,s:I,s:I,s:I,s:o,s:o,s:o}", "pass", diff->pass, "vacuous",
        diff->vacuous, "reason", REASONS[diff->reason], "shape", size_list(diff->dims, diff->rank), "error",
        number(diff->error), "baseline_error", number(diff->base_error), "limit", number(diff->limit),
        "elements", (json_int_t)diff->count, "off", (json_int_t)diff->off, "baseline_off",
        (json_int_t)diff->base_off, "worst_index", (json_int_t)diff->worst, "worst_found",
        number(diff->worst_got), "worst_expected", number(diff->worst_want), "patterns", patterns);
}
