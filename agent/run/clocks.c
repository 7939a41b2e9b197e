/* Readings of nvidia-smi. Knows nothing of what is timed meanwhile. */
#include "clocks.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "agent/io/probe.h"
#include "agent/io/work.h"
#include "base/files.h"

#define EVERY_S 2
#define LIMIT_MS 5000
#define READINGS_MAX 1000
#define ANSWER_MAX 4096

extern char **environ;

struct ka_clocks {
    char *gpu;
    void (*done)(void *arg, json_t *readings);
    void *arg;
    json_t *readings; /* the thread's, until it has ended */
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool stopped;
};

static char *find_program(void)
{
    const char *path = getenv("PATH");
    for (const char *at = path ? path : ""; *at;) {
        size_t len = strcspn(at, ":");
        KA_AUTO_FREE char *folder = ka_strndup(at, len);
        char *program = ka_path_join(folder, "nvidia-smi");
        if (access(program, X_OK) == 0)
            return program;
        free(program);
        at += len + (at[len] == ':');
    }
    return NULL;
}

/* Numbers as numbers, "[N/A]" and other words as null. */
static json_t *reading_of(char *line)
{
    static const char *const names[] = {"sm_mhz", "memory_mhz", "max_sm_mhz", "celsius", "watts", "throttle"};
    json_t *made = json_object();
    char *rest = NULL, *field = strtok_r(line, ",", &rest);
    for (size_t i = 0; i < KA_COUNT(names) && field; i++, field = strtok_r(NULL, ",", &rest)) {
        char *end;
        field += strspn(field, " ");
        double value = strtod(field, &end);
        bool bits = i + 1 == KA_COUNT(names);
        json_object_set_new(made, names[i],
                            bits           ? json_string(field)
                            : end == field ? json_null()
                                           : json_real(value));
    }
    return made;
}

static bool read_with(const char *program, const char *gpu, const char *query, json_t *readings)
{
    KA_AUTO_FREE char *id = ka_format("--id=%s", gpu);
    const char *const argv[] = {program, id, query, "--format=csv,noheader,nounits", NULL};
    KA_AUTO_BUF struct ka_buf said = {.max = ANSWER_MAX};
    if (ka_probe_run(argv, (const char *const *)environ, LIMIT_MS, &said, NULL) != 0 || !said.len)
        return false;
    char *line = said.data;
    line[strcspn(line, "\n")] = '\0';
    json_array_append_new(readings, reading_of(line));
    return true;
}

/* Newer drivers have another name for the last. */
static bool read_once(const char *program, const char *gpu, json_t *readings)
{
#define QUERY(reasons)                                                                                       \
    "--query-gpu=clocks.sm,clocks.mem,clocks.max.sm,temperature.gpu,power.draw,clocks_" reasons ".active"
    return read_with(program, gpu, QUERY("event_reasons"), readings) ||
           read_with(program, gpu, QUERY("throttle_reasons"), readings);
}

/* Until the next reading is due. False once it was stopped. */
static bool wait_for_next(struct ka_clocks *clocks)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += EVERY_S;
    pthread_mutex_lock(&clocks->lock);
    while (!clocks->stopped && pthread_cond_timedwait(&clocks->changed, &clocks->lock, &until) == 0)
        ;
    bool goes_on = !clocks->stopped;
    pthread_mutex_unlock(&clocks->lock);
    return goes_on;
}

static void work(void *arg)
{
    struct ka_clocks *clocks = arg;
    KA_AUTO_FREE char *program = find_program();
    bool answers = program != NULL;
    do {
        if (answers && json_array_size(clocks->readings) < READINGS_MAX)
            answers = read_once(program, clocks->gpu, clocks->readings);
    } while (wait_for_next(clocks));
}

static void ended(void *arg)
{
    struct ka_clocks *clocks = arg;
    pthread_mutex_destroy(&clocks->lock);
    pthread_cond_destroy(&clocks->changed);
    clocks->done(clocks->arg, clocks->readings);
    free(clocks->gpu);
    free(clocks);
}

struct ka_clocks *ka_clocks_start(struct ka_loop *loop, const char *gpu,
                                  void (*done)(void *arg, json_t *readings), void *arg)
{
    struct ka_clocks *clocks = ka_calloc(1, sizeof(*clocks));
    clocks->gpu = ka_strdup(gpu);
    clocks->done = done;
    clocks->arg = arg;
    clocks->readings = json_array();
    pthread_mutex_init(&clocks->lock, NULL);
    pthread_cond_init(&clocks->changed, NULL);
    ka_work_start(loop, work, ended, clocks);
    return clocks;
}

void ka_clocks_stop(struct ka_clocks *clocks)
{
    pthread_mutex_lock(&clocks->lock);
    clocks->stopped = true;
    pthread_cond_signal(&clocks->changed);
    pthread_mutex_unlock(&clocks->lock);
}
