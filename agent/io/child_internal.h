/* Shared by the files of the children only: child.c, child_args.c, child_cards.c, child_files.c,
 * child_result.c. */
#ifndef KA_CHILD_INTERNAL_H
#define KA_CHILD_INTERNAL_H

#include "args.h"
#include "base/base.h"
#include "capture.h"
#include "child.h"
#include "loop_uv.h"
#include "machine.h"
#include "zygote.h"

/* ---- child_files.c ---- */

/* The folder under which scratches are made: exists, ours, writable by nobody else. free(*path). */
int ka_child_base(const char *wanted, char **path, struct ka_err *err);
/* This daemon's folder below the base, locked by the descriptor: without it the next daemon removes the
 * folder and all that a killed one left there. ka_rmtree() and free(*path), then close(*lock). */
int ka_child_own_folder(const char *base, char **path, int *lock, struct ka_err *err);
/* A fresh folder, mode 0700, holding request.json. free(*path) after ka_rmtree(). */
int ka_child_scratch_new(const char *base, const char *request, char **path, struct ka_err *err);
/* How much of what this daemon may use is left: for the youngest child to go; for those that run, but not for
 * one more; for one more; for as many as there are. Memory that cannot be told is enough. */
enum ka_child_memory { KA_MEMORY_LOW, KA_MEMORY_TIGHT, KA_MEMORY_ENOUGH, KA_MEMORY_AMPLE };
enum ka_child_memory ka_child_memory(const struct ka_machine *machine);

/* ---- child_result.c ---- */

/* The public part comes first: a pointer to it is a pointer to the whole. */
struct result {
    struct ka_child_result pub;
    struct ka_buf out, err, layers;
    char *scratch;
    unsigned holders; /* whoever kept it, and whoever tells of it */
    struct ka_loop *loop;
};

/* ---- child.c ---- */

struct ka_children {
    struct ka_loop *loop;
    struct ka_zygotes *zygotes; /* NULL: every child imports everything itself */
    char *jail, *base;          /* the scratches are made below `base`, our own folder */
    int base_lock;
    char *machine;                                 /* where it is looked up what it has */
    enum ka_child_memory left_over;                /* looked at while children run or wait for it */
    uint64_t low_since;                            /* while none runs; 0: it is not */
    struct ka_cards *cards;                        /* NULL */
    unsigned max_running, running, paused, queued; /* who is paused is running too */
    unsigned child_mem_mb, reap_ms;
    bool gpu, kept_out; /* another process has a card alone */
    uint64_t last_op;
    bool closing, left;
    uv_timer_t kick, memory, look;
    struct child *first, **last; /* in order of ka_child_start */
};

struct child {
    struct ka_children *owner;
    struct child *next;
    uint64_t op;
    enum { QUEUED, RUNNING, ENDED } state;
    bool cancelled, timed_out, starved, told, warm, paused;
    ka_child_done_fn done;
    void *arg;

    struct ka_child_req *req; /* our copy */
    unsigned deadline_ms;

    bool alone; /* has its card to itself from its start on */
    enum { OFF_CARD, SHARES_CARD, HAS_CARD } on_card;
    bool asks;      /* for a turn alone: off the card, and stopped until it comes */
    uint64_t since; /* it waits in the queue, or for its turn */
    bool said;      /* that it waits */
    uv_poll_t turns;
    int turns_fd; /* our end of its standard input, where it may ask */

    uv_process_t process;     /* the jail's supervisor, or */
    struct ka_zygote_job job; /* a child of a zygote */
    struct ka_args args;
    int fds[KA_ZYGOTE_FDS]; /* its ends of output, report and turns, until it has them */
    uv_pipe_t out_pipe, err_pipe;
    uv_poll_t control;
    uv_timer_t timer;
    unsigned handles; /* open ones; the child is freed with the last */
    int control_fd;
    uint64_t began, started;       /* left the queue; its process exists */
    uint64_t paused_at, paused_ns; /* since when; for how long before */
    uint64_t left_ms;              /* what its deadline had left then */
    struct ka_capture out, err;
    struct result *result;
};

/* Something may begin now: look at the queue, and at who waits for a turn, soon. */
void ka_child_kick(struct ka_children *cs);
/* One more handle that is closed before the child is freed. */
void ka_child_own(struct child *c, void *handle);
/* The timer's callback while the child's clock runs. */
void ka_child_on_deadline(uv_timer_t *timer);

/* ---- child_cards.c ---- */

/* Its place on its card, or none that it would need; false: not yet. */
bool ka_child_enter_card(struct child *c);
void ka_child_leave_card(struct child *c);
/* Where it is to ask for turns: the channel for that, and from its start on (who has no process cannot be
 * stopped) somebody who listens. */
int ka_child_turns_open(struct child *c, struct ka_err *err);
void ka_child_turns_listen(struct child *c);
/* Let go on who may have a card alone now. */
void ka_child_give_turns(struct ka_children *cs);
/* True: this would have asked for turns, and is in the queue again, to have its card alone from its start. */
bool ka_child_alone_from_start(struct child *c);
/* Look at the cards now and then, as long as a child is there or waits. */
void ka_child_watch_cards(struct ka_children *cs);
/* For how long it was stopped. */
uint64_t ka_child_paused_ns(const struct child *c);

/* ---- child_args.c ---- */

/* The options of ka-jail for this request, "--", the interpreter: the same whoever makes the jail. `card` is
 * the GPU's name (cards.h). */
void ka_child_args_jail(struct ka_args *args, const struct ka_child_req *req, const char *scratch,
                        const char *card);

/* NULL for a request without its parts. Free with ka_child_req_free(). */
struct ka_child_req *ka_child_req_copy(const struct ka_child_req *req);
void ka_child_req_free(struct ka_child_req *req);
bool ka_child_req_is_gpu(const struct ka_child_req *req);

#endif
