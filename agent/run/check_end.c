/* What a check comes to: the verdict stored, told and posted, also that of an earlier candidate which this
 * one is again. */
#include "check_internal.h"

#include <errno.h>
#include <math.h>
#include <string.h>

#include "agent/core/fields.h"
#include "agent/core/lesson.h"
#include "agent/core/rank.h"
#include "base/each.h"
#include "base/log.h"
#include "compiled_facts.h"
#include "draft.h"
#include "events.h"
#include "expected.h"
#include "fan.h"
#include "history.h"
#include "racing.h"
#include "rag/lex.h"
#include "sizes.h"

#define FACTS_SHAPES 3

/* What a check came to. Borrows verdict and facts. */
struct outcome {
    int64_t snapshot;
    struct ka_verdict_counts counts;
    json_t *verdict; /* with "facts", the text for the model */
    json_t *facts;   /* measured; NULL */
    bool verified;
    bool again; /* it is an earlier candidate's */
    double cost;
};

static void add_history(struct ka_run *run, const struct ka_snapshot *snapshot, const struct outcome *outcome)
{
    const struct ka_verdict_counts *counts = &outcome->counts;
    KA_AUTO_BUF struct ka_buf kind = {0};
    ka_lesson_kind(outcome->verdict, &kind);
    json_t *entry = json_pack("{s:I, s:s, s:s, s:s, s:b, s:I, s:I, s:I, s:I}", "snapshot",
                              (json_int_t)snapshot->id, "phase", snapshot->phase, "origin", snapshot->origin,
                              "note", snapshot->note, "verified", outcome->verified, "required",
                              (json_int_t)counts->required, "passed", (json_int_t)counts->passed, "hidden",
                              (json_int_t)counts->hidden, "hidden_passed", (json_int_t)counts->hidden_passed);
    json_object_set_new(entry, "cost", isfinite(outcome->cost) ? json_real(outcome->cost) : json_null());
    json_object_set(entry, "times", json_object_get(outcome->facts, "times"));
    json_object_set(entry, "untimed", json_object_get(outcome->facts, "untimed"));
    json_object_set_new(entry, "facts", json_string(ka_text_of(outcome->verdict, "facts", "")));
    json_object_set_new(entry, "kind", json_string(ka_buf_str(&kind)));
    if (outcome->again)
        json_object_set_new(entry, "again", json_true());
    ka_run_history_add(run, run->job.checking, entry);
}

/* What the job is told of a cost: no gain that is modelled makes up for the end of parallelism. */
static double weighed(const struct ka_run *run, const struct outcome *outcome)
{
    bool optimise = run->job.phase == KA_PHASE_OPTIMISE && outcome->verified;
    if (!optimise || ka_run_on_gpu(run) || !ka_run_compares(run, outcome->facts, ka_rank_ends_parallelism))
        return outcome->cost;
    ka_log(KA_LOG_INFO, "%s: candidate %lld leaves a few programs: no gain", run->name,
           (long long)outcome->snapshot);
    return INFINITY;
}

/* Whether some kernel wanted more of the GPU than a program gets. */
static bool is_large(const struct ka_check *check)
{
    struct ka_fan_found one;
    for (size_t i = 0; check && check->candidate && i < json_array_size(check->cases); i++)
        if (ka_fan_find(check->candidate, (json_int_t)i, &one) &&
            json_is_true(json_object_get(json_object_get(one.entry, "error"), "out_of_resources")))
            return true;
    return false;
}

/* Whether nothing speaks against a candidate but that required shapes had no room on the GPU: others had it,
 * for the forward's own children had that room before. */
static bool is_unsaid(const struct outcome *outcome)
{
    size_t unsaid = 0;
    KA_EACH(json_object_get(json_object_get(outcome->verdict, "shapes"), "skipped"), i, item) {
        unsaid += strstr(ka_text_of(item, "reason", ""), "the GPU ran out of memory") != NULL;
    }
    const struct ka_verdict_counts *counts = &outcome->counts;
    return unsaid && counts->passed < counts->required && counts->passed + unsaid >= counts->required &&
           counts->hidden_passed == counts->hidden;
}

static bool has_another_draft(struct ka_run *run, const struct outcome *outcome)
{
    if (outcome->verified)
        return false;
    return (is_large(run->check) && ka_run_draft_is_large(run)) ||
           (is_unsaid(outcome) && ka_run_draft_is_unsaid(run));
}

static void settle(struct ka_run *run, const struct outcome *outcome)
{
    const struct ka_verdict_counts *counts = &outcome->counts;
    struct ka_err err;
    struct ka_snapshot snapshot;
    int rc = ka_state_snapshot_judge(run->state, outcome->snapshot, outcome->verdict, outcome->facts,
                                     outcome->cost, &err);
    if (rc == 0)
        rc = ka_state_snapshot_head(run->state, outcome->snapshot, &snapshot, &err);
    struct ka_event event = {
        .type = rc ? KA_EV_INTERNAL : KA_EV_CHECKED,
        .op = run->job.op,
        .passed = (int)(counts->passed + counts->hidden_passed),
        .total = (int)(counts->required + counts->hidden),
        .verified = outcome->verified,
        .cost = weighed(run, outcome),
        .another = has_another_draft(run, outcome),
    };
    if (rc) {
        ka_log(KA_LOG_ERROR, "%s: %s", run->name, err.msg);
    } else {
        add_history(run, &snapshot, outcome);
        ka_snapshot_free(&snapshot);
        ka_log(KA_LOG_INFO,
               "%s: %s candidate %lld: %zu of %zu required and %zu of %zu hidden shapes pass: %s", run->name,
               ka_job_phase_name(run->job.phase), (long long)outcome->snapshot, counts->passed,
               counts->required, counts->hidden_passed, counts->hidden,
               outcome->verified ? "verified" : "not verified");
    }
    ka_record_add(run->record, "verdict",
                  json_pack("{s:I, s:O, s:O?, s:i}", "snapshot", (json_int_t)outcome->snapshot, "verdict",
                            outcome->verdict, "measured", outcome->facts, "question",
                            run->job.slots[run->job.checking].question));
    ka_run_check_free(run);
    ka_run_post(run, &event);
}

