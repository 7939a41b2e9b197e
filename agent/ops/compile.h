/* Has kernels compiled, once: each source in a jailed process of its own that runs no other code, the result
 * in the shared cache.
 *
 * A child of the kinds that run users' or candidates' code leaves sources as `compile-<key>.json`
 * (docs/protocol.md). A source whose hash is not its key is dropped; what the child itself made of it is
 * never looked at. Loop thread only. */
#ifndef KA_COMPILE_H
#define KA_COMPILE_H

#include <jansson.h>

#include "agent/app/app.h"
#include "agent/app/settings.h"

struct ka_child_result;
struct ka_compile;

struct ka_compile_counts {
    unsigned hits, misses, failed, dropped;
};

/* `entries`: for each key {"facts": {...}} or {"error": {...}}; borrowed. Runs once, from the loop, unless
 * cancelled. */
typedef void (*ka_compile_done_fn)(void *arg, const json_t *entries, const struct ka_compile_counts *counts);

/* Inside the `done` of `child`: sources of `wanted` (keys) are read from its scratch, which is kept until
 * then. Copies `settings` and `wanted`.
 * `done` may be NULL: then the work goes on in the background, and what is left of it at the end of the
 * program is given up. */
struct ka_compile *ka_compile_start(struct ka_app *app, const struct ka_settings *settings,
                                    const json_t *wanted, const struct ka_child_result *child,
                                    ka_compile_done_fn done, void *arg);
void ka_compile_cancel(struct ka_compile *compile);

/* Find out which toolchain this is and open its cache, in the background: requests then name its folder. */
void ka_compile_warm(struct ka_app *app, const struct ka_settings *settings);

#endif
