/* The folder of compiled kernels: what is found, what is not, and what goes when it is full. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "agent/disk/cache.h"
#include "base/files.h"

#define MB ((uint64_t)1 << 20)

struct fixture {
    char folder[64], root[96];
    struct ka_cache *cache;
};

static struct ka_cache *open_cache(const struct fixture *f, const char *toolchain, uint64_t max_bytes)
{
    struct ka_cache *cache = NULL;
    assert_int_equal(ka_cache_open(f->root, toolchain, max_bytes, &cache, NULL), 0);
    return cache;
}

static int set_up(void **state)
{
    struct fixture *f = calloc(1, sizeof(*f));
    strcpy(f->folder, "/tmp/ka-cache-XXXXXX");
    assert_non_null(mkdtemp(f->folder));
    snprintf(f->root, sizeof(f->root), "%s/a/b", f->folder);
    f->cache = open_cache(f, "one", MB);
    *state = f;
    return 0;
}

static int tear_down(void **state)
{
    struct fixture *f = *state;
    ka_cache_close(f->cache);
    ka_rmtree(f->folder, NULL);
    free(f);
    return 0;
}

static const char *key(unsigned n)
{
    static char text[65];
    snprintf(text, sizeof(text), "%064x", n);
    return text;
}

static void path_of(const struct fixture *f, unsigned n, char *path, size_t size)
{
    snprintf(path, size, "%s/one/%s.json", f->root, key(n));
}

/* An entry of about `bytes` bytes, used `age` seconds ago. */
static void put(const struct fixture *f, unsigned n, size_t bytes, int age)
{
    char path[256];
    char *text = calloc(bytes + 1, 1);
    memset(text, 'x', bytes);
    json_t *entry = json_pack("{s:s}", "x", text);
    assert_int_equal(ka_cache_put(f->cache, key(n), entry, NULL), 0);
    struct timespec times[2] = {{.tv_sec = time(NULL) - age}, {.tv_sec = time(NULL) - age}};
    path_of(f, n, path, sizeof(path));
    assert_int_equal(utimensat(AT_FDCWD, path, times, 0), 0);
    json_decref(entry);
    free(text);
}

static bool has(const struct fixture *f, unsigned n)
{
    char path[256];
    path_of(f, n, path, sizeof(path));
    return access(path, F_OK) == 0;
}

static void cache__entry_that_was_put__is_found_by_its_key_alone(void **state)
{
    struct fixture *f = *state;
    put(f, 1, 10, 0);
    json_t *entry = ka_cache_get(f->cache, key(1));
    assert_string_equal(json_string_value(json_object_get(entry, "x")), "xxxxxxxxxx");
    json_decref(entry);
    assert_null(ka_cache_get(f->cache, key(2)));
}

static void cache__another_toolchain__sees_nothing_of_it(void **state)
{
    struct fixture *f = *state;
    put(f, 1, 10, 0);
    struct ka_cache *other = open_cache(f, "two", MB);
    assert_null(ka_cache_get(other, key(1)));
    ka_cache_close(other);
}

static void cache__key_that_is_no_hash__is_neither_read_nor_written(void **state)
{
    struct fixture *f = *state;
    json_t *entry = json_object();
    const char *const bad[] = {"", "../../x", "AB", key(1) + 1,
                               "00000000000000000000000000000000000000000000000000000000000000g1"};
    for (size_t i = 0; i < KA_COUNT(bad); i++) {
        assert_null(ka_cache_get(f->cache, bad[i]));
        assert_int_equal(ka_cache_put(f->cache, bad[i], entry, NULL), -EINVAL);
    }
    json_decref(entry);
}

static void cache__link_or_damaged_file__is_no_entry(void **state)
{
    struct fixture *f = *state;
    char path[256], other[256];
    put(f, 1, 10, 0);
    path_of(f, 1, other, sizeof(other));
    path_of(f, 2, path, sizeof(path));
    assert_int_equal(symlink(other, path), 0);
    assert_null(ka_cache_get(f->cache, key(2)));
    path_of(f, 3, path, sizeof(path));
    assert_int_equal(ka_file_write(path, "{\"x\": \"ha", 9, NULL), 0);
    assert_null(ka_cache_get(f->cache, key(3)));
    path_of(f, 4, path, sizeof(path));
    assert_int_equal(mkfifo(path, 0600), 0);
    assert_null(ka_cache_get(f->cache, key(4)));
}

