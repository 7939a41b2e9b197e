/* Who mentions whom, over the modules of one folder: from a method to the functions, kernels and constants
 * that it uses, through imports, wherever they stand.
 *
 * A module is named by its path from the folder's own name on ("repo/ops/a.py"). `import a.b` is looked for
 * beside the file and in each folder above it; `from .a import b` where it says. Nothing is executed, and a
 * module that is not there is not followed. */
#ifndef KA_FOLLOW_H
#define KA_FOLLOW_H

#include "module.h"

struct ka_follow;

/* The text of the file, to be freed; NULL: there is none, or it may not be read. */
typedef char *(*ka_follow_read_fn)(void *arg, const char *path);

struct ka_follow *ka_follow_new(ka_follow_read_fn read, void *arg);
void ka_follow_free(struct ka_follow *follow); /* NULL is fine */

/* The module of that path, read and taken apart once; NULL with `err` set. Its pieces' marks are those of
 * ka_follow_mark(). Valid until ka_follow_forget(). */
struct ka_module *ka_follow_module(struct ka_follow *follow, const char *path, struct ka_err *err);

/* Set the bits of `mark` on each piece that tokens [first, end) of the module mention, and on what those
 * mention in turn. At most KA_FOLLOW_FILES modules are marked in; what lies beyond is left. */
#define KA_FOLLOW_FILES 64
void ka_follow_mark(struct ka_follow *follow, struct ka_module *module, size_t first, size_t end,
                    unsigned mark);

/* More names had to be compared than an honest file has: marks are missing. Until ka_follow_forget(). */
bool ka_follow_spent(const struct ka_follow *follow);

/* The modules with marks, in the order in which they were reached. */
size_t ka_follow_marked(const struct ka_follow *follow, struct ka_module *const **out);

void ka_follow_clear(struct ka_follow *follow);  /* all marks */
void ka_follow_forget(struct ka_follow *follow); /* the same; modules too, if they take much memory */

#endif
