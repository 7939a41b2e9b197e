/* One check of one candidate: scan, run the candidate, and only when that process is gone run the oracle, compare, decide.
 *
 * The candidate's tensors stay in its scratch folder, which its process can no longer reach, until the oracle has finished.
 * Whatever the candidate reports of itself (launches, modified inputs) can only count against it, never for it. */
#include "internal.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cases.h"
#include "core/compose.h"
#include "core/plan.h"
#include "core/rank.h"
#include "core/sanitize.h"
#include "core/verdict.h"
#include "files.h"
#include "hash.h"
#include "judge.h"
#include "log.h"

#define FACTS_SHAPES 3
#define REPEATS 4 /* of one backward, to see how far atomics let it vary */

struct ka_check {
    int64_t snapshot;
    char *pair_path;
    char *entry;
    json_t *cases;
    json_t *candidate; /* result document of the candidate's child */
    const struct ka_child_result *candidate_files;
    struct ka_verdict *verdict;
    size_t *shape_of;  /* case number -> shape number of the verdict */
    size_t from, upto; /* cases of this round: all of them, unless --fail-fast */
    json_t *facts;
    size_t judged;
};

static void forget_candidate(struct ka_check *check)
{
    if (check->candidate_files)
        ka_child_result_free(check->candidate_files);
    check->candidate_files = NULL;
    json_decref(check->candidate);
    check->candidate = NULL;
}

void ka_run_check_free(struct ka_run *run)
{
    struct ka_check *check = run->check;
    if (!check)
        return;
    run->check = NULL;
    forget_candidate(check);
    ka_verdict_free(check->verdict);
    json_decref(check->cases);
    json_decref(check->facts);
    free(check->pair_path);
    free(check->entry);
    free(check->shape_of);
    free(check);
}

/* ---- the end */

static void add_history(struct ka_run *run, const struct ka_snapshot *snapshot,
                        const struct ka_verdict_counts *counts, bool verified, double cost, const char *facts)
{
    json_t *entry =
        json_pack("{s:I, s:s, s:s, s:s, s:b, s:I, s:I, s:I, s:I}", "snapshot", (json_int_t)snapshot->id,
                  "phase", snapshot->phase, "origin", snapshot->origin, "note", snapshot->note, "verified",
                  verified, "required", (json_int_t)counts->required, "passed", (json_int_t)counts->passed,
                  "hidden", (json_int_t)counts->hidden, "hidden_passed", (json_int_t)counts->hidden_passed);
    json_object_set_new(entry, "cost", isfinite(cost) ? json_real(cost) : json_null());
    json_object_set_new(entry, "facts", json_string(facts));
    json_array_append_new(run->history, entry);
    ka_run_put(run, "history", run->history);
}

/* What a check came to. Borrows verdict and facts. */
struct outcome {
    int64_t snapshot;
    struct ka_verdict_counts counts;
    json_t *verdict; /* with "facts", the text for the model */
    json_t *facts;   /* measured; NULL */
    bool verified;
    double cost;
};

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
        .cost = outcome->cost,
    };
    if (rc) {
        ka_log(KA_LOG_ERROR, "%s: %s", run->name, err.msg);
    } else {
        const char *facts = json_string_value(json_object_get(outcome->verdict, "facts"));
        add_history(run, &snapshot, counts, outcome->verified, outcome->cost, facts ? facts : "");
        ka_snapshot_free(&snapshot);
        ka_log(KA_LOG_INFO,
               "%s: %s candidate %lld: %zu of %zu required and %zu of %zu hidden shapes pass: %s", run->name,
               ka_job_phase_name(run->job.phase), (long long)outcome->snapshot, counts->passed,
               counts->required, counts->hidden_passed, counts->hidden,
               outcome->verified ? "verified" : "not verified");
    }
    ka_record_add(run->record, "verdict",
                  json_pack("{s:I, s:O, s:O?}", "snapshot", (json_int_t)outcome->snapshot, "verdict",
                            outcome->verdict, "measured", outcome->facts));
    ka_run_check_free(run);
    ka_run_post(run, &event);
}

