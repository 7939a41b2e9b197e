/* GET {base}/models, one endpoint after the other. Knows nothing of chat completions. */
#include "doctor_endpoints.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/core/fields.h"
#include "agent/core/models.h"
#include "agent/core/redact.h"
#include "agent/io/http.h"
#include "agent/io/loop.h"
#include "agent/io/url.h"
#include "base/each.h"

#define CONNECT_MS 5000
#define TOTAL_MS 10000
#define BODY_MAX ((size_t)4 << 20)
#define NAMES_SHOWN 12

struct asking {
    struct ka_http *http;
    struct ka_buf body;
    long status;
    struct ka_err failure;
};

static int on_body(void *arg, struct ka_transfer *transfer, const char *bytes, size_t len)
{
    struct asking *asking = arg;
    (void)transfer;
    return ka_buf_add(&asking->body, bytes, len);
}

static void on_end(void *arg, const struct ka_http_end *ended)
{
    struct asking *asking = arg;
    asking->status = ended->status;
    if (ended->failure)
        ka_fail(&asking->failure, 0, "%s",
                asking->body.len >= BODY_MAX ? "the list is larger than 4 MiB" : ended->failure);
    ka_http_close(asking->http, NULL, NULL);
}

/* Runs a loop of its own until the answer is there. */
static void get(const char *url, const char *key, struct asking *asking)
{
    struct ka_loop *loop = ka_loop_new();
    struct ka_transfer *transfer;
    const struct ka_http_req req = {
        .url = url, .bearer = key, .connect_ms = CONNECT_MS, .total_ms = TOTAL_MS};
    asking->http = ka_http_new(loop, &asking->failure);
    if (asking->http &&
        ka_http_start(asking->http, &req, on_body, on_end, asking, &transfer, &asking->failure))
        ka_http_close(asking->http, NULL, NULL);
    ka_loop_run(loop);
    ka_loop_close(loop);
}

static json_t *list_of(const struct asking *asking, struct ka_err *why)
{
    struct ka_chat_error said;
    if (asking->failure.msg[0]) {
        *why = asking->failure;
        return NULL;
    }
    if (asking->status == 200)
        return ka_models_parse(ka_buf_str(&asking->body), asking->body.len, why);
    ka_chat_error_read(ka_buf_str(&asking->body), asking->body.len, &said);
    ka_fail(why, 0, "HTTP %ld%s%s", asking->status, said.message[0] ? ": " : "", said.message);
    return NULL;
}

static bool holds(const json_t *names, const char *wanted)
{
    KA_EACH(names, i, name) {
        if (strcmp(json_string_value(name), wanted) == 0)
            return true;
    }
    return false;
}

static json_t *examine(const struct ka_llm_endpoint *endpoint, const char *model)
{
    struct asking asking = {.body = {.max = BODY_MAX}};
    struct ka_err why = {0};
    KA_AUTO_FREE char *base = ka_url_base(endpoint->base_url);
    KA_AUTO_FREE char *shown = ka_url_shown(endpoint->base_url);
    KA_AUTO_FREE char *url = base ? ka_format("%s%s", base, KA_URL_MODELS) : NULL;
    json_t *names = NULL;
    if (url) {
        get(url, endpoint->api_key, &asking);
        names = list_of(&asking, &why);
    } else {
        ka_fail(&why, 0, "a base URL must look like https://host/v1 or http://host:port/v1");
    }
    const char *secrets[] = {endpoint->api_key, NULL};
    KA_AUTO_BUF struct ka_buf told = {0};
    ka_redact(why.msg, secrets, &told);
    json_t *has = names ? json_boolean(holds(names, model)) : json_null();
    json_t *made = json_pack("{s:s, s:b, s:o?, s:o, s:s?}", "url", shown, "key", endpoint->api_key != NULL,
                             "models", names, "has_model", has, "why", told.len ? ka_buf_str(&told) : NULL);
    ka_buf_free(&asking.body);
    return made;
}

json_t *ka_doctor_endpoints(const struct ka_endpoints *endpoints, const char *model)
{
    json_t *list = json_array();
    for (size_t i = 0; i < endpoints->count; i++)
        json_array_append_new(list, examine(&endpoints->list[i], model));
    return list;
}

static void print_names(const json_t *names)
{
    printf("  models    %zu%s", json_array_size(names), json_array_size(names) ? ": " : "");
    KA_EACH(names, i, name) {
        if (i < NAMES_SHOWN)
            printf("%s%s", i ? ", " : "", json_string_value(name));
    }
    puts(json_array_size(names) > NAMES_SHOWN ? ", ... (--json lists all)" : "");
}

void ka_doctor_print_endpoints(const json_t *endpoints, const char *model)
{
    KA_EACH(endpoints, i, endpoint) {
        const json_t *names = json_object_get(endpoint, "models");
        printf("endpoint   %s (%s)\n", ka_text_of(endpoint, "url", ""),
               json_is_true(json_object_get(endpoint, "key")) ? "with a key" : "no key");
        if (!json_is_array(names)) {
            printf("  models    unknown: %s\n", ka_text_of(endpoint, "why", ""));
            continue;
        }
        print_names(names);
        printf("  --model   %s: %s\n", model,
               json_is_true(json_object_get(endpoint, "has_model")) ? "listed" : "not listed");
    }
}
