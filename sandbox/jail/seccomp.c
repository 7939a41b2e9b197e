/* System calls: two filters on top of each other, because a strict list of allowed calls breaks with every
 * update of torch or of a driver.
 *
 *   A  allows by default, and refuses what a numerical program never needs: `lists` and `rules`.
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

/* Calls of which none is needed, by name or, where a stable distribution has none, by number. */
static const int refused[] = {
    /* other processes */
    SYS_ptrace, SYS_process_vm_readv, SYS_process_vm_writev, SYS_kcmp, 438 /* pidfd_getfd */,
    440 /* process_madvise */, 448 /* process_mrelease */, SYS_migrate_pages,
    /* namespaces and mounts */
    SYS_unshare, SYS_setns, SYS_mount, SYS_umount2, SYS_pivot_root, SYS_chroot, 428 /* open_tree */,
    429 /* move_mount */, 430 /* fsopen */, 431 /* fsconfig */, 432 /* fsmount */, 433 /* fspick */,
    442 /* mount_setattr */,
    /* the machine */
    SYS_bpf, SYS_perf_event_open, SYS_kexec_load, SYS_init_module, SYS_finit_module, SYS_delete_module,
    SYS_swapon, SYS_swapoff, SYS_reboot, SYS_acct, SYS_quotactl, 443 /* quotactl_fd */, SYS_syslog,
    SYS_settimeofday, SYS_clock_settime, SYS_adjtimex, SYS_clock_adjtime, SYS_sethostname, SYS_setdomainname,
    SYS_vhangup,
#ifdef __x86_64__
    SYS_kexec_file_load, SYS_iopl, SYS_ioperm, SYS_modify_ldt, SYS_uselib, SYS_ustat, SYS_sysfs,
#endif
    /* keys, and files by other ways than their path */
    SYS_add_key, SYS_request_key, SYS_keyctl, SYS_name_to_handle_at, SYS_open_by_handle_at, SYS_fanotify_init,
    SYS_fanotify_mark,
    /* the jail itself */
    SYS_seccomp};

/* glibc and Python fall back when these are absent. A watch of inotify tells names of files. */
static const int absent[] = {
#ifdef __x86_64__
    SYS_inotify_init,
#endif
    SYS_inotify_init1,  SYS_inotify_add_watch,
    SYS_clone3,         SYS_io_uring_setup,
    SYS_io_uring_enter, SYS_io_uring_register,
    SYS_userfaultfd,    447 /* memfd_secret */,
    SYS_shmget,         SYS_shmat,
    SYS_shmctl,         SYS_shmdt,
    SYS_semget,         SYS_semop,
    SYS_semctl,         SYS_semtimedop,
    SYS_msgget,         SYS_msgsnd,
    SYS_msgrcv,         SYS_msgctl,
    SYS_mq_open,        SYS_mq_unlink,
    SYS_mq_timedsend,   SYS_mq_timedreceive,
    SYS_mq_notify,      SYS_mq_getsetattr};

static const int refused_without_mounts[] = {
    SYS_fchmod,    SYS_fchmodat,    452 /* fchmodat2 */, SYS_fchown,
    SYS_fchownat,  SYS_utimensat,   SYS_setxattr,        SYS_lsetxattr,
    SYS_fsetxattr, SYS_removexattr, SYS_lremovexattr,    SYS_fremovexattr,
#ifdef __x86_64__
    SYS_chmod,     SYS_chown,       SYS_lchown,          SYS_utime,
    SYS_utimes,    SYS_futimesat
#endif
};

static const int refused_without_pids[] = {SYS_ioprio_set, SYS_setsid, SYS_setpgid};

/* Connected pairs of streams are all there is of a network. */
static const int refused_without_peers[] = {SYS_connect, SYS_accept, SYS_accept4};
static const int refused_on_cpu[] = {SYS_bind, SYS_listen};

static const struct {
    const int *calls;
    size_t count;
    uint32_t act;
    enum scope scope;
} lists[] = {
    {refused, KA_JAIL_COUNT(refused), EPERM_, EVERYWHERE},
    {absent, KA_JAIL_COUNT(absent), ENOSYS_, EVERYWHERE},
    {refused_without_mounts, KA_JAIL_COUNT(refused_without_mounts), EPERM_, NO_MOUNTS},
    {refused_without_pids, KA_JAIL_COUNT(refused_without_pids), EPERM_, NO_PIDS},
    {refused_without_peers, KA_JAIL_COUNT(refused_without_peers), EPERM_, NO_PEERS},
    {refused_on_cpu, KA_JAIL_COUNT(refused_on_cpu), EPERM_, CPU_ONLY},
};

#define LOW 0xffffffffu

