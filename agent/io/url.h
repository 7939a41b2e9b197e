/* Base URLs of endpoints as people give them. Pure. */
#ifndef KA_URL_H
#define KA_URL_H

#include "base/base.h"

/* What requests are put after the base URL. */
#define KA_URL_CHAT "/chat/completions"
#define KA_URL_MODELS "/models"

/* A base URL without slashes at the end and without the path of a request that people copy along; free() it.
 * NULL when it is none: neither http nor https, no host, white space or control characters. */
char *ka_url_base(const char *url);

/* A URL without user, password, query and fragment, which may hold secrets; free() it. */
char *ka_url_shown(const char *url);

/* Is there white space or a control character in it? */
bool ka_url_has_space(const char *text);

#endif
