/* Builds a store beside the old one and renames it. Knows no command line. */
#include "build.h"

#include <errno.h>
#include <fts.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/files.h"

#define FILES_MAX 200000
#define DEPTH_MAX 16

struct item {
    char *path;
    struct ka_pair pair;
    struct ka_features features;
};

struct build {
    struct item *items;
    size_t count;
    struct ka_measures *measures;
    ka_build_progress_fn progress;
    void *arg;
};

static int add_file(void *arg, const char *path, struct ka_err *err)
{
    struct build *b = arg;
    if (b->count == FILES_MAX)
        return ka_fail(err, -EFBIG, "more than %d files; build from a smaller folder", FILES_MAX);
    KA_APPEND(b->items, b->count)->path = ka_strdup(path);
    return 0;
}

static int by_name(const FTSENT **a, const FTSENT **b)
{
    return strcmp((*a)->fts_name, (*b)->fts_name);
}

int ka_build_walk(const char *dir, int (*each)(void *arg, const char *path, struct ka_err *err), void *arg,
                  struct ka_err *err)
{
    char *roots[] = {(char *)dir, NULL};
    int rc = 0, unread = 0;
    FTS *walk = fts_open(roots, FTS_PHYSICAL | FTS_COMFOLLOW | FTS_NOCHDIR, by_name);
    for (FTSENT *at; walk && rc == 0 && (at = fts_read(walk));) {
        bool folder = at->fts_info == FTS_D || at->fts_info == FTS_DP, top = at->fts_level == 0;
        if (at->fts_info == FTS_DNR || (top && !folder))
            unread = ka_fail(err, at->fts_errno ? -at->fts_errno : -ENOTDIR, "%s: %s", at->fts_path,
                             strerror(at->fts_errno ? at->fts_errno : ENOTDIR));
        else if (!top && (*at->fts_name == '.' || strcmp(at->fts_name, "__pycache__") == 0 ||
                          (folder && at->fts_level > DEPTH_MAX)))
            fts_set(walk, at, FTS_SKIP);
        else if (at->fts_info == FTS_F && ka_ends_with(at->fts_name, ".py"))
            rc = each(arg, at->fts_path, err);
    }
    fts_close(walk);
    return rc ? rc : unread;
}

static int by_path(const void *a, const void *b)
{
    return strcmp(((const struct item *)a)->path, ((const struct item *)b)->path);
}

static int by_id(const void *a, const void *b)
{
    return strcmp((*(const struct item *const *)a)->pair.id, (*(const struct item *const *)b)->pair.id);
}

static int refuse_twins(const struct build *b, struct ka_err *err)
{
    KA_AUTO_FREE const struct item **order = ka_calloc(b->count, sizeof(const struct item *));
    for (size_t i = 0; i < b->count; i++)
        order[i] = &b->items[i];
    qsort(order, b->count, sizeof(const struct item *), by_id);
    for (size_t i = 1; i < b->count; i++)
        if (by_id(&order[i - 1], &order[i]) == 0)
            return ka_fail(err, -EEXIST, "%s and %s have the same name; rename one of them",
                           order[i - 1]->path, order[i]->path);
    return 0;
}

/* Over all rows, or over so many spread evenly. */
static void measure(const struct build *b)
{
    size_t step = (b->count + KA_WHITEN_ROWS - 1) / KA_WHITEN_ROWS;
    for (size_t i = 0; i < b->count; i += step)
        ka_measures_add(b->measures, &b->items[i].features);
    ka_measures_end(b->measures);
}

/* First pass: read, parse and describe every file; count features. */
static int read_all(struct build *b, struct ka_err *err)
{
    for (size_t i = 0; i < b->count; i++) {
        struct item *item = &b->items[i];
        struct ka_err why;
        int rc = ka_pair_read(item->path, &item->pair, err);
        if (rc)
            return rc;
        rc = ka_features_of(item->pair.source, strlen(item->pair.source), &item->features, &why);
        if (rc)
            return ka_fail(err, rc, "%s: %s", item->path, why.msg);
        ka_measures_count(b->measures, &item->features);
        if (b->progress)
            b->progress(i + 1, b->count, item->path, b->arg);
    }
    return refuse_twins(b, err);
}

static int put_item(struct ka_store *store, const struct ka_pair *pair, const struct ka_features *features,
                    const struct ka_measures *measures, struct ka_err *err)
{
    float vector[KA_EMBED_DIM];
    int rc = ka_embed(features, measures, vector, err);
    struct ka_embedding e = {KA_EMBED_NAME, KA_EMBED_VERSION, KA_EMBED_DIM, vector, features->tokens_hash};
    return rc ? rc : ka_store_put(store, pair, &e, err);
}

/* Second pass: everything in one transaction. */
static int write_all(const struct build *b, const char *path, struct ka_err *err)
{
    struct ka_store *store = NULL;
    int rc = ka_store_open(path, KA_STORE_CREATE, &store, err);
    if (rc)
        return rc;
    rc = ka_store_begin(store, err);
    if (rc == 0)
        rc = ka_store_save_measures(store, b->measures, err);
    for (size_t i = 0; i < b->count && rc == 0; i++)
        rc = put_item(store, &b->items[i].pair, &b->items[i].features, b->measures, err);
    if (rc == 0)
        rc = ka_store_commit(store, err);
    ka_store_close(store);
    return rc;
}

