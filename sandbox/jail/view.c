/* The mounts where there is no Landlock: a new root on which the readable paths appear at their names, and
 * nothing else. Knows nothing of what may be read (paths.c).
 *
 * Sources are opened before the new root covers them. A path that goes through symbolic links gets the same
 * links. */
#include "jail.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define SOURCES_MAX 256
#define LINKS_MAX 16
#define ROOT "/tmp" /* where the new root is mounted while it is built */

struct source {
    char path[PATH_MAX];
    int fd; /* O_PATH, links followed */
    bool is_folder;
};

struct view {
    struct source sources[SOURCES_MAX];
    size_t count;
    struct {
        char path[PATH_MAX], target[PATH_MAX];
    } links[SOURCES_MAX];
    size_t link_count;
};

static struct view view; /* too large for a stack */

static int note_link(const char *path, const char *target)
{
    for (size_t i = 0; i < view.link_count; i++)
        if (strcmp(view.links[i].path, path) == 0)
            return 0;
    if (view.link_count == SOURCES_MAX)
        return -E2BIG;
    snprintf(view.links[view.link_count].path, PATH_MAX, "%s", path);
    snprintf(view.links[view.link_count++].target, PATH_MAX, "%s", target);
    return 0;
}

/* The first symbolic link on the way: noted, and `path` rewritten to where it leads. 1: there was one. */
static int follow_one(char path[PATH_MAX])
{
    char prefix[PATH_MAX], target[PATH_MAX], next[3 * PATH_MAX];
    for (char *slash = path; slash; slash = strchr(slash + 1, '/')) {
        const char *end = strchr(slash + 1, '/');
        size_t len = end ? (size_t)(end - path) : strlen(path);
        snprintf(prefix, sizeof(prefix), "%.*s", (int)len, path);
        ssize_t n = readlink(prefix, target, sizeof(target) - 1);
        if (n <= 0)
            continue;
        target[n] = '\0';
        int rc = note_link(prefix, target);
        if (rc)
            return rc;
        *strrchr(prefix, '/') = '\0';
        snprintf(next, sizeof(next), "%s%s%s%s", *target == '/' ? "" : prefix, *target == '/' ? "" : "/",
                 target, end ? end : "");
        if (strlen(next) >= PATH_MAX)
            return -ENAMETOOLONG;
        strcpy(path, next);
        return 1;
    }
    return 0;
}

static int note_source(void *arg, const char *path, enum ka_jail_access access)
{
    struct stat st;
    char real[PATH_MAX];
    (void)arg;
    (void)access;
    KA_JAIL_AUTO_CLOSE int fd = open(path, O_PATH | O_CLOEXEC);
    if (fd < 0)
        return errno == ENOENT || errno == ENOTDIR || errno == EACCES ? 0 : -errno;
    int rc = snprintf(real, sizeof(real), "%s", path) < (int)sizeof(real) ? 0 : -ENAMETOOLONG;
    for (int i = 0; i < LINKS_MAX && !rc && (rc = follow_one(real)) == 1; i++)
        rc = 0;
    if (!rc && fstat(fd, &st) != 0)
        rc = -errno;
    if (!rc && view.count == SOURCES_MAX)
        rc = -E2BIG;
    if (rc)
        return rc;
    struct source *source = &view.sources[view.count++];
    snprintf(source->path, sizeof(source->path), "%s", real);
    source->fd = fd;
    source->is_folder = S_ISDIR(st.st_mode);
    fd = -1;
    return 0;
}

