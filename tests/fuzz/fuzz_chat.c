/* Answers from any bytes: as a whole body, as an error body, as a list of models, and as a stream of lines.
 * What is accepted is complete. */
#include <stdlib.h>
#include <string.h>

#include "agent/core/chat.h"
#include "agent/core/models.h"
#include "base/utf8.h"

#define ANSWER_MAX 4096

static void check(struct ka_chat_answer *answer)
{
    size_t bytes = strlen(answer->text);
    for (size_t i = 0; i < answer->call_count; i++)
        bytes +=
            strlen(answer->calls[i].id) + strlen(answer->calls[i].name) + strlen(answer->calls[i].arguments);
    if (bytes > ANSWER_MAX)
        abort();
    ka_chat_answer_free(answer);
}

static void check_line(const char *line)
{
    for (const char *at = line; *at;) {
        size_t step = ka_utf8_sequence(at, strlen(at));
        if (step == 0 || (unsigned char)*at < 0x20)
            abort();
        at += step;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t len);

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t len)
{
    const char *text = (const char *)bytes;
    struct ka_chat_answer answer;
    struct ka_chat_error error;
    struct ka_err err;
    if (ka_chat_parse(text, len, ANSWER_MAX, &answer, &err) == 0)
        check(&answer);
    ka_chat_error_read(text, len, &error);
    check_line(error.message);
    check_line(error.code);
    json_t *models = ka_models_parse(text, len, &err);
    if (json_array_size(models) > KA_MODELS_MAX)
        abort();
    for (size_t i = 0; i < json_array_size(models); i++)
        check_line(json_string_value(json_array_get(models, i)));
    json_decref(models);

    struct ka_chat_stream *stream = ka_chat_stream_new(ANSWER_MAX);
    for (size_t at = 0; at < len;) {
        const char *end = memchr(text + at, '\n', len - at);
        size_t line = end ? (size_t)(end - text) - at : len - at;
        ka_chat_stream_add(stream, text + at, line, &err);
        at += line + 1;
    }
    if (ka_chat_stream_finish(stream, &answer, &err) == 0)
        check(&answer);
    ka_chat_stream_free(stream);
    return 0;
}
