/* Taking secrets out of text before it is written anywhere.
 *
 * Removed are the given strings (also in their JSON spelling), and what looks like a key whoever it belongs
 * to: `sk-...`, the token after `Bearer`, the value after `api_key=`, `api-key:`, `"apikey": "..."`. Each
 * becomes [redacted]. Rather too much than too little: the text is for logs, never for programs. */
#ifndef KA_REDACT_H
#define KA_REDACT_H

#include "base/base.h"

#define KA_REDACTED "[redacted]"

/* Secrets shorter than this are not searched for: they would blacken half the log. */
#define KA_REDACT_MIN_SECRET 6

/* Append `text` without secrets to `out`. `secrets` ends with NULL, or is NULL. -EFBIG, -ENOMEM; `out` is
 * then unchanged: log nothing. */
int ka_redact(const char *text, const char *const *secrets, struct ka_buf *out);

#endif
