/* The command line of ka-jail, built word by word. What does not fit is left out: see KA_ARGS_MAX. */
#ifndef KA_ARGS_H
#define KA_ARGS_H

#include "base/base.h"

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
/* What the libraries of a GPU need to be found; nothing else of our environment goes in. `card`: the one that
 * it sees, as CUDA_VISIBLE_DEVICES has it; NULL: all that we see. */
void ka_args_gpu(struct ka_args *args, const char *card);
void ka_args_clear(struct ka_args *args);

#endif
