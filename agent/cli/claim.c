/* A file that is locked, and removed by who has the lock. Knows nothing of what it stands for. */
#include "claim.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/files.h"
#include "base/hash.h"

/* Names are paths of any length. */
static char *path_of(const char *folder, const char *name)
{
    char hash[KA_HASH_HEX];
    ka_hash_hex(name, strlen(name), hash);
    return ka_format("%s/%.32s.lock", folder, hash);
}

/* Whoever had it before may have removed it meanwhile: then the lock is on nothing. */
static bool is_still_there(int fd, const char *path)
{
    struct stat mine, named;
    return fstat(fd, &mine) == 0 && stat(path, &named) == 0 && mine.st_ino == named.st_ino &&
           mine.st_dev == named.st_dev;
}

int ka_claim_take(const char *folder, const char *name, bool wait, int *fd, struct ka_err *err)
{
    KA_AUTO_FREE char *path = path_of(folder, name);
    int rc = ka_mkdirs(folder, err);
    while (rc == 0) {
        int made = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
        if (made < 0)
            return ka_fail(err, -errno, "%s: %s", path, strerror(errno));
        int locked = flock(made, wait ? LOCK_EX : LOCK_EX | LOCK_NB), why = errno;
        if (locked == 0 && is_still_there(made, path)) {
            *fd = made;
            return 0;
        }
        close(made);
        if (locked != 0 && why == EWOULDBLOCK)
            return ka_fail(err, -EBUSY, "another process works on %s", name);
        if (locked != 0 && why != EINTR)
            return ka_fail(err, -why, "%s: cannot be locked: %s", path, strerror(why));
    }
    return rc;
}

void ka_claim_release(const char *folder, const char *name, int fd)
{
    KA_AUTO_FREE char *path = path_of(folder, name);
    if (fd < 0)
        return;
    unlink(path);
    close(fd);
}
