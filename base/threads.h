/* Work split over threads, which are gone when the call returns. */
#ifndef KA_THREADS_H
#define KA_THREADS_H

#include <stddef.h>

#define KA_THREADS_MAX 16 /* of one call, the caller's among them */

/* Processors that this process may use, by its affinity and its control group; at least 1. */
size_t ka_threads_usable(void);

/* Call work(arg, i) once for every i < count, the first ones first, on as many threads as there are usable
 * processors, KA_THREADS_MAX at most; returns when all have returned. Where a thread cannot be had the others
 * do its part. */
void ka_threads_run(size_t count, void (*work)(void *arg, size_t i), void *arg);

#endif
