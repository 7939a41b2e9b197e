/* What compute-sanitizer reported of a candidate, held against it: pure.
 *
 * The report comes out of the jail in which the candidate ran, so a clean one proves nothing; a run without the tool's own summary
 * counts like a finding. Rules: the tools' names, "sanitizer" for a run that says nothing. */
#ifndef KA_SANITIZE_H
#define KA_SANITIZE_H

#include <jansson.h>

#include "core/verdict.h"

/* `doc`: result of the operation sanitize (docs/protocol.md), or NULL with the reason in `message`. */
void ka_sanitize_judge(const json_t *doc, const char *message, struct ka_verdict *verdict);

#endif
