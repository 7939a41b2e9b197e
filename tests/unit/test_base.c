/* Buffers that remember a failure, and numbers from a counter. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <errno.h>

#include "base/base.h"
#include "base/files.h"

static void buf__after_a_failed_add__takes_nothing_until_it_is_cleared(void **state)
{
    (void)state;
    struct ka_buf text = {.max = 5};
    assert_int_equal(ka_buf_puts(&text, "abc"), 0);
    assert_int_equal(ka_buf_puts(&text, "def"), -EFBIG);
    assert_int_equal(ka_buf_puts(&text, "d"), -EFBIG);
    assert_int_equal(ka_buf_printf(&text, "%d", 1), -EFBIG);
    assert_string_equal(ka_buf_str(&text), "abc");
    assert_int_equal(text.failed, -EFBIG);
    ka_buf_clear(&text);
    assert_int_equal(ka_buf_puts(&text, "defgh"), 0);
    assert_string_equal(ka_buf_str(&text), "defgh");
    ka_buf_free(&text);
    assert_int_equal(text.max, 5);
    assert_int_equal(text.failed, 0);
}

static void random__counter__gives_the_published_numbers(void **state)
{
    (void)state;
    uint64_t counter = 1234567;
    assert_true(ka_random_next(&counter) == 6457827717110365317u);
    assert_true(ka_random_next(&counter) == 3203168211198807973u);
    assert_true(ka_random_next(&counter) == 9817491932198370423u);
    counter = 1234567;
    assert_true(ka_mix64(counter) == ka_random_next(&counter));
}

/* Like a process that is being killed: files appear for some milliseconds more. */
static void *keep_writing(void *folder)
{
    char path[96];
    for (int i = 0; i < 2000; i++) {
        snprintf(path, sizeof(path), "%s/%d", (const char *)folder, i);
        int fd = open(path, O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
        if (fd >= 0)
            close(fd);
    }
    return NULL;
}

static void files__removing_a_folder_that_is_still_written__leaves_nothing(void **state)
{
    (void)state;
    for (int i = 0; i < 20; i++) {
        char folder[] = "/tmp/ka-base-XXXXXX";
        pthread_t writer;
        assert_non_null(mkdtemp(folder));
        assert_int_equal(pthread_create(&writer, NULL, keep_writing, folder), 0);
        usleep(500);
        assert_int_equal(ka_rmtree(folder, NULL), 0);
        pthread_join(writer, NULL);
        assert_int_not_equal(access(folder, F_OK), 0);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(files__removing_a_folder_that_is_still_written__leaves_nothing),
        cmocka_unit_test(buf__after_a_failed_add__takes_nothing_until_it_is_cleared),
        cmocka_unit_test(random__counter__gives_the_published_numbers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
