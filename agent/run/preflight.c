/* Preflight's driver: begins each part when it may, and says when all are through. Knows no part's work. */
#include "preflight.h"

#include <stdlib.h>

#include "agent/core/fields.h"
#include "agent/core/plan.h"
#include "base/each.h"
#include "base/log.h"
#include "draft.h"
#include "events.h"
#include "expected.h"
#include "known.h"
#include "preflight_internal.h"

void ka_run_preflight_free(struct ka_run *run)
{
    struct ka_preflight *preflight = run->preflight;
    if (!preflight)
        return;
    run->preflight = NULL;
    if (preflight->gone)
        *preflight->gone = true;
    struct ka_fan *fans[] = {preflight->sweep, preflight->hidden, preflight->inputs, preflight->scalars};
    json_t *documents[] = {preflight->pending,
                           preflight->asked,
                           preflight->tried,
                           preflight->smaller,
                           preflight->asked_hidden,
                           preflight->asked_inputs,
                           preflight->stand_in,
                           preflight->longer,
                           preflight->variations,
                           preflight->asked_scalars,
                           preflight->first_differences};
    for (size_t i = 0; i < KA_COUNT(fans); i++)
        ka_fan_free(fans[i]);
    for (size_t i = 0; i < KA_COUNT(documents); i++)
        json_decref(documents[i]);
    free(preflight);
}

/* What the oracle itself failed on, nothing is checked on: that is said. Where it left no hidden shape, a
 * verdict would be less than people take it for, and there is none: false, the run has ended. */
static bool survived(struct ka_run *run, size_t hidden)
{
    const json_t *crashed = json_object_get(run->oracles, "crashed");
    const char *why = ka_text_of(crashed, "message", "no reason");
    json_int_t cases = json_integer_value(json_object_get(crashed, "cases"));
    if (!crashed)
        return true;
    if (!hidden) {
        ka_run_fail(run, KA_EV_INTERNAL, "internal",
                    "the oracle itself failed in %lld cases, and no hidden shape is left: %s",
                    (long long)cases, why);
        return false;
    }
    ka_log(KA_LOG_WARN, "%s: the oracle itself failed in %lld cases, on which nothing is checked: %s",
           run->name, (long long)cases, why);
    return true;
}

static void finish(struct ka_run *run)
{
    size_t hidden = 0;
    ka_run_preflight_free(run);
    KA_EACH(run->shapes, i, shape)
        hidden += ka_plan_is(shape, "hidden");
    ka_run_remember(run);
    ka_run_put(run, "shapes", run->shapes);
    ka_run_put(run, "skipped", run->skipped);
    ka_run_put(run, "oracles", run->oracles);
    ka_run_put(run, "outputs", run->outputs);
    ka_run_put(run, "grads", run->grads);
    json_t *half = json_boolean(run->half);
    ka_run_put(run, "half", half);
    ka_record_add(run->record, "preflight",
                  json_pack("{s:O, s:O, s:O?, s:O}", "shapes", run->shapes, "skipped", run->skipped,
                            "outputs", run->outputs, "oracles", run->oracles));
    ka_log(KA_LOG_INFO, "%s: forward and oracle agree on %zu shapes of the sweep and %zu hidden ones",
           run->name, json_array_size(run->shapes) - hidden, hidden);
    if (!survived(run, hidden))
        return;
    ka_expected_prepare(run);
    ka_run_post_type(run, KA_EV_OK);
}

static bool begin_draft(struct ka_run *run)
{
    ka_run_draft_ahead(run);
    return false;
}

static bool (*const begin[KA_STAGE_COUNT])(struct ka_run *run) = {
    [KA_STAGE_SWEEP] = ka_preflight_sweep,
    [KA_STAGE_DRAFT] = begin_draft,
    [KA_STAGE_HIDDEN] = ka_preflight_hidden,
    [KA_STAGE_LONG] = ka_preflight_long,
    [KA_STAGE_DIFFERENCES] = ka_preflight_differences,
    [KA_STAGE_INPUTS] = ka_preflight_inputs,
    [KA_STAGE_SCALARS] = ka_preflight_scalars,
};

/* A part may end the run where it begins (no child can be started): then nothing here is left to look at. */
static void go_on(struct ka_run *run)
{
    struct ka_preflight *preflight = run->preflight;
    bool gone = false;
    preflight->gone = &gone;
    for (enum ka_stage stage; (stage = ka_stages_next(&preflight->stages)) < KA_STAGE_COUNT;) {
        bool under_way = begin[stage](run);
        if (gone)
            return;
        if (!under_way)
            ka_stages_end(&preflight->stages, stage);
    }
    preflight->gone = NULL;
    if (ka_stages_through(&preflight->stages))
        finish(run);
}

static void on_ended(struct ka_run *run, enum ka_stage stage)
{
    ka_stages_end(&run->preflight->stages, stage);
    go_on(run);
}

void ka_run_preflight(struct ka_run *run)
{
    if (ka_run_knows(run)) {
        ka_run_recall_shapes(run);
        finish(run);
        return;
    }
    json_decref(run->shapes);
    run->shapes = json_array();
    json_array_clear(run->skipped);
    json_object_clear(run->oracles);
    json_decref(run->outputs);
    run->outputs = NULL;
    json_array_clear(run->grads);
    ka_run_preflight_free(run);
    ka_expected_withdraw(run);
    run->preflight = ka_calloc(1, sizeof(*run->preflight));
    run->preflight->ended = on_ended;
    go_on(run);
}
