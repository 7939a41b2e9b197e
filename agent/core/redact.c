/* Redaction in one pass from left to right. Must not know where the text goes. */
#include "redact.h"

#include <ctype.h>
#include <string.h>
#include <strings.h>

static bool is_token_char(char c)
{
    return isalnum((unsigned char)c) || (c && strchr("-_.~+/=", c));
}

static bool starts_here(const char *at, const char *end, const char *word)
{
    size_t len = strlen(word);
    return (size_t)(end - at) >= len && strncasecmp(at, word, len) == 0;
}

static size_t token_length(const char *at, const char *end)
{
    size_t n = 0;
    while (at + n < end && is_token_char(at[n]))
        n++;
    return n;
}

/* Length of the secret that starts here, 0 for none. The JSON spelling differs only in a backslash before
 * '/', '"' and '\\'. */
static size_t secret_length(const char *at, const char *end, const char *secret)
{
    const char *from = at;
    if (strlen(secret) < KA_REDACT_MIN_SECRET)
        return 0;
    for (; *secret; secret++, at++) {
        if (at + 1 < end && *at == '\\' && at[1] == *secret && strchr("/\"\\", *secret))
            at++;
        if (at >= end || *at != *secret)
            return 0;
    }
    return (size_t)(at - from);
}

/* "sk-" and at least eight more characters of a key. */
static size_t key_length(const char *at, const char *end)
{
    if (!starts_here(at, end, "sk-"))
        return 0;
    size_t len = token_length(at, end);
    return len >= 11 ? len : 0;
}

/* How much of the text here introduces a secret that follows it ("Bearer ", `api_key="`); 0 for nothing. */
static size_t lead_length(const char *at, const char *end)
{
    static const char *const names[] = {"api_key", "api-key", "apikey"};
    const char *from = at;
    if (starts_here(at, end, "bearer")) {
        for (at += strlen("bearer"); at < end && (*at == ' ' || *at == '\t'); at++)
            ;
        return at > from + strlen("bearer") ? (size_t)(at - from) : 0;
    }
    for (size_t i = 0; i < KA_COUNT(names); i++) {
        if (!starts_here(at, end, names[i]))
            continue;
        for (at += strlen(names[i]); at < end && strchr("\\\"' \t", *at) && *at; at++)
            ;
        if (at >= end || (*at != '=' && *at != ':'))
            return 0;
        for (at++; at < end && strchr("\\\"' \t", *at) && *at; at++)
            ;
        return (size_t)(at - from);
    }
    return 0;
}

/* The longest thing to remove at `at`; `*kept` bytes in front of it stay. */
static size_t find_here(const char *text, const char *at, const char *end, const char *const *secrets,
                        size_t *kept)
{
    size_t longest = 0;
    *kept = 0;
    for (size_t i = 0; secrets && secrets[i]; i++) {
        size_t len = secret_length(at, end, secrets[i]);
        longest = len > longest ? len : longest;
    }
    bool inside_word = at > text && (isalnum((unsigned char)at[-1]) || at[-1] == '_');
    if (longest || (inside_word && !starts_here(at, end, "api")))
        return longest;
    longest = key_length(at, end);
    if (longest)
        return longest;
    *kept = lead_length(at, end);
    if (!*kept)
        return 0;
    /* the secret itself may come in a spelling that is longer than a token */
    for (size_t i = 0; secrets && secrets[i]; i++) {
        size_t len = secret_length(at + *kept, end, secrets[i]);
        longest = len > longest ? len : longest;
    }
    size_t token = token_length(at + *kept, end);
    return token > longest ? token : longest;
}

/* The bytes that find_here() may find something at: nearly all others are passed over by one look into this
 * table. */
static void mark_beginnings(const char *const *secrets, bool may_begin[static 256])
{
    for (const char *c = "sSbBaA"; *c; c++) /* "sk-", "bearer", "api" */
        may_begin[(unsigned char)*c] = true;
    for (size_t i = 0; secrets && secrets[i]; i++) {
        may_begin[(unsigned char)secrets[i][0]] = true;
        if (secrets[i][0] && strchr("/\"\\", secrets[i][0]))
            may_begin['\\'] = true;
    }
}

int ka_redact(const char *text, const char *const *secrets, struct ka_buf *out)
{
    KA_AUTO_BUF struct ka_buf clean = {0};
    bool may_begin[256] = {false};
    const char *end = text + strlen(text), *from = text;
    mark_beginnings(secrets, may_begin);
    for (const char *at = text; at < end;) {
        size_t kept, removed = 0;
        if (may_begin[(unsigned char)*at])
            removed = find_here(text, at, end, secrets, &kept);
        if (!removed) {
            at++;
            continue;
        }
        ka_buf_add(&clean, from, (size_t)(at - from) + kept);
        ka_buf_puts(&clean, KA_REDACTED);
        at += kept + removed;
        from = at;
    }
    int rc = ka_buf_add(&clean, from, (size_t)(end - from));
    return rc ? rc : ka_buf_add(out, ka_buf_str(&clean), clean.len);
}
