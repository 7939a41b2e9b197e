/* A check's inside, for the files check*.c: what it holds, and what each of them does for the others. */
#ifndef KA_RUN_CHECK_INTERNAL_H
#define KA_RUN_CHECK_INTERNAL_H

#include "agent/core/place.h"
#include "agent/core/verdict.h"
#include "check.h"

struct ka_expected;
struct ka_fan;
struct ka_run_child;

/* What of a case the oracle has to look at closer, or has, before it is judged for good. */
struct ka_check_doubt {
    bool own, other; /* itself, and the case that its questions are about */
    bool asked;
};

struct ka_check {
    int64_t snapshot;
    char *pair_path, *pair; /* and its text */
    struct ka_place place;  /* how lines of it are told */
    char *entry;
    struct ka_run *run;
    struct ka_expected *expected;
    json_t *cases; /* of `expected` */
    struct ka_fan *candidate;
    struct ka_verdict *verdict;
    size_t *shape_of;              /* case number -> shape number of the verdict */
    size_t *order;                 /* case numbers, the cheapest first */
    size_t upto;                   /* of `order`: asked for, round by round */
    bool *is_judged;               /* of `order` */
    struct ka_check_doubt *doubts; /* of `order` */
    size_t *batch;                 /* of `order`: being judged */
    size_t batch_count, judged;
    bool compiled;                   /* the candidate runs on a GPU */
    bool by_hand;                    /* it is a module that people wrote themselves */
    bool judging;                    /* a thread has the verdict, and reads results */
    bool orphan;                     /* freed when the thread is done */
    char *reject_rule, *reject_text; /* the candidate is rejected as a whole, once the thread is done */
    json_t *notes;                   /* of the scan: what is no fault, and worth knowing */
    json_t *launches;                /* names of kernels that the candidate's text launches */
    json_t *launched;                /* and those that cases launched: {name: true} */
    json_t *facts;
    struct ka_run_child *facts_child; /* counts them beside the candidate; NULL: it does not, or is through */
    bool facts_ended, facts_wanted;
    bool facts_early; /* they are those of the sizes that are checked, not of the user's own */
    uint64_t began;   /* ka_clock_ns() */
};

/* ---- check_end.c ---- */

/* What the verdict is now is the candidate's, and the check is gone. */
void ka_check_conclude(struct ka_run *run);
/* The candidate as a whole is rejected: no shape was judged. */
void ka_check_reject(struct ka_run *run, const char *rule, const char *text);
/* The same while cases are judged: nothing more is asked, and the verdict waits for the thread. */
void ka_check_reject_when_idle(struct ka_run *run, const char *rule, const char *text);
/* A candidate that is an earlier one again, byte for byte or but for its comments, has that one's verdict:
 * true when it is told. */
bool ka_check_settle_as_before(struct ka_run *run, int64_t id);

/* ---- check_facts.c ---- */

/* `early`: to know soon what does not compile. What the user's own sizes take is asked of what is
 * verified. */
void ka_check_measure(struct ka_run *run, bool early);
/* Every case is judged, and the candidate holds: its facts, and the end. */
void ka_check_measure_verified(struct ka_run *run);
/* The same after compute-sanitizer has nothing to say against it. */
void ka_check_sanitize(struct ka_run *run);

/* ---- check_judge.c ---- */

/* On a thread, of a check that is `judging`: every case of its batch. */
void ka_check_judge_batch(void *check);
/* Case `at` of `order` was, and the oracle has to look closer first. */
bool ka_check_is_doubted(const struct ka_check *check, size_t at);

/* ---- check.c ---- */

/* Children for the next cases. */
void ka_check_next_round(struct ka_run *run);

#endif
