/* Requests to JSON, and streamed chunks or whole bodies to answers. Every byte of an answer is an outsider's:
 * sizes and counts are capped, members may be missing or of another type. Knows nothing of HTTP, retries or
 * prompts. */
#include "chat.h"

#include "base/each.h"
#include "base/utf8.h"
#include "fields.h"

#include <errno.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#define LOOP_BYTES ((size_t)8192) /* looked at each time so many have come */
#define LOOP_PERIOD_MAX ((size_t)512)
#define CALLS_MAX 64 /* tool calls in one answer */

void ka_chat_message_free(struct ka_chat_message *message)
{
    free(message->role);
    free(message->content);
    free(message->tool_call_id);
    free(message->tool_calls);
    *message = (struct ka_chat_message){0};
}

void ka_chat_answer_free(struct ka_chat_answer *answer)
{
    for (size_t i = 0; i < answer->call_count; i++) {
        free(answer->calls[i].id);
        free(answer->calls[i].name);
        free(answer->calls[i].arguments);
    }
    free(answer->calls);
    free(answer->text);
    free(answer->refusal);
    free(answer->finish_reason);
    free(answer->model);
    *answer = (struct ka_chat_answer){0};
}

bool ka_chat_answer_empty(const struct ka_chat_answer *answer)
{
    const char *text = answer->text ? answer->text : "";
    return answer->call_count == 0 && !answer->refusal && text[strspn(text, " \t\r\n")] == '\0';
}

/* ---- requests ---- */

/* A JSON string of text that may hold bytes which are not UTF-8. */
static json_t *string_of(const char *text)
{
    json_t *string = json_string(text);
    if (string)
        return string;
    KA_AUTO_BUF struct ka_buf valid = {0};
    ka_buf_repair(&valid, text, strlen(text));
    return json_stringn(ka_buf_str(&valid), valid.len);
}

static json_t *message_of(const struct ka_chat_message *message, struct ka_err *err)
{
    const char *id = message->tool_call_id;
    json_t *calls = message->tool_calls ? json_loads(message->tool_calls, 0, NULL) : NULL;
    if (message->tool_calls && !calls) {
        ka_fail(err, -EINVAL, "the tool calls of a message with role %s are not JSON", message->role);
        return NULL;
    }
    return json_pack("{s:o, s:o, s:o*, s:o*}", "role", string_of(message->role), "content",
                     string_of(message->content), "tool_call_id", id ? string_of(id) : NULL, "tool_calls",
                     calls);
}

static json_t *messages_of(const struct ka_chat_request *req, struct ka_err *err)
{
    json_t *out = json_array();
    for (size_t i = 0; i < req->message_count; i++) {
        json_t *message = message_of(&req->messages[i], err);
        if (!message || json_array_append_new(out, message)) {
            json_decref(out);
            return NULL;
        }
    }
    return out;
}

static json_t *tools_of(const struct ka_chat_request *req, struct ka_err *err)
{
    json_t *out = json_array();
    for (size_t i = 0; i < req->tool_count; i++) {
        const struct ka_chat_tool *tool = &req->tools[i];
        json_error_t why;
        json_t *schema = json_loads(tool->parameters, 0, &why);
        json_t *wrapped = schema
                              ? json_pack("{s:s, s:{s:s, s:s, s:o}}", "type", "function", "function", "name",
                                          tool->name, "description", tool->description, "parameters", schema)
                              : NULL;
        if (!wrapped || json_array_append_new(out, wrapped)) {
            ka_fail(err, -EINVAL, "tool %s: its parameters are not JSON: %s", tool->name, why.text);
            json_decref(out);
            return NULL;
        }
    }
    return out;
}

char *ka_chat_request_json(const struct ka_chat_request *req, struct ka_err *err)
{
    if (!req->model || !*req->model) {
        ka_fail(err, -EINVAL, "no model is named: set --model");
        return NULL;
    }
    json_t *messages = messages_of(req, err);
    json_t *tools = messages && req->tool_count ? tools_of(req, err) : NULL;
    if (!messages || (req->tool_count && !tools)) {
        json_decref(messages);
        return NULL;
    }
    const char *effort = req->reasoning_effort;
    json_auto_t *body = json_pack(
        "{s:o, s:o, s:o*, s:o*, s:o*, s:o*, s:o*, s:o*}", "model", string_of(req->model), "messages",
        messages, "tools", tools, "stream", req->stream ? json_true() : NULL, "stream_options",
        req->stream ? json_pack("{s:b}", "include_usage", 1) : NULL, "reasoning_effort",
        effort ? string_of(effort) : NULL, effort ? "max_completion_tokens" : "max_tokens",
        req->max_tokens > 0 ? json_integer(req->max_tokens) : NULL, "temperature",
        req->temperature ? json_real(*req->temperature) : NULL);
    char *text = json_dumps(body, JSON_COMPACT);
    if (!text)
        ka_fail(err, -EINVAL, "the request for model %s cannot be written as JSON", req->model);
    return text;
}

