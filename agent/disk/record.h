/* run.jsonl: every event, prompt and answer of a run, one JSON object a line, in order, appended and never rewritten.
 * A crash can leave half a last line; readers skip it, and the next append starts on a new line. Secrets are redacted
 * here, on the way in. Loop thread only. */
#ifndef KA_RECORD_H
#define KA_RECORD_H

#include <jansson.h>

#include "base/base.h"

struct ka_record;

/* `secrets`: NULL-terminated, copied; may be NULL. */
int ka_record_open(const char *path, const char *const *secrets, struct ka_record **out, struct ka_err *err);
void ka_record_close(struct ka_record *record);

/* Append {"t": <unix seconds>, "cpu": <processor seconds of this process so far>, "event": kind, ...doc}. Steals `doc` (may be NULL). A full disk is reported once through
 * the log and does not end the run. */
void ka_record_add(struct ka_record *record, const char *kind, json_t *doc);

#endif
