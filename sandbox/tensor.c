/* Reads the safetensors layout from hostile bytes. Knows nothing of oracles, candidates or verdicts. */
#include "tensor.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/each.h"

#define HEADER_AT 8                 /* after its length */
#define SLACK ((size_t)1 << 20)     /* bytes that belong to no tensor: what alignment may leave */
#define MAP_LEAST ((size_t)1 << 20) /* smaller files are copied: that is quicker */

struct ka_tensors {
    unsigned char *bytes; /* of mmap() */
    size_t len;
    struct ka_tensor *items;
    size_t *begins; /* of the items, in the data */
    size_t count;
    size_t data_at, data_len; /* where the data begins; up to the end of the last tensor */
};

static const struct {
    const char *tag, *name;
    size_t size;
} DTYPES[] = {
    [KA_F64] = {"F64", "float64", 8},    [KA_F32] = {"F32", "float32", 4}, [KA_F16] = {"F16", "float16", 2},
    [KA_BF16] = {"BF16", "bfloat16", 2}, [KA_I64] = {"I64", "int64", 8},   [KA_I32] = {"I32", "int32", 4},
    [KA_I16] = {"I16", "int16", 2},      [KA_I8] = {"I8", "int8", 1},      [KA_U8] = {"U8", "uint8", 1},
    [KA_BOOL] = {"BOOL", "bool", 1},
};

size_t ka_dtype_size(enum ka_dtype dtype)
{
    return DTYPES[dtype].size;
}

const char *ka_dtype_name(enum ka_dtype dtype)
{
    return DTYPES[dtype].name;
}

int ka_dtype_parse(const char *name, enum ka_dtype *out)
{
    for (size_t i = 0; i < KA_COUNT(DTYPES); i++) {
        if (strcmp(name, DTYPES[i].tag) == 0 || strcmp(name, DTYPES[i].name) == 0) {
            *out = (enum ka_dtype)i;
            return 0;
        }
    }
    return -EINVAL;
}

/* ---- the header ---- */

static int parse_shape(const json_t *shape, struct ka_tensor *t, struct ka_err *err)
{
    if (!json_is_array(shape) || json_array_size(shape) > KA_TENSOR_RANK_MAX)
        return ka_fail(err, -EINVAL, "tensor %.80s: shape is not a list of at most %d numbers", t->name,
                       KA_TENSOR_RANK_MAX);
    t->rank = json_array_size(shape);
    t->count = 1;
    for (size_t i = 0; i < t->rank; i++) {
        const json_t *dim = json_array_get(shape, i);
        json_int_t value = json_is_integer(dim) ? json_integer_value(dim) : -1;
        if (value < 0)
            return ka_fail(err, -EINVAL, "tensor %.80s: axis %zu of its shape is not a size", t->name, i);
        t->dims[i] = (size_t)value;
        if (__builtin_mul_overflow(t->count, t->dims[i], &t->count))
            return ka_fail(err, -EINVAL, "tensor %.80s: its shape overflows", t->name);
    }
    return 0;
}

/* Sets *at, once the offsets are in range and hold exactly the tensor's elements. */
static int parse_offsets(const json_t *offsets, size_t data_len, const struct ka_tensor *t, size_t *at,
                         struct ka_err *err)
{
    if (!json_is_array(offsets) || json_array_size(offsets) != 2 ||
        !json_is_integer(json_array_get(offsets, 0)) || !json_is_integer(json_array_get(offsets, 1)))
        return ka_fail(err, -EINVAL, "tensor %.80s: data_offsets is not a pair of numbers", t->name);
    json_int_t begin = json_integer_value(json_array_get(offsets, 0));
    json_int_t end = json_integer_value(json_array_get(offsets, 1));
    if (begin < 0 || end < begin || (uint64_t)end > data_len)
        return ka_fail(err, -EINVAL, "tensor %.80s: its bytes %lld..%lld lie outside the file's %zu", t->name,
                       (long long)begin, (long long)end, data_len);
    size_t need;
    if (__builtin_mul_overflow(t->count, ka_dtype_size(t->dtype), &need) || need != (size_t)(end - begin))
        return ka_fail(err, -EINVAL, "tensor %.80s: has %lld bytes, which its shape and dtype do not take",
                       t->name, (long long)(end - begin));
    *at = (size_t)begin;
    return 0;
}

