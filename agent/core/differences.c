/* Slopes into a judgement. Knows no tensor and no shape; see differences.h. */
#include "differences.h"

#include "base/each.h"
#include "fields.h"

#include <errno.h>
#include <math.h>
#include <string.h>

#define OPEN 0.02      /* a slope less certain than this, of its size, tells nothing */
#define TOLERANCE 0.01 /* of its size, beside what is uncertain */
#define UNSURE 3       /* times the uncertainty, which is an estimate */
#define SLOPES_MAX 64

enum slope { SLOPE_OPEN, SLOPE_AGREES, SLOPE_DISAGREES };

struct worst {
    double analytic, numeric, unsure, gap;
};

/* NaN for what is missing: every comparison with it fails. */
static enum slope judge_slope(const json_t *slope, struct worst *worst)
{
    double analytic = ka_number_of(slope, "analytic", NAN), numeric = ka_number_of(slope, "numeric", NAN);
    double unsure = ka_number_of(slope, "noise", NAN) + ka_number_of(slope, "spread", NAN);
    double size = fmax(fabs(analytic), fabs(numeric)), gap = fabs(analytic - numeric);
    if (!isfinite(analytic) || !isfinite(numeric) || !(unsure >= 0 && unsure <= OPEN * size))
        return SLOPE_OPEN;
    if (gap <= TOLERANCE * size + UNSURE * unsure)
        return SLOPE_AGREES;
    if (gap > worst->gap)
        *worst = (struct worst){analytic, numeric, unsure, gap};
    return SLOPE_DISAGREES;
}

static int judge_input(const json_t *slopes, const char *name, struct ka_differences *out, struct ka_err *err)
{
    size_t counts[] = {[SLOPE_OPEN] = 0, [SLOPE_AGREES] = 0, [SLOPE_DISAGREES] = 0};
    struct worst worst = {.gap = -1};
    size_t count = json_array_size(slopes), i;
    for (i = 0; i < count && i < SLOPES_MAX; i++)
        counts[judge_slope(json_array_get(slopes, i), &worst)]++;
    if (count == 0)
        counts[SLOPE_OPEN]++;
    out->open += counts[SLOPE_OPEN];
    out->agree += counts[SLOPE_AGREES];
    out->disagree += counts[SLOPE_DISAGREES];
    size_t against = counts[SLOPE_DISAGREES];
    if (against == 0 || (against == 1 && counts[SLOPE_AGREES] > 0))
        return 0;
    return ka_fail(
        err, -EDOM,
        "the oracle's gradient of %.100s and finite differences of the Triton forward disagree: along a "
        "random "
        "direction the gradient gives %.6g, the forward's own slope is %.6g (certain to %.1g); %zu of %zu "
        "directions disagree",
        name, worst.analytic, worst.numeric, worst.unsure, against, i);
}

int ka_differences_judge(const json_t *fd, const json_t *grads, struct ka_differences *out,
                         struct ka_err *err)
{
    const json_t *slopes = json_object_get(fd, "slopes");
    int rc = 0;
    memset(out, 0, sizeof(*out));
    KA_EACH(grads, i, name) {
        const char *input = json_string_value(name);
        if (!input)
            continue;
        struct ka_err why;
        int one = judge_input(json_object_get(slopes, input), input, out, &why);
        if (one && rc == 0)
            rc = ka_fail(err, one, "%s", why.msg);
    }
    return rc;
}

void ka_differences_add(json_t *fd, const json_t *earlier)
{
    json_t *slopes = json_object_get(fd, "slopes");
    KA_EACH_MEMBER(json_object_get(earlier, "slopes"), name, more)
        json_array_extend(json_object_get(slopes, name), more);
}
