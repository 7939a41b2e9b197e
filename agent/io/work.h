/* One piece of work beside the loop: `work` runs on a thread of libuv's pool, then `done` on the loop thread,
 * always and once. What `work` touches belongs to it until `done`. It cannot be cancelled: whoever loses
 * interest says so in `arg`, and frees that in `done`. */
#ifndef KA_WORK_H
#define KA_WORK_H

struct ka_loop;

void ka_work_start(struct ka_loop *loop, void (*work)(void *arg), void (*done)(void *arg), void *arg);

#endif
