/* The daemon's side of the zygotes: starts them, hands jobs over, hears how they went. Knows nothing of
 * requests. */
#include "zygote.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "args.h"
#include "base/files.h"
#include "capture.h"
#include "loop_uv.h"

#define KINDS 4
#define CHANNEL_FD 3
#define CHANNEL_FD_TEXT "3"
#define MESSAGE_MAX 65536
#define READY_MS (120 * 1000) /* importing torch from a cold disk */
#define FAILURES_MAX 2        /* then the jobs of this kind run without a zygote */
#define STDERR_HALF 2048
#define NPROC 512

struct zygote {
    struct ka_zygotes *owner;
    struct zygote *next;
    size_t slot;
    bool ready, ending, exited;
    char *python, *package_dir;
    uv_process_t process;
    uv_poll_t channel;
    uv_pipe_t err_pipe;
    uv_timer_t timer;
    int fd;
    unsigned handles;
    struct ka_capture err;
    struct ka_zygote_job *jobs;
};

struct ka_zygotes {
    uv_loop_t *loop;
    char *jail, *library, *base;
    struct zygote *current[KINDS]; /* takes new jobs; NULL: none */
    unsigned failures[KINDS];
    struct zygote *all; /* also those that only end */
    uint64_t last_id;
    unsigned max_children, mem_mb;
    bool keep_bytecode;
    bool closing;
    void (*gone)(void *arg);
    void *gone_arg;
};

struct ka_zygotes *ka_zygotes_new(struct ka_loop *loop, const char *jail, const char *library,
                                  const char *base, unsigned max_children, unsigned mem_mb,
                                  bool keep_bytecode)
{
    struct ka_zygotes *zs = ka_calloc(1, sizeof(*zs));
    zs->loop = ka_loop_uv(loop);
    zs->jail = ka_strdup(jail);
    zs->library = ka_strdup(library);
    zs->base = ka_strdup(base);
    zs->max_children = max_children;
    zs->mem_mb = mem_mb;
    zs->keep_bytecode = keep_bytecode;
    return zs;
}

static void free_when_empty(struct ka_zygotes *zs)
{
    if (!zs->closing || zs->all)
        return;
    void (*gone)(void *) = zs->gone;
    void *arg = zs->gone_arg;
    free(zs->jail);
    free(zs->library);
    free(zs->base);
    free(zs);
    gone(arg);
}

/* ---- jobs of a zygote ---- */

static struct ka_zygote_job *find_job(const struct zygote *z, uint64_t id)
{
    struct ka_zygote_job *job = z->jobs;
    while (job && job->id != id)
        job = job->next;
    return job;
}

static void remove_job(struct ka_zygote_job *job)
{
    struct ka_zygote_job **at = &job->zygote->jobs;
    while (*at != job)
        at = &(*at)->next;
    *at = job->next;
    ka_close_at(&job->pidfd);
    job->pidfd = -1;
    job->zygote = NULL;
}

static void lose_job(struct ka_zygote_job *job, const char *why)
{
    bool had_started = job->state == KA_ZYGOTE_STARTED;
    remove_job(job);
    job->lost(job, had_started, why);
}

/* Strings with a NUL between them, and the three descriptors. */
static int send_job(const struct zygote *z, const struct ka_zygote_job *job)
{
    KA_AUTO_BUF struct ka_buf text = {.max = MESSAGE_MAX};
    union {
        char bytes[CMSG_SPACE(sizeof(job->fds))];
        struct cmsghdr header;
    } control = {.header = {CMSG_LEN(sizeof(job->fds)), SOL_SOCKET, SCM_RIGHTS}};
    ka_buf_printf(&text, "%llu", (unsigned long long)job->id);
    for (size_t i = 0; i < job->argc; i++) {
        ka_buf_add(&text, "", 1);
        ka_buf_puts(&text, job->argv[i]);
    }
    struct iovec iov = {text.data, text.len};
    struct msghdr msg = {.msg_iov = &iov,
                         .msg_iovlen = 1,
                         .msg_control = control.bytes,
                         .msg_controllen = sizeof(control.bytes)};
    memcpy(CMSG_DATA(&control.header), job->fds, sizeof(job->fds));
    bool sent = !text.failed && sendmsg(z->fd, &msg, MSG_NOSIGNAL | MSG_DONTWAIT) == (ssize_t)text.len;
    return sent ? 0 : -EIO;
}

