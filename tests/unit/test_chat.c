/* Chat requests and answers: what is written, what is understood, what is refused. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include <jansson.h>

#include "agent/core/chat.h"
#include "agent/core/models.h"

static const struct ka_chat_message hello = {.role = "user", .content = "hello"};

static json_t *request(const struct ka_chat_request *req)
{
    struct ka_err err = {0};
    char *text = ka_chat_request_json(req, &err);
    assert_string_equal(err.msg, "");
    json_t *body = json_loads(text, 0, NULL);
    assert_non_null(body);
    free(text);
    return body;
}

static const char *string_at(const json_t *object, const char *member)
{
    return json_string_value(json_object_get(object, member));
}

/* Feed chunks up to a NULL, and finish. */
static int stream(const char *const *chunks, size_t max, struct ka_chat_answer *answer, struct ka_err *err)
{
    struct ka_chat_stream *builder = ka_chat_stream_new(max);
    int rc = 0;
    for (; *chunks && rc == 0; chunks++)
        rc = ka_chat_stream_add(builder, *chunks, strlen(*chunks), err);
    if (rc == 0)
        rc = ka_chat_stream_finish(builder, answer, err);
    else
        assert_int_equal(ka_chat_stream_finish(builder, answer, NULL), rc);
    ka_chat_stream_free(builder);
    return rc;
}

static int parse(const char *body, struct ka_chat_answer *answer, struct ka_err *err)
{
    return ka_chat_parse(body, strlen(body), 1000, answer, err);
}

static void chat__plain_request__holds_model_and_messages_only(void **state)
{
    (void)state;
    struct ka_chat_request req = {.model = "m", .messages = &hello, .message_count = 1};
    char *text = ka_chat_request_json(&req, NULL);
    assert_string_equal(text, "{\"model\":\"m\",\"messages\":[{\"role\":\"user\",\"content\":\"hello\"}]}");
    free(text);
}

static void chat__request_without_model__is_an_error(void **state)
{
    (void)state;
    struct ka_err err = {0};
    struct ka_chat_request req = {.messages = &hello, .message_count = 1};
    assert_null(ka_chat_request_json(&req, &err));
    assert_non_null(strstr(err.msg, "--model"));
    req.model = "";
    assert_null(ka_chat_request_json(&req, &err));
}

static void chat__options__are_written_when_set(void **state)
{
    (void)state;
    double temperature = 0.0;
    struct ka_chat_request req = {.model = "m",
                                  .messages = &hello,
                                  .message_count = 1,
                                  .max_tokens = 100,
                                  .temperature = &temperature,
                                  .stream = true};
    json_t *body = request(&req);
    assert_int_equal(json_integer_value(json_object_get(body, "max_tokens")), 100);
    assert_true(json_is_real(json_object_get(body, "temperature")));
    assert_true(json_is_true(json_object_get(body, "stream")));
    assert_true(json_is_true(json_object_get(json_object_get(body, "stream_options"), "include_usage")));
    json_decref(body);
}

static void chat__reasoning_effort__renames_the_token_cap(void **state)
{
    (void)state;
    struct ka_chat_request req = {
        .model = "m", .messages = &hello, .message_count = 1, .max_tokens = 100, .reasoning_effort = "high"};
    json_t *body = request(&req);
    assert_string_equal(string_at(body, "reasoning_effort"), "high");
    assert_int_equal(json_integer_value(json_object_get(body, "max_completion_tokens")), 100);
    assert_null(json_object_get(body, "max_tokens"));
    json_decref(body);
}

static void chat__tools__are_wrapped_with_their_schema(void **state)
{
    (void)state;
    struct ka_chat_tool tool = {"submit_file", "Send it.", "{\"type\":\"object\"}"};
    struct ka_chat_request req = {
        .model = "m", .messages = &hello, .message_count = 1, .tools = &tool, .tool_count = 1};
    json_t *body = request(&req);
    const json_t *wrapped = json_array_get(json_object_get(body, "tools"), 0);
    const json_t *function = json_object_get(wrapped, "function");
    assert_string_equal(string_at(wrapped, "type"), "function");
    assert_string_equal(string_at(function, "name"), "submit_file");
    assert_string_equal(string_at(json_object_get(function, "parameters"), "type"), "object");
    json_decref(body);
}

