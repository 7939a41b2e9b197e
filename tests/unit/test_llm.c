/* What the LLM client makes of answers and faults: real HTTP on loopback, every fault that an endpoint can
 * have. */
#include "llm_endpoint.h"

/* ---- answers ---- */

static void llm__streamed_text__is_delivered_with_usage(void **state)
{
    (void)state;
    struct seen *seen = ask(seen_new(), "{\"text\": \"A long text, so that it comes in several pieces: "
                                        "0123456789 0123456789 0123456789 0123456789.\"}");
    expect_text(seen, 1,
                "A long text, so that it comes in several pieces: "
                "0123456789 0123456789 0123456789 0123456789.");
    assert_string_equal(seen->answer.finish_reason, "stop");
    assert_int_equal(seen->answer.tokens_in, 100);
    assert_int_equal(seen->tokens_out, 20);
    assert_int_equal(seen->http_status, 200);
    assert_non_null(strstr(ka_buf_str(&seen->trace), "request: POST http://127.0.0.1:"));
    assert_non_null(strstr(ka_buf_str(&seen->trace), "answer: "));
    seen_free(seen);
}

static void llm__tool_call__is_delivered(void **state)
{
    (void)state;
    struct seen *seen =
        ask(seen_new(), "{\"tool\": \"submit_file\", \"arguments\": {\"content\": \"x = 1\"}}");
    expect_text(seen, 1, "");
    assert_int_equal(seen->answer.call_count, 1);
    assert_string_equal(seen->answer.calls[0].name, "submit_file");
    assert_string_equal(seen->answer.calls[0].arguments, "{\"content\": \"x = 1\"}");
    assert_string_equal(seen->answer.finish_reason, "tool_calls");
    seen_free(seen);
}

static void llm__refusal__is_an_answer(void **state)
{
    (void)state;
    struct seen *seen = ask(seen_new(), "{\"fault\": \"refusal\"}");
    expect_text(seen, 1, "");
    assert_string_equal(seen->answer.refusal, "I cannot help with that.");
    seen_free(seen);
}

static void llm__json_body_instead_of_a_stream__is_accepted(void **state)
{
    (void)state;
    struct seen *seen = ask(seen_new(), "{\"fault\": \"no_sse\", \"text\": \"plain\"}");
    expect_text(seen, 1, "plain");
    assert_non_null(strstr(ka_buf_str(&seen->trace), "plain: "));
    seen_free(seen);
}

static void llm__content_type__is_not_trusted(void **state)
{
    (void)state;
    static const char *const scripts[] = {
        "{\"text\": \"ok\", \"fault\": \"no_sse\", \"content_type\": \"text/event-stream\"}",
        "{\"text\": \"ok\", \"content_type\": \"application/json\"}",
        "{\"text\": \"ok\", \"content_type\": \"text/plain\"}",
    };
    for (size_t i = 0; i < KA_COUNT(scripts); i++) {
        struct seen *seen = ask(seen_new(), scripts[i]);
        expect_text(seen, 1, "ok");
        seen_free(seen);
    }
}

static void llm__connection_lost_after_the_finish_reason__does_no_harm(void **state)
{
    (void)state;
    struct seen *seen = ask(seen_new(), "{\"fault\": \"late_cut\", \"text\": \"whole\"}");
    expect_text(seen, 1, "whole");
    seen_free(seen);
}

static void llm__stream_without_the_last_newlines__is_complete(void **state)
{
    (void)state;
    struct seen *seen = ask(seen_new(), "{\"fault\": \"no_newline\", \"text\": \"whole\"}");
    expect_text(seen, 1, "whole");
    seen_free(seen);
}

static void llm__connection_that_stays_open_after_done__is_not_waited_for(void **state)
{
    (void)state;
    struct seen *seen = ask(seen_new(), "{\"fault\": \"linger\", \"text\": \"soon\", \"seconds\": 10}");
    expect_text(seen, 1, "soon");
    assert_true(seen->seconds < 4);
    seen_free(seen);
}

