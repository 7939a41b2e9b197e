/* The matrix and its search. Knows no Python and no command line. */
#include "index.h"

#include <cblas.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define HUGE_PAGE ((size_t)2 << 20)

struct ka_index {
    size_t dim, count, cap;
    size_t words; /* of dim, at a row's end: the part of our embedder that holds words; else 0 */
    float *matrix;
    float *least, *scores;     /* scratch: one per row, made by each search */
    struct ka_index_row *rows; /* own their strings */
};

struct candidate {
    size_t row;
    float score;
};

/* The `max` best of those seen, the best first. */
struct best {
    struct candidate *items;
    size_t count, max;
};

/* ---- the index ---- */

/* Cache lines are never split; a large matrix lies in huge pages, since the product would else wait for the
 * TLB. */
static float *alloc_matrix(size_t bytes)
{
    size_t align = bytes >= HUGE_PAGE ? HUGE_PAGE : 64;
    size_t size = (bytes + align - 1) / align * align;
    float *matrix = aligned_alloc(align, size);
    if (matrix && align == HUGE_PAGE)
        madvise(matrix, size, MADV_HUGEPAGE); /* a wish: without it the search is only slower */
    return matrix;
}

static int reserve(struct ka_index *index, size_t rows)
{
    if (rows <= index->cap)
        return 0;
    float *matrix = alloc_matrix(rows * index->dim * sizeof(float));
    if (!matrix)
        return -ENOMEM;
    if (index->count)
        memcpy(matrix, index->matrix, index->count * index->dim * sizeof(float));
    free(index->matrix);
    index->matrix = matrix;
    index->rows = ka_realloc(index->rows, rows, sizeof(*index->rows));
    index->cap = rows;
    return 0;
}

struct ka_index *ka_index_new(size_t dim, size_t rows)
{
    struct ka_index *index = ka_calloc(1, sizeof(*index));
    index->dim = dim;
    if (reserve(index, rows ? rows : 16)) {
        ka_index_free(index);
        return NULL;
    }
    return index;
}

void ka_index_free(struct ka_index *index)
{
    if (!index)
        return;
    for (size_t i = 0; i < index->count; i++) {
        const char *texts[] = {index->rows[i].id, index->rows[i].path, index->rows[i].op,
                               index->rows[i].schedule};
        for (size_t k = 0; k < KA_COUNT(texts); k++)
            free((char *)texts[k]);
    }
    free(index->rows);
    free(index->matrix);
    free(index->least);
    free(index->scores);
    free(index);
}

int ka_index_add(struct ka_index *index, const struct ka_index_row *row, const float *vector)
{
    if (index->count == index->cap && reserve(index, 2 * index->cap))
        return -ENOMEM;
    index->rows[index->count] =
        (struct ka_index_row){ka_strdup(row->id), ka_strdup(row->path), ka_strdup(row->op),
                              ka_strdup(row->schedule), row->tokens_hash};
    memcpy(index->matrix + index->count * index->dim, vector, index->dim * sizeof(float));
    index->count++;
    return 0;
}

size_t ka_index_count(const struct ka_index *index)
{
    return index->count;
}

static int by_id(const void *key, const void *row)
{
    return strcmp(key, ((const struct ka_index_row *)row)->id);
}

size_t ka_index_find(const struct ka_index *index, const char *id)
{
    const struct ka_index_row *found =
        index->count ? bsearch(id, index->rows, index->count, sizeof(*index->rows), by_id) : NULL;
    return found ? (size_t)(found - index->rows) : SIZE_MAX;
}

static int add_stored(const struct ka_store_row *row, const struct ka_embedding *e, void *arg)
{
    struct ka_index_row r = {row->id, row->path, row->op, row->schedule, e->tokens_hash};
    return ka_index_add(arg, &r, e->vector);
}

int ka_index_load(struct ka_store *store, const char *embedder, int version, size_t dim,
                  struct ka_index **out, struct ka_err *err)
{
    size_t count = 0;
    int rc = ka_store_count(store, &count, err);
    if (rc)
        return rc;
    struct ka_index *index = ka_index_new(dim, count);
    if (!index)
        return ka_fail(err, -ENOMEM, "no memory for %zu vectors of %zu numbers", count, dim);
    index->words = strcmp(embedder, KA_EMBED_NAME) == 0 ? KA_EMBED_WORDS : 0;
    rc = ka_store_each_vector(store, embedder, version, dim, add_stored, index, err);
    if (rc)
        ka_index_free(index);
    else
        *out = index;
    return rc;
}

/* ---- the best ---- */

/* A row that was added earlier wins a tie. */
static bool worse(struct candidate a, struct candidate b)
{
    return a.score != b.score ? a.score < b.score : a.row > b.row;
}

static void keep_best(struct best *best, struct candidate c)
{
    size_t at = best->count;
    while (at > 0 && worse(best->items[at - 1], c))
        at--;
    if (at == best->max)
        return;
    if (best->count < best->max)
        best->items = ka_grow(best->items, ++best->count, sizeof(c));
    memmove(&best->items[at + 1], &best->items[at], (best->count - 1 - at) * sizeof(c));
    best->items[at] = c;
}

/* ---- one search ---- */

static bool excluded(const struct ka_index_query *query, const char *path)
{
    for (size_t i = 0; i < query->exclude_count; i++)
        if (*query->excludes[i] && strstr(path, query->excludes[i]))
            return true;
    return false;
}

/* Products of `from` .. `to` of the vector with the rows'. */
static float *products(const struct ka_index *index, float *out, const float *vector, size_t from, size_t to)
{
    out = ka_realloc(out, index->count + 1, sizeof(float));
    cblas_sgemv(CblasRowMajor, CblasNoTrans, (int)index->count, (int)(to - from), 1, index->matrix + from,
                (int)index->dim, vector + from, 1, 0, out, 1);
    return out;
}

