/* One jailed operation of docs/protocol.md: a request becomes a child, and its result comes back checked.
 *
 * The result is believed only if it carries the request's nonce, and read only if it is of a size that an
 * honest one may have; paths of the working copy that the child read are given back as the user's own. Loop
 * thread only. */
#ifndef KA_OP_H
#define KA_OP_H

#include <jansson.h>

#include "agent/app/app.h"
#include "agent/app/settings.h"

#define KA_CASE_BYTES_MAX ((size_t)32 << 30) /* of the tensors of one case */

struct ka_child_result;
struct ka_op;

enum ka_op_status { KA_OP_OK, KA_OP_ERROR, KA_OP_DIED, KA_OP_TIMEOUT, KA_OP_SANDBOX };

struct ka_op_result {
    const char *operation;
    enum ka_op_status status;
    json_t *doc;        /* the whole result, with OK and ERROR; NULL otherwise; borrowed */
    char message[1024]; /* for people, when not OK; valid UTF-8 */
    const struct ka_child_result *child;
};

/* Runs once, from the loop, unless the operation is cancelled; the operation is gone when it returns. */
typedef void (*ka_op_done_fn)(void *arg, const struct ka_op_result *result);

struct ka_op_req {
    const char *operation;
    const char *file;                   /* what the child reads */
    const char *shown;                  /* what people are told it is called; NULL: the same */
    const char *modules;                /* folder with the user's own modules; NULL: none */
    const char *tool;                   /* a program outside the package that the child may run; NULL: none */
    const char *beside;                 /* one more file that the child reads; NULL: none */
    bool alone;                         /* nobody else uses its GPU from its start to its end */
    bool emptied;                       /* nor its memory */
    const struct ka_settings *settings; /* where it runs, and how long it may; read during the call */
};

/* Whether a GPU had no memory left for what times on it: for all of it, a case, or one that is timed. */
bool ka_op_ran_out(const struct ka_op_result *result);

/* Steals `extra`, the further members of the request (NULL: none). */
int ka_op_start(struct ka_app *app, const struct ka_op_req *req, json_t *extra, ka_op_done_fn done, void *arg,
                struct ka_op **out, struct ka_err *err);
void ka_op_cancel(struct ka_op *op);

#endif
