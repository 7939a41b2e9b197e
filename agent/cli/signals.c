/* Signals as loop events. */
#include "signals.h"

#include <unistd.h>

static void on_signal(uv_signal_t *handle, int number)
{
    struct ka_signals *signals = handle->data;
    (void)number;
    if (signals->count++)
        _exit(130); /* state is committed before every command: nothing is lost */
    signals->on_stop(signals->arg);
}

void ka_signals_start(struct ka_signals *signals, uv_loop_t *loop, void (*on_stop)(void *arg), void *arg)
{
    *signals = (struct ka_signals){.on_stop = on_stop, .arg = arg};
    uv_signal_init(loop, &signals->interrupt);
    uv_signal_init(loop, &signals->terminate);
    signals->interrupt.data = signals->terminate.data = signals;
    uv_signal_start(&signals->interrupt, on_signal, SIGINT);
    uv_signal_start(&signals->terminate, on_signal, SIGTERM);
}

void ka_signals_stop(struct ka_signals *signals)
{
    if (!uv_is_closing((uv_handle_t *)&signals->interrupt)) {
        uv_close((uv_handle_t *)&signals->interrupt, NULL);
        uv_close((uv_handle_t *)&signals->terminate, NULL);
    }
}
