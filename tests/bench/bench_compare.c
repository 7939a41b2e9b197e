/* How fast tensors are compared, against a loop that only reads the same bytes.
 *
 *     bench_compare [ELEMENTS [DTYPE]]    default 8,388,608 of F32, which also fixes the dtype of the
 * baseline
 *
 * One JSON object on stdout: nanoseconds an element of the least disturbed of several calls: processor time
 * on one processor, of the reading loop too, and time on the wall on all of them. */
#include <math.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "sandbox/compare.h"

#define CALLS 7

struct subject {
    struct ka_tensor got, want, base;
    uint64_t sum; /* so that the reading loop is not left out */
};

static double now(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static double best_of(void (*work)(struct subject *), struct subject *s, clockid_t clock)
{
    double best = INFINITY;
    for (int i = 0; i < CALLS; i++) {
        double start = now(clock);
        work(s);
        best = fmin(best, now(clock) - start);
    }
    return best / (double)s->want.count;
}

static void compare(struct subject *s)
{
    struct ka_tolerance tol = ka_tolerance_of(s->got.dtype);
    struct ka_diff diff;
    if (ka_compare(&s->got, &s->want, &s->base, &tol, NULL, 0, &diff, NULL) || !diff.pass) {
        fputs("the comparison of equal tensors fails\n", stderr);
        exit(1);
    }
}

static void read_all(struct subject *s)
{
    const struct ka_tensor *all[] = {&s->got, &s->want, &s->base};
    for (size_t k = 0; k < KA_COUNT(all); k++) {
        size_t words = all[k]->count * ka_dtype_size(all[k]->dtype) / 8;
        for (size_t i = 0; i < words; i++) {
            uint64_t word;
            memcpy(&word, all[k]->data + 8 * i, 8);
            s->sum += word;
        }
    }
}

/* Values of about 1, a few distinct ones, that every dtype has. */
static void fill(struct ka_tensor *t, enum ka_dtype dtype, size_t count)
{
    unsigned char *data = malloc(count * ka_dtype_size(dtype));
    if (!data)
        exit(1);
    for (size_t i = 0; i < count; i++) {
        double value = (double)(i % 61) / 8 - 3;
        float narrow = (float)value;
        uint32_t bits;
        memcpy(&bits, &narrow, 4);
        uint16_t brain = (uint16_t)(bits >> 16);
        uint16_t half = (uint16_t)(value == 0 ? 0 : bits >> 16 & 0x8000) |
                        (uint16_t)(value == 0 ? 0 : (bits >> 13 & 0x3ff) | ((bits >> 23 & 255) - 112) << 10);
        const void *from = dtype == KA_F64   ? (const void *)&value
                           : dtype == KA_F32 ? (const void *)&narrow
                           : dtype == KA_F16 ? (const void *)&half
                                             : (const void *)&brain;
        memcpy(data + i * ka_dtype_size(dtype), from, ka_dtype_size(dtype));
    }
    *t = (struct ka_tensor){.dtype = dtype, .rank = 1, .dims = {count}, .count = count, .data = data};
}

int main(int argc, char **argv)
{
    size_t count = argc > 1 ? strtoull(argv[1], NULL, 10) : (size_t)8 << 20;
    enum ka_dtype dtype = KA_F32;
    cpu_set_t one, all;
    struct subject s = {.sum = 0};
    if (count == 0 || (argc > 2 && ka_dtype_parse(argv[2], &dtype)) || dtype > KA_BF16) {
        fputs("bench_compare [ELEMENTS [F64 | F32 | F16 | BF16]]\n", stderr);
        return 2;
    }
    fill(&s.got, dtype, count);
    fill(&s.want, KA_F64, count);
    fill(&s.base, dtype, count);
    double wide = best_of(compare, &s, CLOCK_MONOTONIC);
    CPU_ZERO(&one);
    sched_getaffinity(0, sizeof(all), &all);
    for (int i = 0; i < CPU_SETSIZE && CPU_COUNT(&one) == 0; i++)
        if (CPU_ISSET(i, &all))
            CPU_SET(i, &one);
    sched_setaffinity(0, sizeof(one), &one);
    double narrow = best_of(compare, &s, CLOCK_PROCESS_CPUTIME_ID),
           reading = best_of(read_all, &s, CLOCK_PROCESS_CPUTIME_ID);
    printf("{\"elements\": %zu, \"dtype\": \"%s\", \"ns_per_element\": %.3f, \"ns_all_processors\": %.3f, "
           "\"processors\": %d, \"ns_reading_loop\": %.3f}\n",
           count, ka_dtype_name(dtype), narrow, wide, CPU_COUNT(&all), reading);
    return s.sum == 1;
}
