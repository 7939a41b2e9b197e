/* The modelled cost. Pure; see rank.h for the model. */
#include "rank.h"

#include <math.h>

#define ATOMIC_BYTES 32.0
#define SPILL_BYTES 8.0
#define LAUNCH_BYTES 4096.0

static double number(const json_t *object, const char *name)
{
    double value = json_number_value(json_object_get(object, name));
    return isfinite(value) && value > 0 ? value : 0;
}

/* Spilled bytes of one thread, times the threads of a program, averaged over the kernels; NAN if one did not compile. */
static double spilled_per_program(const json_t *kernels)
{
    double sum = 0;
    size_t i;
    json_t *kernel;
    json_array_foreach((json_t *)kernels, i, kernel)
    {
        if (json_is_false(json_object_get(kernel, "ok")))
            return NAN;
        double warps = number(kernel, "num_warps");
        sum += number(kernel, "spills") * 32.0 * (warps > 0 ? warps : 4);
    }
    return json_array_size(kernels) ? sum / (double)json_array_size(kernels) : 0;
}

double ka_rank_cost(const json_t *facts)
{
    double log_sum = 0;
    size_t count = 0, i;
    json_t *entry;
    json_array_foreach(json_object_get(facts, "cases"), i, entry)
    {
        const json_t *backward = json_object_get(entry, "backward");
        if (!json_is_object(backward))
            continue;
        double cost = number(backward, "bytes_read") + number(backward, "bytes_written") +
                      ATOMIC_BYTES * number(backward, "atomics") +
                      LAUNCH_BYTES * number(backward, "launches") +
                      SPILL_BYTES * number(backward, "programs") *
                          spilled_per_program(json_object_get(entry, "kernels"));
        if (isnan(cost))
            return INFINITY;
        log_sum += log(cost + 1);
        count++;
    }
    return count ? exp(log_sum / (double)count) : INFINITY;
}
