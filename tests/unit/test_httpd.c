/* Requests over a real socket, with a client on another thread: answered at once, later, or cut off. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include "agent/io/httpd.h"
#include "agent/io/loop.h"
#include "base/files.h"

#define CONNECTIONS 4

struct fixture {
    struct ka_loop *loop;
    struct ka_httpd *httpd;
    char folder[32];
    char *path, *address;
    struct ka_soon *watch; /* has the client ended? */
    int begun, whole;
    void (*client)(struct fixture *fixture);
    bool ended;
    char said[8192]; /* to the client */
};

static void begun(void *arg, struct ka_call *call)
{
    struct fixture *fixture = arg;
    fixture->begun++;
    if (strcmp(ka_call_path(call), "/refused") == 0)
        ka_call_refuse(call, 401, "unauthorized", "no");
}

static void reply_late(void *arg)
{
    struct ka_call *call = arg;
    const struct ka_reply reply = {.status = 202, .type = "text/plain", .body = "late", .len = 4};
    ka_call_reply(call, &reply);
}

static void whole(void *arg, struct ka_call *call)
{
    struct fixture *fixture = arg;
    size_t len;
    const char *body = ka_call_body(call, &len);
    const struct ka_reply reply = {.status = 200, .type = "text/plain", .body = body, .len = len};
    fixture->whole++;
    if (strcmp(ka_call_path(call), "/late") == 0)
        ka_loop_later(fixture->loop, 20, reply_late, call);
    else
        ka_call_reply(call, &reply);
}