static void llm__base_url_with_slash_or_full_path__is_understood(void **state)
{
    (void)state;
    static const char *const ends[] = {"/", "//", "/chat/completions", "/chat/completions/"};
    for (size_t i = 0; i < KA_COUNT(ends); i++) {
        char url[128];
        struct seen *seen = seen_new();
        snprintf(url, sizeof(url), "%s%s", server.base_url, ends[i]);
        seen->config.endpoints[0].base_url = url;
        expect_text(ask(seen, "{\"text\": \"ok\"}"), 1, "ok");
        seen_free(seen);
    }
}

static void llm__key__is_sent_in_the_header_only(void **state)
{
    (void)state;
    struct seen *seen = ask(seen_new(), "{\"text\": \"ok\", \"reject\": [\"" KEY "\"]}");
    expect_text(seen, 1, "ok");
    struct ka_buf log = {0};
    assert_int_equal(ka_file_read(server.log, 1 << 20, &log, NULL), 0);
    assert_non_null(strstr(log.data, "\"authorized\": true"));
    assert_null(strstr(log.data, KEY));
    ka_buf_free(&log);
    seen_free(seen);
}

/* ---- what is retried ---- */

static void llm__rate_limit__is_retried(void **state)
{
    (void)state;
    struct seen *seen = ask(seen_new(), "{\"status\": 429, \"error\": \"slow down\"}\n{\"text\": \"ok\"}");
    expect_text(seen, 2, "ok");
    assert_non_null(strstr(ka_buf_str(&seen->trace), "retry: attempt 1 failed: HTTP 429: slow down"));
    seen_free(seen);
}

static void llm__retry_after__is_waited_for_but_capped(void **state)
{
    (void)state;
    struct seen *seen = seen_new();
    seen->config.backoff_max_ms = 300;
    ask(seen, "{\"status\": 429, \"headers\": {\"Retry-After\": \"3600\"}}\n{\"text\": \"ok\"}");
    expect_text(seen, 2, "ok");
    assert_true(seen->seconds >= 0.3 && seen->seconds < 10);
    seen_free(seen);
}

static void llm__retry_after_as_a_date__is_understood(void **state)
{
    (void)state;
    struct seen *seen = seen_new();
    seen->config.backoff_max_ms = 300;
    ask(seen, "{\"status\": 503, \"headers\": {\"Retry-After\": \"Fri, 31 Dec 2100 23:59:59 GMT\"}}\n"
              "{\"text\": \"ok\"}");
    expect_text(seen, 2, "ok");
    assert_true(seen->seconds >= 0.3);
    seen_free(seen);
}

static void llm__server_errors_without_end__are_given_up(void **state)
{
    (void)state;
    struct seen *seen =
        ask(seen_new(), "{\"status\": 500}\n{\"status\": 502}\n{\"status\": 503}\n{\"text\": \"late\"}");
    expect_failure(seen, KA_LLM_UNREACHABLE, 3, "HTTP 503");
    assert_int_equal(seen->http_status, 503);
    seen_free(seen);
}

static void llm__wait_past_the_deadline__is_not_begun(void **state)
{
    (void)state;
    struct seen *seen = seen_new();
    seen->config.total_ms = 5000;
    seen->config.backoff_max_ms = 60000;
    ask(seen, "{\"status\": 429, \"headers\": {\"Retry-After\": \"30\"}}\n{\"text\": \"late\"}");
    expect_failure(seen, KA_LLM_UNREACHABLE, 1, "HTTP 429");
    assert_true(seen->seconds < 4);
    seen_free(seen);
}

static void llm__stream_that_was_cut__is_retried(void **state)
{
    (void)state;
    struct seen *seen =
        ask(seen_new(), "{\"fault\": \"cut\"}\n{\"fault\": \"unfinished\"}\n{\"text\": \"whole\"}");
    expect_text(seen, 3, "whole");
    seen_free(seen);
}

