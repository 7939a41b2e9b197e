/* Other people's files as pairs: each torch.autograd.Function whose forward and backward launch Triton
 * kernels becomes one.
 *
 * The file is read, never executed. What the forward reaches (kernels, helpers) is the pair's forward, what
 * only the backward reaches, and the class itself, its backward, from whatever file of the folder it is
 * imported (rag/follow.h); imports and constants of the class's module stay above. What a file's head says of
 * its licence is kept. Such a pair has no stub, no shapes and no arguments: it is an example to retrieve, and
 * cannot be verified. */
#ifndef KA_IMPORT_H
#define KA_IMPORT_H

#include "follow.h"

struct ka_import_unit {
    char *name;    /* of the class */
    unsigned line; /* of its `class` */
    char *source;  /* the pair's text, without a docstring; NULL: not taken */
    char **files;  /* the paths of the files it was taken from, that of the class first */
    size_t file_count;
    char *why; /* not taken, because; NULL */
};

struct ka_import_units {
    struct ka_import_unit *items;
    size_t count;
    unsigned kernel_line; /* of the file's first Triton kernel; 0: it has none */
};

/* Append what the pair says above that which it takes of the file at `path`: lines of comments. */
typedef void (*ka_import_heading_fn)(void *arg, const struct ka_module *module, struct ka_buf *out);

/* Take the file at `path` apart. -EFBIG, or -ENOENT where it cannot be read. A file without an autograd
 * function gives no unit. Free with ka_import_free(). */
int ka_import_split(struct ka_follow *follow, const char *path, ka_import_heading_fn heading, void *arg,
                    struct ka_import_units *out, struct ka_err *err);
void ka_import_free(struct ka_import_units *units);

#endif
