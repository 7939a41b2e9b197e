/* Which interpreter is taken, of folders with programs that are none; the answers are made up. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "agent/app/python.h"
#include "base/files.h"

#define FULL "{\"python\":\"3.12.1\",\"torch\":\"2.11.0\",\"triton\":\"3.6.0\",\"numpy\":\"2.0\"}"
#define BARE "{\"python\":\"3.12.1\",\"torch\":null,\"triton\":null,\"numpy\":\"2.0\"}"

static char root[64];
static struct ka_pythons pythons;
static struct {
    char place[128];
    const char *answer; /* NULL: it does not run */
    unsigned times;
} answers[16];
static size_t answer_count;
static char texts[256][256]; /* of one test */
static size_t text_count;

static int set_up(void **state)
{
    (void)state;
    strcpy(root, "/tmp/ka-python-XXXXXX");
    answer_count = text_count = 0;
    memset(answers, 0, sizeof(answers));
    return mkdtemp(root) ? 0 : -1;
}

static int tear_down(void **state)
{
    (void)state;
    ka_pythons_free(&pythons);
    return ka_rmtree(root, NULL);
}

static const char *at(const char *name)
{
    char *text = texts[text_count++];
    assert_true(text_count <= KA_COUNT(texts));
    snprintf(text, sizeof(texts[0]), "%s/%s", root, name);
    return text;
}

static void put(const char *name, const char *content)
{
    char *folder = strdup(at(name));
    *strrchr(folder, '/') = '\0';
    assert_int_equal(ka_mkdirs(folder, NULL), 0);
    assert_int_equal(ka_file_put(at(name), content, strlen(content), NULL), 0);
    assert_int_equal(chmod(at(name), 0755), 0);
    free(folder);
}

/* A program at this name, and what it says when it is asked. */
static void put_python(const char *name, const char *answer)
{
    put(name, "\x7f"
              "ELF");
    snprintf(answers[answer_count].place, sizeof(answers[0].place), "%s", at(name));
    answers[answer_count++].answer = answer;
}

static int ask(void *arg, const char *place, json_t **answer, struct ka_err *err)
{
    assert_ptr_equal(arg, answers);
    for (size_t i = 0; i < answer_count; i++) {
        if (strcmp(answers[i].place, place) != 0)
            continue;
        answers[i].times++;
        if (!answers[i].answer)
            return ka_fail(err, -EIO, "does not answer");
        *answer = json_loads(answers[i].answer, 0, NULL);
        assert_non_null(*answer);
        return 0;
    }
    if (ka_starts_with(place, root))
        fail_msg("%s is not to be asked", place);
    return ka_fail(err, -EIO, "of this machine");
}

static void choose(const struct ka_python_where *where, bool all)
{
    ka_pythons_free(&pythons);
    ka_pythons_list(where, &pythons);
    ka_pythons_choose(&pythons, all, ask, answers);
}

static const struct ka_python *chosen(void)
{
    return pythons.chosen < pythons.count ? &pythons.list[pythons.chosen] : NULL;
}

static const struct ka_python *found(const char *name)
{
    for (size_t i = 0; i < pythons.count; i++)
        if (strcmp(pythons.list[i].place, at(name)) == 0)
            return &pythons.list[i];
    return NULL;
}

static void assert_chosen(const char *name, const char *source)
{
    assert_non_null(chosen());
    assert_string_equal(chosen()->path, at(name));
    assert_string_equal(chosen()->source, source);
}

static const char *complaint(void)
{
    static struct ka_err err;
    ka_pythons_complain(&pythons, &err);
    return err.msg;
}

static struct ka_python_where everywhere(void)
{
    static char path[256];
    snprintf(path, sizeof(path), "%s/one:%s/two", root, root);
    return (struct ka_python_where){
        .virtual_env = at("venv"), .conda_prefix = at("conda"), .path = path, .share = at("share")};
}

