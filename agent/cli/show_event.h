/* One event of a run for people, or as it is. */
#ifndef KA_SHOW_EVENT_H
#define KA_SHOW_EVENT_H

#include <stddef.h>

/* A line on stdout, for ka_sse_init(): time, what happened, and what of it says most. Non-zero where nobody
 * reads any more. */
int ka_show_event(void *arg, const char *type, const char *data, size_t len);
/* The document. */
int ka_show_event_json(void *arg, const char *type, const char *data, size_t len);

#endif
