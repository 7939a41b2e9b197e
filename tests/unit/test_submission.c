/* A client's request for a run: what is taken, and what is refused by its name. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <errno.h>
#include <string.h>

#include "agent/core/fields.h"
#include "agent/core/submission.h"

static void request__with_everything__is_read(void **state)
{
    (void)state;
    struct ka_submission read;
    const char *body =
        "{\"source\": \"x = 1\", \"name\": \"a-b_1.py\", \"priority\": -7, \"force\": true, "
        "\"options\": {\"min_sim\": 0.5, \"topk\": 3, \"no-optimise\": true, \"draft\": \"llm\"}}";
    assert_int_equal(ka_submission_parse(body, strlen(body), &read, NULL), 0);
    assert_string_equal(read.source, "x = 1");
    assert_string_equal(read.name, "a-b_1.py");
    assert_int_equal(read.priority, -7);
    assert_true(read.force);
    assert_true(ka_is_text(read.options, "min-sim", "0.5"));
    assert_true(ka_is_text(read.options, "topk", "3"));
    assert_true(ka_is_text(read.options, "no-optimise", "true"));
    assert_true(ka_is_text(read.options, "draft", "llm"));
    ka_submission_free(&read);
}

static void request__with_source_alone__has_defaults(void **state)
{
    (void)state;
    struct ka_submission read;
    assert_int_equal(ka_submission_parse("{\"source\": \"x\"}", 15, &read, NULL), 0);
    assert_string_equal(read.name, "forward.py");
    assert_int_equal(json_object_size(read.options), 0);
    assert_false(read.force);
    ka_submission_free(&read);
}

static void request__that_is_wrong__is_refused_by_name(void **state)
{
    (void)state;
    static const char *const rows[][2] = {
        {"", "no JSON"},
        {"[]", "no JSON object"},
        {"{\"source\": \"x\", \"source\": \"y\"}", "no JSON"},
        {"{}", "source"},
        {"{\"source\": \"  \\n\"}", "source"},
        {"{\"source\": \"a\\u0000b\"}", "no JSON"},
        {"{\"source\": 1}", "source"},
        {"{\"source\": \"x\", \"name\": \"../a.py\"}", "name"},
        {"{\"source\": \"x\", \"name\": \".a.py\"}", "name"},
        {"{\"source\": \"x\", \"name\": \"-a.py\"}", "name"},
        {"{\"source\": \"x\", \"name\": \".py\"}", "name"},
        {"{\"source\": \"x\", \"name\": \"a.txt\"}", "name"},
        {"{\"source\": \"x\", \"priority\": 1001}", "priority"},
        {"{\"source\": \"x\", \"priority\": 0.5}", "priority"},
        {"{\"source\": \"x\", \"force\": 1}", "force"},
        {"{\"source\": \"x\", \"options\": []}", "options"},
        {"{\"source\": \"x\", \"options\": {\"topk\": [1]}}", "topk"},
        {"{\"source\": \"x\", \"options\": {\"min-sim\": 1, \"min_sim\": 1}}", "twice"},
        {"{\"source\": \"x\", \"out\": \"/etc\"}", "out"},
    };
    for (size_t i = 0; i < KA_COUNT(rows); i++) {
        struct ka_submission read = {.priority = 42};
        struct ka_err err = {{0}};
        assert_int_equal(ka_submission_parse(rows[i][0], strlen(rows[i][0]), &read, &err), -EINVAL);
        if (!strstr(err.msg, rows[i][1]))
            fail_msg("%s: %s", rows[i][0], err.msg);
        assert_int_equal(read.priority, 42);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(request__with_everything__is_read),
        cmocka_unit_test(request__with_source_alone__has_defaults),
        cmocka_unit_test(request__that_is_wrong__is_refused_by_name),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
