/* Any bytes as a client's request for a run: what is taken is within its bounds, what is refused has a
 * message. */
#include <stdlib.h>
#include <string.h>

#include "agent/core/submission.h"
#include "base/each.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct ka_err err = {{0}};
    struct ka_submission read;
    if (ka_submission_parse((const char *)data, size, &read, &err)) {
        if (!err.msg[0])
            abort();
        return 0;
    }
    if (strchr(read.name, '/') || read.name[0] == '.' || !ka_ends_with(read.name, ".py") || !read.source[0] ||
        abs(read.priority) > KA_SUBMISSION_PRIORITY)
        abort();
    KA_EACH_MEMBER(read.options, name, value)
        if (strchr(name, '_') || !json_is_string(value))
            abort();
    ka_submission_free(&read);
    return 0;
}
