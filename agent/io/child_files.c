/* Files around a child: the base folder, a fresh scratch, and reading what hostile code left there. Knows no
 * loop. */
#include "child_internal.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/files.h"

#define OWN_PREFIX "daemon-"
#define SCRATCH_NAME "check-XXXXXX"
#define AMPLE_FLOORS 12 /* six gigabytes on a large machine */

int ka_child_find_program(const char *variable, const char *name, char **path, struct ka_err *err)
{
    static const char *const places[] = {"", "../", "../libexec/kernel-agent/"};
    const char *given = getenv(variable);
    char *folder = ka_program_folder();
    struct ka_buf at = {0};
    int rc = -ENOENT;
    if (given && *given) {
        rc = access(given, X_OK) == 0
                 ? 0
                 : ka_fail(err, -ENOENT, "%s: %s (from %s)", given, strerror(errno), variable);
        if (!rc)
            *path = ka_strdup(given);
        goto out;
    }
    for (size_t i = 0; folder && i < KA_COUNT(places) && rc; i++) {
        ka_buf_clear(&at);
        int added = ka_buf_printf(&at, "%s/%s%s", folder, places[i], name);
        if (!added && access(ka_buf_str(&at), X_OK) == 0) {
            *path = ka_path_real(ka_buf_str(&at), err);
            rc = *path ? 0 : -ENOENT;
        }
    }
    if (rc)
        ka_fail(err, rc, "%s is not beside this program; build it or set %s", name, variable);
out:
    ka_buf_free(&at);
    free(folder);
    return rc;
}

int ka_child_base(const char *wanted, char **path, struct ka_err *err)
{
    const char *runtime = getenv("XDG_RUNTIME_DIR");
    struct ka_buf at = {0};
    struct stat st;
    int rc;
    if (wanted)
        rc = ka_buf_puts(&at, wanted);
    else if (runtime && *runtime == '/')
        rc = ka_buf_printf(&at, "%s/kernel-agent", runtime);
    else
        rc = ka_buf_printf(&at, "/tmp/kernel-agent-%u", (unsigned)geteuid());
    const char *name = ka_buf_str(&at);
    if (rc)
        goto out;
    if (mkdir(name, 0700) != 0 && errno != EEXIST)
        rc = ka_fail(err, -errno, "%s: %s", name, strerror(errno));
    else if (lstat(name, &st) != 0)
        rc = ka_fail(err, -errno, "%s: %s", name, strerror(errno));
    else if (!S_ISDIR(st.st_mode) || st.st_uid != geteuid() || (st.st_mode & 022))
        rc = ka_fail(err, -EACCES, "%s: not a folder that only this user can write", name);
    else if (!(*path = ka_path_real(name, err)))
        rc = -ENOENT;
out:
    ka_buf_free(&at);
    return rc;
}

/* A daemon's folder is locked while it lives; one that can be locked is left over from a daemon that was
 * killed. */
static void sweep(const char *base)
{
    DIR *dir = opendir(base);
    for (struct dirent *entry; dir && (entry = readdir(dir));) {
        if (!ka_starts_with(entry->d_name, OWN_PREFIX))
            continue;
        char *path = ka_path_join(base, entry->d_name);
        int fd = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        if (fd >= 0 && flock(fd, LOCK_EX | LOCK_NB) == 0)
            ka_rmtree(path, NULL);
        if (fd >= 0)
            close(fd);
        free(path);
    }
    if (dir)
        closedir(dir);
}