static void python__several_that_fit__are_taken_in_order(void **state)
{
    (void)state;
    static const struct {
        const char *name, *source;
    } order[] = {{"venv/bin/python", "$VIRTUAL_ENV"},
                 {"conda/bin/python", "$CONDA_PREFIX"},
                 {"one/python3", "PATH"},
                 {"one/python", "PATH"},
                 {"two/python3", "PATH"},
                 {"share/.venv/bin/python", "the .venv of this installation"}};
    for (size_t i = 0; i < KA_COUNT(order); i++)
        put_python(order[i].name, FULL);
    for (size_t i = 0; i < KA_COUNT(order); i++) {
        struct ka_python_where where = everywhere();
        choose(&where, false);
        assert_chosen(order[i].name, order[i].source);
        assert_int_equal(answers[i].times, 1);
        if (i + 1 < KA_COUNT(order))
            assert_int_equal(answers[i + 1].times, 0); /* nobody is asked in vain */
        answers[i].answer = i % 2 ? BARE : NULL;
    }
}

static void python__all__are_asked_though_the_first_fits(void **state)
{
    (void)state;
    struct ka_python_where where = everywhere();
    put_python("venv/bin/python", FULL);
    put_python("conda/bin/python", FULL);
    put_python("two/python3", BARE);
    choose(&where, true);
    assert_chosen("venv/bin/python", "$VIRTUAL_ENV");
    assert_string_equal(found("two/python3")->lacks, "torch, Triton");
}

static void python__one_interpreter_by_two_names__is_asked_once(void **state)
{
    (void)state;
    struct ka_python_where where = everywhere();
    put_python("two/python3", FULL);
    assert_int_equal(ka_mkdirs(at("one"), NULL), 0);
    assert_int_equal(symlink("../two/python3", at("one/python3")), 0);
    assert_int_equal(symlink("python3", at("two/python")), 0);
    strcpy(answers[0].place, at("one/python3"));
    choose(&where, true);
    assert_chosen("one/python3", "PATH");
    assert_int_equal(answers[0].times, 1);
    assert_null(found("two/python3"));
    assert_null(found("two/python"));
}

static void python__environment_of_another__is_not_the_same(void **state)
{
    (void)state;
    struct ka_python_where where = everywhere();
    put_python("two/python3", BARE);
    put_python("venv/bin/python", FULL);
    put("venv/pyvenv.cfg", "home = two\n");
    assert_int_equal(unlink(at("venv/bin/python")), 0);
    assert_int_equal(symlink("../../two/python3", at("venv/bin/python")), 0);
    choose(&where, true);
    assert_chosen("venv/bin/python", "$VIRTUAL_ENV"); /* by its own name, not where the link leads */
    assert_non_null(found("two/python3"));
}

static void python__script_that_starts_another__is_replaced_by_that(void **state)
{
    (void)state;
    char answer[300];
    struct ka_python_where where = everywhere();
    put_python("real/bin/python3", FULL);
    snprintf(answer, sizeof(answer),
             "{\"executable\":\"%s\",\"python\":\"3.12.1\",\"torch\":\"2.11.0\",\"triton\":\"3.6.0\","
             "\"numpy\":\"2.0\"}",
             at("real/bin/python3"));
    put_python("one/python3", answer);
    put_python("one/python", answer);
    put("one/python3", "#!/bin/sh\n");
    put("one/python", "#!/bin/sh\n");
    choose(&where, true);
    assert_chosen("real/bin/python3", "PATH");
    assert_non_null(found("one/python3"));
    assert_null(found("one/python")); /* is the same */
}

static void python__named__is_taken_and_no_other_is_asked(void **state)
{
    (void)state;
    struct ka_python_where where = everywhere();
    put_python("mine/python", "{\"executable\":\"/elsewhere\",\"python\":\"3.12.1\",\"torch\":\"2.11.0\","
                              "\"triton\":\"3.6.0\",\"numpy\":\"2.0\"}");
    put_python("venv/bin/python", FULL);
    where.wanted = at("mine/python");
    choose(&where, false);
    assert_chosen("mine/python", "--python");
    assert_int_equal(answers[1].times, 0);
}

