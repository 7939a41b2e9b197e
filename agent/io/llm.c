/* Ops, attempts and retries. One uv timer per op is, in turn, the watch for silence and the wait before a
 * retry; when it is closed the result is delivered, so that `done` never runs inside another call. Knows
 * nothing of runs or prompts. */
#include "llm.h"

#include "agent/core/sse.h"
#include "http.h"
#include "url.h"
#include "loop_uv.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "base/hash.h"

#define ERROR_BODY_MAX 65536
#define WHOLE_FACTOR 4   /* a JSON body may be this much larger than the answer in it (escapes, reasoning) */
#define STREAM_FACTOR 32 /* and a stream this much: each few bytes come in a chunk of their own */
#define ADAPTATIONS_MAX 3
#define KNOWN_MAX 16 /* complaints that are remembered */
#define KEY_MIN 4    /* shorter ones are no secret and would be masked inside words */

enum form { FORM_UNKNOWN, FORM_STREAM, FORM_WHOLE };

/* What one attempt has received. */
struct attempt {
    struct ka_transfer *transfer;
    enum form form;
    struct ka_sse sse;
    struct ka_chat_stream *stream;
    struct ka_buf whole; /* a JSON body, or the body of an error */
    size_t bytes;
    int failed; /* the content is unusable: why */
    struct ka_err why;
};

struct op {
    struct op *next;
    struct ka_llm *llm;
    uint64_t id;
    ka_llm_trace_fn trace; /* NULL: none */
    ka_llm_done_fn done;
    void *arg;
    char *model, *body;
    bool stream;
    size_t at, passed; /* the endpoint that is asked, and how many were before it */
    uv_timer_t timer;
    uint64_t started_ms, last_byte_ms;
    unsigned retries, bad_answers, adaptations;
    char *complaints[ADAPTATIONS_MAX];
    struct attempt attempt;
    bool ended;
    struct ka_llm_result result;
    struct ka_chat_answer answer;
    struct ka_err message;
};

/* What an endpoint said of an option that it does not know. */
struct known {
    char *model, *complaint;
};

struct endpoint {
    char *base_url, *shown_url, *api_key;
};

struct ka_llm {
    uv_loop_t *loop;
    struct ka_http *http; /* NULL once it is being closed */
    struct ka_llm_config config;
    struct endpoint endpoints[KA_LLM_ENDPOINTS_MAX];
    size_t endpoint_count, first; /* the first to be asked */
    struct known known[KNOWN_MAX];
    size_t known_count;
    uint64_t random, last_id;
    struct op *ops;
    unsigned live;
    bool closing;
    void (*closed)(void *arg);
    void *closed_arg;
};

static void begin_attempt(struct op *op);

static uint64_t now_ms(void)
{
    return uv_hrtime() / 1000000;
}

/* ---- messages ---- */

static void mask(char *text, size_t len, const char *key)
{
    size_t key_len = key ? strlen(key) : 0;
    if (key_len < KEY_MIN || len == 0)
        return;
    char *end = text + len, *found;
    while ((found = memmem(text, (size_t)(end - text), key, key_len))) {
        memset(found, '*', key_len);
        text = found + key_len;
    }
}

/* Overwrite the keys wherever they occur. */
static void mask_keys(const struct ka_llm *llm, char *text, size_t len)
{
    for (size_t i = 0; i < llm->endpoint_count; i++)
        mask(text, len, llm->endpoints[i].api_key);
}

static const struct endpoint *endpoint_of(const struct op *op)
{
    return &op->llm->endpoints[op->at];
}

static void trace(struct op *op, const char *event, const char *fmt, ...) KA_PRINTF(3, 4);

static void trace(struct op *op, const char *event, const char *fmt, ...)
{
    char text[1280];
    if (!op->trace)
        return;
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof(text), fmt, args);
    va_end(args);
    mask_keys(op->llm, text, strlen(text));
    op->trace(op->arg, event, text);
}

/* ---- ends ---- */

