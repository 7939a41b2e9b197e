/* Other people's files as pairs: each torch.autograd.Function whose forward and backward launch Triton
 * kernels becomes one.
 *
 * The file is read, never executed. What the forward reaches (kernels, helpers) is the pair's forward, what
 * only the backward reaches, and the class itself, its backward; imports and constants of the module stay
 * above. The pair's docstring names the file, its hash and its licence. Such a pair has no stub, no shapes
 * and no arguments: it is an example to retrieve, and cannot be verified. */
#ifndef KA_IMPORT_H
#define KA_IMPORT_H

#include "base/base.h"

struct ka_import_unit {
    char *name;   /* of the class */
    char *source; /* the pair's text; NULL: not taken */
    char *why;    /* not taken, because; NULL */
};

struct ka_import_units {
    struct ka_import_unit *items;
    size_t count;
    bool kernels; /* the file has Triton kernels at all */
};

/* Take a file apart. `shown` is the path to record, `license` its licence. -EFBIG. A file without an autograd
 * function gives no unit. Free with ka_import_free(). */
int ka_import_split(const char *shown, const char *source, const char *license, struct ka_import_units *out,
                    struct ka_err *err);
void ka_import_free(struct ka_import_units *units);

#endif
