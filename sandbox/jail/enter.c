/* The last steps before hostile code: shared by ka-jail's program and by the children of a zygote, which call
 * this through libka_jail.so after their fork. Knows nothing of Python beyond that. */
#include "jail.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>

/* One child a process: these belong to it, or to its zygote. */
static struct ka_jail_options child_options;
static int own_pid_ns = -1;
static int alive[2] = {-1, -1}; /* nobody writes; the zygote alone holds the reading end */

int ka_jail_complain(int code, const char *what, int error)
{
    if (error)
        fprintf(stderr, "ka-jail: %s: %s\n", what, strerror(error < 0 ? -error : error));
    else
        fprintf(stderr, "ka-jail: %s\n", what);
    return code;
}

static void complain_missing(unsigned missing, const struct ka_jail_report *report)
{
    for (int i = 0; i < KA_LAYER_COUNT; i++)
        if (missing & KA_LAYER_BIT(i))
            fprintf(stderr, "ka-jail: required layer is missing: %s (%s)\n", ka_jail_layer_name(i),
                    report->why[i][0] ? report->why[i] : "left out");
}

int ka_jail_furnish(const struct ka_jail_options *o, struct ka_jail_report *report)
{
    int rc = ka_jail_mounts_build(&o->policy, report);
    if (rc)
        return ka_jail_complain(KA_JAIL_EXIT_FAILED, "mounts", rc);
    rc = ka_jail_scratch_prepare(&o->policy, report);
    return rc ? ka_jail_complain(KA_JAIL_EXIT_FAILED, o->policy.scratch, rc) : 0;
}

int ka_jail_become(const struct ka_jail_options *o, struct ka_jail_report *report)
{
    if (chdir(o->policy.scratch) != 0)
        return ka_jail_complain(KA_JAIL_EXIT_FAILED, o->policy.scratch, errno);
    ka_jail_lock_down(&o->policy, report);
    int rc = o->result_fd < 0 ? 0 : ka_jail_report_send(o->result_fd, &o->policy, report);
    if (rc)
        return ka_jail_complain(KA_JAIL_EXIT_FAILED, "report", rc);
    unsigned missing = ka_jail_missing(&o->policy, report);
    if (missing)
        complain_missing(missing, report);
    return missing ? KA_JAIL_EXIT_MISSING : 0;
}

/* ---- zygote ---- */

int ka_jail_zygote_begin(void)
{
    if (prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0) != 0 || prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) != 0)
        return -errno;
    for (size_t i = 0; i < KA_JAIL_COUNT(alive); i++) /* a twin has its parent's */
        if (alive[i] >= 0)
            close(alive[i]);
    if (own_pid_ns >= 0)
        close(own_pid_ns);
    if (pipe2(alive, O_CLOEXEC) != 0)
        return -errno;
    own_pid_ns = open("/proc/self/ns/pid", O_RDONLY | O_CLOEXEC);
    return own_pid_ns < 0 ? -errno : 0;
}

int ka_jail_zygote_unshare(void)
{
    return unshare(CLONE_NEWPID) == 0 ? 0 : -errno;
}

/* A second unshare fails until the first is undone. */
int ka_jail_zygote_back(void)
{
    return setns(own_pid_ns, CLONE_NEWPID) == 0 ? 0 : -errno;
}

/* ---- child of a zygote ---- */

static void end_now(int sig)
{
    _exit(128 + sig);
}

/* The kernel ignores what would end the first process of a pid namespace by default: abort() and the limit of
 * processor time would not. Python's own handlers stay. */
static void end_on_signals(void)
{
    static const int ending[] = {SIGHUP,  SIGQUIT, SIGABRT, SIGUSR1,   SIGUSR2, SIGALRM,
                                 SIGTERM, SIGXCPU, SIGIO,   SIGVTALRM, SIGPROF, SIGPWR};
    for (size_t i = 0; i < KA_JAIL_COUNT(ending); i++) {
        struct sigaction now;
        if (sigaction(ending[i], NULL, &now) == 0 && now.sa_handler == SIG_DFL)
            signal(ending[i], end_now);
    }
}

int ka_jail_enter(int argc, char **argv)
{
    struct ka_jail_options *o = &child_options;
    struct ka_jail_report report;
    ka_jail_report_init(&report);
    prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
    close(alive[0]);
    if (ka_jail_reader_is_gone(alive[1])) /* outside the pid namespace: getppid() tells nothing of it */
        return KA_JAIL_EXIT_FAILED;
    if (ka_jail_options_parse(argc, argv, o) != 0)
        return KA_JAIL_EXIT_USAGE;
    end_on_signals();
    setsid();
    umask(077);
    int rc = ka_jail_close_fds(&o->result_fd, 1);
    if (rc)
        return ka_jail_complain(KA_JAIL_EXIT_FAILED, "close_range", rc);
    ka_jail_program_readable(o);
    ka_jail_environment_build(o);

    if (getenv(KA_JAIL_ENV_CGROUP))
        report.on |= KA_LAYER_BIT(KA_LAYER_CGROUP);
    ka_jail_oom_first();
    ka_jail_namespaces_join(&o->policy, &report);
    prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
    int code = ka_jail_furnish(o, &report);
    if (code)
        return code;
    prctl(PR_SET_DUMPABLE, 1, 0, 0, 0);
    code = ka_jail_become(o, &report);
    close(o->result_fd);
    close(report.scratch_fd);
    return code;
}

const char *ka_jail_env(int i)
{
    return i >= 0 && (size_t)i < child_options.env_count ? child_options.env[i] : NULL;
}
