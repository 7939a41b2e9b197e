/* Any bytes as a template: rendered, or refused with a message; a value is never looked at again. */
#include <stdlib.h>
#include <string.h>

#include "agent/core/prompt.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char *text = ka_strndup((const char *)data, size);
    const struct ka_prompt_template template = {"fuzz.md", text};
    const struct ka_prompt_var vars[] = {{"a", "{{nope}}"}, {"b", ""}, {"c", "value\n"}};
    struct ka_buf out = {0};
    struct ka_err err = {{0}};
    if (ka_prompt_render(&template, vars, KA_COUNT(vars), &out, &err) != 0 && !err.msg[0])
        abort();
    ka_buf_free(&out);
    free(text);
    return 0;
}
