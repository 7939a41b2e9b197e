/* One check of one candidate: scan, run the candidate and, in processes that share nothing with it, the
 * oracle; compare, decide.
 *
 * The candidate's tensors stay in its scratch folder, which its process can no longer reach, until they are
 * judged. The oracle's never were where the candidate could see them: expected.h. Whatever the candidate
 * reports of itself (launches, modified inputs) can only count against it, never for it. */
#include "check_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/core/compose.h"
#include "agent/core/conduct.h"
#include "agent/core/fields.h"
#include "agent/core/kinds.h"
#include "agent/core/plan.h"
#include "agent/io/work.h"
#include "base/each.h"
#include "base/files.h"
#include "base/log.h"
#include "cases.h"
#include "compiled_facts.h"
#include "events.h"
#include "expected.h"
#include "fan.h"
#include "operations.h"
#include "sizes.h"

#define LARGE ((double)(1 << 22)) /* product of the sizes: a case that costs much */

static void free_check(struct ka_check *check)
{
    ka_fan_free(check->candidate);
    ka_expected_free(check->expected);
    ka_verdict_free(check->verdict);
    json_decref(check->facts);
    json_decref(check->notes);
    json_decref(check->launches);
    json_decref(check->launched);
    free(check->pair_path);
    free(check->pair);
    free(check->entry);
    free(check->shape_of);
    free(check->order);
    free(check->is_judged);
    free(check->doubts);
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

/* ---- judging
 *
 * A case can be judged once the candidate's child and the oracle's are through with it. Shapes are judged
 * as they come, the cases of one always told in the same order, on threads: meanwhile the verdict is
 * theirs. */

static void go_on(struct ka_run *run);

/* How long the rest takes is guessed from what is through. */
static void tell_progress(const struct ka_check *check)
{
    size_t all = json_array_size(check->cases);
    if (!check->judged) /* all there were are looked at closer */
        return;
    double spent = (double)(ka_clock_ns() - check->began) / 1e9;
    double left = spent / (double)check->judged * (double)(all - check->judged);
    if (left >= 1)
        ka_log_progress(check->run->name, "check candidate %lld: %zu of %zu cases judged, about %.0f s left",
                        (long long)check->snapshot, check->judged, all, left);
    else
        ka_log_progress(check->run->name, "check candidate %lld: %zu of %zu cases judged",
                        (long long)check->snapshot, check->judged, all);
}

static size_t number_of(const json_t *plan)
{
    return (size_t)json_integer_value(json_object_get(plan, "id"));
}

/* Without a closer look the first judgement stands. `arg`: the case. */
static void on_closer(struct ka_run *run, struct ka_fan *fan, void *arg)
{
    struct ka_fan_found found;
    struct ka_err why;
    bool ok = ka_expected_find_closer(run->check->expected, number_of(arg), &found) &&
              json_is_true(json_object_get(found.entry, "ok"));
    (void)fan;
    if (!ok && found.entry)
        ka_case_error(found.entry, &why);
    if (!ok)
        ka_log(KA_LOG_WARN, "%s: no closer look at what is off by little: %s", run->name,
               found.entry     ? why.msg
               : found.message ? found.message
                               : "its process left no result");
    go_on(run);
}

static void ask_closer(struct ka_check *check, const json_t *plan)
{
    size_t i = number_of(plan);
    ka_expected_look_closer(check->expected, i, on_closer, json_array_get(check->cases, i));
}

/* Rounding may be all that is wrong: its results stay, and it is judged once more. */
static void look_closer(struct ka_check *check, size_t at)
{
    struct ka_check_doubt *doubt = &check->doubts[at];
    const json_t *plan = json_array_get(check->cases, check->order[at]);
    ka_log(KA_LOG_DEBUG, "%s: case %zu is off by little: a closer look", check->run->name, check->order[at]);
    doubt->asked = true;
    if (doubt->own)
        ask_closer(check, plan);
    if (doubt->other)
        ask_closer(check, ka_kind_other_case(plan));
}

static void leave(struct ka_check *check, size_t at)
{
    const struct ka_check_doubt *doubt = &check->doubts[at];
    const json_t *plan = json_array_get(check->cases, check->order[at]);
    if (doubt->asked && doubt->own)
        ka_expected_leave_closer(check->expected, number_of(plan));
    if (doubt->asked && doubt->other)
        ka_expected_leave_closer(check->expected, number_of(ka_kind_other_case(plan)));
    ka_fan_release(check->candidate, (json_int_t)check->order[at]);
    ka_expected_release(check->expected, check->order[at]);
}

/* Before what the candidate left is released, and its round with it. */
static void note_launched(struct ka_check *check, size_t at)
{
    struct ka_fan_found found;
    if (!ka_fan_find(check->candidate, (json_int_t)check->order[at], &found))
        return;
    KA_EACH(json_object_get(found.entry, "launched"), i, name) {
        if (json_is_string(name))
            json_object_set_new(check->launched, json_string_value(name), json_true());
    }
}

static void settle_batch(struct ka_check *check)
{
    for (size_t n = 0; n < check->batch_count; n++) {
        size_t at = check->batch[n];
        if (ka_check_is_doubted(check, at) && !check->reject_rule) {
            look_closer(check, at);
            continue;
        }
        check->is_judged[at] = true;
        check->judged++;
        note_launched(check, at);
        leave(check, at);
    }
}

static void on_judged(void *arg)
{
    struct ka_check *check = arg;
    check->judging = false;
    if (check->orphan) {
        free_check(check);
        return;
    }
    settle_batch(check);
    if (check->reject_rule) {
        ka_check_reject(check->run, check->reject_rule, check->reject_text);
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
    return ka_expected_find_closer(check->expected, i, &found) &&
           ka_fan_find(check->candidate, (json_int_t)i, &found) &&
           ka_expected_find(check->expected, i, &found, &id) &&
           (!other || (ka_expected_find(check->expected, number_of(other), &found, &id) &&
                       ka_expected_find_closer(check->expected, number_of(other), &found)));
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

/* Every result is there, or will not come. */
static void end_of_cases(struct ka_run *run)
{
    struct ka_check *check = run->check;
    if (!ka_verdict_verified(check->verdict)) {
        ka_check_conclude(run);
        return;
    }
    ka_conduct_unlaunched(check->launches, check->launched, check->verdict); /* kernels of no case */
    if (run->settings.sanitizer)
        ka_check_sanitize(run);
    else
        ka_check_measure_verified(run);
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

static bool stops_at_failure(const struct ka_run *run)
{
    return run->given && run->settings.fail_fast;
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
        ka_work_start(run->app->loop, ka_check_judge_batch, on_judged, check);
    } else if (check->judged < check->upto) {
        if (is_hopeless(run))
            give_up(run, "not run: a smaller case had failed");
    } else if (check->upto == all) {
        end_of_cases(run);
    } else if (stops_at_failure(run) && ka_verdict_count(check->verdict).cases_failed) {
        give_up(run, "not reached: --fail-fast");
    } else if (is_hopeless(run)) {
        give_up(run, "not run: a smaller case had failed");
    } else {
        ka_check_next_round(run);
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
    ka_check_reject_when_idle(run, KA_VERDICT_RAISED, ka_buf_str(&text));
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
 * first. It has no more cases than their results have room for. Each round has children of the candidate's
 * and of the oracle's. */
void ka_check_next_round(struct ka_run *run)
{
    struct ka_check *check = run->check;
    size_t all = json_array_size(check->cases), from = check->upto;
    size_t upto = !stops_at_failure(run) ? all : from ? 4 * from : 1;
    upto = upto < all ? upto : all;
    check->upto =
        from + ka_plan_fit(check->cases, check->order, from, upto, run->shapes, ka_run_results_room(run));
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
    check->doubts = ka_calloc(count, sizeof(*check->doubts));
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
        ka_check_measure(run, first);
    if (run->check == check && !check->candidate && (!first || run->settings.fail_fast))
        ka_check_next_round(run);
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
            ka_check_reject(run, "syntax", ka_buf_str(&text));
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
        ka_check_conclude(run);
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
    if (ka_check_settle_as_before(run, snapshot))
        return;
    struct ka_check *check = ka_calloc(1, sizeof(*check));
    check->launched = json_object();
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
