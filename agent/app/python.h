/* Which Python runs in the jail. One that was named, or the first with torch and Triton of these:
 *
 *   $VIRTUAL_ENV/bin/python, $CONDA_PREFIX/bin/python, each python3 and python on PATH,
 *   the .venv of this installation, /usr/bin/python3
 *
 * Nothing is imported to find out: an interpreter is asked where it would find the modules (`-I -c`, so that
 * neither the working folder nor the user's site-packages count, as in the jail). Blocks; before the loop
 * runs. */
#ifndef KA_PYTHON_H
#define KA_PYTHON_H

#include <jansson.h>

#include "base/base.h"

/* What to choose from; each may be NULL. */
struct ka_python_where {
    const char *wanted; /* --python: a path, or a name to be looked for on PATH */
    const char *virtual_env, *conda_prefix, *path;
    const char *share; /* folder with the .venv */
};

struct ka_python {
    char *place; /* where it was found */
    char *path;  /* what to run; `place`, unless that is a script that starts an interpreter elsewhere */
    const char *source; /* "--python", "$VIRTUAL_ENV", "PATH", ...: static */
    /* "python", "torch", "triton", "numpy": text, null where it is missing; "elsewhere": folders outside of
     * what is installed in which it finds modules (`pip install -e`); NULL: did not answer */
    json_t *versions;
    /* What keeps it from being used, after "lacks" or "cannot be used"; NULL: nothing, or not asked. */
    char *lacks;
    bool asked;
};

struct ka_pythons {
    struct ka_python *list; /* the order of preference */
    size_t count;
    size_t chosen; /* `count`: none */
};

/* 0 and an object with "executable" and the versions (ka_python.versions), or a negative code with a sentence
 * like "cannot be run: ...". */
typedef int (*ka_python_ask_fn)(void *arg, const char *place, json_t **answer, struct ka_err *err);

/* Those that are there, one interpreter once; nothing is asked yet. Free with ka_pythons_free(). */
void ka_pythons_list(const struct ka_python_where *where, struct ka_pythons *out);

/* Ask in order until one can be used; with `all` the others too. If one was named it is that one or none, and
 * where it cannot be used the others are asked for the sake of ka_pythons_complain(). `ask` NULL: really. */
void ka_pythons_choose(struct ka_pythons *pythons, bool all, ka_python_ask_fn ask, void *arg);

/* Both, for this process: really asked. */
void ka_pythons_find(const char *wanted, const char *share, bool all, struct ka_pythons *out);

/* Why none was chosen: what was tried, what each lacks, what to do. */
void ka_pythons_complain(const struct ka_pythons *pythons, struct ka_err *err);

void ka_pythons_free(struct ka_pythons *pythons);

/* Are these (of ka_python.versions) recent enough for kernel_agent? What is not is appended to `lacks`, if
 * that is not NULL. */
bool ka_python_fits(const json_t *versions, struct ka_buf *lacks);

#endif
