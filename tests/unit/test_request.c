/* What stands in a request's line and headers, and how many requests a client may send. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "agent/core/rate.h"
#include "agent/core/request.h"

static void text__with_escapes__is_what_was_meant(void **state)
{
    static const struct {
        const char *escaped, *text;
    } rows[] = {
        {"", ""},     {"a+b", "a b"}, {"%41%0a%2B", "A\n+"}, {"%c3%a9", "\xc3\xa9"}, {"%", NULL},
        {"%4", NULL}, {"%zz", NULL},  {"a%00b", NULL},       {"%ff", NULL},          {"\xc3(", NULL},
    };
    (void)state;
    for (size_t i = 0; i < KA_COUNT(rows); i++) {
        KA_AUTO_FREE char *text = ka_request_text(rows[i].escaped);
        if (rows[i].text)
            assert_string_equal(text, rows[i].text);
        else
            assert_null(text);
    }
}

static void number__out_of_bounds_or_shape__is_refused(void **state)
{
    static const char *const counts[] = {
        "", "-1", "+1", " 1", "1 ", "0x1", "0", "1001", "99999999999999999999999"};
    static const char *const numbers[] = {"", "-", ".5", "1e0", "nan", "inf", "1.5", "-1.01", "0..1", "0 "};
    size_t count = 5;
    double number = 5;
    (void)state;
    for (size_t i = 0; i < KA_COUNT(counts); i++)
        assert_false(ka_request_count(counts[i], 1, 1000, &count));
    for (size_t i = 0; i < KA_COUNT(numbers); i++)
        assert_false(ka_request_number(numbers[i], -1, 1, &number));
    assert_true(count == 5 && number == 5);
    assert_true(ka_request_count("1000", 1, 1000, &count) && count == 1000);
    assert_true(ka_request_number("-0.25", -1, 1, &number) && number == -0.25);
}

static void event__that_is_none__changes_nothing(void **state)
{
    static const char *const pairs[] = {"", "1", "1:", ":1", "1:2:3", "1:-2", "-1:2", "1: 2"};
    uint64_t a = 5, b = 6;
    (void)state;
    for (size_t i = 0; i < KA_COUNT(pairs); i++)
        assert_false(ka_request_event(pairs[i], ':', &a, &b));
    assert_false(ka_request_event(NULL, '\0', &a, NULL));
    assert_true(a == 5 && b == 6);
    assert_true(ka_request_event("3:4", ':', &a, &b) && a == 3 && b == 4);
    assert_true(ka_request_event("7", '\0', &a, NULL) && a == 7);
}

static void token__is_shown_by_its_own_scheme_alone(void **state)
{
    (void)state;
    assert_true(ka_request_shows("Bearer secret", "secret"));
    assert_false(ka_request_shows("Bearer secret ", "secret"));
    assert_false(ka_request_shows("bearer secret", "secret"));
    assert_false(ka_request_shows("secret", "secret"));
    assert_false(ka_request_shows("Bearer ", "secret"));
    assert_false(ka_request_shows(NULL, "secret"));
}

static void origin__of_another_site__is_told_apart(void **state)
{
    (void)state;
    assert_true(ka_request_same_origin(NULL, NULL));
    assert_true(ka_request_same_origin("http://127.0.0.1:80", "127.0.0.1:80"));
    assert_true(ka_request_same_origin("https://GPU.example", "gpu.example"));
    assert_false(ka_request_same_origin("http://127.0.0.1:81", "127.0.0.1:80"));
    assert_false(ka_request_same_origin("null", "127.0.0.1:80"));
    assert_false(ka_request_same_origin("http://x", NULL));
}

static void host__of_this_machine__is_told_from_a_name_that_leads_here(void **state)
{
    static const char *const local[] = {NULL,    "localhost", "LocalHost:80", "127.0.0.1:8080",
                                        "[::1]", "[::1]:1"};
    static const char *const other[] = {
        "", "evil.example", "localhost.evil.example", "127.0.0.1.evil:80", "localhost:80x", "::1", "evil:80"};
    (void)state;
    for (size_t i = 0; i < KA_COUNT(local); i++)
        assert_true(ka_request_host_is_local(local[i]));
    for (size_t i = 0; i < KA_COUNT(other); i++)
        assert_false(ka_request_host_is_local(other[i]));
}

static void client__is_who_the_nearest_proxy_names(void **state)
{
    size_t len;
    (void)state;
    assert_memory_equal(ka_request_client("10.0.0.1, 10.0.0.2 ", &len), "10.0.0.2", 8);
    assert_int_equal(len, 8);
    assert_memory_equal(ka_request_client("::1", &len), "::1", 3);
    assert_int_equal(len, 3);
    ka_request_client(NULL, &len);
    assert_int_equal(len, 0);
}

static void rate__spent__comes_back_with_time(void **state)
{
    struct ka_rate rate = {.per_second = 2};
    (void)state;
    for (int i = 0; i < 2 * KA_RATE_BURST; i++)
        assert_int_equal(ka_rate_take(&rate, 1, 100), 0);
    assert_int_equal(ka_rate_take(&rate, 1, 100), 1);
    assert_int_equal(ka_rate_take(&rate, 2, 100), 0); /* another client */
    assert_int_equal(ka_rate_take(&rate, 1, 100.5), 0);
    assert_int_equal(ka_rate_take(&rate, 1, 100.5), 1);
    assert_int_equal(ka_rate_take(&rate, 1, 99), 1); /* a clock that goes back gives nothing */
    for (int i = 0; i < 2 * KA_RATE_BURST; i++)
        assert_int_equal(ka_rate_take(&rate, 1, 1000), 0);
    assert_int_equal(ka_rate_take(&rate, 1, 1000), 1);
}

