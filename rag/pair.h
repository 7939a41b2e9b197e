/* A pair file as text: forward and backward around the marker line, and what its docstring says of it.
 *
 * The file is read, never executed. Its path gives family and id (`<family>/<id>.py`). The module docstring
 * may end with lines `op: ...`, `schedule: tag, tag`, `difficulty: n`, `dtypes: ...`, `license: ...`,
 * `imported: ...`; all are optional, unknown keys end the block. The licence is also taken from an
 * SPDX-License-Identifier line. */
#ifndef KA_PAIR_H
#define KA_PAIR_H

#include "base/base.h"
#include "base/hash.h"
#include "base/marker.h"

#define KA_PAIR_MAX ((size_t)1 << 20)

struct ka_pair {
    char *path; /* its last three components, "dataset/<family>/<id>.py": the same on every machine */
    char *id, *family;
    char *source;                           /* the whole file */
    char *forward, *backward;               /* before and after the marker line */
    char *title;                            /* first line of the docstring, or "" */
    char *op, *schedule, *dtypes, *license; /* "" when not given; schedule is "tag,tag" */
    char *imported;                         /* where an imported pair comes from (rag/import.h), or "" */
    char *stub;                             /* name of the function decorated with autodiff; "" if imported */
    char *kernels;                          /* names of the triton.jit functions, "a,b" */
    int difficulty;                         /* 0 when not given */
    char hash[KA_HASH_HEX];                 /* of the source */
};

/* Copies `source`. -EINVAL, with a sentence and a remedy, for a text without marker, stub or kernels or with
 * a NUL byte; -EFBIG beyond KA_PAIR_MAX. */
int ka_pair_parse(const char *path, const char *source, size_t len, struct ka_pair *out, struct ka_err *err);

/* Read and parse the file; besides the errors above a negative errno. */
int ka_pair_read(const char *path, struct ka_pair *out, struct ka_err *err);

void ka_pair_free(struct ka_pair *pair); /* the content; leaves it zeroed */

#endif
