/* Shared by the files of the children only: child.c, child_args.c, child_files.c, child_result.c. */
#ifndef KA_CHILD_INTERNAL_H
#define KA_CHILD_INTERNAL_H

#include "args.h"
#include "base/base.h"
#include "child.h"
#include "machine.h"

/* ---- child_files.c ---- */

/* The folder under which scratches are made: exists, ours, writable by nobody else. free(*path). */
int ka_child_base(const char *wanted, char **path, struct ka_err *err);
/* This daemon's folder below the base, locked by the descriptor: without it the next daemon removes the
 * folder and all that a killed one left there. ka_rmtree() and free(*path), then close(*lock). */
int ka_child_own_folder(const char *base, char **path, int *lock, struct ka_err *err);
/* A fresh folder, mode 0700, holding request.json. free(*path) after ka_rmtree(). */
int ka_child_scratch_new(const char *base, const char *request, char **path, struct ka_err *err);
/* How much of what this daemon may use is left: for the youngest child to go; for those that run, but not for
 * one more; for one more; for as many as there are. Memory that cannot be told is enough. */
enum ka_child_memory { KA_MEMORY_LOW, KA_MEMORY_TIGHT, KA_MEMORY_ENOUGH, KA_MEMORY_AMPLE };
enum ka_child_memory ka_child_memory(const struct ka_machine *machine);

/* ---- child_result.c ---- */

/* The public part comes first: a pointer to it is a pointer to the whole. */
struct result {
    struct ka_child_result pub;
    struct ka_buf out, err, layers;
    char *scratch;
    unsigned holders; /* whoever kept it, and whoever tells of it */
    struct ka_loop *loop;
};

/* ---- child_args.c ---- */

/* The options of ka-jail for this request, "--", the interpreter: the same whoever makes the jail. `card` is
 * the GPU's name (cards.h). */
void ka_child_args_jail(struct ka_args *args, const struct ka_child_req *req, const char *scratch,
                        const char *card);

/* NULL for a request without its parts. Free with ka_child_req_free(). */
struct ka_child_req *ka_child_req_copy(const struct ka_child_req *req);
void ka_child_req_free(struct ka_child_req *req);
bool ka_child_req_is_gpu(const struct ka_child_req *req);

#endif
