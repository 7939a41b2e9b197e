/* The jail's view of the file system, built by the first process of its pid namespace: everything read-only,
 * then a private scratch with size and inode caps, an own /dev/shm and a /proc that shows this jail only.
 * Which paths may be read is landlock.c's business. */
#include "jail.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <unistd.h>

#ifndef SYS_mount_setattr
#define SYS_mount_setattr 442
#endif
#define KA_AT_RECURSIVE 0x8000
#define KA_ATTR_RDONLY 0x1
#define KA_ATTR_NOSUID 0x2

/* Files that the caller put into the scratch beforehand are few and small (request.json). */
#define COPY_MAX ((size_t)64 << 20)

struct mount_attr_v0 {
    uint64_t attr_set, attr_clr, propagation, userns_fd;
};

int ka_jail_mount_read_only(const char *path, bool recursive)
{
    struct mount_attr_v0 attr = {.attr_set = KA_ATTR_RDONLY | KA_ATTR_NOSUID};
    unsigned flags = recursive ? KA_AT_RECURSIVE : 0;
    return syscall(SYS_mount_setattr, AT_FDCWD, path, flags, &attr, sizeof(attr)) == 0 ? 0 : -errno;
}

static int copy_bytes(int from, int to, size_t *left)
{
    char chunk[16384];
    for (;;) {
        ssize_t n = read(from, chunk, sizeof(chunk));
        if (n <= 0)
            return n < 0 ? -errno : 0;
        if ((size_t)n > *left)
            return -EFBIG;
        *left -= (size_t)n;
        if (write(to, chunk, (size_t)n) != n)
            return -EIO;
    }
}

