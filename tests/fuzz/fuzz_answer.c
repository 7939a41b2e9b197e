/* Any bytes as an answer's text, as arguments of both tools, and as a pair to compose and split. */
#include <stdlib.h>
#include <string.h>

#include "agent/core/answer.h"
#include "agent/core/compose.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void take(const struct ka_chat_answer *answer)
{
    static const char forward[] = "import torch\n# ---- backward ----\n";
    static const char backward[] = "class F:\n    a = 1\n\n\ndef f_autograd(x):\n    return F.apply(x)\n";
    struct ka_buf out = {0};
    struct ka_err err;
    int rc = ka_answer_apply(answer, forward, backward, false, &out, &err);
    if ((rc == 0) != (out.len > 0))
        abort();
    ka_buf_free(&out);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (!size)
        return 0;
    char *text = ka_strndup((const char *)data + 1, size - 1);
    struct ka_chat_answer answer = {.text = text,
                                    .finish_reason = data[0] & 1 ? (char *)"length" : (char *)"stop"};
    take(&answer);
    struct ka_chat_call call = {(char *)"", data[0] & 2 ? (char *)"submit_file" : (char *)"submit_patch",
                                text};
    answer.text = (char *)"";
    answer.calls = &call;
    answer.call_count = 1;
    take(&answer);

    struct ka_buf pair = {0}, front = {0}, back = {0}, again = {0};
    if (ka_compose_pair(text, "y = 1\n", &pair, NULL) == 0) {
        if (ka_compose_split(ka_buf_str(&pair), &front, &back, NULL) ||
            ka_compose_pair(ka_buf_str(&front), ka_buf_str(&back), &again, NULL) ||
            strcmp(ka_buf_str(&pair), ka_buf_str(&again)) != 0)
            abort();
    }
    ka_buf_free(&pair);
    ka_buf_free(&front);
    ka_buf_free(&back);
    ka_buf_free(&again);
    free(text);
    return 0;
}
