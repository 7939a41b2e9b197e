/* libuv's loop, and how long its turns take. Knows nothing of what runs there. */
#include "loop.h"

#include <stdlib.h>
#include <time.h>

#include "base/base.h"
#include "loop_uv.h"

struct ka_loop {
    uv_loop_t uv;
    uv_prepare_t turn;
    uint64_t last, idle, work; /* the time, the loop's idle time and the thread's own, at the last turn */
    uint64_t most, most_work;  /* nanoseconds */
};

struct ka_soon {
    uv_timer_t timer;
    void (*call)(void *arg);
    void *arg;
};

uv_loop_t *ka_loop_uv(struct ka_loop *loop)
{
    return &loop->uv;
}

/* ---- life ---- */

static uint64_t thread_ns(void)
{
    struct timespec used;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used);
    return (uint64_t)used.tv_sec * 1000000000U + (uint64_t)used.tv_nsec;
}

static void on_turn(uv_prepare_t *turn)
{
    struct ka_loop *loop = turn->data;
    uint64_t now = uv_hrtime(), idle = uv_metrics_idle_time(&loop->uv), work = thread_ns();
    uint64_t busy = now - loop->last - (idle - loop->idle);
    if (loop->last && now - loop->last > idle - loop->idle && busy > loop->most) {
        loop->most = busy;
        loop->most_work = work - loop->work;
    }
    loop->last = now;
    loop->idle = idle;
    loop->work = work;
}

struct ka_loop *ka_loop_new(void)
{
    struct ka_loop *loop = ka_calloc(1, sizeof(*loop));
    uv_loop_init(&loop->uv);
    uv_loop_configure(&loop->uv, UV_METRICS_IDLE_TIME);
    uv_prepare_init(&loop->uv, &loop->turn);
    loop->turn.data = loop;
    uv_prepare_start(&loop->turn, on_turn);
    uv_unref((uv_handle_t *)&loop->turn); /* does not keep the loop alive */
    return loop;
}

void ka_loop_run(struct ka_loop *loop)
{
    uv_run(&loop->uv, UV_RUN_DEFAULT);
}

void ka_loop_stop(struct ka_loop *loop)
{
    uv_stop(&loop->uv);
}

static void count_handle(uv_handle_t *handle, void *arg)
{
    (void)handle;
    ++*(unsigned *)arg;
}

unsigned ka_loop_close(struct ka_loop *loop)
{
    unsigned left = 0;
    uv_close((uv_handle_t *)&loop->turn, NULL);
    uv_run(&loop->uv, UV_RUN_NOWAIT);
    if (uv_loop_close(&loop->uv) != 0) {
        uv_walk(&loop->uv, count_handle, &left);
        return left ? left : 1; /* a request; the memory stays, for whoever holds on to it */
    }
    free(loop);
    return 0;
}

unsigned ka_loop_most_ms(const struct ka_loop *loop)
{
    return (unsigned)(loop->most / 1000000);
}

unsigned ka_loop_most_work_ms(const struct ka_loop *loop)
{
    return (unsigned)(loop->most_work / 1000000);
}

/* ---- the next turn ---- */

static void on_soon_closed(uv_handle_t *handle)
{
    free(handle->data);
}

void ka_soon_cancel(struct ka_soon *soon)
{
    if (soon)
        uv_close((uv_handle_t *)&soon->timer, on_soon_closed);
}

static void on_soon(uv_timer_t *timer)
{
    struct ka_soon *soon = timer->data;
    uv_close((uv_handle_t *)timer, on_soon_closed);
    soon->call(soon->arg);
}

struct ka_soon *ka_loop_later(struct ka_loop *loop, unsigned ms, void (*call)(void *arg), void *arg)
{
    struct ka_soon *soon = ka_calloc(1, sizeof(*soon));
    *soon = (struct ka_soon){.call = call, .arg = arg};
    uv_timer_init(&loop->uv, &soon->timer);
    soon->timer.data = soon;
    uv_timer_start(&soon->timer, on_soon, ms, 0);
    return soon;
}

struct ka_soon *ka_loop_soon(struct ka_loop *loop, void (*call)(void *arg), void *arg)
{
    return ka_loop_later(loop, 0, call, arg);
}

/* ---- time ---- */

uint64_t ka_clock_ns(void)
{
    return uv_hrtime();
}

double ka_clock_seconds(void)
{
    return (double)uv_hrtime() / 1e9;
}
