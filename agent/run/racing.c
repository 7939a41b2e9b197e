/* One race: the request of operation bench, and what its samples mean for the run. */
#include "racing.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/core/compose.h"
#include "agent/core/fields.h"
#include "agent/core/plan.h"
#include "agent/core/race.h"
#include "base/each.h"
#include "base/files.h"
#include "base/log.h"
#include "events.h"
#include "operations.h"
#include "sizes.h"

#define SHAPES_MAX 4 /* of the sweep */
#define SECONDS 1    /* of rounds, all shapes together */
#define ROUNDS 25    /* at least: of fewer the interval is wide */

bool ka_run_races(const struct ka_run *run)
{
    return ka_run_on_gpu(run) && run->job.limits.optimise && !run->given;
}

static int by_size(const void *a, const void *b)
{
    double x = ka_plan_size(*(json_t *const *)a), y = ka_plan_size(*(json_t *const *)b);
    return (x > y) - (x < y);
}

static bool has_dims(const json_t *list, const json_t *dims)
{
    KA_EACH(list, i, entry) {
        if (json_equal(json_object_get(entry, "dims"), dims))
            return true;
    }
    return false;
}

/* Of the sweep's shapes those that were checked, as they are or as something smaller. */
static bool timed(const struct ka_run *run, const json_t *dims)
{
    return (has_dims(run->shapes, dims) || has_dims(json_object_get(run->oracles, "scaled"), dims)) &&
           !has_dims(json_object_get(run->oracles, "untimed"), dims);
}

json_t *ka_run_race_dims(struct ka_run *run)
{
    KA_AUTO_FREE json_t **dims = NULL;
    size_t count = 0;
    bool own_cpu_sweep;
    json_auto_t *sweep = ka_run_sweep(run, &own_cpu_sweep);
    KA_EACH(sweep, i, entry) {
        if (timed(run, json_object_get(entry, "dims")))
            *KA_APPEND(dims, count) = json_object_get(entry, "dims");
    }
    if (count)
        qsort(dims, count, sizeof(*dims), by_size);
    size_t most = count < SHAPES_MAX ? count : SHAPES_MAX;
    json_t *some = json_array();
    for (size_t i = 0; i < most; i++)
        json_array_append(some, dims[most > 1 ? i * (count - 1) / (most - 1) : 0]);
    return some;
}

static json_t *cases_of(struct ka_run *run)
{
    json_auto_t *some = ka_run_race_dims(run);
    json_t *cases = json_array();
    KA_EACH(some, i, dims) {
        json_array_append_new(cases, json_pack("{s:I, s:O, s:I}", "id", (json_int_t)i, "dims", dims, "seed",
                                               (json_int_t)(ka_random_u64() >> 34)));
    }
    return cases;
}

/* The best candidate as a file; NULL: there is none that is verified, or the error of `err`. */
static char *write_rival(const struct ka_run *run, struct ka_err *err)
{
    struct ka_snapshot best;
    KA_AUTO_BUF struct ka_buf pair = {0};
    err->msg[0] = '\0';
    if (!run->job.best || !run->job.best_verified ||
        ka_state_snapshot_get(run->state, run->job.best, &best, err))
        return NULL;
    char *path = ka_path_join(run->dir, "candidates/rival.py");
    int rc = ka_compose_pair(run->forward, best.backward, &pair, err);
    if (rc == 0)
        rc = ka_file_replace(path, pair.data, pair.len, err);
    ka_snapshot_free(&best);
    if (rc == 0)
        return path;
    free(path);
    return NULL;
}

static json_t *shapes_of(const json_t *cases, const json_t *timed, const char *way)
{
    json_t *made = json_array();
    KA_EACH(json_object_get(timed, "cases"), i, entry) {
        const json_t *ours = json_array_get(json_object_get(entry, "subjects"), 0);
        const json_t *both = json_object_get(json_object_get(ours, "times"), "both");
        struct ka_times times;
        if (ka_times_of(json_object_get(both, way), &times) == 0)
            json_array_append_new(made, json_pack("{s:O, s:f}", "dims",
                                                  json_object_get(json_array_get(cases, i), "dims"), "ms",
                                                  times.median));
    }
    return made;
}

static json_t *doc_of(const json_t *cases, const json_t *timed, const struct ka_race *race)
{
    const char *way = race->graphs ? "graph" : "alone";
    json_t *doc =
        json_pack("{s:f, s:s, s:o}", "ms", race->ms, "way", way, "shapes", shapes_of(cases, timed, way));
    if (race->ratio.count)
        json_object_update_new(doc, json_pack("{s:f, s:f, s:f}", "ratio", race->ratio.median, "low",
                                              race->ratio.low, "high", race->ratio.high));
    return doc;
}

