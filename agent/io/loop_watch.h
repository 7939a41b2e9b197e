/* The longest that a loop was busy without looking at its events: what a signal, a deadline or another run had to wait at most.
 * Needs uv_loop_configure(loop, UV_METRICS_IDLE_TIME) before the loop runs; it does not keep the loop alive. Loop thread only. */
#ifndef KA_LOOP_WATCH_H
#define KA_LOOP_WATCH_H

#include <uv.h>

struct ka_loop_watch;

struct ka_loop_watch *ka_loop_watch_new(uv_loop_t *loop);
/* Milliseconds of one turn, since the last reset: callbacks, without the wait for events. 0 for NULL. */
unsigned ka_loop_watch_most_ms(const struct ka_loop_watch *watch);
void ka_loop_watch_close(struct ka_loop_watch *watch); /* NULL is fine; the loop has to run once more */

#endif
