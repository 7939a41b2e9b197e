/* Any bytes as file and patch (split at the first NUL): never a crash, and the protected lines survive. */
#include <stdlib.h>
#include <string.h>

#include "agent/core/patch.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* The first `n` lines with plain newlines, as they must come out again. */
static char *head_of(const char *text, size_t n)
{
    char *head = ka_calloc(strlen(text) + 2, 1), *to = head;
    for (const char *at = text; *at && n; n--) {
        size_t len = strcspn(at, "\n");
        size_t kept = len;
        while (kept && at[kept - 1] == '\r')
            kept--;
        memcpy(to, at, kept);
        to += kept;
        *to++ = '\n';
        at += len + (at[len] == '\n');
    }
    return head;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (!size)
        return 0;
    char *text = ka_strndup((const char *)data + 1, size - 1);
    size_t used = strlen(text) + 2;
    char *patch = used < size ? ka_strndup((const char *)data + used, size - used) : ka_strdup(text);
    struct ka_buf out = {0};
    struct ka_err err;
    size_t guarded = data[0] % 8;
    if (ka_patch_apply(text, patch, guarded, &out, &err) == 0) {
        char *head = head_of(text, guarded);
        if (!ka_starts_with(ka_buf_str(&out), head))
            abort();
        free(head);
    }
    ka_patch_is_in(patch);
    ka_buf_free(&out);
    free(text);
    free(patch);
    return 0;
}
