/* What one run, or one operation, is to do, where, and what it may spend. Each run has its own copy, which
 * nobody else changes: runs of one process may differ in all of it. What they share is app.h. */
#ifndef KA_SETTINGS_H
#define KA_SETTINGS_H

#include "base/base.h"

enum ka_backend { KA_BACKEND_NONE, KA_BACKEND_OPENAI, KA_BACKEND_MAILBOX };

struct ka_settings {
    char *out;   /* folder of run folders */
    char *sweep; /* "all", "required", or a JSON list of dims */
    char *path;  /* folders of the user's modules, with commas between; "": none but the file's own */
    bool fail_fast;
    char *function; /* of a file's functions the one that is meant; NULL: the stub, or the first */
    /* similar pairs */
    bool no_retrieval, no_lessons;
    int topk;
    double min_sim;
    char *rag_exclude;
    /* the model */
    char *backend; /* as it was asked for */
    enum ka_backend answers;
    char *mailbox; /* folder, where answers are KA_BACKEND_MAILBOX; else NULL */
    char *model;
    char *reasoning_effort; /* "": the endpoint's own */
    int context_tokens;
    char *draft; /* "auto", "llm", "differentiator" */
    bool no_wait;
    char *prompts; /* folder of the templates */
    /* budgets; 0: none */
    int max_iters, candidates, patience_parity, patience_perf;
    double min_rel_impr;
    int max_tokens, max_seconds;
    double max_cost, price_in, price_out;
    bool no_optimise;
    /* where it runs */
    char *device; /* "cpu" or "cuda"; in the program's options also "auto" */
    size_t card;  /* which of the process' cards (agent/io/cards.h), where it is "cuda" */
    char *target;
    char *dtype; /* "": the file's own */
    char *require_sandbox;
    int deadline;    /* seconds of one child */
    char *sanitizer; /* path of compute-sanitizer, with --sanitize; else NULL */
};

/* Deep. `to` is overwritten. */
void ka_settings_copy(struct ka_settings *to, const struct ka_settings *from);
/* One of the texts, replaced by a copy of `value`. */
void ka_settings_set(char **text, const char *value);
void ka_settings_free(struct ka_settings *settings); /* the content; a zeroed struct is fine */

#endif