/* It takes no new jobs. */
static void retire(struct zygote *z)
{
    if (z->owner->current[z->slot] == z)
        z->owner->current[z->slot] = NULL;
    z->ending = true;
}

static void end_zygote(struct zygote *z)
{
    retire(z);
    if (!z->exited) /* its number may be somebody else's by now */
        uv_process_kill(&z->process, SIGKILL);
}

/* A callback may take jobs off the list, so look again after each. */
static void send_waiting(struct zygote *z)
{
    struct ka_zygote_job *job = z->jobs;
    while (job) {
        if (job->state != KA_ZYGOTE_WAITING) {
            job = job->next;
            continue;
        }
        job->state = KA_ZYGOTE_SENT;
        if (send_job(z, job) != 0)
            lose_job(job, "the zygote did not take the request");
        job = z->jobs;
    }
}

/* ---- the end of a zygote ---- */

static void free_zygote(struct zygote *z)
{
    struct zygote **at = &z->owner->all;
    while (*at != z)
        at = &(*at)->next;
    *at = z->next;
    free(z->python);
    free(z->package_dir);
    ka_capture_free(&z->err);
    free(z);
}

static void on_closed(uv_handle_t *handle)
{
    struct zygote *z = handle->data;
    struct ka_zygotes *zs = z->owner;
    if (handle == (uv_handle_t *)&z->channel)
        close(z->fd);
    if (--z->handles)
        return;
    free_zygote(z);
    free_when_empty(zs);
}

static void close_handles(struct zygote *z)
{
    uv_handle_t *all[] = {(uv_handle_t *)&z->process, (uv_handle_t *)&z->channel, (uv_handle_t *)&z->err_pipe,
                          (uv_handle_t *)&z->timer};
    for (size_t i = 0; i < KA_COUNT(all); i++)
        if (all[i]->data && !uv_is_closing(all[i]))
            uv_close(all[i], on_closed);
}

static void on_process_exit(uv_process_t *process, int64_t status, int term_signal)
{
    struct zygote *z = process->data;
    const struct ka_zygotes *zs = z->owner;
    KA_AUTO_BUF struct ka_buf why = {0};
    z->exited = true;
    retire(z);
    if (!z->ready && !zs->closing)
        z->owner->failures[z->slot]++;
    ka_buf_printf(&why, "the zygote ended (code %lld, signal %d) ", (long long)status, term_signal);
    ka_capture_text(&z->err, &why);
    while (z->jobs)
        lose_job(z->jobs, ka_buf_str(&why));
    close_handles(z);
}

static void on_not_ready(uv_timer_t *timer)
{
    end_zygote(timer->data);
}

/* ---- what a zygote says ---- */

static void on_ready(struct zygote *z)
{
    z->ready = true;
    uv_timer_stop(&z->timer);
    z->owner->failures[z->slot] = 0;
    send_waiting(z);
}

static void on_started(struct ka_zygote_job *job, int *pidfd)
{
    job->pidfd = *pidfd;
    *pidfd = -1;
    job->state = KA_ZYGOTE_STARTED;
    if (job->kill)
        ka_zygote_kill(job);
    job->started(job);
}

/* It will refuse the next ones too. Its running children go on; it leaves with the last. */
static void on_refused(struct zygote *z, struct ka_zygote_job *job, const char *why)
{
    retire(z);
    lose_job(job, why);
}

static void on_message(struct zygote *z, char *text, int *pidfd)
{
    unsigned long long id = 0;
    int status = 0, at = 0;
    if (strcmp(text, "ready") == 0) {
        on_ready(z);
    } else if (sscanf(text, "started %llu", &id) == 1) {
        struct ka_zygote_job *job = find_job(z, id);
        if (job && job->state == KA_ZYGOTE_SENT && *pidfd >= 0)
            on_started(job, pidfd);
    } else if (sscanf(text, "ended %llu %d", &id, &status) == 2) {
        struct ka_zygote_job *job = find_job(z, id);
        if (job) {
            remove_job(job);
            job->ended(job, status);
        }
    } else if (sscanf(text, "refused %llu %n", &id, &at) == 1 && at) {
        struct ka_zygote_job *job = find_job(z, id);
        if (job)
            on_refused(z, job, text + at);
    }
    if (z->ending && !z->jobs)
        end_zygote(z);
}

