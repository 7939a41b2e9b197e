/* Lessons kept across runs: found by similarity and kind, dropped when they do not help, and never anybody's
 * trouble. */
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <sqlite3.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cmocka.h>

#include "base/each.h"
#include "base/files.h"
#include "rag/lessons.h"

static char folder[64], *path;
static struct ka_err err;

static int make_place(void **state)
{
    (void)state;
    strcpy(folder, "/tmp/ka-lessons-XXXXXX");
    path = mkdtemp(folder) ? ka_path_join(folder, "of/a/user/lessons.db") : NULL;
    return path ? 0 : -1;
}

static int remove_place(void **state)
{
    (void)state;
    ka_rmtree(folder, NULL);
    free(path);
    return 0;
}

/* The unit vector whose similarity to axis 0 is `cosine`. */
static const float *towards(float cosine)
{
    static float vector[KA_EMBED_DIM];
    vector[0] = cosine;
    vector[1] = __builtin_sqrtf(1 - cosine * cosine);
    return vector;
}

static json_t *lesson(const char *kind, const char *finding, const char *change)
{
    return json_pack("{s:s, s:s, s:s, s:s, s:s, s:s, s:s, s:s}", "kind", kind, "finding", finding, "same",
                     finding, "change", change, "words", "tl.dot", "device", "cpu", "audience", "them", "run",
                     "run-1");
}

static int learn(const char *kind, const char *finding, const char *change, float similarity)
{
    json_auto_t *taught = json_pack("{s:[o]}", "learned", lesson(kind, finding, change));
    return ka_lessons_keep(path, towards(similarity), taught, &err);
}

static void end_of(int64_t id, const char *end)
{
    json_auto_t *taught = json_pack("{s:[{s:I, s:s}]}", "told", "id", (json_int_t)id, "end", end);
    assert_int_equal(ka_lessons_keep(path, towards(1), taught, &err), 0);
}

static json_t *list(void)
{
    json_t *all = NULL;
    assert_int_equal(ka_lessons_list(path, &all, &err), 0);
    return all;
}

static json_t *near(const char *device, const char *audience)
{
    const struct ka_lessons_query query = {towards(1), device, audience};
    json_t *found = NULL;
    assert_int_equal(ka_lessons_near(path, &query, &found, &err), 0);
    return found;
}

/* "id:finding ..." */
static void assert_is(json_t *rows, const char *want)
{
    KA_AUTO_BUF struct ka_buf told = {0};
    KA_EACH(rows, i, row)
        ka_buf_printf(&told, "%s%lld:%s", i ? " " : "",
                      (long long)json_integer_value(json_object_get(row, "id")),
                      json_string_value(json_object_get(row, "finding")));
    assert_string_equal(ka_buf_str(&told), want);
    json_decref(rows);
}

static void lessons__nearest_of_each_kind__are_found(void **state)
{
    (void)state;
    learn("syntax", "far", "+a\n", 0.1F);
    learn("syntax", "nearer", "+a\n", 0.5F);
    learn("raised", "other", "+a\n", 0.4F);
    learn("syntax", "near", "+a\n", 0.9F);
    learn("syntax", "almost", "+a\n", 0.8F);
    json_t *found = near("cpu", "them");
    json_t *first = json_array_get(found, 0);
    assert_true(json_number_value(json_object_get(first, "similarity")) > 0.89);
    assert_string_equal(json_string_value(json_object_get(first, "change")), "+a\n");
    assert_is(found, "4:near 5:almost 2:nearer 3:other");
}

static void lessons__of_another_device_or_audience__are_not_found(void **state)
{
    (void)state;
    learn("syntax", "a", "+a\n", 1);
    assert_is(near("cuda", "them"), "");
    assert_is(near("cpu", "others"), "");
    assert_is(near("cpu", "them"), "1:a");
}

