/* ka-jail: run one program inside the layers. Three processes:
 *
 *   the supervisor, outside: enters the namespaces, waits, repeats how the program ended;
 *   the init, first of the pid namespace: builds the mounts, reaps orphans; its end ends all the others;
 *   the program: limits, capabilities, Landlock, seccomp, the report line, exec.
 *
 * Killing the supervisor kills everything: each process asked to die with its parent. Knows nothing of
 * requests, results or Python; see jail.h for the layers and the exit codes. */
#include "jail.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static void reset_signals(void)
{
    sigset_t none;
    sigemptyset(&none);
    for (int i = 1; i < NSIG; i++)
        if (i != SIGKILL && i != SIGSTOP)
            signal(i, SIG_DFL);
    sigprocmask(SIG_SETMASK, &none, NULL);
}

/* ---- program ---- */

static int become_program(const struct ka_jail_options *o, struct ka_jail_report *report)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
    if (ka_jail_has(report, KA_LAYER_PID)) {
        if (getppid() != 1)
            return KA_JAIL_EXIT_FAILED;
        setsid();
    }
    int code = ka_jail_become(o, report);
    if (code)
        return code;
    execve(*o->argv, o->argv, (char *const *)o->env);
    return ka_jail_complain(KA_JAIL_EXIT_NOEXEC, *o->argv, errno);
}

/* ---- init ---- */

static void end_group(int sig)
{
    (void)sig;
    kill(0, SIGKILL);
}

/* As pid 1 its end is the end of all. Without a pid namespace everything below stays in its process group
 * (the filter refuses setsid), and orphans come here. */
static int run_init(const struct ka_jail_options *o, struct ka_jail_report *report, int status_fd)
{
    bool pid_one = ka_jail_has(report, KA_LAYER_PID);
    setpgid(0, 0);
    if (!pid_one) {
        signal(SIGTERM, end_group);
        prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
    }
    prctl(PR_SET_PDEATHSIG, pid_one ? SIGKILL : SIGTERM, 0, 0, 0);
    if (ka_jail_reader_is_gone(status_fd))
        return KA_JAIL_EXIT_FAILED;
    ka_jail_cgroup_join(report);
    ka_jail_oom_first();
    int code = ka_jail_furnish(o, report);
    if (code)
        return code;

    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0); /* before there is a program that could open our memory */
    pid_t program = fork();
    if (program == 0) {
        prctl(PR_SET_DUMPABLE, 1, 0, 0, 0);
        signal(SIGTERM, SIG_DFL);
        close(status_fd);
        _exit(become_program(o, report));
    }
    if (program < 0)
        return ka_jail_complain(KA_JAIL_EXIT_FAILED, "fork", errno);
    close(o->result_fd);
    close(report->scratch_fd);
    int status = 0;
    for (pid_t ended = 0; ended != program;)
        if ((ended = wait(&status)) < 0 && errno != EINTR)
            return ka_jail_complain(KA_JAIL_EXIT_FAILED, "wait", errno);
    if (write(status_fd, &status, sizeof(status)) != sizeof(status))
        return KA_JAIL_EXIT_FAILED;
    if (!pid_one)
        kill(0, SIGKILL);
    return 0;
}

/* ---- supervisor ---- */

static int end_like(int status)
{
    if (WIFEXITED(status))
        return WEXITSTATUS(status);
    struct rlimit no_core = {0, 0};
    setrlimit(RLIMIT_CORE, &no_core);
    reset_signals();
    raise(WTERMSIG(status));
    return 128 + WTERMSIG(status);
}

static int supervise(pid_t init, int status_fd)
{
    int status = 0, reported = 0;
    ssize_t n;
    while ((n = read(status_fd, &reported, sizeof(reported))) < 0 && errno == EINTR)
        ;
    while (waitpid(init, &status, 0) < 0)
        if (errno != EINTR)
            return ka_jail_complain(KA_JAIL_EXIT_FAILED, "wait", errno);
    ka_jail_cgroup_remove();
    return end_like(n == (ssize_t)sizeof(reported) ? reported : status);
}