static void attempt_free(struct attempt *attempt)
{
    if (attempt->transfer)
        ka_http_abort(attempt->transfer);
    ka_sse_free(&attempt->sse);
    ka_chat_stream_free(attempt->stream);
    ka_buf_free(&attempt->whole);
    *attempt = (struct attempt){0};
}

static void close_http_if_idle(struct ka_llm *llm);

static void deliver(uv_handle_t *timer)
{
    struct op *op = timer->data;
    struct ka_llm *llm = op->llm;
    struct op **link = &llm->ops;
    while (*link != op)
        link = &(*link)->next;
    *link = op->next;
    llm->live--;
    op->done(op->arg, op->id, &op->result);
    ka_chat_answer_free(&op->answer);
    for (unsigned i = 0; i < op->adaptations; i++)
        free(op->complaints[i]);
    free(op->model);
    free(op->body);
    free(op);
    close_http_if_idle(llm);
}

/* The only way out of an op. `op->message` holds the message. */
static void end(struct op *op, enum ka_llm_status status)
{
    attempt_free(&op->attempt);
    mask_keys(op->llm, op->message.msg, strlen(op->message.msg));
    op->result.status = status;
    op->result.endpoint = endpoint_of(op)->shown_url;
    op->result.seconds = (double)(now_ms() - op->started_ms) / 1000.0;
    op->result.answer = status == KA_LLM_OK ? &op->answer : NULL;
    if (status == KA_LLM_OK)
        op->message.msg[0] = '\0';
    else if (!op->ended) /* cancelled twice: who started it may be gone */
        trace(op, status == KA_LLM_CANCELLED ? "cancelled" : "failed", "%s", op->message.msg);
    if (!op->ended)
        uv_close((uv_handle_t *)&op->timer, deliver);
    op->ended = true;
}

static void give_up(struct op *op, enum ka_llm_status status, const char *why, const char *remedy)
{
    ka_fail(&op->message, 0, "%s%s, model %s: %s (%u attempt%s, %.1f s)%s%s", endpoint_of(op)->shown_url,
            KA_URL_CHAT, op->model, why, op->result.attempts, op->result.attempts == 1 ? "" : "s",
            (double)(now_ms() - op->started_ms) / 1000.0, *remedy ? ". " : "", remedy);
    end(op, status);
}

/* ---- retries ---- */

static uint64_t wait_ms(struct op *op, unsigned doublings, long retry_after_s)
{
    const struct ka_llm_config *config = &op->llm->config;
    uint64_t most = (uint64_t)config->backoff_max_ms, wait = (uint64_t)config->backoff_ms;
    for (unsigned i = 0; i < doublings && wait < most; i++)
        wait *= 2;
    wait = wait < most ? wait : most;
    wait = wait / 2 + ka_random_next(&op->llm->random) % (wait / 2 + 1); /* not all clients at once */
    uint64_t asked = (uint64_t)retry_after_s * 1000;
    if (wait < asked)
        wait = asked < most ? asked : most;
    return wait ? wait : 1;
}

static void on_wait_over(uv_timer_t *timer)
{
    begin_attempt(timer->data);
}

static uint64_t left_ms(const struct op *op)
{
    uint64_t spent = now_ms() - op->started_ms, total = (uint64_t)op->llm->config.total_ms;
    return spent < total ? total - spent : 0;
}

static void try_again(struct op *op, unsigned *count, unsigned most, enum ka_llm_status status,
                      const char *why, long retry_after_s, const char *remedy)
{
    uint64_t wait = wait_ms(op, op->retries + op->bad_answers, retry_after_s);
    if (*count >= most || wait >= left_ms(op)) {
        give_up(op, status, why, remedy);
        return;
    }
    ++*count;
    trace(op, "retry", "attempt %u failed: %s; the next one in %.1f s", op->result.attempts, why,
          (double)wait / 1000.0);
    attempt_free(&op->attempt);
    uv_update_time(op->llm->loop);
    uv_timer_start(&op->timer, on_wait_over, wait, 0);
}

