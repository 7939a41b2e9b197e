/* One process from start to end. Knows nothing of what it is asked. */
#include "probe.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/files.h"
#include "loop.h"

static int64_t now_ms(void)
{
    return (int64_t)(ka_clock_ns() / 1000000);
}

/* `report`: for its descriptor 3; -1: none. */
static int start(const char *const *argv, const char *const *env, int output, int report, pid_t *pid)
{
    posix_spawn_file_actions_t actions;
    posix_spawnattr_t attributes;
    sigset_t usual;
    sigemptyset(&usual);
    sigaddset(&usual, SIGPIPE); /* ignored here */
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
    if (report >= 0)
        posix_spawn_file_actions_adddup2(&actions, report, 10); /* out of the way of 3 */
    posix_spawn_file_actions_adddup2(&actions, output, 1);
    posix_spawn_file_actions_adddup2(&actions, output, 2);
    if (report >= 0)
        posix_spawn_file_actions_adddup2(&actions, 10, 3);
    posix_spawnattr_init(&attributes);
    posix_spawnattr_setsigdefault(&attributes, &usual);
    posix_spawnattr_setpgroup(&attributes, 0);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGDEF);
    int rc = posix_spawn(pid, argv[0], &actions, &attributes, (char *const *)argv, (char *const *)env);
    posix_spawnattr_destroy(&attributes);
    posix_spawn_file_actions_destroy(&actions);
    return -rc;
}

/* Until all who hold the other ends are gone. -ETIMEDOUT at `end`. */
static int listen_until(const int fds[2], int64_t end, struct ka_buf *const texts[2])
{
    char chunk[4096];
    struct pollfd from[] = {{.fd = fds[0], .events = POLLIN}, {.fd = fds[1], .events = POLLIN}};
    while (from[0].fd >= 0 || from[1].fd >= 0) {
        int64_t left = end - now_ms();
        if (left <= 0)
            return -ETIMEDOUT;
        int ready = poll(from, 2, (int)left);
        for (int i = 0; i < 2 && ready > 0; i++) {
            ssize_t n = from[i].revents ? read(from[i].fd, chunk, sizeof(chunk)) : -EINTR;
            if (n > 0)
                ka_buf_add(texts[i], chunk, (size_t)n);
            else if (from[i].revents && (n == 0 || errno != EINTR))
                from[i].fd = -1;
        }
    }
    return 0;
}

/* -ETIMEDOUT if it closed its outputs and lives on. */
static int reap_until(pid_t pid, int64_t end, int *status)
{
    static const struct timespec pause = {.tv_nsec = 1000000};
    for (;;) {
        pid_t got = waitpid(pid, status, WNOHANG);
        if (got == pid)
            return 0;
        if (got < 0 && errno != EINTR)
            return -errno;
        if (now_ms() >= end)
            return -ETIMEDOUT;
        nanosleep(&pause, NULL);
    }
}

int ka_probe_run(const char *const *argv, const char *const *env, unsigned limit_ms, struct ka_buf *out,
                 struct ka_err *err)
{
    return ka_probe_report(argv, env, limit_ms, out, NULL, err);
}

int ka_probe_report(const char *const *argv, const char *const *env, unsigned limit_ms, struct ka_buf *out,
                    struct ka_buf *report, struct ka_err *err)
{
    int output[2], reported[2] = {-1, -1}, status = 0;
    int64_t end = now_ms() + limit_ms;
    pid_t pid = -1;
    if (pipe2(output, O_CLOEXEC) != 0)
        return ka_fail(err, -errno, "%s: no pipe: %s", argv[0], strerror(errno));
    KA_AUTO_CLOSE int from = output[0];
    int rc = report && pipe2(reported, O_CLOEXEC) != 0 ? -errno : 0;
    KA_AUTO_CLOSE int from_report = reported[0];
    rc = rc ? rc : start(argv, env, output[1], reported[1], &pid);
    close(output[1]);
    ka_close_at(&reported[1]);
    if (rc)
        return ka_fail(err, rc, "cannot be run: %s", strerror(-rc));
    rc = listen_until((int[]){from, from_report}, end, (struct ka_buf *[]){out, report});
    if (rc == 0)
        rc = reap_until(pid, end, &status);
    if (rc == 0)
        return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    kill(-pid, SIGKILL);
    while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
        ;
    return ka_fail(err, rc, "does not answer within %u seconds", limit_ms / 1000);
}
