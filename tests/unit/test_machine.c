/* What may be used of a machine, with folders in the place of /proc and /sys. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/io/machine.h"
#include "base/files.h"

#define GB ((uint64_t)1 << 30)
#define MEMINFO "MemTotal:       16777216 kB\nMemFree:  1048576 kB\nMemAvailable:   8388608 kB\n"

static char root[64];

static int set_up(void **state)
{
    (void)state;
    strcpy(root, "/tmp/ka-machine-XXXXXX");
    assert_non_null(mkdtemp(root));
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    return ka_rmtree(root, NULL);
}

static void put(const char *name, const char *text)
{
    char *path = ka_path_join(root, name);
    char *folder = strdup(path);
    *strrchr(folder, '/') = '\0';
    assert_int_equal(ka_mkdirs(folder, NULL), 0);
    assert_int_equal(ka_file_put(path, text, strlen(text), NULL), 0);
    free(folder);
    free(path);
}

static struct ka_machine look(void)
{
    struct ka_machine m;
    ka_machine_read_at(root, &m);
    return m;
}

/* Without any group. */
static unsigned allowed(void)
{
    struct ka_machine m;
    ka_machine_read_at("/nowhere", &m);
    assert_true(m.cpus >= 1);
    return m.cpus;
}

static void machine__no_groups__is_what_is_built_in(void **state)
{
    (void)state;
    put("proc/meminfo", MEMINFO);
    struct ka_machine m = look();
    assert_int_equal(m.memory_bytes, 16 * GB);
    assert_int_equal(m.host_memory_bytes, 16 * GB);
    assert_int_equal(m.memory_available_bytes, 8 * GB);
    assert_int_equal(m.cpus, allowed());
    assert_true(m.cpus <= m.host_cpus);
}

static void machine__group_of_version_2__limits_memory_and_processors(void **state)
{
    (void)state;
    put("proc/meminfo", MEMINFO);
    put("proc/self/cgroup", "0::/user/job\n");
    put("sys/fs/cgroup/user/job/memory.max", "4294967296\n");
    put("sys/fs/cgroup/user/job/memory.current", "3221225472\n");
    put("sys/fs/cgroup/user/job/memory.stat", "anon 5\nfile 7\ninactive_anon 9\ninactive_file 1073741824\n");
    put("sys/fs/cgroup/user/job/cpu.max", "50000 100000\n");
    struct ka_machine m = look();
    assert_int_equal(m.memory_bytes, 4 * GB);
    assert_int_equal(m.host_memory_bytes, 16 * GB);
    assert_int_equal(m.memory_available_bytes, 2 * GB); /* the cache counts as free */
    assert_int_equal(m.cpus, 1);                        /* half of one is rounded up */
}

static void machine__ancestor_with_less__counts(void **state)
{
    (void)state;
    put("proc/meminfo", MEMINFO);
    put("proc/self/cgroup", "0::/a/b/c\n");
    put("sys/fs/cgroup/a/b/c/memory.max", "max\n");
    put("sys/fs/cgroup/a/b/c/cpu.max", "max 100000\n");
    put("sys/fs/cgroup/a/b/memory.max", "8589934592\n");
    put("sys/fs/cgroup/a/memory.max", "2147483648\n");
    put("sys/fs/cgroup/a/memory.current", "1073741824\n");
    put("sys/fs/cgroup/a/cpu.max", "100000 100000\n");
    struct ka_machine m = look();
    assert_int_equal(m.memory_bytes, 2 * GB);
    assert_int_equal(m.memory_available_bytes, 1 * GB);
    assert_int_equal(m.cpus, 1);
}

static void machine__group_of_a_sibling__does_not_count(void **state)
{
    (void)state;
    put("proc/meminfo", MEMINFO);
    put("proc/self/cgroup", "0::/a\n");
    put("sys/fs/cgroup/b/memory.max", "1024\n");
    put("sys/fs/cgroup/a/b/memory.max", "1024\n");
    assert_int_equal(look().memory_bytes, 16 * GB);
}

