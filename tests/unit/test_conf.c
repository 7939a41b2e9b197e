/* The configuration file: values of each type, and mistakes named with file and line. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/app/conf.h"

static struct ka_buf seen;
static struct ka_err err;

static int collect(void *arg, const char *key, const struct ka_conf_value *value, int line,
                   struct ka_err *why)
{
    (void)arg;
    if (strcmp(key, "unknown") == 0)
        return ka_fail(why, -ENOENT, "there is no setting '%s'", key);
    ka_buf_printf(&seen, "%d %s ", line, key);
    switch (value->type) {
    case KA_CONF_STRING:
        return ka_buf_printf(&seen, "s<%s>;", value->string);
    case KA_CONF_INTEGER:
        return ka_buf_printf(&seen, "i%lld %g;", (long long)value->integer, value->number);
    case KA_CONF_NUMBER:
        return ka_buf_printf(&seen, "n%g;", value->number);
    case KA_CONF_BOOLEAN:
        return ka_buf_printf(&seen, "b%d;", value->boolean);
    }
    return -EINVAL;
}

static int parse(const char *text)
{
    ka_buf_clear(&seen);
    err.msg[0] = '\0';
    return ka_conf_parse(text, strlen(text), "dir/config", collect, NULL, &err);
}

static int free_seen(void **state)
{
    (void)state;
    ka_buf_free(&seen);
    return 0;
}

static void assert_parses(const char *text, const char *want)
{
    if (parse(text))
        fail_msg("%s", err.msg);
    assert_string_equal(ka_buf_str(&seen), want);
}

static void assert_refused(const char *text, const char *where, const char *what)
{
    assert_int_equal(parse(text), -EINVAL);
    if (!ka_starts_with(err.msg, where) || !strstr(err.msg, what))
        fail_msg("'%s' lacks '%s' or '%s'", err.msg, where, what);
}

static void conf__each_type__reaches_the_caller_with_its_line(void **state)
{
    (void)state;
    assert_parses(
        "# comment\n\nmodel = \"a b\"  # why\ntopk=4\r\n min-sim\t=\t0.5\nno_wait = true\nwait = false",
        "3 model s<a b>;4 topk i4 4;5 min_sim n0.5;6 no_wait b1;7 wait b0;");
    assert_parses("a = -7\nb = 1e3\nc = ''\nd = +2", "1 a i-7 -7;2 b n1000;3 c s<>;4 d i2 2;");
    assert_parses("", "");
}

static void conf__strings__have_escapes_in_double_quotes_only(void **state)
{
    (void)state;
    assert_parses("a = \"q\\\"b\\\\n\\n\\t#\"\nb = 'C:\\new # \"x\"'",
                  "1 a s<q\"b\\n\n\t#>;2 b s<C:\\new # \"x\">;");
    assert_refused("a = \"\\x\"", "dir/config:1: ", "backslash");
    assert_refused("a = \"\\", "dir/config:1: ", "backslash");
}

static void conf__mistakes__are_named_with_file_and_line(void **state)
{
    (void)state;
    assert_refused("a = 1\nb\n", "dir/config:2: ", "key = value");
    assert_refused("= 1", "dir/config:1: ", "key = value");
    assert_refused("a b = 1", "dir/config:1: ", "key = value");
    assert_refused("[llm]\n", "dir/config:1: ", "no sections");
    assert_refused("a = word", "dir/config:1: ", "no quoted text");
    assert_refused("a =", "dir/config:1: ", "no quoted text");
    assert_refused("a = nan", "dir/config:1: ", "no quoted text");
    assert_refused("a = 1e999", "dir/config:1: ", "in range");
    assert_refused("a = 99999999999999999999", "dir/config:1: ", "in range");
    assert_refused("a = 1-2", "dir/config:1: ", "no quoted text");
    assert_refused("a = \"x", "dir/config:1: ", "closing \"");
    assert_refused("a = 'x", "dir/config:1: ", "closing '");
    assert_refused("a = 1 2", "dir/config:1: ", "something follows");
    assert_refused("a = \"x\"y", "dir/config:1: ", "something follows");
    assert_refused("a = 1\n\nA = 2", "dir/config:3: ", "already set in line 1");
    assert_refused("a = \"\x01\"", "dir/config:1: ", "control character");
}

static void conf__error_of_the_caller__gets_file_and_line(void **state)
{
    (void)state;
    assert_int_equal(parse("a = 1\nunknown = 2\nb = 3\n"), -ENOENT);
    assert_string_equal(err.msg, "dir/config:2: there is no setting 'unknown'");
    assert_string_equal(ka_buf_str(&seen), "1 a i1 1;");
}

static void conf__key_in_the_file__is_refused_with_the_remedy_and_not_quoted(void **state)
{
    (void)state;
    static const char *const lines[] = {"api_key = \"sk-secret\"", "API-KEY='sk-secret'",
                                        "openai_api_key = sk-secret", "api_key sk-secret",
                                        "apikey = \"sk-secret"};
    for (size_t i = 0; i < KA_COUNT(lines); i++) {
        assert_int_equal(parse(lines[i]), -EINVAL);
        assert_null(strstr(err.msg, "secret"));
        assert_int_equal(seen.len, 0);
    }
    assert_refused("api_key = \"sk-secret\"", "dir/config:1: ", "api_key_file");
    assert_parses("api_key_file = '/k'", "1 api_key_file s</k>;");
}

static void conf__caps__are_enforced(void **state)
{
    (void)state;
    struct ka_buf text = {0};
    for (int i = 0; i < KA_CONF_MAX_KEYS; i++)
        ka_buf_printf(&text, "k%d = 1\n", i);
    assert_int_equal(parse(ka_buf_str(&text)), 0);
    ka_buf_puts(&text, "more = 1\n");
    assert_int_equal(parse(ka_buf_str(&text)), -EFBIG);
    assert_int_equal(ka_conf_parse("", KA_CONF_MAX_BYTES + 1, "f", collect, NULL, &err), -EFBIG);
    ka_buf_free(&text);
}

static void assert_path(const char *xdg, const char *home, const char *want)
{
    char *path = ka_conf_default_path(xdg, home);
    if (want)
        assert_string_equal(path, want);
    else
        assert_null(path);
    free(path);
}

static void conf__nul_bytes__are_refused(void **state)
{
    (void)state;
    assert_int_equal(ka_conf_parse("a = 1\n\0b = 2\n", 14, "dir/config", collect, NULL, &err), -EINVAL);
    assert_true(ka_starts_with(err.msg, "dir/config:2: "));
}

static void conf__default_path__follows_xdg(void **state)
{
    (void)state;
    assert_path("/x", "/h", "/x/kernel-agent/config");
    assert_path(NULL, "/h", "/h/.config/kernel-agent/config");
    assert_path("relative", "/h", "/h/.config/kernel-agent/config");
    assert_path("", "", NULL);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_teardown(name, free_seen)
    const struct CMUnitTest tests[] = {
        TEST(conf__each_type__reaches_the_caller_with_its_line),
        TEST(conf__strings__have_escapes_in_double_quotes_only),
        TEST(conf__mistakes__are_named_with_file_and_line),
        TEST(conf__error_of_the_caller__gets_file_and_line),
        TEST(conf__key_in_the_file__is_refused_with_the_remedy_and_not_quoted),
        TEST(conf__caps__are_enforced),
        TEST(conf__nul_bytes__are_refused),
        TEST(conf__default_path__follows_xdg),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
