/* Commands that do one thing and end: inspect, check, verify, differentiate. */
#ifndef KA_ONESHOT_H
#define KA_ONESHOT_H

#include "agent/app/opts.h"
#include "agent/run/run.h"

/* Returns the exit code of the program. */
int ka_oneshot_main(struct ka_opts *opts, const char *command, const char *path);

/* `check` of several files, one after the other, in warm interpreters. With --json an object a line. Stops at what the next
 * file would meet too (sandbox, interrupt). Returns the last exit code that is not 0. */
int ka_oneshot_check_all(struct ka_opts *opts, const char *const *paths, size_t count);

/* The verdict on the pair in `path`, in a temporary run folder; used by `check`, `verify` and `store verify`. `*result`
 * (may be NULL) is a new reference. Returns the exit code. */
int ka_oneshot_check(struct ka_app *app, const char *path, json_t **result);

#endif
