/* The model as a mailbox: a request becomes a file that a person or another program answers with a file.
 *
 *   DIR/<run>-<nnn>.request.md    what is asked, readable by itself, with how to answer
 *   DIR/<run>-<nnn>.answer.md     the answer as text: one fenced python block, or a patch
 *   DIR/<run>-<nnn>.answer.json   or a chat completion body, as an endpoint would send it
 *
 * An answer counts once it has content and has not changed for `settle_ms`, so that one being written is not
 * read. The functions write and read small files and block for that long; watching runs on the loop's thread.
 */
#ifndef KA_MAILBOX_H
#define KA_MAILBOX_H

#include "agent/core/chat.h"

#include <uv.h>

struct ka_mailbox {
    const char *dir;
    const char *
        run; /* letters, digits, '.', '_' and '-', no dot at the start, at most 128: it becomes a file name */
    unsigned settle_ms; /* 1000 suits people and editors */
    unsigned every_ms;  /* while watching: how often to look where the folder reports no changes */
};

/* Write request `number` whole or not at all; makes the folder. Writing the same again changes nothing.
 * -EEXIST when another request of that number has been answered already; -EINVAL for an unusable run name. */
int ka_mailbox_write(const struct ka_mailbox *box, unsigned number, const struct ka_chat_request *req,
                     struct ka_err *err);

/* What the last look has seen of an answer. Zero before the first. */
struct ka_mailbox_look {
    int64_t size, changed_ns;
    uint64_t since_ms;
};

/* Look once. 0 with the answer; -EAGAIN when there is none yet; else the answer cannot be used: -EBADMSG (no
 * text, or JSON that is no completion), -EFBIG, or the error of reading it. `look` (NULL for a single look)
 * lets files with clocks of other machines settle too. */
int ka_mailbox_poll(const struct ka_mailbox *box, unsigned number, struct ka_mailbox_look *look,
                    struct ka_chat_answer *answer, struct ka_err *err);

/* Wait for the answer. `done` runs once, from the loop, never from inside these calls: with 0 and the answer
 * (to keep it, copy the struct and zero it), with an error of ka_mailbox_poll() and its message, or with
 * -ECANCELED after ka_mailbox_stop(). The watch and its handles are gone then, so stop it only before. */
struct ka_mailbox_watch;
typedef void (*ka_mailbox_done_fn)(void *arg, int rc, struct ka_chat_answer *answer, const char *message);
int ka_mailbox_watch(uv_loop_t *loop, const struct ka_mailbox *box, unsigned number, ka_mailbox_done_fn done,
                     void *arg, struct ka_mailbox_watch **watch, struct ka_err *err);
void ka_mailbox_stop(struct ka_mailbox_watch *watch);

#endif