static bool rename_member(json_t *body, const char *from, const char *to)
{
    json_t *value = json_object_get(body, from);
    return value && json_object_set(body, to, value) == 0 && json_object_del(body, from) == 0;
}

static bool without(json_t *body, const char *member)
{
    return json_object_del(body, member) == 0;
}

static bool adapt(json_t *body, const char *complaint)
{
    static const char *const optional[] = {"stream_options", "temperature", "reasoning_effort"};
    bool changed = strstr(complaint, "max_completion_tokens") &&
                   (rename_member(body, "max_completion_tokens", "max_tokens") ||
                    rename_member(body, "max_tokens", "max_completion_tokens"));
    for (size_t i = 0; i < KA_COUNT(optional); i++)
        changed |= strstr(complaint, optional[i]) && without(body, optional[i]);
    if (strcasestr(complaint, "tool")) /* the prompt says how to answer without */
        changed |= without(body, "tools");
    if (!changed && strstr(complaint, "stream")) {
        without(body, "stream_options");
        changed = without(body, "stream");
    }
    return changed;
}

char *ka_chat_request_adapt(const char *text, const char *complaint)
{
    json_auto_t *body = json_loads(text, 0, NULL);
    return body && adapt(body, complaint) ? json_dumps(body, JSON_COMPACT) : NULL;
}

/* ---- answers ---- */

struct call_build {
    char *id, *name;
    struct ka_buf arguments;
};

struct ka_chat_stream {
    size_t max, bytes; /* the cap, and what of it is used */
    struct ka_buf text, refusal;
    struct call_build calls[CALLS_MAX];
    size_t call_count;
    char *finish_reason, *model;
    long tokens_in, tokens_out, tokens_cached;
    size_t reasoning; /* bytes */
    bool done;
    int failed; /* the first failure, with its message: both are kept */
    struct ka_err why;
};

struct ka_chat_stream *ka_chat_stream_new(size_t max)
{
    struct ka_chat_stream *stream = ka_calloc(1, sizeof(*stream));
    stream->max = max;
    stream->tokens_in = stream->tokens_out = stream->tokens_cached = -1;
    return stream;
}

void ka_chat_stream_free(struct ka_chat_stream *stream)
{
    if (!stream)
        return;
    for (size_t i = 0; i < stream->call_count; i++) {
        free(stream->calls[i].id);
        free(stream->calls[i].name);
        ka_buf_free(&stream->calls[i].arguments);
    }
    ka_buf_free(&stream->text);
    ka_buf_free(&stream->refusal);
    free(stream->finish_reason);
    free(stream->model);
    free(stream);
}

bool ka_chat_stream_done(const struct ka_chat_stream *stream)
{
    return stream->done;
}

/* The first failure stays. */
#define FAIL(stream, ...)                                                                                    \
    ((stream)->failed = (stream)->failed ? (stream)->failed : ka_fail(&(stream)->why, __VA_ARGS__))

/* Count `len` more bytes of the answer. False: they are too many, or something has failed. */
static bool use(struct ka_chat_stream *stream, size_t len)
{
    if (stream->failed == 0 && len > stream->max - stream->bytes)
        FAIL(stream, -EFBIG, "the answer is larger than %zu bytes", stream->max);
    stream->bytes += stream->failed ? 0 : len;
    return stream->failed == 0;
}

/* Is the end of the text one short piece over and over? No code is: the model is caught in a loop and will
 * not stop by itself. */
static bool is_looping(const struct ka_buf *text)
{
    if (text->len < LOOP_BYTES)
        return false;
    const char *tail = text->data + text->len - LOOP_BYTES;
    for (size_t period = 1; period <= LOOP_PERIOD_MAX; period++)
        if (memcmp(tail, tail + period, LOOP_BYTES - period) == 0)
            return true;
    return false;
}

static void add_bytes(struct ka_chat_stream *stream, struct ka_buf *to, const char *bytes, size_t len)
{
    size_t before = to->len / LOOP_BYTES;
    if (!use(stream, len))
        return;
    ka_buf_add(to, bytes, len);
    if (to->len / LOOP_BYTES != before && is_looping(to))
        FAIL(stream, -EBADMSG, "the answer repeats itself without end");
}

static void add_string(struct ka_chat_stream *stream, struct ka_buf *to, const json_t *value)
{
    if (json_is_string(value))
        add_bytes(stream, to, json_string_value(value), json_string_length(value));
}

