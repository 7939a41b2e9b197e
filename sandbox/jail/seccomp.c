/* System calls: two filters on top of each other, because a strict list of allowed calls breaks with every
 * update of torch or of a driver.
 *
 *   A  allows by default, and refuses what a numerical program never needs: one line of `rules` each.
 *   B  kills foreign architectures, and answers ENOSYS for calls newer than the ones that were reviewed.
 *
 * The programs are assembled here rather than with a library: the kernel truncates most arguments to 32 bits
 * before it looks at them, so a rule has to compare exactly the low word (`TIOCSTI | 1 << 32` would pass a
 * 64-bit comparison), a few need "neither of two values", and the newest calls have no name in a stable
 * distribution. Calls without a rule cost nothing: the kernel keeps a bitmap of what is always allowed. */
#include "jail.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/fs.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <stddef.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#if defined(__x86_64__)
#define KA_ARCH AUDIT_ARCH_X86_64
#elif defined(__aarch64__)
#define KA_ARCH AUDIT_ARCH_AARCH64
#else
#error "seccomp.c: add this architecture"
#endif

/* The newest call that was reviewed: futex_requeue. */
#define KA_NR_LAST 456
#define KA_X32_BIT 0x40000000u

#define EPERM_ (SECCOMP_RET_ERRNO | EPERM)
#define ENOSYS_ (SECCOMP_RET_ERRNO | ENOSYS)
#define NOFAMILY_ (SECCOMP_RET_ERRNO | EAFNOSUPPORT)

#define NEW_NAMESPACES                                                                                       \
    (CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID |            \
     CLONE_NEWNET)

enum when {
    ALWAYS,
    MASKED,   /* (low word & mask) == value */
    ANY_BIT,  /* low word & mask */
    UNLIKE,   /* low word is neither `mask` nor `value` */
    NOT_NULL, /* either word */
};

enum scope {
    EVERYWHERE,
    CPU_ONLY,  /* refused in the cpu profile */
    NO_MOUNTS, /* refused when nothing makes the tree read-only: Landlock does not cover metadata */
    NO_PEERS,  /* refused unless local_sockets is asked for, and network and mounts are its own */
    NO_PIDS,   /* refused when no pid namespace ends the whole tree: everything stays in one process group */
};

struct rule {
    int nr;
    uint32_t act;
    enum scope scope;
    enum when when;
    int arg;
    uint32_t mask, value;
};

#define RULE(...)                                                                                            \
    {                                                                                                        \
        __VA_ARGS__                                                                                          \
    }
#define NUMBER(nr, act, scope) RULE(nr, act, scope, ALWAYS, 0, 0, 0)
#define REFUSE(call) NUMBER(SYS_##call, EPERM_, EVERYWHERE)
#define ABSENT(call) NUMBER(SYS_##call, ENOSYS_, EVERYWHERE)
#define REFUSE_IN(scope, call) NUMBER(SYS_##call, EPERM_, scope)
#define REFUSE_IF(call, when, arg, mask, value) RULE(SYS_##call, EPERM_, EVERYWHERE, when, arg, mask, value)
#define LOW 0xffffffffu

