/* Measures the turns of a loop. Knows nothing of what runs there. */
#include "loop_watch.h"

#include <stdlib.h>

#include "base/base.h"

struct ka_loop_watch {
    uv_prepare_t turn;
    uint64_t last, idle; /* uv_hrtime(), and the loop's idle time, at the last turn */
    uint64_t most;       /* nanoseconds */
};

static void on_turn(uv_prepare_t *turn)
{
    struct ka_loop_watch *w = turn->data;
    uint64_t now = uv_hrtime(), idle = uv_metrics_idle_time(turn->loop);
    uint64_t busy = now - w->last - (idle - w->idle);
    if (w->last && now - w->last > idle - w->idle && busy > w->most)
        w->most = busy;
    w->last = now;
    w->idle = idle;
}

struct ka_loop_watch *ka_loop_watch_new(uv_loop_t *loop)
{
    struct ka_loop_watch *w = ka_calloc(1, sizeof(*w));
    uv_prepare_init(loop, &w->turn);
    w->turn.data = w;
    uv_prepare_start(&w->turn, on_turn);
    uv_unref((uv_handle_t *)&w->turn);
    return w;
}

unsigned ka_loop_watch_most_ms(const struct ka_loop_watch *watch)
{
    return watch ? (unsigned)(watch->most / 1000000) : 0;
}

static void on_closed(uv_handle_t *handle)
{
    free(handle->data);
}

void ka_loop_watch_close(struct ka_loop_watch *watch)
{
    if (watch)
        uv_close((uv_handle_t *)&watch->turn, on_closed);
}
