/* Runs that ended long ago go, with their folders: `keep_days` after their end, and all but the newest
 * `keep_runs`. A clock that has jumped is not believed for an hour. Loop thread only. */
#ifndef KA_RETIRE_H
#define KA_RETIRE_H

struct ka_loop;
struct ka_opts;
struct ka_queue;
struct ka_retire;

/* At once, and then every minute. Borrows all three; `opts` may change. */
struct ka_retire *ka_retire_start(struct ka_loop *loop, struct ka_queue *queue, const struct ka_opts *opts);
/* NULL is fine. */
void ka_retire_stop(struct ka_retire *retire);

#endif