static const struct rule rules[] = {
    /* other processes */
    REFUSE(ptrace),
    REFUSE(process_vm_readv),
    REFUSE(process_vm_writev),
    REFUSE(kcmp),
    NUMBER(438, EPERM_, EVERYWHERE), /* pidfd_getfd */
    NUMBER(440, EPERM_, EVERYWHERE), /* process_madvise */
    NUMBER(448, EPERM_, EVERYWHERE), /* process_mrelease */
    REFUSE(migrate_pages),
    REFUSE_IF(kill, MASKED, 0, LOW, LOW),
    REFUSE_IF(prlimit64, UNLIKE, 0, 0, 0),
    /* namespaces and mounts */
    REFUSE(unshare),
    REFUSE(setns),
    REFUSE_IF(clone, ANY_BIT, 0, NEW_NAMESPACES, 0),
    REFUSE(mount),
    REFUSE(umount2),
    REFUSE(pivot_root),
    REFUSE(chroot),
    NUMBER(428, EPERM_, EVERYWHERE), /* open_tree */
    NUMBER(429, EPERM_, EVERYWHERE), /* move_mount */
    NUMBER(430, EPERM_, EVERYWHERE), /* fsopen */
    NUMBER(431, EPERM_, EVERYWHERE), /* fsconfig */
    NUMBER(432, EPERM_, EVERYWHERE), /* fsmount */
    NUMBER(433, EPERM_, EVERYWHERE), /* fspick */
    NUMBER(442, EPERM_, EVERYWHERE), /* mount_setattr */
    /* the machine */
    REFUSE(bpf),
    REFUSE(perf_event_open),
    REFUSE(kexec_load),
    REFUSE(init_module),
    REFUSE(finit_module),
    REFUSE(delete_module),
    REFUSE(swapon),
    REFUSE(swapoff),
    REFUSE(reboot),
    REFUSE(acct),
    REFUSE(quotactl),
    NUMBER(443, EPERM_, EVERYWHERE), /* quotactl_fd */
    REFUSE(syslog),
    REFUSE(settimeofday),
    REFUSE(clock_settime),
    REFUSE(adjtimex),
    REFUSE(clock_adjtime),
    REFUSE(sethostname),
    REFUSE(setdomainname),
    REFUSE(vhangup),
#ifdef __x86_64__
    REFUSE(kexec_file_load),
    REFUSE(iopl),
    REFUSE(ioperm),
    REFUSE(modify_ldt),
    REFUSE(uselib),
    REFUSE(ustat),
    REFUSE(sysfs),
#endif
    REFUSE_IF(personality, UNLIKE, 0, 0, LOW),
    /* keys, and files by other ways than their path */
    REFUSE(add_key),
    REFUSE(request_key),
    REFUSE(keyctl),
    REFUSE(name_to_handle_at),
    REFUSE(open_by_handle_at),
    REFUSE(fanotify_init),
    REFUSE(fanotify_mark),
    /* files that may be read, or only be named: whoever writes to a leased one waits; a watch tells names */
    REFUSE_IF(fcntl, MASKED, 1, LOW, F_SETLEASE),
    ABSENT(inotify_init1),
    ABSENT(inotify_add_watch),
    /* network: a connected pair of streams is all there is */
    REFUSE_IN(NO_PEERS, connect),
    REFUSE_IN(NO_PEERS, accept),
    REFUSE_IN(NO_PEERS, accept4),
    REFUSE_IF(sendto, NOT_NULL, 4, 0, 0),
    {SYS_socket, NOFAMILY_, CPU_ONLY, ALWAYS, 0, 0, 0},
    {SYS_socket, NOFAMILY_, EVERYWHERE, UNLIKE, 0, AF_UNIX, AF_UNIX},
    {SYS_socketpair, NOFAMILY_, EVERYWHERE, UNLIKE, 0, AF_UNIX, AF_UNIX},
    /* a datagram needs no connect, and sendmsg hides its address; the kernel turns RAW into DGRAM */
    REFUSE_IF(socket, MASKED, 1, 0xf, SOCK_DGRAM),
    REFUSE_IF(socket, MASKED, 1, 0xf, SOCK_RAW),
    REFUSE_IF(socketpair, MASKED, 1, 0xf, SOCK_DGRAM),
    REFUSE_IF(socketpair, MASKED, 1, 0xf, SOCK_RAW),
    REFUSE_IN(CPU_ONLY, bind),
    REFUSE_IN(CPU_ONLY, listen),
    /* the jail itself */
    REFUSE(seccomp),
    REFUSE_IF(prctl, MASKED, 0, LOW, PR_SET_PDEATHSIG),
    REFUSE_IF(prctl, MASKED, 0, LOW, PR_SET_MM),
    REFUSE_IF(prctl, MASKED, 0, LOW, PR_SET_SECCOMP),
    /* terminals: pushing characters into the caller's */
    REFUSE_IF(ioctl, MASKED, 1, LOW, TIOCSTI),
    REFUSE_IF(ioctl, MASKED, 1, LOW, TIOCLINUX),
    REFUSE_IF(ioctl, MASKED, 1, LOW, TIOCSETD),
    REFUSE_IF(ioctl, MASKED, 1, LOW, TIOCCONS),
    /* glibc and Python fall back when these are absent */
    ABSENT(clone3),
    ABSENT(io_uring_setup),
    ABSENT(io_uring_enter),
    ABSENT(io_uring_register),
    ABSENT(userfaultfd),
    NUMBER(447, ENOSYS_, EVERYWHERE), /* memfd_secret */
    ABSENT(shmget),
    ABSENT(shmat),
    ABSENT(shmctl),
    ABSENT(shmdt),
    ABSENT(semget),
    ABSENT(semop),
    ABSENT(semctl),
    ABSENT(semtimedop),
    ABSENT(msgget),
    ABSENT(msgsnd),
    ABSENT(msgrcv),
    ABSENT(msgctl),
    ABSENT(mq_open),
    ABSENT(mq_unlink),
    ABSENT(mq_timedsend),
    ABSENT(mq_timedreceive),
    ABSENT(mq_notify),
    ABSENT(mq_getsetattr),
    /* what a mount namespace would have stopped */
    REFUSE_IN(NO_MOUNTS, fchmod),
    REFUSE_IN(NO_MOUNTS, fchmodat),
    REFUSE_IN(NO_MOUNTS, fchown),
    REFUSE_IN(NO_MOUNTS, fchownat),
    REFUSE_IN(NO_MOUNTS, utimensat),
    REFUSE_IN(NO_MOUNTS, setxattr),
    REFUSE_IN(NO_MOUNTS, lsetxattr),
    REFUSE_IN(NO_MOUNTS, fsetxattr),
    REFUSE_IN(NO_MOUNTS, removexattr),
    REFUSE_IN(NO_MOUNTS, lremovexattr),
    REFUSE_IN(NO_MOUNTS, fremovexattr),
    NUMBER(452, EPERM_, NO_MOUNTS), /* fchmodat2 */
    {SYS_ioctl, EPERM_, NO_MOUNTS, MASKED, 1, LOW, (uint32_t)FS_IOC_SETFLAGS},
    {SYS_ioctl, EPERM_, NO_MOUNTS, MASKED, 1, LOW, (uint32_t)FS_IOC_FSSETXATTR},
#ifdef __x86_64__
    ABSENT(inotify_init),
    REFUSE_IN(NO_MOUNTS, chmod),
    REFUSE_IN(NO_MOUNTS, chown),
    REFUSE_IN(NO_MOUNTS, lchown),
    REFUSE_IN(NO_MOUNTS, utime),
    REFUSE_IN(NO_MOUNTS, utimes),
    REFUSE_IN(NO_MOUNTS, futimesat),
#endif
    /* what a pid namespace would have stopped */
    REFUSE_IN(NO_PIDS, ioprio_set),
    {SYS_setpriority, EPERM_, NO_PIDS, NOT_NULL, 0, 0, 0},
    {SYS_setpriority, EPERM_, NO_PIDS, NOT_NULL, 1, 0, 0},
    {SYS_sched_setaffinity, EPERM_, NO_PIDS, NOT_NULL, 0, 0, 0},
    {SYS_sched_setscheduler, EPERM_, NO_PIDS, NOT_NULL, 0, 0, 0},
    {SYS_sched_setparam, EPERM_, NO_PIDS, NOT_NULL, 0, 0, 0},
    {SYS_sched_setattr, EPERM_, NO_PIDS, NOT_NULL, 0, 0, 0},
    REFUSE_IN(NO_PIDS, setsid),
    REFUSE_IN(NO_PIDS, setpgid),
};