static void conclude(struct ka_run *run)
{
    struct ka_check *check = run->check;
    bool verified = ka_verdict_verified(check->verdict);
    struct ka_buf text = {0};
    ka_verdict_facts(check->verdict, FACTS_SHAPES, &text);
    json_t *verdict = ka_verdict_json(check->verdict, true), *facts = json_incref(check->facts);
    json_object_set_new(verdict, "facts", json_string(ka_buf_str(&text)));
    ka_buf_free(&text);
    struct outcome outcome = {.snapshot = check->snapshot,
                              .counts = ka_verdict_count(check->verdict),
                              .verdict = verdict,
                              .facts = facts,
                              .verified = verified,
                              .cost = verified ? ka_rank_cost(facts) : INFINITY};
    settle(run, &outcome);
    json_decref(verdict);
    json_decref(facts);
}

static size_t count_in(const json_t *shapes, const char *name)
{
    json_int_t value = json_integer_value(json_object_get(shapes, name));
    return value > 0 ? (size_t)value : 0;
}

/* A candidate that is an earlier one again, byte for byte, has that one's verdict. Not if shapes were skipped there, which may
 * have been the machine's fault. */
static bool settle_as_before(struct ka_run *run, int64_t id)
{
    struct ka_snapshot twin;
    if (ka_state_snapshot_twin(run->state, id, &twin, NULL))
        return false;
    const json_t *shapes = json_object_get(twin.verdict, "shapes");
    bool usable = shapes && json_array_size(json_object_get(shapes, "skipped")) == 0;
    if (usable) {
        struct outcome outcome = {.snapshot = id,
                                  .counts = {.required = count_in(shapes, "required"),
                                             .passed = count_in(shapes, "passed"),
                                             .hidden = count_in(shapes, "hidden"),
                                             .hidden_passed = count_in(shapes, "hidden_passed")},
                                  .verdict = twin.verdict,
                                  .facts = twin.facts,
                                  .verified = json_is_true(json_object_get(twin.verdict, "verified")),
                                  .cost = twin.cost};
        ka_log(KA_LOG_INFO,
               "%s: candidate %lld is, byte for byte, candidate %lld of before: not checked again", run->name,
               (long long)id, (long long)twin.id);
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

/* ---- measured facts, only for what is verified */

static void on_compiled(struct ka_run *run, json_t *facts)
{
    run->check->facts = facts;
    conclude(run);
}

static void on_facts(struct ka_run *run, const struct ka_op_result *result)
{
    if (result->status == KA_OP_OK) {
        ka_run_compile(run, result, on_compiled);
        return;
    }
    ka_log(KA_LOG_WARN, "%s: no compile facts: %s", run->name, result->message);
    conclude(run);
}

static void measure(struct ka_run *run)
{
    struct ka_check *check = run->check;
    json_t *extra = ka_plan_facts(run->shapes, check->entry, ka_random_u64());
    ka_run_op(run, "facts", check->pair_path, extra, on_facts);
}

static void measure_verified(struct ka_run *run)
{
    if (run->app->opts->fail_fast)
        conclude(run);
    else
        measure(run);
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
    static const char *const keep[] = {"id", "dims", "seed", "upstream"};
    json_t *list = json_pack("[O]", ka_plan_smallest(run->shapes));
    json_t *cases = ka_plan_preflight(list, ka_random_u64());
    ka_log_progress(run->name, "compute-sanitizer: memcheck, racecheck, initcheck");
    json_t *extra = json_pack("{s:o, s:s, s:s}", "cases", ka_plan_for_child(cases, keep, KA_COUNT(keep)),
                              "entry", run->check->entry, "sanitizer", run->app->sanitizer);
    json_decref(list);
    json_decref(cases);
    ka_run_op(run, "sanitize", run->check->pair_path, extra, on_sanitized);
}

/* ---- the oracle has answered */

/* The oracle has no answer to a case. Inputs of another kind were fair with other values in preflight: with these they are not, and the
 * shape stands on its other cases. */
static void not_judged(struct ka_run *run, const json_t *plan, size_t shape, const char *why)
{
    const char *inputs = json_string_value(json_object_get(plan, "inputs"));
    if (inputs)
        ka_log(KA_LOG_INFO, "%s: %s inputs were not judged this time: %s", run->name, inputs, why);
    else
        ka_verdict_skip(run->check->verdict, shape, why);
}

static void next_round(struct ka_run *run);

/* Some cases were judged, and more are to come only if none of them failed. Returns false when the verdict is complete. */
static bool go_on(struct ka_run *run)
{
    struct ka_check *check = run->check;
    if (check->upto == json_array_size(check->cases))
        return false;
    if (ka_verdict_count(check->verdict).cases_failed == 0) {
        next_round(run);
        return true;
    }
    for (size_t i = check->upto; i < json_array_size(check->cases); i++) {
        if (check->shape_of[i] > check->shape_of[check->upto - 1])
            ka_verdict_skip(check->verdict, check->shape_of[i], "not reached: --fail-fast");
    }
    return false;
}

static void on_oracle(struct ka_run *run, const struct ka_op_result *result)
{
    struct ka_check *check = run->check;
    if (result->status == KA_OP_SANDBOX || result->status == KA_OP_DIED || result->status == KA_OP_ERROR) {
        ka_run_check_free(run);
        ka_run_op_failed(run, result);
        return;
    }
    for (size_t i = check->from; i < check->upto; i++) {
        json_t *plan = json_array_get(check->cases, i);
        struct ka_buf label = {0};
        struct ka_err why;
        struct ka_judged_case one = {
            .verdict = check->verdict,
            .shape = check->shape_of[i],
            .plan = plan,
            .oracle = ka_case_find(result->doc, (json_int_t)i),
            .candidate = ka_case_find(check->candidate, (json_int_t)i),
            .oracle_files = result->child,
            .candidate_files = check->candidate_files,
        };
        if (result->status == KA_OP_TIMEOUT) {
            ka_verdict_skip(check->verdict, check->shape_of[i], result->message);
            continue;
        }
        ka_case_label(plan, &label);
        one.at = ka_verdict_case(check->verdict, check->shape_of[i], ka_buf_str(&label));
        ka_buf_free(&label);
        if (ka_judge_case(&one, (json_int_t)i, &why) == 0)
            check->judged++;
        else
            not_judged(run, plan, check->shape_of[i], why.msg);
    }
    if (go_on(run))
        return;
    if (!ka_verdict_verified(check->verdict))
        conclude(run);
    else if (run->app->sanitizer)
        sanitize(run);
    else if (run->app->opts->fail_fast)
        conclude(run);
    else
        measure_verified(run);
}

/* ---- candidate */

/* What a child is told of this round's cases. */
static json_t *round_for_child(const struct ka_check *check, const char *const *keep, size_t count)
{
    json_t *round = json_array();
    for (size_t i = check->from; i < check->upto; i++)
        json_array_append(round, json_array_get(check->cases, i));
    json_t *told = ka_plan_for_child(round, keep, count);
    json_decref(round);
    return told;
}

static void on_candidate(struct ka_run *run, const struct ka_op_result *result)
{
    static const char *const keep[] = {"id", "dims", "seed", "upstream", "inputs"};
    struct ka_check *check = run->check;
    if (result->status == KA_OP_SANDBOX) {
        ka_run_check_free(run);
        ka_run_op_failed(run, result);
        return;
    }
    if (result->status != KA_OP_OK) {
        const char *trace =
            json_string_value(json_object_get(json_object_get(result->doc, "error"), "traceback"));
        struct ka_buf text = {0};
        ka_buf_printf(&text, "%s%s%.3000s", result->message, trace ? "\n" : "", trace ? trace : "");
        reject(run, "raised", ka_buf_str(&text));
        ka_buf_free(&text);
        return;
    }
    forget_candidate(check);
    check->candidate = json_deep_copy(result->doc);
    check->candidate_files = ka_child_result_keep(result->child);
    json_t *extra = json_pack("{s:o, s:b}", "cases", round_for_child(check, keep, KA_COUNT(keep)), "fd", 0);
    ka_run_op(run, "oracle", run->work_forward, extra, on_oracle);
}

static void announce_shapes(struct ka_run *run)
{
    struct ka_check *check = run->check;
    check->shape_of = ka_calloc(json_array_size(check->cases), sizeof(size_t));
    json_t *known = json_array();
    size_t i, k;
    json_t *plan, *seen;
    json_array_foreach(check->cases, i, plan)
    {
        json_t *dims = json_object_get(plan, "dims");
        const char *class = json_string_value(json_object_get(plan, "class"));
        bool old = false;
        json_array_foreach(known, k, seen)
        {
            if (json_equal(seen, dims)) {
                check->shape_of[i] = k;
                old = true;
            }
        }
        if (old)
            continue;
        enum ka_shape_kind kind = strcmp(class, "required") == 0 ? KA_SHAPE_REQUIRED
                                  : strcmp(class, "hidden") == 0 ? KA_SHAPE_HIDDEN
                                                                 : KA_SHAPE_OPTIONAL;
        check->shape_of[i] =
            ka_verdict_shape(check->verdict, kind, dims, json_string_value(json_object_get(plan, "kind")));
        json_array_append(known, dims);
    }
    json_decref(known);
}

static int count_differentiable(const struct ka_run *run)
{
    size_t i;
    json_t *output;
    int count = 0;
    json_array_foreach(run->outputs, i, output) count +=
        json_is_true(json_object_get(output, "differentiable"));
    return count;
}

/* With --fail-fast a round is one case, then three, then twelve, and so on: most wrong candidates fail in the first. Each
 * round is a child of the candidate's and then one of the oracle's. */
static void next_round(struct ka_run *run)
{
    static const char *const keep[] = {"id",    "dims",  "seed", "upstream", "inputs",
                                       "needs", "twice", "noop", "linear",   "repeats"};
    struct ka_check *check = run->check;
    size_t all = json_array_size(check->cases);
    size_t upto = !run->given || !run->app->opts->fail_fast ? all : check->upto ? 4 * check->upto : 1;
    check->from = check->upto;
    check->upto = upto < all ? upto : all;
    json_t *extra =
        json_pack("{s:s, s:o}", "entry", check->entry, "cases", round_for_child(check, keep, KA_COUNT(keep)));
    ka_run_op(run, "candidate", check->pair_path, extra, on_candidate);
}

static void run_candidate(struct ka_run *run)
{
    struct ka_check *check = run->check;
    check->cases =
        ka_plan_check(run->shapes, run->grads, count_differentiable(run), run->half, ka_random_u64());
    ka_plan_inputs(check->cases, run->shapes,
                   json_object_get(json_object_get(run->oracles, "inputs"), "kept"), ka_random_u64());
    if (strcmp(run->app->device, "cuda") == 0) /* the interpreter has no order of programs to vary */
        ka_plan_repeats(check->cases, REPEATS);
    announce_shapes(run);
    ka_log_progress(run->name, "check candidate %lld: %zu cases", (long long)check->snapshot,
                    json_array_size(check->cases));
    next_round(run);
}

/* ---- scan */

static void on_scanned(struct ka_run *run, const struct ka_op_result *result)
{
    struct ka_check *check = run->check;
    if (result->status != KA_OP_OK) {
        if (result->status == KA_OP_ERROR) {
            reject(run, "syntax", result->message);
            return;
        }
        ka_run_check_free(run);
        ka_run_op_failed(run, result);
        return;
    }
    bool rejected = false;
    size_t i;
    json_t *finding;
    json_array_foreach(json_object_get(result->doc, "findings"), i, finding)
    {
        const char *severity = json_string_value(json_object_get(finding, "severity"));
        const char *rule = json_string_value(json_object_get(finding, "rule"));
        const char *message = json_string_value(json_object_get(finding, "message"));
        if (!severity || !rule || !message || strcmp(severity, "reject") != 0)
            continue;
        char text[700];
        snprintf(text, sizeof(text), "line %lld: %.600s",
                 (long long)json_integer_value(json_object_get(finding, "line")), message);
        ka_verdict_fail_whole(check->verdict, rule, text);
        rejected = true;
    }
    const char *entry = json_string_value(json_object_get(result->doc, "entry"));
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
    struct ka_buf pair = {0};
    char name[64];
    snprintf(name, sizeof(name), "candidates/%lld.py", (long long)snapshot);
    run->check->pair_path = ka_path_join(run->dir, name);
    rc = ka_compose_pair(run->forward, stored.backward, &pair, err);
    if (rc == 0)
        rc = ka_file_put(run->check->pair_path, pair.data, pair.len, err);
    ka_buf_free(&pair);
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
    check->snapshot = snapshot;
    const char *names[64];
    size_t count = 0, i;
    json_t *name;
    json_array_foreach(run->grads, i, name)
    {
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