static int open_client(const struct fixture *fixture)
{
    struct sockaddr_un to = {.sun_family = AF_UNIX};
    snprintf(to.sun_path, sizeof(to.sun_path), "%s", fixture->path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (connect(fd, (const struct sockaddr *)&to, sizeof(to)) != 0)
        abort();
    return fd;
}

static void send_text(int fd, const char *text)
{
    ssize_t sent = send(fd, text, strlen(text), MSG_NOSIGNAL);
    (void)sent; /* it may be cut off */
}

/* To the end of the connection. */
static void read_all(struct fixture *fixture, int fd)
{
    size_t len = 0;
    ssize_t got;
    while ((got = recv(fd, fixture->said + len, sizeof(fixture->said) - 1 - len, 0)) > 0)
        len += (size_t)got;
    fixture->said[len] = '\0';
    close(fd);
}

static void on_watch(void *arg)
{
    struct fixture *fixture = arg;
    if (__atomic_load_n(&fixture->ended, __ATOMIC_ACQUIRE))
        ka_loop_stop(fixture->loop);
    else
        ka_loop_later(fixture->loop, 5, on_watch, fixture);
}

static void *on_thread(void *arg)
{
    struct fixture *fixture = arg;
    fixture->client(fixture);
    __atomic_store_n(&fixture->ended, true, __ATOMIC_RELEASE);
    return NULL;
}

static void serve(struct fixture *fixture, void (*client)(struct fixture *fixture))
{
    pthread_t thread;
    fixture->client = client;
    fixture->ended = false;
    ka_loop_later(fixture->loop, 5, on_watch, fixture);
    assert_int_equal(pthread_create(&thread, NULL, on_thread, fixture), 0);
    ka_loop_run(fixture->loop);
    pthread_join(thread, NULL);
}

static int set_up(void **state)
{
    struct fixture *fixture = ka_calloc(1, sizeof(*fixture));
    strcpy(fixture->folder, "/tmp/ka-httpd-XXXXXX");
    if (!mkdtemp(fixture->folder))
        return -1;
    fixture->path = ka_path_join(fixture->folder, "socket");
    fixture->address = ka_format("unix:%s", fixture->path);
    fixture->loop = ka_loop_new();
    const struct ka_httpd_conf conf = {.max_body = 100,
                                       .max_connections = CONNECTIONS,
                                       .max_streams = 2,
                                       .idle_s = 30,
                                       .request_s = 1,
                                       .begun = begun,
                                       .whole = whole,
                                       .arg = fixture};
    int fd = -1;
    *state = fixture;
    return ka_httpd_listen(fixture->address, &fd, NULL) ||
                   ka_httpd_new(fixture->loop, &conf, fd, &fixture->httpd, NULL)
               ? -1
               : 0;
}

static int tear_down(void **state)
{
    struct fixture *fixture = *state;
    ka_httpd_close(fixture->httpd);
    ka_loop_run(fixture->loop);
    unsigned left = ka_loop_close(fixture->loop);
    ka_rmtree(fixture->folder, NULL);
    free(fixture->path);
    free(fixture->address);
    free(fixture);
    return left ? -1 : 0;
}

static void ask_body(struct fixture *fixture)
{
    int fd = open_client(fixture);
    send_text(fd, "POST /x HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 5\r\n\r\nhe");
    usleep(20000);
    send_text(fd, "llo");
    read_all(fixture, fd);
}

static void call__body_in_pieces__is_shown_once_it_is_whole(void **state)
{
    struct fixture *fixture = *state;
    serve(fixture, ask_body);
    assert_non_null(strstr(fixture->said, "HTTP/1.1 200 "));
    assert_non_null(strstr(fixture->said, "\r\n\r\nhello"));
    assert_non_null(strstr(fixture->said, "X-Request-Id: "));
    assert_int_equal(fixture->whole, 1);
}

static void ask_late(struct fixture *fixture)
{
    int fd = open_client(fixture);
    send_text(fd, "GET /late HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
    read_all(fixture, fd);
}

static void call__answered_later__is_answered(void **state)
{
    struct fixture *fixture = *state;
    serve(fixture, ask_late);
    assert_non_null(strstr(fixture->said, "HTTP/1.1 202 "));
}

static void ask_refused(struct fixture *fixture)
{
    int fd = open_client(fixture);
    send_text(fd, "POST /refused HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n");
    read_all(fixture, fd);
}

static void call__refused_by_its_head__is_not_read(void **state)
{
    struct fixture *fixture = *state;
    serve(fixture, ask_refused);
    assert_non_null(strstr(fixture->said, "HTTP/1.1 401 "));
    assert_non_null(strstr(fixture->said, "\"code\":\"unauthorized\""));
    assert_int_equal(fixture->whole, 0);
}

static void ask_large(struct fixture *fixture)
{
    int fd = open_client(fixture);
    send_text(fd, "POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 101\r\n\r\n");
    read_all(fixture, fd);
}

static void call__larger_than_allowed__is_refused(void **state)
{
    struct fixture *fixture = *state;
    serve(fixture, ask_large);
    assert_non_null(strstr(fixture->said, "HTTP/1.1 413 "));
    assert_int_equal(fixture->whole, 0);
}

/* Every 100 ms a byte: never silent, never done. Returns once it is cut off. */
static void send_slowly(struct fixture *fixture, const char *begin)
{
    int fd = open_client(fixture);
    const struct timeval wait = {.tv_usec = 100000};
    char byte;
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &wait, sizeof(wait));
    send_text(fd, begin);
    do
        send_text(fd, "x");
    while (recv(fd, &byte, 1, 0) < 0);
    close(fd);
}

static void send_head_slowly(struct fixture *fixture)
{
    send_slowly(fixture, "GET /x HTTP/1.1\r\nX: ");
}

static void send_body_slowly(struct fixture *fixture)
{
    send_slowly(fixture, "POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 90\r\n\r\n");
}

static void call__with_a_head_that_never_ends__is_cut_off(void **state)
{
    struct fixture *fixture = *state;
    serve(fixture, send_head_slowly);
    assert_int_equal(fixture->begun, 0);
}

static void call__with_a_body_that_never_ends__is_cut_off(void **state)
{
    struct fixture *fixture = *state;
    serve(fixture, send_body_slowly);
    assert_int_equal(fixture->begun, 1);
    assert_int_equal(fixture->whole, 0);
}

static void open_many(struct fixture *fixture)
{
    int idle[CONNECTIONS];
    for (size_t i = 0; i < CONNECTIONS; i++)
        idle[i] = open_client(fixture);
    read_all(fixture, open_client(fixture));
    for (size_t i = 0; i < CONNECTIONS; i++)
        close(idle[i]);
}

static void connection__one_too_many__is_told(void **state)
{
    struct fixture *fixture = *state;
    serve(fixture, open_many);
    assert_non_null(strstr(fixture->said, "HTTP/1.1 503 "));
    const char *length = strstr(fixture->said, "Content-Length: "), *body = strstr(fixture->said, "\r\n\r\n");
    assert_int_equal(atoi(length + strlen("Content-Length: ")), strlen(body + 4));
    serve(fixture, ask_late); /* there is room again */
    assert_non_null(strstr(fixture->said, "HTTP/1.1 202 "));
}

static void socket__left_behind__is_replaced(void **state)
{
    struct fixture *fixture = *state;
    KA_AUTO_FREE char *address = ka_format("unix:%s/other", fixture->folder);
    struct ka_err err;
    int first = -1, second = -1;
    assert_int_equal(ka_httpd_listen(address, &first, NULL), 0);
    assert_true(ka_httpd_listen(address, &second, &err) < 0); /* somebody listens */
    close(first);
    assert_int_equal(ka_httpd_listen(address, &second, NULL), 0);
    KA_AUTO_FREE char *bound = ka_httpd_address(second);
    assert_string_equal(bound, address);
    close(second);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(call__body_in_pieces__is_shown_once_it_is_whole),
        TEST(call__answered_later__is_answered),
        TEST(call__refused_by_its_head__is_not_read),
        TEST(call__larger_than_allowed__is_refused),
        TEST(call__with_a_head_that_never_ends__is_cut_off),
        TEST(call__with_a_body_that_never_ends__is_cut_off),
        TEST(connection__one_too_many__is_told),
        TEST(socket__left_behind__is_replaced),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