static void llm__streams_that_are_always_cut__are_a_bad_answer(void **state)
{
    (void)state;
    struct seen *seen =
        ask(seen_new(),
            "{\"fault\": \"cut\"}\n{\"fault\": \"cut\"}\n{\"fault\": \"unfinished\"}\n{\"text\": \"late\"}");
    expect_failure(seen, KA_LLM_BAD_ANSWER, 3, "cut after");
    seen_free(seen);
}

static void llm__dropped_connection__is_retried(void **state)
{
    (void)state;
    struct seen *seen = ask(seen_new(), "{\"fault\": \"drop\"}\n{\"text\": \"ok\"}");
    expect_text(seen, 2, "ok");
    seen_free(seen);
}

static void llm__invalid_json__is_retried_then_an_error(void **state)
{
    (void)state;
    struct seen *seen = ask(seen_new(), "{\"fault\": \"bad_json\"}\n{\"text\": \"ok\"}");
    expect_text(seen, 2, "ok");
    seen_free(seen);
    seen = ask(seen_new(), "{\"fault\": \"bad_json\"}\n{\"fault\": \"bad_json\"}\n{\"text\": \"late\"}");
    expect_failure(seen, KA_LLM_BAD_ANSWER, 2, "not valid JSON");
    seen_free(seen);
}

static void llm__empty_answer__is_retried_then_an_error(void **state)
{
    (void)state;
    struct seen *seen = ask(seen_new(), "{\"fault\": \"empty\"}\n{\"text\": \"ok\"}");
    expect_text(seen, 2, "ok");
    assert_int_equal(seen->tokens_in, 200); /* both were paid for */
    seen_free(seen);
    seen = ask(seen_new(), "{\"fault\": \"empty\"}\n{\"fault\": \"empty\", \"finish_reason\": \"length\"}");
    expect_failure(seen, KA_LLM_BAD_ANSWER, 2, "token cap");
    seen_free(seen);
}

static void llm__web_page__is_a_bad_answer_that_doubts_the_url(void **state)
{
    (void)state;
    struct seen *seen = ask(seen_new(), "{\"fault\": \"page\"}\n{\"fault\": \"page\"}");
    expect_failure(seen, KA_LLM_BAD_ANSWER, 2, "--base-url");
    seen_free(seen);
}

static void llm__unknown_option__is_left_out_the_next_time(void **state)
{
    (void)state;
    struct seen *seen = ask(seen_new(), "{\"status\": 400, \"error\": \"unknown field stream_options\"}\n"
                                        "{\"text\": \"ok\", \"reject\": [\"stream_options\"]}");
    expect_text(seen, 2, "ok");
    assert_non_null(strstr(ka_buf_str(&seen->trace), "adapt: "));
    seen_free(seen);
}

static void on_first(void *arg, uint64_t op, const struct ka_llm_result *result)
{
    struct seen *seen = arg;
    on_done(arg, op, result);
    if (seen->done == 1)
        assert_int_equal(start(seen), 0);
}

/* One question, and the same again once it is answered. */
static struct seen *ask_twice(struct seen *seen, const char *script)
{
    struct ka_err err;
    const struct ka_chat_message message = {.role = "user", .content = "please"};
    const struct ka_chat_request req = {
        .model = MODEL, .messages = &message, .message_count = 1, .stream = true};
    seen->want = 2;
    load_script(script);
    assert_int_equal(ka_llm_new(seen->loop, &seen->config, &seen->llm, &err), 0);
    assert_int_equal(ka_llm_start(seen->llm, &req, on_trace, on_first, seen, &seen->op, &err), 0);
    finish(seen);
    return seen;
}

static void llm__what_an_endpoint_does_not_know__is_not_asked_of_it_again(void **state)
{
    (void)state;
    struct seen *seen =
        ask_twice(seen_new(), "{\"status\": 400, \"error\": \"unknown field stream_options\"}\n"
                              "{\"text\": \"ok\", \"reject\": [\"stream_options\"]}\n"
                              "{\"text\": \"again\", \"reject\": [\"stream_options\"]}");
    expect_text(seen, 1, "again");
    seen_free(seen);
}