#define PROGRAM_MAX 1024

struct program {
    struct sock_filter code[PROGRAM_MAX];
    unsigned short len;
};

static void emit(struct program *p, uint16_t code, uint32_t k, uint8_t yes, uint8_t no)
{
    if (p->len < PROGRAM_MAX)
        p->code[p->len++] = (struct sock_filter){code, yes, no, k};
}

static void load(struct program *p, size_t offset)
{
    emit(p, BPF_LD | BPF_W | BPF_ABS, (uint32_t)offset, 0, 0);
}

static void jump_equal(struct program *p, uint32_t k, uint8_t yes, uint8_t no)
{
    emit(p, BPF_JMP | BPF_JEQ | BPF_K, k, yes, no);
}

static void give(struct program *p, uint32_t act)
{
    emit(p, BPF_RET | BPF_K, act, 0, 0);
}

static size_t arg_offset(int arg, bool high)
{
    return offsetof(struct seccomp_data, args) + (size_t)arg * 8 + (high ? 4 : 0); /* little endian */
}

/* The accumulator holds the call's number before and after. Jumps count the instructions to skip. */
static void emit_rule(struct program *p, const struct rule *rule)
{
    unsigned short start = p->len;
    jump_equal(p, (uint32_t)rule->nr, 0, 0);
    if (rule->when != ALWAYS)
        load(p, arg_offset(rule->arg, false));
    switch (rule->when) {
    case ALWAYS:
        break;
    case MASKED:
        emit(p, BPF_ALU | BPF_AND | BPF_K, rule->mask, 0, 0);
        jump_equal(p, rule->value, 0, 1);
        break;
    case ANY_BIT:
        emit(p, BPF_JMP | BPF_JSET | BPF_K, rule->mask, 0, 1);
        break;
    case UNLIKE:
        jump_equal(p, rule->mask, 2, 0);
        jump_equal(p, rule->value, 1, 0);
        break;
    case NOT_NULL:
        jump_equal(p, 0, 0, 2);
        load(p, arg_offset(rule->arg, true));
        jump_equal(p, 0, 1, 0);
        break;
    }
    give(p, rule->act);
    if (rule->when != ALWAYS)
        load(p, offsetof(struct seccomp_data, nr));
    p->code[start].jf = (uint8_t)(p->len - start - 1);
}

