/* `serve --watch DIR`: forward files below a folder become runs, and do so again when they change. A file is
 * taken once it has stayed the same from one look to the next; what is queued of its text before is cancelled
 * then. A text that is known already is no new run (queue.h), also after the end of the service. Loop thread
 * only; a thread looks at the files. */
#ifndef KA_WATCH_H
#define KA_WATCH_H

#include "base/base.h"

struct ka_loop;
struct ka_queue;
struct ka_watch;

/* Borrows queue and loop. -ENOENT: no such folder. */
int ka_watch_start(struct ka_loop *loop, struct ka_queue *queue, const char *dir, struct ka_watch **out,
                   struct ka_err *err);
/* The queue is not touched any more. NULL is fine. */
void ka_watch_stop(struct ka_watch *watch);

#endif
