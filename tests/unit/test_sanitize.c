/* What a sanitizer's report does to the verdict. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "agent/core/sanitize.h"

/* The facts that a report leads to. Free with free(). */
static char *judged(const char *report, const char *message)
{
    static const char *const grads[] = {"x"};
    struct ka_verdict *verdict = ka_verdict_new(grads, 1);
    struct ka_buf text = {0};
    json_t *doc = report ? json_loads(report, 0, NULL) : NULL;
    assert_true(!report || doc);
    ka_sanitize_judge(doc, message, verdict);
    ka_verdict_facts(verdict, 1, &text);
    char *copy = strdup(ka_buf_str(&text));
    assert_non_null(copy);
    ka_buf_free(&text);
    json_decref(doc);
    ka_verdict_free(verdict);
    return copy;
}

/* `words` are in what the verdict says of the report; "": it names no tool. */
static void expect(const char *report, const char *words)
{
    char *text = judged(report, "no answer");
    if (!*words)
        assert_null(strstr(text, "check"));
    else if (!strstr(text, words))
        fail_msg("\"%s\" is not in: %s", words, text);
    free(text);
}

#define CLEAN(tool)                                                                                          \
    "{\"tool\": \"" tool "\", \"complete\": true, \"reason\": null, \"findings\": [], \"tail\": \"\"}"
#define LATE(tool)                                                                                           \
    "{\"tool\": \"" tool                                                                                     \
    "\", \"complete\": false, \"reason\": \"ran past 100 s\", \"findings\": [], \"tail\": \"at work\"}"

static void sanitize__three_clean_reports__fail_nothing(void **state)
{
    (void)state;
    expect("{\"runs\": [" CLEAN("memcheck") ", " CLEAN("racecheck") ", " CLEAN("initcheck") "]}", "");
}

static void sanitize__tool_past_its_time__is_told_with_its_reason(void **state)
{
    (void)state;
    expect("{\"runs\": [" CLEAN("memcheck") ", " LATE("racecheck") ", " CLEAN("initcheck") "]}",
           "racecheck gave no report to its end: ran past 100 s; its last words: at work");
}

static void sanitize__tool_that_is_not_in_the_report__was_not_run(void **state)
{
    (void)state;
    expect("{\"runs\": [" CLEAN("memcheck") ", " CLEAN("racecheck") "]}", "initcheck was not run");
    expect("{}", "memcheck was not run");
    expect(NULL, "no answer");
}

static void sanitize__finding__names_tool_kernel_and_line(void **state)
{
    (void)state;
    expect("{\"runs\": [{\"tool\": \"memcheck\", \"complete\": true, \"findings\": [{\"what\": \"Invalid "
           "write\", "
           "\"kernel\": \"f_bwd\", \"file\": \"pair.py\", \"line\": 52, \"times\": 3}]}, " CLEAN(
               "racecheck") ", " CLEAN("initcheck") "]}",
           "Invalid write in kernel f_bwd, pair.py line 52 (3 times)");
}

static void sanitize__finding_without_a_line__names_the_kernel(void **state)
{
    (void)state;
    expect("{\"runs\": [{\"tool\": \"memcheck\", \"complete\": true, \"findings\": [{\"what\": \"Invalid "
           "write\", "
           "\"kernel\": \"f_bwd\", \"file\": null, \"line\": null, \"times\": 1}]}, " CLEAN(
               "racecheck") ", " CLEAN("initcheck") "]}",
           "Invalid write in kernel f_bwd (1 times)");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sanitize__three_clean_reports__fail_nothing),
        cmocka_unit_test(sanitize__tool_past_its_time__is_told_with_its_reason),
        cmocka_unit_test(sanitize__tool_that_is_not_in_the_report__was_not_run),
        cmocka_unit_test(sanitize__finding__names_tool_kernel_and_line),
        cmocka_unit_test(sanitize__finding_without_a_line__names_the_kernel),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
