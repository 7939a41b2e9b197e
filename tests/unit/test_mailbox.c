/* The mailbox: what a request looks like, which answers count and when. */
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cmocka.h>

#include "agent/io/mailbox.h"
#include "base/files.h"

/* A folder of its own for each test. */
struct place {
    char folder[64];
    struct ka_mailbox box;
};

static int set_up(void **state)
{
    struct place *place = ka_calloc(1, sizeof(*place));
    snprintf(place->folder, sizeof(place->folder), "/tmp/ka-mailbox-XXXXXX");
    if (!mkdtemp(place->folder))
        return -1;
    place->box =
        (struct ka_mailbox){.dir = place->folder, .run = "softmax", .settle_ms = 1000, .every_ms = 20};
    *state = place;
    return 0;
}

static int tear_down(void **state)
{
    struct place *place = *state;
    int rc = ka_rmtree(place->folder, NULL);
    free(place);
    return rc;
}

static void put(const struct place *place, const char *name, const char *bytes, size_t len)
{
    char *path = ka_path_join(place->folder, name);
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0644);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, bytes, len), len);
    close(fd);
    free(path);
}

/* Make the file look as if it had not changed for `seconds`; negative: as if by a clock ahead of ours. */
static void age(const struct place *place, const char *name, int seconds)
{
    struct timespec times[2];
    clock_gettime(CLOCK_REALTIME, &times[0]);
    times[0].tv_sec -= seconds;
    times[1] = times[0];
    char *path = ka_path_join(place->folder, name);
    assert_int_equal(utimensat(AT_FDCWD, path, times, 0), 0);
    free(path);
}

static void put_old(const struct place *place, const char *name, const char *text)
{
    put(place, name, text, strlen(text));
    age(place, name, 60);
}

static char *get(const struct place *place, const char *name)
{
    struct ka_buf text = {0};
    char *path = ka_path_join(place->folder, name);
    assert_int_equal(ka_file_read(path, 1 << 20, &text, NULL), 0);
    free(path);
    return ka_buf_steal(&text);
}

static int write_request(const struct place *place, unsigned number, const char *content)
{
    const struct ka_chat_message messages[] = {
        {.role = "system", .content = "You write kernels."},
        {.role = "user", .content = (char *)content},
        {.role = "assistant", .content = "", .tool_calls = "[{\"id\":\"c1\"}]"},
    };
    const struct ka_chat_tool tool = {"submit_file", "Send the whole file.", "{}"};
    const struct ka_chat_request req = {
        .model = "m", .messages = messages, .message_count = 3, .tools = &tool, .tool_count = 1};
    return ka_mailbox_write(&place->box, number, &req, NULL);
}

static int poll_once(const struct place *place, struct ka_chat_answer *answer)
{
    return ka_mailbox_poll(&place->box, 1, NULL, answer, NULL);
}

/* ---- requests ---- */

static void mailbox__request__says_what_is_asked_and_how_to_answer(void **state)
{
    const struct place *place = *state;
    assert_int_equal(write_request(place, 7, "```python\nx = 1\n```"), 0);
    char *text = get(place, "softmax-007.request.md");
    static const char *const parts[] = {"softmax-007.answer.md",
                                        "softmax-007.answer.json",
                                        "*** Begin Patch",
                                        "`submit_file`: Send the whole file.",
                                        "1. system\n\nYou write kernels.",
                                        "2. user\n\n```python\nx = 1\n```",
                                        "[{\"id\":\"c1\"}]"};
    for (size_t i = 0; i < KA_COUNT(parts); i++)
        if (!strstr(text, parts[i]))
            fail_msg("no `%s` in:\n%s", parts[i], text);
    free(text);
}

static void mailbox__same_request_again__changes_nothing(void **state)
{
    const struct place *place = *state;
    struct stat before, after;
    char *path = ka_path_join(place->folder, "softmax-001.request.md");
    assert_int_equal(write_request(place, 1, "a"), 0);
    assert_int_equal(stat(path, &before), 0);
    assert_int_equal(write_request(place, 1, "a"), 0);
    assert_int_equal(stat(path, &after), 0);
    assert_int_equal(before.st_ino, after.st_ino);
    put_old(place, "softmax-001.answer.md", "done");
    assert_int_equal(write_request(place, 1, "a"), 0);
    free(path);
}

