/* Children on the loop: a queue, the jail's command line, captured output, deadlines, and what is left of a
 * child when it has ended. Knows nothing of what requests and results mean. */
#include "child_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/files.h"
#include "base/log.h"
#include "capture.h"
#include "cards.h"
#include "loop_uv.h"
#include "work.h"
#include "zygote.h"

#define CAPTURE_HALF ((size_t)128 << 10)
#define QUEUE_MAX 4096
#define LAYERS_MAX 4096
#define CHILD_MEM_DEFAULT_MB 6144
#define DEADLINE_DEFAULT_MS (10 * 60 * 1000)
#define REAP_DEFAULT_MS (10 * 1000)
#define MEMORY_LOOK_MS 250
#define MEMORY_WAIT_MS (30 * 1000) /* for memory that others have, before a first child */
#define MEMORY_CALM_MS 1000 /* while there is plenty: looking costs more than all else in an idle wait */
#define RESULT_FD 3

static void drop_fds(struct child *c);

/* ---- the list ---- */

static void free_child(struct child *c)
{
    struct ka_children *cs = c->owner;
    struct child **at = &cs->first;
    while (*at && *at != c)
        at = &(*at)->next;
    if (*at)
        *at = c->next;
    if (cs->last == &c->next)
        cs->last = at;
    ka_child_req_free(c->req);
    ka_args_clear(&c->args);
    drop_fds(c);
    ka_capture_free(&c->out);
    ka_capture_free(&c->err);
    ka_child_result_free(c->result ? &c->result->pub : NULL);
    free(c);
    ka_child_kick(cs);
}

static void on_closed(uv_handle_t *handle)
{
    struct child *c = handle->data;
    if (handle == (uv_handle_t *)&c->control)
        close(c->control_fd);
    if (handle == (uv_handle_t *)&c->turns)
        close(c->turns_fd);
    if (--c->handles == 0)
        free_child(c);
}

static void close_handles(struct child *c)
{
    uv_handle_t *all[] = {(uv_handle_t *)&c->process,  (uv_handle_t *)&c->out_pipe,
                          (uv_handle_t *)&c->err_pipe, (uv_handle_t *)&c->control,
                          (uv_handle_t *)&c->turns,    (uv_handle_t *)&c->timer};
    for (size_t i = 0; i < KA_COUNT(all); i++)
        if (all[i]->data && !uv_is_closing(all[i]))
            uv_close(all[i], on_closed);
    if (c->handles == 0)
        free_child(c);
}

void ka_child_own(struct child *c, void *handle)
{
    ((uv_handle_t *)handle)->data = c;
    c->handles++;
}

/* ---- the end of a child ---- */

static const char *sentence(int error)
{
    if (error == -ECANCELED)
        return "the child was cancelled";
    if (error == -ETIMEDOUT)
        return "the child ran past its deadline and was killed";
    if (error == -ENOMEM)
        return "the child was killed because this machine ran out of memory";
    if (error == -EPERM)
        return "a required sandbox layer is missing on this machine";
    return "the jail could not start the child";
}

static int error_of(const struct child *c)
{
    const struct ka_child_result *r = &c->result->pub;
    if (c->cancelled)
        return -ECANCELED;
    if (c->timed_out)
        return -ETIMEDOUT;
    if (c->starved)
        return -ENOMEM;
    if (r->error)
        return r->error;
    if (strstr(ka_buf_str(&c->result->layers), "\"ok\": true"))
        return 0;
    return c->result->layers.len ? -EPERM : -EIO;
}

static void tell(struct child *c)
{
    struct result *r = c->result;
    ka_capture_text(&c->out, &r->out);
    ka_capture_text(&c->err, &r->err);
    r->pub.error = error_of(c);
    if (r->pub.error && !r->pub.msg.msg[0])
        snprintf(r->pub.msg.msg, sizeof(r->pub.msg.msg), "%s", sentence(r->pub.error));
    r->pub.timed_out = c->timed_out;
    r->pub.paused_ms = ka_child_paused_ns(c) / 1000000;
    r->pub.wall_ms = c->started ? (uv_hrtime() - c->started - ka_child_paused_ns(c)) / 1000000 : 0;
    r->pub.began = c->began;
    r->pub.warm = c->warm;
    r->pub.layers = ka_buf_str(&r->layers);
    r->pub.out = ka_buf_str(&r->out);
    r->pub.err = ka_buf_str(&r->err);
    c->told = true;
    c->done(c->arg, c->op, &r->pub);
    ka_child_result_free(&r->pub);
    c->result = NULL;
}

