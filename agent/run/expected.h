/* What the oracle says of one check's cases.
 *
 * Expected values do not depend on the candidate, so they need not wait for one: they are computed beside it,
 * or before it, while the differentiator drafts or the model thinks. What preflight computed (a shape, a
 * secret seed, a normal upstream, and forward and oracle agreeing on it) serves the first check, whose cases
 * take over those seeds. Each check has cases of its own: a candidate's process is told the seeds of the
 * cases that it runs, and nothing that is expected. Loop thread only. */
#ifndef KA_RUN_EXPECTED_H
#define KA_RUN_EXPECTED_H

#include "fan.h"

struct ka_expected;

/* Preflight is done with a case that agreed: `item` as its child was told it, `fan` has the result. */
void ka_expected_offer(struct ka_run *run, struct ka_fan *fan, const json_t *item);
void ka_expected_withdraw(struct ka_run *run); /* all offers */

/* Draw the next check's cases and have the oracle begin; nothing if that was done, or with --fail-fast. */
void ka_expected_prepare(struct ka_run *run);
void ka_expected_discard(struct ka_run *run);

/* What was prepared, else cases drawn now. Never NULL; the caller frees it. */
struct ka_expected *ka_expected_take(struct ka_run *run);
void ka_expected_free(struct ka_expected *expected); /* NULL is fine; children in flight are cancelled */

/* The plan (agent/core/plan.h), borrowed: case `i` has the id `i`. */
json_t *ka_expected_cases(const struct ka_expected *expected);
/* Have the oracle do the cases of `list`, those of them that nobody did yet. `changed` runs from now on. */
void ka_expected_ask(struct ka_expected *expected, const size_t *list, size_t count, ka_fan_fn changed,
                     void *arg);
/* False while it is not there. */
bool ka_expected_find(const struct ka_expected *expected, size_t i, struct ka_fan_found *found,
                      json_int_t *id);
/* Have the oracle look closer at case `i`, where a gradient is off by little: more draws of its rounding are
 * wanted. `changed` runs when it has. Whoever asked has to leave; with the last one what it left goes. */
void ka_expected_look_closer(struct ka_expected *expected, size_t i, ka_fan_fn changed, void *arg);
void ka_expected_leave_closer(struct ka_expected *expected, size_t i);
/* False while it looks. `found` is empty where it was not asked, or could not. */
bool ka_expected_find_closer(const struct ka_expected *expected, size_t i, struct ka_fan_found *found);
/* Case `i` is judged, and no case that is not has to do with it: its files may go. */
void ka_expected_release(struct ka_expected *expected, size_t i);
/* The first part that ended so; NULL: none. */
const struct ka_op_result *ka_expected_failed(const struct ka_expected *expected, enum ka_op_status status);
/* Ends what is in flight; what was found stays. */
void ka_expected_stop(struct ka_expected *expected);

#endif
