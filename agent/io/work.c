/* Work beside the loop, on libuv's pool. Knows nothing of what is done there. */
#include "work.h"

#include <stdlib.h>

#include "base/base.h"
#include "loop_uv.h"

struct work {
    uv_work_t req;
    void (*work)(void *arg);
    void (*done)(void *arg);
    void *arg;
};

static void on_thread(uv_work_t *req)
{
    struct work *w = req->data;
    w->work(w->arg);
}

static void on_done(uv_work_t *req, int status)
{
    struct work *w = req->data;
    (void)status; /* nobody cancels */
    w->done(w->arg);
    free(w);
}

void ka_work_start(struct ka_loop *loop, void (*work)(void *arg), void (*done)(void *arg), void *arg)
{
    struct work *w = ka_calloc(1, sizeof(*w));
    *w = (struct work){.work = work, .done = done, .arg = arg};
    w->req.data = w;
    uv_queue_work(ka_loop_uv(loop), &w->req, on_thread, on_done);
}
