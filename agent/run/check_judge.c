/* The cases of a batch compared, on threads: meanwhile the verdict is theirs. */
#include "check_internal.h"

#include <stdlib.h>

#include "agent/core/kinds.h"
#include "base/threads.h"
#include "expected.h"
#include "fan.h"
#include "judge.h"

/* The oracle has no answer to a case. Inputs of another kind were fair with other values in preflight: with
 * these they are not, and the shape stands on its other cases. */
static void not_judged(struct ka_verdict *verdict, const json_t *plan, size_t shape, const char *why)
{
    if (!json_object_get(plan, "values") && !json_object_get(plan, "layouts") &&
        !json_object_get(plan, "scalar"))
        ka_verdict_skip(verdict, shape, why);
}

/* What a closer look at case `i` left, if there was one. */
static void find_closer(struct ka_check *check, size_t i, struct ka_judged_case *one)
{
    struct ka_fan_found closer;
    ka_expected_find_closer(check->expected, i, &closer);
    one->closer_files = closer.files;
    one->closer_id = json_integer_value(json_object_get(closer.entry, "id"));
}

/* The case that questions of `plan` are about; `*of` begins as a copy of the case that asks. NULL: none. */
static const struct ka_judged_case *find_other(struct ka_check *check, const json_t *plan,
                                               struct ka_judged_case *of)
{
    struct ka_fan_found oracle;
    const json_t *other = ka_kind_other_case(plan);
    size_t i = (size_t)json_integer_value(json_object_get(other, "id"));
    if (!other || !ka_expected_find(check->expected, i, &oracle, &of->oracle_id))
        return NULL;
    of->plan = other;
    of->oracle = oracle.entry;
    of->oracle_files = oracle.files;
    find_closer(check, i, of);
    return of;
}

/* Case `at` of `order`; `verdict` is a part of the check's. What wants a closer look first is noted as the
 * case's doubts. */
static void judge_one(struct ka_check *check, size_t at, struct ka_verdict *verdict)
{
    size_t i = check->order[at];
    json_t *plan = json_array_get(check->cases, i);
    struct ka_fan_found oracle, candidate;
    struct ka_check_doubt *doubt = &check->doubts[at];
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
        .closer = doubt->asked,
    };
    find_closer(check, i, &one);
    ka_kind_label(plan, &label);
    one.at = ka_verdict_case(verdict, check->shape_of[i], ka_buf_str(&label));
    struct ka_judged_case other = one;
    one.other = find_other(check, plan, &other);
    if (ka_judge_case(&one, (json_int_t)i, &why))
        not_judged(verdict, plan, check->shape_of[i], why.msg);
    if (!doubt->asked)
        *doubt = (struct ka_check_doubt){.own = one.doubted, .other = one.other_doubted};
}

bool ka_check_is_doubted(const struct ka_check *check, size_t at)
{
    const struct ka_check_doubt *doubt = &check->doubts[at];
    return !doubt->asked && (doubt->own || doubt->other);
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

void ka_check_judge_batch(void *arg)
{
    struct ka_check *check = arg;
    struct batch batch = {check, ka_calloc(check->batch_count, sizeof(struct ka_verdict *))};
    ka_threads_run(check->batch_count, judge_nth, &batch);
    for (size_t n = 0; n < check->batch_count; n++) {
        if (ka_check_is_doubted(check, check->batch[n]))
            ka_verdict_free(batch.parts[n]);
        else
            ka_verdict_join(check->verdict, batch.parts[n]);
    }
    free(batch.parts);
}
