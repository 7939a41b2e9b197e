/* Requests and answers as files in a folder. Knows nothing of who answers. */
#include "mailbox.h"

#include "base/files.h"
#include "loop_uv.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define ANSWER_MAX ((size_t)4 << 20)
#define RUN_MAX 225 /* with what is added, the name of a file written beside fits into 255 */

/* ---- names ---- */

static int check_run(const struct ka_mailbox *box, struct ka_err *err)
{
    size_t len = strlen(box->run);
    bool good = len > 0 && len <= RUN_MAX;
    for (size_t i = 0; i < len; i++)
        good = good && box->run[i] != '/' && (unsigned char)box->run[i] >= 0x20 && box->run[i] != 0x7F;
    return good ? 0 : ka_fail(err, -EINVAL, "%s: cannot be part of a file name", box->run);
}

/* The path of `<run>-<nnn><ending>`; free() it. */
static char *file_name(const struct ka_mailbox *box, unsigned number, const char *ending)
{
    return ka_format("%s/%s-%03u%s", box->dir, box->run, number, ending);
}

/* ---- requests ---- */

static void render_message(size_t number, const struct ka_chat_message *message, struct ka_buf *out)
{
    ka_buf_printf(out, "\n## %zu. %s\n", number, message->role);
    if (message->content[0])
        ka_buf_printf(out, "\n%s\n", message->content);
    if (message->tool_calls)
        ka_buf_printf(out, "\nTool calls:\n\n```json\n%s\n```\n", message->tool_calls);
}

static void render(const struct ka_mailbox *box, unsigned number, const struct ka_chat_request *req,
                   struct ka_buf *out)
{
    ka_buf_printf(
        out,
        "# Request %1$s-%2$03u\n\n"
        "Answer in this folder, in the file `%1$s-%2$03u.answer.md`: as a model would, with the code in "
        "one fenced\n```python block, or as a patch from `*** Begin Patch` to `*** End Patch`. A chat "
        "completion body in\n`%1$s-%2$03u.answer.json` is accepted as well. The answer is read once it "
        "no longer changes;\nto be safe, write it under another name and rename it.\n\n"
        "Model asked for: %3$s\n",
        box->run, number, req->model ? req->model : "any");
    if (req->tool_count)
        ka_buf_puts(out,
                    "\nWhere the request speaks of tools: a model would call them; here, answer with one "
                    "fenced python block, or with a patch.\n\n");
    for (size_t i = 0; i < req->tool_count; i++)
        ka_buf_printf(out, "- `%s`: %s\n", req->tools[i].name, req->tools[i].description);
    for (size_t i = 0; i < req->message_count; i++)
        render_message(i + 1, &req->messages[i], out);
}

static bool has_content(const char *path, const struct ka_buf *want)
{
    KA_AUTO_BUF struct ka_buf found = {0};
    return ka_file_read(path, want->len, &found, NULL) == 0 && found.len == want->len &&
           memcmp(ka_buf_str(&found), ka_buf_str(want), want->len) == 0;
}

static bool is_answered(const struct ka_mailbox *box, unsigned number)
{
    KA_AUTO_FREE char *text = file_name(box, number, ".answer.md");
    KA_AUTO_FREE char *json = file_name(box, number, ".answer.json");
    return access(text, F_OK) == 0 || access(json, F_OK) == 0;
}

int ka_mailbox_write(const struct ka_mailbox *box, unsigned number, const struct ka_chat_request *req,
                     struct ka_err *err)
{
    int rc = check_run(box, err);
    if (rc)
        return rc;
    KA_AUTO_BUF struct ka_buf text = {0};
    KA_AUTO_FREE char *path = file_name(box, number, ".request.md");
    render(box, number, req, &text);
    if (has_content(path, &text))
        return 0;
    if (is_answered(box, number))
        return ka_fail(err, -EEXIST, "%s: another request of this number has been answered; move it away",
                       path);
    rc = ka_mkdirs(box->dir, err);
    return rc ? rc : ka_file_replace(path, text.data, text.len, err);
}

/* ---- answers ---- */

static int64_t nanoseconds(struct timespec at)
{
    return (int64_t)at.tv_sec * 1000000000 + at.tv_nsec;
}

/* Unchanged for settle_ms: by the file's own time, or since the last look. */
static bool is_settled(const struct ka_mailbox *box, const struct stat *st, struct ka_mailbox_look *look)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    int64_t changed = nanoseconds(st->st_mtim), settle_ns = (int64_t)box->settle_ms * 1000000;
    if (nanoseconds(now) - changed >= settle_ns)
        return true;
    if (!look)
        return false;
    uint64_t now_ms = uv_hrtime() / 1000000;
    if (look->since_ms == 0 || look->size != st->st_size || look->changed_ns != changed) {
        *look = (struct ka_mailbox_look){.size = st->st_size, .changed_ns = changed, .since_ms = now_ms};
        return false;
    }
    return now_ms - look->since_ms >= box->settle_ms;
}

static int take_text(const char *path, const struct ka_buf *bytes, struct ka_chat_answer *answer,
                     struct ka_err *err)
{
    if (memchr(bytes->data, '\0', bytes->len))
        return ka_fail(err, -EBADMSG, "%s: not a UTF-8 text file", path);
    struct ka_buf text = {0};
    ka_buf_repair(&text, bytes->data, bytes->len);
    *answer = (struct ka_chat_answer){.text = ka_buf_steal(&text),
                                      .finish_reason = ka_strdup("stop"),
                                      .model = ka_strdup("mailbox"),
                                      .tokens_cached = -1,
                                      .tokens_in = -1,
                                      .tokens_out = -1};
    return 0;
}

