/* A short question to a program of this machine, before there is a loop: run it, take what it says.
 *
 * For programs that the user chose and trusts (an interpreter); users' files and candidates go to child.h.
 * Blocks. */
#ifndef KA_PROBE_H
#define KA_PROBE_H

#include "base/base.h"

/* Run argv[0], a path, with the environment `env` and no other, in a process group of its own, with no input.
 * What it writes on both outputs is appended to `out` up to its cap; the rest is read and dropped. Returns
 * its exit code (128 and the signal where one ended it), or -ETIMEDOUT after `limit_ms` (the group is then
 * killed), -ENOENT, -EACCES, ... */
int ka_probe_run(const char *const *argv, const char *const *env, unsigned limit_ms, struct ka_buf *out,
                 struct ka_err *err);

/* The same for a program that also writes to its descriptor 3: that is appended to `report`. */
int ka_probe_report(const char *const *argv, const char *const *env, unsigned limit_ms, struct ka_buf *out,
                    struct ka_buf *report, struct ka_err *err);

#endif
