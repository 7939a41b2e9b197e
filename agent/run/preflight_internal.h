/* Preflight while it lasts, for the files preflight*.c. Its order is agent/core/stages.h's; each part is a
 * file.
 *
 * A part is begun once. It returns false when it has nothing to do, which is its end; otherwise it calls
 * run->preflight->ended() when it is through, or ends the run. */
#ifndef KA_RUN_PREFLIGHT_INTERNAL_H
#define KA_RUN_PREFLIGHT_INTERNAL_H

#include "agent/core/stages.h"
#include "fan.h"
#include "internal.h"

struct ka_preflight {
    struct ka_stages stages;
    void (*ended)(struct ka_run *run, enum ka_stage stage);
    bool *gone;      /* of the loop that begins parts: set when this is freed beneath it */
    json_t *pending; /* shapes of the sweep still to be settled: preflight_sweep.c */
    json_t *asked;   /* the cases of this level, as the children were told them */
    struct ka_fan *sweep;
    /* The shape on which other kinds of inputs and upstreams are tried; NULL: the smallest required. */
    json_t *stand_in;
    json_t *tried, *asked_hidden, *longer; /* preflight_hidden.c */
    struct ka_fan *hidden;
    json_t *smaller, *first_differences; /* preflight_differences.c */
    json_t *asked_inputs, *variations;   /* preflight_inputs.c */
    int rounds;                          /* of variations so far */
    struct ka_fan *inputs;
    json_t *asked_scalars; /* preflight_scalars.c */
    struct ka_fan *scalars;
};

/* The parts. */
bool ka_preflight_sweep(struct ka_run *run);
bool ka_preflight_hidden(struct ka_run *run);
bool ka_preflight_long(struct ka_run *run);
bool ka_preflight_differences(struct ka_run *run);
bool ka_preflight_inputs(struct ka_run *run);
bool ka_preflight_scalars(struct ka_run *run);

/* ---- preflight_cases.c */
/* One case for each of `list`, [{"dims"}], with its place in the list as id. `*asked`: what the children are
 * told (new reference). */
struct ka_fan *ka_preflight_ask(struct ka_run *run, const json_t *list, const char *what, json_t **asked,
                                ka_fan_fn changed);
/* The same for cases (agent/core/plan.h) of other inputs; NULL where there are none. */
struct ka_fan *ka_preflight_try(struct ka_run *run, const json_t *cases, const char *what, json_t **asked,
                                ka_fan_fn changed);
/* Did forward and oracle agree on a case? Otherwise the error document (new reference) in *error. */
bool ka_preflight_agrees(const struct ka_fan_found *found, json_t **error);
/* Is it among the shapes that are checked? */
bool ka_preflight_has(const struct ka_run *run, const json_t *dims);
/* Add to them, unless it is there: NULL, else the new shape (borrowed). `entry`: the oracle's of it. */
json_t *ka_preflight_accept(struct ka_run *run, const json_t *dims, const char *class, const char *kind,
                            const json_t *entry);
void ka_preflight_progress(struct ka_run *run, const struct ka_fan *fan, const char *what);
/* Of a case that is accepted: the user's reference() has agreed with the oracle there and on every shape
 * before it, unless it could not be used, which is said; where it found no room on the GPU, nothing follows.
 */
void ka_preflight_learn_reference(struct ka_run *run, const json_t *entry);
/* Of a fan that is through: cases that ended by a failure of the oracle itself, which says nothing about the
 * forward, are counted in run->oracles: "crashed", {"cases", "message": the first}. */
void ka_preflight_note_crashes(struct ka_run *run, const struct ka_fan *fan);
/* Every result is there. Says how far it is, with `what`; ends the run where no child can be started. */
bool ka_preflight_through(struct ka_run *run, const struct ka_fan *fan, const char *what);

#endif