/* After the last byte: leave the running set, tell, close. */
static void finish(struct child *c)
{
    c->owner->running -= c->state == RUNNING;
    c->owner->queued -= c->state == QUEUED;
    ka_child_leave_card(c);
    c->state = ENDED;
    if (!c->told)
        tell(c);
    c->owner->paused -= c->paused;
    c->paused = false;
    close_handles(c);
}

static void on_stuck(uv_timer_t *timer)
{
    struct child *c = timer->data;
    c->result->pub.unreaped = true;
    ka_zygote_give_up(&c->job);
    tell(c);
}

static void on_withdrawn(uv_timer_t *timer)
{
    finish(timer->data);
}

/* SIGKILL for the whole tree. Its end is heard like any other; if it never comes, on_stuck says so. */
static void kill_child(struct child *c)
{
    if (ka_zygote_withdraw(&c->job)) {
        uv_timer_start(&c->timer, on_withdrawn, 0, 0);
        return;
    }
    if (c->job.zygote)
        ka_zygote_kill(&c->job);
    else
        uv_process_kill(&c->process, SIGKILL);
    uv_timer_start(&c->timer, on_stuck, c->owner->reap_ms, 0);
}

void ka_child_on_deadline(uv_timer_t *timer)
{
    struct child *c = timer->data;
    c->timed_out = true;
    kill_child(c);
}

/* Shared and summed memory is capped by a control group only. Where there is none, the youngest child goes
 * when the machine runs out, before the kernel chooses the daemon. */
static struct child *youngest_uncapped(const struct ka_children *cs)
{
    struct child *youngest = NULL;
    for (struct child *c = cs->first; c; c = c->next)
        if (c->state == RUNNING && c->result && !c->starved &&
            !strstr(ka_buf_str(&c->result->layers), "\"cgroup\": true"))
            youngest = c;
    return youngest;
}

static void look_at_memory(struct ka_children *cs)
{
    struct ka_machine machine;
    ka_machine_read_at(cs->machine, &machine);
    cs->left_over = ka_child_memory(&machine);
}

static void on_memory(uv_timer_t *timer)
{
    struct ka_children *cs = timer->data;
    enum ka_child_memory before = cs->left_over;
    look_at_memory(cs);
    struct child *victim = cs->left_over == KA_MEMORY_LOW ? youngest_uncapped(cs) : NULL;
    if (cs->running || cs->queued)
        uv_timer_start(timer, on_memory, cs->left_over == KA_MEMORY_AMPLE ? MEMORY_CALM_MS : MEMORY_LOOK_MS,
                       0);
    if (before < KA_MEMORY_ENOUGH && (cs->left_over >= KA_MEMORY_ENOUGH || !cs->running))
        ka_child_kick(cs);
    if (victim) {
        victim->starved = true;
        kill_child(victim);
    }
}

/* ---- what a child says ---- */

static void on_alloc(uv_handle_t *handle, size_t hint, uv_buf_t *buf)
{
    static char shared[65536]; /* filled and consumed within one loop callback */
    (void)handle;
    (void)hint;
    *buf = uv_buf_init(shared, sizeof(shared));
}

static struct ka_capture *capture_of(struct child *c, const uv_stream_t *stream)
{
    return stream == (const uv_stream_t *)&c->out_pipe ? &c->out : &c->err;
}

static void on_output(uv_stream_t *stream, ssize_t n, const uv_buf_t *buf)
{
    if (n > 0)
        ka_capture_add(capture_of(stream->data, stream), buf->base, (size_t)n);
    else if (n < 0)
        uv_read_stop(stream);
}

/* The writers are dead: what they wrote is in the pipe. Bounded, in case one of them is not. */
static void drain(struct child *c, uv_pipe_t *pipe)
{
    char chunk[16384];
    uv_os_fd_t fd;
    ssize_t n;
    if (uv_fileno((uv_handle_t *)pipe, &fd) != 0)
        return;
    for (int i = 0; i < 256 && (n = read(fd, chunk, sizeof(chunk))) > 0; i++)
        ka_capture_add(capture_of(c, (uv_stream_t *)pipe), chunk, (size_t)n);
}

