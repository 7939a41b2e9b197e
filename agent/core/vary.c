/* Choices per tensor as factors of a covering design. Which choices a tensor has follows from its shape
 * alone; whether the forward takes them is found out by trying. See vary.h. */
#include "vary.h"

#include <stdio.h>
#include <string.h>

#include "base/each.h"
#include "cover.h"
#include "kinds.h"

#define UNSQUEEZED "unsqueezed"

enum family { IN_ROWS, APART, ACROSS };

/* Of a tensor's shape. */
struct extents {
    size_t rank, long_axes; /* axes longer than 1 */
    double outer, last;     /* of all axes but the last the product; 1 where there is none */
    bool tf32;              /* products of the call are in TF32 */
    bool first_long_is_last;
    size_t long_outer_axes;
};

static bool has_rows(const struct extents *e)
{
    return e->rank >= 2 && e->outer >= 2 && e->last > 1;
}

static bool has_axis(const struct extents *e)
{
    return e->rank >= 1 && e->outer * e->last > 0;
}

static bool has_long_axis(const struct extents *e)
{
    return has_axis(e) && e->long_axes;
}

static bool has_two(const struct extents *e)
{
    return has_axis(e) && e->last > 1;
}

static bool has_three(const struct extents *e)
{
    return has_axis(e) && e->last > 2;
}

static bool has_matrix(const struct extents *e)
{
    return e->rank >= 2 && has_axis(e);
}

static bool has_outer_axes(const struct extents *e)
{
    return e->rank >= 3 && has_axis(e) && e->long_outer_axes >= 2;
}

static bool has_outer(const struct extents *e)
{
    return e->rank >= 2 && e->outer >= 2 && e->last > 0;
}

static bool has_exact_outer(const struct extents *e)
{
    return has_outer(e) && !e->tf32;
}

static bool has_coarse_outer(const struct extents *e)
{
    return has_outer(e) && e->tf32;
}

static const struct choice {
    const char *name;
    bool (*suits)(const struct extents *);
    int family;
    bool magnitude; /* no two of them in a case: their products leave no precision to tell right from wrong */
    bool values;    /* makes other values */
} CHOICES[] = {
    {"slice", has_axis, APART, false, false},
    {"stacked", has_two, ACROSS, false, false},
    {"transposed", has_rows, ACROSS, false, false},
    {"expanded", has_long_axis, APART, false, true},
    {"spanned", has_rows, ACROSS, false, true},
    {"shifted", has_matrix, APART, false, false},
    {"swapped", has_outer_axes, APART, false, false},
    {"shared", has_long_axis, KA_COVER_ALONE, false, true},
    {"mixed", has_exact_outer, 1, true, true},
    {"uneven", has_coarse_outer, 1, true, true},
    {"tied", has_three, 1, false, true},
    {"flat", has_long_axis, 1, false, true},
    {"large", has_axis, 1, true, true},
    {"masked", has_three, 1, false, true},
};

/* A factor: the layout or the values of one tensor, and what each level is. */
struct aspect {
    const char *tensor; /* borrowed */
    enum ka_kind_sort sort;
    const struct choice *level[KA_COVER_LEVELS]; /* the first is NULL: plain */
};

struct aspects {
    size_t count;
    struct aspect of[KA_COVER_FACTORS];
    struct ka_cover_factor factor[KA_COVER_FACTORS];
};

static struct extents extents_of(const json_t *shape)
{
    struct extents e = {.rank = json_array_size(shape), .outer = 1, .last = 1};
    for (size_t i = 0; i < e.rank; i++) {
        json_int_t extent = json_integer_value(json_array_get(shape, i));
        bool is_last = i + 1 == e.rank;
        if (is_last)
            e.last = (double)extent;
        else
            e.outer *= (double)extent;
        if (extent > 1) {
            e.first_long_is_last = is_last && !e.long_axes;
            e.long_axes++;
            e.long_outer_axes += !is_last;
        }
    }
    return e;
}

/* Whether there is an input before it of the same shape and dtype. */
static bool has_twin(const json_t *tensors, size_t at)
{
    const json_t *one = json_array_get(tensors, at);
    for (size_t i = 0; i < at; i++) {
        const json_t *other = json_array_get(tensors, i);
        if (json_equal(json_object_get(one, "shape"), json_object_get(other, "shape")) &&
            json_equal(json_object_get(one, "dtype"), json_object_get(other, "dtype")))
            return !ka_kind_is_upstream(json_string_value(json_object_get(one, "name")));
    }
    return false;
}

static bool is_refused(const json_t *refused, const char *tensor, const char *kind)
{
    char words[256];
    snprintf(words, sizeof(words), "%s %s", tensor, kind ? kind : "");
    return kind && json_object_get(refused, words) != NULL;
}

