/* The report as a page: what is in it, and that nothing given can become markup. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>

#include "agent/core/report.h"

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

static const char *after(const char *text, const char *part)
{
    const char *at = strstr(text, part);
    if (!at)
        fail_msg("'%s' is not in:\n%s", part, text);
    return at + strlen(part);
}

static size_t count_of(const char *text, const char *part)
{
    size_t count = 0;
    for (; (text = strstr(text, part)); text += strlen(part))
        count++;
    return count;
}

static void html__children__have_a_bar_each_where_and_as_long_as_they_ran(void **state)
{
    (void)state;
    const char *text = render(
        "{\"children\":[{\"op\":\"inspect\",\"part\":null,\"start\":0,\"end\":2,\"warm\":false,"
        "\"status\":\"ok\"},{\"op\":\"oracle\",\"part\":\"2 of 4\",\"start\":2,\"end\":8,\"warm\":true,"
        "\"status\":\"ok\",\"cases\":12},{\"op\":\"candidate\",\"start\":4,\"end\":5,\"warm\":true,"
        "\"status\":\"timeout\",\"cases\":1},{\"op\":\"facts\",\"start\":5,\"end\":5,\"status\":"
        "\"cancelled\"}]}");
    const char *svg = after(text, "<svg class=\"timeline\"");
    assert_has("height=\"96\"");
    assert_has(">inspect</text>");
    assert_has(">oracle 2 of 4</text>");
    assert_has("<title>oracle, part 2 of 4, 12 cases: 6.00 s, from 2.00 to 8.00, warm start, ok</title>");
    assert_has("<title>candidate, 1 case: 1.00 s, from 4.00 to 5.00, warm start, timeout</title>");
    assert_has(">8 s</text>");
    const char *cold = after(svg, "class=\"cold\""), *warm = after(cold, "class=\"warm\"");
    const char *lost = after(warm, "class=\"lost\""), *off = after(lost, "class=\"off\"");
    assert_true(fabs(attribute(warm, " x=\"") - attribute(cold, " x=\"") - attribute(cold, "width=\"")) <
                0.2);
    assert_true(fabs(attribute(warm, "width=\"") - 3 * attribute(cold, "width=\"")) < 0.4);
    assert_true(attribute(warm, " y=\"") > attribute(cold, " y=\""));
    assert_true(attribute(off, "width=\"") >= 1); /* can be seen */
    assert_int_equal(count_of(svg, "<rect"), 4);
}

static json_t *many(size_t count, const char *op, double from, double gap, double length)
{
    json_t *list = json_array();
    for (size_t i = 0; i < count; i++)
        json_array_append_new(list, json_pack("{s:s, s:f, s:f, s:b, s:s}", "op", op, "start",
                                              from + (double)i * gap, "end", from + (double)i * gap + length,
                                              "warm", 1, "status", "ok"));
    return list;
}

static const char *render_children(json_t *children)
{
    json_t *result = json_pack("{s:o}", "children", children);
    ka_buf_clear(&page);
    assert_int_equal(ka_report_html(result, &page, NULL), 0);
    json_decref(result);
    return ka_buf_str(&page);
}

static void html__many_children__share_rows_by_operation(void **state)
{
    (void)state;
    json_t *children = many(200, "oracle", 0, 1, 1.5), *others = many(3, "facts", 300, 1, 0.5);
    json_array_extend(children, others);
    json_decref(others);
    const char *svg = after(render_children(children), "<svg class=\"timeline\"");
    assert_int_equal(count_of(svg, "<rect"), 203);
    assert_has(">100 x oracle</text>"); /* two at a time */
    assert_has(">3 x facts</text>");
    assert_true(attribute(svg, "height=\"") < 100);
    assert_true(count_of(svg, " s</text>") <= 12);
}

static void html__too_many_at_once__are_counted(void **state)
{
    (void)state;
    const char *svg = after(render_children(many(200, "oracle", 0, 0, 10)), "<svg class=\"timeline\"");
    assert_true(attribute(svg, "height=\"") < 1200);
    assert_int_equal(count_of(svg, "<rect"), 60);
    assert_has("140 more are not drawn");
    render_children(many(5000, "oracle", 0, 1, 1));
    assert_has("904 more are not drawn");
}

static void html__child_with_any_name_or_time__is_escaped_or_left_out(void **state)
{
    (void)state;
    static const char evil[] = "<script>\\\" onload=\\\"x&\\u00e4\\u00e4\\u00e4\\u00e4\\u00e4\\u00e4\\u00e4";
    char json[2000];
    snprintf(json, sizeof(json),
             "{\"children\":[{\"op\":\"%s\",\"part\":\"%s\",\"status\":\"%s\",\"start\":1,\"end\":-4},"
             "{\"op\":3,\"start\":1e300},{\"start\":\"x\"},7,null,[],{\"start\":-1},{\"start\":0}]}",
             evil, evil, evil);
    render(json);
    assert_lacks("<script");
    assert_lacks("\" onload");
    assert_has("&lt;script&gt;&quot; onload=&quot;x&amp;");
    assert_has("\xc3\xa4\xe2\x80\xa6</text>"); /* cut between two characters */
    assert_int_equal(count_of(ka_buf_str(&page), "<rect"), 2);
    assert_lacks("nan");
    assert_lacks("inf");
    assert_has("6 more are not drawn");
    static const char *const none[] = {"{}", "{\"children\":[]}", "{\"children\":7}", "{\"children\":[{}]}"};
    for (size_t i = 0; i < sizeof(none) / sizeof(*none); i++) {
        render(none[i]);
        assert_lacks("<svg");
        assert_lacks("<h2>Time");
    }
    render("{\"children\":[{\"op\":\"scan\",\"start\":0,\"end\":0}]}");
    assert_lacks("nan");
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
        TEST(html__children__have_a_bar_each_where_and_as_long_as_they_ran),
        TEST(html__many_children__share_rows_by_operation),
        TEST(html__too_many_at_once__are_counted),
        TEST(html__child_with_any_name_or_time__is_escaped_or_left_out),
        TEST(html__members_of_wrong_types__are_left_out),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
