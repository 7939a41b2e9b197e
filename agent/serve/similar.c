/* The store's search as a document for clients. Knows no HTTP. */
#include "similar.h"

#include <errno.h>
#include <string.h>

#include "base/each.h"
#include "rag/excerpt.h"
#include "rag/search.h"
#include "rag/store.h"

static json_t *like_forward(const struct ka_search_result *found)
{
    json_t *doc = ka_search_json(found);
    KA_EACH(json_object_get(doc, "hits"), i, hit) {
        json_object_set_new(hit, "math", json_string(found->hits[i].math));
        json_object_set_new(hit, "backward", json_string(found->hits[i].code));
    }
    return doc;
}

/* ---- by words ---- */

struct walk {
    const char *words;
    json_t *named, *told; /* ids: those that are called so, and those that say so of themselves */
};

static bool has_words(const char *text, const char *words)
{
    size_t len;
    bool all = true;
    for (words += strspn(words, " \t\r\n"); *words && all; words += len + strspn(words + len, " \t\r\n")) {
        len = strcspn(words, " \t\r\n");
        KA_AUTO_FREE char *word = ka_strndup(words, len);
        all = strcasestr(text, word) != NULL;
    }
    return all;
}

static int note_row(const struct ka_store_row *row, void *arg)
{
    struct walk *walk = arg;
    KA_AUTO_FREE char *all =
        ka_format("%s %s %s %s %s", row->id, row->op, row->family, row->title, row->schedule);
    if (has_words(row->id, walk->words))
        json_array_append_new(walk->named, json_string(row->id));
    else if (has_words(all, walk->words))
        json_array_append_new(walk->told, json_string(row->id));
    return 0;
}

static int add_named(struct ka_store *store, const char *id, json_t *hits, struct ka_err *err)
{
    KA_AUTO_BUF struct ka_buf math = {0}, code = {0};
    struct ka_pair pair;
    int rc = ka_store_get(store, id, &pair, err);
    if (rc)
        return rc;
    ka_excerpt_docstring(&pair, &math);
    ka_excerpt_code(&pair, &code);
    json_array_append_new(hits, json_pack("{s:s, s:n, s:s, s:s, s:o, s:[], s:s, s:s}", "id", pair.id,
                                          "similarity", "path", pair.path, "op", pair.op, "schedule",
                                          ka_search_split_json(pair.schedule), "both_have", "math",
                                          ka_buf_str(&math), "backward", ka_buf_str(&code)));
    ka_pair_free(&pair);
    return 0;
}

static int find_named(struct ka_store *store, const struct ka_similar_query *query, json_t **out,
                      struct ka_err *err)
{
    json_auto_t *named = json_array(), *told = json_array(), *hits = json_array();
    struct walk walk = {.words = query->words, .named = named, .told = told};
    int rc = ka_store_each(store, note_row, &walk, err);
    json_array_extend(named, told);
    KA_EACH(named, i, id)
        if (rc == 0 && i < query->topk)
            rc = add_named(store, json_string_value(id), hits, err);
    if (rc == 0)
        *out = json_pack("{s:O, s:[]}", "hits", hits, "excluded");
    return rc;
}

int ka_similar_find(const struct ka_app *app, const struct ka_similar_query *query, json_t **out,
                    struct ka_err *err)
{
    if (!app->search)
        return ka_fail(err, -ENOENT, "the service has no pair store (kernel-agent store build dataset)");
    if (!query->forward)
        return find_named(app->store, query, out, err);
    const struct ka_search_query asked = {
        .forward = query->forward, .topk = query->topk, .min_sim = query->min_sim};
    struct ka_search_result found = {0};
    int rc = ka_search_run(app->search, &asked, &found, err);
    if (rc == 0)
        *out = like_forward(&found);
    ka_search_result_free(&found);
    return rc;
}
