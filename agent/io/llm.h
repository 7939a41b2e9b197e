/* The client for OpenAI-compatible endpoints: one chat completion at a time, retried as long as that makes
 * sense, then delivered or given up with a sentence for people.
 *
 * Words: an *op* is one thing asked for; it makes one or several *attempts*, each one POST. What is retried:
 *
 *   connection failures, 408, 409, 425, 429, 5xx, a stream that was cut, silence   up to `max_retries`
 *   invalid JSON, an error inside an answer, an empty answer                       up to `max_bad_answers`
 *   an answer past the cap; 4xx otherwise; 429 for an account without credit       never
 *   an option that the endpoint does not know (tools, streaming, the cap's name)   in another spelling
 *
 * Where that helped, later requests for the model are written so at once.
 *
 * Of several endpoints the next is asked at once where one cannot be reached, is overloaded, or does not take
 * the key or the model; the last in turn is retried as above. The one that answered is the first to be asked
 * from then on. A key goes to its own endpoint and to no other.
 *
 * Waits double from `backoff_ms`, jittered, and are at least what Retry-After asks for, up to
 * `backoff_max_ms`. All attempts and waits together end at `total_ms`. A refusal by the model is an answer,
 * with `refusal` set.
 *
 * Everything runs on the loop's thread. The API keys are held here only, wiped by ka_llm_close(), and masked
 * in every message and trace, also where an endpoint repeats them. */
#ifndef KA_LLM_H
#define KA_LLM_H

#include "agent/core/chat.h"

struct ka_llm;
struct ka_loop;

struct ka_llm_endpoint {
    const char *base_url; /* "https://api.example/v1", with or without slash at the end */
    const char *api_key;  /* NULL or empty: none is sent */
};

#define KA_LLM_ENDPOINTS_MAX 8

struct ka_llm_config {
    struct ka_llm_endpoint endpoints[KA_LLM_ENDPOINTS_MAX];
    size_t endpoint_count;
    long connect_ms;
    long idle_ms;  /* longest silence, also before the first byte */
    long total_ms; /* for the op, all attempts together */
    unsigned max_concurrent;
    unsigned max_retries, max_bad_answers;
    long backoff_ms, backoff_max_ms;
    size_t max_answer_bytes;
    uint64_t jitter_seed; /* 0 draws one */
};

enum ka_llm_status {
    KA_LLM_OK,
    KA_LLM_UNREACHABLE,         /* no connection, no reply, or only 429 and 5xx */
    KA_LLM_REFUSED_BY_ENDPOINT, /* it will not serve this request: key, model, URL, size, credit */
    KA_LLM_BAD_ANSWER,          /* it answered, but with nothing usable */
    KA_LLM_CANCELLED,
};

struct ka_llm_result {
    enum ka_llm_status status;
    struct ka_chat_answer *answer; /* NULL unless KA_LLM_OK; to keep it, copy the struct, zero this one */
    const char *message;           /* what went wrong and what to do about it; "" when OK */
    long http_status;              /* of the last attempt, 0 when there was none */
    const char *endpoint;          /* of the last attempt: its URL, without what may be secret */
    unsigned attempts;
    double seconds;
    long tokens_in, tokens_out; /* paid for in all attempts together; -1 when none reported any */
    long tokens_cached;         /* of tokens_in, from the endpoint's cache; -1 likewise */
};

/* Runs once for each op, from the loop, never from inside a call of this module. The result and what it
 * points to live until it returns. It may start, cancel and close. */
typedef void (*ka_llm_done_fn)(void *arg, uint64_t op, const struct ka_llm_result *result);

/* What an op goes through, for the record of a run; also called while it is being started. `event` is one of
 * "request", "retry", "adapt", "next" (endpoint), "plain" (a JSON body where a stream was asked for),
 * "answer", "failed", "cancelled". Must not call back into this module. */
typedef void (*ka_llm_trace_fn)(void *arg, const char *event, const char *text);

/* Defaults for everything but the endpoints, of which there are none. */
void ka_llm_config_init(struct ka_llm_config *config);

/* Copies `config`. -EINVAL when there is no endpoint, or a URL or key cannot be used, -ENOMEM; `err` says
 * why. */
int ka_llm_new(struct ka_loop *loop, const struct ka_llm_config *config, struct ka_llm **llm,
               struct ka_err *err);

/* Start one completion; `req` is copied into the request, `on_trace` may be NULL. -EAGAIN at the concurrency
 * limit, -ECANCELED after ka_llm_close(), -EINVAL when the request cannot be written, -ENOMEM. */
int ka_llm_start(struct ka_llm *llm, const struct ka_chat_request *req, ka_llm_trace_fn on_trace,
                 ka_llm_done_fn done, void *arg, uint64_t *op, struct ka_err *err);

/* `done` runs soon with KA_LLM_CANCELLED, also if an answer had just come. -ENOENT when the op is unknown or
 * over. */
int ka_llm_cancel(struct ka_llm *llm, uint64_t op);

/* Cancel all ops, then release everything. `closed` (may be NULL) runs from the loop when `llm` is gone and
 * none of its handles is left on the loop. */
void ka_llm_close(struct ka_llm *llm, void (*closed)(void *arg), void *arg);

#endif
