/* For tests of the LLM client: a scripted endpoint in a process of its own, and a client that notes what it
 * is told. */
#ifndef KA_TESTS_LLM_ENDPOINT_H
#define KA_TESTS_LLM_ENDPOINT_H

#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cmocka.h>
#include <curl/curl.h>

#include "agent/io/llm.h"
#include "agent/io/loop.h"
#include "agent/io/loop_uv.h"
#include "base/files.h"

#define KEY "sk-test-0123456789abcdef"
#define MODEL "test-model"

struct server {
    pid_t pid;
    int port;
    char folder[64];
    char base_url[64];
    char *log;
};

/* One for all tests; each loads its own script. */
static struct server server;

/* What a test has seen of one op. */
struct seen {
    struct ka_loop *loop;
    struct ka_llm *llm;
    struct ka_llm_config config;
    struct ka_buf trace; /* `event: text` lines */
    unsigned done, want; /* ops delivered; the client closes itself after `want` of them */
    bool closed;
    uint64_t op;
    enum ka_llm_status status;
    char message[1024];
    long http_status, tokens_in, tokens_out;
    unsigned attempts;
    double seconds;
    struct ka_chat_answer answer;
};

/* ---- the server ---- */

static inline void load_script(const char *script)
{
    char url[96];
    long status = 0;
    snprintf(url, sizeof(url), "http://127.0.0.1:%d/script", server.port);
    CURL *curl = curl_easy_init();
    FILE *nowhere = fopen("/dev/null", "w");
    curl_easy_setopt(curl, CURLOPT_URL, url);
    curl_easy_setopt(curl, CURLOPT_CUSTOMREQUEST, "PUT");
    curl_easy_setopt(curl, CURLOPT_POSTFIELDS, script);
    curl_easy_setopt(curl, CURLOPT_WRITEDATA, nowhere);
    assert_int_equal(curl_easy_perform(curl), CURLE_OK);
    curl_easy_getinfo(curl, CURLINFO_RESPONSE_CODE, &status);
    assert_int_equal(status, 200);
    curl_easy_cleanup(curl);
    fclose(nowhere);
    unlink(server.log);
}

static inline void run_server(const struct server *new, int out, const char *script, const char *tls)
{
    dup2(out, STDOUT_FILENO);
    execlp("python3", "python3", "tests/llm/server.py", "--script", script, "--log", new->log, "--key", KEY,
           "--seconds", "300", tls ? "--tls" : (char *)NULL, tls, (char *)NULL);
    _exit(127);
}

/* With `tls`, a file with key and certificate, it speaks https. Its script is one text at first. */
static inline int start_server(struct server *new, const char *tls)
{
    static const char text[] = "{\"text\": \"ok\"}\n";
    int ends[2];
    char first[16] = "";
    snprintf(new->folder, sizeof(new->folder), "/tmp/ka-llm-XXXXXX");
    if (!mkdtemp(new->folder) || pipe(ends) != 0)
        return -1;
    char *script = ka_path_join(new->folder, "script");
    new->log = ka_path_join(new->folder, "log");
    ka_file_write(script, text, strlen(text), NULL);
    new->pid = fork();
    if (new->pid == 0)
        run_server(new, ends[1], script, tls);
    close(ends[1]);
    ssize_t got = read(ends[0], first, sizeof(first) - 1);
    close(ends[0]);
    free(script);
    new->port = atoi(first);
    snprintf(new->base_url, sizeof(new->base_url), "http%s://127.0.0.1:%d/v1", tls ? "s" : "", new->port);
    return got > 0 && new->port > 0 ? 0 : -1;
}

static inline int stop_server(struct server *old)
{
    kill(old->pid, SIGTERM);
    waitpid(old->pid, NULL, 0);
    free(old->log);
    return ka_rmtree(old->folder, NULL);
}

static inline int set_up(void **state)
{
    (void)state;
    static const char *const names[] = {"http_proxy", "https_proxy",    "HTTPS_PROXY",  "all_proxy",
                                        "ALL_PROXY",  "CURL_CA_BUNDLE", "SSL_CERT_FILE"};
    for (size_t i = 0; i < KA_COUNT(names); i++)
        unsetenv(names[i]);
    return start_server(&server, NULL);
}

static inline int tear_down(void **state)
{
    (void)state;
    return stop_server(&server);
}