static void chat__tool_with_invalid_schema__is_an_error_that_names_it(void **state)
{
    (void)state;
    struct ka_err err = {0};
    struct ka_chat_tool tool = {"submit_file", "Send it.", "{"};
    struct ka_chat_request req = {
        .model = "m", .messages = &hello, .message_count = 1, .tools = &tool, .tool_count = 1};
    assert_null(ka_chat_request_json(&req, &err));
    assert_non_null(strstr(err.msg, "submit_file"));
}

static void chat__tool_turns__carry_calls_and_their_ids(void **state)
{
    (void)state;
    struct ka_chat_message turns[] = {
        {.role = "assistant", .content = "", .tool_calls = "[{\"id\":\"c1\",\"type\":\"function\"}]"},
        {.role = "tool", .content = "no", .tool_call_id = "c1"},
    };
    struct ka_chat_request req = {.model = "m", .messages = turns, .message_count = 2};
    json_t *body = request(&req);
    const json_t *messages = json_object_get(body, "messages");
    const json_t *calls = json_object_get(json_array_get(messages, 0), "tool_calls");
    assert_string_equal(string_at(json_array_get(calls, 0), "id"), "c1");
    assert_string_equal(string_at(json_array_get(messages, 1), "tool_call_id"), "c1");
    json_decref(body);
}

static void chat__bytes_that_are_not_utf8__travel_as_replacement_characters(void **state)
{
    (void)state;
    struct ka_chat_message message = {.role = "user", .content = "a\xFF\xC3\xA9\xC3"};
    struct ka_chat_request req = {.model = "m", .messages = &message, .message_count = 1};
    json_t *body = request(&req);
    assert_string_equal(string_at(json_array_get(json_object_get(body, "messages"), 0), "content"),
                        "a\xEF\xBF\xBD\xC3\xA9\xEF\xBF\xBD");
    json_decref(body);
}

static void chat__complaint_about_an_option__changes_its_spelling(void **state)
{
    (void)state;
    static const struct {
        const char *body, *complaint, *want;
    } cases[] = {
        {"{\"max_tokens\":9}", "Use 'max_completion_tokens' instead.", "{\"max_completion_tokens\":9}"},
        {"{\"max_completion_tokens\":9}", "unknown: max_completion_tokens", "{\"max_tokens\":9}"},
        {"{\"stream\":true,\"stream_options\":{}}", "stream_options: extra field", "{\"stream\":true}"},
        {"{\"stream\":true,\"stream_options\":{}}", "streaming is not supported", "{}"},
        {"{\"temperature\":0.5,\"stream\":true}", "'temperature' does not support 0.5 with this model",
         "{\"stream\":true}"},
        {"{\"model\":\"m\",\"reasoning_effort\":\"low\",\"stream_options\":{}}",
         "Unrecognized arguments: reasoning_effort, stream_options", "{\"model\":\"m\"}"},
        {"{\"model\":\"m\",\"tools\":[]}", "m does not support tools", "{\"model\":\"m\"}"},
        {"{\"model\":\"m\",\"tools\":[]}", "Tool use is off", "{\"model\":\"m\"}"},
        {"{\"model\":\"m\"}", "m does not support tools", NULL},
        {"{\"max_tokens\":9}", "max_tokens is too large", NULL},
        {"{\"model\":\"m\"}", "streaming is not supported", NULL},
        {"{\"stream\":true}", "context too long", NULL},
        {"not json", "stream", NULL},
    };
    for (size_t i = 0; i < KA_COUNT(cases); i++) {
        char *got = ka_chat_request_adapt(cases[i].body, cases[i].complaint);
        if (cases[i].want)
            assert_string_equal(got, cases[i].want);
        else
            assert_null(got);
        free(got);
    }
}

