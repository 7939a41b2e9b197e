/* Resource limits, capabilities and descriptors: what a process takes with it. Knows nothing of paths or
 * system calls. */
#include "jail.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <linux/securebits.h>
#include <limits.h>
#include <poll.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#define NICE 5

#ifndef SYS_close_range
#define SYS_close_range 436
#endif

static int limit(int resource, uint64_t soft, uint64_t hard)
{
    struct rlimit now;
    if (getrlimit((__rlimit_resource_t)resource, &now) != 0)
        return -errno;
    rlim_t top = now.rlim_max < hard ? now.rlim_max : hard;
    struct rlimit next = {soft < top ? soft : top, top};
    return setrlimit((__rlimit_resource_t)resource, &next) == 0 ? 0 : -errno;
}

/* The kernel counts all processes of the user, or those of the user namespace. Without one, what runs already
 * must not use up the allowance: there the limit is loose. */
static uint64_t process_limit(const struct ka_jail_policy *policy, const struct ka_jail_report *report)
{
    struct sysinfo info;
    if (report->user_ns || sysinfo(&info) != 0)
        return policy->nproc;
    return policy->nproc + info.procs;
}

/* Not RLIMIT_AS: CUDA reserves address space for twice the card. SIGXCPU comes first, SIGKILL a second later.
 */
void ka_jail_limits_apply(const struct ka_jail_policy *policy, struct ka_jail_report *report)
{
    uint64_t mem = policy->mem_mb ? policy->mem_mb << 20 : RLIM_INFINITY;
    uint64_t file = policy->fsize_mb << 20, processes = process_limit(policy, report);
    const struct {
        int resource;
        uint64_t soft, hard;
    } limits[] = {
        {RLIMIT_DATA, mem, mem},     {RLIMIT_CPU, policy->cpu_s, policy->cpu_s + 1},
        {RLIMIT_FSIZE, file, file},  {RLIMIT_NPROC, processes, processes},
        {RLIMIT_NOFILE, 1024, 1024}, {RLIMIT_CORE, 0, 0},
        {RLIMIT_MSGQUEUE, 0, 0},     {RLIMIT_RTPRIO, 0, 0},
        {RLIMIT_NICE, 0, 0},         {RLIMIT_SIGPENDING, 4096, 4096},
    };
    int rc = 0;
    for (size_t i = 0; i < KA_JAIL_COUNT(limits) && !rc; i++)
        rc = limit(limits[i].resource, limits[i].soft, limits[i].hard);
    ka_jail_note(report, KA_LAYER_LIMITS, "setrlimit", rc);
    /* Who computes comes after the daemon, which answers. Nothing is lost where that cannot be had. */
    if (getpriority(PRIO_PROCESS, 0) < NICE)
        (void)setpriority(PRIO_PROCESS, 0, NICE);
}

void ka_jail_close_at(const int *fd)
{
    if (*fd >= 0)
        close(*fd);
}

bool ka_jail_reader_is_gone(int fd)
{
    struct pollfd at = {.fd = fd, .events = POLLOUT};
    return poll(&at, 1, 0) == 1 && (at.revents & (POLLERR | POLLNVAL));
}

int ka_jail_write(int dir, const char *path, const char *text)
{
    KA_JAIL_AUTO_CLOSE int fd = openat(dir, path, O_WRONLY | O_CLOEXEC);
    return fd < 0 || write(fd, text, strlen(text)) < 0 ? -errno : 0;
}

void ka_jail_oom_first(void)
{
    ka_jail_write(AT_FDCWD, "/proc/self/oom_score_adj", "1000");
}

/* Also for a user who is root: an empty bounding set keeps exec from giving anything back. */
void ka_jail_caps_drop(struct ka_jail_report *report)
{
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct none[2] = {{0}};
    const unsigned long bits = SECBIT_NOROOT | SECBIT_NOROOT_LOCKED | SECBIT_NO_SETUID_FIXUP |
                               SECBIT_NO_SETUID_FIXUP_LOCKED | SECBIT_KEEP_CAPS_LOCKED |
                               SECBIT_NO_CAP_AMBIENT_RAISE | SECBIT_NO_CAP_AMBIENT_RAISE_LOCKED;
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0);
    for (unsigned long cap = 0; prctl(PR_CAPBSET_READ, cap, 0, 0, 0) >= 0; cap++)
        prctl(PR_CAPBSET_DROP, cap, 0, 0,
              0); /* refused without CAP_SETPCAP, and then there is nothing to give */
    prctl(PR_SET_SECUREBITS, bits, 0, 0, 0);
    if (syscall(SYS_capset, &header, none) != 0)
        ka_jail_note(report, KA_LAYER_CAPS, "capset", errno);
    else
        ka_jail_note(report, KA_LAYER_CAPS, "no_new_privs",
                     prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) ? errno : 0);
}

int ka_jail_caps_keep(void)
{
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct data[2] = {{0}};
    if (syscall(SYS_capget, &header, data) != 0)
        return -errno;
    for (int i = 0; i < 2; i++)
        data[i].inheritable = data[i].permitted;
    if (syscall(SYS_capset, &header, data) != 0)
        return -errno;
    for (unsigned long cap = 0; prctl(PR_CAPBSET_READ, cap, 0, 0, 0) >= 0; cap++)
        if (prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, cap, 0, 0) != 0)
            return -errno;
    return 0;
}

static int close_between(unsigned first, unsigned last)
{
    if (first > last)
        return 0;
    if (syscall(SYS_close_range, first, last, 0) == 0)
        return 0;
    if (errno != ENOSYS)
        return -errno;
    long top = sysconf(_SC_OPEN_MAX);
    for (unsigned fd = first; fd <= last && fd < (unsigned)(top > 0 ? top : 65536); fd++)
        close((int)fd);
    return 0;
}

int ka_jail_close_fds(const int *keep, size_t count)
{
    unsigned from = 3;
    for (;;) {
        unsigned next = UINT_MAX;
        for (size_t i = 0; i < count; i++)
            if (keep[i] >= (int)from && (unsigned)keep[i] < next)
                next = (unsigned)keep[i];
        if (next == UINT_MAX)
            return close_between(from, UINT_MAX);
        int rc = close_between(from, next - 1);
        if (rc)
            return rc;
        from = next + 1;
    }
}
