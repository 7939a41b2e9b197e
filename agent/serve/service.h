/* `kernel-agent serve`: the queue (queue.h) behind HTTP (api.h), in one process and on one loop, until a
 * signal ends it. */
#ifndef KA_SERVICE_H
#define KA_SERVICE_H

#include "agent/app/opts.h"

/* The default state folder, or the one that was asked for: absolute; NULL without a home. free() it. */
char *ka_service_folder(const struct ka_opts *opts);

/* The token in a file: one word; free() it. -EINVAL, -errno. */
int ka_service_token(const char *path, char **token, struct ka_err *err);

/* The settings as they would be if the service began now; ka_opts_free() them. -EINVAL, -errno. */
typedef int (*ka_service_read_fn)(void *arg, struct ka_opts *opts, struct ka_err *err);

/* Serves until the first SIGINT or SIGTERM, then interrupts its runs, which the next service goes on with,
 * and returns 0. A second signal ends the process at once. SIGHUP reads the settings again, of which those
 * that can change do. 2 with `err` where it cannot begin. */
int ka_service_run(struct ka_opts *opts, ka_service_read_fn read, void *arg, struct ka_err *err);

#endif