/* Somebody else may serve this request. */
static bool ask_next(struct op *op, const char *why)
{
    struct ka_llm *llm = op->llm;
    if (op->passed + 1 >= llm->endpoint_count || left_ms(op) == 0)
        return false;
    const char *from = endpoint_of(op)->shown_url;
    op->passed++;
    op->at = (op->at + 1) % llm->endpoint_count;
    trace(op, "next", "%s: %s; asking %s", from, why, endpoint_of(op)->shown_url);
    attempt_free(&op->attempt);
    uv_update_time(llm->loop);
    uv_timer_start(&op->timer, on_wait_over, 1, 0);
    return true;
}

static void retry_transport(struct op *op, const char *why, long retry_after_s)
{
    bool spoke = op->attempt.bytes != 0;
    if (!spoke && ask_next(op, why))
        return;
    try_again(op, &op->retries, op->llm->config.max_retries, spoke ? KA_LLM_BAD_ANSWER : KA_LLM_UNREACHABLE,
              why, retry_after_s, spoke ? "" : "Is the endpoint running, and --base-url right?");
}

static void retry_answer(struct op *op, const char *why)
{
    try_again(op, &op->bad_answers, op->llm->config.max_bad_answers, KA_LLM_BAD_ANSWER, why, 0, "");
}

/* ---- what came ---- */

static void count_tokens(long *total, long tokens)
{
    if (tokens >= 0)
        *total = (*total < 0 ? 0 : *total) + tokens;
}

/* What helped is done at once from now on. */
static void remember(struct op *op)
{
    struct ka_llm *llm = op->llm;
    for (unsigned i = 0; i < op->adaptations && llm->known_count < KNOWN_MAX; i++)
        llm->known[llm->known_count++] = (struct known){ka_strdup(op->model), ka_strdup(op->complaints[i])};
}

static char *in_known_spelling(const struct ka_llm *llm, const char *model, char *body)
{
    for (size_t i = 0; i < llm->known_count; i++) {
        char *changed = strcmp(llm->known[i].model, model) == 0
                            ? ka_chat_request_adapt(body, llm->known[i].complaint)
                            : NULL;
        if (changed) {
            free(body);
            body = changed;
        }
    }
    return body;
}

static void take_chat(struct op *op)
{
    struct ka_chat_answer *answer = &op->answer;
    count_tokens(&op->result.tokens_in, answer->tokens_in);
    count_tokens(&op->result.tokens_out, answer->tokens_out);
    count_tokens(&op->result.tokens_cached, answer->tokens_cached);
    if (!ka_chat_answer_empty(answer)) {
        trace(op, "answer",
              "%zu bytes of text, %zu of reasoning, %zu calls, finish reason %s, %ld tokens in (%ld cached), "
              "%ld out",
              strlen(answer->text), answer->reasoning_bytes, answer->call_count,
              answer->finish_reason ? answer->finish_reason : "none", answer->tokens_in,
              answer->tokens_cached, answer->tokens_out);
        remember(op);
        op->llm->first = op->at;
        end(op, KA_LLM_OK);
        return;
    }
    bool length = answer->finish_reason && strcmp(answer->finish_reason, "length") == 0;
    ka_chat_answer_free(answer);
    retry_answer(op, length ? "the answer is empty: the token cap was used up before any text"
                            : "the answer is empty: neither text nor tool calls");
}

static int read_whole(struct op *op, struct ka_err *err)
{
    const struct ka_buf *whole = &op->attempt.whole;
    const char *first = ka_first_byte(ka_buf_str(whole), whole->len);
    if (!first)
        return ka_fail(err, -EBADMSG, "the answer is empty: no byte came");
    if (*first == '<')
        return ka_fail(err, -EBADMSG, "the answer is a web page; is --base-url right?");
    if (op->stream)
        trace(op, "plain", "a JSON body came where a stream was asked for");
    return ka_chat_parse(whole->data, whole->len, op->llm->config.max_answer_bytes, &op->answer, err);
}

