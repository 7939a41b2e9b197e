/* Shared by the files of the children only: child.c, child_args.c, child_files.c. */
#ifndef KA_CHILD_INTERNAL_H
#define KA_CHILD_INTERNAL_H

#include <sys/types.h>

#include "base/base.h"
#include "child.h"

/* ---- child_files.c ---- */

/* The folder under which scratches are made: exists, ours, writable by nobody else. free(*path). */
int ka_child_base(const char *wanted, char **path, struct ka_err *err);
/* This daemon's folder below the base, locked by the descriptor: without it the next daemon removes the
 * folder and all that a killed one left there. ka_rmtree() and free(*path), then close(*lock). */
int ka_child_own_folder(const char *base, char **path, int *lock, struct ka_err *err);
/* A fresh folder, mode 0700, holding request.json. free(*path) after ka_rmtree(). */
int ka_child_scratch_new(const char *base, const char *request, char **path, struct ka_err *err);
/* Whether the machine runs out, by the text of /proc/meminfo; false for a text that does not say. */
bool ka_child_memory_is_low(const char *meminfo);
/* Whether children cannot use it up within a second; false for a text that does not say. */
bool ka_child_memory_is_ample(const char *meminfo);

/* What a socket brought, and the descriptor that came with it. Bytes, 0 at the end, -errno. */
ssize_t ka_child_receive(int socket, char *text, size_t size, int *fd);

/* ---- child_args.c ---- */

/* The command line of ka-jail, built word by word. What does not fit is left out: see KA_ARGS_MAX. */
#define KA_ARGS_LIST_MAX 64 /* readable paths, and variables, of one request */
#define KA_ARGS_MAX (2 * (2 * KA_ARGS_LIST_MAX + 24))

/* Owned strings, and always a NULL behind the last. */
struct ka_args {
    char *argv[KA_ARGS_MAX];
    size_t count;
};

void ka_args_add(struct ka_args *args, const char *text);
void ka_args_option(struct ka_args *args, const char *name, const char *value);
void ka_args_number(struct ka_args *args, const char *name, unsigned value); /* nothing for 0 */
/* --env NAME=VALUE */
void ka_args_variable(struct ka_args *args, const char *name, const char *value);
/* What the libraries of a GPU need to be found; nothing else of our environment goes in. */
void ka_args_gpu(struct ka_args *args);
void ka_args_clear(struct ka_args *args);

/* The options of ka-jail for this request, "--", the interpreter: the same whoever makes the jail. */
void ka_child_args_jail(struct ka_args *args, const struct ka_child_req *req, const char *scratch);

/* NULL for a request without its parts. Free with ka_child_req_free(). */
struct ka_child_req *ka_child_req_copy(const struct ka_child_req *req);
void ka_child_req_free(struct ka_child_req *req);
bool ka_child_req_is_gpu(const struct ka_child_req *req);

#endif
