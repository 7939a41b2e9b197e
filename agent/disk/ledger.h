/* What the service took on, and how each of it stands: one SQLite file of documents by id, and a file beside
 * each.
 *
 * The service has its documents in memory; the ledger is what it reads of them when it starts. Writes are
 * gathered while a thread has the disk take those before them, and then go in one transaction: what was
 * written together with others costs one wait. `done` runs on the loop, in the order of the writes, once the
 * disk has them, or with the reason why it has not; then nothing of that write has happened.
 *
 * Loop thread only. One process has a ledger: its lock is let go when the process ends, however that is. */
#ifndef KA_LEDGER_H
#define KA_LEDGER_H

#include <jansson.h>

#include "base/base.h"

struct ka_ledger;
struct ka_loop;

typedef void (*ka_ledger_read_fn)(void *arg, const char *id, json_t *doc); /* borrowed */
typedef void (*ka_ledger_done_fn)(void *arg, int rc, const struct ka_err *err);

/* The ledger of a folder, which is made if it is missing. `read` is called for each document there is, by
 * age. A database that cannot be read is moved aside, which `*aside` names (free() it), and a new one begun.
 * -EBUSY: another process has it; -EIO, -errno. */
int ka_ledger_open(const char *folder, struct ka_loop *loop, ka_ledger_read_fn read, void *arg,
                   struct ka_ledger **out, char **aside, struct ka_err *err);

/* The document of this id from now on. `doc` is borrowed, and `done` may be NULL. */
void ka_ledger_put(struct ka_ledger *ledger, const char *id, const json_t *doc, ka_ledger_done_fn done,
                   void *arg);
/* The same with a file, whose folder is made: both are there or the document is not. Texts are copied. */
void ka_ledger_put_file(struct ka_ledger *ledger, const char *id, const json_t *doc, const char *path,
                        const char *text, ka_ledger_done_fn done, void *arg);
/* The same once the disk has all that is below `folder`, which is below the ledger's own, and is not being
 * written any more. */
void ka_ledger_put_after(struct ka_ledger *ledger, const char *id, const json_t *doc, const char *folder,
                         ka_ledger_done_fn done, void *arg);
/* No document any more, and then no `folder`. */
void ka_ledger_drop(struct ka_ledger *ledger, const char *id, const char *folder, ka_ledger_done_fn done,
                    void *arg);

bool ka_ledger_idle(const struct ka_ledger *ledger); /* every `done` has run */

/* After the last `done`. From the loop; NULL is fine. */
void ka_ledger_close(struct ka_ledger *ledger);

#endif
