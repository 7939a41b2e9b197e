/* What was found out about the forward that was checked last, for those who check several pairs of one
 * forward. */
#ifndef KA_KNOWN_H
#define KA_KNOWN_H

struct ka_known;

struct ka_known *ka_known_new(void);
void ka_known_free(struct ka_known *known); /* NULL is fine */

#endif
