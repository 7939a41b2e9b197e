/* URLs and keys. Knows no protocol: whether a URL is one is for the client to say. */
#include "endpoints.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "base/files.h"

#define KEY_MAX 4096
#define DEFAULT_BASE_URL "https://api.openai.com/v1"

/* The first line of a file; free() and wipe it. */
static int read_key(const char *path, char **key, struct ka_err *err)
{
    KA_AUTO_BUF struct ka_buf text = {0};
    int rc = ka_file_read(path, KEY_MAX, &text, err);
    size_t len = strcspn(ka_buf_str(&text), "\r\n");
    *key = rc || !len ? NULL : ka_strndup(ka_buf_str(&text), len);
    if (text.data)
        explicit_bzero(text.data, text.cap);
    if (rc)
        return rc;
    return len ? 0 : ka_fail(err, -EINVAL, "%s: holds no key on its first line", path);
}

/* The next of a comma-separated list, without white space around it; NULL at the end. free() it. */
static char *next_of(const char **list)
{
    static const char white[] = " \t";
    if (!*list)
        return NULL;
    const char *at = *list + strspn(*list, white);
    size_t len = strcspn(at, ",");
    *list = at[len] ? at + len + 1 : NULL;
    while (len && strchr(white, at[len - 1]))
        len--;
    return ka_strndup(at, len);
}

static int read_urls(const char *urls, struct ka_endpoints *out, struct ka_err *err)
{
    for (char *url; (url = next_of(&urls));) {
        if (out->count == KA_LLM_ENDPOINTS_MAX) {
            free(url);
            return ka_fail(err, -EINVAL, "--base-url: more than %d endpoints", KA_LLM_ENDPOINTS_MAX);
        }
        out->list[out->count++].base_url = url;
    }
    return 0;
}

static int read_keys(const char *files, struct ka_endpoints *out, struct ka_err *err)
{
    size_t urls = out->count, at = 0;
    int rc = 0;
    for (char *file; rc == 0 && (file = next_of(&files)); at++) {
        if (at >= urls && (urls > 1 || at == KA_LLM_ENDPOINTS_MAX))
            rc = ka_fail(err, -EINVAL, "--api-key-file: more than %zu keys for %zu endpoint%s", at, urls,
                         urls == 1 ? "" : "s");
        else if (at >= urls)
            out->list[out->count++].base_url = ka_strdup(out->list[0].base_url);
        if (rc == 0 && *file)
            rc = read_key(file, (char **)&out->list[at].api_key, err);
        free(file);
    }
    return rc;
}

int ka_endpoints_read(const char *urls, const char *key_files, struct ka_endpoints *out, struct ka_err *err)
{
    const char *key = getenv("OPENAI_API_KEY");
    *out = (struct ka_endpoints){.named = urls || key_files || (key && *key)};
    int rc = read_urls(urls ? urls : DEFAULT_BASE_URL, out, err);
    if (rc == 0 && key_files)
        rc = read_keys(key_files, out, err);
    else if (rc == 0 && key && *key)
        out->list[0].api_key = ka_strdup(key);
    unsetenv("OPENAI_API_KEY");
    if (rc)
        ka_endpoints_free(out);
    return rc;
}

void ka_endpoints_free(struct ka_endpoints *endpoints)
{
    for (size_t i = 0; i < endpoints->count; i++) {
        char *key = (char *)endpoints->list[i].api_key;
        if (key)
            explicit_bzero(key, strlen(key));
        free(key);
        free((char *)endpoints->list[i].base_url);
    }
    *endpoints = (struct ka_endpoints){0};
}