static int parse_tensor(const char *name, const json_t *entry, size_t data_len, struct ka_tensor *t,
                        size_t *at, struct ka_err *err)
{
    if (!*name)
        return ka_fail(err, -EINVAL, "a tensor has no name");
    t->name = ka_strdup(name);
    const char *dtype = json_string_value(json_object_get(entry, "dtype"));
    if (!dtype || ka_dtype_parse(dtype, &t->dtype) != 0)
        return ka_fail(err, -EINVAL, "tensor %.80s: unknown dtype %.20s", name, dtype ? dtype : "(none)");
    int rc = parse_shape(json_object_get(entry, "shape"), t, err);
    if (rc == 0)
        rc = parse_offsets(json_object_get(entry, "data_offsets"), data_len, t, at, err);
    return rc;
}

struct span {
    size_t begin, end;
    const char *name;
};

static int by_begin(const void *a, const void *b)
{
    const struct span *x = a, *y = b;
    return x->begin < y->begin ? -1 : x->begin > y->begin;
}

/* Sets data_len. */
static int refuse_overlap(struct ka_tensors *set, struct ka_err *err)
{
    KA_AUTO_FREE struct span *spans = ka_calloc(set->count, sizeof(*spans));
    size_t n = 0;
    for (size_t i = 0; i < set->count; i++) {
        const struct ka_tensor *t = &set->items[i];
        if (t->count)
            spans[n++] =
                (struct span){set->begins[i], set->begins[i] + t->count * ka_dtype_size(t->dtype), t->name};
    }
    qsort(spans, n, sizeof(*spans), by_begin);
    int rc = 0;
    for (size_t i = 1; i < n && rc == 0; i++)
        if (spans[i].begin < spans[i - 1].end)
            rc = ka_fail(err, -EINVAL, "tensors %.80s and %.80s overlap", spans[i - 1].name, spans[i].name);
    set->data_len = n ? spans[n - 1].end : 0;
    return rc;
}

static int parse_entries(struct ka_tensors *set, json_t *root, size_t data_len, struct ka_err *err)
{
    size_t entries = json_object_size(root);
    if (!json_is_object(root) || entries > KA_TENSORS_MAX)
        return ka_fail(err, -EINVAL, "tensor header is not an object of at most %d tensors", KA_TENSORS_MAX);
    set->items = ka_calloc(entries, sizeof(*set->items));
    set->begins = ka_calloc(entries, sizeof(*set->begins));
    KA_EACH_MEMBER(root, name, entry) {
        if (ka_starts_with(name, "__metadata__"))
            continue;
        size_t i = set->count++;
        int rc = parse_tensor(name, entry, data_len, &set->items[i], &set->begins[i], err);
        if (rc)
            return rc;
    }
    int rc = refuse_overlap(set, err);
    if (rc == 0 && data_len - set->data_len > SLACK)
        rc = ka_fail(err, -EINVAL, "tensor file: %zu bytes of data, of which its tensors take %zu", data_len,
                     set->data_len);
    return rc;
}

/* Length of the header that these 8 bytes announce for a file of `len` bytes. */
static int header_length(const unsigned char *bytes, size_t len, size_t *out, struct ka_err *err)
{
    uint64_t header = 0;
    for (int i = HEADER_AT - 1; i >= 0; i--)
        header = header << 8 | bytes[i];
    if (header > KA_TENSOR_HEADER_MAX || header > len - HEADER_AT)
        return ka_fail(err, -EINVAL, "tensor file: header of %llu bytes is too long or cut off",
                       (unsigned long long)header);
    *out = (size_t)header;
    return 0;
}

/* Everything but the data. `header` is our own copy; the file has `len` bytes. */
static int parse_header(struct ka_tensors *set, const unsigned char *header, size_t header_len, size_t len,
                        struct ka_err *err)
{
    json_error_t why;
    json_auto_t *root = json_loadb((const char *)header, header_len, JSON_REJECT_DUPLICATES, &why);
    if (!root)
        return ka_fail(err, -EINVAL, "tensor file: header is not valid JSON: %s", why.text);
    set->data_at = HEADER_AT + header_len;
    return parse_entries(set, root, len - set->data_at, err);
}

/* ---- whole sets ---- */

