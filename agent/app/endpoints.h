/* Which endpoints are asked, and with which keys, from the options and the environment.
 *
 * Several URLs and several key files are comma-separated. The first key belongs to the first URL and so on:
 * no endpoint gets another's. One URL with several keys is as many endpoints. Without a file the key in
 * OPENAI_API_KEY belongs to the first. */
#ifndef KA_ENDPOINTS_H
#define KA_ENDPOINTS_H

#include "agent/io/llm.h"

struct ka_endpoints {
    struct ka_llm_endpoint list[KA_LLM_ENDPOINTS_MAX]; /* owned; URLs as they were given, keys may be NULL */
    size_t count;
    bool named; /* a URL or a key was given: there is something to ask */
};

/* NULL for what is not set. OPENAI_API_KEY is taken out of the environment in any case, so that no child
 * inherits it. -EINVAL for more endpoints than KA_LLM_ENDPOINTS_MAX, more keys than URLs, or a file without a
 * key; or what reading the file gave. */
int ka_endpoints_read(const char *urls, const char *key_files, struct ka_endpoints *out, struct ka_err *err);
void ka_endpoints_free(struct ka_endpoints *endpoints); /* wipes the keys */

#endif
