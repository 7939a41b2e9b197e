/* One check of one candidate: scan, run the candidate and, in processes that share nothing with it, the
 * oracle; compare, decide.
 *
 * The candidate's tensors stay in its scratch folder, which its process can no longer reach, until they are
 * judged. The oracle's never were where the candidate could see them: expected.h. Whatever the candidate
 * reports of itself (launches, modified inputs) can only count against it, never for it. */
#include "check.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/core/compose.h"
#include "agent/core/conduct.h"
#include "agent/core/describe.h"
#include "agent/core/fields.h"
#include "agent/core/kinds.h"
#include "agent/core/lesson.h"
#include "agent/core/place.h"
#include "agent/core/plan.h"
#include "agent/core/rank.h"
#include "agent/core/sanitize.h"
#include "agent/core/verdict.h"
#include "agent/io/work.h"
#include "base/each.h"
#include "base/files.h"
#include "base/hash.h"
#include "base/log.h"
#include "base/threads.h"
#include "compiled_facts.h"
#include "events.h"
#include "expected.h"
#include "fan.h"
#include "history.h"
#include "judge.h"
#include "operations.h"
#include "racing.h"
#include "rag/lex.h"
#include "sizes.h"

#define FACTS_SHAPES 3
#define LARGE ((double)(1 << 22)) /* product of the sizes: a case that costs much */

struct ka_check {
    int64_t snapshot;
    char *pair_path, *pair; /* and its text */
    struct ka_place place;  /* how lines of it are told */
    char *entry;
    struct ka_run *run;
    struct ka_expected *expected;
    json_t *cases; /* of `expected` */
    struct ka_fan *candidate;
    struct ka_verdict *verdict;
    size_t *shape_of; /* case number -> shape number of the verdict */
    size_t *order;    /* case numbers, the cheapest first */
    size_t upto;      /* of `order`: asked for. All are at once, unless --fail-fast */
    bool *is_judged;  /* of `order` */
    size_t *batch;    /* of `order`: being judged */
    size_t batch_count, judged;
    bool compiled;                   /* the candidate runs on a GPU */
    bool by_hand;                    /* it is a module that people wrote themselves */
    bool judging;                    /* a thread has the verdict, and reads results */
    bool orphan;                     /* freed when the thread is done */
    char *reject_rule, *reject_text; /* the candidate is rejected as a whole, once the thread is done */
    json_t *notes;                   /* of the scan: what is no fault, and worth knowing */
    json_t *launches;                /* names of kernels that the candidate's text launches */
    json_t *facts;
    struct ka_run_child *facts_child; /* counts them beside the candidate; NULL: it does not, or is through */
    bool facts_ended, facts_wanted;
    bool facts_early; /* they are those of the sizes that are checked, not of the user's own */
    uint64_t began;   /* ka_clock_ns() */
};

static void free_check(struct ka_check *check)
{
    ka_fan_free(check->candidate);
    ka_expected_free(check->expected);
    ka_verdict_free(check->verdict);
    json_decref(check->facts);
    json_decref(check->notes);
    json_decref(check->launches);
    free(check->pair_path);
    free(check->pair);
    free(check->entry);
    free(check->shape_of);
    free(check->order);
    free(check->is_judged);
    free(check->batch);
    free(check->reject_rule);
    free(check->reject_text);
    free(check);
}

void ka_run_check_free(struct ka_run *run)
{
    struct ka_check *check = run->check;
    if (!check)
        return;
    run->check = NULL;
    check->orphan = true;
    if (check->facts_child)
        ka_run_child_cancel(check->facts_child);
    ka_run_compile_cancel(run);
    if (check->candidate)
        ka_fan_stop(check->candidate);
    if (check->expected)
        ka_expected_stop(check->expected);
    if (!check->judging)
        free_check(check);
}

/* ---- the end */

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
        json_object_set(check->facts, "times", (json_t *)raced->doc);
    conclude_at(run, raced->cost);
}