static void mailbox__other_request__replaces_only_an_unanswered_one(void **state)
{
    const struct place *place = *state;
    assert_int_equal(write_request(place, 1, "first"), 0);
    assert_int_equal(write_request(place, 1, "second"), 0);
    put_old(place, "softmax-001.answer.json", "{}");
    assert_int_equal(write_request(place, 1, "third"), -EEXIST);
    char *text = get(place, "softmax-001.request.md");
    assert_non_null(strstr(text, "second"));
    free(text);
}

static void mailbox__folder__is_made(void **state)
{
    struct place *place = *state;
    char *deeper = ka_path_join(place->folder, "a/b");
    place->box.dir = deeper;
    assert_int_equal(write_request(place, 1, "a"), 0);
    place->box.dir = place->folder;
    char *text = get(place, "a/b/softmax-001.request.md");
    free(text);
    free(deeper);
}

static void mailbox__run_names_that_leave_the_folder__are_refused(void **state)
{
    struct place *place = *state;
    static const char *const names[] = {"", "../x", "a/b", "/", "a\n", "a\x7F"};
    struct ka_chat_answer answer;
    struct ka_mailbox_watch *watch;
    for (size_t i = 0; i < KA_COUNT(names); i++) {
        place->box.run = names[i];
        assert_int_equal(write_request(place, 1, "a"), -EINVAL);
        assert_int_equal(poll_once(place, &answer), -EINVAL);
        assert_int_equal(ka_mailbox_watch(NULL, &place->box, 1, NULL, NULL, &watch, NULL), -EINVAL);
    }
    char long_name[240];
    memset(long_name, 'x', sizeof(long_name));
    long_name[226] = '\0';
    place->box.run = "..";
    assert_int_equal(write_request(place, 1, "a"), 0); /* `..-001.request.md` leaves no folder */
    place->box.run = long_name;
    assert_int_equal(write_request(place, 1, "a"), -EINVAL);
    long_name[225] = '\0';
    assert_int_equal(write_request(place, 1, "a"), 0);
}

/* ---- answers ---- */

static void mailbox__settled_text__is_the_answer(void **state)
{
    const struct place *place = *state;
    struct ka_chat_answer answer;
    assert_int_equal(poll_once(place, &answer), -EAGAIN);
    put_old(place, "softmax-001.answer.md", "```python\nx = 1\n```\n\xFF");
    assert_int_equal(poll_once(place, &answer), 0);
    assert_string_equal(answer.text, "```python\nx = 1\n```\n\xEF\xBF\xBD");
    assert_string_equal(answer.finish_reason, "stop");
    assert_int_equal(answer.tokens_out, -1);
    ka_chat_answer_free(&answer);
}

static void mailbox__completion_body__is_the_answer(void **state)
{
    const struct place *place = *state;
    struct ka_chat_answer answer;
    put_old(place, "softmax-001.answer.json",
            "{\"choices\":[{\"message\":{\"tool_calls\":[{\"function\":{\"name\":\"submit_file\","
            "\"arguments\":\"{}\"}}]}}]}");
    assert_int_equal(poll_once(place, &answer), 0);
    assert_int_equal(answer.call_count, 1);
    assert_string_equal(answer.calls[0].name, "submit_file");
    ka_chat_answer_free(&answer);
}

static void mailbox__fresh_or_blank_answer__is_not_read_yet(void **state)
{
    const struct place *place = *state;
    struct ka_chat_answer answer;
    put(place, "softmax-001.answer.md", "half", 4);
    assert_int_equal(poll_once(place, &answer), -EAGAIN);
    put_old(place, "softmax-001.answer.md", "");
    assert_int_equal(poll_once(place, &answer), -EAGAIN);
    put_old(place, "softmax-001.answer.md", " \n\n");
    assert_int_equal(poll_once(place, &answer), -EAGAIN);
}

