/* The loop that everything waits on, the time, and what is to be done at the loop's next turn. Loop thread
 * only. */
#ifndef KA_LOOP_H
#define KA_LOOP_H

#include <stdint.h>

struct ka_loop;

struct ka_loop *ka_loop_new(void);
/* Until somebody calls ka_loop_stop(), or there is nothing left to wait for. */
void ka_loop_run(struct ka_loop *loop);
void ka_loop_stop(struct ka_loop *loop);
/* Frees it. Returns how many things were left open on it, which is an error of the program's. */
unsigned ka_loop_close(struct ka_loop *loop);

/* The longest that one turn was busy, in milliseconds, without the wait for events: what a signal, a deadline
 * or another run had to wait at most. */
unsigned ka_loop_most_ms(const struct ka_loop *loop);
/* What of that the thread itself worked; for the rest it waited: for a core, or inside a system call. */
unsigned ka_loop_most_work_ms(const struct ka_loop *loop);

/* `call` runs once, at the next turn of the loop, unless it is cancelled. The handle is gone then. */
struct ka_soon;
struct ka_soon *ka_loop_soon(struct ka_loop *loop, void (*call)(void *arg), void *arg);
/* The same, once so many milliseconds have passed. */
struct ka_soon *ka_loop_later(struct ka_loop *loop, unsigned ms, void (*call)(void *arg), void *arg);
void ka_soon_cancel(struct ka_soon *soon); /* NULL is fine */

/* Time that passes evenly, since some moment in the past: nanoseconds, and seconds. Any thread. */
uint64_t ka_clock_ns(void);
double ka_clock_seconds(void);

#endif