/* ---- several endpoints ---- */

static struct seen *ask_several(const char *const *urls, const char *const *keys, size_t count,
                                const char *script)
{
    struct seen *seen = seen_new();
    for (size_t i = 0; i < count; i++)
        seen->config.endpoints[i] = (struct ka_llm_endpoint){urls[i] ? urls[i] : server.base_url, keys[i]};
    seen->config.endpoint_count = count;
    return ask(seen, script);
}

static void llm__endpoint_that_does_not_serve__gives_its_turn_to_the_next(void **state)
{
    (void)state;
    static const struct {
        const char *url, *key, *script, *why;
    } cases[] = {
        {"http://127.0.0.1:1/v1", KEY, "{\"text\": \"ok\"}", "127.0.0.1:1"},
        {NULL, "wrong-key-0123456789", "{\"text\": \"ok\"}", "HTTP 401"},
        {NULL, KEY, "{\"status\": 429, \"error\": \"busy\"}\n{\"text\": \"ok\"}", "HTTP 429: busy"},
        {NULL, KEY, "{\"status\": 404, \"error\": \"no model\"}\n{\"text\": \"ok\"}", "HTTP 404"},
        {NULL, KEY, "{\"status\": 503, \"error\": \"down\"}\n{\"text\": \"ok\"}", "HTTP 503"},
    };
    for (size_t i = 0; i < KA_COUNT(cases); i++) {
        const char *urls[] = {cases[i].url, NULL}, *keys[] = {cases[i].key, KEY};
        struct seen *seen = ask_several(urls, keys, 2, cases[i].script);
        expect_text(seen, 2, "ok");
        const char *said = strstr(ka_buf_str(&seen->trace), "next: ");
        assert_non_null(said);
        assert_non_null(strstr(said, cases[i].why));
        assert_null(strstr(ka_buf_str(&seen->trace), "wrong-key"));
        seen_free(seen);
    }
}

static void llm__last_endpoint_in_turn__is_retried_and_named_in_the_end(void **state)
{
    (void)state;
    const char *urls[] = {"http://127.0.0.1:1/v1", NULL}, *keys[] = {NULL, KEY};
    struct seen *seen =
        ask_several(urls, keys, 2, "{\"status\": 503, \"error\": \"down\"}\n{\"text\": \"ok\"}");
    expect_text(seen, 3, "ok");
    seen_free(seen);
    seen = ask_several(urls, keys, 2, "{\"status\": 400, \"error\": \"context too long\"}");
    expect_failure(seen, KA_LLM_REFUSED_BY_ENDPOINT, 2, "context too long");
    seen_free(seen);
}

static void llm__endpoint_that_answered__is_the_first_from_then_on(void **state)
{
    (void)state;
    struct seen *seen = seen_new();
    seen->config.endpoints[1] = seen->config.endpoints[0];
    seen->config.endpoints[0].base_url = "http://127.0.0.1:1/v1";
    seen->config.endpoint_count = 2;
    ask_twice(seen, "{\"text\": \"ok\"}\n{\"text\": \"again\"}");
    expect_text(seen, 1, "again");
    seen_free(seen);
}

/* ---- what is not ---- */

static void llm__errors_of_the_request__fail_at_once_with_a_remedy(void **state)
{
    (void)state;
    static const struct {
        const char *script, *message, *remedy;
    } cases[] = {
        {"{\"status\": 400, \"error\": \"context too long\"}", "HTTP 400: context too long", "--model"},
        {"{\"status\": 403, \"error\": \"no access\"}", "HTTP 403: no access", "--model"},
        {"{\"status\": 404, \"error\": \"no such model\"}", "HTTP 404: no such model", "--base-url"},
        {"{\"status\": 413, \"error\": \"big\"}", "HTTP 413: big", "--topk"},
        {"{\"status\": 429, \"error\": {\"error\": {\"message\": \"pay\", \"code\": "
         "\"insufficient_quota\"}}}",
         "HTTP 429: pay", "credit"},
        {"{\"status\": 307, \"error\": {}, \"headers\": {\"Location\": "
         "\"http://127.0.0.1:1/there?token=x\"}}",
         "to http://127.0.0.1:1/there (", "not followed"},
    };
    for (size_t i = 0; i < KA_COUNT(cases); i++) {
        struct seen *seen = ask(seen_new(), cases[i].script);
        expect_failure(seen, KA_LLM_REFUSED_BY_ENDPOINT, 1, cases[i].message);
        assert_non_null(strstr(seen->message, cases[i].remedy));
        seen_free(seen);
    }
}

