/* One piece of work beside the loop: `work` runs on a thread of libuv's pool, then `done` on the loop thread, always and once.
 * What `work` touches belongs to it until `done`. It cannot be cancelled: whoever loses interest says so in `arg`, and frees
 * that in `done`. */
#ifndef KA_WORK_H
#define KA_WORK_H

#include <uv.h>

void ka_work_start(uv_loop_t *loop, void (*work)(void *arg), void (*done)(void *arg), void *arg);

#endif
