/* Whole-file reading and atomic writing. Knows nothing of what the files mean. */
#include "files.h"

#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

void ka_close_at(const int *fd)
{
    if (*fd >= 0)
        close(*fd);
}

int ka_fd_read(int fd, size_t max, struct ka_buf *out)
{
    char chunk[65536];
    size_t before = out->len;
    int rc = 0;
    for (ssize_t n = 1; rc == 0 && n != 0;) {
        n = read(fd, chunk, sizeof(chunk));
        if (n < 0)
            rc = errno == EINTR ? 0 : -errno;
        else
            rc = out->len - before + (size_t)n > max ? -EFBIG : ka_buf_add(out, chunk, (size_t)n);
    }
    if (rc && out->data)
        out->data[out->len = before] = '\0';
    return rc;
}

ssize_t ka_fd_receive(int socket, char *text, size_t size, int *fd)
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

int ka_file_read(const char *path, size_t max, struct ka_buf *out, struct ka_err *err)
{
    struct stat st;
    KA_AUTO_CLOSE int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0 || fstat(fd, &st) != 0)
        return ka_fail(err, -errno, "%s: %s", path, strerror(errno));
    if (!S_ISREG(st.st_mode))
        return ka_fail(err, S_ISDIR(st.st_mode) ? -EISDIR : -EINVAL, "%s: not a regular file", path);
    int rc = ka_fd_read(fd, max, out);
    if (rc == -EFBIG)
        return ka_fail(err, rc, "%s: larger than %zu bytes", path, max);
    return rc ? ka_fail(err, rc, "%s: cannot read: %s", path, strerror(-rc)) : 0;
}

int ka_fd_write(int fd, const char *bytes, size_t len)
{
    while (len) {
        ssize_t n = write(fd, bytes, len);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return -errno;
        bytes += n;
        len -= (size_t)n;
    }
    return 0;
}

static int replace(const char *path, const void *bytes, size_t len, bool wait, struct ka_err *err)
{
    char temp[PATH_MAX];
    if (snprintf(temp, sizeof(temp), "%s.XXXXXX", path) >= (int)sizeof(temp))
        return ka_fail(err, -ENAMETOOLONG, "%s: name too long", path);
    int fd = mkostemp(temp, O_CLOEXEC);
    if (fd < 0)
        return ka_fail(err, -errno, "%s: cannot write: %s", path, strerror(errno));
    int rc = ka_fd_write(fd, bytes, len);
    if (rc == 0 && (fchmod(fd, 0644) != 0 || (wait && fsync(fd) != 0)))
        rc = -errno;
    if (close(fd) != 0 && rc == 0)
        rc = -errno;
    if (rc == 0 && rename(temp, path) != 0)
        rc = -errno;
    if (rc) {
        unlink(temp);
        return ka_fail(err, rc, "%s: cannot write: %s", path, strerror(-rc));
    }
    return 0;
}

int ka_file_write(const char *path, const void *bytes, size_t len, struct ka_err *err)
{
    return replace(path, bytes, len, true, err);
}

int ka_file_replace(const char *path, const void *bytes, size_t len, struct ka_err *err)
{
    return replace(path, bytes, len, false, err);
}

int ka_file_put(const char *path, const void *bytes, size_t len, struct ka_err *err)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0644);
    if (fd < 0)
        return ka_fail(err, -errno, "%s: cannot write: %s", path, strerror(errno));
    int rc = ka_fd_write(fd, bytes, len);
    if (close(fd) != 0 && rc == 0)
        rc = -errno;
    return rc ? ka_fail(err, rc, "%s: cannot write: %s", path, strerror(-rc)) : 0;
}

int ka_mkdirs(const char *path, struct ka_err *err)
{
    char part[PATH_MAX];
    size_t len = strlen(path);
    if (len == 0 || len >= sizeof(part))
        return ka_fail(err, -ENAMETOOLONG, "%s: not a usable folder name", path);
    memcpy(part, path, len + 1);
    for (size_t i = 1; i <= len; i++) {
        if (part[i] != '/' && part[i] != '\0')
            continue;
        char kept = part[i];
        part[i] = '\0';
        if (mkdir(part, 0755) != 0 && errno != EEXIST)
            return ka_fail(err, -errno, "%s: cannot make the folder: %s", part, strerror(errno));
        part[i] = kept;
    }
    struct stat st;
    if (stat(path, &st) != 0 || !S_ISDIR(st.st_mode))
        return ka_fail(err, -ENOTDIR, "%s: not a folder", path);
    return 0;
}

int ka_folder_sync(const char *path, struct ka_err *err)
{
    KA_AUTO_CLOSE int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    return fd < 0 || fsync(fd) != 0 ? ka_fail(err, -errno, "%s: %s", path, strerror(errno)) : 0;
}

int ka_private_folder(const char *path, struct ka_err *err)
{
    struct stat st;
    if ((mkdir(path, 0700) != 0 && errno != EEXIST) || lstat(path, &st) != 0)
        return ka_fail(err, -errno, "%s: %s", path, strerror(errno));
    if (!S_ISDIR(st.st_mode) || st.st_uid != geteuid() || (st.st_mode & 022))
        return ka_fail(err, -EACCES, "%s: not a folder that only this user can write", path);
    return 0;
}

#define REMOVE_TRIES 100 /* a millisecond apart */

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
    (void)st;
    (void)type;
    (void)ftw;
    return remove(path) != 0 && errno != ENOENT ? -1 : 0;
}

int ka_rmtree(const char *path, struct ka_err *err)
{
    /* A process that is being killed may still add a file, or take one away, while this walks. */
    for (unsigned tries = 0; nftw(path, remove_one, 16, FTW_DEPTH | FTW_PHYS) != 0; tries++) {
        int why = errno;
        if (why == ENOENT && access(path, F_OK) != 0)
            return 0;
        if ((why != ENOENT && why != ENOTEMPTY) || tries == REMOVE_TRIES)
            return ka_fail(err, -why, "%s: cannot remove: %s", path, strerror(why));
        usleep(1000);
    }
    return 0;
}

char *ka_path_join(const char *dir, const char *name)
{
    return ka_format("%s%s%s", dir, !*dir || ka_ends_with(dir, "/") ? "" : "/", name);
}

char *ka_path_parent(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? ka_strndup(path, slash == path ? 1 : (size_t)(slash - path)) : ka_strdup(".");
}

char *ka_program_folder(void)
{
    char path[PATH_MAX];
    ssize_t len = readlink("/proc/self/exe", path, sizeof(path) - 1);
    path[len > 0 ? len : 0] = '\0';
    return len > 0 ? ka_path_parent(path) : NULL;
}

/* `variable` names the folder, which is `otherwise` in the home where it is not set. */
static char *user_folder(const char *variable, const char *otherwise, const char *name)
{
    const char *told = getenv(variable), *home = getenv("HOME");
    if (told && *told == '/')
        return ka_format("%s/kernel-agent/%s", told, name);
    return home && *home == '/' ? ka_format("%s/%s/kernel-agent/%s", home, otherwise, name) : NULL;
}

char *ka_user_cache(const char *name)
{
    return user_folder("XDG_CACHE_HOME", ".cache", name);
}

char *ka_user_data(const char *name)
{
    return user_folder("XDG_DATA_HOME", ".local/share", name);
}

char *ka_path_real(const char *path, struct ka_err *err)
{
    char *real = realpath(path, NULL);
    if (!real)
        ka_fail(err, -errno, "%s: %s", path, strerror(errno));
    return real;
}
