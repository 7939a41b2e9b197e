/* Work on large tensors split over threads. Keeps nothing: the threads live as long as the call. */
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>

#include "compare_internal.h"

#define LARGE                                                                                                \
    ((size_t)1 << 20) /* elements: a few milliseconds of work, against tens of microseconds for a thread */
#define PART_MIN ((size_t)256 << 10) /* elements of one part */

/* Whole processors that the control group of this process may use; 0: no limit is known. */
static size_t quota(void)
{
    static const char *const files[] = {"/sys/fs/cgroup/cpu.max", "/sys/fs/cgroup/cpu/cpu.cfs_quota_us"};
    double share = 0;
    for (size_t i = 0; i < KA_COUNT(files) && share == 0; i++) {
        FILE *file = fopen(files[i], "re");
        double used = 0, period = 100000; /* the default, which the older file does not repeat */
        if (file && fscanf(file, "%lf %lf", &used, &period) >= 1 && used > 0 && period > 0)
            share = used / period;
        if (file)
            fclose(file);
    }
    return share > 0 && share < 1 ? 1 : (size_t)share;
}

static size_t processors(void)
{
    cpu_set_t set;
    size_t usable = sched_getaffinity(0, sizeof(set), &set) == 0 ? (size_t)CPU_COUNT(&set) : 1;
    size_t allowed = quota();
    return allowed && allowed < usable ? allowed : usable;
}

size_t ka_parts_of(size_t count)
{
    if (count < LARGE)
        return 1;
    size_t parts = processors(), most = count / PART_MIN;
    parts = parts < most ? parts : most;
    return parts < 1 ? 1 : parts < KA_PARTS_MAX ? parts : KA_PARTS_MAX;
}

struct job {
    void (*work)(void *arg, size_t part);
    void *arg;
    size_t part;
};

static void *run(void *arg)
{
    const struct job *job = arg;
    job->work(job->arg, job->part);
    return NULL;
}

void ka_parts_run(size_t parts, void (*work)(void *arg, size_t part), void *arg)
{
    pthread_t threads[KA_PARTS_MAX];
    struct job jobs[KA_PARTS_MAX];
    bool started[KA_PARTS_MAX] = {false};
    for (size_t i = 1; i < parts; i++) {
        jobs[i] = (struct job){work, arg, i};
        started[i] = pthread_create(&threads[i], NULL, run, &jobs[i]) == 0;
    }
    work(arg, 0);
    for (size_t i = 1; i < parts; i++) {
        if (started[i])
            pthread_join(threads[i], NULL);
        else
            work(arg, i);
    }
}