static void cache__damaged_entry__is_replaced_by_the_next_put(void **state)
{
    struct fixture *f = *state;
    char path[256];
    path_of(f, 1, path, sizeof(path));
    assert_int_equal(ka_file_write(path, "{", 1, NULL), 0);
    put(f, 1, 10, 0);
    json_t *entry = ka_cache_get(f->cache, key(1));
    assert_non_null(entry);
    json_decref(entry);
}

static void cache__full__loses_what_was_not_used_for_the_longest_time(void **state)
{
    struct fixture *f = *state;
    for (unsigned i = 0; i < 5; i++)
        put(f, i, 200 << 10, 1000 - (int)i);
    json_t *used = ka_cache_get(f->cache, key(0));
    assert_non_null(used);
    json_decref(used);
    put(f, 9, 200 << 10, 0);
    assert_true(has(f, 0) && has(f, 9));
    assert_false(has(f, 1));
    size_t entries;
    uint64_t bytes;
    ka_cache_measure(f->root, &entries, &bytes);
    assert_true(bytes <= MB && entries >= 3);
}

static void cache__full__counts_other_toolchains_too(void **state)
{
    struct fixture *f = *state;
    put(f, 1, 600 << 10, 100);
    struct ka_cache *other = open_cache(f, "two", MB);
    char *text = malloc((600 << 10) + 1);
    memset(text, 'y', 600 << 10);
    text[600 << 10] = '\0';
    json_t *entry = json_pack("{s:s}", "x", text);
    assert_int_equal(ka_cache_put(other, key(2), entry, NULL), 0);
    assert_false(has(f, 1));
    json_decref(entry);
    free(text);
    ka_cache_close(other);
}

static void cache__entry_larger_than_the_cap__is_refused_and_evicts_nothing(void **state)
{
    struct fixture *f = *state;
    put(f, 1, 10, 100);
    char *text = malloc(2 * MB + 1);
    memset(text, 'x', 2 * MB);
    text[2 * MB] = '\0';
    json_t *entry = json_pack("{s:s}", "x", text);
    assert_int_equal(ka_cache_put(f->cache, key(2), entry, NULL), -EFBIG);
    assert_true(has(f, 1));
    json_decref(entry);
    free(text);
}

static void
cache__file_that_a_killed_process_left__goes_with_the_next_first_entry_once_it_is_old(void **state)
{
    struct fixture *f = *state;
    char old[256], fresh[256];
    snprintf(old, sizeof(old), "%s/one/%s.json.AbCdEf", f->root, key(1));
    snprintf(fresh, sizeof(fresh), "%s/one/%s.json.GhIjKl", f->root, key(1));
    assert_int_equal(ka_file_write(old, "{", 1, NULL), 0);
    assert_int_equal(ka_file_write(fresh, "{", 1, NULL), 0);
    struct timespec times[2] = {{.tv_sec = time(NULL) - 7200}, {.tv_sec = time(NULL) - 7200}};
    assert_int_equal(utimensat(AT_FDCWD, old, times, 0), 0);
    struct ka_cache *again = open_cache(f, "one", MB);
    json_t *entry = json_pack("{s:i}", "a", 1);
    assert_int_equal(ka_cache_put(again, key(2), entry, NULL), 0);
    json_decref(entry);
    assert_int_equal(access(old, F_OK), -1);
    assert_int_equal(access(fresh, F_OK), 0);
    ka_cache_close(again);
}

static void cache__folder_that_others_can_write__is_not_used(void **state)
{
    struct fixture *f = *state;
    struct ka_cache *cache = NULL;
    assert_int_equal(chmod(f->root, 0777), 0);
    assert_int_equal(ka_cache_open(f->root, "one", MB, &cache, NULL), -EACCES);
    assert_null(cache);
    assert_int_equal(ka_cache_open(f->root, "../x", MB, &cache, NULL), -EINVAL);
}

int main(void)
{
#define CASE(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)
    const struct CMUnitTest tests[] = {
        CASE(cache__entry_that_was_put__is_found_by_its_key_alone),
        CASE(cache__another_toolchain__sees_nothing_of_it),
        CASE(cache__key_that_is_no_hash__is_neither_read_nor_written),
        CASE(cache__link_or_damaged_file__is_no_entry),
        CASE(cache__damaged_entry__is_replaced_by_the_next_put),
        CASE(cache__full__loses_what_was_not_used_for_the_longest_time),
        CASE(cache__full__counts_other_toolchains_too),
        CASE(cache__entry_larger_than_the_cap__is_refused_and_evicts_nothing),
        CASE(cache__file_that_a_killed_process_left__goes_with_the_next_first_entry_once_it_is_old),
        CASE(cache__folder_that_others_can_write__is_not_used),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