bool ka_vary_is_refused(const json_t *variation, const json_t *refused)
{
    KA_EACH_MEMBER(variation, member, of) {
        KA_EACH_MEMBER(of, tensor, kind) {
            if (is_refused(refused, tensor, json_string_value(kind)))
                return true;
        }
    }
    return false;
}

static void add_aspect(struct aspects *all, const json_t *tensors, size_t at, enum ka_kind_sort sort,
                       const json_t *refused)
{
    const json_t *tensor = json_array_get(tensors, at);
    const char *name = json_string_value(json_object_get(tensor, "name"));
    struct extents e = extents_of(json_object_get(tensor, "shape"));
    e.tf32 = json_is_true(json_object_get(tensor, "tf32"));
    if (!name || all->count == KA_COVER_FACTORS)
        return;
    struct aspect *aspect = &all->of[all->count];
    struct ka_cover_factor *factor = &all->factor[all->count];
    *aspect = (struct aspect){.tensor = name, .sort = sort};
    *factor = (struct ka_cover_factor){.levels = 1};
    for (size_t i = 0; i < KA_COUNT(CHOICES); i++) {
        const struct choice *choice = &CHOICES[i];
        if (!ka_kind_find(sort, choice->name) || !choice->suits(&e) ||
            (choice->family == KA_COVER_ALONE && !has_twin(tensors, at)) ||
            (choice->values && json_is_true(json_object_get(tensor, "constant"))) ||
            is_refused(refused, name, choice->name))
            continue;
        int family = choice->family;
        if (strcmp(choice->name, "expanded") == 0 && e.first_long_is_last)
            family = ACROSS;
        else if (strcmp(choice->name, "shifted") == 0 && e.rank == 2)
            family = IN_ROWS;
        aspect->level[factor->levels] = choice;
        factor->family[factor->levels++] = family;
    }
    all->count += factor->levels > 1;
}

/* Magnitudes are one tensor's alone, and a shared tensor has its twin's values. */
static bool may_be(const struct ka_cover_row *row, void *arg)
{
    const struct aspects *all = arg;
    size_t magnitudes = 0;
    for (size_t f = 0; f < all->count; f++) {
        const struct choice *choice = all->of[f].level[row->level[f]];
        if (!choice)
            continue;
        magnitudes += choice->magnitude;
        bool followed = f + 1 < all->count && strcmp(all->of[f].tensor, all->of[f + 1].tensor) == 0;
        if (choice->family == KA_COVER_ALONE && followed && row->level[f + 1])
            return false;
    }
    return magnitudes <= 1;
}

static const char *member_of(const struct aspect *aspect)
{
    return aspect->sort == KA_KIND_LAYOUT ? "layouts" : "values";
}

static json_t *variation_of(const struct aspects *all, const struct ka_cover_row *row)
{
    json_t *made = json_object();
    for (size_t f = 0; f < all->count; f++) {
        const struct aspect *aspect = &all->of[f];
        const struct choice *choice = aspect->level[row->level[f]];
        if (!choice)
            continue;
        json_t *of = json_object_get(made, member_of(aspect));
        if (!of)
            json_object_set_new(made, member_of(aspect), of = json_object());
        json_object_set_new(of, aspect->tensor, json_string(choice->name));
    }
    return made;
}

static struct ka_cover_row row_of(const struct aspects *all, const json_t *variation)
{
    struct ka_cover_row row = {{0}};
    for (size_t f = 0; f < all->count; f++) {
        const struct aspect *aspect = &all->of[f];
        const char *kind =
            json_string_value(json_object_get(json_object_get(variation, member_of(aspect)), aspect->tensor));
        for (size_t l = 1; kind && l < all->factor[f].levels; l++)
            if (strcmp(aspect->level[l]->name, kind) == 0)
                row.level[f] = (unsigned char)l;
    }
    return row;
}

/* The level of "flat" of an aspect, or 0. */
static unsigned char flat_of(const struct aspects *all, size_t f)
{
    unsigned char level = 0;
    for (size_t l = 1; l < all->factor[f].levels; l++)
        if (all->of[f].sort == KA_KIND_VALUES && strcmp(all->of[f].level[l]->name, "flat") == 0)
            level = (unsigned char)l;
    return level;
}

static bool makes_values(const struct aspects *all, const struct ka_cover_row *row, size_t f)
{
    const struct choice *layout = f && strcmp(all->of[f - 1].tensor, all->of[f].tensor) == 0
                                      ? all->of[f - 1].level[row->level[f - 1]]
                                      : NULL;
    return layout && layout->values;
}

/* Constant rows show what cancels, but one constant alone may leave nothing by luck: where a layout makes all
 * rows or columns one. So they also come without such a layout, all tensors at once. Whether any was left. */
