/* From samples to a ratio. Knows no GPU and no candidate. */
#include "race.h"

#include <errno.h>
#include <math.h>
#include <string.h>

#include "base/each.h"
#include "bench_result.h"
#include "fields.h"

#define KERNELS_MAX 24
#define NAME_MAX_SHOWN 100

static const json_t *subject_of(const json_t *entry, const char *name)
{
    KA_EACH(json_object_get(entry, "subjects"), i, subject) {
        if (strcmp(ka_text_of(subject, "name", ""), name) == 0)
            return subject;
    }
    return NULL;
}

/* Times of the pass that is raced; NULL. */
static const json_t *times_of(const json_t *subject, const char *way)
{
    return json_object_get(json_object_get(json_object_get(subject, "times"), "both"), way);
}

static bool all_have(const json_t *cases, const char *way, bool rival)
{
    KA_EACH(cases, i, entry) {
        size_t count = json_array_size(times_of(subject_of(entry, "ours"), way));
        if (!count || (rival && json_array_size(times_of(subject_of(entry, "rival"), way)) != count))
            return false;
    }
    return true;
}

static int check_cases(const json_t *cases, struct ka_err *err)
{
    if (!json_array_size(cases))
        return ka_fail(err, -ENODATA, "no shape was timed");
    KA_EACH(cases, i, entry) {
        if (!json_is_true(json_object_get(entry, "ok")))
            return ka_fail(err, -ENODATA, "it cannot be timed: %.300s",
                           ka_text_of(json_object_get(entry, "error"), "message", "a case failed"));
    }
    return 0;
}

/* One ratio a round; an empty array where a sample is no time. */
static json_t *ratios_of(const json_t *cases, const char *way)
{
    size_t rounds = SIZE_MAX;
    KA_EACH(cases, i, entry) {
        size_t count = json_array_size(times_of(subject_of(entry, "ours"), way));
        rounds = count < rounds ? count : rounds;
    }
    json_t *made = json_array();
    for (size_t round = 0; round < rounds && round < KA_TIMES_MOST; round++) {
        double sum = 0;
        KA_EACH(cases, i, entry) {
            const json_t *ours = times_of(subject_of(entry, "ours"), way);
            const json_t *rival = times_of(subject_of(entry, "rival"), way);
            sum += log(json_number_value(json_array_get(ours, round)) /
                       json_number_value(json_array_get(rival, round)));
        }
        double ratio = exp(sum / (double)json_array_size(cases));
        json_array_append_new(made, isfinite(ratio) ? json_real(ratio) : json_null());
    }
    return made;
}

int ka_race_of(const json_t *timed, struct ka_race *out, struct ka_err *err)
{
    const json_t *cases = json_object_get(timed, "cases");
    int rc = check_cases(cases, err);
    if (rc)
        return rc;
    bool rival = subject_of(json_array_get(cases, 0), "rival");
    bool graphs = all_have(cases, "graph", rival);
    const char *way = graphs ? "graph" : "alone";
    if (!graphs && !all_have(cases, way, rival))
        return ka_fail(err, -ENODATA, "a shape has no times of forward and backward");
    *out = (struct ka_race){.shapes = json_array_size(cases), .graphs = graphs};
    double sum = 0;
    KA_EACH(cases, i, entry) {
        struct ka_times ours;
        if (ka_times_of(times_of(subject_of(entry, "ours"), way), &ours))
            return ka_fail(err, -ENODATA, "a sample is no time");
        sum += log(ours.median);
    }
    out->ms = exp(sum / (double)out->shapes);
    json_auto_t *ratios = rival ? ratios_of(cases, way) : NULL;
    if (rival && ka_times_of(ratios, &out->ratio))
        return ka_fail(err, -ENODATA, "a sample is no time");
    return 0;
}

bool ka_race_won(const struct ka_race *race, double min_rel)
{
    return race->ratio.count >= KA_TIMES_LEAST && race->ratio.median < 1.0 - min_rel &&
           race->ratio.high < 1.0;
}

double ka_race_cost(const struct ka_race *race, double best_cost, double min_rel)
{
    if (!race->ratio.count)
        return race->ms;
    return best_cost * (ka_race_won(race, min_rel) ? race->ratio.median : fmax(1.0, race->ratio.median));
}

static bool is_word(const char *name)
{
    static const char *const of_names = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_";
    return *name && strlen(name) <= NAME_MAX_SHOWN && !name[strspn(name, of_names)];
}

void ka_race_kernels(const json_t *timed, json_t *doc)
{
    const json_t *cases = json_object_get(timed, "cases"), *roof = json_object_get(timed, "roof");
    const json_t *last = json_array_get(cases, json_array_size(cases) ? json_array_size(cases) - 1 : 0);
    const json_t *ours = subject_of(last, "ours");
    if (!json_is_true(json_object_get(last, "ok"))) /* it was left out, and another is the largest */
        return;
    json_auto_t *rows = json_array();
    KA_EACH(json_object_get(ours, "kernels"), i, row) {
        const char *name = ka_text_of(row, "name", ""), *pass = ka_text_of(row, "pass", "");
        if (i < KERNELS_MAX && is_word(name) && (strcmp(pass, "fwd") == 0 || strcmp(pass, "bwd") == 0))
            json_array_append_new(rows, json_pack("{s:s, s:s, s:f, s:f}", "pass", pass, "name", name,
                                                  "launches", ka_number_of(row, "launches", 0), "ms",
                                                  ka_number_of(row, "ms", 0)));
    }
    if (json_array_size(rows))
        json_object_set(doc, "kernels", rows);
    if (json_is_object(roof))
        json_object_set_new(
            doc, "floor",
            json_pack("{s:o, s:o}", "fwd", ka_bench_floor(roof, "fwd"), "bwd", ka_bench_floor(roof, "bwd")));
}
