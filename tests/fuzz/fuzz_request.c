/* Any bytes as a query's argument, as Last-Event-ID, as the token's header and as the client's name: what is
 * read is within its bounds, and what is refused leaves everything as it was. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "agent/core/request.h"
#include "base/utf8.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void must(bool holds)
{
    if (!holds)
        abort();
}

static void check_text(const char *bytes)
{
    KA_AUTO_FREE char *text = ka_request_text(bytes);
    size_t len = text ? strlen(text) : 0, step = 0;
    must(len <= strlen(bytes));
    for (size_t at = 0; at < len; at += step)
        must((step = ka_utf8_sequence(text + at, len - at)) > 0);
}

static void check_numbers(const char *bytes)
{
    size_t count = 7;
    double number = 7;
    uint64_t a = 7, b = 7;
    must(ka_request_count(bytes, 1, 1000, &count) ? count >= 1 && count <= 1000 : count == 7);
    must(ka_request_number(bytes, -1, 1, &number) ? fabs(number) <= 1 : number == 7);
    bool pair = ka_request_event(bytes, ':', &a, &b);
    must(pair ? strchr(bytes, ':') != NULL : a == 7 && b == 7);
    must(!ka_request_event(bytes, '\0', &a, NULL) || !pair);
}

static void check_headers(const char *bytes)
{
    static const char token[] = "0123456789abcdef";
    size_t len;
    must(ka_request_shows(bytes, token) == (strcmp(bytes, "Bearer 0123456789abcdef") == 0));
    must(!ka_request_same_origin(bytes, "here:80") || strstr(bytes, "://"));
    const char *client = ka_request_client(bytes, &len);
    must(client >= bytes && client + len <= bytes + strlen(bytes) && !memchr(client, ',', len));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    KA_AUTO_FREE char *bytes = ka_strndup((const char *)data, size);
    check_text(bytes);
    check_numbers(bytes);
    check_headers(bytes);
    return 0;
}