static void python__name_alone__is_looked_for_on_the_path(void **state)
{
    (void)state;
    struct ka_python_where where = everywhere();
    put_python("two/python3.12", FULL);
    where.wanted = "python3.12";
    choose(&where, false);
    assert_chosen("two/python3.12", "--python");
}

static void python__named_without_torch__is_refused_and_another_suggested(void **state)
{
    (void)state;
    struct ka_python_where where = everywhere();
    put_python("mine/python",
               "{\"python\":\"3.12.1\",\"torch\":null,\"triton\":\"3.6.0\",\"numpy\":\"2.0\"}");
    put_python("one/python3", FULL);
    put_python("two/python3", FULL);
    where.wanted = at("mine/python");
    choose(&where, false);
    assert_null(chosen());
    assert_non_null(strstr(complaint(), at("mine/python")));
    assert_non_null(strstr(complaint(), "it lacks torch; "));
    assert_non_null(strstr(complaint(), at("one/python3")));
    assert_int_equal(answers[2].times, 0); /* one suggestion is enough */
    answers[1].answer = answers[2].answer = BARE;
    choose(&where, false);
    assert_non_null(strstr(complaint(), "no other was found"));
}

static void python__named_that_is_not_there__says_so(void **state)
{
    (void)state;
    struct ka_python_where where = everywhere();
    where.wanted = at("gone/python");
    choose(&where, false);
    assert_null(chosen());
    assert_non_null(strstr(complaint(), "gone/python: No such file or directory"));
}

static void python__none__lists_what_each_lacks(void **state)
{
    (void)state;
    struct ka_python_where where = everywhere();
    put_python("venv/bin/python", NULL);
    put_python("one/python3", BARE);
    put_python("two/python3",
               "{\"python\":\"3.9.2\",\"torch\":\"2.1.0+cu118\",\"triton\":\"3.2.0\",\"numpy\":null}");
    choose(&where, false);
    assert_null(chosen());
    assert_non_null(strstr(complaint(), "venv/bin/python ($VIRTUAL_ENV): does not answer\n"));
    assert_non_null(strstr(complaint(), "one/python3 (PATH): lacks torch, Triton\n"));
    assert_non_null(strstr(complaint(),
                           "two/python3 (PATH): lacks Python 3.11 (it is 3.9.2), torch 2.6 (it is "
                           "2.1.0+cu118), numpy"));
    assert_non_null(strstr(complaint(), "--python"));
}

static void python__long_list__is_cut_and_counted(void **state)
{
    (void)state;
    char path[2000] = "", name[32];
    for (int i = 0; i < 15; i++) {
        snprintf(name, sizeof(name), "folder-number-%d", i);
        strcat(strcat(path, i ? ":" : ""), at(name));
        strcat(name, "/python3");
        put_python(name, BARE);
    }
    struct ka_python_where where = {.path = path};
    choose(&where, false);
    assert_non_null(strstr(complaint(), " more: kernel-agent doctor lists them"));
}

static void python__environment_that_cannot_be_run__does_not_stop_the_search(void **state)
{
    (void)state;
    struct ka_python_where where = everywhere();
    assert_int_equal(ka_mkdirs(at("share/.venv/bin"), NULL), 0);
    assert_int_equal(symlink("/nowhere/python", at("share/.venv/bin/python")), 0);
    put("conda/bin/python", "text");
    assert_int_equal(chmod(at("conda/bin/python"), 0644), 0);
    put_python("two/python3", FULL);
    choose(&where, true);
    assert_chosen("two/python3", "PATH");
    assert_non_null(strstr(found("share/.venv/bin/python")->lacks, "this user cannot run it"));
    assert_non_null(strstr(found("conda/bin/python")->lacks, "this user cannot run it"));
}