static void remove_beside(const char *path, const char *suffix)
{
    KA_AUTO_FREE char *name = ka_format("%s%s", path, suffix);
    unlink(name);
}

/* What a killed writer left beside the old file would be played into the new one: it goes first. */
static int move_over(const char *from, const char *to, struct ka_err *err)
{
    static const char *const LEFT[] = {"-wal", "-shm", "-journal"};
    for (size_t i = 0; i < KA_COUNT(LEFT); i++)
        remove_beside(to, LEFT[i]);
    return rename(from, to) == 0 ? 0
                                 : ka_fail(err, -errno, "%s: cannot be replaced: %s", to, strerror(errno));
}

static void free_build(struct build *b)
{
    for (size_t i = 0; i < b->count; i++) {
        free(b->items[i].path);
        ka_pair_free(&b->items[i].pair);
        ka_features_free(&b->items[i].features);
    }
    free(b->items);
    free(b->measures);
}

static size_t count_families(const struct build *b)
{
    size_t n = 0;
    for (size_t i = 0; i < b->count; i++)
        n += i == 0 || strcmp(b->items[i].pair.family, b->items[i - 1].pair.family) != 0;
    return n;
}

/* A new store beside the old one, and then in its place. */
static int replace_store(const struct build *b, const char *path, struct ka_err *err)
{
    KA_AUTO_FREE char *fresh = ka_format("%s.new-%ld", path, (long)getpid()), *folder = ka_path_parent(path);
    int rc = ka_mkdirs(folder, err);
    if (rc)
        return rc;
    unlink(fresh);
    rc = write_all(b, fresh, err);
    if (rc == 0)
        rc = move_over(fresh, path, err);
    if (rc) {
        unlink(fresh);
        remove_beside(fresh, "-journal");
    }
    return rc;
}

int ka_build(const char *dir, const char *store_path, ka_build_progress_fn progress, void *arg,
             struct ka_build_report *out, struct ka_err *err)
{
    struct build b = {.measures = ka_calloc(1, sizeof(*b.measures)), .progress = progress, .arg = arg};
    int rc = ka_build_walk(dir, add_file, &b, err);
    if (rc == 0 && b.count == 0)
        rc = ka_fail(err, -ENOENT, "%s: holds no .py file; a store is built from pair files", dir);
    if (rc == 0) {
        qsort(b.items, b.count, sizeof(*b.items), by_path);
        rc = read_all(&b, err);
    }
    if (rc == 0)
        measure(&b);
    if (rc == 0)
        rc = replace_store(&b, store_path, err);
    if (rc == 0)
        *out = (struct ka_build_report){b.count, count_families(&b)};
    free_build(&b);
    return rc;
}

int ka_build_put(struct ka_store *store, const struct ka_pair *pair, struct ka_err *err)
{
    struct ka_features features = {0};
    KA_AUTO_FREE struct ka_measures *measures = ka_calloc(1, sizeof(*measures));
    int rc = ka_store_load_measures(store, measures, err);
    if (rc == 0)
        rc = ka_features_of(pair->source, strlen(pair->source), &features, err);
    if (rc == 0)
        rc = put_item(store, pair, &features, measures, err);
    ka_features_free(&features);
    return rc;
}

int ka_build_add(struct ka_store *store, const char *path, struct ka_err *err)
{
    struct ka_pair pair = {0};
    int rc = ka_pair_read(path, &pair, err);
    if (rc == 0)
        rc = ka_build_put(store, &pair, err);
    ka_pair_free(&pair);
    return rc;
}

static int collect_pair(const struct ka_store_row *row, void *arg)
{
    struct build *b = arg;
    KA_APPEND(b->items, b->count)->path = ka_strdup(row->id);
    return 0;
}

int ka_build_weigh(struct ka_store *store, struct ka_err *err)
{
    struct build b = {.measures = ka_calloc(1, sizeof(*b.measures))};
    int rc = ka_store_each(store, collect_pair, &b, err);
    for (size_t i = 0; i < b.count && rc == 0; i++) {
        struct item *item = &b.items[i];
        rc = ka_store_get(store, item->path, &item->pair, err);
        if (rc == 0)
            rc = ka_features_of(item->pair.source, strlen(item->pair.source), &item->features, err);
        if (rc == 0)
            ka_measures_count(b.measures, &item->features);
    }
    if (rc == 0)
        measure(&b);
    if (rc == 0)
        rc = ka_store_begin(store, err);
    if (rc == 0)
        rc = ka_store_save_measures(store, b.measures, err);
    for (size_t i = 0; i < b.count && rc == 0; i++)
        rc = put_item(store, &b.items[i].pair, &b.items[i].features, b.measures, err);
    if (rc == 0)
        rc = ka_store_commit(store, err);
    free_build(&b);
    return rc;
}
