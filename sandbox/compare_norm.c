/* Norms of differences and of other combinations of tensors, block by block. Knows no rule. */
#include <math.h>
#include <string.h>

#include "base/threads.h"
#include "compare_internal.h"

#define LARGE                                                                                                \
    ((size_t)1 << 20) /* elements: a few milliseconds of work, against tens of microseconds for a thread */
#define PART_MIN ((size_t)256 << 10) /* elements of one part */

size_t ka_parts_of(size_t count)
{
    if (count < LARGE)
        return 1;
    size_t parts = ka_threads_usable(), most = count / PART_MIN;
    parts = parts < most ? parts : most;
    return parts < KA_THREADS_MAX ? parts : KA_THREADS_MAX;
}

struct work {
    const struct ka_term *terms;
    size_t count, parts, elements;
    double squares[KA_THREADS_MAX], most[KA_THREADS_MAX];
};

/* sum += factor * values; n is a multiple of LANES. */
KA_CLONES
static void add_scaled(double *sum, double factor, const double *values, size_t n)
{
    for (size_t i = 0; i < n; i++)
        sum[i] += factor * values[i];
}

KA_CLONES
static void fold(const double *values, size_t n, double *squares, double *most)
{
    lanes sum = {0}, top = {0};
    for (size_t i = 0; i < n; i += LANES) {
        lanes v;
        LOAD(v, values + i);
        sum += v * v;
        v = SIZE(v);
        RAISE(top, v);
    }
    for (size_t k = 0; k < LANES; k++) {
        *squares += sum[k];
        *most = top[k] > *most ? top[k] : *most;
    }
}

static void fold_part(void *arg, size_t part)
{
    struct work *work = arg;
    double sum[BLOCK], values[BLOCK], squares = 0, most = 0;
    size_t blocks = work->elements / BLOCK + (work->elements % BLOCK != 0);
    for (size_t b = blocks * part / work->parts; b < blocks * (part + 1) / work->parts; b++) {
        size_t left = work->elements - b * BLOCK, n = left < BLOCK ? left : BLOCK;
        size_t padded = (n + LANES - 1) / LANES * LANES;
        memset(sum, 0, padded * sizeof(*sum));
        memset(values + n, 0, (padded - n) * sizeof(*values));
        for (size_t t = 0; t < work->count; t++) {
            ka_tensor_load(work->terms[t].tensor, b * BLOCK, n, values);
            add_scaled(sum, work->terms[t].factor, values, padded);
        }
        fold(sum, padded, &squares, &most);
    }
    work->squares[part] = squares;
    work->most[part] = most;
}

double ka_norm_of(const struct ka_term *terms, size_t count, double *most)
{
    struct work work = {.terms = terms, .count = count, .elements = terms[0].tensor->count};
    double squares = 0, top = 0;
    work.parts = ka_parts_of(work.elements);
    ka_threads_run(work.parts, fold_part, &work);
    for (size_t i = 0; i < work.parts; i++) {
        squares += work.squares[i];
        top = fmax(top, work.most[i]);
    }
    if (most)
        *most = top;
    return sqrt(squares);
}