static void lessons__same_finding_with_other_numbers__is_one(void **state)
{
    (void)state;
    learn("raised", "error 0.98e-3 at 12", "+a\n", 1);
    learn("raised", "error 1.5 at 7", "+b\n", 1);
    assert_is(list(), "1:error 0.98e-3 at 12");
    learn("syntax", "error 1.5 at 7", "+b\n", 1);
    learn("raised", "error 1.5 in 7", "+b\n", 1);
    learn("raised", "error in x1", "+b\n", 1);
    learn("raised", "error in x2", "+b\n", 1);
    json_auto_t *all = list();
    assert_int_equal(json_array_size(all), 5);
    end_of(1, "vain"); /* another change may do better */
    learn("raised", "error 2 at 8", "+c\n", 1);
    json_auto_t *later = list();
    assert_string_equal(json_string_value(json_object_get(json_array_get(later, 0), "change")), "+c\n");
    assert_int_equal(json_integer_value(json_object_get(json_array_get(later, 0), "vain")), 0);
}

static void lessons__in_vain_too_often__are_dropped(void **state)
{
    (void)state;
    learn("syntax", "a", "+a\n", 1);
    end_of(1, "vain");
    end_of(1, "vain");
    end_of(1, "helped");
    end_of(1, "vain");
    end_of(1, "shown");
    end_of(1, "vain");
    json_auto_t *all = list();
    json_t *one = json_array_get(all, 0);
    assert_int_equal(json_integer_value(json_object_get(one, "shown")), 6);
    assert_int_equal(json_integer_value(json_object_get(one, "helped")), 1);
    assert_int_equal(json_integer_value(json_object_get(one, "vain")), 2);
    end_of(1, "vain");
    assert_is(list(), "");
    end_of(1, "vain"); /* another run had been shown it */
    learn("syntax", "a", "+a\n", 1);
    assert_is(list(), "2:a"); /* no number is used again */
}

static void lessons__beyond_their_number__the_longest_unused_goes(void **state)
{
    (void)state;
    char finding[3] = "aa";
    for (int i = 0; i < KA_LESSONS_MAX; i++) {
        finding[0] = (char)('a' + i / 20);
        finding[1] = (char)('a' + i % 20);
        learn("syntax", finding, "+a\n", 1);
    }
    end_of(1, "helped");
    learn("syntax", "one more", "+a\n", 1);
    json_auto_t *all = list();
    assert_int_equal(json_array_size(all), KA_LESSONS_MAX);
    assert_int_equal(json_integer_value(json_object_get(json_array_get(all, 0), "id")), 1);
    assert_int_equal(json_integer_value(json_object_get(json_array_get(all, 1), "id")), 3);
}

static void lessons__forgotten__are_gone_from_the_file_too(void **state)
{
    (void)state;
    size_t gone = 0;
    assert_int_equal(ka_lessons_forget(path, 1, &gone, &err), -ENOENT);
    learn("syntax", "a_very_secret_name", "+a\n", 1);
    learn("syntax", "b", "+a\n", 1);
    learn("syntax", "c", "+a\n", 1);
    assert_int_equal(ka_lessons_forget(path, 7, &gone, &err), -ENOENT);
    assert_non_null(strstr(err.msg, "store lessons"));
    assert_int_equal(ka_lessons_forget(path, 1, &gone, &err), 0);
    assert_int_equal(gone, 1);
    assert_is(list(), "2:b 3:c");
    KA_AUTO_BUF struct ka_buf bytes = {0};
    assert_int_equal(ka_file_read(path, 1 << 20, &bytes, NULL), 0);
    assert_null(memmem(bytes.data, bytes.len, "a_very_secret", 13));
    assert_int_equal(ka_lessons_forget(path, 0, &gone, &err), 0);
    assert_int_equal(gone, 2);
    assert_is(list(), "");
}

static void lessons__file__is_its_users_alone(void **state)
{
    (void)state;
    struct stat st;
    json_t *all = NULL;
    assert_int_equal(ka_lessons_list(path, &all, &err), -ENOENT);
    assert_int_not_equal(access(path, F_OK), 0); /* looking makes none */
    learn("syntax", "a", "+a\n", 1);
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(st.st_mode & 0777, 0600);
}

static void write_text(const char *text)
{
    learn("syntax", "a", "+a\n", 1);
    assert_int_equal(ka_file_write(path, text, strlen(text), &err), 0);
}