static void machine__groups_of_version_1__limit_each_their_own(void **state)
{
    (void)state;
    put("proc/meminfo", MEMINFO);
    put("proc/self/cgroup", "9:name=systemd:/\n4:memory:/job/7\n3:cpuset:/\n2:cpu,cpuacct:/job/7\n0::/\n");
    put("sys/fs/cgroup/memory/job/7/memory.limit_in_bytes", "3221225472\n");
    put("sys/fs/cgroup/memory/job/7/memory.usage_in_bytes", "2147483648\n");
    put("sys/fs/cgroup/memory/job/7/memory.stat", "inactive_file 0\ntotal_inactive_file 1073741824\n");
    put("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
    put("sys/fs/cgroup/cpu,cpuacct/job/7/cpu.cfs_quota_us", "100000\n");
    put("sys/fs/cgroup/cpu,cpuacct/job/7/cpu.cfs_period_us", "100000\n");
    put("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1\n");
    put("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n");
    struct ka_machine m = look();
    assert_int_equal(m.memory_bytes, 3 * GB);
    assert_int_equal(m.memory_available_bytes, 2 * GB);
    assert_int_equal(m.cpus, 1);
}

static void machine__quota_beyond_the_affinity__changes_nothing(void **state)
{
    (void)state;
    put("proc/self/cgroup", "0::/\n");
    put("sys/fs/cgroup/cpu.max", "1000000000 100000\n");
    assert_int_equal(look().cpus, allowed());
}

static void machine__path_of_the_host__falls_back_to_what_is_mounted(void **state)
{
    (void)state;
    put("proc/meminfo", MEMINFO);
    put("proc/self/cgroup", "0::/system.slice/docker-1234.scope\n");
    put("sys/fs/cgroup/memory.max", "1073741824\n");
    assert_int_equal(look().memory_bytes, 1 * GB);
    put("sys/memory.max", "1024\n");
    put("proc/self/cgroup", "0::/../../init.scope\n");
    assert_int_equal(look().memory_bytes, 1 * GB);
}

static void machine__limit_above_what_is_built_in__is_none(void **state)
{
    (void)state;
    put("proc/meminfo", MEMINFO);
    put("proc/self/cgroup", "4:memory:/\n");
    put("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
    struct ka_machine m = look();
    assert_int_equal(m.memory_bytes, 16 * GB);
    assert_int_equal(m.memory_available_bytes, 8 * GB);
}

static void machine__more_used_than_allowed__leaves_nothing(void **state)
{
    (void)state;
    put("proc/meminfo", MEMINFO);
    put("proc/self/cgroup", "0::/\n");
    put("sys/fs/cgroup/memory.max", "1073741824\n");
    put("sys/fs/cgroup/memory.current", "2147483648\n");
    assert_int_equal(look().memory_available_bytes, 0);
}

static void machine__odd_files__limit_nothing(void **state)
{
    (void)state;
    static const char *const odd[] = {"", "\n", "max", "x 1", "-1", "0 0", "99999 0", ":::", "1:2"};
    put("proc/meminfo", MEMINFO);
    put("sys/fs/cgroup/memory.max", "max");
    for (size_t i = 0; i < sizeof(odd) / sizeof(*odd); i++) {
        put("proc/self/cgroup", "0::/\n2:cpu:/\n");
        put("sys/fs/cgroup/cpu.max", odd[i]);
        put("sys/fs/cgroup/cpu/cpu.cfs_quota_us", odd[i]);
        assert_int_equal(look().cpus, allowed());
        put("proc/self/cgroup", odd[i]);
        assert_int_equal(look().memory_bytes, 16 * GB);
    }
    put("proc/meminfo", "nothing\n");
    put("proc/self/cgroup", "");
    assert_int_equal(look().memory_bytes, 0);
    assert_int_equal(look().memory_available_bytes, 0);
}

static void machine__this_one__has_memory_and_processors(void **state)
{
    (void)state;
    struct ka_machine m;
    ka_machine_read(&m);
    assert_true(m.memory_bytes > 0 && m.memory_bytes <= m.host_memory_bytes);
    assert_true(m.memory_available_bytes <= m.memory_bytes);
    assert_true(m.cpus >= 1 && m.cpus <= m.host_cpus);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(machine__no_groups__is_what_is_built_in),
        TEST(machine__group_of_version_2__limits_memory_and_processors),
        TEST(machine__ancestor_with_less__counts),
        TEST(machine__group_of_a_sibling__does_not_count),
        TEST(machine__groups_of_version_1__limit_each_their_own),
        TEST(machine__quota_beyond_the_affinity__changes_nothing),
        TEST(machine__path_of_the_host__falls_back_to_what_is_mounted),
        TEST(machine__limit_above_what_is_built_in__is_none),
        TEST(machine__more_used_than_allowed__leaves_nothing),
        TEST(machine__odd_files__limit_nothing),
        TEST(machine__this_one__has_memory_and_processors),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