static void llm__key_repeated_by_the_endpoint__is_masked(void **state)
{
    (void)state;
    struct seen *seen = seen_new();
    seen->config.endpoints[0].api_key = "wrong-key-0123456789\n";
    ask(seen, "{\"text\": \"never\"}");
    expect_failure(seen, KA_LLM_REFUSED_BY_ENDPOINT, 1, "Incorrect API key provided: ****");
    assert_non_null(strstr(seen->message, "OPENAI_API_KEY"));
    assert_null(strstr(seen->message, "wrong-key"));
    assert_null(strstr(ka_buf_str(&seen->trace), "wrong-key"));
    seen_free(seen);
}

static void llm__answer_past_the_cap__is_cut(void **state)
{
    (void)state;
    static const char *const scripts[] = {"{\"fault\": \"huge\"}\n{\"text\": \"late\"}",
                                          "{\"fault\": \"endless\", \"interval\": 0}\n{\"text\": \"late\"}"};
    for (size_t i = 0; i < KA_COUNT(scripts); i++) {
        struct seen *seen = seen_new();
        seen->config.max_answer_bytes = i == 0 ? (size_t)1 << 20 : 1000;
        ask(seen, scripts[i]);
        expect_failure(seen, KA_LLM_BAD_ANSWER, 1, "larger than");
        seen_free(seen);
    }
}

static void llm__model_caught_in_a_loop__is_asked_again(void **state)
{
    (void)state;
    struct seen *seen = seen_new();
    ask(seen, "{\"fault\": \"loop\", \"interval\": 0}\n{\"text\": \"ok\"}");
    expect_text(seen, 2, "ok");
    assert_non_null(strstr(ka_buf_str(&seen->trace), "repeats itself without end"));
    seen_free(seen);
}

static void llm__stream_of_comments_only__is_cut(void **state)
{
    (void)state;
    struct seen *seen = seen_new();
    seen->config.max_answer_bytes = 50;
    ask(seen, "{\"fault\": \"comments\", \"interval\": 0}");
    expect_failure(seen, KA_LLM_BAD_ANSWER, 1, "the stream is larger than");
    seen_free(seen);
}

static void llm__endless_stream__ends_at_the_total_time(void **state)
{
    (void)state;
    struct seen *seen = seen_new();
    seen->config.total_ms = 800;
    ask(seen, "{\"fault\": \"endless\"}");
    expect_failure(seen, KA_LLM_BAD_ANSWER, 1, "timed out");
    assert_true(seen->seconds >= 0.7 && seen->seconds < 3);
    seen_free(seen);
}

static void llm__silence__ends_at_the_idle_time_and_is_retried(void **state)
{
    (void)state;
    struct seen *seen = seen_new();
    seen->config.idle_ms = 600;
    ask(seen, "{\"fault\": \"slow\", \"seconds\": 2}\n{\"text\": \"ok\"}");
    expect_text(seen, 2, "ok");
    assert_non_null(strstr(ka_buf_str(&seen->trace), "silent for"));
    seen_free(seen);
}

static void llm__endpoint_that_never_answers__is_unreachable(void **state)
{
    (void)state;
    struct seen *seen = seen_new();
    seen->config.idle_ms = 150;
    seen->config.max_retries = 1;
    ask(seen, "{\"fault\": \"silent\", \"seconds\": 2}\n{\"fault\": \"silent\", \"seconds\": 2}");
    expect_failure(seen, KA_LLM_UNREACHABLE, 2, "silent for");
    assert_int_equal(seen->http_status, 0);
    seen_free(seen);
}

