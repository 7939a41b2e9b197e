/* Robust statistics. Must not know what the numbers measure. */
#include "stats.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

/* A sorted copy; free() it. */
static int sorted_copy(const double *values, size_t count, double **sorted)
{
    if (!count)
        return -ENODATA;
    if (count > KA_STATS_MAX_COUNT)
        return -EFBIG;
    for (size_t i = 0; i < count; i++) {
        if (!isfinite(values[i]))
            return -EINVAL;
    }
    *sorted = ka_calloc(count, sizeof(**sorted));
    memcpy(*sorted, values, count * sizeof(**sorted));
    qsort(*sorted, count, sizeof(**sorted), ascending);
    return 0;
}

static double middle(const double *sorted, size_t count)
{
    double upper = sorted[count / 2];
    return count % 2 ? upper : sorted[count / 2 - 1] / 2 + upper / 2;
}

int ka_stats_median(const double *values, size_t count, double *median)
{
    double *sorted;
    int rc = sorted_copy(values, count, &sorted);
    if (rc)
        return rc;
    *median = middle(sorted, count);
    free(sorted);
    return 0;
}

int ka_stats_median_interval(const double *values, size_t count, double confidence, double *low, double *high)
{
    if (!(confidence > 0 && confidence < 1))
        return -EINVAL;
    double *sorted;
    int rc = sorted_copy(values, count, &sorted);
    if (rc)
        return rc;
    /* [sorted[k], sorted[count-1-k]] misses the median with probability 2*P(B <= k), B ~ binomial(count,
     * 1/2): take the largest k for which that stays within 1 - confidence. Terms in logarithms, as 2^-count
     * underflows. */
    double tail = 0, log_choose = 0, spare = (1 - confidence) / 2 * (1 + 1e-12);
    size_t k = 0;
    for (; k < count; k++) {
        tail += exp(log_choose - (double)count * log(2));
        if (tail > spare)
            break;
        log_choose += log((double)(count - k)) - log((double)(k + 1));
    }
    if (k == 0) {
        rc = -ERANGE;
    } else {
        *low = sorted[k - 1];
        *high = sorted[count - k];
    }
    free(sorted);
    return rc;
}

int ka_stats_geomean(const double *values, size_t count, double *mean)
{
    if (!count)
        return -ENODATA;
    double sum = 0;
    for (size_t i = 0; i < count; i++) {
        if (!isfinite(values[i]) || values[i] <= 0)
            return -EINVAL;
        sum += log(values[i]);
    }
    *mean = exp(sum / (double)count);
    return 0;
}

int ka_stats_noise(const double *values, size_t count, double *noise)
{
    double *sorted;
    int rc = sorted_copy(values, count, &sorted);
    if (rc)
        return rc;
    double median = middle(sorted, count);
    for (size_t i = 0; i < count; i++)
        sorted[i] = fabs(sorted[i] - median);
    qsort(sorted, count, sizeof(*sorted), ascending);
    if (median == 0 && count > 1)
        rc = -ERANGE;
    else
        *noise = count > 1 ? 1.4826 * middle(sorted, count) / fabs(median) : 0;
    free(sorted);
    return rc;
}