/* `cost`: of a candidate that is verified. */
static void conclude_at(struct ka_run *run, double cost)
{
    struct ka_check *check = run->check;
    bool verified = ka_verdict_verified(check->verdict);
    KA_AUTO_BUF struct ka_buf text = {0};
    ka_verdict_facts(check->verdict, FACTS_SHAPES, &text);
    json_auto_t *verdict = ka_verdict_json(check->verdict, true);
    json_auto_t *facts = verified ? json_incref(check->facts) : NULL;
    json_object_set_new(verdict, "facts", json_string(ka_buf_str(&text)));
    json_object_set(verdict, "notes", check->notes);
    struct outcome outcome = {.snapshot = check->snapshot,
                              .counts = ka_verdict_count(check->verdict),
                              .verdict = verdict,
                              .facts = facts,
                              .verified = verified,
                              .cost = verified ? cost : INFINITY};
    settle(run, &outcome);
}

static void on_raced(struct ka_run *run, const struct ka_raced *raced)
{
    struct ka_check *check = run->check;
    if (!check->facts)
        check->facts = json_object();
    if (raced->doc)
        json_object_set(check->facts, "times", raced->doc);
    if (raced->why)
        json_object_set_new(check->facts, "untimed", json_string(raced->why));
    conclude_at(run, raced->cost);
}

void ka_check_conclude(struct ka_run *run)
{
    const struct ka_check *check = run->check;
    if (ka_verdict_verified(check->verdict) && ka_run_races(run))
        ka_run_race(run, check->pair_path, NULL, true, on_raced);
    else
        conclude_at(run, ka_rank_cost(check->facts));
}

static size_t count_in(const json_t *shapes, const char *name)
{
    json_int_t value = json_integer_value(json_object_get(shapes, name));
    return value > 0 ? (size_t)value : 0;
}

static bool is_verified_twin(struct ka_run *run, int64_t id, const char *backward, struct ka_snapshot *out)
{
    if (!id || ka_state_snapshot_get(run->state, id, out, NULL))
        return false;
    if (json_is_true(json_object_get(out->verdict, "verified")) && ka_lex_same_code(out->backward, backward))
        return true;
    ka_snapshot_free(out);
    return false;
}

/* The verified candidate that this one was made from, or the best one, where only comments and blank lines
 * are others: a repair may be that the move is taken back. */
static int same_code(struct ka_run *run, int64_t id, struct ka_snapshot *out)
{
    struct ka_snapshot changed = {0};
    int rc = ka_state_snapshot_head(run->state, id, &changed, NULL);
    if (rc == 0 && !is_verified_twin(run, changed.parent, changed.backward, out) &&
        !is_verified_twin(run, run->job.best, changed.backward, out))
        rc = -ENOENT;
    ka_snapshot_free(&changed);
    return rc;
}

/* Not if shapes were skipped there, which may have been the machine's fault. */
bool ka_check_settle_as_before(struct ka_run *run, int64_t id)
{
    struct ka_snapshot twin;
    bool bytes = ka_state_snapshot_twin(run->state, id, &twin, NULL) == 0;
    if (!bytes && same_code(run, id, &twin))
        return false;
    const json_t *shapes = json_object_get(twin.verdict, "shapes");
    bool usable = shapes;
    KA_EACH(json_object_get(shapes, "skipped"), i, item)
        usable = usable && strstr(ka_text_of(item, "reason", ""), "no elements, the backward raises");
    if (usable) {
        struct outcome outcome = {.snapshot = id,
                                  .counts = {.required = count_in(shapes, "required"),
                                             .passed = count_in(shapes, "passed"),
                                             .hidden = count_in(shapes, "hidden"),
                                             .hidden_passed = count_in(shapes, "hidden_passed")},
                                  .verdict = twin.verdict,
                                  .facts = twin.facts,
                                  .verified = json_is_true(json_object_get(twin.verdict, "verified")),
                                  .again = true,
                                  .cost = twin.cost};
        ka_log(KA_LOG_INFO, "%s: candidate %lld is, %s, candidate %lld of before: not checked again",
               run->name, (long long)id, bytes ? "byte for byte" : "but for its comments",
               (long long)twin.id);
        settle(run, &outcome);
    }
    ka_snapshot_free(&twin);
    return usable;
}

void ka_check_reject(struct ka_run *run, const char *rule, const char *text)
{
    ka_verdict_fail_whole(run->check->verdict, rule, text);
    ka_check_conclude(run);
}

void ka_check_reject_when_idle(struct ka_run *run, const char *rule, const char *text)
{
    struct ka_check *check = run->check;
    if (check->candidate)
        ka_fan_stop(check->candidate);
    ka_expected_stop(check->expected);
    if (!check->judging) {
        ka_check_reject(run, rule, text);
        return;
    }
    check->reject_rule = ka_strdup(rule);
    check->reject_text = ka_strdup(text);
}