static int take_json(const char *path, const struct ka_buf *bytes, struct ka_chat_answer *answer,
                     struct ka_err *err)
{
    struct ka_err why;
    struct ka_chat_answer got;
    int rc = ka_chat_parse(bytes->data, bytes->len, ANSWER_MAX, &got, &why);
    if (rc)
        return ka_fail(err, rc, "%s: %s", path, why.msg);
    if (ka_chat_answer_empty(&got)) {
        ka_chat_answer_free(&got);
        return ka_fail(err, -EBADMSG, "%s: holds neither text nor tool calls", path);
    }
    *answer = got;
    return 0;
}

/* -ENOENT when there is no such file. */
static int poll_file(const struct ka_mailbox *box, const char *path, bool json, struct ka_mailbox_look *look,
                     struct ka_chat_answer *answer, struct ka_err *err)
{
    struct stat st;
    KA_AUTO_BUF struct ka_buf bytes = {0};
    if (stat(path, &st) != 0)
        return errno == ENOENT ? -ENOENT : ka_fail(err, -errno, "%s: %s", path, strerror(errno));
    if (S_ISREG(st.st_mode) && (st.st_size == 0 || !is_settled(box, &st, look)))
        return -EAGAIN;
    int rc = ka_file_read(path, ANSWER_MAX, &bytes, err);
    if (rc)
        return rc;
    if (bytes.len != (size_t)st.st_size || strspn(ka_buf_str(&bytes), " \t\r\n") == bytes.len)
        return -EAGAIN;
    return json ? take_json(path, &bytes, answer, err) : take_text(path, &bytes, answer, err);
}

int ka_mailbox_poll(const struct ka_mailbox *box, unsigned number, struct ka_mailbox_look *look,
                    struct ka_chat_answer *answer, struct ka_err *err)
{
    int rc = check_run(box, err);
    if (rc)
        return rc;
    KA_AUTO_FREE char *text = file_name(box, number, ".answer.md");
    KA_AUTO_FREE char *json = file_name(box, number, ".answer.json");
    rc = poll_file(box, text, false, look, answer, err);
    if (rc == -ENOENT)
        rc = poll_file(box, json, true, look, answer, err);
    return rc == -ENOENT ? -EAGAIN : rc;
}

/* ---- watching ---- */

struct ka_mailbox_watch {
    struct ka_mailbox box; /* with strings of its own */
    char *dir, *run;
    unsigned number;
    uv_timer_t timer;
    uv_fs_event_t folder;
    unsigned handles; /* not yet closed */
    struct ka_mailbox_look look;
    ka_mailbox_done_fn done;
    void *arg;
    bool ended;
    int rc;
    struct ka_chat_answer answer;
    struct ka_err why;
};

static void on_handle_closed(uv_handle_t *handle)
{
    struct ka_mailbox_watch *watch = handle->data;
    if (--watch->handles)
        return;
    watch->done(watch->arg, watch->rc, watch->rc == 0 ? &watch->answer : NULL, watch->why.msg);
    ka_chat_answer_free(&watch->answer);
    free(watch->dir);
    free(watch->run);
    free(watch);
}

static void end_watch(struct ka_mailbox_watch *watch, int rc)
{
    watch->rc = rc;
    if (watch->ended)
        return;
    watch->ended = true;
    uv_close((uv_handle_t *)&watch->timer, on_handle_closed);
    uv_close((uv_handle_t *)&watch->folder, on_handle_closed);
}

static void on_look(uv_timer_t *timer)
{
    struct ka_mailbox_watch *watch = timer->data;
    int rc = ka_mailbox_poll(&watch->box, watch->number, &watch->look, &watch->answer, &watch->why);
    if (rc != -EAGAIN) {
        end_watch(watch, rc);
        return;
    }
    bool settling = watch->look.since_ms != 0 && watch->box.settle_ms < watch->box.every_ms;
    uv_timer_start(timer, on_look, settling ? watch->box.settle_ms : watch->box.every_ms, 0);
}

static void on_folder(uv_fs_event_t *folder, const char *name, int events, int status)
{
    (void)name;
    (void)events;
    (void)status;
    struct ka_mailbox_watch *watch = folder->data;
    if (!watch->ended && uv_timer_get_due_in(&watch->timer) > 1) /* a flood of events must not put it off */
        uv_timer_start(&watch->timer, on_look, 1, 0);
}

int ka_mailbox_watch(struct ka_loop *loop, const struct ka_mailbox *box, unsigned number,
                     ka_mailbox_done_fn done, void *arg, struct ka_mailbox_watch **out, struct ka_err *err)
{
    int rc = check_run(box, err);
    if (rc)
        return rc;
    struct ka_mailbox_watch *watch = ka_calloc(1, sizeof(*watch));
    watch->box = *box;
    watch->box.dir = watch->dir = ka_strdup(box->dir);
    watch->box.run = watch->run = ka_strdup(box->run);
    watch->number = number;
    watch->done = done;
    watch->arg = arg;
    uv_timer_init(ka_loop_uv(loop), &watch->timer);
    uv_fs_event_init(ka_loop_uv(loop), &watch->folder);
    watch->timer.data = watch->folder.data = watch;
    watch->handles = 2;
    uv_fs_event_start(&watch->folder, on_folder, watch->dir,
                      0); /* where it cannot be watched, the timer does */
    uv_timer_start(&watch->timer, on_look, 1, 0);
    *out = watch;
    return 0;
}

void ka_mailbox_stop(struct ka_mailbox_watch *watch)
{
    ka_chat_answer_free(&watch->answer);
    ka_fail(&watch->why, 0, "cancelled");
    end_watch(watch, -ECANCELED);
}
