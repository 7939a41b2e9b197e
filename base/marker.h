/* The line of a pair below which its backward begins. Above it a file is the user's. */
#ifndef KA_MARKER_H
#define KA_MARKER_H

#include <stddef.h>

#define KA_MARKER "# ---- backward ----"

/* Where that line begins, with blanks around it or not, and in *after what stands below it. NULL without one;
 * *after is then as it was. */
const char *ka_marker_find(const char *text, size_t len, const char **after);

#endif