static void chat__streamed_text__is_joined_with_usage_and_reason(void **state)
{
    (void)state;
    const char *chunks[] = {
        "{\"model\":\"m-1\",\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}",
        "{\"choices\":[{\"index\":0,\"delta\":{\"reasoning_content\":\"hmm\"}}]}",
        "{\"choices\":[{\"index\":0,\"delta\":{\"content\":\"a\"},\"finish_reason\":null}],\"usage\":null}",
        "{\"choices\":[{\"index\":1,\"delta\":{\"content\":\"other\"}}]}",
        "{\"choices\":[{\"index\":0,\"delta\":{\"content\":\"b\"},\"finish_reason\":\"stop\"}]}",
        "{\"choices\":[{\"index\":0,\"delta\":{\"reasoning\":\"four\"}}]}",
        "{\"choices\":[],\"usage\":{\"prompt_tokens\":7,\"completion_tokens\":2,"
        "\"prompt_tokens_details\":{\"cached_tokens\":5}}}",
        "[DONE]",
        NULL};
    struct ka_chat_answer answer;
    assert_int_equal(stream(chunks, 1000, &answer, NULL), 0);
    assert_string_equal(answer.text, "ab");
    assert_string_equal(answer.finish_reason, "stop");
    assert_string_equal(answer.model, "m-1");
    assert_null(answer.refusal);
    assert_int_equal(answer.tokens_in, 7);
    assert_int_equal(answer.tokens_out, 2);
    assert_int_equal(answer.tokens_cached, 5);
    assert_int_equal(answer.reasoning_bytes, strlen("hmm") + strlen("four"));
    ka_chat_answer_free(&answer);
}

static void chat__missing_usage__is_minus_one(void **state)
{
    (void)state;
    const char *chunks[] = {"{\"choices\":[{\"delta\":{\"content\":\"a\"}}]}", "[DONE]", NULL};
    struct ka_chat_answer answer;
    assert_int_equal(stream(chunks, 1000, &answer, NULL), 0);
    assert_null(answer.finish_reason);
    assert_int_equal(answer.tokens_in, -1);
    assert_int_equal(answer.tokens_out, -1);
    assert_int_equal(answer.tokens_cached, -1);
    ka_chat_answer_free(&answer);
}

#define CALLS(list) "{\"choices\":[{\"index\":0,\"delta\":{\"tool_calls\":[" list "]}}]}"

static void chat__streamed_calls__are_assembled_by_index(void **state)
{
    (void)state;
    const char *chunks[] = {
        CALLS("{\"index\":0,\"id\":\"a\",\"function\":{\"name\":\"one\",\"arguments\":\"{\"}}"),
        CALLS("{\"index\":2,\"id\":\"c\",\"function\":{\"name\":\"two\",\"arguments\":\"[\"}}"),
        CALLS("{\"index\":0,\"function\":{\"arguments\":\"}\"}},{\"index\":2,\"function\":{\"arguments\":\"]"
              "\"}}"),
        "[DONE]", NULL};
    struct ka_chat_answer answer;
    assert_int_equal(stream(chunks, 1000, &answer, NULL), 0);
    assert_int_equal(answer.call_count, 2);
    assert_string_equal(answer.calls[0].id, "a");
    assert_string_equal(answer.calls[0].name, "one");
    assert_string_equal(answer.calls[0].arguments, "{}");
    assert_string_equal(answer.calls[1].name, "two");
    assert_string_equal(answer.calls[1].arguments, "[]");
    ka_chat_answer_free(&answer);
}

static void chat__calls_without_index__are_told_apart_by_id(void **state)
{
    (void)state;
    const char *chunks[] = {CALLS("{\"id\":\"a\",\"function\":{\"name\":\"one\",\"arguments\":\"{\"}}"),
                            CALLS("{\"function\":{\"arguments\":\"}\"}}"),
                            CALLS("{\"id\":\"b\",\"function\":{\"name\":\"two\",\"arguments\":{\"x\":1}}}"),
                            "[DONE]", NULL};
    struct ka_chat_answer answer;
    assert_int_equal(stream(chunks, 1000, &answer, NULL), 0);
    assert_int_equal(answer.call_count, 2);
    assert_string_equal(answer.calls[0].arguments, "{}");
    assert_string_equal(answer.calls[1].arguments, "{\"x\":1}");
    ka_chat_answer_free(&answer);
}

