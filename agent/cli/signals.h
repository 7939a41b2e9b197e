/* Ctrl-C and SIGTERM on the loop: the first asks for an orderly stop, a second one ends the process at once. */
#ifndef KA_SIGNALS_H
#define KA_SIGNALS_H

#include <uv.h>

struct ka_signals {
    uv_signal_t interrupt, terminate;
    void (*on_stop)(void *arg);
    void *arg;
    int count;
};

void ka_signals_start(struct ka_signals *signals, uv_loop_t *loop, void (*on_stop)(void *arg), void *arg);
/* Lets the loop end; the struct must live until the loop has run once more. */
void ka_signals_stop(struct ka_signals *signals);

#endif
