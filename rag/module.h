/* A Python module as text, taken apart: what stands at its top level, and what it imports.
 *
 * The text is read, never executed. A piece is a function, a class or a line `NAME = ...` at the top level.
 * Imports count wherever they stand. Pure. */
#ifndef KA_MODULE_H
#define KA_MODULE_H

#include "lex.h"

enum ka_piece_kind { KA_PIECE_CONSTANT, KA_PIECE_FUNCTION, KA_PIECE_KERNEL, KA_PIECE_CLASS };

struct ka_piece {
    size_t first, end; /* tokens: from its first decorator to one past its body */
    size_t name;       /* token */
    enum ka_piece_kind kind;
    unsigned marks; /* whoever follows names (rag/follow.h) */
};

/* `import a.b`, `import a.b as c`, `from .a import b as c`, `from a import *`. */
struct ka_binding {
    char *name;   /* in this module: "a.b", "c", "*" */
    char *module; /* "a.b", ".a" */
    char *member; /* of that module; NULL: the module itself */
};

struct ka_module {
    char *path, *source;
    size_t len;
    struct ka_tokens tokens;
    struct ka_piece *pieces;
    size_t count;
    struct ka_binding *bindings;
    size_t binding_count;
};

/* Copies path and source. -EFBIG for a text that is too long or has too many pieces or imports. Free with
 * ka_module_free(). */
int ka_module_parse(const char *path, const char *source, struct ka_module *out, struct ka_err *err);
void ka_module_free(struct ka_module *module);

/* A torch.autograd.Function: a class with `Function` among its bases, from its `class` on. */
bool ka_module_is_function(const struct ka_module *module, size_t class_token);

/* The method of that name of the class: from its `def` to the next line that is indented no deeper. */
bool ka_module_method(const struct ka_module *module, const struct ka_piece *class, const char *name,
                      size_t *first, size_t *end);

/* What the head of the file says: its first comments, and its docstring where that speaks of a licence or a
 * copyright, all as comment lines. */
void ka_module_notices(const struct ka_module *module, struct ka_buf *out);

/* Append bytes [from, to) without the blank lines and comments at their end (those stand above what comes
 * next), and two blank lines. */
void ka_module_put(const struct ka_module *module, size_t from, size_t to, struct ka_buf *out);
void ka_module_put_piece(const struct ka_module *module, const struct ka_piece *piece, struct ka_buf *out);

/* What stands between the definitions: imports and constants, up to `if __name__`. Not the docstring. */
void ka_module_put_lines(const struct ka_module *module, struct ka_buf *out);

#endif
