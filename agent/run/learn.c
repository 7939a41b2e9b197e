/* Lessons: which are shown, and what becomes of them. Knows no SQL. */
#include "learn.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/core/fields.h"
#include "agent/core/lesson.h"
#include "base/each.h"
#include "base/files.h"
#include "base/hash.h"
#include "base/log.h"
#include "events.h"
#include "rag/common.h"
#include "rag/lessons.h"
#include "rag/store.h"

#define SHOWN_MAX 3 /* in a question */

void ka_run_lessons_failed(const struct ka_run *run, const struct ka_err *err)
{
    if (!run->app->lessons_failed)
        ka_log(KA_LOG_WARN, "%s: going on without lessons of other runs: %s", run->name, err->msg);
    run->app->lessons_failed = true;
}

/* They are retrieved as pairs are: without a store there is nothing that says how near one is. */
static bool is_on(const struct ka_run *run)
{
    return !run->settings.no_lessons && !run->settings.no_retrieval && run->app->lessons && run->app->store &&
           run->job.limits.use_llm;
}

static int embed(const struct ka_run *run, float vector[KA_EMBED_DIM], struct ka_err *err)
{
    uint64_t hash;
    return ka_store_embed(run->app->store, run->forward, strlen(run->forward), vector, &hash, err);
}

/* Where it runs: what is a mistake there. */
static char *device_of(const struct ka_run *run)
{
    bool gpu = strcmp(run->settings.device, "cuda") == 0;
    return gpu ? ka_strdup("cuda") : ka_format("cpu, for %s", run->settings.target);
}

/* Who is sent this run's code, as a hash: an address may hold a password. */
static void audience_of(const struct ka_run *run, char out[static KA_HASH_HEX])
{
    static const char mailbox[] = "mailbox:";
    KA_AUTO_BUF struct ka_buf text = {0};
    const struct ka_endpoints *endpoints = &run->app->endpoints;
    if (run->settings.answers == KA_BACKEND_MAILBOX) {
        KA_AUTO_FREE char *folder = ka_path_real(run->settings.backend + strlen(mailbox), NULL);
        ka_buf_printf(&text, "%s%s", mailbox, folder ? folder : "");
    }
    for (size_t i = 0; i < endpoints->count && run->settings.answers == KA_BACKEND_OPENAI; i++)
        ka_buf_printf(&text, "%s\n", endpoints->list[i].base_url);
    ka_hash_hex(ka_buf_str(&text), text.len, out);
}

/* ---- shown */

void ka_run_lessons_find(struct ka_run *run)
{
    float vector[KA_EMBED_DIM];
    struct ka_err err;
    json_t *found = NULL;
    if (!is_on(run))
        return;
    KA_AUTO_FREE char *device = device_of(run);
    char audience[KA_HASH_HEX];
    audience_of(run, audience);
    const struct ka_lessons_query query = {vector, device, audience};
    int rc = embed(run, vector, &err);
    if (rc == 0)
        rc = ka_lessons_near(run->app->lessons, &query, &found, &err);
    if (rc && rc != -ENOENT)
        ka_run_lessons_failed(run, &err);
    json_object_set_new(run->lessons, "found", found ? found : json_array());
    ka_run_put(run, "lessons", run->lessons);
}

static const json_t *attempt_of(const struct ka_run *run, const json_t *told)
{
    KA_EACH(run->history, i, entry) {
        if (json_equal(json_object_get(entry, "turn"), json_object_get(told, "turn")) &&
            json_equal(json_object_get(entry, "slot"), json_object_get(told, "slot")) &&
            json_object_get(entry, "kind"))
            return entry;
    }
    return NULL;
}

/* What came of a lesson that was shown in the question `told`: "vain", where the answer failed as the lesson
 * says; "helped", where it was asked for that, and the answer is verified. */
static const char *end_of(const struct ka_run *run, const json_t *told, const json_t *lesson)
{
    const json_t *attempt = attempt_of(run, told);
    const char *kind = ka_text_of(lesson, "kind", "");
    if (!attempt)
        return NULL;
    if (ka_is_text(attempt, "kind", kind))
        return "vain";
    bool verified = json_is_true(json_object_get(attempt, "verified"));
    return verified && ka_is_text(told, "for", kind) ? "helped" : "shown";
}