/* The jail's report comes before the first byte of hostile code runs, and its end of the socket closes there.
 * True when there may be more at once. */
static bool read_control(struct child *c, bool *ended)
{
    char text[1024];
    struct stat st;
    KA_AUTO_CLOSE int fd = -1;
    ssize_t n = ka_fd_receive(c->control_fd, text, sizeof(text), &fd);
    if (n <= 0) {
        *ended = n != -EINTR && n != -EAGAIN;
        return n == -EINTR;
    }
    if (!c->result)
        return true;
    if (c->result->pub.scratch_fd < 0 && fd >= 0 && fstat(fd, &st) == 0 && S_ISDIR(st.st_mode)) {
        c->result->pub.scratch_fd = fd;
        fd = -1;
    }
    if (c->result->layers.len + (size_t)n <= LAYERS_MAX)
        ka_buf_add(&c->result->layers, text, (size_t)n);
    return true;
}

static void on_control(uv_poll_t *poll, int status, int events)
{
    struct child *c = poll->data;
    (void)events;
    bool ended = status < 0;
    if (!ended)
        read_control(c, &ended);
    if (ended)
        uv_poll_stop(poll);
}

static void child_ended(struct child *c, int exit_status, int term_signal)
{
    bool ended = false;
    drain(c, &c->out_pipe);
    drain(c, &c->err_pipe);
    while (read_control(c, &ended))
        ;
    if (c->result) {
        c->result->pub.exit_status = exit_status;
        c->result->pub.term_signal = term_signal;
    }
    finish(c);
}

static void on_process_exit(uv_process_t *process, int64_t exit_status, int term_signal)
{
    child_ended(process->data, (int)exit_status, term_signal);
}

/* ---- the start of a child ---- */

static void drop_fds(struct child *c)
{
    for (size_t i = 0; i < KA_COUNT(c->fds); i++) {
        ka_close_at(&c->fds[i]);
        c->fds[i] = -1;
    }
}

/* From now on the clock runs, and only the child holds its ends. */
static void child_started(struct child *c)
{
    ka_args_clear(&c->args);
    drop_fds(c);
    c->started = uv_hrtime();
    ka_child_turns_listen(c);
    if (!c->cancelled)
        uv_timer_start(&c->timer, ka_child_on_deadline, c->deadline_ms, 0);
}

static const char *card_of(const struct child *c)
{
    return c->owner->cards ? ka_cards_name(c->owner->cards, c->req->card) : NULL;
}

static int spawn_process(struct child *c)
{
    char *env[] = {(char *)"PATH=/usr/local/bin:/usr/bin:/bin", NULL};
    uv_stdio_container_t stdio[] = {
        {.flags = c->fds[3] < 0 ? UV_IGNORE : UV_INHERIT_FD, .data.fd = c->fds[3]},
        {.flags = UV_INHERIT_FD, .data.fd = c->fds[0]},
        {.flags = UV_INHERIT_FD, .data.fd = c->fds[1]},
        {.flags = UV_INHERIT_FD, .data.fd = c->fds[2]},
    };
    ka_args_clear(&c->args);
    ka_args_add(&c->args, c->owner->jail);
    ka_args_number(&c->args, "--result-fd", RESULT_FD);
    ka_args_number(&c->args, "--parent", (unsigned)getpid());
    ka_child_args_jail(&c->args, c->req, c->result->scratch, card_of(c));
    ka_args_option(&c->args, "-m", "kernel_agent.child");
    ka_args_add(&c->args, c->result->scratch);
    uv_process_options_t options = {
        .exit_cb = on_process_exit,
        .file = c->owner->jail,
        .args = c->args.argv,
        .env = env,
        .stdio_count = KA_COUNT(stdio),
        .stdio = stdio,
    };
    ka_child_own(c, &c->process);
    int rc = uv_spawn(ka_loop_uv(c->owner->loop), &c->process, &options);
    if (rc)
        ka_fail(&c->result->pub.msg, rc, "%s: %s", c->owner->jail, uv_strerror(rc));
    else
        child_started(c);
    return rc;
}

/* Without a zygote it cannot be stopped while it waits for a turn: it has its card alone from its start. */
static int start_cold(struct child *c)
{
    c->warm = false;
    return ka_child_alone_from_start(c) ? 0 : spawn_process(c);
}

