/* Where a service is put among control groups, with folders in the place of /proc and /sys. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "agent/io/group.h"
#include "base/files.h"

#define UNIT "sys/fs/cgroup/system.slice/kernel-agent.service"

static char root[64];

static void put(const char *name, const char *text)
{
    char *path = ka_path_join(root, name), *folder = ka_path_parent(path);
    assert_int_equal(ka_mkdirs(folder, NULL), 0);
    assert_int_equal(ka_file_put(path, text, strlen(text), NULL), 0);
    free(folder);
    free(path);
}

/* What was written to the group below; "" for nothing. free() it. */
static char *below(void)
{
    struct ka_buf text = {0};
    char *path = ka_path_join(root, UNIT "/service/cgroup.procs");
    assert_int_equal(ka_file_read(path, 64, &text, NULL), 0);
    free(path);
    char *copy = strdup(ka_buf_str(&text));
    ka_buf_free(&text);
    return copy;
}

static void begun_by_systemd(bool it)
{
    char pid[16];
    snprintf(pid, sizeof(pid), "%d", (int)getpid() + !it);
    setenv("SYSTEMD_EXEC_PID", pid, 1);
}

static int set_up(void **state)
{
    (void)state;
    strcpy(root, "/tmp/ka-group-XXXXXX");
    assert_non_null(mkdtemp(root));
    put("proc/self/cgroup", "4:memory:/elsewhere\n0::/system.slice/kernel-agent.service\n");
    put(UNIT "/cgroup.procs", "");
    put(UNIT "/cgroup.subtree_control", "");
    put(UNIT "/service/cgroup.procs", "");
    begun_by_systemd(true);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    unsetenv("SYSTEMD_EXEC_PID");
    return ka_rmtree(root, NULL);
}

static void expect(bool moved)
{
    assert_int_equal(ka_group_step_down_at(root), moved);
    char *text = below();
    assert_string_equal(text, moved ? "0" : "");
    free(text);
}

static void group__of_a_unit_that_is_ours__is_left_for_one_below(void **state)
{
    (void)state;
    expect(true);
}

static void group__of_a_process_that_others_began__stays(void **state)
{
    (void)state;
    begun_by_systemd(false);
    expect(false);
    unsetenv("SYSTEMD_EXEC_PID");
    expect(false);
}

static void group__that_is_not_given_to_us__stays(void **state)
{
    char *path = ka_path_join(root, UNIT "/cgroup.subtree_control");
    (void)state;
    assert_int_equal(unlink(path), 0);
    free(path);
    expect(false);
}

static void group__of_version_1__stays(void **state)
{
    (void)state;
    put("proc/self/cgroup", "4:memory:/system.slice/kernel-agent.service\n");
    expect(false);
}

int main(void)
{
#define IN_A_GROUP(test) cmocka_unit_test_setup_teardown(test, set_up, tear_down)
    const struct CMUnitTest tests[] = {
        IN_A_GROUP(group__of_a_unit_that_is_ours__is_left_for_one_below),
        IN_A_GROUP(group__of_a_process_that_others_began__stays),
        IN_A_GROUP(group__that_is_not_given_to_us__stays),
        IN_A_GROUP(group__of_version_1__stays),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