static void lessons__damaged_file__is_named_and_left_alone(void **state)
{
    (void)state;
    const struct ka_lessons_query query = {towards(1), "cpu", "them"};
    json_t *found = NULL;
    static const char text[] = "this is no database, and longer than the header of one has to be .......... "
                               "....................................................................";
    write_text(text);
    assert_int_equal(ka_lessons_near(path, &query, &found, &err), -EILSEQ);
    assert_non_null(strstr(err.msg, "remove it"));
    assert_int_equal(learn("syntax", "a", "+a\n", 1), -EILSEQ);
    KA_AUTO_BUF struct ka_buf bytes = {0};
    assert_int_equal(ka_file_read(path, 1 << 20, &bytes, NULL), 0);
    assert_string_equal(ka_buf_str(&bytes), text);
}

static void run_in(const char *sql)
{
    sqlite3 *db = NULL;
    assert_int_equal(sqlite3_open(path, &db), SQLITE_OK);
    assert_int_equal(sqlite3_exec(db, sql, NULL, NULL, NULL), SQLITE_OK);
    sqlite3_close(db);
}

static void lessons__other_databases__are_refused(void **state)
{
    (void)state;
    write_text("");
    assert_int_equal(learn("syntax", "a", "+a\n", 1), 0); /* an empty file is none */
    run_in("PRAGMA user_version = 9");
    assert_int_equal(learn("syntax", "b", "+a\n", 1), -EPROTO);
    run_in("PRAGMA user_version = 1; PRAGMA application_id = 5");
    assert_int_equal(learn("syntax", "b", "+a\n", 1), -EILSEQ);
}

static void lessons__rows_that_are_none__are_passed_over(void **state)
{
    (void)state;
    learn("syntax", "a", "+a\n", 1);
    learn("syntax", "b", "+a\n", 1);
    learn("syntax", "c", "+a\n", 1);
    learn("syntax", "d", "+a\n", 1);
    run_in("UPDATE lessons SET vector = x'00ff' WHERE id = 1;"
           "UPDATE lessons SET finding = CAST(x'ff41' AS TEXT) WHERE id = 2;"
           "UPDATE lessons SET change = hex(zeroblob(100000)) WHERE id = 3");
    assert_is(near("cpu", "them"), "4:d");
}

static void lessons__two_processes_at_once__both_keep_theirs(void **state)
{
    (void)state;
    pid_t children[2];
    for (int k = 0; k < 2; k++) {
        children[k] = fork();
        if (children[k] == 0) {
            char finding[3] = "pa";
            int rc = 0;
            for (int i = 0; i < 20 && rc == 0; i++) {
                finding[0] = (char)('p' + k);
                finding[1] = (char)('a' + i);
                rc = learn("syntax", finding, "+a\n", 1);
            }
            _exit(rc ? 1 : 0);
        }
    }
    for (int k = 0; k < 2; k++) {
        int status = 1;
        assert_int_equal(waitpid(children[k], &status, 0), children[k]);
        assert_int_equal(status, 0);
    }
    json_auto_t *all = list();
    assert_int_equal(json_array_size(all), 40);
}

static void lessons__that_are_too_long__keep_nothing_of_their_run(void **state)
{
    (void)state;
    char *big = ka_calloc(8001, 1);
    memset(big, 'x', 8000);
    json_auto_t *taught =
        json_pack("{s:[o, o]}", "learned", lesson("syntax", "a", "+a\n"), lesson("syntax", "b", big));
    assert_int_equal(ka_lessons_keep(path, towards(1), taught, &err), -EINVAL);
    free(big);
    json_t *all = NULL;
    assert_int_equal(ka_lessons_list(path, &all, &err), -ENOENT);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, make_place, remove_place)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(lessons__nearest_of_each_kind__are_found),
        TEST(lessons__of_another_device_or_audience__are_not_found),
        TEST(lessons__same_finding_with_other_numbers__is_one),
        TEST(lessons__in_vain_too_often__are_dropped),
        TEST(lessons__beyond_their_number__the_longest_unused_goes),
        TEST(lessons__forgotten__are_gone_from_the_file_too),
        TEST(lessons__file__is_its_users_alone),
        TEST(lessons__damaged_file__is_named_and_left_alone),
        TEST(lessons__other_databases__are_refused),
        TEST(lessons__rows_that_are_none__are_passed_over),
        TEST(lessons__two_processes_at_once__both_keep_theirs),
        TEST(lessons__that_are_too_long__keep_nothing_of_their_run),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
