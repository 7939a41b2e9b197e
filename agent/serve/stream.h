/* What happens, as server-sent events, from the beginning or from where `Last-Event-ID` says:
 *
 *     of a run      the lines of its run.jsonl: `event` is the line's, `data` the line, `id` ATTEMPT:OFFSET;
 *                   at its end an event "end" with the run
 *     of the queue  "run" with each run that changed, `id` a number; at first all of them */
#ifndef KA_STREAM_H
#define KA_STREAM_H

#include "agent/io/httpd.h"
#include "queue.h"

/* -EAGAIN: too many are open; the call is not answered then. The queue outlives them. */
int ka_stream_run(const struct ka_queue *queue, struct ka_call *call, const char *id, bool follow);
int ka_stream_queue(const struct ka_queue *queue, struct ka_call *call);

#endif
