/* What compute-sanitizer reported of a candidate, held against it: pure.
 *
 * The report comes out of the jail in which the candidate ran, so a clean one proves nothing; a run that is
 * not complete counts like a finding, and its reason is told: it ran past its time, the watched process
 * failed, the tool wrote no summary. So does a tool that was not run. Rules: the tools' names for what they
 * found, "sanitizer" for a run that says nothing. */
#ifndef KA_SANITIZE_H
#define KA_SANITIZE_H

#include <jansson.h>

#include "verdict.h"

/* `doc`: result of the operation sanitize (docs/protocol.md), or NULL with the reason in `message`. */
void ka_sanitize_judge(const json_t *doc, const char *message, struct ka_verdict *verdict);

#endif