/* Calls of which some are needed. */
static const struct rule rules[] = {
    {SYS_kill, EPERM_, EVERYWHERE, MASKED, 0, LOW, LOW},
    {SYS_prlimit64, EPERM_, EVERYWHERE, UNLIKE, 0, 0, 0},
    {SYS_clone, EPERM_, EVERYWHERE, ANY_BIT, 0, NEW_NAMESPACES, 0},
    {SYS_personality, EPERM_, EVERYWHERE, UNLIKE, 0, 0, LOW},
    /* whoever writes to a leased file waits */
    {SYS_fcntl, EPERM_, EVERYWHERE, MASKED, 1, LOW, F_SETLEASE},
    {SYS_sendto, EPERM_, EVERYWHERE, NOT_NULL, 4, 0, 0},
    {SYS_socket, NOFAMILY_, CPU_ONLY, ALWAYS, 0, 0, 0},
    {SYS_socket, NOFAMILY_, EVERYWHERE, UNLIKE, 0, AF_UNIX, AF_UNIX},
    {SYS_socketpair, NOFAMILY_, EVERYWHERE, UNLIKE, 0, AF_UNIX, AF_UNIX},
    /* a datagram needs no connect, and sendmsg hides its address; the kernel turns RAW into DGRAM */
    {SYS_socket, EPERM_, EVERYWHERE, MASKED, 1, 0xf, SOCK_DGRAM},
    {SYS_socket, EPERM_, EVERYWHERE, MASKED, 1, 0xf, SOCK_RAW},
    {SYS_socketpair, EPERM_, EVERYWHERE, MASKED, 1, 0xf, SOCK_DGRAM},
    {SYS_socketpair, EPERM_, EVERYWHERE, MASKED, 1, 0xf, SOCK_RAW},
    /* the jail itself */
    {SYS_prctl, EPERM_, EVERYWHERE, MASKED, 0, LOW, PR_SET_PDEATHSIG},
    {SYS_prctl, EPERM_, EVERYWHERE, MASKED, 0, LOW, PR_SET_MM},
    {SYS_prctl, EPERM_, EVERYWHERE, MASKED, 0, LOW, PR_SET_SECCOMP},
    /* terminals: pushing characters into the caller's */
    {SYS_ioctl, EPERM_, EVERYWHERE, MASKED, 1, LOW, TIOCSTI},
    {SYS_ioctl, EPERM_, EVERYWHERE, MASKED, 1, LOW, TIOCLINUX},
    {SYS_ioctl, EPERM_, EVERYWHERE, MASKED, 1, LOW, TIOCSETD},
    {SYS_ioctl, EPERM_, EVERYWHERE, MASKED, 1, LOW, TIOCCONS},
    {SYS_ioctl, EPERM_, NO_MOUNTS, MASKED, 1, LOW, (uint32_t)FS_IOC_SETFLAGS},
    {SYS_ioctl, EPERM_, NO_MOUNTS, MASKED, 1, LOW, (uint32_t)FS_IOC_FSSETXATTR},
    {SYS_setpriority, EPERM_, NO_PIDS, NOT_NULL, 0, 0, 0},
    {SYS_setpriority, EPERM_, NO_PIDS, NOT_NULL, 1, 0, 0},
    {SYS_sched_setaffinity, EPERM_, NO_PIDS, NOT_NULL, 0, 0, 0},
    {SYS_sched_setscheduler, EPERM_, NO_PIDS, NOT_NULL, 0, 0, 0},
    {SYS_sched_setparam, EPERM_, NO_PIDS, NOT_NULL, 0, 0, 0},
    {SYS_sched_setattr, EPERM_, NO_PIDS, NOT_NULL, 0, 0, 0},
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
void ka_jail_seccomp_apply(const struct ka_jail_policy *policy, struct ka_jail_report *report)
{
    struct program p = {.len = 0};
    load(&p, offsetof(struct seccomp_data, nr));
    for (size_t i = 0; i < KA_JAIL_COUNT(lists); i++)
        for (size_t k = 0; k < lists[i].count && applies(lists[i].scope, policy, report); k++)
            emit_rule(&p, &(struct rule){.nr = lists[i].calls[k], .act = lists[i].act});
    for (size_t i = 0; i < KA_JAIL_COUNT(rules); i++)
        if (applies(rules[i].scope, policy, report))
            emit_rule(&p, &rules[i]);
    give(&p, SECCOMP_RET_ALLOW);

    int rc = prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 ? 0 : -errno;
    if (!rc)
        rc = install_reviewed();
    if (!rc)
        rc = install(&p);
    ka_jail_note(report, KA_LAYER_SECCOMP, "filter", rc);
}
