/* Preloaded into the service by tests: a disk that is full, read-only or stalled, a clock that jumps, and
 * a record of what the disk would still have after a loss of power. Knows nothing of kernel-agent.
 *
 *     FAULTS_CONTROL  a file of struct control, which the test writes while the program runs
 *     FAULTS_ROOT     the folder below which files are affected
 *     FAULTS_DISK     a folder for what was synced (none: nothing is recorded):
 *                       KEY         a file's bytes when it was synced last
 *                       KEY.folder  a folder's entries when it was synced last: lines of "kind KEY name"
 *
 * KEY is inode and time of birth: an inode is given to another file once its own is gone. Bytes that were
 * written and not synced are lost whole, which is the most that a disk may lose. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define NAME_MAX_BYTES 4200

struct control {
    int disk;      /* errno of what changes the disk: ENOSPC, EROFS; 0: all is well */
    int stalled;   /* nothing is synced until this is 0 again */
    long long off; /* seconds that the wall clock is wrong by */
};

static const struct control fine;
static const volatile struct control *control = &fine;
static const char *root, *disk;
static pthread_mutex_t recording = PTHREAD_MUTEX_INITIALIZER;

#define REAL(name)                                                                                           \
    static __typeof__(name) *real;                                                                           \
    if (!real)                                                                                               \
    real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

__attribute__((constructor)) static void set_up(void)
{
    const char *path = getenv("FAULTS_CONTROL");
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    void *mapped = fd < 0 ? MAP_FAILED : mmap(NULL, sizeof(*control), PROT_READ, MAP_SHARED, fd, 0);
    if (mapped != MAP_FAILED)
        control = mapped;
    if (fd >= 0)
        close(fd);
    root = getenv("FAULTS_ROOT");
    disk = getenv("FAULTS_DISK");
}

static bool is_below(const char *path)
{
    return root && strncmp(path, root, strlen(root)) == 0;
}

static bool path_of(int fd, char path[static NAME_MAX_BYTES])
{
    char link[64];
    snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
    ssize_t len = readlink(link, path, NAME_MAX_BYTES - 1);
    path[len < 0 ? 0 : len] = '\0';
    return len > 0 && is_below(path);
}

/* Sets errno. */
static bool fails(bool affected, bool wants_room)
{
    int code = control->disk;
    if (!affected || !code || (code == ENOSPC && !wants_room))
        return false;
    errno = code;
    return true;
}

/* ---- what the disk has ---- */

static void key_of(int fd, const char *name, int flags, char key[static 64])
{
    struct statx st;
    memset(&st, 0, sizeof(st));
    statx(fd, name, flags | AT_SYMLINK_NOFOLLOW, STATX_INO | STATX_BTIME | STATX_TYPE, &st);
    snprintf(key, 64, "%llu-%lld-%u", (unsigned long long)st.stx_ino, (long long)st.stx_btime.tv_sec,
             st.stx_btime.tv_nsec);
}

static FILE *begin_record(const char *key, const char *suffix, char path[static 512])
{
    snprintf(path, 512, "%s/%s%s", disk, key, suffix);
    char temp[520];
    snprintf(temp, sizeof(temp), "%s.new", path);
    return fopen(temp, "we");
}

static void end_record(FILE *file, const char *path)
{
    char temp[520];
    snprintf(temp, sizeof(temp), "%s.new", path);
    if (fclose(file) == 0)
        rename(temp, path);
}

static void record_folder(const char *path, const char *key)
{
    char to[512];
    DIR *dir = opendir(path);
    FILE *file = dir ? begin_record(key, ".folder", to) : NULL;
    for (struct dirent *entry; file && (entry = readdir(dir));) {
        char own[64];
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0)
            continue;
        key_of(dirfd(dir), entry->d_name, 0, own);
        fprintf(file, "%c %s %s\n",
                entry->d_type == DT_DIR   ? 'd'
                : entry->d_type == DT_REG ? 'f'
                                          : 'x',
                own, entry->d_name);
    }
    if (file)
        end_record(file, to);
    if (dir)
        closedir(dir);
}

/* By its own descriptor where that can be read: closing another one would let go of SQLite's locks. */
static void record_file(int fd, const char *path, const char *key)
{
    char to[512], piece[65536];
    bool readable = (fcntl(fd, F_GETFL) & O_ACCMODE) != O_WRONLY;
    int from = readable ? fd : open(path, O_RDONLY | O_CLOEXEC);
    FILE *file = from >= 0 ? begin_record(key, "", to) : NULL;
    off_t at = 0;
    for (ssize_t n; file && (n = pread(from, piece, sizeof(piece), at)) > 0; at += n)
        fwrite(piece, 1, (size_t)n, file);
    if (file)
        end_record(file, to);
    if (from >= 0 && from != fd)
        close(from);
}

