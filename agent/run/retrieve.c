/* Similar pairs from the store, as examples for the model. */
#include "retrieve.h"

#include "base/log.h"
#include "events.h"
#include "learn.h"
#include "rag/search.h"

static void log_excluded(const struct ka_run *run, const struct ka_search_result *found)
{
    for (size_t i = 0; i < found->excluded_count; i++)
        ka_log(KA_LOG_INFO, "%s: %s is left out: %s", run->name, found->excluded[i].id,
               found->excluded[i].why);
}

/* Where nothing is similar enough, the nearest pair all the same: it shows how a backward is written. */
static int search(const struct ka_run *run, struct ka_search_query *query, struct ka_search_result *found,
                  struct ka_err *err)
{
    int rc = ka_search_run(run->app->search, query, found, err);
    if (rc || found->count)
        return rc;
    ka_search_result_free(found);
    query->min_sim = -1;
    query->topk = 1;
    return ka_search_run(run->app->search, query, found, err);
}

void ka_run_retrieve(struct ka_run *run)
{
    const struct ka_settings *settings = &run->settings;
    json_array_clear(run->retrieved);
    struct ka_err err;
    struct ka_search_result found = {0};
    if (settings->no_retrieval)
        ka_log(KA_LOG_INFO, "%s: retrieval is off (--no-retrieval): no similar pairs", run->name);
    if (run->app->search && run->job.limits.use_llm) {
        struct ka_search_query query = {
            .forward = run->forward,
            .topk = (size_t)settings->topk,
            .min_sim = settings->min_sim,
            .exclude = settings->rag_exclude,
        };
        if (search(run, &query, &found, &err))
            ka_log(KA_LOG_WARN, "%s: the store cannot be searched: %s", run->name, err.msg);
    }
    for (size_t i = 0; i < found.count; i++) {
        const struct ka_search_hit *hit = &found.hits[i];
        bool distant = hit->similarity < settings->min_sim;
        json_array_append_new(run->retrieved,
                              json_pack("{s:s, s:f, s:b, s:s, s:s, s:s}", "id", hit->id, "similarity",
                                        hit->similarity, "distant", distant, "schedule", hit->schedule,
                                        "math", hit->math, "backward", hit->code));
        ka_log(KA_LOG_INFO, "%s: similar: %s (%.2f%s)", run->name, hit->id, hit->similarity,
               distant ? ", the nearest, and below --min-sim" : "");
    }
    log_excluded(run, &found);
    ka_search_result_free(&found);
    ka_run_lessons_find(run);
    ka_run_put(run, "retrieved", run->retrieved);
    ka_record_add(run->record, "retrieved", json_pack("{s:O}", "pairs", run->retrieved));
    ka_run_post_type(run, KA_EV_OK);
}
