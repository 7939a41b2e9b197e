/* Claims on files that several processes share. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "agent/cli/claim.h"
#include "base/files.h"

static int set_up(void **state)
{
    char *base = ka_strdup("/tmp/ka-claim-XXXXXX");
    *state = base;
    return mkdtemp(base) ? 0 : -1;
}

static int tear_down(void **state)
{
    ka_rmtree(*state, NULL);
    free(*state);
    return 0;
}

static void claim__of_another__is_told_until_it_is_released(void **state)
{
    KA_AUTO_FREE char *folder = ka_path_join(*state, "claims");
    struct ka_err err;
    int first = -1, second = -1, other = -1;
    assert_int_equal(ka_claim_take(folder, "/a/b.py", false, &first, &err), 0);
    assert_int_equal(ka_claim_take(folder, "/a/b.py", false, &second, &err), -EBUSY);
    assert_non_null(strstr(err.msg, "another process works on /a/b.py"));
    assert_int_equal(second, -1);
    assert_int_equal(ka_claim_take(folder, "/a/c.py", false, &other, &err), 0);
    ka_claim_release(folder, "/a/b.py", first);
    assert_int_equal(ka_claim_take(folder, "/a/b.py", true, &second, &err), 0);
    ka_claim_release(folder, "/a/b.py", second);
    ka_claim_release(folder, "/a/c.py", other);
    ka_claim_release(folder, "/a/c.py", -1);
    assert_int_equal(rmdir(folder), 0); /* nothing stays */
}

static void claim__in_a_folder_that_cannot_be__is_an_error(void **state)
{
    KA_AUTO_FREE char *file = ka_path_join(*state, "file"), *folder = ka_path_join(file, "claims");
    struct ka_err err;
    int fd = -1;
    assert_int_equal(ka_file_put(file, "x", 1, &err), 0);
    assert_int_equal(ka_claim_take(folder, "/a", false, &fd, &err), -ENOTDIR);
    assert_int_equal(fd, -1);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(claim__of_another__is_told_until_it_is_released),
        TEST(claim__in_a_folder_that_cannot_be__is_an_error),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
