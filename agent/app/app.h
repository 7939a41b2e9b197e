/* What all runs of one process share: loop, children, endpoint, store, paths. Built once, before the loop
 * runs. What differs between runs is in settings.h. */
#ifndef KA_APP_H
#define KA_APP_H

#include <jansson.h>

#include "base/base.h"
#include "endpoints.h"

#define KA_VERSION "0.1.0"

struct ka_cache;
struct ka_cards;
struct ka_children;
struct ka_llm;
struct ka_loop;
struct ka_opts;
struct ka_settings;
struct ka_store;
struct ka_search;

struct ka_app {
    struct ka_loop *loop;
    struct ka_children *children;
    bool gpu;                        /* runs may use one */
    struct ka_cards *cards;          /* which; NULL without */
    size_t fan_width, gpu_fan_width; /* children that one operation over many cases may have */
    double gpu_start;                /* seconds to a context of CUDA, as of late; 0: none was opened yet */
    struct ka_app_limits {
        unsigned mem_mb, scratch_mb;
    } gpu_child;              /* what a child on the GPU may take: shapes are the user's own there */
    uint64_t cache_bytes;     /* most that compiled kernels may take; 0: none are kept */
    struct ka_cache *cache;   /* of compiled kernels; NULL: not opened yet (agent/ops/compile.h), or none */
    bool cache_asked;         /* no need to try again */
    struct ka_llm *llm;       /* NULL: no endpoint */
    struct ka_store *store;   /* NULL when there is none, which the log says, or with --no-retrieval */
    struct ka_search *search; /* rows of the store, in memory */
    char *lessons;            /* the file of them (rag/lessons.h); NULL: this user has no home */
    bool lessons_failed;      /* which was told */
    char *share;              /* holds sandbox/, prompts/ and dataset/ */
    char *package_dir;        /* share/sandbox: Python finds kernel_agent here */
    char *python;
    json_t *python_versions;       /* of it (ka_python.versions) */
    struct ka_endpoints endpoints; /* keys are wiped in ka_app_close */
};

/* ka_python.versions has it; NULL where no interpreter was asked. */
const json_t *ka_app_elsewhere(const struct ka_app *app);

/* Exit code 2 (with `err`) for options that do not fit, else 0. With `with_model` false there is neither
 * endpoint nor store. `runs`: as many as there will be at a time. */
int ka_app_open(struct ka_app *app, const struct ka_opts *opts, bool with_model, int runs,
                struct ka_err *err);

/* Close everything, run the loop until all handles are gone, check that it ends empty. */
void ka_app_close(struct ka_app *app);

/* Folder that holds sandbox/ and prompts/: KA_SHARE, beside the program, above it, or
 * PREFIX/share/kernel-agent. free() it. */
char *ka_app_find_share(struct ka_err *err);

/* Has this process what the settings want? -EINVAL with `err` if not. */
int ka_settings_fit(const struct ka_settings *settings, const struct ka_app *app, struct ka_err *err);

#endif
