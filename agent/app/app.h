/* What all runs of one process share: loop, children, model, store, paths. Built once, before the loop runs. */
#ifndef KA_APP_H
#define KA_APP_H

#include <jansson.h>
#include <uv.h>

#include "base/base.h"
#include "opts.h"

struct ka_cache;
struct ka_children;
struct ka_llm;
struct ka_loop_watch;
struct ka_store;
struct ka_search;

enum ka_backend { KA_BACKEND_NONE, KA_BACKEND_OPENAI, KA_BACKEND_MAILBOX };

struct ka_app {
    struct ka_opts *opts;
    uv_loop_t loop;
    struct ka_loop_watch *watch;
    struct ka_children *children;
    size_t fan_width; /* children that one operation over many cases may have */
    struct ka_app_limits {
        unsigned mem_mb, scratch_mb;
    } gpu_child;              /* what a child on the GPU may take: shapes are the user's own there */
    struct ka_cache *cache;   /* of compiled kernels; NULL: not opened yet (agent/ops/compile.h), or none */
    bool cache_asked;         /* no need to try again */
    struct ka_llm *llm;       /* NULL unless the backend is openai */
    struct ka_store *store;   /* NULL when there is none, which the log says, or with --no-retrieval */
    struct ka_search *search; /* rows of the store, in memory */
    enum ka_backend backend;
    char *mailbox;     /* folder, when the backend is mailbox */
    char *share;       /* holds sandbox/, prompts/ and dataset/ */
    char *package_dir; /* share/sandbox: Python finds kernel_agent here */
    char *prompts_dir;
    char *python;
    char *device;    /* cpu or cuda */
    char *sanitizer; /* path of compute-sanitizer, with --sanitize; else NULL */
    char *api_key;   /* wiped in ka_app_close; NULL: none */
    bool interrupted;
    bool keeps_known; /* one forward after another: what was found out about the last one is kept */
    json_t *known;    /* by agent/run/known.c; NULL: nothing */
};

/* Exit code 2 (with `err`) for settings that do not fit, 6 for a missing sandbox layer, else 0. With `with_model`
 * false the model settings are not looked at. */
int ka_app_open(struct ka_app *app, struct ka_opts *opts, bool with_model, struct ka_err *err);

/* Close everything, run the loop until all handles are gone, check that it ends empty. */
void ka_app_close(struct ka_app *app);

/* Folder that holds sandbox/ and prompts/: KA_SHARE, beside the program, above it, or PREFIX/share/kernel-agent. free() it. */
char *ka_app_find_share(struct ka_err *err);

/* Default place of the pair store; free() it. */
char *ka_app_store_path(const struct ka_opts *opts, const char *share);

#endif