static void record(int fd)
{
    char path[NAME_MAX_BYTES], key[64];
    struct stat st;
    if (!disk || !path_of(fd, path) || fstat(fd, &st) != 0)
        return;
    key_of(fd, "", AT_EMPTY_PATH, key);
    pthread_mutex_lock(&recording);
    if (S_ISDIR(st.st_mode))
        record_folder(path, key);
    else
        record_file(fd, path, key);
    pthread_mutex_unlock(&recording);
}

/* ---- files ---- */

#define ON_DESCRIPTOR(type, name, wants_room, parameters, ...)                                               \
    type name parameters                                                                                     \
    {                                                                                                        \
        REAL(name);                                                                                          \
        char path[NAME_MAX_BYTES];                                                                           \
        if (control->disk && fails(path_of(fd, path), wants_room))                                           \
            return -1;                                                                                       \
        return real(__VA_ARGS__);                                                                            \
    }

ON_DESCRIPTOR(ssize_t, write, true, (int fd, const void *bytes, size_t len), fd, bytes, len)
ON_DESCRIPTOR(ssize_t, pwrite, true, (int fd, const void *bytes, size_t len, off_t at), fd, bytes, len, at)
ON_DESCRIPTOR(ssize_t, pwrite64, true, (int fd, const void *bytes, size_t len, off64_t at), fd, bytes, len,
              at)
ON_DESCRIPTOR(int, ftruncate, false, (int fd, off_t len), fd, len)
ON_DESCRIPTOR(int, ftruncate64, false, (int fd, off64_t len), fd, len)

static void wait_for_disk(int fd)
{
    char path[NAME_MAX_BYTES];
    if (control->stalled && path_of(fd, path))
        while (control->stalled)
            usleep(5000);
}

static int after_sync(int fd, int rc)
{
    if (rc == 0)
        record(fd);
    return rc;
}

int fsync(int fd)
{
    REAL(fsync);
    char path[NAME_MAX_BYTES];
    wait_for_disk(fd);
    return control->disk && fails(path_of(fd, path), false) ? -1 : after_sync(fd, real(fd));
}

int fdatasync(int fd)
{
    REAL(fdatasync);
    char path[NAME_MAX_BYTES];
    wait_for_disk(fd);
    return control->disk && fails(path_of(fd, path), false) ? -1 : after_sync(fd, real(fd));
}

#define ON_OPENING(name)                                                                                     \
    int name(const char *path, int flags, ...)                                                               \
    {                                                                                                        \
        REAL(name);                                                                                          \
        va_list args;                                                                                        \
        va_start(args, flags);                                                                               \
        mode_t mode = flags & O_CREAT ? va_arg(args, mode_t) : 0;                                            \
        va_end(args);                                                                                        \
        bool changes = (flags & O_ACCMODE) != O_RDONLY || (flags & (O_CREAT | O_TRUNC));                     \
        bool makes = (flags & O_CREAT) && access(path, F_OK) != 0;                                           \
        return fails(changes && is_below(path), makes) ? -1 : real(path, flags, mode);                       \
    }

ON_OPENING(open)
ON_OPENING(open64)

int mkdir(const char *path, mode_t mode)
{
    REAL(mkdir);
    return fails(is_below(path) && access(path, F_OK) != 0, true) ? -1 : real(path, mode);
}

int rename(const char *from, const char *to)
{
    REAL(rename);
    return fails(is_below(to), false) ? -1 : real(from, to);
}

int unlink(const char *path)
{
    REAL(unlink);
    return fails(is_below(path), false) ? -1 : real(path);
}

int access(const char *path, int mode)
{
    REAL(access);
    return fails((mode & W_OK) && is_below(path) && control->disk == EROFS, false) ? -1 : real(path, mode);
}

/* ---- the clock ---- */

int clock_gettime(clockid_t clock, struct timespec *out)
{
    REAL(clock_gettime);
    int rc = real(clock, out);
    if (rc == 0 && clock == CLOCK_REALTIME)
        out->tv_sec += control->off;
    return rc;
}

time_t time(time_t *out)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out)
        *out = now.tv_sec;
    return now.tv_sec;
}