static bool was_told(const json_t *told, const json_t *lesson)
{
    KA_EACH(json_object_get(told, "ids"), i, id) {
        if (json_equal(id, json_object_get(lesson, "id")))
            return true;
    }
    return false;
}

/* Shown in this run for the same failure, which came again. */
static bool was_in_vain(const struct ka_run *run, const json_t *lesson)
{
    KA_EACH(json_object_get(run->lessons, "told"), i, told) {
        if (json_integer_value(json_object_get(told, "turn")) == run->job.turn || !was_told(told, lesson) ||
            !ka_is_text(told, "for", ka_text_of(lesson, "kind", "")))
            continue;
        const char *end = end_of(run, told, lesson);
        if (end && strcmp(end, "vain") == 0)
            return true;
    }
    return false;
}

json_t *ka_run_lessons_for(const struct ka_run *run, const json_t *verdict)
{
    KA_AUTO_BUF struct ka_buf kind = {0};
    json_t *chosen = json_array();
    if (run->job.phase == KA_PHASE_OPTIMISE || !is_on(run))
        return chosen;
    if (verdict)
        ka_lesson_kind(verdict, &kind);
    KA_EACH(json_object_get(run->lessons, "found"), i, lesson) {
        bool first = json_array_size(chosen) == 0;
        bool near = ka_number_of(lesson, "similarity", -1) >= run->settings.min_sim;
        bool fits = run->job.phase == KA_PHASE_DRAFT
                        ? near
                        : ka_is_text(lesson, "kind", ka_buf_str(&kind)) && (near || first);
        if (fits && json_array_size(chosen) < SHOWN_MAX && !was_in_vain(run, lesson))
            json_array_append(chosen, lesson);
    }
    return chosen;
}

void ka_run_lessons_told(struct ka_run *run, int slot, const json_t *verdict, const json_t *lessons,
                         size_t count)
{
    KA_AUTO_BUF struct ka_buf kind = {0};
    json_t *ids = json_array(), *all = json_object_get(run->lessons, "told");
    if (verdict)
        ka_lesson_kind(verdict, &kind);
    KA_EACH(lessons, i, lesson) {
        if (i >= count)
            break;
        json_array_append(ids, json_object_get(lesson, "id"));
        ka_log(KA_LOG_INFO, "%s: shown: lesson %lld (%s)", run->name,
               (long long)json_integer_value(json_object_get(lesson, "id")), ka_text_of(lesson, "kind", ""));
    }
    json_t *told = json_pack("{s:i, s:i, s:s, s:o}", "turn", run->job.turn, "slot", slot, "for",
                             ka_buf_str(&kind), "ids", ids);
    size_t at = 0; /* a question that is put again is the same one */
    while (at < json_array_size(all) &&
           !(json_equal(json_object_get(json_array_get(all, at), "turn"), json_object_get(told, "turn")) &&
             json_equal(json_object_get(json_array_get(all, at), "slot"), json_object_get(told, "slot"))))
        at++;
    if (at < json_array_size(all))
        json_array_set_new(all, at, told);
    else
        json_array_append_new(all, told);
    ka_run_put(run, "lessons", run->lessons);
}

/* ---- taught */

/* Of all times that it was shown: it helped, or was in vain, or neither. NULL: no answer was checked. */
static const char *end_of_all(const struct ka_run *run, const json_t *lesson)
{
    const char *all = NULL;
    KA_EACH(json_object_get(run->lessons, "told"), i, told) {
        const char *end = was_told(told, lesson) ? end_of(run, told, lesson) : NULL;
        if (end && (!all || strcmp(end, "helped") == 0 || strcmp(all, "shown") == 0))
            all = end;
    }
    return all;
}

static json_t *told_of(const struct ka_run *run)
{
    json_t *list = json_array();
    KA_EACH(json_object_get(run->lessons, "found"), i, lesson) {
        const char *end = end_of_all(run, lesson);
        if (end)
            json_array_append_new(
                list,
                json_pack("{s:I, s:s}", "id", json_integer_value(json_object_get(lesson, "id")), "end", end));
    }
    return list;
}

