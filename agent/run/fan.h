/* One operation over many cases, dealt out to several children at once; what they left is found by case.
 *
 * A *part* is one child and its cases. Cheap cases come first within a part, and the parts are even by
 * estimated cost. A case's result can be looked at once its child is gone, and, where that was asked for,
 * once a thread has compared the real forward with the oracle on it. Loop thread only. */
#ifndef KA_RUN_FAN_H
#define KA_RUN_FAN_H

#include "internal.h"

typedef void (*ka_fan_fn)(struct ka_run *run, struct ka_fan *fan, void *arg);

struct ka_fan_req {
    const char *operation;
    const char *file;
    const char *what;     /* for the timeline: "hidden shapes"; NULL: nothing */
    json_t *cases;        /* as children may see them, each with "id" and "dims"; borrowed */
    json_t *extra;        /* further members of every request; stolen; NULL: none */
    const json_t *shapes; /* with what the oracle took for a case of each; NULL: not known */
    bool together;        /* cases of the same dims stay in one child, which then runs the stub once */
    bool agree;           /* compare forward and oracle on every case, off the loop */
};

/* `changed` (below) runs after each part; the fan may be freed from inside. Never NULL: a part whose child
 * cannot be started has failed, which is told from the loop like everything else. */
struct ka_fan *ka_fan_start(struct ka_run *run, struct ka_fan_req *req, ka_fan_fn changed, void *arg);

/* Several may hold one; the last free cancels what is in flight and removes the files. */
struct ka_fan *ka_fan_hold(struct ka_fan *fan);
void ka_fan_free(struct ka_fan *fan); /* NULL is fine */
/* Ends what is in flight, without a call of `changed`; what was found stays. */
void ka_fan_stop(struct ka_fan *fan);
/* Who hears of it from now on; NULL: nobody, and children go on. */
void ka_fan_listen(struct ka_fan *fan, ka_fan_fn changed, void *arg);

/* What became of one case. Borrowed from the fan. */
struct ka_fan_found {
    enum ka_op_status status;            /* of its child */
    const char *message;                 /* when that is not OK */
    json_t *doc;                         /* the child's whole result; NULL when it left none */
    json_t *entry;                       /* of this case; NULL: the child left none */
    const struct ka_child_result *files; /* NULL with no result */
    int agrees;                          /* with `agree`: 0, or as ka_case_agrees() */
    const struct ka_err *why;            /* when `agrees` is not 0 */
};

/* False while its child is at work. */
bool ka_fan_find(const struct ka_fan *fan, json_int_t id, struct ka_fan_found *found);
/* The caller is done with a case: once it is with all of a part, the part's files are removed. */
void ka_fan_release(struct ka_fan *fan, json_int_t id);
bool ka_fan_ended(const struct ka_fan *fan);
void ka_fan_count(const struct ka_fan *fan, size_t *done, size_t *all); /* cases */
/* The result of the first part that ended with `status`, as ka_run_op_failed() wants it; NULL: none did. */
const struct ka_op_result *ka_fan_failed(const struct ka_fan *fan, enum ka_op_status status);

#endif
