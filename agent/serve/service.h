/* `kernel-agent serve`: the queue (queue.h) behind HTTP (api.h), in one process and on one loop, until a
 * signal ends it. */
#ifndef KA_SERVICE_H
#define KA_SERVICE_H

#include "agent/app/opts.h"

/* The default state folder, or the one that was asked for: absolute; NULL without a home. free() it. */
char *ka_service_folder(const struct ka_opts *opts);

/* The token in a file: one word; free() it. -EINVAL, -errno. */
int ka_service_token(const char *path, char **token, struct ka_err *err);

/* Serves until the first SIGINT or SIGTERM, then interrupts its runs, which the next service goes on with,
 * and returns 0. A second signal ends the process at once. 2 with `err` where it cannot begin. */
int ka_service_run(const struct ka_opts *opts, struct ka_err *err);

#endif
