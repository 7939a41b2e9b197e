/* Tensor sets for tests, written as a child would write them. */
#ifndef TENSOR_FIXTURE_H
#define TENSOR_FIXTURE_H

#include <assert.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "sandbox/tensor.h"

/* A set from the bytes of a file. */
static inline int parse_bytes(const void *bytes, size_t len, struct ka_tensors **out, struct ka_err *err)
{
    int fd = memfd_create("tensors", MFD_CLOEXEC);
    if (fd < 0 || write(fd, bytes, len) != (ssize_t)len)
        abort();
    int rc = ka_tensors_read(fd, len, out, err);
    close(fd);
    return rc;
}

/* A set from a JSON header and raw data. */
static inline int parse_set(const char *header, const void *data, size_t len, struct ka_tensors **out,
                            struct ka_err *err)
{
    struct ka_buf file = {0};
    uint64_t n = strlen(header);
    ka_buf_add(&file, &n, 8);
    ka_buf_puts(&file, header);
    ka_buf_add(&file, data, len);
    int rc = parse_bytes(file.data, file.len, out, err);
    ka_buf_free(&file);
    return rc;
}

/* The nearest value of float16, of numbers below its largest and what is no number. */
static inline uint16_t half_of(double value)
{
    int exponent;
    if (!isfinite(value))
        return (uint16_t)(isnan(value) ? 0x7e00 : signbit(value) ? 0xfc00 : 0x7c00);
    double mantissa = frexp(fabs(value), &exponent); /* 0.5 .. 1 */
    uint16_t bits = (uint16_t)nearbyint(ldexp(fabs(value), 24));
    if (value != 0 && exponent > -14) /* else subnormal; the mantissa carries into the exponent */
        bits = (uint16_t)(((exponent + 13) << 10) + (int)nearbyint(ldexp(mantissa, 11)));
    return (uint16_t)(bits | (signbit(value) ? 0x8000 : 0));
}

/* One tensor "t" of `dtype` (F16, F32 or F64) with these values; the shape is JSON text such as "[2,3]". */
static inline struct ka_tensors *make_set(const char *dtype, const char *shape, const double *values,
                                          size_t count)
{
    struct ka_buf data = {0};
    for (size_t i = 0; i < count; i++) {
        float narrow = (float)values[i];
        uint16_t half = strcmp(dtype, "F16") == 0 ? half_of(values[i]) : 0;
        if (strcmp(dtype, "F64") == 0)
            ka_buf_add(&data, &values[i], 8);
        else if (strcmp(dtype, "F16") == 0)
            ka_buf_add(&data, &half, 2);
        else
            ka_buf_add(&data, &narrow, 4);
    }
    char header[256];
    snprintf(header, sizeof(header), "{\"t\":{\"dtype\":\"%s\",\"shape\":%s,\"data_offsets\":[0,%zu]}}",
             dtype, shape, data.len);
    struct ka_tensors *set = NULL;
    int rc = parse_set(header, data.data, data.len, &set, NULL);
    assert(rc == 0);
    (void)rc;
    ka_buf_free(&data);
    return set;
}

/* Signed numbers without structure, deterministic. */
static inline double noise(uint64_t i)
{
    return (double)(int64_t)ka_mix64(i * 0x9e3779b97f4a7c15u) / 0x1p63;
}

#endif
