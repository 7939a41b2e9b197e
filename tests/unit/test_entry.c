/* Entries of the service's queue: values and their documents. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "agent/serve/entry.h"

static struct ka_entry *made(void)
{
    json_auto_t *options = json_pack("{s:s}", "topk", "2");
    return ka_entry_new("a.py", "x = 1", options, 3);
}

static void spent_on(struct ka_entry *entry, const char *device)
{
    json_auto_t *result =
        json_pack("{s:s, s:{s:i, s:i, s:f}, s:[{s:f, s:f, s:s}, {s:f, s:f, s:s}, {s:f, s:f, s:s}]}", "device",
                  device, "llm", "tokens_in", 100, "tokens_out", 20, "cost", 0.5, "children", "start", 1.0,
                  "end", 3.0, "status", "ok", "start", 2.0, "end", 2.5, "status", "died", "start", 0.0, "end",
                  8.0, "status", "timeout");
    assert_non_null(result);
    ka_entry_spent(entry, result);
}

static void entry__spent__is_what_the_result_says(void **state)
{
    struct ka_entry *entry = made();
    (void)state;
    spent_on(entry, "cuda");
    assert_int_equal((int)entry->tokens_in, 100);
    assert_int_equal((int)entry->tokens_out, 20);
    assert_true(entry->cost == 0.5);
    assert_true(entry->gpu_seconds == 10.5);
    assert_int_equal(entry->child_failures, 2);
    spent_on(entry, "cpu");
    assert_true(entry->gpu_seconds == 0);
    assert_int_equal(entry->child_failures, 2);
    ka_entry_free(entry);
}

static void entry__written_and_read__is_the_same(void **state)
{
    struct ka_entry *entry = made();
    (void)state;
    spent_on(entry, "cuda");
    entry->starts = 4;
    entry->gpu = ka_strdup("1");
    entry->submitted = 1.5;
    json_auto_t *doc = ka_entry_json(entry);
    struct ka_entry *read = ka_entry_read(entry->id, doc);
    assert_non_null(read);
    json_auto_t *again = ka_entry_json(read);
    assert_true(json_equal(doc, again));
    ka_entry_free(entry);
    ka_entry_free(read);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(entry__spent__is_what_the_result_says),
        cmocka_unit_test(entry__written_and_read__is_the_same),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
