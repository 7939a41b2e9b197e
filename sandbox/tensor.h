/* Tensors that a child wrote: a reader of the safetensors layout that trusts no byte of it.
 *
 * Layout: 8 bytes little-endian header length, a JSON header {"name": {"dtype", "shape", "data_offsets":
 * [begin, end]}}, then the data, row-major. Names beginning with "__metadata__" are not tensors.
 *
 * Refused, with a sentence: a header over 1 MiB or past the end, invalid JSON, duplicate or empty names,
 * unknown dtypes, more than KA_TENSOR_RANK_MAX axes or KA_TENSORS_MAX tensors, sizes that overflow or differ
 * from the offsets, offsets out of range or overlapping, more than 1 MiB behind the last tensor. Gaps between
 * tensors are allowed (aligned writers leave them).
 *
 * A tensor set owns its bytes. A process which still holds the file must neither change a judged value nor
 * truncate it under the reader. So a file is mapped only when the kernel has granted a read lease on it,
 * which it does when nobody can write to it through a descriptor or a mapping; that the writer's processes
 * are all gone by then is the jail's business (docs/jail.md). Any other file is copied, its holes aside: a
 * sparse file takes the memory of what was written, however long it is. The header is parsed from a copy in
 * either case, before anything else is touched.
 *
 * A set may be used by one thread after another; reading it, by several at once. */
#ifndef KA_TENSOR_H
#define KA_TENSOR_H

#include "base/base.h"

#define KA_TENSOR_RANK_MAX 8
#define KA_TENSORS_MAX 4096
#define KA_TENSOR_HEADER_MAX ((size_t)1 << 20)

enum ka_dtype { KA_F64, KA_F32, KA_F16, KA_BF16, KA_I64, KA_I32, KA_I16, KA_I8, KA_U8, KA_BOOL };

struct ka_tensor {
    char *name;
    enum ka_dtype dtype;
    size_t rank;
    size_t dims[KA_TENSOR_RANK_MAX];
    size_t count;              /* product of dims; 1 for a scalar */
    const unsigned char *data; /* inside the set's memory, not aligned */
};

struct ka_tensors;

/* On a function that passes over every element: built for processors with AVX2 too, and chosen when the
 * program starts. By gcc alone, since what clang 14 makes of it does not link; not below sanitizers, which
 * are not ready by then. */
#if defined(KA_CLONE) && !defined(__clang__)
#define KA_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define KA_CLONES
#endif

/* Read the regular file behind `fd`, which was opened for reading alone; the caller closes it at any time
 * afterwards. The file position means nothing, and may be moved. -EFBIG above `max` bytes, -EINVAL for
 * anything that is not a well-formed set, -ENOMEM, or the read's errno.
 */
int ka_tensors_read(int fd, size_t max, struct ka_tensors **out, struct ka_err *err);

void ka_tensors_free(struct ka_tensors *set); /* NULL is fine */

size_t ka_tensors_count(const struct ka_tensors *set);
const struct ka_tensor *ka_tensors_get(const struct ka_tensors *set, size_t i); /* i < count */
/* NULL when absent. */
const struct ka_tensor *ka_tensors_find(const struct ka_tensors *set, const char *name);
/* The tensor "part/of", as children name what belongs to an input or an output. */
const struct ka_tensor *ka_tensors_find_part(const struct ka_tensors *set, const char *part, const char *of);

/* Element `i` (< count) in row-major order. Integers beyond 2^53 are rounded. */
double ka_tensor_at(const struct ka_tensor *tensor, size_t i);

/* Elements first .. first+n-1, which must exist, into `out`. */
void ka_tensor_load(const struct ka_tensor *tensor, size_t first, size_t n, double *out);

/* Every element is zero, or there is none. */
bool ka_tensor_is_zero(const struct ka_tensor *tensor);

bool ka_tensor_same_shape(const struct ka_tensor *a, const struct ka_tensor *b);

size_t ka_dtype_size(enum ka_dtype dtype);
const char *ka_dtype_name(enum ka_dtype dtype); /* "float32", as torch spells it */

/* From torch's ("float32") or the header's ("F32") spelling; -EINVAL for others. */
int ka_dtype_parse(const char *name, enum ka_dtype *out);

/* "[2, 100]" */
int ka_tensor_shape_text(const struct ka_tensor *tensor, struct ka_buf *out);

#endif
