/* Ctrl-C and SIGTERM on the loop: the first asks for an orderly stop, a second one ends the process at
 * once. SIGHUP, for who wants it. */
#ifndef KA_SIGNALS_H
#define KA_SIGNALS_H

struct ka_loop;
struct ka_signals;

struct ka_signals *ka_signals_start(struct ka_loop *loop, void (*on_stop)(void *arg), void *arg);
/* From now on SIGHUP calls this, with the `arg` of the stop; else it ends the process. */
void ka_signals_on_hangup(struct ka_signals *signals, void (*on_hangup)(void *arg));
/* Nobody listens any more, and the loop may end. Frees it; NULL is fine. */
void ka_signals_stop(struct ka_signals *signals);

#endif