static struct child *child_of(struct ka_zygote_job *job)
{
    return (struct child *)((char *)job - offsetof(struct child, job));
}

static void on_job_started(struct ka_zygote_job *job)
{
    child_started(child_of(job));
}

static void on_job_ended(struct ka_zygote_job *job, int status)
{
    bool by_signal = WIFSIGNALED(status);
    child_ended(child_of(job), by_signal ? 0 : WEXITSTATUS(status), by_signal ? WTERMSIG(status) : 0);
}

static void on_job_lost(struct ka_zygote_job *job, bool had_started, const char *why)
{
    struct child *c = child_of(job);
    int rc = 0;
    if (had_started)
        rc = c->result ? ka_fail(&c->result->pub.msg, -EIO, "%.900s", why) : -EIO;
    else if (!c->cancelled)
        rc = start_cold(c);
    if (c->result) {
        c->result->pub.error = rc;
        c->result->pub.term_signal = had_started ? SIGKILL : 0; /* what the end of its zygote sends it */
    }
    if (rc || c->cancelled)
        finish(c);
}

static int hand_to_zygote(struct child *c)
{
    struct ka_zygote_kind kind = {.candidate = c->req->role == KA_CHILD_CANDIDATE,
                                  .gpu = c->owner->gpu,
                                  .python = c->req->python,
                                  .package_dir = c->req->package_dir};
    if (!c->owner->zygotes || c->req->limits.mem_mb > c->owner->child_mem_mb)
        return -EAGAIN;
    ka_child_args_jail(&c->args, c->req, c->result->scratch, card_of(c));
    c->job = (struct ka_zygote_job){.argv = (const char *const *)c->args.argv,
                                    .argc = c->args.count,
                                    .fds = {c->fds[0], c->fds[1], c->fds[2], c->fds[3]},
                                    .started = on_job_started,
                                    .ended = on_job_ended,
                                    .lost = on_job_lost};
    return ka_zygote_submit(c->owner->zygotes, &kind, &c->job);
}

static void open_pipe(struct child *c, uv_pipe_t *pipe, int fd)
{
    ka_child_own(c, pipe);
    uv_pipe_init(ka_loop_uv(c->owner->loop), pipe, 0);
    if (uv_pipe_open(pipe, fd) == 0)
        uv_read_start((uv_stream_t *)pipe, on_alloc, on_output);
    else
        close(fd);
}

static void listen_to(struct child *c, int out, int err, int control)
{
    uv_loop_t *loop = ka_loop_uv(c->owner->loop);
    open_pipe(c, &c->out_pipe, out);
    open_pipe(c, &c->err_pipe, err);
    c->control_fd = control;
    ka_child_own(c, &c->control);
    uv_poll_init(loop, &c->control, control);
    uv_poll_start(&c->control, UV_READABLE, on_control);
    ka_child_own(c, &c->timer);
    uv_timer_init(loop, &c->timer);
}

static int launch(struct child *c)
{
    int out[2] = {-1, -1}, err[2] = {-1, -1}, control[2] = {-1, -1};
    struct ka_err *msg = &c->result->pub.msg;
    int rc = ka_child_scratch_new(c->owner->base, c->req->request, &c->result->scratch, msg);
    if (rc)
        return rc;
    if (!(rc = uv_pipe(out, UV_NONBLOCK_PIPE, 0)) && !(rc = uv_pipe(err, UV_NONBLOCK_PIPE, 0)))
        rc = socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, control) == 0 ? 0 : -errno;
    c->fds[0] = out[1];
    c->fds[1] = err[1];
    c->fds[2] = control[1];
    if (rc) {
        ka_close_at(&out[0]);
        ka_close_at(&err[0]);
        return ka_fail(msg, rc, "no pipe for a child: %s", uv_strerror(rc));
    }
    listen_to(c, out[0], err[0], control[0]);
    rc = ka_child_turns_open(c, msg);
    if (rc)
        return rc;
    c->warm = hand_to_zygote(c) == 0;
    return c->warm ? 0 : start_cold(c);
}

static void watch_memory(struct ka_children *cs)
{
    if (!uv_is_active((uv_handle_t *)&cs->memory))
        uv_timer_start(&cs->memory, on_memory, MEMORY_LOOK_MS, 0);
}

