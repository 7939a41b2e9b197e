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

#define TWIN "twin"
#define CHANNEL_FD 3
#define CHANNEL_FD_TEXT "3"
#define MESSAGE_MAX 65536
#define READY_MS (120 * 1000) /* importing torch from a cold disk */
#define FAILURES_MAX 2        /* then the jobs of this kind run without a zygote */
#define STDERR_HALF 2048
#define NPROC 512

struct zygote {
    struct pair *pair;
    bool ready;
    uv_poll_t channel;
    int fd;
    struct ka_zygote_job *jobs;
};

enum { TRUSTED, CANDIDATES, TWINS };

/* The process that imports, and its twin, which it forks before it forks anything else. They end together. */
struct pair {
    struct ka_zygotes *owner;
    struct pair *next;
    bool gpu, ending, exited;
    char *python, *package_dir;
    struct zygote of[TWINS];
    uv_process_t process; /* the twin dies with it */
    uv_pipe_t err_pipe;
    uv_timer_t timer;
    unsigned handles;
    struct ka_capture err;
};

struct ka_zygotes {
    uv_loop_t *loop;
    char *jail, *library, *base;
    struct pair *current[2]; /* without and with a GPU: takes new jobs; NULL: none */
    unsigned failures[2];
    struct pair *all; /* also those that only end */
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

static int send_message(const struct zygote *z, const struct ka_buf *text, const int *fds, size_t count)
{
    union {
        char bytes[CMSG_SPACE(sizeof(int) * KA_ZYGOTE_FDS)];
        struct cmsghdr header;
    } control = {.header = {CMSG_LEN(sizeof(int) * count), SOL_SOCKET, SCM_RIGHTS}};
    struct iovec iov = {text->data, text->len};
    struct msghdr msg = {.msg_iov = &iov,
                         .msg_iovlen = 1,
                         .msg_control = control.bytes,
                         .msg_controllen = CMSG_SPACE(sizeof(int) * count)};
    memcpy(CMSG_DATA(&control.header), fds, sizeof(int) * count);
    bool sent = !text->failed && sendmsg(z->fd, &msg, MSG_NOSIGNAL | MSG_DONTWAIT) == (ssize_t)text->len;
    return sent ? 0 : -EIO;
}

/* Strings with a NUL between them, and the descriptors. */
static int send_job(const struct zygote *z, const struct ka_zygote_job *job)
{
    KA_AUTO_BUF struct ka_buf text = {.max = MESSAGE_MAX};
    ka_buf_printf(&text, "%llu", (unsigned long long)job->id);
    for (size_t i = 0; i < job->argc; i++) {
        ka_buf_add(&text, "", 1);
        ka_buf_puts(&text, job->argv[i]);
    }
    return send_message(z, &text, job->fds,
                        job->fds[KA_ZYGOTE_FDS - 1] < 0 ? KA_ZYGOTE_FDS - 1 : KA_ZYGOTE_FDS);
}

/* It takes no new jobs. */
static void retire(struct pair *p)
{
    if (p->owner->current[p->gpu] == p)
        p->owner->current[p->gpu] = NULL;
    p->ending = true;
}

static void end_pair(struct pair *p)
{
    retire(p);
    if (!p->exited) /* its number may be somebody else's by now */
        uv_process_kill(&p->process, SIGKILL);
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

/* ---- the end of a pair ---- */

static void free_pair(struct pair *p)
{
    struct pair **at = &p->owner->all;
    while (*at != p)
        at = &(*at)->next;
    *at = p->next;
    free(p->python);
    free(p->package_dir);
    ka_capture_free(&p->err);
    free(p);
}

static void on_closed(uv_handle_t *handle)
{
    struct pair *p = handle->data;
    struct ka_zygotes *zs = p->owner;
    for (size_t i = 0; i < TWINS; i++)
        if (handle == (uv_handle_t *)&p->of[i].channel)
            close(p->of[i].fd);
    if (--p->handles)
        return;
    free_pair(p);
    free_when_empty(zs);
}

static void close_handles(struct pair *p)
{
    uv_handle_t *all[] = {(uv_handle_t *)&p->process, (uv_handle_t *)&p->of[TRUSTED].channel,
                          (uv_handle_t *)&p->of[CANDIDATES].channel, (uv_handle_t *)&p->err_pipe,
                          (uv_handle_t *)&p->timer};
    for (size_t i = 0; i < KA_COUNT(all); i++)
        if (all[i]->data && !uv_is_closing(all[i]))
            uv_close(all[i], on_closed);
}

static bool is_ready(const struct pair *p)
{
    return p->of[TRUSTED].ready && p->of[CANDIDATES].ready;
}

static void on_process_exit(uv_process_t *process, int64_t status, int term_signal)
{
    struct pair *p = process->data;
    const struct ka_zygotes *zs = p->owner;
    KA_AUTO_BUF struct ka_buf why = {0};
    p->exited = true;
    retire(p);
    if (!is_ready(p) && !zs->closing)
        p->owner->failures[p->gpu]++;
    ka_buf_printf(&why, "the zygote ended (code %lld, signal %d) ", (long long)status, term_signal);
    ka_capture_text(&p->err, &why);
    for (size_t i = 0; i < TWINS; i++)
        while (p->of[i].jobs)
            lose_job(p->of[i].jobs, ka_buf_str(&why));
    close_handles(p);
}

static void on_not_ready(uv_timer_t *timer)
{
    end_pair(timer->data);
}

/* ---- what a zygote says ---- */

static void on_ready(struct zygote *z)
{
    struct pair *p = z->pair;
    z->ready = true;
    if (is_ready(p)) {
        uv_timer_stop(&p->timer);
        p->owner->failures[p->gpu] = 0;
    }
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
    retire(z->pair);
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
    struct pair *p = z->pair;
    if (p->ending && !p->of[TRUSTED].jobs && !p->of[CANDIDATES].jobs)
        end_pair(p);
}

static void on_channel(uv_poll_t *poll, int status, int events)
{
    struct pair *p = poll->data;
    struct zygote *z = &p->of[poll == &p->of[CANDIDATES].channel ? CANDIDATES : TRUSTED];
    char text[512];
    KA_AUTO_CLOSE int fd = -1;
    (void)events;
    ssize_t n = status < 0 ? 0 : ka_fd_receive(z->fd, text, sizeof(text) - 1, &fd);
    if (n == -EINTR || n == -EAGAIN)
        return;
    if (n <= 0) {
        uv_poll_stop(poll); /* it ends, and then the exit of the first is heard */
        end_pair(p);
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
    struct pair *p = stream->data;
    if (n > 0)
        ka_capture_add(&p->err, buf->base, (size_t)n);
    else if (n < 0)
        uv_read_stop(stream);
}

/* ---- the start of a pair ---- */

static void own(struct pair *p, void *handle)
{
    ((uv_handle_t *)handle)->data = p;
    p->handles++;
}

static void build_args(struct ka_args *args, const struct pair *p)
{
    const struct ka_zygotes *zs = p->owner;
    /* Where modules may be kept compiled, if their installation has none: zygote.py decides. A zygote runs
     * nothing but trusted code; its children neither read nor write there. */
    KA_AUTO_FREE char *bytecode = zs->keep_bytecode ? ka_user_cache("bytecode") : NULL;
    ka_args_add(args, zs->jail);
    ka_args_add(args, "--zygote");
    ka_args_option(args, "--scratch", zs->base);
    ka_args_number(args, "--parent", (unsigned)getpid());
    ka_args_number(args, "--mem-mb", zs->mem_mb);
    ka_args_number(args, "--nproc", (zs->max_children + TWINS) * NPROC);
    ka_args_number(args, "--result-fd", CHANNEL_FD);
    ka_args_variable(args, "PYTHONPATH", p->package_dir);
    if (bytecode)
        ka_args_variable(args, "KA_BYTECODE", bytecode);
    if (p->gpu) {
        ka_args_variable(args, "KA_GPU", "1"); /* more is worth importing: zygote.py */
        ka_args_gpu(args, NULL);
    }
    ka_args_add(args, "--");
    ka_args_add(args, p->python);
    ka_args_option(args, "-m", "kernel_agent.zygote");
    ka_args_option(args, CHANNEL_FD_TEXT, zs->library);
}

static int spawn(struct pair *p, int channel, int err)
{
    const struct ka_zygotes *zs = p->owner;
    struct ka_args args = {.count = 0};
    char *env[] = {(char *)"PATH=/usr/local/bin:/usr/bin:/bin", NULL};
    uv_stdio_container_t stdio[] = {
        {.flags = UV_IGNORE},
        {.flags = UV_IGNORE},
        {.flags = UV_INHERIT_FD, .data.fd = err},
        {.flags = UV_INHERIT_FD, .data.fd = channel},
    };
    build_args(&args, p);
    uv_process_options_t options = {
        .exit_cb = on_process_exit,
        .file = zs->jail,
        .args = args.argv,
        .env = env,
        .stdio_count = KA_COUNT(stdio),
        .stdio = stdio,
    };
    own(p, &p->process);
    int rc = uv_spawn(zs->loop, &p->process, &options);
    ka_args_clear(&args);
    return rc;
}

static void listen_to(struct pair *p, int err)
{
    uv_loop_t *loop = p->owner->loop;
    for (size_t i = 0; i < TWINS; i++) {
        own(p, &p->of[i].channel);
        uv_poll_init(loop, &p->of[i].channel, p->of[i].fd);
        uv_poll_start(&p->of[i].channel, UV_READABLE, on_channel);
    }
    own(p, &p->err_pipe);
    uv_pipe_init(loop, &p->err_pipe, 0);
    if (uv_pipe_open(&p->err_pipe, err) == 0)
        uv_read_start((uv_stream_t *)&p->err_pipe, on_alloc, on_stderr);
    else
        close(err);
    own(p, &p->timer);
    uv_timer_init(loop, &p->timer);
    uv_timer_start(&p->timer, on_not_ready, READY_MS, 0);
}

static int open_channels(struct pair *p, int theirs[TWINS])
{
    for (size_t i = 0; i < TWINS; i++) {
        int channel[2];
        if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, channel) != 0)
            return -errno;
        p->of[i].fd = channel[0];
        theirs[i] = channel[1];
    }
    return 0;
}

/* The first thing that it is told: before any request, of which the twin must know nothing. */
static int order_twin(const struct pair *p, int channel)
{
    KA_AUTO_BUF struct ka_buf text = {.max = MESSAGE_MAX};
    ka_buf_puts(&text, TWIN);
    return send_message(&p->of[TRUSTED], &text, &channel, 1);
}

static struct pair *start_pair(struct ka_zygotes *zs, const struct ka_zygote_kind *kind)
{
    int theirs[TWINS] = {-1, -1}, err[2] = {-1, -1};
    struct pair *p = ka_calloc(1, sizeof(*p));
    p->owner = zs;
    p->gpu = kind->gpu;
    p->err.half = STDERR_HALF;
    p->python = ka_strdup(kind->python);
    p->package_dir = ka_strdup(kind->package_dir);
    p->next = zs->all;
    zs->all = p;
    for (size_t i = 0; i < TWINS; i++)
        p->of[i] = (struct zygote){.pair = p, .fd = -1};
    int rc = open_channels(p, theirs);
    rc = rc ? rc : order_twin(p, theirs[CANDIDATES]);
    rc = rc ? rc : uv_pipe(err, UV_NONBLOCK_PIPE, 0);
    rc = rc ? rc : spawn(p, theirs[TRUSTED], err[1]);
    ka_close_at(&err[1]);
    for (size_t i = 0; i < TWINS; i++)
        ka_close_at(&theirs[i]);
    if (!rc) {
        listen_to(p, err[0]);
        return zs->current[p->gpu] = p;
    }
    ka_close_at(&err[0]);
    for (size_t i = 0; i < TWINS; i++)
        ka_close_at(&p->of[i].fd);
    zs->failures[p->gpu]++;
    p->exited = true;
    if (p->handles)
        close_handles(p);
    else
        free_pair(p);
    return NULL;
}

static struct pair *get(struct ka_zygotes *zs, const struct ka_zygote_kind *kind)
{
    struct pair *p = zs->current[kind->gpu];
    if (zs->closing || (!p && zs->failures[kind->gpu] >= FAILURES_MAX))
        return NULL;
    if (!p)
        return start_pair(zs, kind);
    bool same = strcmp(p->python, kind->python) == 0 && strcmp(p->package_dir, kind->package_dir) == 0;
    return same ? p : NULL;
}

/* ---- for child.c ---- */

int ka_zygote_submit(struct ka_zygotes *zs, const struct ka_zygote_kind *kind, struct ka_zygote_job *job)
{
    struct pair *p = get(zs, kind);
    if (!p)
        return -EAGAIN;
    struct zygote *z = &p->of[kind->candidate ? CANDIDATES : TRUSTED];
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
        end_pair(job->zygote->pair); /* its children die with it */
}

bool ka_zygote_pause(const struct ka_zygote_job *job, bool pause)
{
    return job->zygote && job->state == KA_ZYGOTE_STARTED && job->pidfd >= 0 &&
           syscall(SYS_pidfd_send_signal, job->pidfd, pause ? SIGSTOP : SIGCONT, NULL, 0) == 0;
}

void ka_zygote_give_up(struct ka_zygote_job *job)
{
    if (job->zygote && job->pidfd < 0)
        end_pair(job->zygote->pair);
}

void ka_zygotes_close(struct ka_zygotes *zs, void (*gone)(void *arg), void *arg)
{
    zs->closing = true;
    zs->gone = gone;
    zs->gone_arg = arg;
    for (struct pair *p = zs->all; p; p = p->next)
        end_pair(p);
    free_when_empty(zs);
}
