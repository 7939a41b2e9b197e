/* What earlier runs learned, and what this one teaches: rag/lessons.h has the file, agent/core/lesson.h says
 * what a lesson is.
 *
 * Found once, when similar pairs are looked up, and kept with the run, so that a resumed one asks the same.
 * Written once, when the run ends. None of it can fail a run: what went wrong is logged once a process. */
#ifndef KA_RUN_LEARN_H
#define KA_RUN_LEARN_H

#include "internal.h"

/* Look up those nearest to the forward. */
void ka_run_lessons_find(struct ka_run *run);

/* Those for the next question of the job's phase, the best first: of the kind of what the current candidate
 * failed for, without what this run was shown in vain, or for a first draft the most similar of any kind. New
 * array of members of rag/lessons.h. `verdict` is the current candidate's, or NULL. */
json_t *ka_run_lessons_for(const struct ka_run *run, const json_t *verdict);

/* Of `lessons`, the first `count` were shown in the question of `slot`. */
void ka_run_lessons_told(struct ka_run *run, int slot, const json_t *verdict, const json_t *lessons,
                         size_t count);

/* What the ended run taught, to be written on any thread; NULL: nothing. ka_run_lessons_write() frees it, and
 * returns as ka_lessons_keep(). */
struct ka_taught;
struct ka_taught *ka_run_lessons_taught(const struct ka_run *run);
int ka_run_lessons_write(struct ka_taught *taught, struct ka_err *err);

/* On the loop: lessons could not be read or written. */
void ka_run_lessons_failed(const struct ka_run *run, const struct ka_err *err);

#endif
