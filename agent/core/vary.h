/* Which tensor of a case has which layout and which values: chosen per tensor, combined by a covering
 * design (cover.h). Pure.
 *
 * Words: a *tensor* is an input, by its name, or `upstream/0`, the upstream of output 0. A *constant* one
 * wants no gradient: a table, a mask or indices, whose values have their meaning, so that only layouts that
 * keep them are chosen. A *choice* is a tensor with a layout or a kind of values (rows of kinds.h): "x
 * transposed". A *variation* is {"layouts"?: {tensor: kind}, "values"?: {tensor: kind}}, members of a case.
 * The *families* that stand in for each other where two tensors meet: in rows, one after another; in rows
 * otherwise; not in rows. */
#ifndef KA_VARY_H
#define KA_VARY_H

#include <jansson.h>

#include "base/base.h"

#define KA_VARY_MOST 16 /* variations */

/* [{"name", "shape", "dtype", "constant", "tf32"?}] of a case of the oracle's (new reference). */
json_t *ka_vary_tensors(const json_t *entry);

/* Variations (new reference) such that each choice is in one and all families of choices of any two meet in
 * one, but for what `kept` (variations) covers and for choices that are keys of `refused`. */
json_t *ka_vary(const json_t *tensors, const json_t *kept, const json_t *refused);

/* Whether a choice of `variation` is a key of `refused`. */
bool ka_vary_is_refused(const json_t *variation, const json_t *refused);

#endif
