/* Any text, the first bytes of which may also be the secret: what comes out holds no secret, and is right to
 * redact again. */
#include <stdlib.h>
#include <string.h>

#include "agent/core/redact.h"

#define SECRET_LEN 8

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static bool is_plain(const char *text)
{
    for (; *text; text++) {
        bool letter = (*text >= 'a' && *text <= 'z') || (*text >= '0' && *text <= '9');
        if (!letter)
            return false;
    }
    return true;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < SECRET_LEN)
        return 0;
    char secret[SECRET_LEN + 1] = {0};
    memcpy(secret, data, SECRET_LEN);
    char *text = ka_strndup((const char *)data, size);
    const char *const secrets[] = {secret, NULL};
    struct ka_buf out = {0}, none = {0};
    if (ka_redact(text, secrets, &out) || ka_redact(text, NULL, &none))
        abort();
    /* The mark itself is made of letters: a secret may be a part of it, or stand across its ends. */
    if (is_plain(secret) && strlen(secret) == SECRET_LEN && !strstr(KA_REDACTED, secret) &&
        strstr(ka_buf_str(&out), secret))
        abort();
    ka_buf_free(&out);
    ka_buf_free(&none);
    free(text);
    return 0;
}
