/* Embeds a query, asks the index, and reads what it found from the store. */
#include "search.h"

#include <stdlib.h>
#include <string.h>

#include "common.h"
#include "excerpt.h"

struct ka_search {
    struct ka_store *store;
    struct ka_index *index;
};

int ka_search_open(struct ka_store *store, struct ka_search **out, struct ka_err *err)
{
    struct ka_index *index = NULL;
    int rc = ka_index_load(store, KA_EMBED_NAME, KA_EMBED_VERSION, KA_EMBED_DIM, &index, err);
    if (rc)
        return rc;
    struct ka_search *search = ka_calloc(1, sizeof(*search));
    search->store = store;
    search->index = index;
    *out = search;
    return 0;
}

void ka_search_close(struct ka_search *search)
{
    if (!search)
        return;
    ka_index_free(search->index);
    free(search);
}

/* Copies what was found, with the backward of each hit. */
static int fill_result(struct ka_search *search, const char *forward, const struct ka_hits *found,
                       struct ka_search_result *out, struct ka_err *err)
{
    out->hits = ka_calloc(found->count, sizeof(*out->hits));
    for (size_t i = 0; i < found->count; i++) {
        struct ka_pair pair;
        int rc = ka_store_get(search->store, found->items[i].row.id, &pair, err);
        if (rc)
            return rc;
        out->hits[out->count++] = (struct ka_search_hit){.id = ka_strdup(pair.id),
                                                         .path = ka_strdup(pair.path),
                                                         .op = ka_strdup(pair.op),
                                                         .schedule = ka_strdup(pair.schedule),
                                                         .similarity = found->items[i].similarity};
        struct ka_buf math = {0}, code = {0}, common = {0};
        ka_excerpt_docstring(&pair, &math);
        ka_excerpt_code(&pair, &code);
        out->hits[i].math = ka_buf_steal(&math);
        out->hits[i].code = ka_buf_steal(&code);
        ka_common_words(forward, pair.source, &common);
        out->hits[i].common = common.data ? ka_buf_steal(&common) : ka_strdup("");
        ka_pair_free(&pair);
    }
    out->excluded = ka_calloc(found->duplicate_count, sizeof(*out->excluded));
    for (size_t i = 0; i < found->duplicate_count; i++) {
        out->excluded[out->excluded_count++] = (struct ka_search_excluded){
            ka_strdup(found->duplicates[i].row.id),
            ka_format("near-duplicate of the query (similarity %.3f)", found->duplicates[i].similarity)};
    }
    return 0;
}

struct shares {
    const struct ka_index *index;
    float *rows;
    bool any;
};

static void take_share(const char *id, double share, void *arg)
{
    struct shares *shares = arg;
    size_t row = ka_index_find(shares->index, id);
    if (row != SIZE_MAX)
        shares->rows[row] = (float)share;
    shares->any = true;
}

int ka_search_run(struct ka_search *search, const struct ka_search_query *query, struct ka_search_result *out,
                  struct ka_err *err)
{
    float vector[KA_EMBED_DIM];
    struct ka_index_query q = {.vector = vector,
                               .topk = query->topk,
                               .min_sim = query->min_sim,
                               .keep_duplicates = query->keep_duplicates};
    KA_AUTO_FREE char **excludes = ka_search_split(query->exclude ? query->exclude : "", &q.exclude_count);
    KA_AUTO_FREE float *shares = ka_calloc(ka_index_count(search->index) + 1, sizeof(*shares));
    struct shares by_row = {search->index, shares, false};
    struct ka_hits found = {0};
    struct ka_search_result result = {0};
    int rc =
        ka_store_embed(search->store, query->forward, strlen(query->forward), vector, &q.tokens_hash, err);
    if (rc == 0)
        rc = ka_store_each_share(search->store, query->forward, strlen(query->forward), take_share, &by_row,
                                 err);
    q.shares = by_row.any ? shares : NULL; /* nobody says any of it: vectors alone */
    q.excludes = (const char *const *)excludes;
    if (rc == 0)
        rc = ka_index_search(search->index, &q, &found, err);
    if (rc == 0)
        rc = fill_result(search, query->forward, &found, &result, err);
    if (rc == 0)
        *out = result;
    else
        ka_search_result_free(&result);
    ka_hits_free(&found);
    return rc;
}

void ka_search_result_free(struct ka_search_result *result)
{
    for (size_t i = 0; i < result->count; i++) {
        free(result->hits[i].id);
        free(result->hits[i].path);
        free(result->hits[i].op);
        free(result->hits[i].schedule);
        free(result->hits[i].math);
        free(result->hits[i].code);
        free(result->hits[i].common);
    }
    for (size_t i = 0; i < result->excluded_count; i++) {
        free(result->excluded[i].id);
        free(result->excluded[i].why);
    }
    free(result->hits);
    free(result->excluded);
    *result = (struct ka_search_result){0};
}

char **ka_search_split(const char *text, size_t *count)
{
    size_t len = strlen(text), most = 1;
    for (size_t i = 0; i < len; i++)
        most += text[i] == ',';
    char **list = ka_calloc(most * sizeof(*list) + len + 1, 1);
    char *rest = memcpy(list + most, text, len + 1);
    *count = 0;
    for (char *name; (name = strsep(&rest, ",")) != NULL;) {
        name += strspn(name, " \t");
        char *end = name + strlen(name);
        while (end > name && (end[-1] == ' ' || end[-1] == '\t'))
            *--end = '\0';
        if (*name)
            list[(*count)++] = name;
    }
    return list;
}

json_t *ka_search_split_json(const char *text)
{
    size_t count;
    KA_AUTO_FREE char **list = ka_search_split(text, &count);
    json_t *array = json_array();
    for (size_t i = 0; i < count; i++)
        json_array_append_new(array, json_string(list[i]));
    return array;
}

json_t *ka_search_json(const struct ka_search_result *result)
{
    json_t *hits = json_array(), *excluded = json_array();
    for (size_t i = 0; i < result->count; i++) {
        const struct ka_search_hit *hit = &result->hits[i];
        json_array_append_new(hits, json_pack("{s:s, s:f, s:s, s:s, s:o, s:o}", "id", hit->id, "similarity",
                                              hit->similarity, "path", hit->path, "op", hit->op, "schedule",
                                              ka_search_split_json(hit->schedule), "both_have",
                                              ka_search_split_json(hit->common)));
    }
    for (size_t i = 0; i < result->excluded_count; i++)
        json_array_append_new(
            excluded, json_pack("{s:s, s:s}", "id", result->excluded[i].id, "why", result->excluded[i].why));
    return json_pack("{s:o, s:o}", "hits", hits, "excluded", excluded);
}