static void conclude(struct ka_run *run)
{
    const struct ka_check *check = run->check;
    if (ka_verdict_verified(check->verdict) && ka_run_races(run))
        ka_run_race(run, check->pair_path, on_raced);
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

/* A candidate that is an earlier one again, byte for byte or but for its comments, has that one's verdict.
 * Not if shapes were skipped there, which may have been the machine's fault. */
static bool settle_as_before(struct ka_run *run, int64_t id)
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

/* The candidate as a whole is rejected: no shape was judged. */
static void reject(struct ka_run *run, const char *rule, const char *text)
{
    ka_verdict_fail_whole(run->check->verdict, rule, text);
    conclude(run);
}

/* The same while cases are judged: nothing more is asked, and the verdict waits for the thread. */
static void reject_when_idle(struct ka_run *run, const char *rule, const char *text)
{
    struct ka_check *check = run->check;
    if (check->candidate)
        ka_fan_stop(check->candidate);
    ka_expected_stop(check->expected);
    if (!check->judging) {
        reject(run, rule, text);
        return;
    }
    check->reject_rule = ka_strdup(rule);
    check->reject_text = ka_strdup(text);
}

/* ---- measured facts, only told of what is verified. On a GPU, where processors are idle, they are counted
 * beside the candidate. */

/* A shape whose failures count, and are told: those of hidden ones are not, and optional ones may fail. */
static size_t required_shape(const struct ka_check *check)
{
    KA_EACH(check->cases, i, plan) {
        if (ka_plan_is(plan, "required"))
            return check->shape_of[i];
    }
    return check->shape_of[0];
}

/* The facts are there, and every case is judged. */
static void finish(struct ka_run *run)
{
    struct ka_check *check = run->check;
    if (check->compiled) {
        const struct ka_conduct_of of = {.scales = check->by_hand && ka_conduct_may_scale(run->outputs),
                                         .place = &check->place};
        ka_conduct_interpreted(check->facts, &of, check->verdict, required_shape(check));
    }
    conclude(run);
}

static void next_round(struct ka_run *run);

/* A backward that the target's compiler refuses is none there, whatever the interpreter made of it: where
 * that is known before the cases are judged, they need not be. Nor where it raises in every call; the facts
 * are the interpreter's, so that says nothing of one that is compiled. */
static void facts_ended(struct ka_run *run)
{
    struct ka_check *check = run->check;
    KA_AUTO_BUF struct ka_buf text = {0};
    check->facts_ended = true;
    if (!check->compiled && ka_describe_raised(check->facts, &check->place, &text)) {
        reject_when_idle(run, KA_VERDICT_RAISED, ka_buf_str(&text));
    } else if (ka_describe_uncompiled(check->facts, &check->place, &text)) {
        ka_buf_printf(&text, " (target %s)", run->settings.target);
        if (!check->reject_rule)
            reject_when_idle(run, "does_not_compile", ka_buf_str(&text));
    } else if (check->facts_wanted) {
        finish(run);
    } else if (!check->candidate) {
        next_round(run);
    }
}

static void on_compiled(struct ka_run *run, json_t *facts)
{
    json_decref(run->check->facts);
    run->check->facts = facts;
    facts_ended(run);
}

static void on_facts(struct ka_run *run, void *arg, const struct ka_op_result *result)
{
    (void)arg;
    run->check->facts_child = NULL;
    if (result->status == KA_OP_OK) {
        ka_run_compile(run, result, on_compiled);
        return;
    }
    if (run->check->candidate) /* else the cases will say the same */
        ka_log(KA_LOG_WARN, "%s: no compile facts: %s", run->name, result->message);
    facts_ended(run);
}

/* `early`: to know soon what does not compile. What the user's own sizes take is asked of what is
 * verified. */
static void measure(struct ka_run *run, bool early)
{
    struct ka_check *check = run->check;
    struct ka_err err;
    json_t *request = ka_run_facts_request(run, check->entry);
    check->facts_early = early && json_object_get(request, "real");
    if (early)
        json_object_del(request, "real");
    json_object_set_new(request, "conduct", json_boolean(check->compiled));
    check->facts_child =
        ka_run_child_start(run, "facts", check->pair_path, request, NULL, on_facts, NULL, &err);
    if (check->facts_child)
        return;
    ka_log(KA_LOG_WARN, "%s: no compile facts: %s", run->name, err.msg);
    facts_ended(run);
}

static void measure_verified(struct ka_run *run)
{
    struct ka_check *check = run->check;
    check->facts_wanted = true;
    if (check->facts_ended && !check->facts_early)
        finish(run);
    else if (!check->facts_child && !run->compile)
        measure(run, false);
}

/* ---- compute-sanitizer, only for what is verified without it */

static void on_sanitized(struct ka_run *run, const struct ka_op_result *result)
{
    struct ka_verdict *verdict = run->check->verdict;
    json_decref(run->sanitized);
    run->sanitized = json_deep_copy(json_object_get(result->doc, "runs"));
    ka_sanitize_judge(result->status == KA_OP_OK ? result->doc : NULL, result->message, verdict);
    if (ka_verdict_verified(verdict))
        measure_verified(run);
    else
        conclude(run);
}

static void sanitize(struct ka_run *run)
{
    json_auto_t *list = json_pack("[O]", ka_plan_smallest(run->shapes));
    json_auto_t *cases = ka_plan_preflight(list, ka_random_u64());
    ka_log_progress(run->name, "compute-sanitizer: memcheck, racecheck, initcheck");
    json_t *extra = json_pack("{s:o, s:s, s:s}", "cases", ka_plan_for_candidate(cases), "entry",
                              run->check->entry, "sanitizer", run->settings.sanitizer);
    ka_run_op(run, "sanitize", run->check->pair_path, extra, on_sanitized);
}

/* ---- judging
 *
 * A case can be judged once the candidate's child and the oracle's are through with it. Shapes are judged
 * as they come, the cases of one always told in the same order, on threads: meanwhile the verdict is
 * theirs. */

/* The oracle has no answer to a case. Inputs of another kind were fair with other values in preflight: with
 * these they are not, and the shape stands on its other cases. */
static void not_judged(struct ka_verdict *verdict, const json_t *plan, size_t shape, const char *why)
{
    if (!json_object_get(plan, "values") && !json_object_get(plan, "layouts") &&
        !json_object_get(plan, "scalar"))
        ka_verdict_skip(verdict, shape, why);
}

/* The case that questions of `plan` are about; `*of` begins as a copy of the case that asks. NULL: none. */
static const struct ka_judged_case *find_other(struct ka_check *check, const json_t *plan,
                                               struct ka_judged_case *of)
{
    struct ka_fan_found oracle;
    const json_t *other = ka_kind_other_case(plan);
    if (!other || !ka_expected_find(check->expected, (size_t)json_integer_value(json_object_get(other, "id")),
                                    &oracle, &of->oracle_id))
        return NULL;
    of->plan = other;
    of->oracle = oracle.entry;
    of->oracle_files = oracle.files;
    return of;
}

/* Case `at` of `order`; `verdict` is a part of the check's. */
static void judge_one(struct ka_check *check, size_t at, struct ka_verdict *verdict)
{
    size_t i = check->order[at];
    json_t *plan = json_array_get(check->cases, i);
    struct ka_fan_found oracle, candidate;
    KA_AUTO_BUF struct ka_buf label = {0};
    struct ka_err why;
    json_int_t id;
    ka_expected_find(check->expected, i, &oracle, &id);
    ka_fan_find(check->candidate, (json_int_t)i, &candidate);
    if (oracle.status == KA_OP_TIMEOUT) {
        ka_verdict_skip(verdict, check->shape_of[i], oracle.message);
        return;
    }
    struct ka_judged_case one = {
        .verdict = verdict,
        .shape = check->shape_of[i],
        .plan = plan,
        .oracle = oracle.entry,
        .candidate = candidate.entry,
        .oracle_files = oracle.files,
        .oracle_id = id,
        .agrees = oracle.agrees,
        .disagreement = oracle.why,
        .candidate_files = candidate.files,
        .compiled = check->compiled,
        .by_hand = check->by_hand,
        .place = &check->place,
    };
    ka_kind_label(plan, &label);
    one.at = ka_verdict_case(verdict, check->shape_of[i], ka_buf_str(&label));
    struct ka_judged_case other = one;
    one.other = find_other(check, plan, &other);
    if (ka_judge_case(&one, (json_int_t)i, &why))
        not_judged(verdict, plan, check->shape_of[i], why.msg);
}

struct batch {
    struct ka_check *check;
    struct ka_verdict **parts; /* of the verdict, one of each case */
};

static void judge_nth(void *arg, size_t n)
{
    struct batch *batch = arg;
    batch->parts[n] = ka_verdict_part(batch->check->verdict);
    judge_one(batch->check, batch->check->batch[n], batch->parts[n]);
}

static void judge_ready(void *arg)
{
    struct ka_check *check = arg;
    struct batch batch = {check, ka_calloc(check->batch_count, sizeof(struct ka_verdict *))};
    ka_threads_run(check->batch_count, judge_nth, &batch);
    for (size_t n = 0; n < check->batch_count; n++)
        ka_verdict_join(check->verdict, batch.parts[n]);
    free(batch.parts);
}

static void go_on(struct ka_run *run);

/* How long the rest takes is guessed from what is through. */
static void tell_progress(const struct ka_check *check)
{
    size_t all = json_array_size(check->cases);
    double spent = (double)(ka_clock_ns() - check->began) / 1e9;
    double left = spent / (double)check->judged * (double)(all - check->judged);
    if (left >= 1)
        ka_log_progress(check->run->name, "check candidate %lld: %zu of %zu cases judged, about %.0f s left",
                        (long long)check->snapshot, check->judged, all, left);
    else
        ka_log_progress(check->run->name, "check candidate %lld: %zu of %zu cases judged",
                        (long long)check->snapshot, check->judged, all);
}

static void on_judged(void *arg)
{
    struct ka_check *check = arg;
    check->judging = false;
    if (check->orphan) {
        free_check(check);
        return;
    }
    for (size_t i = 0; i < check->batch_count; i++) {
        check->is_judged[check->batch[i]] = true;
        ka_fan_release(check->candidate, (json_int_t)check->order[check->batch[i]]);
        ka_expected_release(check->expected, check->order[check->batch[i]]);
    }
    check->judged += check->batch_count;
    if (check->reject_rule) {
        reject(check->run, check->reject_rule, check->reject_text);
        return;
    }
    tell_progress(check);
    go_on(check->run);
}

/* Questions of a case may be about another one, which the oracle has to be through with too. */
static bool is_ready(struct ka_check *check, size_t at)
{
    struct ka_fan_found found;
    json_int_t id;
    size_t i = check->order[at];
    const json_t *other = ka_kind_other_case(json_array_get(check->cases, i));
    return ka_fan_find(check->candidate, (json_int_t)i, &found) &&
           ka_expected_find(check->expected, i, &found, &id) &&
           (!other ||
            ka_expected_find(check->expected, (size_t)json_integer_value(json_object_get(other, "id")),
                             &found, &id));
}

static void gather_ready(struct ka_check *check)
{
    bool *is_held = ka_calloc(json_array_size(check->cases), sizeof(*is_held)); /* of shapes */
    check->batch_count = 0;
    for (size_t at = 0; at < check->upto; at++) {
        size_t shape = check->shape_of[check->order[at]];
        if (check->is_judged[at] || is_held[shape])
            continue;
        if (is_ready(check, at))
            check->batch[check->batch_count++] = at;
        else
            is_held[shape] = true;
    }
    free(is_held);
}

/* Say which kernels no case has launched. */
static void tell_unlaunched(struct ka_check *check)
{
    json_auto_t *seen = json_object();
    KA_EACH(check->cases, i, plan) {
        struct ka_fan_found found;
        (void)plan;
        if (!ka_fan_find(check->candidate, (json_int_t)i, &found))
            continue;
        KA_EACH(json_object_get(found.entry, "launched"), k, name) {
            if (json_is_string(name))
                json_object_set_new(seen, json_string_value(name), json_true());
        }
    }
    ka_conduct_unlaunched(check->launches, seen, check->verdict);
}

/* Every result is there, or will not come. */
static void end_of_cases(struct ka_run *run)
{
    struct ka_check *check = run->check;
    if (!ka_verdict_verified(check->verdict)) {
        conclude(run);
        return;
    }
    tell_unlaunched(check);
    if (run->settings.sanitizer)
        sanitize(run);
    else
        measure_verified(run);
}

/* Something is wrong, and what is left costs much: it cannot change the verdict. */
static bool is_hopeless(const struct ka_run *run)
{
    const struct ka_check *check = run->check;
    size_t next = 0;
    while (check->is_judged[next])
        next++;
    const json_t *plan = json_array_get(check->cases, check->order[next]);
    return ka_run_on_gpu(run) && ka_verdict_count(check->verdict).cases_failed &&
           ka_plan_size(json_object_get(plan, "dims")) > LARGE;
}

/* Shapes of which no case was judged are skipped. */
static void give_up(struct ka_run *run, const char *why)
{
    struct ka_check *check = run->check;
    size_t all = json_array_size(check->cases);
    bool *is_known = ka_calloc(all, sizeof(*is_known)); /* of shapes */
    for (size_t at = 0; at < all; at++)
        if (check->is_judged[at])
            is_known[check->shape_of[check->order[at]]] = true;
    for (size_t at = 0; at < all; at++) {
        size_t shape = check->shape_of[check->order[at]];
        if (!is_known[shape])
            ka_verdict_skip(check->verdict, shape, why);
        is_known[shape] = true;
    }
    free(is_known);
    ka_fan_stop(check->candidate);
    ka_expected_stop(check->expected);
    end_of_cases(run);
}

/* A size of 0: a kernel is not launched there, and what it raises elsewhere is not raised. */
static bool is_empty(const json_t *plan)
{
    KA_EACH_MEMBER(json_object_get(plan, "dims"), name, size) {
        (void)name;
        if (json_is_integer(size) && json_integer_value(size) == 0)
            return true;
    }
    return false;
}

/* What the candidate raised, where it raised in every case with elements that is there by now: in one that
 * may be told, if there is such. NULL: it did not, or nothing is there. */
static const json_t *raised_always(const struct ka_check *check)
{
    const json_t *found = NULL;
    bool may_be_told = false;
    for (size_t at = 0; at < check->upto; at++) {
        struct ka_fan_found one;
        size_t i = check->order[at];
        if (!ka_fan_find(check->candidate, (json_int_t)i, &one) || is_empty(json_array_get(check->cases, i)))
            continue;
        const json_t *error = json_object_get(one.entry, "error");
        if (!json_is_object(error) || json_is_true(json_object_get(error, "out_of_resources")))
            return NULL;
        if (!may_be_told) {
            found = error;
            may_be_told = !ka_plan_is(json_array_get(check->cases, i), "hidden");
        }
    }
    return may_be_told ? found : NULL;
}

static void go_on(struct ka_run *run)
{
    struct ka_check *check = run->check;
    size_t all = json_array_size(check->cases);
    if (check->judging || (!ka_fan_ended(check->candidate) && raised_always(check)))
        return; /* what raises everywhere is told once, by on_candidate() */
    gather_ready(check);
    if (check->batch_count) {
        check->judging = true;
        ka_work_start(run->app->loop, judge_ready, on_judged, check);
    } else if (check->judged < check->upto) {
        if (is_hopeless(run))
            give_up(run, "not run: a smaller case had failed");
    } else if (check->upto == all) {
        end_of_cases(run);
    } else if (ka_verdict_count(check->verdict).cases_failed == 0) {
        next_round(run);
    } else {
        give_up(run, "not reached: --fail-fast");
    }
}

/* Without the oracle there is no verdict: true when the run has ended, and this check with it. */
static bool lost_the_oracle(struct ka_run *run)
{
    static const enum ka_op_status fatal[] = {KA_OP_SANDBOX, KA_OP_DIED, KA_OP_ERROR};
    const struct ka_op_result *failed = NULL;
    for (size_t i = 0; i < KA_COUNT(fatal) && !failed; i++)
        failed = ka_expected_failed(run->check->expected, fatal[i]);
    if (failed)
        ka_run_op_failed(run, failed);
    return failed;
}

static void on_expected(struct ka_run *run, struct ka_fan *fan, void *arg)
{
    (void)fan;
    (void)arg;
    if (!lost_the_oracle(run))
        go_on(run);
}

static void on_candidate(struct ka_run *run, struct ka_fan *fan, void *arg)
{
    static const enum ka_op_status failures[] = {KA_OP_ERROR, KA_OP_DIED, KA_OP_TIMEOUT};
    const struct ka_op_result *failed = ka_fan_failed(fan, KA_OP_SANDBOX);
    (void)arg;
    if (failed) {
        ka_run_op_failed(run, failed);
        return;
    }
    for (size_t i = 0; i < KA_COUNT(failures) && !failed; i++)
        failed = ka_fan_failed(fan, failures[i]);
    const json_t *error = failed              ? json_object_get(failed->doc, "error")
                          : ka_fan_ended(fan) ? raised_always(run->check)
                                              : NULL;
    if (!failed && !error) {
        go_on(run);
        return;
    }
    KA_AUTO_BUF struct ka_buf text = {0};
    if (error)
        ka_place_error(&run->check->place, error, &text);
    else
        ka_buf_puts(&text, failed->message);
    reject_when_idle(run, KA_VERDICT_RAISED, ka_buf_str(&text));
}

/* ---- the cases */

static void announce_shapes(struct ka_run *run)
{
    struct ka_check *check = run->check;
    check->shape_of = ka_calloc(json_array_size(check->cases), sizeof(size_t));
    json_auto_t *known = json_array();
    KA_EACH(check->cases, i, plan) {
        json_t *dims = json_object_get(plan, "dims");
        bool old = false;
        KA_EACH(known, k, seen) {
            if (json_equal(seen, dims)) {
                check->shape_of[i] = k;
                old = true;
            }
        }
        if (old)
            continue;
        enum ka_shape_kind kind = ka_plan_is(plan, "required") ? KA_SHAPE_REQUIRED
                                  : ka_plan_is(plan, "hidden") ? KA_SHAPE_HIDDEN
                                                               : KA_SHAPE_OPTIONAL;
        check->shape_of[i] =
            ka_verdict_shape(check->verdict, kind, dims, json_string_value(json_object_get(plan, "kind")));
        json_array_append(known, dims);
    }
}

/* With --fail-fast a round is one case, then three, then twelve, and so on: most wrong candidates fail in the
 * first. Each round has children of the candidate's and of the oracle's. */
static void next_round(struct ka_run *run)
{
    struct ka_check *check = run->check;
    size_t all = json_array_size(check->cases), from = check->upto;
    size_t upto = !run->given || !run->settings.fail_fast ? all : from ? 4 * from : 1;
    check->upto = upto < all ? upto : all;
    json_auto_t *round = json_array();
    for (size_t at = from; at < check->upto; at++)
        json_array_append(round, json_array_get(check->cases, check->order[at]));
    json_auto_t *told = ka_plan_for_candidate(round);
    struct ka_fan_req req = {.operation = "candidate",
                             .file = check->pair_path,
                             .cases = told,
                             .extra = json_pack("{s:s}", "entry", check->entry),
                             .shapes = run->shapes,
                             .together = !ka_run_on_gpu(run)};
    ka_fan_free(check->candidate);
    check->candidate = ka_fan_start(run, &req, on_candidate, NULL);
    ka_expected_ask(check->expected, check->order + from, check->upto - from, on_expected, NULL);
    if (!lost_the_oracle(run)) /* what was prepared may be there already, or may have failed */
        go_on(run);
}

/* The cheapest first, and equals as they were drawn. */
static void order_cases(struct ka_check *check)
{
    size_t count = json_array_size(check->cases);
    check->order = ka_calloc(count, sizeof(*check->order));
    check->batch = ka_calloc(count, sizeof(*check->batch));
    check->is_judged = ka_calloc(count, sizeof(*check->is_judged));
    for (size_t i = 0; i < count; i++) {
        size_t at = i;
        double size = ka_plan_size(json_object_get(json_array_get(check->cases, i), "dims"));
        while (at > 0 && ka_plan_size(json_object_get(json_array_get(check->cases, check->order[at - 1]),
                                                      "dims")) > size) {
            check->order[at] = check->order[at - 1];
            at--;
        }
        check->order[at] = i;
    }
}

static void run_candidate(struct ka_run *run)
{
    struct ka_check *check = run->check;
    check->began = ka_clock_ns();
    check->compiled = ka_run_on_gpu(run);
    check->expected = ka_expected_take(run);
    check->cases = ka_expected_cases(check->expected);
    announce_shapes(run);
    order_cases(check);
    ka_log_progress(run->name, "check candidate %lld: %zu cases", (long long)check->snapshot,
                    json_array_size(check->cases));
    /* What is verified is measured sooner or later. On a GPU there are processors for it beside the cases;
     * elsewhere a model waits for the answer, and what its target's compiler refuses is known in seconds. */
    bool beside = ka_run_on_gpu(run), first = !beside && !run->given && run->job.limits.use_llm;
    if (!run->settings.fail_fast && (beside || first))
        measure(run, first);
    if (run->check == check && !check->candidate && (!first || run->settings.fail_fast))
        next_round(run);
}

/* ---- scan */

/* "line 12 of the backward part, `x = y`: "; nothing for no line. */
static void put_place(const struct ka_check *check, const json_t *line, struct ka_buf *out)
{
    size_t before = out->len;
    ka_place_line(&check->place, json_integer_value(line), out);
    ka_buf_puts(out, out->len > before ? ": " : "");
}

static void on_scanned(struct ka_run *run, const struct ka_op_result *result)
{
    struct ka_check *check = run->check;
    if (result->status != KA_OP_OK) {
        if (result->status == KA_OP_ERROR) {
            KA_AUTO_BUF struct ka_buf text = {0};
            put_place(check, json_object_get(json_object_get(result->doc, "error"), "line"), &text);
            ka_buf_puts(&text, ka_text_of(json_object_get(result->doc, "error"), "message", result->message));
            reject(run, "syntax", ka_buf_str(&text));
            return;
        }
        ka_run_check_free(run);
        ka_run_op_failed(run, result);
        return;
    }
    bool rejected = false;
    KA_EACH(json_object_get(result->doc, "findings"), i, finding) {
        const char *severity = json_string_value(json_object_get(finding, "severity"));
        const char *rule = json_string_value(json_object_get(finding, "rule"));
        const char *message = json_string_value(json_object_get(finding, "message"));
        if (severity && rule && message && strcmp(severity, "note") == 0)
            json_array_append(check->notes, finding);
        if (!severity || !rule || !message || strcmp(severity, "reject") != 0)
            continue;
        KA_AUTO_BUF struct ka_buf text = {0};
        put_place(check, json_object_get(finding, "line"), &text);
        ka_place_retell(&check->place, message, &text);
        ka_verdict_fail_whole(check->verdict, rule, ka_buf_str(&text));
        rejected = true;
    }
    const char *entry = json_string_value(json_object_get(result->doc, "entry"));
    check->launches = json_incref(json_object_get(result->doc, "launches"));
    check->entry = ka_strdup(entry ? entry : "");
    if (rejected || !entry)
        conclude(run);
    else
        run_candidate(run);
}

static int write_pair(struct ka_run *run, int64_t snapshot, struct ka_err *err)
{
    struct ka_snapshot stored;
    int rc = ka_state_snapshot_head(run->state, snapshot, &stored, err);
    if (rc)
        return rc;
    KA_AUTO_BUF struct ka_buf pair = {0};
    char name[64];
    snprintf(name, sizeof(name), "candidates/%lld.py", (long long)snapshot);
    run->check->pair_path = ka_path_join(run->dir, name);
    rc = ka_compose_pair(run->forward, stored.backward, &pair, err);
    if (rc == 0)
        rc = ka_file_put(run->check->pair_path, pair.data, pair.len, err);
    if (rc == 0)
        run->check->pair = ka_buf_steal(&pair);
    run->check->place =
        (struct ka_place){.pair = run->check->pair, .forward = run->forward, .whole = run->given};
    ka_snapshot_free(&stored);
    return rc;
}

void ka_run_check(struct ka_run *run, int64_t snapshot)
{
    struct ka_err err;
    ka_run_check_free(run);
    if (settle_as_before(run, snapshot))
        return;
    struct ka_check *check = ka_calloc(1, sizeof(*check));
    run->check = check;
    check->run = run;
    check->snapshot = snapshot;
    check->by_hand = run->given && !run->given[0];
    check->notes = json_array();
    const char *names[64];
    size_t count = 0;
    KA_EACH(run->grads, i, name) {
        if (count < KA_COUNT(names))
            names[count++] = json_string_value(name);
    }
    check->verdict = ka_verdict_new(names, count);
    if (write_pair(run, snapshot, &err)) {
        ka_run_check_free(run);
        ka_run_fail(run, KA_EV_INTERNAL, "internal", "%s", err.msg);
        return;
    }
    ka_run_op(run, "scan", check->pair_path, NULL, on_scanned);
}
