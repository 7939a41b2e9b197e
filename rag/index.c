/* The matrix and its search. Knows no Python and no command line. */
#include "index.h"

#include <cblas.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define HUGE_PAGE ((size_t)2 << 20)

struct row {
    char *text;                  /* id, path, op, schedule, each with its NUL, in one piece */
    uint32_t path, op, schedule; /* offsets in text */
    uint64_t tokens_hash;
};

struct ka_index {
    size_t dim, count, cap;
    float *matrix;
    float *scores; /* scratch: one per row, made by the first search */
    size_t score_cap;
    struct row *rows;
};

struct candidate {
    size_t row;
    float score;
};

/* The best `max` candidates seen: a heap with the worst on top. */
struct heap {
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
    struct row *items = realloc(index->rows, rows * sizeof(*items));
    if (!items)
        return -ENOMEM;
    index->rows = items;
    index->cap = rows;
    return 0;
}

struct ka_index *ka_index_new(size_t dim, size_t rows)
{
    struct ka_index *index = calloc(1, sizeof(*index));
    if (!index)
        return NULL;
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
    for (size_t i = 0; i < index->count; i++)
        free(index->rows[i].text);
    free(index->rows);
    free(index->matrix);
    free(index->scores);
    free(index);
}

int ka_index_add(struct ka_index *index, const struct ka_index_row *row, const float *vector)
{
    const char *texts[] = {row->id, row->path, row->op, row->schedule};
    uint32_t at[5] = {0};
    for (size_t i = 0; i < 4; i++)
        at[i + 1] = at[i] + (uint32_t)strlen(texts[i]) + 1;
    char *text = malloc(at[4]);
    if (!text || (index->count == index->cap && reserve(index, 2 * index->cap))) {
        free(text);
        return -ENOMEM;
    }
    for (size_t i = 0; i < 4; i++)
        memcpy(text + at[i], texts[i], at[i + 1] - at[i]);
    index->rows[index->count] = (struct row){text, at[1], at[2], at[3], row->tokens_hash};
    memcpy(index->matrix + index->count * index->dim, vector, index->dim * sizeof(float));
    index->count++;
    return 0;
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
    rc = ka_store_each_vector(store, embedder, version, dim, add_stored, index, err);
    if (rc)
        ka_index_free(index);
    else
        *out = index;
    return rc;
}

size_t ka_index_count(const struct ka_index *index)
{
    return index->count;
}

const float *ka_index_matrix(const struct ka_index *index)
{
    return index->matrix;
}

static struct ka_index_row row_at(const struct ka_index *index, size_t i)
{
    const struct row *r = &index->rows[i];
    return (struct ka_index_row){r->text, r->text + r->path, r->text + r->op, r->text + r->schedule,
                                 r->tokens_hash};
}

/* ---- the heap ---- */

/* A row that was added earlier wins a tie, so that results do not depend on the heap's layout. */
static bool worse(struct candidate a, struct candidate b)
{
    return a.score != b.score ? a.score < b.score : a.row > b.row;
}

static void sift_down(struct heap *h, size_t at)
{
    for (;;) {
        size_t least = at;
        for (size_t child = 2 * at + 1; child <= 2 * at + 2 && child < h->count; child++)
            if (worse(h->items[child], h->items[least]))
                least = child;
        if (least == at)
            return;
        struct candidate swap = h->items[at];
        h->items[at] = h->items[least];
        h->items[least] = swap;
        at = least;
    }
}

static void heap_offer(struct heap *h, struct candidate c)
{
    if (h->count == h->max) {
        if (worse(c, h->items[0]))
            return;
        h->items[0] = c;
        sift_down(h, 0);
        return;
    }
    size_t at = h->count;
    *KA_APPEND(h->items, h->count) = c;
    while (at > 0 && worse(c, h->items[(at - 1) / 2])) {
        h->items[at] = h->items[(at - 1) / 2];
        at = (at - 1) / 2;
    }
    h->items[at] = c;
}

static int best_first(const void *a, const void *b)
{
    const struct candidate *x = a, *y = b;
    return worse(*y, *x) ? -1 : 1;
}