static void rate__of_all__is_limited_too(void **state)
{
    struct ka_rate rate = {.per_second = 0.25};
    uint64_t client = 1;
    (void)state;
    while (ka_rate_take(&rate, client, 100) == 0)
        client++;
    assert_int_equal(client, 1 + KA_RATE_ALL * KA_RATE_BURST / 4);
    struct ka_rate none = {.per_second = 0};
    for (int i = 0; i < 10000; i++)
        assert_int_equal(ka_rate_take(&none, 1, 100), 0);
}

static void rate__with_too_many_clients__forgets_the_most_silent(void **state)
{
    struct ka_rate rate = {.per_second = 1000};
    (void)state;
    for (int i = 0; i < 1000 * KA_RATE_BURST; i++)
        assert_int_equal(ka_rate_take(&rate, 1, 100), 0);
    assert_int_equal(ka_rate_take(&rate, 1, 100), 1);
    for (uint64_t client = 2; client <= KA_RATE_CLIENTS; client++)
        assert_int_equal(ka_rate_take(&rate, client, 100.0001), 0);
    assert_int_equal(ka_rate_take(&rate, 1, 100.0001), 1); /* still known */
    assert_int_equal(ka_rate_take(&rate, KA_RATE_CLIENTS + 1, 100.0002), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(text__with_escapes__is_what_was_meant),
        cmocka_unit_test(number__out_of_bounds_or_shape__is_refused),
        cmocka_unit_test(event__that_is_none__changes_nothing),
        cmocka_unit_test(token__is_shown_by_its_own_scheme_alone),
        cmocka_unit_test(origin__of_another_site__is_told_apart),
        cmocka_unit_test(host__of_this_machine__is_told_from_a_name_that_leads_here),
        cmocka_unit_test(client__is_who_the_nearest_proxy_names),
        cmocka_unit_test(rate__spent__comes_back_with_time),
        cmocka_unit_test(rate__of_all__is_limited_too),
        cmocka_unit_test(rate__with_too_many_clients__forgets_the_most_silent),
    };
    return cmocka_run_group_tests_name("request", tests, NULL, NULL);
}
