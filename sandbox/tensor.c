/* Reads the safetensors layout from hostile bytes. Knows nothing of oracles, candidates or verdicts. */
#include "tensor.h"

#include <errno.h>
#include <jansson.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

struct ka_tensors {
    unsigned char *bytes;
    struct ka_tensor *items;
    size_t count;
};

static const struct {
    const char *tag, *name;
    size_t size;
    bool is_float;
} DTYPES[] = {
    [KA_F64] = {"F64", "float64", 8, true}, [KA_F32] = {"F32", "float32", 4, true},
    [KA_F16] = {"F16", "float16", 2, true}, [KA_BF16] = {"BF16", "bfloat16", 2, true},
    [KA_I64] = {"I64", "int64", 8, false},  [KA_I32] = {"I32", "int32", 4, false},
    [KA_I16] = {"I16", "int16", 2, false},  [KA_I8] = {"I8", "int8", 1, false},
    [KA_U8] = {"U8", "uint8", 1, false},    [KA_BOOL] = {"BOOL", "bool", 1, false},
};

size_t ka_dtype_size(enum ka_dtype dtype)
{
    return DTYPES[dtype].size;
}

bool ka_dtype_is_float(enum ka_dtype dtype)
{
    return DTYPES[dtype].is_float;
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

/* Sets data to the tensor's bytes, once its offsets are in range and hold exactly its elements. */
static int parse_offsets(const json_t *offsets, const unsigned char *data, size_t data_len,
                         struct ka_tensor *t, struct ka_err *err)
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
    t->data = data + begin;
    return 0;
}

static int parse_tensor(const char *name, const json_t *entry, const unsigned char *data, size_t data_len,
                        struct ka_tensor *t, struct ka_err *err)
{
    if (!*name)
        return ka_fail(err, -EINVAL, "a tensor has no name");
    t->name = ka_strdup(name);
    const char *dtype = json_string_value(json_object_get(entry, "dtype"));
    if (!dtype || ka_dtype_parse(dtype, &t->dtype) != 0)
        return ka_fail(err, -EINVAL, "tensor %.80s: unknown dtype %.20s", name, dtype ? dtype : "(none)");
    int rc = parse_shape(json_object_get(entry, "shape"), t, err);
    if (rc == 0)
        rc = parse_offsets(json_object_get(entry, "data_offsets"), data, data_len, t, err);
    return rc;
}

static int by_address(const void *a, const void *b)
{
    const struct ka_tensor *x = *(const struct ka_tensor *const *)a, *y = *(const struct ka_tensor *const *)b;
    return x->data < y->data ? -1 : x->data > y->data;
}

static int refuse_overlap(const struct ka_tensors *set, struct ka_err *err)
{
    const struct ka_tensor **order = ka_calloc(set->count, sizeof(const struct ka_tensor *));
    size_t n = 0;
    for (size_t i = 0; i < set->count; i++)
        if (set->items[i].count)
            order[n++] = &set->items[i];
    qsort(order, n, sizeof(const struct ka_tensor *), by_address);
    int rc = 0;
    for (size_t i = 1; i < n && rc == 0; i++) {
        const struct ka_tensor *before = order[i - 1];
        if (order[i]->data < before->data + before->count * ka_dtype_size(before->dtype))
            rc = ka_fail(err, -EINVAL, "tensors %.80s and %.80s overlap", before->name, order[i]->name);
    }
    free(order);
    return rc;
}

static int parse_header(struct ka_tensors *set, json_t *root, const unsigned char *data, size_t data_len,
                        struct ka_err *err)
{
    size_t entries = json_object_size(root);
    if (!json_is_object(root) || entries > KA_TENSORS_MAX)
        return ka_fail(err, -EINVAL, "tensor header is not an object of at most %d tensors", KA_TENSORS_MAX);
    set->items = ka_calloc(entries, sizeof(*set->items));
    const char *name;
    json_t *entry;
    json_object_foreach(root, name, entry)
    {
        if (ka_starts_with(name, "__metadata__"))
            continue;
        int rc = parse_tensor(name, entry, data, data_len, &set->items[set->count++], err);
        if (rc)
            return rc;
    }
    return refuse_overlap(set, err);
}

/* ---- whole sets ---- */

/* Takes `bytes` over, also on failure. */
static int parse_owned(unsigned char *bytes, size_t len, struct ka_tensors **out, struct ka_err *err)
{
    struct ka_tensors *set = ka_calloc(1, sizeof(*set));
    set->bytes = bytes;
    json_t *root = NULL;
    int rc;
    uint64_t header = 0;
    if (len < 8) {
        rc = ka_fail(err, -EINVAL, "tensor file has %zu bytes: too short", len);
        goto out;
    }
    for (int i = 7; i >= 0; i--)
        header = header << 8 | bytes[i];
    if (header > KA_TENSOR_HEADER_MAX || header > len - 8) {
        rc = ka_fail(err, -EINVAL, "tensor file: header of %llu bytes is too long or cut off",
                     (unsigned long long)header);
        goto out;
    }
    json_error_t why;
    root = json_loadb((const char *)bytes + 8, header, JSON_REJECT_DUPLICATES, &why);
    if (!root) {
        rc = ka_fail(err, -EINVAL, "tensor file: header is not valid JSON: %s", why.text);
        goto out;
    }
    rc = parse_header(set, root, bytes + 8 + header, len - 8 - header, err);
out:
    json_decref(root);
    if (rc)
        ka_tensors_free(set);
    else
        *out = set;
    return rc;
}

int ka_tensors_parse(const void *bytes, size_t len, struct ka_tensors **out, struct ka_err *err)
{
    unsigned char *copy = malloc(len ? len : 1);
    if (!copy)
        return ka_fail(err, -ENOMEM, "no memory for %zu bytes of tensors", len);
    if (len)
        memcpy(copy, bytes, len);
    return parse_owned(copy, len, out, err);
}

static int read_exactly(int fd, unsigned char *bytes, size_t len, struct ka_err *err)
{
    size_t done = 0;
    while (done < len) {
        ssize_t n = pread(fd, bytes + done, len - done, (off_t)done);
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
    size_t len = (size_t)st.st_size;
    unsigned char *bytes = malloc(len ? len : 1);
    if (!bytes)
        return ka_fail(err, -ENOMEM, "no memory for %zu bytes of tensors", len);
    int rc = read_exactly(fd, bytes, len, err);
    if (rc) {
        free(bytes);
        return rc;
    }
    return parse_owned(bytes, len, out, err);
}

void ka_tensors_free(struct ka_tensors *set)
{
    if (!set)
        return;
    for (size_t i = 0; i < set->count; i++)
        free(set->items[i].name);
    free(set->items);
    free(set->bytes);
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

/* ---- elements ---- */

static double from_bits32(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof(value));
    return (double)value;
}

/* Without a branch, so that many are converted at once: the fraction and exponent as those of a float, which the product brings to
 * the right size, for subnormal numbers too. */
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
    int rc = ka_buf_puts(out, "[");
    for (size_t i = 0; i < tensor->rank && rc == 0; i++)
        rc = ka_buf_printf(out, "%s%zu", i ? ", " : "", tensor->dims[i]);
    return rc ? rc : ka_buf_puts(out, "]");
}
