/* What the service runs on, as clients are told. */
#ifndef KA_ABOUT_H
#define KA_ABOUT_H

#include <jansson.h>

#include "agent/app/app.h"
#include "agent/app/opts.h"

/* What does not change while the service lives (new reference): "version", "device", "gpus" (their names),
 * "sandbox" {"level", "layers", "why", "lost"}, "python" {"path", "versions"}, "endpoint" {"urls", "model"} |
 * null, "jobs", "pairs" of the store | null. No key, and of URLs nothing that may be secret. Asks the jail:
 * blocks for a moment. */
json_t *ka_about_fixed(const struct ka_app *app, const struct ka_opts *opts);

/* The same with what there is of it now (new reference): "cpus", "memory_bytes", "memory_available_bytes",
 * and of the GPUs that runs may have "slots" [{"gpu", "model" | null, "runs", "children", "benchmark"}]. */
json_t *ka_about_now(const struct ka_app *app, const json_t *fixed);

#endif
