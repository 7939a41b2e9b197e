#include "url.h"

#include <stdlib.h>
#include <string.h>

bool ka_url_has_space(const char *text)
{
    for (; *text; text++)
        if ((unsigned char)*text <= 0x20 || *text == 0x7F)
            return true;
    return false;
}

char *ka_url_base(const char *url)
{
    const char *host = strstr(url, "://");
    if ((!ka_starts_with(url, "http://") && !ka_starts_with(url, "https://")) || !host ||
        strlen(host + 3) == 0 || ka_url_has_space(url))
        return NULL;
    char *base = ka_strdup(url);
    for (size_t len = strlen(base); len && base[len - 1] == '/'; len--)
        base[len - 1] = '\0';
    if (ka_ends_with(base, KA_URL_CHAT))
        base[strlen(base) - strlen(KA_URL_CHAT)] = '\0';
    return base;
}

char *ka_url_shown(const char *url)
{
    const char *host = strstr(url, "://");
    host = host ? host + 3 : url;
    const char *at = memrchr(host, '@', strcspn(host, "/?#")), *rest = at ? at + 1 : host;
    return ka_format("%.*s%.*s", (int)(host - url), url, (int)strcspn(rest, "?#"), rest);
}
