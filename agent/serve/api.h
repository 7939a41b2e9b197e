/* The service's HTTP API: which request does what, who may ask, and what is answered.
 *
 *     GET    /                    web.h: the page; it and the next are open without a token
 *     GET    /healthz             alive
 *     GET    /readyz              takes runs on
 *     GET    /metrics             metrics.h
 *     POST   /v1/runs             agent/core/submission.h -> 202 with the run, 200 where it is known already
 *     GET    /v1/runs             ?state=, ?limit=: {"runs": [...], "total"}, the newest first
 *     GET    /v1/runs/ID          the run: entry.h
 *     GET    /v1/runs/ID/result   its result object, once it has ended
 *     GET    /v1/runs/ID/pair     the finished file
 *     GET    /v1/runs/ID/events   stream.h: what happens in the run, as it happens
 *     GET    /v1/events           the same of all runs: which of them changed
 *     POST   /v1/runs/ID/cancel   one that is queued or runs
 *     POST   /v1/runs/ID/retry    one that has ended, once more
 *     DELETE /v1/runs/ID          one that has ended, with its folder
 *     GET    /v1/store/search     similar.h, ?query= or ?run= or ?words=, ?topk=, ?min-sim=
 *     GET    /v1/machine          about.h
 *
 * docs/openapi.json has the same for programs. */
#ifndef KA_API_H
#define KA_API_H

#include <jansson.h>

#include "agent/core/rate.h"

struct ka_app;
struct ka_call;
struct ka_queue;

struct ka_api {
    struct ka_app *app;
    struct ka_queue *queue;
    const char *token; /* NULL: whoever reaches the socket may ask */
    json_t *about;     /* of about.h */
    /* Who does not show the token has buckets of its own: guessing keeps nobody else from asking. */
    struct ka_rate clients, strangers;
};

/* For ka_httpd_conf, with a struct ka_api. */
void ka_api_begun(void *api, struct ka_call *call);
void ka_api_whole(void *api, struct ka_call *call);

#endif