/* Hand bytes to the parser of the stream, or, with none, its end. Non-zero: nothing more is wanted. */
static int feed_stream(struct op *op, const char *bytes, size_t len)
{
    struct attempt *attempt = &op->attempt;
    size_t most = op->llm->config.max_answer_bytes;
    int rc = bytes ? ka_sse_feed(&attempt->sse, bytes, len) : ka_sse_finish(&attempt->sse);
    if (rc < 0 && attempt->failed == 0)
        attempt->failed = ka_fail(&attempt->why, rc, "an event of the stream is larger than %zu bytes",
                                  most * WHOLE_FACTOR);
    else if (rc == 0 && attempt->bytes / STREAM_FACTOR > most)
        rc = attempt->failed =
            ka_fail(&attempt->why, -EFBIG, "the stream is larger than %zu bytes", most * STREAM_FACTOR);
    return rc;
}

/* The content of an attempt with status 2xx. `broken` is how the transport failed, or NULL. */
static void take_content(struct op *op, const char *broken)
{
    struct attempt *attempt = &op->attempt;
    struct ka_err err = {0};
    if (attempt->form == FORM_STREAM && !broken)
        feed_stream(op, NULL, 0);
    int rc = attempt->failed;
    if (rc)
        err = attempt->why;
    else if (attempt->form == FORM_STREAM)
        rc = ka_chat_stream_finish(attempt->stream, &op->answer, &err);
    else if (broken)
        rc = -EPIPE;
    else
        rc = read_whole(op, &err);

    if (rc == -EFBIG)
        give_up(op, KA_LLM_BAD_ANSWER, err.msg, "");
    else if (rc == -EPIPE)
        retry_transport(op, broken ? broken : err.msg, 0);
    else if (rc)
        retry_answer(op, err.msg);
    else
        take_chat(op);
}

static const char *remedy_for(long status)
{
    switch (status) {
    case 401:
        return "Set a valid key in OPENAI_API_KEY or --api-key-file.";
    case 402:
        return "The account needs credit.";
    case 403:
        return "The key may not use this model or endpoint: choose another --model or key.";
    case 404:
        return "Check --model and --base-url: the endpoint does not know this model or path.";
    case 413:
        return "The prompt is too large for the endpoint: lower --topk.";
    default:
        return status < 400 ? "Redirects are not followed: set --base-url to where it points."
                            : "The endpoint does not accept this request: check --model and its limits.";
    }
}

static bool is_passing(long status)
{
    return status == 408 || status == 409 || status == 425 || status == 429 || status >= 500;
}

/* Key, credit, model or path: another endpoint may take it. */
static bool is_anothers(long status)
{
    return status == 401 || status == 402 || status == 403 || status == 404;
}

/* An optional part of the request is at fault: ask again without it. */
static bool adapt(struct op *op, long status, const char *complaint)
{
    if ((status != 400 && status != 422) || op->adaptations >= ADAPTATIONS_MAX)
        return false;
    char *body = ka_chat_request_adapt(op->body, complaint);
    if (!body)
        return false;
    op->complaints[op->adaptations++] = ka_strdup(complaint);
    free(op->body);
    op->body = body;
    trace(op, "adapt", "HTTP %ld: %s; asking again without that option", status, complaint);
    attempt_free(&op->attempt);
    uv_timer_start(&op->timer, on_wait_over, 1, 0);
    return true;
}