/* ---- one client ---- */

static inline void on_trace(void *arg, const char *event, const char *text)
{
    struct seen *seen = arg;
    ka_buf_printf(&seen->trace, "%s: %s\n", event, text);
}

static inline void on_closed(void *arg)
{
    struct seen *seen = arg;
    seen->closed = true;
}

static inline void on_done(void *arg, uint64_t op, const struct ka_llm_result *result)
{
    struct seen *seen = arg;
    assert_int_equal(op != 0, 1);
    assert_int_equal(result->status == KA_LLM_OK, result->message[0] == '\0');
    seen->status = result->status;
    seen->http_status = result->http_status;
    seen->attempts = result->attempts;
    seen->seconds = result->seconds;
    seen->tokens_in = result->tokens_in;
    seen->tokens_out = result->tokens_out;
    snprintf(seen->message, sizeof(seen->message), "%s", result->message);
    if (result->answer) {
        ka_chat_answer_free(&seen->answer); /* of an op before this one */
        seen->answer = *result->answer;
        *result->answer = (struct ka_chat_answer){0};
    }
    if (++seen->done == seen->want)
        ka_llm_close(seen->llm, on_closed, seen);
}

/* Fast waits, so that tests are; each test changes what it is about. */
static inline struct seen *seen_new(void)
{
    struct seen *seen = ka_calloc(1, sizeof(*seen));
    seen->loop = ka_loop_new();
    ka_llm_config_init(&seen->config);
    seen->config.endpoint_count = 1;
    seen->config.endpoints[0].base_url = server.base_url;
    seen->config.endpoints[0].api_key = KEY;
    seen->config.connect_ms = 2000;
    seen->config.idle_ms = 5000;
    seen->config.total_ms = 20000;
    seen->config.max_retries = 2;
    seen->config.max_bad_answers = 1;
    seen->config.backoff_ms = 2;
    seen->config.backoff_max_ms = 20;
    seen->config.jitter_seed = 1;
    seen->want = 1;
    return seen;
}

static inline int start(struct seen *seen)
{
    struct ka_err err;
    const struct ka_chat_message message = {.role = "user", .content = "please"};
    const struct ka_chat_request req = {
        .model = MODEL, .messages = &message, .message_count = 1, .stream = true};
    if (!seen->llm)
        assert_int_equal(ka_llm_new(seen->loop, &seen->config, &seen->llm, &err), 0);
    return ka_llm_start(seen->llm, &req, on_trace, on_done, seen, &seen->op, &err);
}

/* Run the loop to its end: every op is delivered and nothing is left open. */
static inline void finish(struct seen *seen)
{
    ka_loop_run(seen->loop);
    assert_true(seen->closed);
    assert_int_equal(seen->done, seen->want);
    assert_int_equal(ka_loop_close(seen->loop), 0);
    assert_null(strstr(seen->message, KEY));
    assert_null(strstr(ka_buf_str(&seen->trace), KEY));
}

static inline struct seen *ask(struct seen *seen, const char *script)
{
    load_script(script);
    assert_int_equal(start(seen), 0);
    assert_int_equal(seen->done, 0);
    finish(seen);
    return seen;
}

static inline struct seen *ask_at(const char *base_url)
{
    struct seen *seen = seen_new();
    seen->config.endpoints[0].base_url = base_url;
    assert_int_equal(start(seen), 0);
    finish(seen);
    return seen;
}

static inline void seen_free(struct seen *seen)
{
    ka_chat_answer_free(&seen->answer);
    ka_buf_free(&seen->trace);
    free(seen);
}

static inline void expect_failure(const struct seen *seen, enum ka_llm_status status, unsigned attempts,
                                  const char *text)
{
    assert_int_equal(seen->status, status);
    assert_int_equal(seen->attempts, attempts);
    if (!strstr(seen->message, text))
        fail_msg("no `%s` in: %s", text, seen->message);
    assert_non_null(strstr(seen->message, MODEL));
    assert_non_null(strstr(ka_buf_str(&seen->trace), "failed: "));
}

static inline void expect_text(const struct seen *seen, unsigned attempts, const char *text)
{
    assert_string_equal(seen->message, "");
    assert_int_equal(seen->status, KA_LLM_OK);
    assert_int_equal(seen->attempts, attempts);
    assert_string_equal(seen->answer.text, text);
}

#endif