static void chat__call_indices_out_of_range__are_refused(void **state)
{
    (void)state;
    struct ka_chat_answer answer;
    struct ka_err err = {0};
    const char *high[] = {CALLS("{\"index\":64,\"id\":\"a\"}"), NULL};
    const char *negative[] = {CALLS("{\"index\":-1,\"id\":\"a\"}"), NULL};
    assert_int_equal(stream(high, 1000, &answer, &err), -EFBIG);
    assert_non_null(strstr(err.msg, "tool calls"));
    assert_int_equal(stream(negative, 1000, &answer, &err), -EFBIG);
}

static void chat__stream_without_reason_or_done__was_cut(void **state)
{
    (void)state;
    const char *chunks[] = {"{\"choices\":[{\"delta\":{\"content\":\"half\"}}]}", NULL};
    struct ka_chat_answer answer;
    struct ka_err err = {0};
    assert_int_equal(stream(chunks, 1000, &answer, &err), -EPIPE);
    assert_non_null(strstr(err.msg, "cut"));
}

static void chat__answer_past_the_cap__is_refused_wherever_it_grows(void **state)
{
    (void)state;
    struct ka_chat_answer answer;
    const char *text[] = {"{\"choices\":[{\"delta\":{\"content\":\"0123456789\"}}]}",
                          "{\"choices\":[{\"delta\":{\"content\":\"x\"}}]}", "[DONE]", NULL};
    const char *calls[] = {CALLS("{\"index\":0,\"function\":{\"arguments\":\"0123456789\"}}"),
                           CALLS("{\"index\":0,\"function\":{\"arguments\":\"x\"}}"), "[DONE]", NULL};
    assert_int_equal(stream(text, 10, &answer, NULL), -EFBIG);
    assert_int_equal(stream(calls, 10, &answer, NULL), -EFBIG);
    assert_int_equal(stream(text, 11, &answer, NULL), 0);
    ka_chat_answer_free(&answer);
}

static void chat__chunk_that_is_not_json__is_an_error_that_stays(void **state)
{
    (void)state;
    const char *chunks[] = {"{\"choices\":[{\"delta\":{\"content\":\"a\"}}]}", "{\"choices\":[", NULL};
    struct ka_chat_answer answer;
    struct ka_err err = {0};
    assert_int_equal(stream(chunks, 1000, &answer, &err), -EBADMSG);
    assert_non_null(strstr(err.msg, "not valid JSON"));
}

/* `count` pieces of text, the i-th made by `piece`, as chunks; the first error. */
static int stream_pieces(int count, const char *(*piece)(int i))
{
    struct ka_chat_stream *stream = ka_chat_stream_new(1 << 20);
    struct ka_err err;
    int rc = 0;
    for (int i = 0; i < count && rc == 0; i++) {
        char chunk[256];
        snprintf(chunk, sizeof(chunk), "{\"choices\": [{\"delta\": {\"content\": \"%s\"}}]}", piece(i));
        rc = ka_chat_stream_add(stream, chunk, strlen(chunk), &err);
    }
    if (rc)
        assert_non_null(strstr(err.msg, "repeats itself"));
    ka_chat_stream_free(stream);
    return rc;
}

static const char *same_words(int i)
{
    return i % 2 ? "tl.store(x, 0) " : "and then ";
}

static const char *other_words(int i)
{
    static char text[64];
    snprintf(text, sizeof(text), "tl.store(x + %d, 0) ", i);
    return text;
}

static void chat__few_words_over_and_over__are_an_error(void **state)
{
    (void)state;
    assert_int_equal(stream_pieces(600, same_words), 0); /* 7200 bytes: a long table may look like that */
    assert_int_equal(stream_pieces(700, same_words), -EBADMSG);
    assert_int_equal(stream_pieces(4000, other_words), 0);
}

static void chat__error_inside_a_stream__is_reported_with_its_message(void **state)
{
    (void)state;
    const char *chunks[] = {"{\"error\":{\"message\":\"overloaded\",\"code\":502}}", NULL};
    struct ka_chat_answer answer;
    struct ka_err err = {0};
    assert_int_equal(stream(chunks, 1000, &answer, &err), -EREMOTEIO);
    assert_non_null(strstr(err.msg, "overloaded"));
}

