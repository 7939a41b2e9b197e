/* Who works on a file: a lock in a folder that several processes share, perhaps on several machines. It is
 * the kernel's (flock), or the file server's, and ends with the process. */
#ifndef KA_CLAIM_H
#define KA_CLAIM_H

#include "base/base.h"

/* Below `folder`, which is made. 0 with a descriptor for ka_claim_release(); -EBUSY: another process has it,
 * and `wait` is false; -errno. */
int ka_claim_take(const char *folder, const char *name, bool wait, int *fd, struct ka_err *err);
/* Removes its file. -1 is none. */
void ka_claim_release(const char *folder, const char *name, int fd);

#endif
