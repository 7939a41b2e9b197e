/* The line of a pair below which its backward begins. Above it a file is the user's. */
#ifndef KA_MARKER_H
#define KA_MARKER_H

#define KA_MARKER "# ---- backward ----"

#endif
