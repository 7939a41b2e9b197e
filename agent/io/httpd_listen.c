/* Sockets that listen: for this user, or for this machine. Knows no HTTP. */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/files.h"
#include "httpd.h"

#define BACKLOG 128

union address {
    struct sockaddr any;
    struct sockaddr_un un;
    struct sockaddr_in in;
    struct sockaddr_in6 in6;
};

bool ka_httpd_is_unix(const char *address)
{
    return ka_starts_with(address, "unix:");
}

static int read_unix(const char *path, union address *out, socklen_t *len, struct ka_err *err)
{
    if (!*path || strlen(path) >= sizeof(out->un.sun_path))
        return ka_fail(err, -EINVAL, "unix:%s: a socket's path has 1 to %zu bytes", path,
                       sizeof(out->un.sun_path) - 1);
    out->un.sun_family = AF_UNIX;
    strcpy(out->un.sun_path, path);
    *len = sizeof(out->un);
    return 0;
}

static int read_address(const char *address, union address *out, socklen_t *len, struct ka_err *err)
{
    memset(out, 0, sizeof(*out));
    if (ka_httpd_is_unix(address))
        return read_unix(address + strlen("unix:"), out, len, err);
    const char *colon = strrchr(address, ':');
    KA_AUTO_FREE char *host = ka_strndup(address, colon ? (size_t)(colon - address) : 0);
    char *end = NULL;
    unsigned long port = colon ? strtoul(colon + 1, &end, 10) : 0;
    if (!colon || end == colon + 1 || *end || port > 65535)
        return ka_fail(err, -EINVAL, "'%s' is neither unix:PATH nor 127.0.0.1:PORT", address);
    if (strcmp(host, "127.0.0.1") == 0 || strcmp(host, "localhost") == 0) {
        out->in = (struct sockaddr_in){.sin_family = AF_INET,
                                       .sin_port = htons((uint16_t)port),
                                       .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
        *len = sizeof(out->in);
    } else if (strcmp(host, "[::1]") == 0) {
        out->in6 = (struct sockaddr_in6){
            .sin6_family = AF_INET6, .sin6_port = htons((uint16_t)port), .sin6_addr = in6addr_loopback};
        *len = sizeof(out->in6);
    } else {
        return ka_fail(err, -EINVAL,
                       "'%s' is not this machine: use 127.0.0.1:PORT, [::1]:PORT or unix:PATH, with a proxy "
                       "that speaks TLS in front for other machines",
                       address);
    }
    return 0;
}

/* A socket file stays behind when its process is killed. */
static void remove_stale(const union address *address, socklen_t len)
{
    struct stat st;
    KA_AUTO_CLOSE int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd >= 0 && lstat(address->un.sun_path, &st) == 0 && S_ISSOCK(st.st_mode) &&
        connect(fd, &address->any, len) != 0 && errno == ECONNREFUSED)
        unlink(address->un.sun_path);
}

static int bind_socket(int fd, const union address *address, socklen_t len)
{
    int on = 1;
    if (address->any.sa_family == AF_UNIX) {
        remove_stale(address, len);
        mode_t mask = umask(0177);
        int rc = bind(fd, &address->any, len);
        umask(mask);
        return rc;
    }
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    return bind(fd, &address->any, len);
}

int ka_httpd_listen(const char *address, int *fd, struct ka_err *err)
{
    union address read;
    socklen_t len;
    int rc = read_address(address, &read, &len, err);
    if (rc)
        return rc;
    int made = socket(read.any.sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (made < 0 || bind_socket(made, &read, len) != 0 || listen(made, BACKLOG) != 0) {
        rc = ka_fail(err, -errno, "%s: cannot listen: %s", address, strerror(errno));
        if (made >= 0)
            close(made);
        return rc;
    }
    *fd = made;
    return 0;
}

char *ka_httpd_address(int fd)
{
    union address bound;
    char host[INET6_ADDRSTRLEN] = "";
    socklen_t len = sizeof(bound);
    memset(&bound, 0, sizeof(bound));
    if (getsockname(fd, &bound.any, &len) != 0)
        return ka_strdup("");
    if (bound.any.sa_family == AF_UNIX)
        return ka_format("unix:%s", bound.un.sun_path);
    if (bound.any.sa_family == AF_INET6)
        return ka_format("[%s]:%u", inet_ntop(AF_INET6, &bound.in6.sin6_addr, host, sizeof(host)),
                         ntohs(bound.in6.sin6_port));
    return ka_format("%s:%u", inet_ntop(AF_INET, &bound.in.sin_addr, host, sizeof(host)),
                     ntohs(bound.in.sin_port));
}
