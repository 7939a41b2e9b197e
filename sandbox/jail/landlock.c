/* Landlock: the paths that can be read (paths.c) and the one that can be written; no TCP; no signals and no
 * abstract sockets beyond the jail. Everything that is not granted here is refused, whoever owns it.
 *
 * The kernel's numbers are spelled out because the headers of a stable distribution know fewer of them than
 * its kernel. A path that does not exist on this machine is skipped and never voids the rest. */
#include "jail.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef SYS_landlock_create_ruleset
#define SYS_landlock_create_ruleset 444
#define SYS_landlock_add_rule 445
#define SYS_landlock_restrict_self 446
#endif

#define RULESET_VERSION 1u
#define RULE_PATH_BENEATH 1

enum {
    FS_EXECUTE = 1 << 0,
    FS_WRITE_FILE = 1 << 1,
    FS_READ_FILE = 1 << 2,
    FS_READ_DIR = 1 << 3,
    FS_REMOVE_DIR = 1 << 4,
    FS_REMOVE_FILE = 1 << 5,
    FS_MAKE_CHAR = 1 << 6,
    FS_MAKE_DIR = 1 << 7,
    FS_MAKE_REG = 1 << 8,
    FS_MAKE_SOCK = 1 << 9,
    FS_MAKE_FIFO = 1 << 10,
    FS_MAKE_BLOCK = 1 << 11,
    FS_MAKE_SYM = 1 << 12,
    FS_REFER = 1 << 13,    /* ABI 2 */
    FS_TRUNCATE = 1 << 14, /* ABI 3 */
    FS_IOCTL_DEV = 1 << 15 /* ABI 5 */
};

enum { NET_BIND_TCP = 1 << 0, NET_CONNECT_TCP = 1 << 1 };     /* ABI 4 */
enum { SCOPE_ABSTRACT_UNIX = 1 << 0, SCOPE_SIGNAL = 1 << 1 }; /* ABI 6 */

#define READ (FS_EXECUTE | FS_READ_FILE | FS_READ_DIR)
#define WRITE                                                                                                \
    (READ | FS_WRITE_FILE | FS_REMOVE_DIR | FS_REMOVE_FILE | FS_MAKE_DIR | FS_MAKE_REG | FS_MAKE_FIFO |      \
     FS_MAKE_SYM | FS_REFER | FS_TRUNCATE)
#define FILE_RIGHTS (FS_EXECUTE | FS_WRITE_FILE | FS_READ_FILE | FS_TRUNCATE | FS_IOCTL_DEV)
#define DEVICE (FS_READ_FILE | FS_WRITE_FILE)

struct ruleset_attr {
    uint64_t fs, net, scoped;
};
struct path_attr {
    uint64_t access;
    int32_t parent_fd;
} __attribute__((packed));

struct rules {
    int fd;
    uint64_t handled;
};

static int add(const struct rules *rules, const char *path, uint64_t access)
{
    struct stat st;
    KA_JAIL_AUTO_CLOSE int fd = open(path, O_PATH | O_CLOEXEC);
    if (fd < 0)
        return errno == ENOENT || errno == ENOTDIR || errno == EACCES ? 0 : -errno;
    if (fstat(fd, &st) != 0)
        return -errno;
    struct path_attr attr = {access & rules->handled, fd};
    if (!S_ISDIR(st.st_mode))
        attr.access &= FILE_RIGHTS;
    return syscall(SYS_landlock_add_rule, rules->fd, RULE_PATH_BENEATH, &attr, 0) == 0 ? 0 : -errno;
}

static int visit(void *arg, const char *path, enum ka_jail_access access)
{
    switch (access) {
    case KA_PATH_READ:
        return add(arg, path, READ);
    case KA_PATH_DEVICE:
        return add(arg, path, DEVICE);
    case KA_PATH_GPU_NODE:
        return add(arg, path, DEVICE | FS_READ_DIR | FS_IOCTL_DEV);
    }
    return -EINVAL;
}

/* The CUDA driver writes thread names below /proc/self through fopen(..., "w"), which also truncates: without
 * that right cuInit ends with error 304. mounts.c has made the dangerous parts of a fresh /proc read-only. */
static int add_proc(struct rules *rules, const struct ka_jail_policy *policy,
                    const struct ka_jail_report *report)
{
    uint64_t write = policy->profile == KA_PROFILE_GPU ? FS_WRITE_FILE | FS_TRUNCATE : 0;
    if (report->fresh_proc)
        return add(rules, "/proc", READ | write);
    int rc = add(rules, "/proc/self", READ | write);
    return rc ? rc : ka_jail_paths_visit_shared_proc(visit, rules);
}

static int add_rules(struct rules *rules, const struct ka_jail_policy *policy,
                     const struct ka_jail_report *report)
{
    int rc = ka_jail_paths_visit(policy, visit, rules);
    if (!rc)
        rc = add_proc(rules, policy, report);
    if (!rc && ka_jail_has(report, KA_LAYER_MOUNT))
        rc = add(rules, "/dev/shm", WRITE);
    return rc ? rc : add(rules, policy->scratch, WRITE);
}

static struct ruleset_attr handled_by(int abi)
{
    struct ruleset_attr attr = {.fs = FS_REFER - 1};
    if (abi >= 2)
        attr.fs |= FS_REFER;
    if (abi >= 3)
        attr.fs |= FS_TRUNCATE;
    if (abi >= 4)
        attr.net = NET_BIND_TCP | NET_CONNECT_TCP;
    if (abi >= 5)
        attr.fs |= FS_IOCTL_DEV;
    if (abi >= 6)
        attr.scoped = SCOPE_ABSTRACT_UNIX | SCOPE_SIGNAL;
    return attr;
}

int ka_jail_landlock_abi(void)
{
    long abi = syscall(SYS_landlock_create_ruleset, NULL, 0, RULESET_VERSION);
    return abi < 0 ? -errno : (int)abi;
}

/* Older kernels refuse an attribute that is longer than what they know, unless the rest is zero: it is. */
void ka_jail_landlock_apply(const struct ka_jail_policy *policy, struct ka_jail_report *report)
{
    int abi = ka_jail_landlock_abi();
    if (abi < 1) {
        ka_jail_note(report, KA_LAYER_LANDLOCK, "not in this kernel", abi ? abi : ENOSYS);
        return;
    }
    struct ruleset_attr attr = handled_by(abi);
    KA_JAIL_AUTO_CLOSE int fd = (int)syscall(SYS_landlock_create_ruleset, &attr, sizeof(attr), 0);
    struct rules rules = {fd, attr.fs};
    if (fd < 0) {
        ka_jail_note(report, KA_LAYER_LANDLOCK, "create ruleset", errno);
        return;
    }
    int rc = add_rules(&rules, policy, report);
    if (!rc &&
        (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || syscall(SYS_landlock_restrict_self, fd, 0) != 0))
        rc = -errno;
    ka_jail_note(report, KA_LAYER_LANDLOCK, "rules", rc);
    report->landlock_abi = rc ? 0 : abi;
}
