/* Each is read to its end; what is left over makes it wrong. */
#include "request.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#include "base/hash.h"
#include "base/utf8.h"

#define ID_MAX 36 /* two numbers of 64 bits fit with room to spare */
#define NUMBER_MAX 20

static int digit_of(char c)
{
    static const char digits[] = "0123456789abcdef";
    const char *at = c ? strchr(digits, tolower((unsigned char)c)) : NULL;
    return at ? (int)(at - digits) : -1;
}

static bool is_text(const char *text)
{
    size_t len = strlen(text), step;
    for (size_t at = 0; at < len; at += step)
        if (!(step = ka_utf8_sequence(text + at, len - at)))
            return false;
    return true;
}

char *ka_request_text(const char *escaped)
{
    char *text = ka_calloc(1, strlen(escaped) + 1), *to = text;
    for (const char *at = escaped; *at; at++) {
        int high = *at == '%' ? digit_of(at[1]) : 0, low = *at == '%' && high >= 0 ? digit_of(at[2]) : 0;
        if (high < 0 || low < 0 || (*at == '%' && high + low == 0)) {
            free(text);
            return NULL;
        }
        *to++ = *at == '+' ? ' ' : *at == '%' ? (char)(high * 16 + low) : *at;
        at += *at == '%' ? 2 : 0;
    }
    if (is_text(text))
        return text;
    free(text);
    return NULL;
}

bool ka_request_count(const char *text, size_t least, size_t most, size_t *out)
{
    size_t digits = strspn(text, "0123456789");
    if (!digits || text[digits] || digits > NUMBER_MAX)
        return false;
    unsigned long long count = strtoull(text, NULL, 10);
    if (count < least || count > most)
        return false;
    *out = (size_t)count;
    return true;
}

bool ka_request_number(const char *text, double least, double most, double *out)
{
    const char *at = text + (*text == '-');
    size_t whole = strspn(at, "0123456789"),
           part = at[whole] == '.' ? strspn(at + whole + 1, "0123456789") : 0;
    size_t len = whole + (at[whole] == '.') + part;
    if (!whole || at[len] || len > NUMBER_MAX)
        return false;
    double number = strtod(text, NULL);
    if (!(number >= least && number <= most))
        return false;
    *out = number;
    return true;
}

bool ka_request_event(const char *text, char stop, uint64_t *a, uint64_t *b)
{
    char *end;
    if (!text || *text < '0' || *text > '9' || strlen(text) > ID_MAX)
        return false;
    uint64_t first = strtoull(text, &end, 10);
    if (stop ? *end != stop || !ka_request_event(end + 1, '\0', b, NULL) : *end != '\0')
        return false;
    *a = first;
    return true;
}

bool ka_request_shows(const char *authorization, const char *token)
{
    static const char scheme[] = "Bearer ";
    return authorization && ka_starts_with(authorization, scheme) &&
           ka_same_secret(authorization + strlen(scheme), token);
}

bool ka_request_same_origin(const char *origin, const char *host)
{
    const char *name = origin ? strstr(origin, "://") : NULL;
    return !origin || (name && host && strcasecmp(name + strlen("://"), host) == 0);
}

bool ka_request_host_is_local(const char *host)
{
    static const char *const names[] = {"localhost", "127.0.0.1", "[::1]"};
    for (size_t i = 0; host && i < KA_COUNT(names); i++) {
        size_t len = strlen(names[i]);
        if (strncasecmp(host, names[i], len) == 0 &&
            (!host[len] ||
             (host[len] == ':' && strspn(host + len + 1, "0123456789") == strlen(host + len + 1))))
            return true;
    }
    return !host;
}

const char *ka_request_client(const char *forwarded, size_t *len)
{
    const char *comma = forwarded ? strrchr(forwarded, ',') : NULL, *at = comma ? comma + 1 : forwarded;
    at = at ? at + strspn(at, " \t") : "";
    *len = strcspn(at, " \t");
    return at;
}