static void chat__whole_body__is_read_like_a_stream(void **state)
{
    (void)state;
    struct ka_chat_answer answer;
    assert_int_equal(
        parse("{\"model\":\"m\",\"error\":null,\"choices\":[{\"message\":{\"content\":[{\"type\":\"text\","
              "\"text\":\"hi\"}],\"tool_calls\":[{\"id\":\"a\",\"function\":{\"name\":\"f\",\"arguments\":"
              "\"{}\"}}]},\"finish_reason\":\"tool_calls\"}],\"usage\":{\"prompt_tokens\":1}}",
              &answer, NULL),
        0);
    assert_string_equal(answer.text, "hi");
    assert_string_equal(answer.finish_reason, "tool_calls");
    assert_int_equal(answer.call_count, 1);
    assert_string_equal(answer.calls[0].name, "f");
    assert_int_equal(answer.tokens_in, 1);
    assert_int_equal(answer.tokens_out, -1);
    ka_chat_answer_free(&answer);
}

static void chat__body_without_choices__is_an_error(void **state)
{
    (void)state;
    struct ka_chat_answer answer;
    assert_int_equal(parse("{}", &answer, NULL), -EBADMSG);
    assert_int_equal(parse("{\"choices\":[]}", &answer, NULL), -EBADMSG);
    assert_int_equal(parse("[1]", &answer, NULL), -EBADMSG);
    assert_int_equal(parse("", &answer, NULL), -EBADMSG);
}

static void chat__members_of_wrong_types__are_tolerated(void **state)
{
    (void)state;
    struct ka_chat_answer answer;
    assert_int_equal(
        parse("{\"choices\":[{\"index\":\"0\",\"message\":{\"content\":7,\"tool_calls\":{\"a\":1},"
              "\"refusal\":[]},\"finish_reason\":3}],\"usage\":[],\"model\":false}",
              &answer, NULL),
        0);
    assert_true(ka_chat_answer_empty(&answer));
    assert_null(answer.finish_reason);
    ka_chat_answer_free(&answer);
}

static void chat__refusal__is_an_answer_that_is_not_empty(void **state)
{
    (void)state;
    struct ka_chat_answer answer;
    assert_int_equal(
        parse("{\"choices\":[{\"message\":{\"content\":null,\"refusal\":\"I can't.\"}}]}", &answer, NULL), 0);
    assert_string_equal(answer.refusal, "I can't.");
    assert_string_equal(answer.text, "");
    assert_false(ka_chat_answer_empty(&answer));
    ka_chat_answer_free(&answer);
}

static void chat__content_filter_without_text__is_a_refusal(void **state)
{
    (void)state;
    struct ka_chat_answer answer;
    assert_int_equal(
        parse("{\"choices\":[{\"message\":{},\"finish_reason\":\"content_filter\"}]}", &answer, NULL), 0);
    assert_non_null(answer.refusal);
    ka_chat_answer_free(&answer);
}

static void chat__white_space__is_an_empty_answer(void **state)
{
    (void)state;
    struct ka_chat_answer answer;
    assert_int_equal(parse("{\"choices\":[{\"message\":{\"content\":\" \\n\\t\"}}]}", &answer, NULL), 0);
    assert_true(ka_chat_answer_empty(&answer));
    ka_chat_answer_free(&answer);
    assert_int_equal(parse("{\"choices\":[{\"message\":{\"content\":\" x\"}}]}", &answer, NULL), 0);
    assert_false(ka_chat_answer_empty(&answer));
    ka_chat_answer_free(&answer);
}