/* Keep the first non-empty string. */
static void keep_string(struct ka_chat_stream *stream, char **to, const json_t *value)
{
    if (!*to && json_string_length(value) && use(stream, json_string_length(value)))
        *to = ka_strndup(json_string_value(value), json_string_length(value));
}

/* Content is a string, or a list of parts of which the texts count. */
static void add_content(struct ka_chat_stream *stream, const json_t *content)
{
    add_string(stream, &stream->text, content);
    KA_EACH(content, i, part) {
        add_string(stream, &stream->text, json_object_get(part, "text"));
        add_string(stream, &stream->refusal, json_object_get(part, "refusal"));
    }
}

/* The call that a piece belongs to; NULL past the cap. Pieces without an index start a new call when they
 * bring a new id. */
static struct call_build *find_call(struct ka_chat_stream *stream, const json_t *piece)
{
    const json_t *number = json_object_get(piece, "index");
    const char *id = json_string_value(json_object_get(piece, "id"));
    json_int_t at = json_integer_value(number);
    if (!json_is_integer(number)) {
        const char *last = stream->call_count ? stream->calls[stream->call_count - 1].id : NULL;
        bool starts = stream->call_count == 0 || (id && *id && (!last || strcmp(id, last) != 0));
        at = (json_int_t)stream->call_count - (starts ? 0 : 1);
    }
    if (at < 0 || at >= CALLS_MAX)
        return NULL;
    if ((size_t)at >= stream->call_count)
        stream->call_count = (size_t)at + 1;
    return &stream->calls[at];
}

static void add_call(struct ka_chat_stream *stream, const json_t *piece)
{
    const json_t *function = json_object_get(piece, "function");
    const json_t *arguments = json_object_get(function, "arguments");
    struct call_build *call = find_call(stream, piece);
    if (!call) {
        FAIL(stream, -EFBIG, "the answer has more than %d tool calls", CALLS_MAX);
        return;
    }
    keep_string(stream, &call->id, json_object_get(piece, "id"));
    keep_string(stream, &call->name, json_object_get(function, "name"));
    add_string(stream, &call->arguments, arguments);
    KA_AUTO_FREE char *text = json_is_object(arguments) ? json_dumps(arguments, JSON_COMPACT) : NULL;
    if (text)
        add_bytes(stream, &call->arguments, text, strlen(text));
}

/* `message` is a chunk's delta or a body's whole message: the members are the same. */
static void add_message(struct ka_chat_stream *stream, const json_t *message)
{
    add_content(stream, json_object_get(message, "content"));
    stream->reasoning += json_string_length(json_object_get(message, "reasoning_content")) +
                         json_string_length(json_object_get(message, "reasoning"));
    add_string(stream, &stream->refusal, json_object_get(message, "refusal"));
    KA_EACH(json_object_get(message, "tool_calls"), i, piece)
        add_call(stream, piece);
}

static void take_count(long *to, const json_t *value)
{
    json_int_t count = json_integer_value(value);
    if (json_is_integer(value) && count >= 0 && count <= INT32_MAX)
        *to = (long)count;
}

static void report_error(struct ka_chat_stream *stream, const char *data, size_t len)
{
    struct ka_chat_error error;
    ka_chat_error_read(data, len, &error);
    FAIL(stream, -EREMOTEIO, "the endpoint answered with an error: %s",
         error.message[0] ? error.message : "it gives no message");
}

/* One chunk (`member` "delta") or one body (`member` "message"). */
static void take_json(struct ka_chat_stream *stream, const char *data, size_t len, const char *member)
{
    json_error_t why;
    json_auto_t *root = json_loadb(data, len, 0, &why);
    const json_t *choices = json_object_get(root, "choices"), *usage = json_object_get(root, "usage");
    if (!root)
        FAIL(stream, -EBADMSG, "the answer is not valid JSON: %s", why.text);
    else if (!json_is_null(json_object_get(root, "error")) && json_object_get(root, "error"))
        report_error(stream, data, len);
    else if (!json_is_object(root))
        FAIL(stream, -EBADMSG, "the answer is JSON, but not an object");
    keep_string(stream, &stream->model, json_object_get(root, "model"));
    KA_EACH(choices, i, choice) {
        if (json_integer_value(json_object_get(choice, "index")) != 0)
            continue; /* only the first choice was asked for */
        add_message(stream, json_object_get(choice, member));
        keep_string(stream, &stream->finish_reason, json_object_get(choice, "finish_reason"));
    }
    take_count(&stream->tokens_in, json_object_get(usage, "prompt_tokens"));
    take_count(&stream->tokens_out, json_object_get(usage, "completion_tokens"));
    take_count(&stream->tokens_cached,
               json_object_get(json_object_get(usage, "prompt_tokens_details"), "cached_tokens"));
    if (strcmp(member, "message") == 0 && json_array_size(choices) == 0)
        FAIL(stream, -EBADMSG, "the answer has no choices");
}

