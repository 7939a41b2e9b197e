/* What stands in a request's line and headers, read strictly: bytes from outside, made values or refused.
 * Nothing here knows a route. Pure. */
#ifndef KA_REQUEST_H
#define KA_REQUEST_H

#include "base/base.h"

/* A query's argument with its escapes undone ("%0A", "+"): UTF-8 without NUL. free() it; NULL: it is none. */
char *ka_request_text(const char *escaped);

/* A whole number from `least` to `most`, in digits alone. */
bool ka_request_count(const char *text, size_t least, size_t most, size_t *out);

/* A number from `least` to `most`, like "0.5" and "-1"; no spaces, no exponent. */
bool ka_request_number(const char *text, double least, double most, double *out);

/* Last-Event-ID: "A", or with a `stop` that is not NUL "A<stop>B". NULL is none. What is not asked for stays
 * as it is. */
bool ka_request_event(const char *text, char stop, uint64_t *a, uint64_t *b);

/* Does the header Authorization (NULL: there is none) show this token? */
bool ka_request_shows(const char *authorization, const char *token);

/* Does the header Origin (NULL: no browser sent it) name the host of the header Host? If not, the page of
 * another site is asking. */
bool ka_request_same_origin(const char *origin, const char *host);

/* Does the header Host (NULL: HTTP/1.0) name this machine from within: localhost, 127.0.0.1, [::1], with any
 * port? A page whose own name leads here sends that name. */
bool ka_request_host_is_local(const char *host);

/* The client as the nearest proxy names it: the last in the last X-Forwarded-For, a view into it; "": none.
 * What stands before it came from the client and may be anything. */
const char *ka_request_client(const char *forwarded, size_t *len);

#endif
