/* Datagrams to the service manager. Knows nothing of what they are about. */
#include "notify.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/base.h"
#include "base/files.h"
#include "base/log.h"
#include "loop.h"

struct ka_notify {
    struct ka_loop *loop;
    struct sockaddr_un to;
    socklen_t len;
    struct ka_soon *next;
    unsigned every_ms; /* 0: no watchdog */
};

void ka_notify_say(struct ka_notify *notify, const char *text)
{
    if (!notify)
        return;
    KA_AUTO_CLOSE int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || sendto(fd, text, strlen(text), MSG_NOSIGNAL | MSG_DONTWAIT,
                         (const struct sockaddr *)&notify->to, notify->len) < 0)
        ka_log(KA_LOG_DEBUG, "the service manager was not told %s", text);
}

void ka_notify_reloading(struct ka_notify *notify)
{
    char text[80];
    snprintf(text, sizeof(text), "RELOADING=1\nMONOTONIC_USEC=%llu",
             (unsigned long long)(ka_clock_ns() / 1000));
    ka_notify_say(notify, text);
}

static void on_watchdog(void *arg)
{
    struct ka_notify *notify = arg;
    notify->next = ka_loop_later(notify->loop, notify->every_ms, on_watchdog, notify);
    ka_notify_say(notify, "WATCHDOG=1");
}

/* A third of the time that silence may last; WATCHDOG_PID may name another process. */
static unsigned watchdog_ms(void)
{
    const char *wanted = getenv("WATCHDOG_USEC"), *pid = getenv("WATCHDOG_PID");
    unsigned long long us = wanted ? strtoull(wanted, NULL, 10) : 0;
    if (pid && strtol(pid, NULL, 10) != (long)getpid())
        return 0;
    return us >= 3000 && us / 3000 < 86400000 ? (unsigned)(us / 3000) : 0;
}

struct ka_notify *ka_notify_start(struct ka_loop *loop)
{
    const char *path = getenv("NOTIFY_SOCKET");
    struct ka_notify *notify = NULL;
    if (path && (path[0] == '/' || path[0] == '@') && strlen(path) < sizeof(notify->to.sun_path)) {
        notify = ka_calloc(1, sizeof(*notify));
        *notify = (struct ka_notify){.loop = loop, .to.sun_family = AF_UNIX, .every_ms = watchdog_ms()};
        memcpy(notify->to.sun_path, path, strlen(path));
        notify->len = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + strlen(path));
        if (path[0] == '@') /* no file: a name of the kernel's */
            notify->to.sun_path[0] = '\0';
        if (notify->every_ms)
            on_watchdog(notify);
    }
    unsetenv("NOTIFY_SOCKET");
    unsetenv("WATCHDOG_USEC");
    return notify;
}

void ka_notify_stop(struct ka_notify *notify)
{
    if (!notify)
        return;
    ka_soon_cancel(notify->next);
    free(notify);
}
