/* Commands that do one thing and end: inspect, check, verify, differentiate. */
#ifndef KA_ONESHOT_H
#define KA_ONESHOT_H

#include <stddef.h>

struct ka_opts;

/* Returns the exit code of the program. */
int ka_oneshot_main(const struct ka_opts *opts, const char *command, const char *path);

/* `check` of several files, one after the other, in warm interpreters. With --json an object a line. Stops at
 * what the next file would meet too (sandbox, interrupt). Returns the last exit code that is not 0. */
int ka_oneshot_check_all(const struct ka_opts *opts, const char *const *paths, size_t count);

#endif