static void start_or_fail(struct child *c)
{
    struct ka_children *cs = c->owner;
    c->state = RUNNING;
    cs->queued--;
    cs->running++;
    c->began = uv_hrtime();
    watch_memory(cs);
    if (!c->cancelled) /* what was to be warm has waited once more */
        c->result->pub.error = c->result->scratch ? spawn_process(c) : launch(c);
    if (c->cancelled || c->result->pub.error)
        finish(c);
}

/* Where memory is tight, one child runs at a time, for it may be other programs that have the rest; where
 * nothing is left, even the first waits for some time. */
static bool has_memory(struct ka_children *cs)
{
    if (cs->running)
        return cs->left_over >= KA_MEMORY_ENOUGH;
    look_at_memory(cs);
    if (cs->left_over > KA_MEMORY_LOW) {
        cs->low_since = 0;
        return true;
    }
    uint64_t now = uv_hrtime();
    if (!cs->low_since) {
        cs->low_since = now;
        ka_log(KA_LOG_WARN, "this machine's memory is used up: a child waits for some, %d s at most",
               MEMORY_WAIT_MS / 1000);
    }
    return now - cs->low_since > (uint64_t)MEMORY_WAIT_MS * 1000000;
}

/* One step of the queue a turn: `done` may start, cancel or close while we look at the list. */
static void on_kick(uv_timer_t *timer)
{
    struct ka_children *cs = timer->data;
    struct child *c = cs->first;
    bool memory = !cs->queued || has_memory(cs), place = memory && cs->running - cs->paused < cs->max_running;
    cs->kept_out = false;
    ka_child_give_turns(cs);
    for (; c; c = c->next)
        if (c->state == QUEUED && (c->cancelled || (place && ka_child_enter_card(c))))
            break;
    if (c) {
        ka_child_kick(cs);
        start_or_fail(c);
        return;
    }
    if (!memory)
        watch_memory(cs);
    if (cs->kept_out)
        ka_child_watch_cards(cs);
}

static void on_gone(uv_handle_t *handle)
{
    struct ka_children *cs = handle->data;
    ka_rmtree(cs->base, NULL);
    close(cs->base_lock);
    free(cs->jail);
    free(cs->base);
    free(cs->machine);
    free(cs);
}

static void on_look_closed(uv_handle_t *handle)
{
    struct ka_children *cs = handle->data;
    uv_close((uv_handle_t *)&cs->kick, on_gone);
}

static void on_memory_closed(uv_handle_t *handle)
{
    struct ka_children *cs = handle->data;
    uv_close((uv_handle_t *)&cs->look, on_look_closed);
}

static void on_zygotes_gone(void *arg)
{
    struct ka_children *cs = arg;
    uv_close((uv_handle_t *)&cs->memory, on_memory_closed);
}

static void leave(struct ka_children *cs)
{
    struct ka_zygotes *zygotes = cs->zygotes;
    cs->zygotes = NULL;
    cs->left = true;
    if (zygotes)
        ka_zygotes_close(zygotes, on_zygotes_gone, cs);
    else
        on_zygotes_gone(cs);
}

void ka_child_kick(struct ka_children *cs)
{
    if (cs->left)
        return;
    if (cs->closing && !cs->first)
        leave(cs);
    else
        uv_timer_start(&cs->kick, on_kick, 0, 0);
}

/* ---- public ---- */

/* Without the library beside ka-jail there are no zygotes, and everything works as before, slower. */
static struct ka_zygotes *find_zygotes(const struct ka_children *cs, unsigned total_mem_mb,
                                       bool keep_bytecode)
{
    KA_AUTO_FREE char *folder = ka_path_parent(cs->jail);
    KA_AUTO_FREE char *library = ka_path_join(folder, "libka_jail.so");
    KA_AUTO_FREE char *real = access(library, R_OK) == 0 ? ka_path_real(library, NULL) : NULL;
    return real ? ka_zygotes_new(cs->loop, cs->jail, real, cs->base, cs->max_running, total_mem_mb,
                                 keep_bytecode)
                : NULL;
}

