/* The tensor reader: what it reads, and what it refuses. */
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cmocka.h>

#include "tensor_fixture.h"

static void refuse(const char *header, size_t data_len, const char *word)
{
    unsigned char data[64] = {0};
    struct ka_tensors *set = NULL;
    struct ka_err err = {0};
    assert_int_equal(parse_set(header, data, data_len, &set, &err), -EINVAL);
    assert_null(set);
    if (!strstr(err.msg, word))
        fail_msg("'%s' does not speak of '%s'", err.msg, word);
}

static void tensor__two_tensors_and_metadata__are_read(void **state)
{
    (void)state;
    float values[] = {1.5f, -2, 3, 4, 5, 6, 7};
    struct ka_tensors *set = NULL;
    assert_int_equal(
        parse_set(
            "{\"__metadata__\":{\"a\":\"b\"},\"grad/x\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":"
            "[0,24]},\"s\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[24,28]}}",
            values, sizeof(values), &set, NULL),
        0);
    assert_int_equal(ka_tensors_count(set), 2);
    const struct ka_tensor *x = ka_tensors_find(set, "grad/x");
    assert_int_equal(x->count, 6);
    assert_true(ka_tensor_at(x, 1) == -2);
    const struct ka_tensor *s = ka_tensors_find(set, "s");
    assert_int_equal(s->rank, 0);
    assert_true(ka_tensor_at(s, 0) == 7);
    assert_false(ka_tensor_same_shape(x, s));
    assert_null(ka_tensors_find(set, "y"));
    struct ka_buf text = {0};
    ka_tensor_shape_text(x, &text);
    assert_string_equal(text.data, "[2, 3]");
    ka_buf_free(&text);
    ka_tensors_free(set);
}

static double first(const char *dtype, const void *bytes, size_t len)
{
    char header[128];
    snprintf(header, sizeof(header), "{\"t\":{\"dtype\":\"%s\",\"shape\":[1],\"data_offsets\":[0,%zu]}}",
             dtype, len);
    struct ka_tensors *set = NULL;
    assert_int_equal(parse_set(header, bytes, len, &set, NULL), 0);
    double value = ka_tensor_at(ka_tensors_get(set, 0), 0);
    ka_tensors_free(set);
    return value;
}

static void tensor__every_dtype__converts_to_double(void **state)
{
    (void)state;
    double f64 = 0.1;
    assert_true(first("F64", &f64, 8) == 0.1);
    uint16_t halves[] = {0x3c00, 0xc500, 0x0001, 0x8001, 0x7bff, 0x0400};
    double want[] = {1, -5, 0x1p-24, -0x1p-24, 65504, 0x1p-14};
    for (size_t i = 0; i < KA_COUNT(halves); i++)
        assert_true(first("F16", &halves[i], 2) == want[i]);
    uint16_t inf = 0xfc00, nan = 0x7e01, brain = 0xc049;
    assert_true(first("F16", &inf, 2) == -INFINITY);
    assert_true(isnan(first("F16", &nan, 2)));
    assert_true(first("BF16", &brain, 2) == -3.140625);
    int64_t i64 = -9000000000;
    int32_t i32 = -70000;
    int16_t i16 = -300;
    int8_t i8 = -3;
    uint8_t u8 = 200;
    assert_true(first("I64", &i64, 8) == -9e9);
    assert_true(first("I32", &i32, 4) == -7e4);
    assert_true(first("I16", &i16, 2) == -300);
    assert_true(first("I8", &i8, 1) == -3);
    assert_true(first("U8", &u8, 1) == 200);
    assert_true(first("BOOL", &u8, 1) == 1);
}