static void chat__error_bodies__are_found_in_every_usual_place(void **state)
{
    (void)state;
    static const struct {
        const char *body, *message, *code;
    } cases[] = {
        {"{\"error\":{\"message\":\"no such model\",\"type\":\"t\",\"code\":\"c\"}}", "no such model", "c"},
        {"{\"error\":{\"message\":\"m\",\"type\":\"insufficient_quota\",\"code\":null}}", "m",
         "insufficient_quota"},
        {"{\"error\":\"plain\"}", "plain", ""},
        {"{\"message\":\"top\"}", "top", ""},
        {"{\"detail\":\"Not Found\"}", "Not Found", ""},
        {"{\"detail\":[{\"msg\":\"field required\"}]}", "field required", ""},
        {"[{\"error\":{\"message\":\"in a list\"}}]", "in a list", ""},
        {"upstream is down\r\n", "upstream is down", ""},
        {"  <html><body>502</body></html>", "", ""},
        {"{\"other\":1}", "", ""},
        {"", "", ""},
        {"{\"error\":\"\\u001b[31mred\\n\\nline\\u009b\"}", "[31mred line", ""},
    };
    for (size_t i = 0; i < KA_COUNT(cases); i++) {
        struct ka_chat_error error;
        ka_chat_error_read(cases[i].body, strlen(cases[i].body), &error);
        assert_string_equal(error.message, cases[i].message);
        assert_string_equal(error.code, cases[i].code);
    }
}

static void chat__models__are_sorted_names(void **state)
{
    (void)state;
    static const struct {
        const char *body, *names, *why;
    } cases[] = {
        {"{\"data\":[{\"id\":\"b\"},{\"id\":\"a\\nx\"},{\"id\":7},{},3]}", "[\"a x\",\"b\"]", NULL},
        {"{\"object\":\"list\",\"data\":[]}", "[]", NULL},
        {"{\"models\":[]}", NULL, "no list of models"},
        {"[]", NULL, "no list of models"},
        {"<html>", NULL, "not valid JSON"},
    };
    for (size_t i = 0; i < KA_COUNT(cases); i++) {
        struct ka_err err = {0};
        json_t *names = ka_models_parse(cases[i].body, strlen(cases[i].body), &err);
        char *text = names ? json_dumps(names, JSON_COMPACT) : NULL;
        if (cases[i].names)
            assert_string_equal(text, cases[i].names);
        else
            assert_null(text);
        if (cases[i].why)
            assert_non_null(strstr(err.msg, cases[i].why));
        free(text);
        json_decref(names);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(chat__plain_request__holds_model_and_messages_only),
        cmocka_unit_test(chat__request_without_model__is_an_error),
        cmocka_unit_test(chat__options__are_written_when_set),
        cmocka_unit_test(chat__reasoning_effort__renames_the_token_cap),
        cmocka_unit_test(chat__tools__are_wrapped_with_their_schema),
        cmocka_unit_test(chat__tool_with_invalid_schema__is_an_error_that_names_it),
        cmocka_unit_test(chat__tool_turns__carry_calls_and_their_ids),
        cmocka_unit_test(chat__bytes_that_are_not_utf8__travel_as_replacement_characters),
        cmocka_unit_test(chat__complaint_about_an_option__changes_its_spelling),
        cmocka_unit_test(chat__streamed_text__is_joined_with_usage_and_reason),
        cmocka_unit_test(chat__missing_usage__is_minus_one),
        cmocka_unit_test(chat__models__are_sorted_names),
        cmocka_unit_test(chat__streamed_calls__are_assembled_by_index),
        cmocka_unit_test(chat__calls_without_index__are_told_apart_by_id),
        cmocka_unit_test(chat__call_indices_out_of_range__are_refused),
        cmocka_unit_test(chat__stream_without_reason_or_done__was_cut),
        cmocka_unit_test(chat__answer_past_the_cap__is_refused_wherever_it_grows),
        cmocka_unit_test(chat__chunk_that_is_not_json__is_an_error_that_stays),
        cmocka_unit_test(chat__few_words_over_and_over__are_an_error),
        cmocka_unit_test(chat__error_inside_a_stream__is_reported_with_its_message),
        cmocka_unit_test(chat__whole_body__is_read_like_a_stream),
        cmocka_unit_test(chat__body_without_choices__is_an_error),
        cmocka_unit_test(chat__members_of_wrong_types__are_tolerated),
        cmocka_unit_test(chat__refusal__is_an_answer_that_is_not_empty),
        cmocka_unit_test(chat__content_filter_without_text__is_a_refusal),
        cmocka_unit_test(chat__white_space__is_an_empty_answer),
        cmocka_unit_test(chat__error_bodies__are_found_in_every_usual_place),
    };
    return cmocka_run_group_tests_name("chat", tests, NULL, NULL);
}
