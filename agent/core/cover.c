/* Rows are made one at a time, each from the choice and around the choices with which it covers most. */
#include "cover.h"

#include <string.h>

#define LEVEL_GAIN 4 /* a level that no row has yet, in units of two families that have not met */

struct design {
    const struct ka_cover_factor *factors;
    size_t count;
    ka_cover_fits fits;
    void *arg;
    unsigned used[KA_COVER_FACTORS][KA_COVER_LEVELS]; /* rows with that level */
    bool met[KA_COVER_FACTORS][KA_COVER_FAMILIES][KA_COVER_FACTORS][KA_COVER_FAMILIES];
};

static int family_of(const struct design *d, const struct ka_cover_row *row, size_t factor)
{
    return d->factors[factor].family[row->level[factor]];
}

static void take(struct design *d, const struct ka_cover_row *row)
{
    for (size_t f = 0; f < d->count; f++) {
        d->used[f][row->level[f]]++;
        for (size_t g = 0; g < d->count; g++) {
            int a = family_of(d, row, f), b = family_of(d, row, g);
            if (a >= 0 && b >= 0)
                d->met[f][a][g][b] = true;
        }
    }
}

/* What factor `f` adds at its level in the row, beside the factors that are `set`. */
static unsigned gain_of(const struct design *d, const struct ka_cover_row *row, const bool *set, size_t f)
{
    unsigned gain = d->used[f][row->level[f]] ? 0 : LEVEL_GAIN;
    int a = family_of(d, row, f);
    for (size_t g = 0; g < d->count && a >= 0; g++) {
        int b = family_of(d, row, g);
        gain += g != f && set[g] && b >= 0 && !d->met[f][a][g][b];
    }
    return gain;
}

/* The level of factor `f` that adds most; of equal ones that which fewest rows have. */
static unsigned set_best(const struct design *d, struct ka_cover_row *row, bool *set, size_t f)
{
    unsigned char best = 0;
    unsigned best_gain = 0;
    for (size_t l = 0; l < d->factors[f].levels; l++) {
        row->level[f] = (unsigned char)l;
        if (!d->fits(row, d->arg))
            continue;
        unsigned gain = gain_of(d, row, set, f);
        if (gain > best_gain || (gain == best_gain && d->used[f][l] < d->used[f][best])) {
            best = (unsigned char)l;
            best_gain = gain;
        }
    }
    row->level[f] = best;
    set[f] = true;
    return best_gain;
}

/* The row around level `l` of factor `f`; what it covers that no row did. */
static unsigned build(const struct design *d, size_t f, size_t l, struct ka_cover_row *row)
{
    bool set[KA_COVER_FACTORS] = {false};
    memset(row, 0, sizeof(*row));
    row->level[f] = (unsigned char)l;
    set[f] = true;
    unsigned gain = gain_of(d, row, set, f);
    for (size_t step = 1; step < d->count; step++)
        gain += set_best(d, row, set, (f + step) % d->count);
    return gain;
}

size_t ka_cover(const struct ka_cover_factor *factors, size_t count, ka_cover_fits fits, void *arg,
                struct ka_cover_row *rows, size_t have, size_t most)
{
    struct design d = {.factors = factors, .count = count, .fits = fits, .arg = arg};
    take(&d, &(struct ka_cover_row){{0}});
    for (size_t i = 0; i < have; i++)
        take(&d, &rows[i]);
    while (have < most) {
        struct ka_cover_row row;
        unsigned best = 0;
        for (size_t f = 0; f < count; f++) {
            for (size_t l = 0; l < factors[f].levels; l++) {
                unsigned gain = build(&d, f, l, &row);
                if (gain > best) {
                    best = gain;
                    rows[have] = row;
                }
            }
        }
        if (!best)
            break;
        take(&d, &rows[have++]);
    }
    return have;
}