static void take_status(struct op *op, const struct ka_http_end *ended)
{
    struct ka_chat_error said;
    struct ka_err why;
    mask_keys(op->llm, op->attempt.whole.data, op->attempt.whole.len);
    ka_chat_error_read(ka_buf_str(&op->attempt.whole), op->attempt.whole.len, &said);
    KA_AUTO_FREE char *target = ended->redirect ? ka_url_shown(ended->redirect) : NULL;
    if (said.message[0])
        ka_fail(&why, 0, "HTTP %ld: %s", ended->status, said.message);
    else
        ka_fail(&why, 0, "HTTP %ld%s%s", ended->status, target ? " to " : "", target ? target : "");
    bool no_credit = strcmp(said.code, "insufficient_quota") == 0;
    if ((is_passing(ended->status) || is_anothers(ended->status)) && ask_next(op, why.msg))
        return;
    if (is_passing(ended->status) && !no_credit)
        try_again(op, &op->retries, op->llm->config.max_retries, KA_LLM_UNREACHABLE, why.msg,
                  ended->retry_after_s,
                  "The endpoint is overloaded or down: try later, or set another --base-url.");
    else if (!adapt(op, ended->status, said.message))
        give_up(op, KA_LLM_REFUSED_BY_ENDPOINT, why.msg, remedy_for(no_credit ? 402 : ended->status));
}

static void on_end(void *arg, const struct ka_http_end *ended)
{
    struct op *op = arg;
    op->attempt.transfer = NULL;
    op->result.http_status = ended->status;
    uv_timer_stop(&op->timer);
    if (ended->status && (ended->status < 200 || ended->status > 299))
        take_status(op, ended);
    else if (ended->permanent && !ask_next(op, ended->failure))
        give_up(op, KA_LLM_UNREACHABLE, ended->failure, "Is --base-url right?");
    else if (ended->permanent)
        return;
    else
        take_content(op, ended->failure);
}

/* ---- one attempt ---- */

static int on_event(void *arg, const char *type, const char *data, size_t len)
{
    (void)type;
    struct attempt *attempt = arg;
    attempt->failed = ka_chat_stream_add(attempt->stream, data, len, &attempt->why);
    if (attempt->failed)
        return attempt->failed;
    return ka_chat_stream_done(attempt->stream); /* [DONE]: whatever else comes is not waited for */
}

/* Endpoints are not trusted to name the form of their answer rightly: the first byte decides. */
static enum form form_of(struct op *op, struct ka_transfer *transfer, const char *bytes, size_t len)
{
    const char *first = ka_first_byte(bytes, len), *type = ka_http_content_type(transfer);
    if (!first)
        return FORM_UNKNOWN;
    if (!op->stream || *first == '{' || *first == '<')
        return FORM_WHOLE;
    return (type && strncasecmp(type, "text/event-stream", 17) == 0) || strchr("d:ei", *first) ? FORM_STREAM
                                                                                               : FORM_WHOLE;
}

static int on_body(void *arg, struct ka_transfer *transfer, const char *bytes, size_t len)
{
    struct op *op = arg;
    struct attempt *attempt = &op->attempt;
    long status = ka_http_status(transfer);
    op->last_byte_ms = now_ms();
    attempt->bytes += len;
    if (status < 200 || status > 299) {
        attempt->whole.max = ERROR_BODY_MAX;
        return ka_buf_add(&attempt->whole, bytes, len);
    }
    if (attempt->form == FORM_UNKNOWN)
        attempt->form = form_of(op, transfer, bytes, len);
    if (attempt->form == FORM_STREAM)
        return feed_stream(op, bytes, len);
    if (ka_buf_add(&attempt->whole, bytes, len))
        attempt->failed =
            ka_fail(&attempt->why, -EFBIG, "the answer is larger than %zu bytes", attempt->whole.max);
    return attempt->failed;
}

static void on_silence(uv_timer_t *timer)
{
    struct op *op = timer->data;
    uint64_t silent = now_ms() - op->last_byte_ms, most = (uint64_t)op->llm->config.idle_ms;
    if (silent < most) {
        uv_timer_start(timer, on_silence, most - silent, 0);
        return;
    }
    struct ka_err why;
    ka_fail(&why, 0, "silent for %.1f s", (double)silent / 1000.0);
    struct ka_http_end ended = {.failure = why.msg, .status = ka_http_status(op->attempt.transfer)};
    ka_http_abort(op->attempt.transfer);
    on_end(op, &ended);
}