/* ---- one search ---- */

static bool excluded(const struct ka_index_query *query, const char *path)
{
    for (size_t i = 0; i < query->exclude_count; i++)
        if (*query->excludes[i] && strstr(path, query->excludes[i]))
            return true;
    return false;
}

static int score_rows(struct ka_index *index, const float *vector)
{
    if (index->score_cap < index->count) {
        float *scores = realloc(index->scores, index->count * sizeof(float));
        if (!scores)
            return -ENOMEM;
        index->scores = scores;
        index->score_cap = index->count;
    }
    cblas_sgemv(CblasRowMajor, CblasNoTrans, (int)index->count, (int)index->dim, 1, index->matrix,
                (int)index->dim, vector, 1, 0, index->scores, 1);
    return 0;
}

/* Nearly all rows of a large store end at the first comparison: `cut` is what a score must reach to be worth
 * a look. */
static void collect(const struct ka_index *index, const struct ka_index_query *query, struct heap *found,
                    struct heap *duplicates)
{
    double cut = query->min_sim;
    for (size_t i = 0; i < index->count; i++) {
        float score = index->scores[i];
        if (!((double)score >= cut))
            continue;
        bool same_tokens = query->tokens_hash && index->rows[i].tokens_hash == query->tokens_hash;
        bool duplicate = !query->keep_duplicates && (same_tokens || (double)score >= KA_INDEX_DUPLICATE);
        if (excluded(query, row_at(index, i).path))
            continue;
        heap_offer(duplicate ? duplicates : found, (struct candidate){i, score});
        if (found->count == found->max)
            cut = (double)found->items[0].score;
    }
}

static bool siblings(const struct ka_index *index, size_t a, size_t b)
{
    struct ka_index_row x = row_at(index, a), y = row_at(index, b);
    if (!*x.op || strcmp(x.op, y.op) != 0)
        return false;
    float similarity =
        cblas_sdot((int)index->dim, index->matrix + a * index->dim, 1, index->matrix + b * index->dim, 1);
    return x.tokens_hash == y.tokens_hash || (double)similarity >= KA_INDEX_SIBLING;
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
        if (strcmp(row_at(index, hits[i]).schedule, row_at(index, row).schedule) == 0)
            return false;
    }
    return related == 0 || related + 1 <= topk / 2;
}

static size_t choose(const struct ka_index *index, const struct heap *found, size_t topk, size_t *hits)
{
    size_t count = 0, deferred_count = 0;
    size_t *deferred = ka_calloc(found->count, sizeof(*deferred));
    for (size_t i = 0; i < found->count && count < topk; i++) {
        size_t row = found->items[i].row;
        if (diverse(index, hits, count, row, topk))
            hits[count++] = row;
        else
            deferred[deferred_count++] = row;
    }
    for (size_t i = 0; i < deferred_count && count < topk; i++)
        hits[count++] = deferred[i];
    free(deferred);
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
        hits[i] = (struct ka_hit){row_at(index, rows[i]), (double)index->scores[rows[i]]};
    qsort(hits, count, sizeof(*hits), hit_order);
    return hits;
}

int ka_index_search(struct ka_index *index, const struct ka_index_query *query, struct ka_hits *out,
                    struct ka_err *err)
{
    if (query->topk == 0 || query->topk > KA_INDEX_TOPK_MAX)
        return ka_fail(err, -EINVAL, "topk must be 1 to %d, not %zu", KA_INDEX_TOPK_MAX, query->topk);
    if (score_rows(index, query->vector))
        return ka_fail(err, -ENOMEM, "no memory for the scores of %zu pairs", index->count);
    struct heap found = {.max = 4 * query->topk + 16}, duplicates = {.max = KA_INDEX_TOPK_MAX};
    collect(index, query, &found, &duplicates);
    if (found.count)
        qsort(found.items, found.count, sizeof(*found.items), best_first);
    size_t *rows = ka_calloc(found.count > duplicates.count ? found.count : duplicates.count, sizeof(*rows));
    size_t count = choose(index, &found, query->topk, rows);
    out->items = make_hits(index, rows, count);
    out->count = count;
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