static void llm__refused_connection__is_unreachable_after_retries(void **state)
{
    (void)state;
    struct seen *seen = ask_at("http://user:secret@127.0.0.1:1/v1?key=secret");
    expect_failure(seen, KA_LLM_UNREACHABLE, 3, "http://127.0.0.1:1/v1");
    assert_null(strstr(seen->message, "secret"));
    assert_non_null(strstr(seen->message, "--base-url"));
    seen_free(seen);
}

static void llm__malformed_url__is_not_tried_again(void **state)
{
    (void)state;
    struct seen *seen = ask_at("http://[no-address/v1");
    expect_failure(seen, KA_LLM_UNREACHABLE, 1, "--base-url");
    seen_free(seen);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(llm__streamed_text__is_delivered_with_usage),
        cmocka_unit_test(llm__tool_call__is_delivered),
        cmocka_unit_test(llm__refusal__is_an_answer),
        cmocka_unit_test(llm__json_body_instead_of_a_stream__is_accepted),
        cmocka_unit_test(llm__content_type__is_not_trusted),
        cmocka_unit_test(llm__connection_lost_after_the_finish_reason__does_no_harm),
        cmocka_unit_test(llm__stream_without_the_last_newlines__is_complete),
        cmocka_unit_test(llm__connection_that_stays_open_after_done__is_not_waited_for),
        cmocka_unit_test(llm__base_url_with_slash_or_full_path__is_understood),
        cmocka_unit_test(llm__key__is_sent_in_the_header_only),
        cmocka_unit_test(llm__rate_limit__is_retried),
        cmocka_unit_test(llm__retry_after__is_waited_for_but_capped),
        cmocka_unit_test(llm__retry_after_as_a_date__is_understood),
        cmocka_unit_test(llm__server_errors_without_end__are_given_up),
        cmocka_unit_test(llm__wait_past_the_deadline__is_not_begun),
        cmocka_unit_test(llm__stream_that_was_cut__is_retried),
        cmocka_unit_test(llm__streams_that_are_always_cut__are_a_bad_answer),
        cmocka_unit_test(llm__dropped_connection__is_retried),
        cmocka_unit_test(llm__invalid_json__is_retried_then_an_error),
        cmocka_unit_test(llm__empty_answer__is_retried_then_an_error),
        cmocka_unit_test(llm__web_page__is_a_bad_answer_that_doubts_the_url),
        cmocka_unit_test(llm__unknown_option__is_left_out_the_next_time),
        cmocka_unit_test(llm__what_an_endpoint_does_not_know__is_not_asked_of_it_again),
        cmocka_unit_test(llm__endpoint_that_does_not_serve__gives_its_turn_to_the_next),
        cmocka_unit_test(llm__last_endpoint_in_turn__is_retried_and_named_in_the_end),
        cmocka_unit_test(llm__endpoint_that_answered__is_the_first_from_then_on),
        cmocka_unit_test(llm__errors_of_the_request__fail_at_once_with_a_remedy),
        cmocka_unit_test(llm__key_repeated_by_the_endpoint__is_masked),
        cmocka_unit_test(llm__answer_past_the_cap__is_cut),
        cmocka_unit_test(llm__model_caught_in_a_loop__is_asked_again),
        cmocka_unit_test(llm__stream_of_comments_only__is_cut),
        cmocka_unit_test(llm__endless_stream__ends_at_the_total_time),
        cmocka_unit_test(llm__silence__ends_at_the_idle_time_and_is_retried),
        cmocka_unit_test(llm__endpoint_that_never_answers__is_unreachable),
        cmocka_unit_test(llm__refused_connection__is_unreachable_after_retries),
        cmocka_unit_test(llm__malformed_url__is_not_tried_again),
    };
    return cmocka_run_group_tests_name("llm", tests, set_up, tear_down);
}