int ka_children_new(struct ka_loop *loop, const struct ka_children_conf *conf, struct ka_children **out,
                    struct ka_err *err)
{
    struct ka_children *cs = ka_calloc(1, sizeof(*cs));
    int rc = 0;
    if (conf->jail)
        cs->jail = ka_strdup(conf->jail);
    else
        rc = ka_child_find_program("KA_JAIL", "ka-jail", &cs->jail, err);
    if (!rc && access(cs->jail, X_OK) != 0)
        rc = ka_fail(err, -errno, "%s: %s", cs->jail, strerror(errno));
    KA_AUTO_FREE char *base = NULL;
    if (!rc)
        rc = ka_child_base(conf->base, &base, err);
    if (!rc)
        rc = ka_child_own_folder(base, &cs->base, &cs->base_lock, err);
    if (rc) {
        free(cs->jail);
        free(cs);
        return rc;
    }
    cs->loop = loop;
    cs->machine = ka_strdup(conf->machine ? conf->machine : "/");
    cs->max_running = conf->max_running ? conf->max_running : 1;
    cs->cards = conf->cards;
    cs->reap_ms = conf->reap_ms ? conf->reap_ms : REAP_DEFAULT_MS;
    cs->child_mem_mb = conf->child_mem_mb ? conf->child_mem_mb : CHILD_MEM_DEFAULT_MB;
    cs->gpu = conf->gpu;
    unsigned total = conf->total_mem_mb ? conf->total_mem_mb : (cs->max_running + 1) * cs->child_mem_mb;
    cs->zygotes = conf->no_zygotes ? NULL : find_zygotes(cs, total, conf->keep_bytecode);
    cs->last = &cs->first;
    uv_timer_init(ka_loop_uv(loop), &cs->kick);
    uv_timer_init(ka_loop_uv(loop), &cs->memory);
    uv_timer_init(ka_loop_uv(loop), &cs->look);
    cs->kick.data = cs->memory.data = cs->look.data = cs;
    *out = cs;
    return 0;
}

void ka_children_close(struct ka_children *cs)
{
    if (!cs || cs->closing)
        return;
    cs->closing = true;
    for (struct child *c = cs->first; c; c = c->next)
        if (c->state != ENDED)
            ka_child_cancel(cs, c->op);
    ka_child_kick(cs);
}

int ka_child_start(struct ka_children *cs, const struct ka_child_req *req, ka_child_done_fn done, void *arg,
                   uint64_t *op)
{
    if (cs->closing)
        return -ESHUTDOWN;
    if (cs->queued >= QUEUE_MAX)
        return -EAGAIN;
    struct ka_child_req *copy = ka_child_req_copy(req);
    if (!copy)
        return -EINVAL;
    struct child *c = ka_calloc(1, sizeof(*c));
    c->owner = cs;
    c->op = ++cs->last_op;
    c->done = done;
    c->arg = arg;
    c->req = copy;
    c->deadline_ms = req->deadline_ms ? req->deadline_ms : DEADLINE_DEFAULT_MS;
    c->alone = req->alone;
    c->since = uv_hrtime();
    c->control_fd = c->turns_fd = c->fds[0] = c->fds[1] = c->fds[2] = c->fds[3] = -1;
    c->out.half = c->err.half = CAPTURE_HALF;
    c->result = ka_calloc(1, sizeof(*c->result));
    c->result->holders = 1;
    c->result->loop = cs->loop;
    c->result->pub.scratch_fd = -1;
    *cs->last = c;
    cs->last = &c->next;
    cs->queued++;
    *op = c->op;
    ka_child_kick(cs);
    return 0;
}

void ka_children_warm(struct ka_children *cs, const char *python, const char *package_dir)
{
    struct ka_zygote_kind kind = {false, cs->gpu, python, package_dir};
    if (cs->zygotes && !cs->closing)
        ka_zygote_warm(cs->zygotes, &kind);
}

void ka_child_cancel(struct ka_children *cs, uint64_t op)
{
    struct child *c = cs->first;
    while (c && c->op != op)
        c = c->next;
    if (!c || c->state == ENDED || c->cancelled || c->told)
        return;
    c->cancelled = true;
    if (c->state == QUEUED) {
        ka_child_kick(cs);
        return;
    }
    kill_child(c);
}

unsigned ka_children_running(const struct ka_children *cs)
{
    return cs->running;
}

unsigned ka_children_queued(const struct ka_children *cs)
{
    return cs->queued;
}

const char *ka_children_jail(const struct ka_children *cs)
{
    return cs->jail;
}
