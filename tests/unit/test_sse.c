/* The event stream parser: what it accepts, skips and refuses, however the bytes are cut. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>
#include <cmocka.h>

#include "agent/core/sse.h"

/* Events seen, each as `type|data;`. */
static int note(void *arg, const char *type, const char *data, size_t len)
{
    struct ka_buf *seen = arg;
    assert_int_equal(data[len], '\0');
    ka_buf_puts(seen, type);
    ka_buf_puts(seen, "|");
    ka_buf_add(seen, data, len);
    ka_buf_puts(seen, ";");
    return 0;
}

static int stop_at_done(void *arg, const char *type, const char *data, size_t len)
{
    note(arg, type, data, len);
    return strcmp(data, "[DONE]") == 0 ? 77 : 0;
}

/* Feed `bytes` cut into pieces of `piece` and compare what came out; with `finish`, also end the stream. */
static void expect_cut(const char *bytes, size_t piece, bool finish, const char *want)
{
    struct ka_buf seen = {0};
    struct ka_sse sse;
    ka_sse_init(&sse, 1000, note, &seen);
    size_t len = strlen(bytes);
    for (size_t at = 0; at < len; at += piece)
        assert_int_equal(ka_sse_feed(&sse, bytes + at, len - at < piece ? len - at : piece), 0);
    if (finish)
        assert_int_equal(ka_sse_finish(&sse), 0);
    assert_string_equal(ka_buf_str(&seen), want);
    ka_sse_free(&sse);
    ka_buf_free(&seen);
}

static void expect(const char *bytes, const char *want)
{
    for (size_t piece = 1; piece <= strlen(bytes); piece++)
        expect_cut(bytes, piece, false, want);
}

static void sse__events_in_any_chunking__come_out_whole(void **state)
{
    (void)state;
    expect("data: one\n\ndata: two\n\n", "message|one;message|two;");
}

static void sse__any_line_end__is_understood(void **state)
{
    (void)state;
    expect("data: a\r\n\r\ndata: b\r\rdata: c\n\n", "message|a;message|b;message|c;");
}

static void sse__data_lines__are_joined_by_newlines(void **state)
{
    (void)state;
    expect("data: a\r\ndata: b\r\n\r\n", "message|a\nb;");
    expect("data: a\ndata:\ndata: b\n\n", "message|a\n\nb;");
}

static void sse__one_space_after_the_colon__is_dropped(void **state)
{
    (void)state;
    expect("data:tight\n\ndata:  wide\n\n", "message|tight;message| wide;");
}

static void sse__comments_and_other_fields__are_skipped(void **state)
{
    (void)state;
    expect(": ping\n\nid: 4\nretry: 10\ndatabase: no\ndata: x\nnonsense\n\n", "message|x;");
}

static void sse__event_type__holds_for_one_event(void **state)
{
    (void)state;
    expect("event: error\ndata: x\n\ndata: y\n\n", "error|x;message|y;");
}

static void sse__event_without_data__is_dropped_with_its_type(void **state)
{
    (void)state;
    expect("event: error\n\ndata: y\n\n", "message|y;");
}

static void sse__byte_order_mark__is_skipped_at_the_start_only(void **state)
{
    (void)state;
    expect("\xEF\xBB\xBF"
           "data: x\n\n\xEF\xBB\xBF"
           "data: y\n\n",
           "message|x;");
}

static void sse__missing_last_newlines__are_supplied_by_finish(void **state)
{
    (void)state;
    const char *bytes = "data: a\n\ndata: [DONE]";
    for (size_t piece = 1; piece <= strlen(bytes); piece++) {
        expect_cut(bytes, piece, false, "message|a;");
        expect_cut(bytes, piece, true, "message|a;message|[DONE];");
    }
}

static void sse__event_past_the_cap__is_refused_for_good(void **state)
{
    (void)state;
    char filler[64];
    memset(filler, 'x', sizeof(filler));
    struct ka_buf seen = {0};
    struct ka_sse sse;
    ka_sse_init(&sse, 100, note, &seen);
    assert_int_equal(ka_sse_feed(&sse, "data: ", 6), 0);
    assert_int_equal(ka_sse_feed(&sse, filler, sizeof(filler)), 0);
    assert_int_equal(ka_sse_feed(&sse, filler, sizeof(filler)), -EFBIG);
    assert_int_equal(ka_sse_feed(&sse, "\n\n", 2), -EFBIG);
    assert_int_equal(seen.len, 0);
    ka_sse_free(&sse);
    ka_buf_free(&seen);
}

static void sse__many_data_lines_past_the_cap__are_refused(void **state)
{
    (void)state;
    struct ka_buf seen = {0};
    struct ka_sse sse;
    ka_sse_init(&sse, 100, note, &seen);
    int rc = 0;
    for (int i = 0; i < 20 && rc == 0; i++)
        rc = ka_sse_feed(&sse, "data: 123456789\n", 16);
    assert_int_equal(rc, -EFBIG);
    ka_sse_free(&sse);
    ka_buf_free(&seen);
}

static void sse__callback_that_stops__ends_the_parsing(void **state)
{
    (void)state;
    struct ka_buf seen = {0};
    struct ka_sse sse;
    ka_sse_init(&sse, 100, stop_at_done, &seen);
    assert_int_equal(ka_sse_feed(&sse, "data: a\n\ndata: [DONE]\n\ndata: b\n\n", 33), 77);
    assert_int_equal(ka_sse_finish(&sse), 77);
    assert_string_equal(ka_buf_str(&seen), "message|a;message|[DONE];");
    ka_sse_free(&sse);
    ka_buf_free(&seen);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sse__events_in_any_chunking__come_out_whole),
        cmocka_unit_test(sse__any_line_end__is_understood),
        cmocka_unit_test(sse__data_lines__are_joined_by_newlines),
        cmocka_unit_test(sse__one_space_after_the_colon__is_dropped),
        cmocka_unit_test(sse__comments_and_other_fields__are_skipped),
        cmocka_unit_test(sse__event_type__holds_for_one_event),
        cmocka_unit_test(sse__event_without_data__is_dropped_with_its_type),
        cmocka_unit_test(sse__byte_order_mark__is_skipped_at_the_start_only),
        cmocka_unit_test(sse__missing_last_newlines__are_supplied_by_finish),
        cmocka_unit_test(sse__event_past_the_cap__is_refused_for_good),
        cmocka_unit_test(sse__many_data_lines_past_the_cap__are_refused),
        cmocka_unit_test(sse__callback_that_stops__ends_the_parsing),
    };
    return cmocka_run_group_tests_name("sse", tests, NULL, NULL);
}