static void on_channel(uv_poll_t *poll, int status, int events)
{
    struct zygote *z = poll->data;
    char text[512];
    KA_AUTO_CLOSE int fd = -1;
    (void)events;
    ssize_t n = status < 0 ? 0 : ka_fd_receive(z->fd, text, sizeof(text) - 1, &fd);
    if (n == -EINTR || n == -EAGAIN)
        return;
    if (n <= 0) {
        uv_poll_stop(poll); /* it ends, and then its exit is heard */
        return;
    }
    text[n] = '\0';
    on_message(z, text, &fd);
}

static void on_alloc(uv_handle_t *handle, size_t hint, uv_buf_t *buf)
{
    static char shared[4096]; /* filled and consumed within one loop callback */
    (void)handle;
    (void)hint;
    *buf = uv_buf_init(shared, sizeof(shared));
}

static void on_stderr(uv_stream_t *stream, ssize_t n, const uv_buf_t *buf)
{
    struct zygote *z = stream->data;
    if (n > 0)
        ka_capture_add(&z->err, buf->base, (size_t)n);
    else if (n < 0)
        uv_read_stop(stream);
}

/* ---- the start of a zygote ---- */

static void own(struct zygote *z, void *handle)
{
    ((uv_handle_t *)handle)->data = z;
    z->handles++;
}

static void build_args(struct ka_args *args, const struct zygote *z, bool gpu)
{
    const struct ka_zygotes *zs = z->owner;
    /* Where modules may be kept compiled, if their installation has none: zygote.py decides. A zygote runs
     * nothing but trusted code; its children neither read nor write there. */
    KA_AUTO_FREE char *bytecode = zs->keep_bytecode ? ka_user_cache("bytecode") : NULL;
    ka_args_add(args, zs->jail);
    ka_args_add(args, "--zygote");
    ka_args_option(args, "--scratch", zs->base);
    ka_args_number(args, "--parent", (unsigned)getpid());
    ka_args_number(args, "--mem-mb", zs->mem_mb);
    ka_args_number(args, "--nproc", (zs->max_children + 1) * NPROC);
    ka_args_number(args, "--result-fd", CHANNEL_FD);
    ka_args_variable(args, "PYTHONPATH", z->package_dir);
    if (bytecode)
        ka_args_variable(args, "KA_BYTECODE", bytecode);
    if (gpu)
        ka_args_gpu(args);
    ka_args_add(args, "--");
    ka_args_add(args, z->python);
    ka_args_option(args, "-m", "kernel_agent.zygote");
    ka_args_option(args, CHANNEL_FD_TEXT, zs->library);
}

static int spawn(struct zygote *z, bool gpu, int channel, int err)
{
    const struct ka_zygotes *zs = z->owner;
    struct ka_args args = {.count = 0};
    char *env[] = {(char *)"PATH=/usr/local/bin:/usr/bin:/bin", NULL};
    uv_stdio_container_t stdio[] = {
        {.flags = UV_IGNORE},
        {.flags = UV_IGNORE},
        {.flags = UV_INHERIT_FD, .data.fd = err},
        {.flags = UV_INHERIT_FD, .data.fd = channel},
    };
    build_args(&args, z, gpu);
    uv_process_options_t options = {
        .exit_cb = on_process_exit,
        .file = zs->jail,
        .args = args.argv,
        .env = env,
        .stdio_count = KA_COUNT(stdio),
        .stdio = stdio,
    };
    own(z, &z->process);
    int rc = uv_spawn(zs->loop, &z->process, &options);
    ka_args_clear(&args);
    return rc;
}

