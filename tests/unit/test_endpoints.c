/* Endpoints and keys: what options and environment come to. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>

#include "agent/app/endpoints.h"
#include "agent/app/opts.h"
#include "base/files.h"

static char folder[] = "/tmp/ka-endpoints-XXXXXX";

static int make_files(void **state)
{
    (void)state;
    if (!mkdtemp(folder) || chdir(folder))
        return -1;
    return ka_file_write("a", "key-a\n", 6, NULL) || ka_file_write("b", "key-b", 5, NULL) ||
           ka_file_write("none", "\n", 1, NULL);
}

static int remove_files(void **state)
{
    (void)state;
    return chdir("/") || ka_rmtree(folder, NULL);
}

/* "url key" of each, joined by commas; free() it. */
static char *read_all(const char *urls, const char *files, const char *in_environment)
{
    struct ka_endpoints endpoints;
    struct ka_buf text = {0};
    if (in_environment)
        setenv("OPENAI_API_KEY", in_environment, 1);
    assert_int_equal(ka_endpoints_read(urls, files, &endpoints, NULL), 0);
    assert_null(getenv("OPENAI_API_KEY"));
    for (size_t i = 0; i < endpoints.count; i++)
        ka_buf_printf(&text, "%s%s %s", i ? "," : "", endpoints.list[i].base_url,
                      endpoints.list[i].api_key ? endpoints.list[i].api_key : "-");
    ka_endpoints_free(&endpoints);
    char *made = ka_strdup(ka_buf_str(&text));
    ka_buf_free(&text);
    return made;
}

static void endpoints__each_key__belongs_to_one_url(void **state)
{
    (void)state;
    static const struct {
        const char *urls, *files, *environment, *want;
    } cases[] = {
        {NULL, NULL, NULL, "https://api.openai.com/v1 -"},
        {NULL, NULL, "k", "https://api.openai.com/v1 k"},
        {"http://h/v1", NULL, "k", "http://h/v1 k"},
        {"http://h/v1", "a", "k", "http://h/v1 key-a"},
        {"http://h/v1, http://i/v1", NULL, "k", "http://h/v1 k,http://i/v1 -"},
        {"http://h/v1,http://i/v1", "a,b", NULL, "http://h/v1 key-a,http://i/v1 key-b"},
        {"http://h/v1,http://i/v1", " ,b", NULL, "http://h/v1 -,http://i/v1 key-b"},
        {"http://h/v1,http://i/v1", "a", "k", "http://h/v1 key-a,http://i/v1 -"},
        {"http://h/v1", "a,b", NULL, "http://h/v1 key-a,http://h/v1 key-b"},
        {NULL, "b,a", NULL, "https://api.openai.com/v1 key-b,https://api.openai.com/v1 key-a"},
    };
    for (size_t i = 0; i < KA_COUNT(cases); i++) {
        char *got = read_all(cases[i].urls, cases[i].files, cases[i].environment);
        assert_string_equal(got, cases[i].want);
        free(got);
    }
}

static void endpoints__what_does_not_fit__is_told(void **state)
{
    (void)state;
    static const struct {
        const char *urls, *files, *why;
        int rc;
    } cases[] = {
        {"a,b", "a,b,a", "--api-key-file: more than 2 keys for 2 endpoints", -EINVAL},
        {"a,b,c,d,e,f,g,h,i", NULL, "--base-url: more than 8 endpoints", -EINVAL},
        {"a", "a,b,a,b,a,b,a,b,a", "--api-key-file: more than 8 keys for 1 endpoint", -EINVAL},
        {"a", "none", "none: holds no key on its first line", -EINVAL},
        {"a,b", "a,missing", "missing", -ENOENT},
    };
    for (size_t i = 0; i < KA_COUNT(cases); i++) {
        struct ka_endpoints endpoints;
        struct ka_err err = {0};
        assert_int_equal(ka_endpoints_read(cases[i].urls, cases[i].files, &endpoints, &err), cases[i].rc);
        assert_non_null(strstr(err.msg, cases[i].why));
        assert_int_equal(endpoints.count, 0);
    }
}

static void endpoints__something_to_ask__is_a_url_or_a_key(void **state)
{
    (void)state;
    static const struct {
        const char *urls, *files, *environment;
        bool named;
    } cases[] = {{NULL, NULL, NULL, false},
                 {NULL, NULL, "", false},
                 {"u", NULL, NULL, true},
                 {NULL, "a", NULL, true},
                 {NULL, NULL, "k", true}};
    for (size_t i = 0; i < KA_COUNT(cases); i++) {
        struct ka_endpoints endpoints;
        if (cases[i].environment)
            setenv("OPENAI_API_KEY", cases[i].environment, 1);
        assert_int_equal(ka_endpoints_read(cases[i].urls, cases[i].files, &endpoints, NULL), 0);
        assert_int_equal(endpoints.named, cases[i].named);
        ka_endpoints_free(&endpoints);
    }
}

static void endpoints__option_given_again__makes_a_list_longer_but_not_the_environments(void **state)
{
    (void)state;
    char *argv[] = {(char *)"--base-url", (char *)"x", (char *)"--topk",        (char *)"2",
                    (char *)"--topk",     (char *)"3", (char *)"--base-url=y,z"};
    struct ka_opts opts;
    int count;
    setenv("KA_BASE_URL", "w", 1);
    assert_int_equal(ka_opts_init(&opts, NULL, NULL), 0);
    assert_string_equal(opts.base_url, "w");
    assert_int_equal(ka_opts_parse(&opts, KA_COUNT(argv), argv, NULL, 0, &count, NULL), 0);
    assert_string_equal(opts.base_url, "x,y,z");
    assert_int_equal(opts.run.topk, 3);
    ka_opts_free(&opts);
    unsetenv("KA_BASE_URL");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(endpoints__each_key__belongs_to_one_url),
        cmocka_unit_test(endpoints__what_does_not_fit__is_told),
        cmocka_unit_test(endpoints__something_to_ask__is_a_url_or_a_key),
        cmocka_unit_test(endpoints__option_given_again__makes_a_list_longer_but_not_the_environments),
    };
    unsetenv("OPENAI_API_KEY");
    return cmocka_run_group_tests(tests, make_files, remove_files);
}