static void tensor__bad_headers__are_refused_with_a_reason(void **state)
{
    (void)state;
    refuse("[]", 0, "object");
    refuse("{", 0, "JSON");
    refuse("{\"a\":{},\"a\":{}}", 0, "JSON");
    refuse("{\"a\":3}", 4, "dtype");
    refuse("{\"\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 4, "no name");
    refuse("{\"a\":{\"dtype\":\"F99\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "F99");
    refuse("{\"a\":{\"dtype\":\"U8\",\"shape\":[1,1,1,1,1,1,1,1,1],\"data_offsets\":[0,1]}}", 4, "shape");
    refuse("{\"a\":{\"dtype\":\"U8\",\"shape\":[-1],\"data_offsets\":[0,1]}}", 4, "size");
    refuse("{\"a\":{\"dtype\":\"U8\",\"shape\":[1.0],\"data_offsets\":[0,1]}}", 4, "size");
    refuse("{\"a\":{\"dtype\":\"F64\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,1]}}", 4,
           "overflow");
    refuse("{\"a\":{\"dtype\":\"F64\",\"shape\":[2305843009213693952],\"data_offsets\":[0,0]}}", 4, "bytes");
    refuse("{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,5]}}", 5, "bytes");
    refuse("{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[1,5]}}", 4, "outside");
    refuse("{\"a\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[4,2]}}", 4, "outside");
    refuse("{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[-4,0]}}", 4, "outside");
    refuse("{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0]}}", 4, "pair");
    refuse("{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]},"
           "\"b\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[3,7]}}",
           8, "overlap");
}

static void tensor__empty_tensors_at_one_place__are_no_overlap(void **state)
{
    (void)state;
    struct ka_tensors *set = NULL;
    assert_int_equal(parse_set("{\"a\":{\"dtype\":\"U8\",\"shape\":[0,3],\"data_offsets\":[2,2]},"
                               "\"b\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}",
                               "abcd", 4, &set, NULL),
                     0);
    ka_tensors_free(set);
}

static void tensor__too_many_tensors__are_refused(void **state)
{
    (void)state;
    struct ka_buf header = {0};
    for (int i = 0; i <= KA_TENSORS_MAX; i++)
        ka_buf_printf(&header, "%s\"%d\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}",
                      i ? "," : "{", i);
    ka_buf_puts(&header, "}");
    refuse(header.data, 0, "at most");
    ka_buf_free(&header);
}

static void tensor__short_or_lying_lengths__are_refused(void **state)
{
    (void)state;
    struct ka_tensors *set = NULL;
    struct ka_err err;
    assert_int_equal(parse_bytes("abc", 3, &set, &err), -EINVAL);
    assert_int_equal(parse_bytes(NULL, 0, &set, &err), -EINVAL);
    uint64_t lying[2] = {9, 0};
    assert_int_equal(parse_bytes(lying, 16, &set, &err), -EINVAL);
    lying[0] = UINT64_MAX;
    assert_int_equal(parse_bytes(lying, 16, &set, &err), -EINVAL);
    size_t len = KA_TENSOR_HEADER_MAX + 64;
    char *big = ka_calloc(len, 1);
    memset(big, ' ', len);
    uint64_t header = KA_TENSOR_HEADER_MAX + 1;
    memcpy(big, &header, 8);
    assert_int_equal(parse_bytes(big, len, &set, &err), -EINVAL);
    assert_non_null(strstr(err.msg, "too long"));
    free(big);
}

static void tensor__file__is_read_up_to_the_cap(void **state)
{
    (void)state;
    char path[] = "/tmp/ka-tensor-XXXXXX";
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    unlink(path);
    const char *header = "{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]}}";
    uint64_t n = strlen(header);
    assert_int_equal(write(fd, &n, 8), 8);
    assert_int_equal(write(fd, header, n), (ssize_t)n);
    assert_int_equal(write(fd, "\7\t", 2), 2);
    struct ka_tensors *set = NULL;
    assert_int_equal(ka_tensors_read(fd, 10 + n, &set, NULL), 0);
    assert_true(ka_tensor_at(ka_tensors_find(set, "a"), 1) == 9);
    ka_tensors_free(set);
    assert_int_equal(ka_tensors_read(fd, 9 + n, &set, NULL), -EFBIG);
    close(fd);
    int folder = open("/tmp", O_RDONLY);
    assert_int_equal(ka_tensors_read(folder, 4096, &set, NULL), -EINVAL);
    close(folder);
}

#define WIDE ((size_t)3 << 20) /* enough to be worth a mapping */

/* A file with one tensor "a" of `size` bytes, of which `written` are there, open for writing; its name goes
 * into `path`. */
static int make_file(char path[static 32], size_t size, size_t written)
{
    char header[128], byte = 7;
    strcpy(path, "/tmp/ka-tensor-XXXXXX");
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    uint64_t n =
        (uint64_t)snprintf(header, sizeof(header),
                           "{\"a\":{\"dtype\":\"U8\",\"shape\":[%zu],\"data_offsets\":[0,%zu]}}", size, size);
    assert_int_equal(write(fd, &n, 8), 8);
    assert_int_equal(write(fd, header, n), (ssize_t)n);
    assert_int_equal(ftruncate(fd, (off_t)(8 + n + size)), 0);
    for (size_t i = 0; i < written; i += 4096)
        assert_int_equal(pwrite(fd, &byte, 1, (off_t)(8 + n + i)), 1);
    if (written == size)
        assert_int_equal(pwrite(fd, &byte, 1, (off_t)(8 + n + size - 1)), 1);
    return fd;
}

static struct ka_tensors *read_path(const char *path, struct ka_err *err)
{
    struct ka_tensors *set = NULL;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    assert_true(fd >= 0);
    int rc = ka_tensors_read(fd, (size_t)1 << 40, &set, err);
    close(fd);
    assert_true((rc == 0) == (set != NULL));
    return set;
}

static void tensor__file_that_can_still_be_written__is_copied(void **state)
{
    (void)state;
    char path[32], other = 9;
    int writer = make_file(path, WIDE, WIDE);
    char *shared = mmap(NULL, WIDE, PROT_READ | PROT_WRITE, MAP_SHARED, writer, 0);
    assert_true(shared != MAP_FAILED);
    for (int open_too = 1; open_too >= 0; open_too--) {
        struct ka_tensors *set = read_path(path, NULL);
        const struct ka_tensor *a = ka_tensors_get(set, 0);
        double before = ka_tensor_at(a, 8192);
        memset(shared, ++other, WIDE); /* the last time, through the mapping alone */
        assert_true(ka_tensor_at(a, 8192) == before);
        if (open_too) {
            assert_int_equal(ftruncate(writer, 0), 0);
            assert_true(ka_tensor_at(a, 8192) == before); /* and no signal */
            close(writer);
            unlink(path);
            munmap(shared, WIDE);
            writer = make_file(path, WIDE, WIDE);
            shared = mmap(NULL, WIDE, PROT_READ | PROT_WRITE, MAP_SHARED, writer, 0);
            close(writer);
        }
        ka_tensors_free(set);
    }
    munmap(shared, WIDE);
    unlink(path);
}

static bool has_leases(const char *path)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    bool granted = fcntl(fd, F_SETLEASE, F_RDLCK) == 0;
    close(fd);
    return granted;
}

static bool is_mapped(const char *path)
{
    char line[512];
    bool found = false;
    FILE *maps = fopen("/proc/self/maps", "r");
    while (fgets(line, sizeof(line), maps))
        found = found || strstr(line, path);
    fclose(maps);
    return found;
}

static void tensor__file_that_nobody_can_write__is_mapped_and_stays_so(void **state)
{
    (void)state;
    char path[32];
    close(make_file(path, WIDE, WIDE));
    bool leases = has_leases(path);
    struct ka_tensors *set = read_path(path, NULL);
    const struct ka_tensor *a = ka_tensors_get(set, 0);
    assert_true(ka_tensor_at(a, 8192) == 7 && ka_tensor_at(a, 1) == 0 && a->count == WIDE);
    if (leases) {
        assert_true(is_mapped(path));
        assert_int_equal(open(path, O_WRONLY | O_NONBLOCK | O_CLOEXEC), -1);
        assert_int_equal(errno, EWOULDBLOCK);
    }
    ka_tensors_free(set);
    int writer = open(path, O_WRONLY | O_NONBLOCK | O_CLOEXEC);
    assert_true(writer >= 0);
    close(writer);
    unlink(path);
}

static long pages_in_memory(void)
{
    long all, resident;
    FILE *statm = fopen("/proc/self/statm", "r");
    assert_int_equal(fscanf(statm, "%ld %ld", &all, &resident), 2);
    fclose(statm);
    return resident;
}

static void tensor__sparse_file__takes_the_memory_of_what_was_written(void **state)
{
    (void)state;
    char path[32];
    size_t size = (size_t)1 << 30;
    close(make_file(path, size, 16384));
    struct stat before, after;
    assert_int_equal(stat(path, &before), 0);
    long pages = pages_in_memory();
    struct ka_tensors *set = read_path(path, NULL);
    const struct ka_tensor *a = ka_tensors_get(set, 0);
    assert_false(is_mapped(path));
    assert_true(ka_tensor_at(a, 4096) == 7 && ka_tensor_at(a, size - 1) == 0);
    double sum = 0, values[256];
    for (size_t i = 0; i + 256 < size; i += (size_t)1 << 20) {
        ka_tensor_load(a, i, 256, values);
        sum += values[0];
    }
    assert_true(sum == 7);
    assert_true((pages_in_memory() - pages) * sysconf(_SC_PAGESIZE) < (long)(size / 8));
    ka_tensors_free(set);
    assert_int_equal(stat(path, &after), 0);
    assert_true(after.st_blocks == before.st_blocks);
    unlink(path);
}

static void tensor__file_much_longer_than_its_tensors__is_refused(void **state)
{
    (void)state;
    char path[32];
    struct ka_err err;
    int fd = make_file(path, 100, 100);
    assert_int_equal(ftruncate(fd, (off_t)8 << 30), 0);
    close(fd);
    assert_null(read_path(path, &err));
    assert_non_null(strstr(err.msg, "of which its tensors take 100"));
    unlink(path);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tensor__two_tensors_and_metadata__are_read),
        cmocka_unit_test(tensor__every_dtype__converts_to_double),
        cmocka_unit_test(tensor__bad_headers__are_refused_with_a_reason),
        cmocka_unit_test(tensor__empty_tensors_at_one_place__are_no_overlap),
        cmocka_unit_test(tensor__too_many_tensors__are_refused),
        cmocka_unit_test(tensor__short_or_lying_lengths__are_refused),
        cmocka_unit_test(tensor__file__is_read_up_to_the_cap),
        cmocka_unit_test(tensor__file_that_can_still_be_written__is_copied),
        cmocka_unit_test(tensor__file_that_nobody_can_write__is_mapped_and_stays_so),
        cmocka_unit_test(tensor__sparse_file__takes_the_memory_of_what_was_written),
        cmocka_unit_test(tensor__file_much_longer_than_its_tensors__is_refused),
    };
    return cmocka_run_group_tests_name("tensor", tests, NULL, NULL);
}