static int copy_file(int from_dir, int to_dir, const char *name, size_t *left)
{
    struct stat st;
    KA_JAIL_AUTO_CLOSE int from = openat(from_dir, name, O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
    if (from < 0)
        return -errno;
    if (fstat(from, &st) != 0 || !S_ISREG(st.st_mode))
        return 0;
    KA_JAIL_AUTO_CLOSE int to = openat(to_dir, name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    return to < 0 ? -errno : copy_bytes(from, to, left);
}

static int copy_files(int from_dir, int to_dir)
{
    size_t left = COPY_MAX;
    int rc = 0;
    int fd = dup(from_dir);
    DIR *dir = fd < 0 ? NULL : fdopendir(fd);
    if (!dir)
        return -errno;
    for (struct dirent *entry; !rc && (entry = readdir(dir));)
        if (entry->d_type == DT_REG || entry->d_type == DT_UNKNOWN)
            if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0)
                rc = copy_file(from_dir, to_dir, entry->d_name, &left);
    closedir(dir);
    return rc;
}

/* In large pages where the kernel has them: else mapping tensors and letting them go is most of the work. */
static int mount_scratch(const struct ka_jail_policy *policy, const char *path)
{
    static const char *const pages[] = {",huge=within_size", ""};
    int rc = -1;
    for (size_t i = 0; rc && i < KA_JAIL_COUNT(pages); i++) {
        char options[128];
        snprintf(options, sizeof(options), "mode=0700,size=%llum,nr_inodes=%llu%s",
                 (unsigned long long)policy->scratch_mb, (unsigned long long)policy->scratch_inodes,
                 pages[i]);
        rc = mount("scratch", path, "tmpfs", MS_NOSUID | MS_NODEV, options);
    }
    return rc ? -errno : 0;
}

int ka_jail_mount_scratch(const struct ka_jail_policy *policy, const char *root, int outside)
{
    char path[2 * PATH_MAX];
    snprintf(path, sizeof(path), "%s%s", root, policy->scratch);
    int rc = mount_scratch(policy, path);
    if (rc)
        return rc;
    KA_JAIL_AUTO_CLOSE int inside = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    return inside < 0 ? -errno : copy_files(outside, inside);
}

int ka_jail_mount_shm(const char *root)
{
    char path[PATH_MAX];
    snprintf(path, sizeof(path), "%s/dev/shm", root);
    if (mount("shm", path, "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777,size=256m,nr_inodes=4096") != 0)
        return errno == ENOENT ? 0 : -errno;
    return 0;
}

/* Since 6.14 pid_max belongs to the pid namespace; before, writing it would change the whole machine. It is
 * the one cap on processes that holds for root without a control group. The kernel accepts no less than 301.
 */
static bool cap_pids(const struct ka_jail_policy *policy, const char *proc)
{
    struct utsname name;
    unsigned major = 0, minor = 0;
    char text[24], path[2 * PATH_MAX];
    if (uname(&name) != 0 || sscanf(name.release, "%u.%u", &major, &minor) != 2)
        return false;
    if (major < 6 || (major == 6 && minor < 14))
        return false;
    snprintf(path, sizeof(path), "%s/sys/kernel/pid_max", proc);
    snprintf(text, sizeof(text), "%llu", (unsigned long long)(policy->nproc < 301 ? 301 : policy->nproc));
    return ka_jail_write(AT_FDCWD, path, text) == 0;
}

/* A user who is root outside owns the files of /proc/sys even without any capability. The cpu profile needs
 * no writable /proc at all; the CUDA driver writes thread names below /proc/self. */
static int close_proc(const struct ka_jail_policy *policy, const char *proc)
{
    static const char *const parts[] = {"sys", "sysrq-trigger", "irq", "bus", "fs", "acpi", "scsi"};
    char path[2 * PATH_MAX];
    if (policy->profile == KA_PROFILE_CPU)
        return ka_jail_mount_read_only(proc, false);
    for (size_t i = 0; i < KA_JAIL_COUNT(parts); i++) {
        snprintf(path, sizeof(path), "%s/%s", proc, parts[i]);
        if (mount(path, path, NULL, MS_BIND, NULL) != 0) {
            if (errno == ENOENT)
                continue;
            return -errno;
        }
        int rc = ka_jail_mount_read_only(path, false);
        if (rc)
            return rc;
    }
    return 0;
}

/* Refused in containers whose /proc is partly covered; Landlock then shows /proc/self alone. */
int ka_jail_mount_proc(const struct ka_jail_policy *policy, struct ka_jail_report *report, const char *root)
{
    char proc[PATH_MAX];
    snprintf(proc, sizeof(proc), "%s/proc", root);
    if (!ka_jail_has(report, KA_LAYER_PID))
        return 0;
    if (mount("proc", proc, "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL) != 0)
        return 0;
    report->pid_max = cap_pids(policy, proc);
    report->fresh_proc = true;
    return close_proc(policy, proc);
}

static int build(const struct ka_jail_policy *policy, struct ka_jail_report *report)
{
    KA_JAIL_AUTO_CLOSE int outside = open(policy->scratch, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int rc = outside < 0 ? -errno : ka_jail_mount_scratch(policy, "", outside);
    if (!rc)
        rc = ka_jail_mount_shm("");
    return rc ? rc : ka_jail_mount_proc(policy, report, "");
}

int ka_jail_mounts_build(const struct ka_jail_policy *policy, struct ka_jail_report *report)
{
    if (!ka_jail_has(report, KA_LAYER_MOUNT))
        return 0;
    if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0) {
        ka_jail_note(report, KA_LAYER_MOUNT, "private mounts", errno);
        return 0;
    }
    int rc = ka_jail_mount_read_only("/", true);
    if (rc) {
        ka_jail_note(report, KA_LAYER_MOUNT, "read-only tree", rc);
        return 0;
    }
    bool landlock = ka_jail_wants(policy, KA_LAYER_LANDLOCK) && ka_jail_landlock_abi() > 0;
    return landlock ? build(policy, report) : ka_jail_view_build(policy, report);
}

int ka_jail_scratch_prepare(const struct ka_jail_policy *policy, struct ka_jail_report *report)
{
    static const char *const folders[] = {"tmp", "cache", "triton"};
    KA_JAIL_AUTO_CLOSE int fd = open(policy->scratch, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0)
        return -errno;
    for (size_t i = 0; i < KA_JAIL_COUNT(folders); i++)
        if (mkdirat(fd, folders[i], 0700) != 0 && errno != EEXIST)
            return -errno;
    report->scratch_fd = fd;
    fd = -1;
    return 0;
}
