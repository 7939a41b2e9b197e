/* Order statistics of small samples. Knows nothing of what was timed. */
#include "times.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>

#include "base/each.h"

#define CONFIDENCE 0.95

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* How many samples may be left out at each end, so that the rest still holds the median. */
static size_t outside(size_t n)
{
    double chance = exp2(-(double)n), tail = 0.0; /* of k samples below the median, and of at most k */
    size_t k = 0;
    for (;; k++) {
        tail += chance;
        if (2.0 * tail > 1.0 - CONFIDENCE || k + 1 > n / 2)
            return k ? k - 1 : 0;
        chance *= (double)(n - k) / (double)(k + 1);
    }
}

int ka_times_of(const json_t *samples, struct ka_times *out)
{
    size_t n = json_array_size(samples);
    if (!n)
        return -EINVAL;
    KA_AUTO_FREE double *sorted = ka_calloc(n, sizeof(*sorted));
    KA_EACH(samples, i, item) {
        sorted[i] = json_is_number(item) ? json_number_value(item) : NAN;
        if (!isfinite(sorted[i]) || sorted[i] <= 0.0)
            return -EINVAL;
    }
    qsort(sorted, n, sizeof(*sorted), ascending);
    size_t out_of = outside(n);
    *out = (struct ka_times){.median = sorted[(n - 1) / 2] / 2 + sorted[n / 2] / 2,
                             .low = sorted[out_of],
                             .high = sorted[n - 1 - out_of],
                             .count = n};
    return 0;
}

bool ka_times_faster(const struct ka_times *a, const struct ka_times *b, double min_rel)
{
    return a->median < b->median * (1.0 - min_rel) && a->high < b->low;
}