static void attach(struct ka_tensors *set)
{
    for (size_t i = 0; i < set->count; i++)
        set->items[i].data = set->bytes + (set->items[i].count ? set->data_at + set->begins[i] : 0);
}

static int read_exactly(int fd, unsigned char *bytes, size_t len, size_t at, struct ka_err *err)
{
    size_t done = 0;
    while (done < len) {
        ssize_t n = pread(fd, bytes + done, len - done, (off_t)(at + done));
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return ka_fail(err, -errno, "tensor file: cannot read: %s", strerror(errno));
        if (n == 0)
            return ka_fail(err, -EINVAL, "tensor file: became shorter while it was read");
        done += (size_t)n;
    }
    return 0;
}

static int read_header(int fd, size_t len, struct ka_tensors *set, struct ka_err *err)
{
    unsigned char start[HEADER_AT];
    size_t header_len = 0;
    if (len < HEADER_AT)
        return ka_fail(err, -EINVAL, "tensor file has %zu bytes: too short", len);
    int rc = read_exactly(fd, start, sizeof(start), 0, err);
    rc = rc ? rc : header_length(start, len, &header_len, err);
    if (rc)
        return rc;
    KA_AUTO_FREE unsigned char *header = ka_calloc(header_len, 1);
    rc = read_exactly(fd, header, header_len, HEADER_AT, err);
    return rc ? rc : parse_header(set, header, header_len, len, err);
}

/* Nobody can write to the file or truncate it: the kernel grants a read lease only when no descriptor and no
 * mapping of it is writable, and makes whoever opens it for writing later wait, as long as our mapping lives.
 * A hole is no data, and reading it through a mapping would have memory allotted to it. */
static bool is_settled(int fd, size_t len)
{
    struct stat st;
    if (fcntl(fd, F_SETSIG, SIGURG) != 0 || fcntl(fd, F_SETLEASE, F_RDLCK) != 0)
        return false; /* also where a file system has no leases */
    off_t hole = lseek(fd, 0, SEEK_HOLE);
    return hole >= 0 && (size_t)hole >= len && fstat(fd, &st) == 0 && (uint64_t)st.st_size >= len;
}

/* Only what the file holds is copied: pages of its holes stay those of the kernel's one zero page. */
static int copy_file(struct ka_tensors *set, int fd, struct ka_err *err)
{
    void *bytes =
        mmap(NULL, set->len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (bytes == MAP_FAILED)
        return ka_fail(err, -ENOMEM, "no memory for %zu bytes of tensors", set->len);
    set->bytes = bytes;
    int rc = 0;
    for (size_t at = 0, end; at < set->len && rc == 0; at = end) {
        off_t data = lseek(fd, (off_t)at, SEEK_DATA);
        if (data < 0 && errno == ENXIO)
            break; /* a hole up to the end */
        at = data < 0 ? at : (size_t)data;
        off_t hole = data < 0 ? -1 : lseek(fd, data, SEEK_HOLE);
        end = hole < 0 || (size_t)hole > set->len ? set->len : (size_t)hole;
        if (at < end)
            rc = read_exactly(fd, set->bytes + at, end - at, at, err);
    }
    return rc;
}

int ka_tensors_read(int fd, size_t max, struct ka_tensors **out, struct ka_err *err)
{
    struct stat st;
    if (fstat(fd, &st) != 0)
        return ka_fail(err, -errno, "tensor file: %s", strerror(errno));
    if (!S_ISREG(st.st_mode))
        return ka_fail(err, -EINVAL, "tensor file: not a regular file");
    if ((uint64_t)st.st_size > max)
        return ka_fail(err, -EFBIG, "tensor file: %lld bytes, more than the %zu allowed",
                       (long long)st.st_size, max);
    struct ka_tensors *set = ka_calloc(1, sizeof(*set));
    int rc = read_header(fd, (size_t)st.st_size, set, err);
    if (rc)
        goto out;
    set->len = set->data_at + set->data_len;
    void *mapped = MAP_FAILED;
    if (set->len >= MAP_LEAST && is_settled(fd, set->len))
        mapped = mmap(NULL, set->len, PROT_READ, MAP_PRIVATE, fd, 0);
    if (mapped != MAP_FAILED)
        set->bytes = mapped;
    else
        rc = copy_file(set, fd, err);
    if (rc)
        goto out;
    attach(set);
    *out = set;
    set = NULL;
out:
    ka_tensors_free(set);
    return rc;
}

void ka_tensors_free(struct ka_tensors *set)
{
    if (!set)
        return;
    for (size_t i = 0; i < set->count; i++)
        free(set->items[i].name);
    free(set->items);
    free(set->begins);
    if (set->bytes)
        munmap(set->bytes, set->len);
    free(set);
}

size_t ka_tensors_count(const struct ka_tensors *set)
{
    return set->count;
}

const struct ka_tensor *ka_tensors_get(const struct ka_tensors *set, size_t i)
{
    return &set->items[i];
}

const struct ka_tensor *ka_tensors_find(const struct ka_tensors *set, const char *name)
{
    for (size_t i = 0; i < set->count; i++)
        if (strcmp(set->items[i].name, name) == 0)
            return &set->items[i];
    return NULL;
}

const struct ka_tensor *ka_tensors_find_part(const struct ka_tensors *set, const char *part, const char *of)
{
    char name[160];
    snprintf(name, sizeof(name), "%s/%s", part, of);
    return ka_tensors_find(set, name);
}

/* ---- elements ---- */

static double from_bits32(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof(value));
    return (double)value;
}

