/* Chat completions as data: what is asked of a model and what it answered, independent of how it travels.
 *
 * Words: a *message* has a role and content; a *tool* is a function that the model may call with JSON
 * arguments; an *answer* is what came back, assembled from a stream, from one JSON body, or from a mailbox
 * file. Pure: no sockets, no clock. Ownership: every struct owns its strings; free with the matching _free.
 */
#ifndef KA_CHAT_H
#define KA_CHAT_H

#include "base/base.h"

struct ka_chat_message {
    char *role;         /* "system", "user", "assistant", "tool" */
    char *content;      /* text, may be empty, never NULL */
    char *tool_call_id; /* role "tool": the call it answers; else NULL */
    char *tool_calls;   /* role "assistant": the calls as a JSON array text; else NULL */
};

struct ka_chat_tool {
    const char *name;
    const char *description;
    const char *parameters; /* JSON schema text */
};

struct ka_chat_call {
    char *id;
    char *name;
    char *arguments; /* JSON text exactly as the model wrote it; may be invalid */
};

struct ka_chat_answer {
    char *text;          /* concatenated content, never NULL after a completed answer */
    char *refusal;       /* the model's refusal text, or NULL */
    char *finish_reason; /* "stop", "length", "tool_calls", "content_filter", ... or NULL when the stream was
                            cut */
    char *model;         /* as reported, or NULL */
    struct ka_chat_call *calls;
    size_t call_count;
    long tokens_in, tokens_out; /* -1 when the endpoint reported no usage */
    long tokens_cached;         /* of tokens_in, those that the endpoint had in its cache; -1: not told */
    size_t reasoning_bytes;     /* that came beside the text, and were not kept */
};

/* What is asked for. Borrows everything; NULL and 0 mean that the endpoint's own default holds. */
struct ka_chat_request {
    const char *model;
    const struct ka_chat_message *messages;
    size_t message_count;
    const struct ka_chat_tool *tools;
    size_t tool_count;
    const char *reasoning_effort; /* "low", "medium", "high", ...: passed on as it is */
    long max_tokens;              /* cap on the answer */
    const double *temperature;
    bool stream; /* ask for server-sent events with the token counts at the end */
};

void ka_chat_message_free(struct ka_chat_message *message); /* the content, not the struct itself */
void ka_chat_answer_free(struct ka_chat_answer *answer);    /* likewise; leaves it zeroed */

/* Neither text (white space counts as none), nor calls, nor a refusal. */
bool ka_chat_answer_empty(const struct ka_chat_answer *answer);

/* The body of POST {base}/chat/completions; free() it. Bytes that are not UTF-8 travel as U+FFFD, since
 * sources and captured output may hold any. A request with a reasoning effort names its cap
 * `max_completion_tokens`, as reasoning models want it, others `max_tokens`, as every endpoint knows it. NULL
 * with `err` set when no model is named, the tools' or the calls' JSON is invalid, or memory is gone. */
char *ka_chat_request_json(const struct ka_chat_request *req, struct ka_err *err);

/* An optional part of the request that the endpoint complained of: the same body in the spelling that it
 * wants (no `stream_options`, `temperature`, `reasoning_effort`, tools or streaming, the other name of the
 * token cap). free() it; NULL when nothing can be changed. */
char *ka_chat_request_adapt(const char *body, const char *complaint);

/* An answer from one JSON body. -EFBIG past `max` bytes of content; -EBADMSG when it is not JSON or holds no
 * choices; -EREMOTEIO when it reports an error, whose message is then `err`. */
int ka_chat_parse(const char *body, size_t len, size_t max, struct ka_chat_answer *answer,
                  struct ka_err *err);

/* An answer from the chunks of a stream. Reasoning text is not kept. */
struct ka_chat_stream;
struct ka_chat_stream *ka_chat_stream_new(size_t max); /* `max` caps the bytes of the answer */
void ka_chat_stream_free(struct ka_chat_stream *stream);

/* The data of one event. Errors as of ka_chat_parse(), and -EBADMSG for text that repeats itself without end;
 * they stay: every later call returns the same. */
int ka_chat_stream_add(struct ka_chat_stream *stream, const char *data, size_t len, struct ka_err *err);

bool ka_chat_stream_done(const struct ka_chat_stream *stream); /* saw [DONE]: nothing follows */

/* Take the answer out. -EPIPE when the stream was cut: neither a finish reason nor [DONE] has come. */
int ka_chat_stream_finish(struct ka_chat_stream *stream, struct ka_chat_answer *answer, struct ka_err *err);

/* What the body of a failed request says: one line of UTF-8 without control characters, empty when it says
 * nothing that can be shown, and the error's code or type, such as "insufficient_quota", or empty. */
struct ka_chat_error {
    char message[512];
    char code[64];
};
void ka_chat_error_read(const char *body, size_t len, struct ka_chat_error *error);

#endif
