/* What a verdict rests on, said in full: kinds and sizes that were tried, those that were left out with the
 * reason, required sizes that stood in for larger ones, and what was not seen at all. Pure.
 *
 * Reads results tolerantly: what is missing or of the wrong type is left out. Names no dims of hidden shapes.
 */
#ifndef KA_CHECKED_H
#define KA_CHECKED_H

#include <jansson.h>

#include "base/base.h"

struct ka_checked_of {
    const json_t *verdict; /* ka_verdict_json(), with "notes" of the scan, or NULL */
    const json_t *oracles; /* of the run: "inputs", "scaled" */
    const json_t *facts;   /* measured, NULL where nothing was */
    const char *device, *target;
};

/* {"kinds": [{"name", "cases"}], "left_out": [{"name", "reason"}],
 * "scaled": [{"dims", "checked", "required"}], "not_seen": ["..."], "never_varied": ["..."],
 * "notes": ["line 12: ..."]} (new reference). */
json_t *ka_checked_json(const struct ka_checked_of *of);

#endif