static void listen_to(struct zygote *z, int fd, int err)
{
    uv_loop_t *loop = z->owner->loop;
    z->fd = fd;
    own(z, &z->channel);
    uv_poll_init(loop, &z->channel, fd);
    uv_poll_start(&z->channel, UV_READABLE, on_channel);
    own(z, &z->err_pipe);
    uv_pipe_init(loop, &z->err_pipe, 0);
    if (uv_pipe_open(&z->err_pipe, err) == 0)
        uv_read_start((uv_stream_t *)&z->err_pipe, on_alloc, on_stderr);
    else
        close(err);
    own(z, &z->timer);
    uv_timer_init(loop, &z->timer);
    uv_timer_start(&z->timer, on_not_ready, READY_MS, 0);
}

static struct zygote *start_zygote(struct ka_zygotes *zs, size_t slot, const struct ka_zygote_kind *kind)
{
    int channel[2] = {-1, -1}, err[2] = {-1, -1};
    struct zygote *z = ka_calloc(1, sizeof(*z));
    z->owner = zs;
    z->slot = slot;
    z->fd = -1;
    z->err.half = STDERR_HALF;
    z->python = ka_strdup(kind->python);
    z->package_dir = ka_strdup(kind->package_dir);
    z->next = zs->all;
    zs->all = z;
    int rc = socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, channel) == 0 ? 0 : -errno;
    if (!rc)
        rc = uv_pipe(err, UV_NONBLOCK_PIPE, 0);
    if (!rc)
        rc = spawn(z, kind->gpu, channel[1], err[1]);
    for (int i = rc ? 0 : 1; i < 2; i++) {
        ka_close_at(&channel[i]);
        ka_close_at(&err[i]);
    }
    if (rc) {
        zs->failures[slot]++;
        z->exited = true;
        if (z->handles)
            close_handles(z);
        else
            free_zygote(z);
        return NULL;
    }
    listen_to(z, channel[0], err[0]);
    return zs->current[slot] = z;
}

static struct zygote *get(struct ka_zygotes *zs, const struct ka_zygote_kind *kind)
{
    size_t slot = (kind->candidate ? 1 : 0) + (kind->gpu ? 2 : 0);
    struct zygote *z = zs->current[slot];
    if (zs->closing || (!z && zs->failures[slot] >= FAILURES_MAX))
        return NULL;
    if (!z)
        return start_zygote(zs, slot, kind);
    bool same = strcmp(z->python, kind->python) == 0 && strcmp(z->package_dir, kind->package_dir) == 0;
    return same ? z : NULL;
}

/* ---- for child.c ---- */

int ka_zygote_submit(struct ka_zygotes *zs, const struct ka_zygote_kind *kind, struct ka_zygote_job *job)
{
    struct zygote *z = get(zs, kind);
    if (!z)
        return -EAGAIN;
    job->zygote = z;
    job->id = ++zs->last_id;
    job->pidfd = -1;
    job->kill = false;
    job->state = KA_ZYGOTE_WAITING;
    job->next = z->jobs;
    z->jobs = job;
    if (!z->ready)
        return 0;
    job->state = KA_ZYGOTE_SENT;
    if (send_job(z, job) == 0)
        return 0;
    remove_job(job);
    return -EAGAIN;
}

void ka_zygote_warm(struct ka_zygotes *zs, const struct ka_zygote_kind *kind)
{
    get(zs, kind);
}

bool ka_zygote_withdraw(struct ka_zygote_job *job)
{
    if (!job->zygote || job->state != KA_ZYGOTE_WAITING)
        return false;
    remove_job(job);
    return true;
}

void ka_zygote_kill(struct ka_zygote_job *job)
{
    job->kill = true;
    if (job->pidfd < 0)
        return;
    if (syscall(SYS_pidfd_send_signal, job->pidfd, SIGKILL, NULL, 0) != 0 && errno != ESRCH)
        end_zygote(job->zygote); /* its children die with it */
}

void ka_zygote_give_up(struct ka_zygote_job *job)
{
    if (job->zygote && job->pidfd < 0)
        end_zygote(job->zygote);
}

void ka_zygotes_close(struct ka_zygotes *zs, void (*gone)(void *arg), void *arg)
{
    zs->closing = true;
    zs->gone = gone;
    zs->gone_arg = arg;
    for (struct zygote *z = zs->all; z; z = z->next)
        end_zygote(z);
    free_when_empty(zs);
}