static void mailbox__answer_with_a_clock_ahead__settles_between_looks(void **state)
{
    struct place *place = *state;
    struct ka_chat_answer answer;
    struct ka_mailbox_look look = {0};
    place->box.settle_ms = 40;
    put(place, "softmax-001.answer.md", "done", 4);
    age(place, "softmax-001.answer.md", -3600);
    assert_int_equal(ka_mailbox_poll(&place->box, 1, &look, &answer, NULL), -EAGAIN);
    usleep(60000);
    put(place, "softmax-001.answer.md", "done it", 7); /* it grew: wait again */
    age(place, "softmax-001.answer.md", -3600);
    assert_int_equal(ka_mailbox_poll(&place->box, 1, &look, &answer, NULL), -EAGAIN);
    usleep(60000);
    assert_int_equal(ka_mailbox_poll(&place->box, 1, &look, &answer, NULL), 0);
    assert_string_equal(answer.text, "done it");
    ka_chat_answer_free(&answer);
}

static void mailbox__unusable_answers__are_errors_that_name_the_file(void **state)
{
    const struct place *place = *state;
    struct ka_chat_answer answer;
    struct ka_err err = {0};
    static const char *const bodies[] = {"{", "{\"choices\":[]}", "{\"choices\":[{\"message\":{}}]}"};
    for (size_t i = 0; i < KA_COUNT(bodies); i++) {
        put_old(place, "softmax-001.answer.json", bodies[i]);
        assert_int_equal(ka_mailbox_poll(&place->box, 1, NULL, &answer, &err), -EBADMSG);
        assert_non_null(strstr(err.msg, "softmax-001.answer.json"));
    }
    put(place, "softmax-001.answer.md", "\xFF\xFEh\0i\0", 6); /* UTF-16 */
    age(place, "softmax-001.answer.md", 60);
    assert_int_equal(ka_mailbox_poll(&place->box, 1, NULL, &answer, &err), -EBADMSG);
    assert_non_null(strstr(err.msg, "softmax-001.answer.md"));
}

static void mailbox__answer_that_is_no_small_file__is_an_error(void **state)
{
    const struct place *place = *state;
    struct ka_chat_answer answer;
    char *path = ka_path_join(place->folder, "softmax-001.answer.md");
    assert_int_equal(mkdir(path, 0755), 0);
    assert_int_equal(poll_once(place, &answer), -EISDIR);
    assert_int_equal(rmdir(path), 0);
    assert_int_equal(mkfifo(path, 0644), 0);
    assert_int_equal(poll_once(place, &answer), -EINVAL);
    assert_int_equal(unlink(path), 0);
    put(place, "softmax-001.answer.md", "x", 1);
    assert_int_equal(truncate(path, (4 << 20) + 1), 0);
    age(place, "softmax-001.answer.md", 60);
    assert_int_equal(poll_once(place, &answer), -EFBIG);
    free(path);
}

/* ---- watching ---- */

struct watching {
    struct place *place;
    uv_loop_t loop;
    uv_timer_t timer;
    struct ka_mailbox_watch *watch;
    unsigned done, steps;
    int rc;
    char text[64], message[256];
};

static void on_done(void *arg, int rc, struct ka_chat_answer *answer, const char *message)
{
    struct watching *watching = arg;
    watching->done++;
    watching->rc = rc;
    assert_int_equal(rc == 0, answer != NULL);
    snprintf(watching->message, sizeof(watching->message), "%s", message);
    if (answer)
        snprintf(watching->text, sizeof(watching->text), "%s", answer->text);
}

static void watch_while(struct place *place, uv_timer_cb act, struct watching *watching)
{
    *watching = (struct watching){.place = place};
    uv_loop_init(&watching->loop);
    uv_timer_init(&watching->loop, &watching->timer);
    watching->timer.data = watching;
    assert_int_equal(
        ka_mailbox_watch(&watching->loop, &place->box, 1, on_done, watching, &watching->watch, NULL), 0);
    uv_timer_start(&watching->timer, act, 30, 30);
    uv_run(&watching->loop, UV_RUN_DEFAULT);
    assert_int_equal(watching->done, 1);
    assert_int_equal(uv_loop_close(&watching->loop), 0);
}

