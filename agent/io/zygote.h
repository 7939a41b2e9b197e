/* Warm interpreters: processes that have imported torch and triton and fork one jailed child a request, in
 * milliseconds instead of a second. Used by child.c alone; sandbox/kernel_agent/zygote.py has the messages.
 *
 * There is one for candidates and one for everything else, so that what ran hostile code and what computes
 * expected values never share a parent that has seen either. They are twins: one imports, and forks the other
 * before its first job. They start with the first job, wait for more, and end together. When one dies,
 * refuses, or cannot start, the jobs of both are `lost` and run without them.
 *
 * Loop thread only. Callbacks never run from inside a call of this module. */
#ifndef KA_ZYGOTE_H
#define KA_ZYGOTE_H

#include "base/base.h"

struct ka_loop;
struct ka_zygotes;
struct zygote;

enum { KA_ZYGOTE_FDS = 4 };

/* Embedded in its owner and valid until `ended` or `lost`, or until ka_zygote_withdraw() gave true. */
struct ka_zygote_job {
    const char *const *argv; /* options of ka-jail, "--", the interpreter; read until `started` */
    size_t argc;
    /* Standard output, standard error, report, and standard input, or -1 for none; the owner's, read until
     * `started`. */
    int fds[KA_ZYGOTE_FDS];
    void (*started)(struct ka_zygote_job *job);
    void (*ended)(struct ka_zygote_job *job, int wait_status); /* it and all below it are gone */
    void (*lost)(struct ka_zygote_job *job, bool had_started, const char *why);

    struct zygote *zygote; /* the rest belongs to zygote.c */
    struct ka_zygote_job *next;
    uint64_t id;
    int pidfd;
    enum { KA_ZYGOTE_WAITING, KA_ZYGOTE_SENT, KA_ZYGOTE_STARTED } state;
    bool kill;
};

struct ka_zygote_kind {
    bool candidate, gpu;
    const char *python, *package_dir;
};

/* `library` is libka_jail.so, `base` a folder to call home; no more than `max_children` run at a time. A
 * zygote and all its children share one control group, where there are such: `mem_mb` is its limit.
 * `keep_bytecode`: in this user's cache, for the next one. */
struct ka_zygotes *ka_zygotes_new(struct ka_loop *loop, const char *jail, const char *library,
                                  const char *base, unsigned max_children, unsigned mem_mb,
                                  bool keep_bytecode);
/* End all; `gone` runs when the last handle is closed and the memory is free. Jobs must be over. */
void ka_zygotes_close(struct ka_zygotes *zygotes, void (*gone)(void *arg), void *arg);

/* -EAGAIN: no zygote for this kind (it failed before, or another interpreter is asked for); the job is not
 * taken. */
int ka_zygote_submit(struct ka_zygotes *zygotes, const struct ka_zygote_kind *kind,
                     struct ka_zygote_job *job);
/* Start the zygotes of that kind, for nobody yet. */
void ka_zygote_warm(struct ka_zygotes *zygotes, const struct ka_zygote_kind *kind);
/* True: it had not been sent, and no callback will come. */
bool ka_zygote_withdraw(struct ka_zygote_job *job);
/* SIGKILL to the whole tree, at once or as soon as it exists; `ended` follows. */
void ka_zygote_kill(struct ka_zygote_job *job);
/* SIGSTOP or SIGCONT to its first process, which is the one that computes; false: it has none yet, or none
 * any more. */
bool ka_zygote_pause(const struct ka_zygote_job *job, bool pause);
/* The job does not move: end its zygote, if the job has no process of its own that could be waited for. */
void ka_zygote_give_up(struct ka_zygote_job *job);

#endif