static int start_transfer(struct op *op, struct ka_err *err)
{
    struct ka_llm *llm = op->llm;
    size_t most = llm->config.max_answer_bytes;
    uint64_t left = left_ms(op);
    KA_AUTO_FREE char *url = ka_format("%s%s", endpoint_of(op)->base_url, KA_URL_CHAT);
    struct ka_http_req req = {.url = url,
                              .bearer = endpoint_of(op)->api_key,
                              .body = op->body,
                              .body_len = strlen(op->body),
                              .connect_ms = llm->config.connect_ms,
                              .total_ms = left ? (long)left : 1};
    ka_sse_init(&op->attempt.sse, most * WHOLE_FACTOR, on_event, &op->attempt);
    op->attempt.stream = ka_chat_stream_new(most);
    op->attempt.whole.max = most * WHOLE_FACTOR;
    int rc = ka_http_start(llm->http, &req, on_body, on_end, op, &op->attempt.transfer, err);
    if (rc)
        return rc;
    op->last_byte_ms = now_ms();
    uv_update_time(llm->loop);
    uv_timer_start(&op->timer, on_silence, (uint64_t)llm->config.idle_ms, 0);
    return 0;
}

static void begin_attempt(struct op *op)
{
    struct ka_err err = {0};
    op->result.attempts++;
    trace(op, "request", "POST %s%s, model %s, %zu bytes", endpoint_of(op)->shown_url, KA_URL_CHAT, op->model,
          strlen(op->body));
    if (start_transfer(op, &err))
        give_up(op, KA_LLM_UNREACHABLE, err.msg, "");
}

/* ---- API: ops ---- */

int ka_llm_start(struct ka_llm *llm, const struct ka_chat_request *req, ka_llm_trace_fn on_trace,
                 ka_llm_done_fn done, void *arg, uint64_t *id, struct ka_err *err)
{
    if (llm->closing)
        return ka_fail(err, -ECANCELED, "the LLM client is being closed");
    if (llm->live >= llm->config.max_concurrent)
        return ka_fail(err, -EAGAIN, "%u requests are under way already", llm->live);
    char *body = ka_chat_request_json(req, err);
    if (!body)
        return -EINVAL;
    struct op *op = ka_calloc(1, sizeof(*op));
    *op = (struct op){.llm = llm,
                      .id = ++llm->last_id,
                      .trace = on_trace,
                      .done = done,
                      .arg = arg,
                      .model = ka_strdup(req->model),
                      .body = in_known_spelling(llm, req->model, body),
                      .stream = req->stream,
                      .at = llm->first,
                      .started_ms = now_ms(),
                      .next = llm->ops};
    op->result.message = op->message.msg;
    op->result.tokens_in = op->result.tokens_out = op->result.tokens_cached = -1;
    uv_timer_init(llm->loop, &op->timer);
    op->timer.data = op;
    llm->ops = op;
    llm->live++;
    *id = op->id;
    begin_attempt(op);
    return 0;
}

static void cancel(struct op *op)
{
    ka_chat_answer_free(&op->answer);
    ka_fail(&op->message, 0, "cancelled");
    end(op, KA_LLM_CANCELLED);
}

int ka_llm_cancel(struct ka_llm *llm, uint64_t id)
{
    struct op *op = llm->ops;
    while (op && op->id != id)
        op = op->next;
    if (!op)
        return -ENOENT;
    cancel(op);
    return 0;
}

/* ---- API: the client ---- */

void ka_llm_config_init(struct ka_llm_config *config)
{
    *config = (struct ka_llm_config){
        .connect_ms = 20 * 1000,
        .idle_ms = 300 * 1000, /* reasoning models think long before their first byte */
        .total_ms = 1200 * 1000,
        .max_concurrent = 4,
        .max_retries = 5,
        .max_bad_answers = 2,
        .backoff_ms = 1000,
        .backoff_max_ms = 60 * 1000,
        .max_answer_bytes = (size_t)1 << 20, /* twice the longest backward part that is taken */
    };
}