int ka_child_own_folder(const char *base, char **path, int *lock, struct ka_err *err)
{
    struct stat st;
    sweep(base);
    for (int attempt = 0; attempt < 10; attempt++) {
        char *own = ka_path_join(base, OWN_PREFIX "XXXXXX");
        int fd = mkdtemp(own) ? open(own, O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;
        int rc = fd < 0 ? -errno : flock(fd, LOCK_EX | LOCK_NB) == 0 && stat(own, &st) == 0 ? 0 : -EAGAIN;
        if (!rc) {
            *path = own;
            *lock = fd;
            return 0;
        }
        free(own);
        if (fd >= 0)
            close(fd);
        if (rc != -EAGAIN && rc != -ENOENT) /* those: another daemon swept between our two steps */
            return ka_fail(err, rc, "%s: cannot make a folder: %s", base, strerror(-rc));
    }
    return ka_fail(err, -EAGAIN, "%s: other daemons remove our folder again and again", base);
}

int ka_child_scratch_new(const char *base, const char *request, char **path, struct ka_err *err)
{
    char *dir = ka_path_join(base, SCRATCH_NAME), *file = NULL;
    int rc = 0;
    if (!mkdtemp(dir)) {
        rc = ka_fail(err, -errno, "%s: cannot make a scratch folder: %s", base, strerror(errno));
        goto out;
    }
    file = ka_path_join(dir, "request.json");
    rc = ka_file_put(file, request, strlen(request), err);
    if (rc) {
        ka_rmtree(dir, NULL);
        goto out;
    }
    *path = dir;
    dir = NULL;
out:
    free(file);
    free(dir);
    return rc;
}

ssize_t ka_child_receive(int socket, char *text, size_t size, int *fd)
{
    union {
        char bytes[CMSG_SPACE(sizeof(int))];
        struct cmsghdr align;
    } control;
    struct iovec iov = {text, size};
    struct msghdr msg = {.msg_iov = &iov,
                         .msg_iovlen = 1,
                         .msg_control = control.bytes,
                         .msg_controllen = sizeof(control.bytes)};
    ssize_t n = recvmsg(socket, &msg, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    struct cmsghdr *cmsg = n > 0 ? CMSG_FIRSTHDR(&msg) : NULL;
    if (cmsg && cmsg->cmsg_level == SOL_SOCKET && cmsg->cmsg_type == SCM_RIGHTS &&
        cmsg->cmsg_len == CMSG_LEN(sizeof(*fd)))
        memcpy(fd, CMSG_DATA(cmsg), sizeof(*fd));
    return n < 0 ? -errno : n;
}

/* Kernels without openat2 (or sandboxes that hide it) get the part of it that a single name needs. */
static int open_beneath(int dir, const char *name)
{
    struct open_how how = {
        .flags = O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW | O_NOCTTY,
        .resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS | RESOLVE_NO_XDEV,
    };
    long fd = syscall(SYS_openat2, dir, name, &how, sizeof(how));
    if (fd < 0 && errno == ENOSYS) {
        if (strchr(name, '/') || strcmp(name, "..") == 0)
            return -EXDEV;
        fd = openat(dir, name, (int)how.flags);
    }
    return fd < 0 ? -errno : (int)fd;
}

int ka_child_open(const struct ka_child_result *result, const char *name, size_t max, int *fd)
{
    struct stat st;
    if (result->scratch_fd < 0)
        return -ENOENT;
    int file = open_beneath(result->scratch_fd, name);
    if (file < 0)
        return file;
    int rc = 0;
    if (fstat(file, &st) != 0)
        rc = -errno;
    else if (!S_ISREG(st.st_mode) || st.st_nlink != 1)
        rc = -EINVAL;
    else if ((uint64_t)st.st_size > max)
        rc = -EFBIG;
    if (rc) {
        close(file);
        return rc;
    }
    *fd = file;
    return 0;
}

int ka_child_read(const struct ka_child_result *result, const char *name, size_t max, struct ka_buf *out)
{
    int fd;
    size_t before = out->len;
    char chunk[65536];
    int rc = ka_child_open(result, name, max, &fd);
    if (rc)
        return rc;
    for (;;) {
        ssize_t n = read(fd, chunk, sizeof(chunk));
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            rc = -errno;
        else if (out->len - before + (size_t)n > max)
            rc = -EFBIG;
        else if (n > 0)
            rc = ka_buf_add(out, chunk, (size_t)n);
        if (rc || n <= 0)
            break;
    }
    close(fd);
    if (rc && out->data) {
        out->len = before;
        out->data[before] = '\0';
    }
    return rc;
}

/* What is available and, in the same unit, what the daemon itself needs: a twentieth of the memory, or half a
 * gigabyte on a large machine. */
static bool read_memory(const char *meminfo, unsigned long long *available, unsigned long long *floor)
{
    unsigned long long total = 0;
    const char *at = strstr(meminfo, "MemAvailable:");
    if (sscanf(meminfo, "MemTotal: %llu kB", &total) != 1 || !at ||
        sscanf(at, "MemAvailable: %llu", available) != 1)
        return false;
    *floor = total / 20 < 512 * 1024 ? total / 20 : 512 * 1024;
    return true;
}

bool ka_child_memory_is_low(const char *meminfo)
{
    unsigned long long available, floor;
    return read_memory(meminfo, &available, &floor) && available < floor;
}

bool ka_child_memory_is_ample(const char *meminfo)
{
    unsigned long long available, floor;
    return read_memory(meminfo, &available, &floor) && available / AMPLE_FLOORS >= floor;
}