/* ---- zygote ---- */

/* Below a user namespace the zygote has to come back to a pid namespace that is owned by it: the first fork
 * after this. In the child 0, in the supervisor the code to exit with. */
static int fork_below_user_namespace(struct ka_jail_options *o, bool *is_child)
{
    int fds[2];
    int rc = ka_jail_user_namespace_enter();
    if (!rc && (unshare(CLONE_NEWPID) != 0 || pipe2(fds, O_CLOEXEC) != 0))
        rc = -errno;
    if (rc)
        return ka_jail_complain(KA_JAIL_EXIT_MISSING, "user and pid namespace", rc);
    prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0); /* a change of credentials clears it */
    pid_t zygote = fork();
    if (zygote < 0)
        return ka_jail_complain(KA_JAIL_EXIT_FAILED, "fork", errno);
    if (zygote > 0) {
        close(fds[1]);
        close(o->result_fd); /* so that the daemon hears when the zygote is gone */
        return supervise(zygote, fds[0]);
    }
    *is_child = true;
    close(fds[0]);
    prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
    if (ka_jail_reader_is_gone(fds[1]))
        return KA_JAIL_EXIT_FAILED;
    rc = ka_jail_caps_keep();
    return rc ? ka_jail_complain(KA_JAIL_EXIT_FAILED, "capabilities", rc) : 0;
}

/* The program forks the jails itself (enter.c). It is ours, runs no other code, and gets what unshare and
 * mount need. */
static int become_zygote(struct ka_jail_options *o)
{
    struct ka_jail_report report;
    bool is_child = false;
    ka_jail_report_init(&report);
    ka_jail_cgroup_make(&o->policy, &report);
    ka_jail_cgroup_join(&report);
    if (ka_jail_has(&report, KA_LAYER_CGROUP))
        o->env[o->env_count++] = (char *)KA_JAIL_ENV_CGROUP "=1"; /* the array has a place for it */
    if (!ka_jail_is_privileged()) {
        int code = fork_below_user_namespace(o, &is_child);
        if (!is_child || code)
            return code;
    }
    prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
    execve(*o->argv, o->argv, o->env);
    return ka_jail_complain(KA_JAIL_EXIT_NOEXEC, *o->argv, errno);
}

int main(int argc, char **argv)
{
    static struct ka_jail_options o;
    struct ka_jail_report report;
    int fds[2];
    ka_jail_report_init(&report);
    if (ka_jail_options_parse(argc, argv, &o) != 0) {
        fputs(ka_jail_usage, stderr);
        return KA_JAIL_EXIT_USAGE;
    }
    prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
    if (o.parent >= 0 && getppid() != (pid_t)o.parent)
        return KA_JAIL_EXIT_FAILED;
    reset_signals();
    setsid();
    umask(077);
    ka_jail_program_readable(&o);
    ka_jail_environment_build(&o);
    int rc = ka_jail_close_fds(&o.result_fd, 1);
    if (rc)
        return ka_jail_complain(KA_JAIL_EXIT_FAILED, "close_range", rc);
    if (o.zygote)
        return become_zygote(&o);
    if (o.result_fd >= 0)
        fcntl(o.result_fd, F_SETFD, FD_CLOEXEC);
    if (pipe2(fds, O_CLOEXEC) != 0)
        return ka_jail_complain(KA_JAIL_EXIT_FAILED, "pipe", errno);

    ka_jail_cgroup_make(&o.policy, &report);
    ka_jail_namespaces_enter(&o.policy, &report);
    prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0); /* a change of credentials clears it */
    pid_t init = fork();
    if (init == 0) {
        close(fds[0]);
        _exit(run_init(&o, &report, fds[1]));
    }
    if (init < 0)
        return ka_jail_complain(KA_JAIL_EXIT_FAILED, "fork", errno);
    close(fds[1]);
    close(o.result_fd);
    return supervise(init, fds[0]);
}
