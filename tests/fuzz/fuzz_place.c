/* Any pair with any error of its process: told without a fault, and cut; a short difference of the two. */
#include <stdlib.h>
#include <string.h>

#include "agent/core/place.h"
#include "agent/core/short_diff.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char *pair = ka_strndup((const char *)data, size); /* up to a NUL byte, behind which the error begins */
    size_t at = strlen(pair) + (strlen(pair) < size);
    char *text = ka_strndup((const char *)data + at, size - at);
    const struct ka_place place = {.pair = pair, .forward = text, .whole = size & 1};
    json_t *error =
        json_pack("{s:I, s:s?, s:s?}", "line", (json_int_t)size, "message", text, "traceback", text);
    struct ka_buf out = {0}, numbered = {0};
    if (error) { /* valid UTF-8 */
        ka_place_error(&place, error, &out);
        ka_place_hidden_error(&place, error, &out);
    }
    ka_place_retell(&place, text, &out);
    if (out.len > 400000)
        abort();
    ka_place_number(pair, &numbered);
    ka_short_diff(pair, text, 9, &numbered);
    ka_buf_free(&out);
    ka_buf_free(&numbered);
    json_decref(error);
    free(pair);
    free(text);
    return 0;
}