/* `scores` are similarities; `least` is the lesser product of the parts: a near-duplicate's is high too. */
static void score_rows(struct ka_index *index, const float *vector)
{
    size_t split = index->dim - index->words;
    index->scores = products(index, index->scores, vector, 0, split);
    index->least = products(index, index->least, vector, index->words ? split : 0, index->dim);
    for (size_t i = 0; i < index->count && index->words; i++) {
        float structure = index->scores[i], words = index->least[i];
        index->scores[i] = ka_embed_similarity(structure, words);
        index->least[i] = structure < words ? structure : words;
    }
}

/* Rows of the same forward that are among the best already: they have one score. */
static size_t alike(const struct ka_index *index, const struct best *found, size_t row)
{
    size_t n = 0;
    for (size_t i = 0; i < found->count && index->rows[row].tokens_hash; i++)
        n += index->rows[found->items[i].row].tokens_hash == index->rows[row].tokens_hash;
    return n;
}

/* Nearly all rows of a large store end at the first comparison: `cut` is what a score must reach to be worth
 * a look. */
static void collect(const struct ka_index *index, const struct ka_index_query *query, struct best *found,
                    struct best *duplicates)
{
    double cut = query->min_sim;
    for (size_t i = 0; i < index->count; i++) {
        float score = index->scores[i];
        if (!((double)score >= cut))
            continue;
        bool same_tokens = query->tokens_hash && index->rows[i].tokens_hash == query->tokens_hash;
        bool duplicate =
            !query->keep_duplicates && (same_tokens || (double)index->least[i] >= KA_INDEX_DUPLICATE);
        if (excluded(query, index->rows[i].path) || (!duplicate && alike(index, found, i) >= query->topk))
            continue;
        keep_best(duplicate ? duplicates : found, (struct candidate){i, score});
        if (found->count == found->max)
            cut = (double)found->items[found->max - 1].score;
    }
}

static bool siblings(const struct ka_index *index, size_t a, size_t b)
{
    const struct ka_index_row *x = &index->rows[a], *y = &index->rows[b];
    if (x->tokens_hash && x->tokens_hash == y->tokens_hash)
        return true;
    if (!*x->op || strcmp(x->op, y->op) != 0)
        return false;
    size_t split = index->dim - index->words;
    float similarity =
        cblas_sdot((int)split, index->matrix + a * index->dim, 1, index->matrix + b * index->dim, 1);
    return (double)similarity >= KA_INDEX_SIBLING;
}

/* Whether `row` may join the hits now: its siblings leave room, and none of them shows its schedule already.
 */
static bool diverse(const struct ka_index *index, const size_t *hits, size_t count, size_t row, size_t topk)
{
    size_t related = 0;
    for (size_t i = 0; i < count; i++) {
        if (!siblings(index, hits[i], row))
            continue;
        related++;
        if (strcmp(index->rows[hits[i]].schedule, index->rows[row].schedule) == 0)
            return false;
    }
    return related == 0 || related + 1 <= topk / 2;
}

static size_t choose(const struct ka_index *index, const struct best *found, size_t topk, size_t *hits)
{
    size_t count = 0, deferred_count = 0;
    KA_AUTO_FREE size_t *deferred = ka_calloc(found->count, sizeof(*deferred));
    for (size_t i = 0; i < found->count && count < topk; i++) {
        size_t row = found->items[i].row;
        if (diverse(index, hits, count, row, topk))
            hits[count++] = row;
        else
            deferred[deferred_count++] = row;
    }
    for (size_t i = 0; i < deferred_count && count < topk; i++)
        hits[count++] = deferred[i];
    return count;
}

static int hit_order(const void *a, const void *b)
{
    const struct ka_hit *x = a, *y = b;
    if (x->similarity != y->similarity)
        return x->similarity > y->similarity ? -1 : 1;
    return strcmp(x->row.id, y->row.id);
}

static struct ka_hit *make_hits(const struct ka_index *index, const size_t *rows, size_t count)
{
    struct ka_hit *hits = ka_calloc(count, sizeof(*hits));
    for (size_t i = 0; i < count; i++)
        hits[i] = (struct ka_hit){index->rows[rows[i]], (double)index->scores[rows[i]]};
    qsort(hits, count, sizeof(*hits), hit_order);
    return hits;
}

int ka_index_search(struct ka_index *index, const struct ka_index_query *query, struct ka_hits *out,
                    struct ka_err *err)
{
    if (query->topk == 0 || query->topk > KA_INDEX_TOPK_MAX)
        return ka_fail(err, -EINVAL, "topk must be 1 to %d, not %zu", KA_INDEX_TOPK_MAX, query->topk);
    struct best found = {.max = 4 * query->topk + 16}, duplicates = {.max = KA_INDEX_TOPK_MAX};
    score_rows(index, query->vector);
    for (size_t i = 0; i < index->count && query->shares; i++)
        index->scores[i] = ka_embed_with_prose(index->scores[i], query->shares[i]);
    collect(index, query, &found, &duplicates);
    size_t *rows = ka_calloc(found.count > duplicates.count ? found.count : duplicates.count, sizeof(*rows));
    out->count = choose(index, &found, query->topk, rows);
    out->items = make_hits(index, rows, out->count);
    for (size_t i = 0; i < duplicates.count; i++)
        rows[i] = duplicates.items[i].row;
    out->duplicates = make_hits(index, rows, duplicates.count);
    out->duplicate_count = duplicates.count;
    free(rows);
    free(found.items);
    free(duplicates.items);
    return 0;
}

void ka_hits_free(struct ka_hits *hits)
{
    free(hits->items);
    free(hits->duplicates);
    *hits = (struct ka_hits){0};
}