static bool applies(enum scope scope, const struct ka_jail_policy *policy,
                    const struct ka_jail_report *report)
{
    switch (scope) {
    case EVERYWHERE:
        return true;
    case CPU_ONLY:
        return policy->profile == KA_PROFILE_CPU;
    case NO_MOUNTS:
        return !ka_jail_has(report, KA_LAYER_MOUNT);
    case NO_PEERS:
        return !policy->local_sockets || !ka_jail_has(report, KA_LAYER_NET) ||
               !ka_jail_has(report, KA_LAYER_MOUNT);
    case NO_PIDS:
        return !ka_jail_has(report, KA_LAYER_PID);
    }
    return true;
}

static int install(const struct program *p)
{
    struct sock_fprog fprog = {p->len, (struct sock_filter *)p->code};
    if (p->len >= PROGRAM_MAX)
        return -E2BIG;
    return prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &fprog, 0, 0) == 0 ? 0 : -errno;
}

static int install_reviewed(void)
{
    struct program p = {.len = 0};
    load(&p, offsetof(struct seccomp_data, arch));
    jump_equal(&p, KA_ARCH, 1, 0);
    give(&p, SECCOMP_RET_KILL_PROCESS);
    load(&p, offsetof(struct seccomp_data, nr));
    emit(&p, BPF_JMP | BPF_JSET | BPF_K, KA_X32_BIT, 0, 1);
    give(&p, SECCOMP_RET_KILL_PROCESS);
    emit(&p, BPF_JMP | BPF_JGT | BPF_K, KA_NR_LAST, 0, 1);
    give(&p, ENOSYS_);
    give(&p, SECCOMP_RET_ALLOW);
    return install(&p);
}

/* B goes first: A then refuses prctl(PR_SET_SECCOMP). */
int ka_jail_seccomp_apply(const struct ka_jail_policy *policy, struct ka_jail_report *report)
{
    struct program p = {.len = 0};
    load(&p, offsetof(struct seccomp_data, nr));
    for (size_t i = 0; i < KA_JAIL_COUNT(rules); i++)
        if (applies(rules[i].scope, policy, report))
            emit_rule(&p, &rules[i]);
    give(&p, SECCOMP_RET_ALLOW);

    int rc = prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 ? 0 : -errno;
    if (!rc)
        rc = install_reviewed();
    if (!rc)
        rc = install(&p);
    if (rc)
        ka_jail_note(report, KA_LAYER_SECCOMP, "filter", rc);
    else
        report->on |= KA_LAYER_BIT(KA_LAYER_SECCOMP);
    return 0;
}
