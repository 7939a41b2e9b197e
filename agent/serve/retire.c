/* Which runs are old. Knows the queue, no file. */
#include "retire.h"

#include <math.h>
#include <stdlib.h>
#include <time.h>

#include "agent/app/opts.h"
#include "agent/io/loop.h"
#include "base/log.h"
#include "queue.h"

#define EVERY_MS 60000
#define DOUBT_S 3600.0
#define JUMP_S 60.0
#define AT_ONCE 200 /* removals, so that the loop and the disk have other work too */

struct ka_retire {
    struct ka_loop *loop;
    struct ka_queue *queue;
    const struct ka_opts *opts;
    struct ka_soon *next;
    double apart;   /* wall clock less the steady one, when it was looked at last */
    double believe; /* steady time from which the wall clock counts */
};

static double wall(void)
{
    struct timespec time;
    clock_gettime(CLOCK_REALTIME, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static bool is_doubted(struct ka_retire *retire)
{
    double steady = ka_clock_seconds(), apart = wall() - steady;
    if (fabs(apart - retire->apart) > JUMP_S)
        retire->believe = steady + DOUBT_S;
    retire->apart = apart;
    return steady < retire->believe;
}

static void on_gone(void *arg, int rc, const struct ka_entry *entry, const struct ka_err *err)
{
    (void)arg;
    if (rc)
        ka_log(KA_LOG_ERROR, "%s is old, and cannot be removed: %s", entry ? entry->id : "a run", err->msg);
}

static void sweep(struct ka_retire *retire)
{
    int days = retire->opts->keep_days, most = retire->opts->keep_runs, ended = 0, gone = 0;
    double time = wall();
    bool doubted = is_doubted(retire);
    for (size_t i = ka_queue_count(retire->queue); i-- > 0 && gone < AT_ONCE;) {
        const struct ka_entry *entry = ka_queue_at(retire->queue, i);
        struct ka_err err;
        if (!entry || !ka_entry_ended(entry))
            continue;
        bool old = days && !doubted && entry->ended > 0 && time - entry->ended > days * 86400.0;
        bool surplus = most && ++ended > most;
        if ((old || surplus) && ka_queue_delete(retire->queue, entry->id, on_gone, NULL, &err) == 0)
            gone++;
    }
    if (gone)
        ka_log(KA_LOG_INFO, "%d runs are old, and removed (--keep-days, --keep-runs)", gone);
}

static void on_time(void *arg)
{
    struct ka_retire *retire = arg;
    retire->next = ka_loop_later(retire->loop, EVERY_MS, on_time, retire);
    sweep(retire);
}

struct ka_retire *ka_retire_start(struct ka_loop *loop, struct ka_queue *queue, const struct ka_opts *opts)
{
    struct ka_retire *retire = ka_calloc(1, sizeof(*retire));
    *retire =
        (struct ka_retire){.loop = loop, .queue = queue, .opts = opts, .apart = wall() - ka_clock_seconds()};
    on_time(retire);
    return retire;
}

void ka_retire_stop(struct ka_retire *retire)
{
    if (!retire)
        return;
    ka_soon_cancel(retire->next);
    free(retire);
}
