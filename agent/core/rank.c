/* The modelled cost. Pure; see rank.h for the model. */
#include "rank.h"

#include "base/each.h"
#include "fields.h"

#include <math.h>

#define ATOMIC_BYTES 32.0
#define SPILL_BYTES 8.0
#define LAUNCH_BYTES 4096.0
#define REGISTERS 65536.0     /* of a multiprocessor */
#define SHARED (227 * 1024.0) /* bytes of it that programs can have */
#define PROGRAMS 32.0         /* that it holds at most */
#define WARPS 64.0            /* likewise */
#define ENOUGH_WARPS 16.0
#define SPILLED_MOST 512.0 /* bytes of a thread, which has registers for 1,020 */
#define FEW_PROGRAMS 32.0  /* fewer leave most of a device idle */

static double number(const json_t *object, const char *name)
{
    return fmax(ka_number_of(object, name, 0), 0);
}

/* Spilled bytes of one thread, times the threads of a program, averaged over the kernels; NAN if one did not
 * compile. */
static double spilled_per_program(const json_t *kernels)
{
    double sum = 0;
    KA_EACH(kernels, i, kernel) {
        if (json_is_false(json_object_get(kernel, "ok")))
            return NAN;
        double warps = number(kernel, "num_warps");
        sum += number(kernel, "spills") * 32.0 * (warps > 0 ? warps : 4);
    }
    return json_array_size(kernels) ? sum / (double)json_array_size(kernels) : 0;
}

double ka_rank_programs(const json_t *kernel)
{
    double warps = number(kernel, "num_warps") > 0 ? number(kernel, "num_warps") : 4;
    double registers = number(kernel, "registers") * 32.0 * warps, shared = number(kernel, "shared");
    double programs = fmin(PROGRAMS, floor(WARPS / warps));
    if (registers > 0)
        programs = fmin(programs, floor(REGISTERS / registers));
    if (shared > 0)
        programs = fmin(programs, floor(SHARED / shared));
    return programs;
}

/* How much longer memory takes because too few warps wait for it, averaged over the kernels; 1 with enough of
 * them. */
static double starved(const json_t *kernels)
{
    double sum = 0;
    KA_EACH(kernels, i, kernel) {
        double warps = number(kernel, "num_warps") > 0 ? number(kernel, "num_warps") : 4;
        double programs = ka_rank_programs(kernel);
        sum += programs > 0 ? fmax(1, ENOUGH_WARPS / (programs * warps)) : INFINITY;
    }
    return json_array_size(kernels) ? sum / (double)json_array_size(kernels) : 1;
}

bool ka_rank_gives_up(const json_t *facts, const json_t *other)
{
    const json_t *others = json_object_get(other, "cases");
    KA_EACH(json_object_get(facts, "cases"), i, entry) {
        const json_t *mine = json_object_get(entry, "backward");
        const json_t *theirs = json_object_get(json_array_get(others, i), "backward");
        if (!json_is_object(mine) || !json_is_object(theirs))
            continue;
        bool added = number(mine, "atomics") > 0, other_added = number(theirs, "atomics") > 0;
        if (added && !other_added)
            return true;
        if (added == other_added && number(mine, "widest") < number(theirs, "widest"))
            return true;
    }
    return false;
}

static bool adds(const json_t *facts)
{
    KA_EACH(json_object_get(facts, "cases"), i, entry) {
        if (number(json_object_get(entry, "backward"), "atomics") > 0)
            return true;
    }
    return false;
}

/* The least that a thread of a kernel spills, in bytes, of the sizes that it was compiled for: ragged rows
 * take registers that others do not. INFINITY where it did not compile for one. */
static double least_spilled(const json_t *kernels, const json_t *name)
{
    double least = INFINITY;
    KA_EACH(kernels, i, kernel) {
        if (!json_equal(json_object_get(kernel, "name"), name))
            continue;
        if (json_is_false(json_object_get(kernel, "ok")))
            return INFINITY;
        least = fmin(least, number(kernel, "spills"));
    }
    return least;
}

/* The same of the kernel that spills most. */
static double most_spilled(const json_t *kernels)
{
    double most = 0;
    KA_EACH(kernels, i, kernel)
        most = fmax(most, least_spilled(kernels, json_object_get(kernel, "name")));
    return most;
}

static double most_spilled_anywhere(const json_t *facts)
{
    double most = most_spilled(json_object_get(facts, "kernels"));
    KA_EACH(json_object_get(facts, "cases"), i, entry)
        most = fmax(most, most_spilled(json_object_get(entry, "kernels")));
    return most;
}

bool ka_rank_is_hopeless(const json_t *facts, const json_t *other)
{
    double spilled = most_spilled_anywhere(facts);
    return spilled > SPILLED_MOST && spilled > 2 * most_spilled_anywhere(other);
}

bool ka_rank_ends_parallelism(const json_t *facts, const json_t *other)
{
    double mine = number(facts, "widest"), theirs = number(other, "widest");
    return mine > 0 && mine < theirs && mine < FEW_PROGRAMS && !(adds(other) && !adds(facts));
}

double ka_rank_cost(const json_t *facts)
{
    const json_t *real = json_object_get(facts, "kernels");
    double log_sum = 0;
    size_t count = 0;
    KA_EACH(json_object_get(facts, "cases"), i, entry) {
        const json_t *backward = json_object_get(entry, "backward");
        if (!json_is_object(backward))
            continue;
        const json_t *kernels = json_array_size(real) ? real : json_object_get(entry, "kernels");
        double moved = number(backward, "bytes_read") + number(backward, "bytes_written");
        double cost = moved * starved(kernels) + ATOMIC_BYTES * number(backward, "atomics") +
                      LAUNCH_BYTES * number(backward, "launches") +
                      SPILL_BYTES * number(backward, "programs") * spilled_per_program(kernels);
        if (!isfinite(cost))
            return INFINITY;
        log_sum += log(cost + 1);
        count++;
    }
    return count ? exp(log_sum / (double)count) : INFINITY;
}