/* What was checked of that snapshot; NULL: it was not. */
static const json_t *judged(const struct ka_run *run, int64_t snapshot)
{
    KA_EACH(run->history, i, entry) {
        if (json_object_get(entry, "kind") &&
            json_integer_value(json_object_get(entry, "snapshot")) == snapshot)
            return entry;
    }
    return NULL;
}

/* The failure of `wrong`, mended by `mended`; NULL where that is no lesson. */
static json_t *lesson_of(const struct ka_run *run, const json_t *wrong, const char *before, const char *after)
{
    KA_AUTO_BUF struct ka_buf finding = {0}, change = {0}, words = {0};
    if (!ka_lesson_change(before, after, &change))
        return NULL;
    KA_AUTO_FREE char *device = device_of(run);
    char audience[KA_HASH_HEX];
    audience_of(run, audience);
    ka_lesson_finding(ka_text_of(wrong, "facts", ""), &finding);
    ka_common_words(run->forward, run->forward, &words);
    const char *kind = ka_text_of(wrong, "kind", "");
    const struct ka_buf *same = ka_lesson_is_comparison(kind) ? &change : &finding;
    return json_pack("{s:s, s:s, s:s, s:s, s:s, s:s, s:s, s:s}", "kind", kind, "finding",
                     ka_buf_str(&finding), "same", ka_buf_str(same), "change", ka_buf_str(&change), "words",
                     ka_buf_str(&words), "device", device, "audience", audience, "run",
                     strrchr(run->dir, '/') + 1);
}

/* From a verified candidate of the model's back over the wrong ones that it was made from: each failure whose
 * kind the next one no longer had. */
static void learn_from(const struct ka_run *run, int64_t id, json_t *learned)
{
    const json_t *later = judged(run, id);
    struct ka_snapshot mended = {0};
    if (ka_state_snapshot_head(run->state, id, &mended, NULL))
        return;
    while (mended.parent && mended.parent < mended.id) {
        const json_t *earlier = judged(run, mended.parent);
        struct ka_snapshot wrong = {0};
        if (!earlier || json_is_true(json_object_get(earlier, "verified")) ||
            ka_state_snapshot_head(run->state, mended.parent, &wrong, NULL))
            break;
        bool gone = !ka_is_text(later, "kind", ka_text_of(earlier, "kind", ""));
        json_t *lesson = gone ? lesson_of(run, earlier, wrong.backward, mended.backward) : NULL;
        if (lesson) {
            ka_log(KA_LOG_INFO, "%s: learned: what mended \"%s\" (kernel-agent store lessons)", run->name,
                   ka_text_of(lesson, "kind", ""));
            json_array_append_new(learned, lesson);
        }
        ka_snapshot_free(&mended);
        mended = wrong;
        later = earlier;
    }
    ka_snapshot_free(&mended);
}

static json_t *learned_of(const struct ka_run *run)
{
    json_t *learned = json_array();
    KA_EACH(run->history, i, entry) {
        if (json_is_true(json_object_get(entry, "verified")) && ka_is_text(entry, "origin", "llm") &&
            !json_object_get(entry, "again"))
            learn_from(run, json_integer_value(json_object_get(entry, "snapshot")), learned);
    }
    return learned;
}

struct ka_taught {
    char *path;
    float vector[KA_EMBED_DIM];
    json_t *doc; /* shares nothing with the run */
};

struct ka_taught *ka_run_lessons_taught(const struct ka_run *run)
{
    struct ka_err err;
    if (!is_on(run))
        return NULL;
    struct ka_taught *taught = ka_calloc(1, sizeof(*taught));
    json_t *told = told_of(run), *learned = learned_of(run);
    bool any = json_array_size(told) || json_array_size(learned);
    taught->doc = json_pack("{s:o, s:o}", "told", told, "learned", learned);
    if (any && embed(run, taught->vector, &err) == 0) {
        taught->path = ka_strdup(run->app->lessons);
        return taught;
    }
    json_decref(taught->doc);
    free(taught);
    return NULL;
}

int ka_run_lessons_write(struct ka_taught *taught, struct ka_err *err)
{
    int rc = ka_lessons_keep(taught->path, taught->vector, taught->doc, err);
    json_decref(taught->doc);
    free(taught->path);
    free(taught);
    return rc;
}
