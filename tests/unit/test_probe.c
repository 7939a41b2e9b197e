/* A program that is asked something: its answer, its end, and what it gets to see. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <errno.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

#include "agent/io/probe.h"

static struct ka_buf out;
static struct ka_err err;

static int clean(void **state)
{
    (void)state;
    ka_buf_free(&out);
    out.max = 0;
    return 0;
}

static int run(const char *script, unsigned limit_ms)
{
    static const char *const env[] = {"ONE=1", NULL};
    const char *argv[] = {"/bin/sh", "-c", script, NULL};
    return ka_probe_run(argv, env, limit_ms, &out, &err);
}

static void probe__answer__is_both_outputs_and_the_code(void **state)
{
    (void)state;
    assert_int_equal(run("echo a; echo b >&2; exit 3", 60000), 3);
    assert_string_equal(ka_buf_str(&out), "a\nb\n");
    assert_int_equal(run("kill -9 $$", 60000), 128 + SIGKILL);
    assert_int_equal(run("kill -PIPE $$", 60000), 128 + SIGPIPE); /* not ignored there */
}

static void probe__environment__is_what_was_given(void **state)
{
    (void)state;
    assert_int_equal(run("echo $ONE; echo $HOME$OPENAI_API_KEY; read line || echo no input", 60000), 0);
    assert_string_equal(ka_buf_str(&out), "1\n\nno input\n");
}

static void probe__long_answer__is_cut_and_the_program_still_ends(void **state)
{
    (void)state;
    out.max = 5000;
    assert_int_equal(run("i=0; while [ $i -lt 30000 ]; do echo 0123456789; i=$((i+1)); done", 60000), 0);
    assert_true(out.len > 0 && out.len <= 5000);
}

static void probe__no_answer_in_time__is_killed_with_its_children(void **state)
{
    (void)state;
    int ends[2];
    char late[8];
    assert_int_equal(pipe(ends), 0);
    assert_int_equal(dup2(ends[1], 9), 9); /* which they inherit */
    close(ends[1]);
    assert_int_equal(run("(sleep 2; echo late >&9) & sleep 1000", 200), -ETIMEDOUT);
    assert_non_null(strstr(err.msg, "does not answer"));
    close(9);
    assert_int_equal(read(ends[0], late, sizeof(late)), 0); /* its end: nobody holds it, nobody wrote */
    close(ends[0]);
    assert_int_equal(run("exec >/dev/null 2>&1; sleep 1000", 200), -ETIMEDOUT); /* closes and stays */
}

static void probe__program_that_is_not_there__is_an_error(void **state)
{
    (void)state;
    const char *argv[] = {"/nowhere/python", NULL}, *env[] = {NULL};
    assert_int_equal(ka_probe_run(argv, env, 60000, &out, &err), -ENOENT);
    assert_non_null(strstr(err.msg, "cannot be run"));
}

#define TEST(name) cmocka_unit_test_teardown(name, clean)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(probe__answer__is_both_outputs_and_the_code),
        TEST(probe__environment__is_what_was_given),
        TEST(probe__long_answer__is_cut_and_the_program_still_ends),
        TEST(probe__no_answer_in_time__is_killed_with_its_children),
        TEST(probe__program_that_is_not_there__is_an_error),
    };
    signal(SIGPIPE, SIG_IGN); /* as in the program */
    return cmocka_run_group_tests(tests, NULL, NULL);
}
