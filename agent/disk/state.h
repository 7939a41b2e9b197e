/* What a run must not lose: one SQLite file in its folder.
 *
 * Writes gather in one transaction until ka_state_commit() makes all of them happen at once, or the process
 * ends and none of them has happened. A run commits once an event, after the job has made its step and before
 * the next command is executed: what a command did is kept together with the step that it led to, or the
 * command is executed again. A write that fails takes its transaction with it, and the handle refuses every
 * write from then on.
 *
 * With a loop nobody waits for the disk: what is committed survives the process at once, and the machine's
 * loss of power a moment later, when a thread has had the disk take it. Commits lost that way are the last
 * ones, whole and in order.
 *
 * Holds the job (job.h), named JSON documents (configuration, what inspect said, shapes, conversation), and
 * the snapshots: candidates by content, with verdict, cost and origin. Loop thread only. Errors: -ENOENT,
 * -EBUSY (another process has the run), -EIO, with the path in `err`. */
#ifndef KA_STATE_H
#define KA_STATE_H

#include <jansson.h>

#include "agent/core/job.h"
#include "base/base.h"

struct ka_loop;
struct ka_state;

struct ka_snapshot {
    int64_t id;
    int64_t parent;  /* 0: none */
    char *hash;      /* of `backward` */
    char *phase;     /* draft, fix, optimise */
    char *origin;    /* "llm", "differentiator", "tuner" */
    char *note;      /* what the change was about; may be empty */
    char *backward;  /* the text under the marker */
    json_t *verdict; /* NULL while unchecked */
    json_t *facts;   /* NULL while unmeasured */
    double cost;     /* INFINITY while unknown */
};

/* Open (create: make it). Takes an exclusive lock for the life of the handle: -EBUSY if it is held. Without a
 * loop (NULL) a commit waits for the disk. */
int ka_state_open(const char *path, bool create, struct ka_loop *loop, struct ka_state **out,
                  struct ka_err *err);

/* Without a commit; NULL is fine. With a loop the lock is let go by a thread, before the loop ends. */
void ka_state_close(struct ka_state *state);

/* Everything written so far has happened when this returns 0. */
int ka_state_commit(struct ka_state *state, struct ka_err *err);

int ka_state_save_job(struct ka_state *state, const struct ka_job *job, struct ka_err *err);
int ka_state_load_job(struct ka_state *state, struct ka_job *job, struct ka_err *err);

int ka_state_put(struct ka_state *state, const char *name, const json_t *doc, struct ka_err *err);
/* New reference, or NULL when there is no such document. */
json_t *ka_state_get(struct ka_state *state, const char *name);

/* Store a candidate. The same content, phase and parent gives the same id again (idempotent). */
int ka_state_snapshot_add(struct ka_state *state, const struct ka_snapshot *snapshot, int64_t *id,
                          struct ka_err *err);
int ka_state_snapshot_judge(struct ka_state *state, int64_t id, const json_t *verdict, const json_t *facts,
                            double cost, struct ka_err *err);
int ka_state_snapshot_get(struct ka_state *state, int64_t id, struct ka_snapshot *out, struct ka_err *err);
/* Likewise, without verdict and facts: these are large. */
int ka_state_snapshot_head(struct ka_state *state, int64_t id, struct ka_snapshot *out, struct ka_err *err);
/* The first snapshot with the content of `id` that has a verdict, perhaps that one itself; -ENOENT if there
 * is none. */
int ka_state_snapshot_twin(struct ka_state *state, int64_t id, struct ka_snapshot *out, struct ka_err *err);
int64_t ka_state_snapshot_count(struct ka_state *state);
void ka_snapshot_free(struct ka_snapshot *snapshot); /* the content, not the struct */

#endif