/* Without a branch, so that many are converted at once: the fraction and exponent as those of a float, which
 * the product brings to the right size, for subnormal numbers too. */
static double from_half(uint16_t half)
{
    uint32_t magnitude = (uint32_t)(half & 0x7fff) << 13, sign = (uint32_t)(half & 0x8000) << 16;
    uint32_t special = magnitude >= (uint32_t)0x7c00 << 13 ? 0x7f800000 : 0; /* infinite, or not a number */
    return from_bits32(magnitude | special | sign) * (special ? 1.0 : 0x1p112);
}

#define LOAD(type, expr)                                                                                     \
    for (size_t i = 0; i < n; i++) {                                                                         \
        type v;                                                                                              \
        memcpy(&v, from + i * sizeof(v), sizeof(v));                                                         \
        out[i] = (expr);                                                                                     \
    }                                                                                                        \
    break

KA_CLONES
void ka_tensor_load(const struct ka_tensor *tensor, size_t first, size_t n, double *out)
{
    const unsigned char *from = tensor->data + first * ka_dtype_size(tensor->dtype);
    switch (tensor->dtype) {
    case KA_F64:
        LOAD(double, v);
    case KA_F32:
        LOAD(float, (double)v);
    case KA_F16:
        LOAD(uint16_t, from_half(v));
    case KA_BF16:
        LOAD(uint16_t, from_bits32((uint32_t)v << 16));
    case KA_I64:
        LOAD(int64_t, (double)v);
    case KA_I32:
        LOAD(int32_t, v);
    case KA_I16:
        LOAD(int16_t, v);
    case KA_I8:
        LOAD(int8_t, v);
    case KA_U8:
        LOAD(uint8_t, v);
    case KA_BOOL:
        LOAD(uint8_t, v != 0);
    }
}

bool ka_tensor_is_zero(const struct ka_tensor *tensor)
{
    double values[256];
    for (size_t first = 0; first < tensor->count; first += KA_COUNT(values)) {
        size_t left = tensor->count - first, n = left < KA_COUNT(values) ? left : KA_COUNT(values);
        ka_tensor_load(tensor, first, n, values);
        for (size_t i = 0; i < n; i++)
            if (values[i] != 0)
                return false;
    }
    return true;
}

double ka_tensor_at(const struct ka_tensor *tensor, size_t i)
{
    double value = 0;
    ka_tensor_load(tensor, i, 1, &value);
    return value;
}

bool ka_tensor_same_shape(const struct ka_tensor *a, const struct ka_tensor *b)
{
    return a->rank == b->rank && memcmp(a->dims, b->dims, a->rank * sizeof(a->dims[0])) == 0;
}

int ka_tensor_shape_text(const struct ka_tensor *tensor, struct ka_buf *out)
{
    ka_buf_puts(out, "[");
    for (size_t i = 0; i < tensor->rank; i++)
        ka_buf_printf(out, "%s%zu", i ? ", " : "", tensor->dims[i]);
    return ka_buf_puts(out, "]");
}
