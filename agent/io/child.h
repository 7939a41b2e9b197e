/* Jailed children on the loop: one request in, one result out, nothing left behind.
 *
 * The daemon never executes users' code; a child does, below ka-jail (sandbox/jail). A child gets a fresh
 * private scratch folder with `request.json`, runs `PYTHON -m kernel_agent.child SCRATCH`, and leaves its
 * answer in the scratch, which is read through a descriptor only: what lies there was written by hostile
 * code. Standard output and error are kept, capped.
 *
 * Loop thread only. `done` runs exactly once for every successful ka_child_start(), never from inside a call
 * of this module. Processes are ended by killing the jail's supervisor, with which the whole tree dies. */
#ifndef KA_CHILD_H
#define KA_CHILD_H

#include "base/base.h"

struct ka_cards;
struct ka_children;
struct ka_loop;

struct ka_children_conf {
    const char *jail; /* path of ka-jail; NULL: $KA_JAIL, else beside this program */
    const char
        *base; /* folder for the scratches; NULL: $XDG_RUNTIME_DIR/kernel-agent or /tmp/kernel-agent-UID */
    unsigned max_running;   /* 0: 1 */
    unsigned reap_ms;       /* a killed process that is still there then is stuck in the kernel; 0: 10 s */
    struct ka_cards *cards; /* which GPUs, and how many on each at a time; borrowed. NULL: as it comes */
    unsigned child_mem_mb;  /* the most that a child of a warm interpreter may ask for; 0: 6144 */
    unsigned total_mem_mb; /* of a warm interpreter and all its children; 0: what they may ask for together */
    bool gpu;              /* warm interpreters find the GPU's libraries, and serve children of both kinds */
    bool keep_bytecode;    /* what warm interpreters compile of their modules, in this user's cache */
    bool no_zygotes;       /* every child imports everything itself */
    const char *machine;   /* folder with the proc/ and sys/ that tell of memory; NULL: "/" */
};

/* Who is asking: candidate and oracle children of an attempt share no process. */
enum ka_child_role { KA_CHILD_TRUSTED, KA_CHILD_ORACLE, KA_CHILD_CANDIDATE };

/* Zero means the jail's own default. */
struct ka_child_limits {
    unsigned mem_mb, cpu_s, fsize_mb, nproc, scratch_mb;
};

struct ka_child_req {
    const char *request;     /* JSON text, placed as SCRATCH/request.json */
    const char *python;      /* path of the interpreter */
    const char *package_dir; /* folder that holds kernel_agent/; becomes PYTHONPATH */
    const char *const *ro;   /* more paths the child may read: the user's files */
    size_t ro_count;
    const char *const *env; /* more NAME=VALUE for its environment; never a secret */
    size_t env_count;
    const char *device;  /* "cpu" or "cuda" */
    size_t card;         /* which of the cards, where it is "cuda" */
    bool turns;          /* it times kernels, and asks for the card alone where it does (docs/protocol.md) */
    bool alone;          /* on that card, from its start to its end */
    bool emptied;        /* alone: it needs the memory, so others end and are not merely stopped */
    bool local_sockets;  /* its processes may connect to each other: a tool and what it watches */
    const char *require; /* layers without which nothing runs ("full", ...); NULL: the jail's default */
    enum ka_child_role role;
    struct ka_child_limits limits;
    unsigned deadline_ms; /* from its start, not from its turn in the queue; 0: 10 minutes */
};

/* What became of a child. Valid until `done` returns, or until ka_child_result_free() after
 * ka_child_result_keep(). */
struct ka_child_result {
    int error; /* 0: it ran; -ECANCELED; -ETIMEDOUT; -EPERM: a required layer is missing; else it could not
                  run */
    int exit_status; /* when it ended by itself */
    int term_signal; /* when a signal ended it; 0 otherwise */
    bool timed_out;
    bool
        unreaped; /* killed, but stuck in the kernel (a GPU driver): its place stays taken until it is gone */
    bool warm;    /* forked by a warm interpreter */
    uint64_t began;     /* ka_clock_ns() when it left the queue; 0: never */
    uint64_t wall_ms;   /* less `paused_ms` */
    uint64_t paused_ms; /* stopped, while somebody timed kernels on its card, or until it might do so */
    const char *layers; /* the jail's report, one JSON line; "" if it never came */
    const char *out;    /* standard output, capped in the middle */
    const char *err;    /* standard error, likewise */
    int scratch_fd;     /* the scratch folder, -1 if it was never made */
    struct ka_err msg;  /* a sentence when `error` is set */
};

/* The signal that ended it, 0 for none. The first process of a pid namespace cannot die by its own: it leaves
 * with 128 + its number. */
int ka_child_signal(const struct ka_child_result *result);

typedef void (*ka_child_done_fn)(void *arg, uint64_t op, const struct ka_child_result *result);

/* -ENOENT without ka-jail, -EACCES when the base folder is not ours alone. Free with ka_children_close(). */
int ka_children_new(struct ka_loop *loop, const struct ka_children_conf *conf, struct ka_children **out,
                    struct ka_err *err);

/* Cancel everything and free itself once the last process is gone; the loop has to run until then. */
void ka_children_close(struct ka_children *children);

/* Start the zygotes (zygote.h) for this interpreter now, so that they are ready when the first requests come.
 */
void ka_children_warm(struct ka_children *children, const char *python, const char *package_dir);

/* Copies `req`. Waits for its turn when `max_running` are running, or its card has no place; others go before
 * it then. Where the machine's memory is tight, one runs at a time, and where it runs out, the youngest is
 * killed: its error is -ENOMEM. -EINVAL for a request without its parts, -EAGAIN when the queue is full,
 * -ESHUTDOWN after close; `*op` is then untouched and `done` never runs. */
int ka_child_start(struct ka_children *children, const struct ka_child_req *req, ka_child_done_fn done,
                   void *arg, uint64_t *op);

/* `done` then comes with -ECANCELED. Unknown and finished operations are ignored. */
void ka_child_cancel(struct ka_children *children, uint64_t op);

unsigned ka_children_running(const struct ka_children *children);
unsigned ka_children_queued(const struct ka_children *children);
const char *ka_children_jail(const struct ka_children *children); /* path of ka-jail */

/* Inside `done`: keep the result and its scratch. The caller then frees it; the files go on a thread, for
 * which the loop has to run. */
const struct ka_child_result *ka_child_result_keep(const struct ka_child_result *result);
void ka_child_result_free(const struct ka_child_result *result);

/* Open one file of the scratch for reading: a regular file with one name, at most `max` bytes, reached
 * through no link and no other file system. -EFBIG, -ELOOP, -EINVAL (not such a file), -ENOENT. The caller
 * closes `*fd`. */
int ka_child_open(const struct ka_child_result *result, const char *name, size_t max, int *fd);
/* The same, appended to `out`. */
int ka_child_read(const struct ka_child_result *result, const char *name, size_t max, struct ka_buf *out);

/* Path of a helper program: $`variable`, else beside this program, else in ../libexec/kernel-agent. free()
 * it. */
int ka_child_find_program(const char *variable, const char *name, char **path, struct ka_err *err);

#endif
