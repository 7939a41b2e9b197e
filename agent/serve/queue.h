/* The service's runs: taken on, put in order, started so many at a time, ended; and none of them lost.
 *
 * What a client is told has happened is on the disk. A run's start is there before the run begins, so that
 * one which the service's end interrupts is found by the next service, which goes on with its folder; a run's
 * end is shown once it is there, and with it what is in the folder:
 *
 *     FOLDER/lock, ledger.db            agent/disk/ledger.h
 *     FOLDER/runs/ID/NAME.py            the file as it was submitted
 *     FOLDER/runs/ID/ATTEMPT/NAME-.../  the run's folder (agent/run/run.h)
 *
 * Higher priorities go first, then those taken on first; a run that was interrupted goes before all
 * others, but where that has happened more than three times lets them go first for a while. A run whose
 * endpoint is down is tried again, later each time; what the endpoint refuses has failed. Loop thread
 * only. */
#ifndef KA_QUEUE_H
#define KA_QUEUE_H

#include "agent/app/app.h"
#include "agent/app/opts.h"
#include "agent/core/submission.h"
#include "entry.h"

struct ka_queue;

/* It is on the disk (0), or it is not, and everything is as before: -ENOSPC, -EROFS, -EIO. `entry` is
 * borrowed, and NULL where there is none any more. */
typedef void (*ka_queue_done_fn)(void *arg, int rc, const struct ka_entry *entry, const struct ka_err *err);

/* What `folder` has of earlier services; starts nothing yet. Borrows `opts` and `app`. -EBUSY: another
 * service has it. */
int ka_queue_open(struct ka_app *app, const struct ka_opts *opts, const char *folder, struct ka_queue **out,
                  struct ka_err *err);
void ka_queue_begin(struct ka_queue *queue);

/* Starts nothing any more, and interrupts what runs: the next service goes on with it. `drained` runs once,
 * from the loop, when every run and every write has come to its end. */
void ka_queue_drain(struct ka_queue *queue, void (*drained)(void *arg), void *arg);
/* Once it is drained, or never begun. NULL is fine. */
void ka_queue_free(struct ka_queue *queue);

/* Is the same source with the same options queued, running, or has it a verdict? */
bool ka_queue_knows(const struct ka_queue *queue, const struct ka_submission *submission);

/* Take a run on. 0: `done` will run, perhaps at once. Where it is known nothing new is begun, unless it is
 * forced, and `done` is told of the one there is. -EINVAL: an option; -EAGAIN: too many are queued;
 * -ESHUTDOWN: it drains. */
int ka_queue_submit(struct ka_queue *queue, const struct ka_submission *submission, ka_queue_done_fn done,
                    void *arg, struct ka_err *err);

/* The entry, or NULL. */
const struct ka_entry *ka_queue_find(const struct ka_queue *queue, const char *id);
/* How many there are, and the i-th of them by age: NULL for one that is just taken on, or deleted. */
size_t ka_queue_count(const struct ka_queue *queue);
const struct ka_entry *ka_queue_at(const struct ka_queue *queue, size_t i);
/* The folder of the run's last attempt that was begun, in this process or to its end; NULL. Borrowed. */
const char *ka_queue_folder(const struct ka_queue *queue, const char *id);
/* Append the file as it was submitted. -ENOENT, or as ka_file_read(). */
int ka_queue_source(const struct ka_queue *queue, const char *id, struct ka_buf *out, struct ka_err *err);
/* Goes up with each change of an entry, also over the end of a service; and what it was at the last change of
 * the i-th. */
uint64_t ka_queue_version(const struct ka_queue *queue);
uint64_t ka_queue_version_at(const struct ka_queue *queue, size_t i);
bool ka_queue_draining(const struct ka_queue *queue);

/* Of the entry with this id. 0: `done` will run; -ENOENT; -EBUSY with a sentence: not in the state that it is
 * in, or another change of it is under way. */
int ka_queue_cancel(struct ka_queue *queue, const char *id, ka_queue_done_fn done, void *arg,
                    struct ka_err *err); /* queued or running */
int ka_queue_retry(struct ka_queue *queue, const char *id, ka_queue_done_fn done, void *arg,
                   struct ka_err *err); /* ended: once more, from the beginning */
int ka_queue_delete(struct ka_queue *queue, const char *id, ka_queue_done_fn done, void *arg,
                    struct ka_err *err); /* ended: with its folder */

#endif
