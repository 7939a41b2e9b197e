/* What happens to a run goes into its machine here, and only here. */
#ifndef KA_RUN_EVENTS_H
#define KA_RUN_EVENTS_H

#include "internal.h"

/* Feed the machine; saves, then executes the command. The run may be freed when this returns. */
void ka_run_post(struct ka_run *run, const struct ka_event *event);
/* Shorthands that fill in the operation number; of an answer, that of its slot. */
void ka_run_post_type(struct ka_run *run, enum ka_event_type type);
void ka_run_post_answer(struct ka_run *run, enum ka_event_type type, int slot);
void ka_run_post_candidate(struct ka_run *run, int slot, const char *backward, const char *origin,
                           const char *note, bool another);
/* Save, then execute: what a resumed run does first. */
void ka_run_resume_command(struct ka_run *run, const struct ka_command *command);

/* End the run with a reason for people; `kind` is the error kind of docs/protocol.md, or "internal". */
void ka_run_fail(struct ka_run *run, enum ka_event_type type, const char *kind, const char *fmt, ...)
    KA_PRINTF(4, 5);
void ka_run_fail_doc(struct ka_run *run, enum ka_event_type type, json_t *failure); /* steals */

/* See run.h. */
void ka_run_interrupt(struct ka_run *run);

int ka_run_put(struct ka_run *run, const char *name, const json_t *doc);
double ka_run_seconds(const struct ka_run *run);

#endif
