/* Which layers of the jail hold on this machine, and what is lost without one. */
#ifndef KA_JAIL_LAYERS_H
#define KA_JAIL_LAYERS_H

#include <jansson.h>

#include "base/base.h"

struct ka_layer {
    const char *name, *lost;
};
/* All of them, from the plainest to the most demanding. */
const struct ka_layer *ka_layers_list(size_t *count);

/* Run a program in the jail, with whatever layers there are; at most 6 words, ended by NULL. Its outputs and
 * the jail's report are appended. Returns its exit code, or as ka_probe_report(). Blocks. */
int ka_layers_run(const char *jail, const char *scratch, const char *const *program, struct ka_buf *out,
                  struct ka_buf *report);

/* The jail's report of its layers (new reference); NULL with a sentence where it says nothing. Blocks. */
json_t *ka_layers_ask(const char *jail, const char *scratch, struct ka_err *err);

/* Of such a report; NULL is one in which nothing holds. */
bool ka_layers_hold(const json_t *report, const char *name);
/* "full": all but the control group; "reduced": enough to run; "missing": candidates are refused. */
const char *ka_layers_level(const json_t *report);
/* [{"layer", "lost"}], of those that do not hold (new reference). */
json_t *ka_layers_lost(const json_t *report);

#endif
