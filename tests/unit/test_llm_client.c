/* The LLM client apart from single answers: proxies, certificates, configuration, cancelling, closing. */
#include "llm_endpoint.h"

static void llm__huge_json_body__is_cut(void **state)
{
    (void)state;
    const struct ka_chat_message message = {.role = "user", .content = "please"};
    const struct ka_chat_request req = {.model = MODEL, .messages = &message, .message_count = 1};
    struct seen *seen = seen_new();
    seen->config.max_answer_bytes = 100000;
    load_script("{\"fault\": \"huge\"}");
    assert_int_equal(ka_llm_new(seen->loop, &seen->config, &seen->llm, NULL), 0);
    assert_int_equal(ka_llm_start(seen->llm, &req, on_trace, on_done, seen, &seen->op, NULL), 0);
    finish(seen);
    expect_failure(seen, KA_LLM_BAD_ANSWER, 1, "larger than");
    seen_free(seen);
}

/* ---- proxies and certificates ---- */

static void llm__proxy_of_the_environment__is_used(void **state)
{
    (void)state;
    char proxy[64];
    snprintf(proxy, sizeof(proxy), "http://127.0.0.1:%d", server.port);
    setenv("http_proxy", proxy, 1);
    struct seen *seen = ask_at("http://endpoint.invalid/v1");
    unsetenv("http_proxy");
    /* The scripted endpoint, asked as a proxy, knows no such page. */
    expect_failure(seen, KA_LLM_REFUSED_BY_ENDPOINT, 1,
                   "no such page: http://endpoint.invalid/v1/chat/completions");
    seen_free(seen);
}

/* A key and a certificate signed by itself, in one file each and together. */
static bool make_certificate(const char *folder, char **certificate, char **both)
{
    *certificate = ka_path_join(folder, "tls.crt");
    *both = ka_path_join(folder, "tls.pem");
    char *key = ka_path_join(folder, "tls.key");
    pid_t pid = fork();
    if (pid == 0) {
        dup2(open("/dev/null", O_WRONLY), STDERR_FILENO);
        execlp("openssl", "openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj",
               "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out",
               *certificate, (char *)NULL);
        _exit(127);
    }
    int status = 0;
    struct ka_buf text = {0};
    waitpid(pid, &status, 0);
    bool made = WIFEXITED(status) && WEXITSTATUS(status) == 0 &&
                ka_file_read(key, 1 << 20, &text, NULL) == 0 &&
                ka_file_read(*certificate, 1 << 20, &text, NULL) == 0 &&
                ka_file_write(*both, text.data, text.len, NULL) == 0;
    ka_buf_free(&text);
    free(key);
    return made;
}

static void llm__certificate__must_be_signed_by_a_known_authority(void **state)
{
    (void)state;
    struct server tls = {0};
    char *certificate, *both;
    if (system("command -v openssl >/dev/null") != 0)
        skip();
    assert_true(make_certificate(server.folder, &certificate, &both));
    assert_int_equal(start_server(&tls, both), 0);

    struct seen *seen = ask_at(tls.base_url);
    expect_failure(seen, KA_LLM_UNREACHABLE, 1, "certificate");
    assert_int_equal(access(tls.log, F_OK), -1); /* nothing was sent */
    seen_free(seen);

    setenv("CURL_CA_BUNDLE", certificate, 1);
    seen = ask_at(tls.base_url);
    unsetenv("CURL_CA_BUNDLE");
    expect_text(seen, 1, "ok");
    seen_free(seen);

    assert_int_equal(stop_server(&tls), 0);
    free(certificate);
    free(both);
}

/* ---- configuration, cancelling and closing ---- */

static void llm__unusable_url_or_key__is_refused(void **state)
{
    (void)state;
    static const struct {
        const char *url, *key, *reason;
    } cases[] = {
        {NULL, NULL, "--base-url"},
        {"", NULL, "--base-url"},
        {"api.example/v1", NULL, "--base-url"},
        {"file:///etc/passwd", NULL, "--base-url"},
        {"http://", NULL, "--base-url"},
        {"http://host/v1\r\nX: y", NULL, "--base-url"},
        {"http://host/v1", "two words", "API key"},
        {"http://host/v1", "two\nlines", "API key"},
    };
    for (size_t i = 0; i < KA_COUNT(cases); i++) {
        struct ka_loop *loop = ka_loop_new();
        struct ka_llm_config config;
        struct ka_llm *llm = NULL;
        struct ka_err err = {0};
        ka_llm_config_init(&config);
        config.endpoint_count = 1;
        config.endpoints[0].base_url = cases[i].url;
        config.endpoints[0].api_key = cases[i].key;
        assert_int_equal(ka_llm_new(loop, &config, &llm, &err), -EINVAL);
        assert_null(llm);
        assert_non_null(strstr(err.msg, cases[i].reason));
        assert_int_equal(ka_loop_close(loop), 0);
    }
}

