/* Redaction: known secrets and things that look like keys go, everything else stays. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <string.h>

#include "agent/core/redact.h"

static const char *const SECRETS[] = {"hunter2-hunter2",      "ab", "a/b\"c\\d", "/slash/first",
                                      "hunter2-hunter2-long", NULL};

static void assert_redacts(const char *text, const char *want)
{
    struct ka_buf out = {0};
    assert_int_equal(ka_redact(text, SECRETS, &out), 0);
    assert_string_equal(ka_buf_str(&out), want);
    ka_buf_free(&out);
}

static void redact__given_secrets__are_removed_everywhere(void **state)
{
    (void)state;
    assert_redacts("hunter2-hunter2", "[redacted]");
    assert_redacts("a hunter2-hunter2, xhunter2-hunter2y\nhunter2-hunter2\n",
                   "a [redacted], x[redacted]y\n[redacted]\n");
    assert_redacts("{\"k\": \"hunter2-hunter2\"}", "{\"k\": \"[redacted]\"}");
    assert_redacts("hunter2-hunter2-long.", "[redacted].");
    assert_redacts("", "");
}

static void redact__json_spelling_of_a_secret__is_removed(void **state)
{
    (void)state;
    assert_redacts("\"\\/slash\\/first\"", "\"[redacted]\""); /* no backslash stays behind */
    assert_redacts("\"a\\/b\\\"c\\\\d\" and a/b\"c\\d!", "\"[redacted]\" and [redacted]!");
}

static void redact__short_secrets__are_not_searched_for(void **state)
{
    (void)state;
    assert_redacts("absolute ab", "absolute ab");
}

static void redact__what_looks_like_a_key__is_removed(void **state)
{
    (void)state;
    assert_redacts("key sk-abcDEF123456, ok", "key [redacted], ok");
    assert_redacts("Authorization: Bearer abc.def-ghi\r\n", "Authorization: Bearer [redacted]\r\n");
    assert_redacts("authorization: bearer   x1", "authorization: bearer   [redacted]");
    assert_redacts("?api_key=abc123&x=1", "?api_key=[redacted]&x=1");
    assert_redacts("API-KEY: abc123", "API-KEY: [redacted]");
    assert_redacts("{\"apikey\": \"abc123\", \"b\": 1}", "{\"apikey\": \"[redacted]\", \"b\": 1}");
    assert_redacts("{\\\"api_key\\\":\\\"abc123\\\"}", "{\\\"api_key\\\":\\\"[redacted]\\\"}");
    assert_redacts("OPENAI_API_KEY=sk-abcdefgh1234", "OPENAI_API_KEY=[redacted]");
    assert_redacts("api_key=hunter2-hunter2", "api_key=[redacted]");
}

static void redact__no_secrets_given__still_removes_keys(void **state)
{
    (void)state;
    struct ka_buf out = {0};
    assert_int_equal(ka_redact("sk-abcdefgh1234 hunter2-hunter2", NULL, &out), 0);
    assert_string_equal(ka_buf_str(&out), "[redacted] hunter2-hunter2");
    ka_buf_free(&out);
}

static void redact__ordinary_text__is_unchanged(void **state)
{
    (void)state;
    static const char *const texts[] = {"task-scheduling-of-tiles", "sk-1", "api_key_file",
                                        "set the api_key first", "mask = offs < N; risk-adjusted-returns"};
    for (size_t i = 0; i < KA_COUNT(texts); i++) {
        assert_redacts(texts[i], texts[i]);
    }
    assert_redacts("bearer", "bearer");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(redact__given_secrets__are_removed_everywhere),
        cmocka_unit_test(redact__json_spelling_of_a_secret__is_removed),
        cmocka_unit_test(redact__short_secrets__are_not_searched_for),
        cmocka_unit_test(redact__what_looks_like_a_key__is_removed),
        cmocka_unit_test(redact__no_secrets_given__still_removes_keys),
        cmocka_unit_test(redact__ordinary_text__is_unchanged),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