static void tell(const struct ka_run *run, const struct ka_race *race, bool won)
{
    if (race->ratio.count)
        ka_log(KA_LOG_INFO, "%s: %.3f of the best's time (%.3f to %.3f)%s", run->name, race->ratio.median,
               race->ratio.low, race->ratio.high, won ? "" : ": no gain");
    else
        ka_log(KA_LOG_INFO, "%s: forward and backward take %.4g ms", run->name, race->ms);
}

static bool has_to_pass(const struct ka_run *run, const json_t *dims)
{
    KA_EACH(run->shapes, i, shape) {
        if (ka_plan_is(shape, "required") && json_equal(json_object_get(shape, "dims"), dims))
            return true;
    }
    return false;
}

/* A shape that does not have to pass, or of which something smaller was checked, may be too large for this
 * GPU. Before there is a best that could be timed on it, it is left out, from now on. */
static void leave_out(struct ka_run *run, json_t *cases, json_t *entries)
{
    if (run->job.best && run->job.best_verified)
        return;
    for (size_t i = json_array_size(entries); i-- > 0;) {
        json_t *entry = json_array_get(entries, i), *dims = json_object_get(json_array_get(cases, i), "dims");
        if (json_is_true(json_object_get(entry, "ok")) || has_to_pass(run, dims) ||
            json_array_size(entries) == 1)
            continue;
        ka_log(KA_LOG_INFO, "%s: a shape is left out of what is timed: %.300s", run->name,
               ka_text_of(json_object_get(entry, "error"), "message", "it failed"));
        if (!json_object_get(run->oracles, "untimed"))
            json_object_set_new(run->oracles, "untimed", json_array());
        json_array_append_new(json_object_get(run->oracles, "untimed"), json_pack("{s:O}", "dims", dims));
        json_array_remove(cases, i);
        json_array_remove(entries, i);
    }
}

/* `why`: the candidate could not be timed; NULL: `found` has its samples. */
static void end(struct ka_run *run, const json_t *found, const char *why)
{
    ka_run_raced_fn next = run->raced;
    json_auto_t *cases = run->race_cases, *doc = NULL;
    run->raced = NULL;
    run->race_cases = NULL;
    struct ka_raced raced = {.cost = INFINITY};
    struct ka_race race;
    struct ka_err err;
    json_auto_t *timed = json_pack("{s:o}", "cases", json_copy(json_object_get(found, "cases")));
    if (!why)
        leave_out(run, cases, json_object_get(timed, "cases"));
    if (!why && ka_race_of(timed, &race, &err))
        why = err.msg;
    if (why) {
        raced.why = why;
        ka_log(KA_LOG_INFO, "%s: not timed: %s", run->name, why);
        ka_record_add(run->record, "not timed", json_pack("{s:s}", "why", why));
    } else {
        double min_rel = ka_job_least_gain(&run->job);
        doc = doc_of(cases, timed, &race);
        ka_race_kernels(found, doc);
        raced = (struct ka_raced){.cost = ka_race_cost(&race, run->job.best_cost, min_rel),
                                  .won = !race.ratio.count || ka_race_won(&race, min_rel),
                                  .doc = doc};
        tell(run, &race, raced.won);
        ka_record_add(run->record, "race", json_incref(doc));
    }
    next(run, &raced);
}

static void on_timed(struct ka_run *run, const struct ka_op_result *result)
{
    if (result->status == KA_OP_SANDBOX) {
        ka_run_op_failed(run, result);
        return;
    }
    end(run, result->doc, result->status == KA_OP_OK ? NULL : result->message);
}

void ka_run_race(struct ka_run *run, const char *pair_path, const char *leader, bool kernels,
                 ka_run_raced_fn next)
{
    struct ka_err err = {0};
    KA_AUTO_FREE char *rival = leader ? ka_strdup(leader) : write_rival(run, &err);
    if (!rival && err.msg[0]) {
        ka_run_fail(run, KA_EV_INTERNAL, "internal", "%s", err.msg);
        return;
    }
    json_decref(run->race_cases);
    run->race_cases = cases_of(run);
    run->raced = next;
    ka_log_progress(run->name, rival ? "timed beside the best" : "timed");
    ka_run_op(run, "bench", pair_path,
              json_pack("{s:O, s:i, s:i, s:[s], s:b, s:s?}", "cases", run->race_cases, "seconds", SECONDS,
                        "rounds", ROUNDS, "passes", "both", "kernels", kernels, "rival", rival),
              on_timed);
}