static void llm__concurrency_limit__refuses_the_next_op(void **state)
{
    (void)state;
    struct seen *seen = seen_new();
    seen->config.max_concurrent = 2;
    seen->want = 2;
    load_script("{\"text\": \"a\"}\n{\"text\": \"b\"}");
    assert_int_equal(start(seen), 0);
    assert_int_equal(start(seen), 0);
    uint64_t op = seen->op;
    assert_int_equal(start(seen), -EAGAIN);
    assert_int_equal(seen->op, op);
    finish(seen);
    seen_free(seen);
}

struct cancel_later {
    struct seen *seen;
    uv_timer_t timer;
};

static void on_cancel_time(uv_timer_t *timer)
{
    struct cancel_later *later = timer->data;
    assert_int_equal(ka_llm_cancel(later->seen->llm, later->seen->op), 0);
    assert_int_equal(later->seen->done, 0);
    uv_close((uv_handle_t *)timer, NULL);
}

static void llm__cancel__is_delivered_at_any_moment(void **state)
{
    (void)state;
    static const struct {
        const char *script;
        uint64_t after_ms;
    } cases[] = {
        {"{\"text\": \"ok\"}", 0},                                         /* before it is connected */
        {"{\"fault\": \"endless\"}", 150},                                 /* in a stream */
        {"{\"status\": 429, \"headers\": {\"Retry-After\": \"9\"}}", 150}, /* in a wait */
    };
    for (size_t i = 0; i < KA_COUNT(cases); i++) {
        struct seen *seen = seen_new();
        struct cancel_later later = {.seen = seen};
        seen->config.backoff_max_ms = 9000;
        load_script(cases[i].script);
        assert_int_equal(start(seen), 0);
        uv_timer_init(ka_loop_uv(seen->loop), &later.timer);
        later.timer.data = &later;
        uv_timer_start(&later.timer, on_cancel_time, cases[i].after_ms, 0);
        finish(seen);
        assert_int_equal(seen->status, KA_LLM_CANCELLED);
        assert_null(seen->answer.text);
        assert_non_null(strstr(ka_buf_str(&seen->trace), "cancelled: "));
        seen_free(seen);
    }
}

static void llm__cancel_of_an_unknown_op__says_so(void **state)
{
    (void)state;
    struct seen *seen = seen_new();
    load_script("{\"text\": \"ok\"}");
    assert_int_equal(start(seen), 0);
    assert_int_equal(ka_llm_cancel(seen->llm, seen->op + 1), -ENOENT);
    finish(seen);
    expect_text(seen, 1, "ok");
    seen_free(seen);
}

static void llm__close_with_ops_under_way__cancels_them(void **state)
{
    (void)state;
    struct seen *seen = seen_new();
    seen->want = 2;
    load_script("{\"text\": \"a\"}\n{\"text\": \"b\"}");
    assert_int_equal(start(seen), 0);
    assert_int_equal(start(seen), 0);
    ka_llm_close(seen->llm, on_closed, seen);
    assert_int_equal(seen->done, 0);
    assert_int_equal(start(seen), -ECANCELED);
    finish(seen);
    assert_int_equal(seen->status, KA_LLM_CANCELLED);
    seen_free(seen);
}

static void llm__close_without_ops__leaves_nothing_on_the_loop(void **state)
{
    (void)state;
    struct seen *seen = seen_new();
    seen->want = 0;
    assert_int_equal(ka_llm_new(seen->loop, &seen->config, &seen->llm, NULL), 0);
    ka_llm_close(seen->llm, on_closed, seen);
    finish(seen);
    seen_free(seen);
}

static void llm__one_op_after_another__use_the_same_client(void **state)
{
    (void)state;
    struct seen *seen = seen_new();
    seen->want = 3;
    load_script("{\"text\": \"a\"}\n{\"text\": \"b\"}\n{\"text\": \"c\"}");
    for (unsigned i = 0; i < 3; i++) {
        assert_int_equal(start(seen), 0);
        while (seen->done == i)
            uv_run(ka_loop_uv(seen->loop), UV_RUN_ONCE);
        assert_int_equal(seen->answer.text[0], "abc"[i]);
        ka_chat_answer_free(&seen->answer);
    }
    finish(seen);
    seen_free(seen);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(llm__huge_json_body__is_cut),
        cmocka_unit_test(llm__proxy_of_the_environment__is_used),
        cmocka_unit_test(llm__certificate__must_be_signed_by_a_known_authority),
        cmocka_unit_test(llm__unusable_url_or_key__is_refused),
        cmocka_unit_test(llm__concurrency_limit__refuses_the_next_op),
        cmocka_unit_test(llm__cancel__is_delivered_at_any_moment),
        cmocka_unit_test(llm__cancel_of_an_unknown_op__says_so),
        cmocka_unit_test(llm__close_with_ops_under_way__cancels_them),
        cmocka_unit_test(llm__close_without_ops__leaves_nothing_on_the_loop),
        cmocka_unit_test(llm__one_op_after_another__use_the_same_client),
    };
    return cmocka_run_group_tests_name("llm_client", tests, set_up, tear_down);
}
