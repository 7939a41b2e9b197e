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
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/files.h"

#define OWN_PREFIX "daemon-"
#define SCRATCH_NAME "check-XXXXXX"
#define GIB ((uint64_t)1 << 30)

int ka_child_find_program(const char *variable, const char *name, char **path, struct ka_err *err)
{
    static const char *const places[] = {"", "../", "../libexec/kernel-agent/"};
    const char *given = getenv(variable);
    if (given && *given) {
        if (access(given, X_OK) != 0)
            return ka_fail(err, -ENOENT, "%s: %s (from %s)", given, strerror(errno), variable);
        *path = ka_strdup(given);
        return 0;
    }
    KA_AUTO_FREE char *folder = ka_program_folder();
    for (size_t i = 0; folder && i < KA_COUNT(places); i++) {
        KA_AUTO_FREE char *at = ka_format("%s/%s%s", folder, places[i], name);
        char *real = access(at, X_OK) == 0 ? ka_path_real(at, err) : NULL;
        if (real) {
            *path = real;
            return 0;
        }
    }
    return ka_fail(err, -ENOENT, "%s is not beside this program; build it or set %s", name, variable);
}

int ka_child_base(const char *wanted, char **path, struct ka_err *err)
{
    const char *runtime = getenv("XDG_RUNTIME_DIR");
    KA_AUTO_FREE char *name = wanted                       ? ka_strdup(wanted)
                              : runtime && *runtime == '/' ? ka_path_join(runtime, "kernel-agent")
                                                           : ka_format("/tmp/kernel-agent-%u", geteuid());
    int rc = ka_private_folder(name, err);
    if (rc)
        return rc;
    *path = ka_path_real(name, err);
    return *path ? 0 : -ENOENT;
}

/* A daemon's folder is locked while it lives; one that can be locked is left over from a daemon that was
 * killed. */
static void sweep(const char *base)
{
    DIR *dir = opendir(base);
    for (struct dirent *entry; dir && (entry = readdir(dir));) {
        if (!ka_starts_with(entry->d_name, OWN_PREFIX))
            continue;
        KA_AUTO_FREE char *path = ka_path_join(base, entry->d_name);
        KA_AUTO_CLOSE int fd = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        if (fd >= 0 && flock(fd, LOCK_EX | LOCK_NB) == 0)
            ka_rmtree(path, NULL);
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
    char *dir = ka_path_join(base, SCRATCH_NAME);
    int rc = mkdtemp(dir)
                 ? 0
                 : ka_fail(err, -errno, "%s: cannot make a scratch folder: %s", base, strerror(errno));
    KA_AUTO_FREE char *file = ka_path_join(dir, "request.json");
    if (rc == 0 && (rc = ka_file_put(file, request, strlen(request), err)))
        ka_rmtree(dir, NULL);
    if (rc)
        free(dir);
    else
        *path = dir;
    return rc;
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
    KA_AUTO_CLOSE int file = open_beneath(result->scratch_fd, name);
    if (file < 0)
        return file;
    if (fstat(file, &st) != 0)
        return -errno;
    if (!S_ISREG(st.st_mode) || st.st_nlink != 1)
        return -EINVAL;
    if ((uint64_t)st.st_size > max)
        return -EFBIG;
    *fd = file;
    file = -1;
    return 0;
}

int ka_child_read(const struct ka_child_result *result, const char *name, size_t max, struct ka_buf *out)
{
    KA_AUTO_CLOSE int fd = -1;
    int rc = ka_child_open(result, name, max, &fd);
    return rc ? rc : ka_fd_read(fd, max, out);
}

/* The children of several daemons can take gigabytes in a second: the parts have caps of some gigabytes. */
enum ka_child_memory ka_child_memory(const struct ka_machine *machine)
{
    static const struct {
        uint64_t part, most;
        enum ka_child_memory is;
    } below[] = {
        {20, 2 * GIB, KA_MEMORY_LOW}, {8, 16 * GIB, KA_MEMORY_TIGHT}, {3, 64 * GIB, KA_MEMORY_ENOUGH}};
    uint64_t all = machine->memory_bytes;
    for (size_t i = 0; all && i < KA_COUNT(below); i++) {
        uint64_t part = all / below[i].part;
        if (machine->memory_available_bytes < (part < below[i].most ? part : below[i].most))
            return below[i].is;
    }
    return all ? KA_MEMORY_AMPLE : KA_MEMORY_ENOUGH;
}