static int take(struct ka_chat_stream *stream, const char *data, size_t len, const char *member,
                struct ka_err *err)
{
    if (stream->failed == 0)
        take_json(stream, data, len, member);
    return stream->failed ? ka_fail(err, stream->failed, "%s", stream->why.msg) : 0;
}

int ka_chat_stream_add(struct ka_chat_stream *stream, const char *data, size_t len, struct ka_err *err)
{
    if (len == 6 && memcmp(data, "[DONE]", 6) == 0) {
        stream->done = true;
        return 0;
    }
    return take(stream, data, len, "delta", err);
}

static void move_calls(struct ka_chat_stream *stream, struct ka_chat_answer *answer)
{
    if (stream->call_count == 0)
        return;
    answer->calls = ka_calloc(stream->call_count, sizeof(*answer->calls));
    for (size_t i = 0; i < stream->call_count; i++) {
        struct call_build *from = &stream->calls[i];
        if (!from->name && from->arguments.len == 0)
            continue; /* an index that was left out */
        struct ka_chat_call *call = &answer->calls[answer->call_count++];
        call->id = from->id ? from->id : ka_strdup("");
        call->name = from->name ? from->name : ka_strdup("");
        call->arguments = ka_strdup(ka_buf_str(&from->arguments));
        from->id = from->name = NULL;
    }
}

int ka_chat_stream_finish(struct ka_chat_stream *stream, struct ka_chat_answer *answer, struct ka_err *err)
{
    if (stream->failed)
        return ka_fail(err, stream->failed, "%s", stream->why.msg);
    if (!stream->done && !stream->finish_reason)
        return ka_fail(err, -EPIPE, "the answer was cut after %zu bytes", stream->bytes);
    *answer = (struct ka_chat_answer){.tokens_in = stream->tokens_in,
                                      .tokens_out = stream->tokens_out,
                                      .tokens_cached = stream->tokens_cached,
                                      .reasoning_bytes = stream->reasoning};
    answer->text = ka_strdup(ka_buf_str(&stream->text));
    answer->finish_reason = stream->finish_reason;
    answer->model = stream->model;
    stream->finish_reason = stream->model = NULL;
    move_calls(stream, answer);
    if (stream->refusal.len)
        answer->refusal = ka_strdup(ka_buf_str(&stream->refusal));
    else if (answer->finish_reason && strcmp(answer->finish_reason, "content_filter") == 0 &&
             ka_chat_answer_empty(answer))
        answer->refusal = ka_strdup("the endpoint's content filter withheld the answer");
    return 0;
}

int ka_chat_parse(const char *body, size_t len, size_t max, struct ka_chat_answer *answer, struct ka_err *err)
{
    struct ka_chat_stream *stream = ka_chat_stream_new(max);
    int rc = take(stream, body, len, "message", err);
    stream->done = true; /* a whole body cannot have been cut, with or without a finish reason */
    if (rc == 0)
        rc = ka_chat_stream_finish(stream, answer, err);
    ka_chat_stream_free(stream);
    return rc;
}

/* ---- errors ---- */

/* The places in which endpoints put their message: {"error": {"message"}}, {"error"}, {"message"},
 * {"detail"},
 * {"detail": [{"msg"}]}. */
static const char *message_in(const json_t *root)
{
    const json_t *error = json_object_get(root, "error"), *detail = json_object_get(root, "detail");
    const json_t *places[] = {json_object_get(error, "message"), error, json_object_get(root, "message"),
                              detail, json_object_get(json_array_get(detail, 0), "msg")};
    for (size_t i = 0; i < KA_COUNT(places); i++)
        if (json_is_string(places[i]))
            return json_string_value(places[i]);
    return NULL;
}

void ka_chat_error_read(const char *body, size_t len, struct ka_chat_error *error)
{
    *error = (struct ka_chat_error){0};
    json_auto_t *root = json_loadb(body, len, 0, NULL);
    const char *first = ka_first_byte(body, len);
    const json_t *object = json_is_array(root) ? json_array_get(root, 0) : root;
    const json_t *inner = json_object_get(object, "error");
    const char *message = message_in(object),
               *code = ka_text_of(inner, "code", ka_text_of(inner, "type", NULL));
    if (message)
        ka_utf8_line(message, strlen(message), error->message, sizeof(error->message));
    else if (!root && first && *first != '<') /* proxies answer with pages that are of no use in a message */
        ka_utf8_line(body, len, error->message, sizeof(error->message));
    if (code)
        ka_utf8_line(code, strlen(code), error->code, sizeof(error->code));
}