static bool add_flat(const struct aspects *all, const struct ka_cover_row *rows, size_t count,
                     struct ka_cover_row *made)
{
    bool any = false;
    *made = (struct ka_cover_row){{0}};
    for (size_t f = 0; f < all->count; f++) {
        unsigned char flat = flat_of(all, f);
        bool seen = !flat;
        for (size_t i = 0; i < count && !seen; i++)
            seen = rows[i].level[f] == flat && !makes_values(all, &rows[i], f);
        if (!seen)
            made->level[f] = flat;
        any = any || !seen;
    }
    return any;
}

static bool is_unsqueezed(const json_t *variations)
{
    KA_EACH(variations, i, variation) {
        KA_EACH_MEMBER(json_object_get(variation, "layouts"), tensor, kind) {
            if (strcmp(json_string_value(kind), UNSQUEEZED) == 0)
                return true;
        }
    }
    return false;
}

/* All inputs of the first matrix's shape with an axis more (new reference): one of them alone would be
 * another call. NULL where there is none, or where the forward does not take them. */
static json_t *unsqueezed(const json_t *tensors, const json_t *refused)
{
    const json_t *shape = NULL;
    json_t *layouts = NULL;
    KA_EACH(tensors, i, tensor) {
        const char *name = json_string_value(json_object_get(tensor, "name"));
        const json_t *its = json_object_get(tensor, "shape");
        struct extents e = extents_of(its);
        if (!name || ka_kind_is_upstream(name) || !has_matrix(&e) ||
            (shape && !json_equal((json_t *)shape, (json_t *)its)))
            continue;
        if (is_refused(refused, name, UNSQUEEZED)) {
            json_decref(layouts);
            return NULL;
        }
        shape = its;
        layouts = layouts ? layouts : json_object();
        json_object_set_new(layouts, name, json_string(UNSQUEEZED));
    }
    return layouts ? json_pack("{s:o}", "layouts", layouts) : NULL;
}

json_t *ka_vary(const json_t *tensors, const json_t *kept, const json_t *refused)
{
    struct aspects all = {.count = 0};
    struct ka_cover_row rows[KA_VARY_MOST];
    size_t have = 0;
    json_t *made = json_array();
    KA_EACH(tensors, i, item) {
        const char *name = json_string_value(json_object_get(item, "name"));
        add_aspect(&all, tensors, i, KA_KIND_LAYOUT, refused);
        if (name && !ka_kind_is_upstream(name) && !json_is_true(json_object_get(item, "constant")))
            add_aspect(&all, tensors, i, KA_KIND_VALUES, refused);
    }
    KA_EACH(kept, i, item) {
        if (have < KA_VARY_MOST)
            rows[have++] = row_of(&all, item);
    }
    size_t end = ka_cover(all.factor, all.count, may_be, &all, rows, have, KA_VARY_MOST);
    if (end < KA_VARY_MOST && add_flat(&all, rows, end, &rows[end]))
        end++;
    for (size_t i = have; i < end; i++)
        json_array_append_new(made, variation_of(&all, &rows[i]));
    json_auto_t *more = is_unsqueezed(kept) ? NULL : unsqueezed(tensors, refused);
    if (more && end < KA_VARY_MOST)
        json_array_append(made, more);
    return made;
}

/* ---- the tensors of a case */

static void add_tensor(json_t *list, const char *name, const json_t *from, bool constant)
{
    json_t *shape = json_object_get(from, "shape"), *dtype = json_object_get(from, "dtype");
    json_array_append_new(list, json_pack("{s:s, s:O?, s:O?, s:b}", "name", name, "shape", shape, "dtype",
                                          dtype, "constant", constant));
}

static void add_inputs(json_t *list, const json_t *entry, bool constant)
{
    KA_EACH(json_object_get(entry, "inputs"), i, item) {
        const char *name = json_string_value(json_object_get(item, "name"));
        if (name && json_is_true(json_object_get(item, "grad")) == !constant)
            add_tensor(list, name, item, constant);
    }
}

json_t *ka_vary_tensors(const json_t *entry)
{
    json_t *list = json_array();
    add_inputs(list, entry, false);
    KA_EACH(json_object_get(entry, "outputs"), i, item) {
        char name[32];
        snprintf(name, sizeof(name), "upstream/%zu", i);
        if (json_is_true(json_object_get(item, "differentiable")))
            add_tensor(list, name, item, false);
    }
    add_inputs(list, entry, true);
    KA_EACH(list, i, tensor) {
        if (json_array_size(json_object_get(entry, "tf32")))
            json_object_set_new(tensor, "tf32", json_true());
    }
    return list;
}
