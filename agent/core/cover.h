/* A covering design: few rows in which any two choices meet. Pure.
 *
 * Words: a *factor* is something of which each row has one level; level 0 is the plain one. Levels of one
 * *family* stand in for each other where two factors meet. */
#ifndef KA_COVER_H
#define KA_COVER_H

#include "base/base.h"

#define KA_COVER_FACTORS 24
#define KA_COVER_LEVELS 10
#define KA_COVER_FAMILIES 3 /* 0 is that of level 0 */
#define KA_COVER_ALONE (-1) /* a level that stands in for none */

struct ka_cover_factor {
    size_t levels; /* at least 1 */
    int family[KA_COVER_LEVELS];
};

struct ka_cover_row {
    unsigned char level[KA_COVER_FACTORS];
};

/* Whether a row may be; one with plain levels in place of others may be too. */
typedef bool (*ka_cover_fits)(const struct ka_cover_row *row, void *arg);

/* Append rows to the `have` that there are, at most to `most`, until every level of every factor is in one
 * and every two families of two factors meet in one, as far as fitting rows can do that. A row of plain
 * levels alone is taken for granted. How many rows there are then. The same arguments give the same rows. */
size_t ka_cover(const struct ka_cover_factor *factors, size_t count, ka_cover_fits fits, void *arg,
                struct ka_cover_row *rows, size_t have, size_t most);

#endif
