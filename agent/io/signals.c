/* Signals as loop events. */
#include "signals.h"

#include <stdlib.h>
#include <unistd.h>

#include "base/base.h"
#include "loop_uv.h"

struct ka_signals {
    uv_signal_t interrupt, terminate, hangup;
    void (*on_stop)(void *arg);
    void (*on_hangup)(void *arg);
    void *arg;
    int count, handles;
};

static void on_signal(uv_signal_t *handle, int number)
{
    struct ka_signals *signals = handle->data;
    (void)number;
    if (signals->count++)
        _exit(130); /* state is committed before every command: nothing is lost */
    signals->on_stop(signals->arg);
}

struct ka_signals *ka_signals_start(struct ka_loop *loop, void (*on_stop)(void *arg), void *arg)
{
    struct ka_signals *signals = ka_calloc(1, sizeof(*signals));
    *signals = (struct ka_signals){.on_stop = on_stop, .arg = arg, .handles = 3};
    uv_signal_init(ka_loop_uv(loop), &signals->interrupt);
    uv_signal_init(ka_loop_uv(loop), &signals->terminate);
    uv_signal_init(ka_loop_uv(loop), &signals->hangup);
    signals->interrupt.data = signals->terminate.data = signals->hangup.data = signals;
    uv_signal_start(&signals->interrupt, on_signal, SIGINT);
    uv_signal_start(&signals->terminate, on_signal, SIGTERM);
    return signals;
}

static void on_hangup(uv_signal_t *handle, int number)
{
    struct ka_signals *signals = handle->data;
    (void)number;
    signals->on_hangup(signals->arg);
}

void ka_signals_on_hangup(struct ka_signals *signals, void (*call)(void *arg))
{
    signals->on_hangup = call;
    uv_signal_start(&signals->hangup, on_hangup, SIGHUP);
}

static void on_closed(uv_handle_t *handle)
{
    struct ka_signals *signals = handle->data;
    if (--signals->handles == 0)
        free(signals);
}

void ka_signals_stop(struct ka_signals *signals)
{
    if (!signals)
        return;
    uv_close((uv_handle_t *)&signals->interrupt, on_closed);
    uv_close((uv_handle_t *)&signals->terminate, on_closed);
    uv_close((uv_handle_t *)&signals->hangup, on_closed);
}