static void python__environment_in_a_folder_of_others__does_not_stop_the_search(void **state)
{
    (void)state;
    struct ka_python_where where = everywhere();
    bool root_user = geteuid() == 0;
    put_python("venv/bin/python", FULL);
    put_python("two/python3", FULL);
    assert_int_equal(chmod(root, 0755), 0);
    assert_int_equal(chmod(at("venv"), 0), 0);
    if (root_user)
        assert_int_equal(setresuid(65534, 65534, 0), 0);
    ka_pythons_list(&where, &pythons);
    ka_pythons_choose(&pythons, true, ask, answers);
    if (root_user)
        assert_int_equal(setresuid(0, 0, 0), 0);
    assert_int_equal(chmod(at("venv"), 0755), 0);
    assert_chosen("two/python3", "PATH");
    assert_int_equal(answers[0].times, 0);
    assert_non_null(found("venv/bin/python"));
    assert_string_equal(found("venv/bin/python")->lacks, "this user cannot run it (Permission denied)");
}

static void python__relative_folder_on_the_path__is_left_out(void **state)
{
    (void)state;
    struct ka_python_where where = {.path = ".::bin"};
    char before[4096];
    assert_non_null(getcwd(before, sizeof(before)));
    put("python3", "x");
    put("bin/python3", "x");
    assert_int_equal(chdir(root), 0);
    choose(&where, false); /* fails if one of them is asked */
    assert_int_equal(chdir(before), 0);
    for (size_t i = 0; i < pythons.count; i++)
        assert_string_equal(pythons.list[i].source, "the system's");
}

static void python__versions__are_compared_as_numbers(void **state)
{
    (void)state;
    static const struct {
        const char *versions, *lacks;
    } cases[] = {
        {FULL, ""},
        {"{\"python\":\"3.11.0\",\"torch\":\"2.6.0+cu124\",\"triton\":\"3.2.0\",\"numpy\":\"1.26\"}", ""},
        {"{\"python\":\"4.0\",\"torch\":\"3.0\",\"triton\":\"10.1\",\"numpy\":\"unknown\"}", ""},
        {"{\"python\":\"3.11.0\",\"torch\":\"unknown\",\"triton\":\"unknown\",\"numpy\":\"1\"}", ""},
        {"{\"python\":\"3.11.0\",\"torch\":\"2.5.1\",\"triton\":\"3.10.0\",\"numpy\":\"1\"}",
         "torch 2.6 (it is 2.5.1)"},
        {"{\"python\":\"3.11.0\",\"torch\":\"2.6\",\"triton\":null,\"numpy\":\"1\",\"user\":[3,\"triton\"]}",
         "Triton (only pip install --user has it, which the jail does not read)"},
        {"{\"python\":7}", "Python, torch, Triton, numpy"},
    };
    for (size_t i = 0; i < KA_COUNT(cases); i++) {
        struct ka_buf lacks = {0};
        json_t *versions = json_loads(cases[i].versions, 0, NULL);
        assert_int_equal(ka_python_fits(versions, &lacks), !*cases[i].lacks);
        assert_string_equal(ka_buf_str(&lacks), cases[i].lacks);
        json_decref(versions);
        ka_buf_free(&lacks);
    }
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(python__several_that_fit__are_taken_in_order),
        TEST(python__all__are_asked_though_the_first_fits),
        TEST(python__one_interpreter_by_two_names__is_asked_once),
        TEST(python__environment_of_another__is_not_the_same),
        TEST(python__script_that_starts_another__is_replaced_by_that),
        TEST(python__named__is_taken_and_no_other_is_asked),
        TEST(python__name_alone__is_looked_for_on_the_path),
        TEST(python__named_without_torch__is_refused_and_another_suggested),
        TEST(python__named_that_is_not_there__says_so),
        TEST(python__none__lists_what_each_lacks),
        TEST(python__long_list__is_cut_and_counted),
        TEST(python__environment_that_cannot_be_run__does_not_stop_the_search),
        TEST(python__environment_in_a_folder_of_others__does_not_stop_the_search),
        TEST(python__relative_folder_on_the_path__is_left_out),
        TEST(python__versions__are_compared_as_numbers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