/* Keys come from files that end in a newline. */
static char *clean_key(const char *key)
{
    static const char white[] = " \t\r\n";
    key += strspn(key, white);
    size_t len = strlen(key);
    while (len && strchr(white, key[len - 1]))
        len--;
    return len ? ka_strndup(key, len) : NULL;
}

static void free_llm(struct ka_llm *llm)
{
    for (size_t i = 0; i < llm->endpoint_count; i++) {
        struct endpoint *endpoint = &llm->endpoints[i];
        if (endpoint->api_key)
            explicit_bzero(endpoint->api_key, strlen(endpoint->api_key));
        free(endpoint->api_key);
        free(endpoint->base_url);
        free(endpoint->shown_url);
    }
    for (size_t i = 0; i < llm->known_count; i++) {
        free(llm->known[i].model);
        free(llm->known[i].complaint);
    }
    free(llm);
}

static int add_endpoint(struct ka_llm *llm, const struct ka_llm_endpoint *from, struct ka_err *err)
{
    char *base_url = from->base_url ? ka_url_base(from->base_url) : NULL;
    if (!base_url)
        return ka_fail(err, -EINVAL, "--base-url must look like https://host/v1 or http://host:port/v1");
    struct endpoint *to = &llm->endpoints[llm->endpoint_count++];
    *to = (struct endpoint){.base_url = base_url,
                            .shown_url = ka_url_shown(base_url),
                            .api_key = from->api_key ? clean_key(from->api_key) : NULL};
    if (to->api_key && ka_url_has_space(to->api_key))
        return ka_fail(err, -EINVAL,
                       "the API key for %s contains a space or a control character: check --api-key-file",
                       to->shown_url);
    return 0;
}

int ka_llm_new(struct ka_loop *loop, const struct ka_llm_config *config, struct ka_llm **out,
               struct ka_err *err)
{
    struct ka_llm *llm = ka_calloc(1, sizeof(*llm));
    int rc = 0;
    llm->loop = ka_loop_uv(loop);
    llm->config = *config;
    llm->config.endpoint_count = 0; /* the copies are the ones that count */
    memset(llm->config.endpoints, 0, sizeof(llm->config.endpoints));
    llm->random = config->jitter_seed ? config->jitter_seed : ka_random_u64();
    if (config->endpoint_count == 0 || config->endpoint_count > KA_LLM_ENDPOINTS_MAX)
        rc = ka_fail(err, -EINVAL, "%zu endpoints are named: 1 to %d can be", config->endpoint_count,
                     KA_LLM_ENDPOINTS_MAX);
    for (size_t i = 0; rc == 0 && i < config->endpoint_count; i++)
        rc = add_endpoint(llm, &config->endpoints[i], err);
    if (rc == 0 && !(llm->http = ka_http_new(loop, err)))
        rc = -ENOMEM;
    if (rc) {
        free_llm(llm);
        return rc;
    }
    *out = llm;
    return 0;
}

static void on_http_closed(void *arg)
{
    struct ka_llm *llm = arg;
    void (*closed)(void *arg) = llm->closed;
    void *closed_arg = llm->closed_arg;
    free_llm(llm);
    if (closed)
        closed(closed_arg);
}

static void close_http_if_idle(struct ka_llm *llm)
{
    if (!llm->closing || llm->live || !llm->http)
        return;
    struct ka_http *http = llm->http;
    llm->http = NULL;
    ka_http_close(http, on_http_closed, llm);
}

void ka_llm_close(struct ka_llm *llm, void (*closed)(void *arg), void *arg)
{
    if (llm->closing)
        return;
    llm->closing = true;
    llm->closed = closed;
    llm->closed_arg = arg;
    for (struct op *op = llm->ops; op; op = op->next)
        cancel(op);
    close_http_if_idle(llm);
}
