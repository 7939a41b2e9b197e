/* One run: a forward file through inspect, preflight, retrieve, draft, check, fix, optimise, to its folder of
 * results.
 *
 * The run drives the pure machine of agent/core/job.h: it executes its commands on the loop and feeds back
 * what happened. Its folder holds run.db (agent/disk/state.h), run.jsonl (agent/disk/record.h), forward.py
 * (the user's file as it was), candidates/, and at the end the pair, report.md, report.html and result.json.
 * Loop thread only; many runs share one app. */
#ifndef KA_RUN_H
#define KA_RUN_H

#include <jansson.h>

#include "agent/app/app.h"
#include "agent/app/settings.h"
#include "result.h"

struct ka_run;
struct ka_known;

/* Runs once, on the loop thread, never from inside start or resume. The run may be freed from inside.
 * `waiting`: a mailbox run with --no-wait that has put its question; it is resumable and has not ended. */
typedef void (*ka_run_done_fn)(struct ka_run *run, bool waiting, void *arg);

enum ka_run_mode {
    KA_RUN_COMPLETE, /* the main job; a backward that the file has already is ignored */
    KA_RUN_QUESTION, /* the same up to the first question to the model, which is kept: ka_run_question() */
    KA_RUN_CHECK,    /* the verdict on the backward that the file has: no model, no draft, no optimisation */
};

struct ka_run_req {
    const struct ka_settings *settings; /* copied */
    const char *file;
    enum ka_run_mode mode;
    struct ka_known
        *known; /* for a check: what earlier ones found out, and where it is kept; outlives the run; NULL */
    ka_run_done_fn done;
    void *arg;
};

/* A fresh run of a file. Errors: the file is missing or no regular file (-ENOENT, -EINVAL), the output folder
 * is not writable (-EACCES, -ENOSPC, ...). */
int ka_run_start(struct ka_app *app, const struct ka_run_req *req, struct ka_run **out, struct ka_err *err);

/* Go on with a run folder. -ENOENT: no such run; -EBUSY: another process has it; -ESTALE: the user's file has
 * changed, or the settings ask for other shapes, another dtype, target or device. */
int ka_run_resume(struct ka_app *app, const struct ka_settings *settings, const char *dir,
                  ka_run_done_fn done, void *arg, struct ka_run **out, struct ka_err *err);

/* The options of a run folder as it began: name -> text (new reference); NULL: it cannot be read, or does not
 * say. */
json_t *ka_run_options(const char *dir);

/* The newest run folder of `file` below `out` that has not ended, also one that another process
 * works on (to resume it is -EBUSY); NULL if there is none. free() it. */
char *ka_run_find_unfinished(const char *out, const char *file);

/* Stop at the next safe point, keep everything: the run is resumable afterwards (exit code 130). */
void ka_run_interrupt(struct ka_run *run);

void ka_run_free(struct ka_run *run);

/* The GPU that it was given, by name; NULL: it runs on none, or on one that is not named. Borrowed. */
const char *ka_run_gpu(const struct ka_run *run);

#endif
