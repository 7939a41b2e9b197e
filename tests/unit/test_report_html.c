/* The report as a page: what is in it, and that nothing given can become markup. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include <errno.h>
#include <stdio.h>

#include "core/report_html.h"

static struct ka_buf page;

static const char *render(const char *json)
{
    json_t *result = json_loads(json, 0, NULL);
    assert_non_null(result);
    ka_buf_clear(&page);
    assert_int_equal(ka_report_html(result, &page, NULL), 0);
    json_decref(result);
    return ka_buf_str(&page);
}

static int free_page(void **state)
{
    (void)state;
    ka_buf_free(&page);
    return 0;
}

static void assert_has(const char *part)
{
    if (!strstr(ka_buf_str(&page), part))
        fail_msg("'%s' is not in the page:\n%s", part, ka_buf_str(&page));
}

static void assert_lacks(const char *part)
{
    if (strstr(ka_buf_str(&page), part))
        fail_msg("'%s' is in the page:\n%s", part, ka_buf_str(&page));
}

/* The number after `key` in the element that follows `from`. */
static double attribute(const char *from, const char *key)
{
    const char *at = strstr(from, key);
    assert_non_null(at);
    return atof(at + strlen(key));
}

static void html__verified_run__has_tables_and_a_plot(void **state)
{
    (void)state;
    const char *text = render(
        "{\"verdict\":\"verified\",\"stub\":\"softmax\",\"shapes\":{\"required\":2,\"passed\":2,\"hidden\":5,"
        "\"hidden_passed\":5},\"gradients\":[{\"name\":\"x\",\"error\":1e-7,\"baseline_error\":2e-7,"
        "\"limit\":1e-5,"
        "\"worst_shape\":{\"M\":4}}],\"per_shape\":[{\"shape\":{\"M\":4,\"N\":8},\"kind\":\"required\","
        "\"cases\":7,"
        "\"cases_failed\":0,\"gradients\":[{\"name\":\"x\",\"error\":1e-7,\"limit\":1e-5}]},{\"shape\":{"
        "\"M\":1},"
        "\"kind\":\"hidden\",\"cases\":3,\"cases_failed\":2}]}");
    assert_has("<span class=\"good\">verified</span>");
    assert_has("2 of 2");
    assert_has("M=4, N=8");
    assert_has("2 failed");
    assert_has("x 1e-07 (1e-05)");
    assert_has("Not timed");
    const char *svg = strstr(text, "<svg");
    double limit = attribute(strstr(svg, "stroke=\"#222\"") - 60, "x1=\"");
    double eager = attribute(strstr(svg, "<circle"), "cx=\"");
    double error = attribute(strstr(strstr(svg, "<circle") + 1, "<circle"), "cx=\"");
    assert_true(error < eager && eager < limit);
}

static void html__worse_than_tolerated__is_red_and_right_of_the_bar(void **state)
{
    (void)state;
    const char *text = render("{\"verdict\":\"not_verified\",\"gradients\":[{\"name\":\"x\",\"error\":0.5,"
                              "\"baseline_error\":null,\"limit\":1e-5}],\"failures\":\"x is off\"}");
    assert_has("<span class=\"bad\">not verified</span>");
    assert_has("x is off");
    assert_lacks("Speed");
    const char *svg = strstr(text, "<svg");
    assert_non_null(strstr(svg, "#b3261e"));
    assert_true(attribute(strstr(svg, "<circle"), "cx=\"") >
                attribute(strstr(svg, "stroke=\"#222\"") - 60, "x1=\""));
}

static void html__given_text__never_becomes_markup(void **state)
{
    (void)state;
    static const char evil[] = "<script>alert('1')</script>\\\" onload=\\\"x & y";
    char json[4000];
    snprintf(
        json, sizeof(json),
        "{\"verdict\":\"not_verified\",\"stub\":\"%s\",\"file\":\"%s\",\"device\":\"%s\",\"failures\":\"%s\","
        "\"error\":{\"message\":\"%s\",\"file\":\"%s\",\"remedy\":\"%s\",\"traceback\":\"%s\"},\"gradients\":"
        "[{\"name\":\"%s\",\"error\":1,\"limit\":1,\"worst_shape\":{\"%s\":1}}],\"per_shape\":[{\"shape\":\"%"
        "s\","
        "\"kind\":\"%s\"}],\"history\":[{\"note\":\"%s\",\"origin\":\"%s\"}]}",
        evil, evil, evil, evil, evil, evil, evil, evil, evil, evil, evil, evil, evil, evil);
    render(json);
    assert_lacks("<script");
    assert_lacks("\" onload");
    assert_has("&lt;script&gt;alert(&#39;1&#39;)&lt;/script&gt;&quot; onload=&quot;x &amp; y");
}

static void html__page__needs_nothing_from_elsewhere(void **state)
{
    (void)state;
    render("{\"verdict\":\"error\"}");
    static const char *const parts[] = {"http:", "https:", "src=", "href=", "<script", "@import", "url("};
    for (size_t i = 0; i < sizeof(parts) / sizeof(*parts); i++)
        assert_lacks(parts[i]);
    assert_has("default-src 'none'");
}

static void html__measured_speed__has_a_bar_for_each_time(void **state)
{
    (void)state;
    const char *text =
        render("{\"verdict\":\"verified\",\"speed\":{\"geomean_vs_compile\":1.25,\"per_shape\":[{\"dims\":"
               "{\"M\":4},\"backward_ms\":1.0,\"compile_ms\":2.0,\"note\":\"n\"}]}}");
    assert_has("1.25x");
    assert_has("backward_ms 1");
    const char *first = strstr(text, "<rect");
    assert_non_null(first);
    const char *second = strstr(first + 1, "<rect");
    assert_non_null(second);
    assert_true(attribute(second, "width=\"") > 1.9 * attribute(first, "width=\""));
}

static void html__members_of_wrong_types__are_left_out(void **state)
{
    (void)state;
    struct ka_err err;
    render("{\"verdict\":7,\"stub\":[],\"shapes\":3,\"gradients\":[1,{\"name\":4,\"error\":\"x\"}],\"per_"
           "shape\":[null,[]],"
           "\"speed\":true,\"history\":[[]],\"error\":\"no\",\"failures\":{}}");
    assert_has("</html>");
    json_t *list = json_array();
    assert_int_equal(ka_report_html(list, &page, &err), -EINVAL);
    json_decref(list);
}

#define TEST(name) cmocka_unit_test_teardown(name, free_page)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(html__verified_run__has_tables_and_a_plot),
        TEST(html__worse_than_tolerated__is_red_and_right_of_the_bar),
        TEST(html__given_text__never_becomes_markup),
        TEST(html__page__needs_nothing_from_elsewhere),
        TEST(html__measured_speed__has_a_bar_for_each_time),
        TEST(html__members_of_wrong_types__are_left_out),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