static void write_in_two_halves(uv_timer_t *timer)
{
    struct watching *watching = timer->data;
    if (watching->steps++ == 0) {
        put(watching->place, "softmax-001.answer.md", "first half", 10);
        return;
    }
    put(watching->place, "softmax-001.answer.md", "first half, second half", 23);
    uv_close((uv_handle_t *)timer, NULL);
}

static void mailbox__watch__delivers_the_answer_once_it_is_whole(void **state)
{
    struct place *place = *state;
    struct watching watching;
    place->box.settle_ms = 120;
    watch_while(place, write_in_two_halves, &watching);
    assert_int_equal(watching.rc, 0);
    assert_string_equal(watching.text, "first half, second half");
    assert_string_equal(watching.message, "");
}

static void write_bad_json(uv_timer_t *timer)
{
    struct watching *watching = timer->data;
    put_old(watching->place, "softmax-001.answer.json", "{");
    uv_close((uv_handle_t *)timer, NULL);
}

static void mailbox__watch__reports_an_unusable_answer(void **state)
{
    struct watching watching;
    watch_while(*state, write_bad_json, &watching);
    assert_int_equal(watching.rc, -EBADMSG);
    assert_non_null(strstr(watching.message, "softmax-001.answer.json"));
}

static void mailbox__watch_of_a_missing_folder__looks_by_the_clock(void **state)
{
    struct place *place = *state;
    struct watching watching;
    assert_int_equal(ka_rmtree(place->folder, NULL), 0);
    watching = (struct watching){0};
    uv_loop_init(&watching.loop);
    assert_int_equal(
        ka_mailbox_watch(&watching.loop, &place->box, 1, on_done, &watching, &watching.watch, NULL), 0);
    for (int i = 0; i < 3; i++)
        uv_run(&watching.loop, UV_RUN_ONCE);
    assert_int_equal(watching.done, 0);
    assert_int_equal(mkdir(place->folder, 0755), 0);
    put_old(place, "softmax-001.answer.md", "late");
    uv_run(&watching.loop, UV_RUN_DEFAULT);
    assert_string_equal(watching.text, "late");
    assert_int_equal(uv_loop_close(&watching.loop), 0);
}

static void stop_watching(uv_timer_t *timer)
{
    struct watching *watching = timer->data;
    ka_mailbox_stop(watching->watch);
    assert_int_equal(watching->done, 0);
    uv_close((uv_handle_t *)timer, NULL);
}

static void mailbox__stopped_watch__is_cancelled(void **state)
{
    struct watching watching;
    watch_while(*state, stop_watching, &watching);
    assert_int_equal(watching.rc, -ECANCELED);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(mailbox__request__says_what_is_asked_and_how_to_answer),
        TEST(mailbox__same_request_again__changes_nothing),
        TEST(mailbox__other_request__replaces_only_an_unanswered_one),
        TEST(mailbox__folder__is_made),
        TEST(mailbox__run_names_that_leave_the_folder__are_refused),
        TEST(mailbox__settled_text__is_the_answer),
        TEST(mailbox__completion_body__is_the_answer),
        TEST(mailbox__fresh_or_blank_answer__is_not_read_yet),
        TEST(mailbox__answer_with_a_clock_ahead__settles_between_looks),
        TEST(mailbox__unusable_answers__are_errors_that_name_the_file),
        TEST(mailbox__answer_that_is_no_small_file__is_an_error),
        TEST(mailbox__watch__delivers_the_answer_once_it_is_whole),
        TEST(mailbox__watch__reports_an_unusable_answer),
        TEST(mailbox__watch_of_a_missing_folder__looks_by_the_clock),
        TEST(mailbox__stopped_watch__is_cancelled),
    };
    return cmocka_run_group_tests_name("mailbox", tests, NULL, NULL);
}
