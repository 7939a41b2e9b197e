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

static int64_t now_ms(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (int64_t)ts.tv_sec * 1000 + ts.tv_nsec / 1000000;
}

static int start(const char *const *argv, const char *const *env, int output, pid_t *pid)
{
    posix_spawn_file_actions_t actions;
    posix_spawnattr_t attributes;
    sigset_t usual;
    sigemptyset(&usual);
    sigaddset(&usual, SIGPIPE); /* ignored here */
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_adddup2(&actions, output, 1);
    posix_spawn_file_actions_adddup2(&actions, output, 2);
    posix_spawnattr_init(&attributes);
    posix_spawnattr_setsigdefault(&attributes, &usual);
    posix_spawnattr_setpgroup(&attributes, 0);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGDEF);
    int rc = posix_spawn(pid, argv[0], &actions, &attributes, (char *const *)argv, (char *const *)env);
    posix_spawnattr_destroy(&attributes);
    posix_spawn_file_actions_destroy(&actions);
    return -rc;
}

/* Until all who hold the other end are gone. -ETIMEDOUT at `end`. */
static int listen_until(int fd, int64_t end, struct ka_buf *out)
{
    char chunk[4096];
    for (;;) {
        struct pollfd from = {.fd = fd, .events = POLLIN};
        int64_t left = end - now_ms();
        if (left <= 0)
            return -ETIMEDOUT;
        if (poll(&from, 1, (int)left) <= 0)
            continue;
        ssize_t n = read(fd, chunk, sizeof(chunk));
        if (n == 0 || (n < 0 && errno != EINTR))
            return 0;
        if (n > 0)
            ka_buf_add(out, chunk, (size_t)n);
    }
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
    int ends[2], status = 0;
    int64_t end = now_ms() + limit_ms;
    pid_t pid = -1;
    if (pipe2(ends, O_CLOEXEC) != 0)
        return ka_fail(err, -errno, "%s: no pipe: %s", argv[0], strerror(errno));
    int rc = start(argv, env, ends[1], &pid);
    close(ends[1]);
    if (rc) {
        ka_fail(err, rc, "cannot be run: %s", strerror(-rc));
        goto out;
    }
    rc = listen_until(ends[0], end, out);
    if (rc == 0)
        rc = reap_until(pid, end, &status);
    if (rc) {
        ka_fail(err, rc, "does not answer within %u seconds", limit_ms / 1000);
        kill(-pid, SIGKILL);
        while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
            ;
        goto out;
    }
    rc = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
out:
    close(ends[0]);
    return rc;
}