/* Folders on the way to ROOT/path, and the place itself. */
static int make_place(const char *path, bool is_folder)
{
    char full[PATH_MAX + 8];
    snprintf(full, sizeof(full), ROOT "%s", path);
    for (char *slash = strchr(full + strlen(ROOT) + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        if (mkdir(full, 0755) != 0 && errno != EEXIST)
            return -errno;
        *slash = '/';
    }
    if (is_folder)
        return mkdir(full, 0755) == 0 || errno == EEXIST ? 0 : -errno;
    KA_JAIL_AUTO_CLOSE int fd = open(full, O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
    return fd < 0 ? -errno : 0;
}

static bool is_there(const char *path)
{
    char full[PATH_MAX + 8];
    struct stat st;
    snprintf(full, sizeof(full), ROOT "%s", path);
    return lstat(full, &st) == 0;
}

static int bind_source(const struct source *source)
{
    char from[32], full[PATH_MAX + 8];
    if (is_there(source->path))
        return 0; /* a part of what is bound already */
    int rc = make_place(source->path, source->is_folder);
    if (rc)
        return rc;
    snprintf(from, sizeof(from), "/proc/self/fd/%d", source->fd);
    snprintf(full, sizeof(full), ROOT "%s", source->path);
    return mount(from, full, NULL, MS_BIND | MS_REC, NULL) == 0 ? 0 : -errno;
}

static int plant_link(const char *path, const char *target)
{
    char full[PATH_MAX + 8];
    char folder[PATH_MAX];
    if (is_there(path))
        return 0;
    snprintf(folder, sizeof(folder), "%s", path);
    *strrchr(folder, '/') = '\0';
    int rc = *folder ? make_place(folder, true) : 0;
    snprintf(full, sizeof(full), ROOT "%s", path);
    return rc ? rc : symlink(target, full) == 0 ? 0 : -errno;
}

/* A folder before what lies in it: the place of a file, once made, would hide that the folder is wanted
 * too. */
static int by_path(const void *a, const void *b)
{
    return strcmp(((const struct source *)a)->path, ((const struct source *)b)->path);
}

static int populate(const struct ka_jail_policy *policy, struct ka_jail_report *report, int outside)
{
    static const char *const places[] = {"/dev/shm", "/proc"};
    int rc = 0;
    qsort(view.sources, view.count, sizeof(view.sources[0]), by_path);
    for (size_t i = 0; i < view.count && !rc; i++)
        rc = bind_source(&view.sources[i]);
    for (size_t i = 0; i < view.link_count && !rc; i++)
        rc = plant_link(view.links[i].path, view.links[i].target);
    for (size_t i = 0; i < KA_JAIL_COUNT(places) && !rc; i++)
        rc = make_place(places[i], true);
    if (!rc)
        rc = plant_link("/dev/fd", "/proc/self/fd");
    if (!rc && !is_there(policy->scratch))
        rc = make_place(policy->scratch, true);
    if (!rc)
        rc = ka_jail_mount_read_only(ROOT, true); /* and then what may be written */
    if (!rc)
        rc = ka_jail_mount_scratch(policy, ROOT, outside);
    if (!rc)
        rc = ka_jail_mount_shm(ROOT);
    if (!rc)
        rc = ka_jail_mount_proc(policy, report, ROOT);
    if (rc || report->fresh_proc)
        return rc;
    if (mount("/proc", ROOT "/proc", NULL, MS_BIND | MS_REC, NULL) != 0)
        return -errno;
    return ka_jail_mount_read_only(ROOT "/proc", true);
}

int ka_jail_view_build(const struct ka_jail_policy *policy, struct ka_jail_report *report)
{
    view.count = view.link_count = 0;
    int rc = ka_jail_paths_visit(policy, note_source, NULL);
    KA_JAIL_AUTO_CLOSE int outside = open(policy->scratch, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (!rc && outside < 0)
        rc = -errno;
    if (!rc && mount("root", ROOT, "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755,size=1m") != 0)
        rc = -errno;
    if (!rc)
        rc = populate(policy, report, outside);
    if (!rc && (chdir(ROOT) != 0 || syscall(SYS_pivot_root, ".", ".") != 0 || umount2(".", MNT_DETACH) != 0 ||
                chdir("/") != 0))
        rc = -errno;
    for (size_t i = 0; i < view.count; i++)
        close(view.sources[i].fd);
    return rc;
}
