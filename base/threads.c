#include "threads.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>

#include "base.h"

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

size_t ka_threads_usable(void)
{
    cpu_set_t set;
    size_t usable = sched_getaffinity(0, sizeof(set), &set) == 0 ? (size_t)CPU_COUNT(&set) : 1;
    size_t allowed = quota();
    return allowed && allowed < usable ? allowed : usable;
}

struct job {
    void (*work)(void *arg, size_t i);
    void *arg;
    size_t count;
    atomic_size_t next;
};

static void *run(void *arg)
{
    struct job *job = arg;
    size_t i;
    while ((i = atomic_fetch_add(&job->next, 1)) < job->count)
        job->work(job->arg, i);
    return NULL;
}

void ka_threads_run(size_t count, void (*work)(void *arg, size_t i), void *arg)
{
    struct job job = {.work = work, .arg = arg, .count = count};
    pthread_t threads[KA_THREADS_MAX];
    size_t most = count > 1 ? ka_threads_usable() : 1, started = 0;
    most = most < count ? most : count;
    most = most < KA_THREADS_MAX ? most : KA_THREADS_MAX;
    while (started + 1 < most && pthread_create(&threads[started], NULL, run, &job) == 0)
        started++;
    run(&job);
    while (started)
        pthread_join(threads[--started], NULL);
}
