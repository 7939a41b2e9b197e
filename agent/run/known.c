/* Several pairs of one forward, checked one after the other: what the forward is and on which shapes it
 * agrees with the oracle is found out for the first of them. Hidden shapes are then the command's, not the
 * check's; seeds stay each check's own. */
#include "known.h"

#include <stdlib.h>
#include <string.h>

#include "internal.h"

struct ka_known {
    json_t *last; /* NULL: nothing yet */
};

struct ka_known *ka_known_new(void)
{
    return ka_calloc(1, sizeof(struct ka_known));
}

void ka_known_free(struct ka_known *known)
{
    if (known)
        json_decref(known->last);
    free(known);
}

bool ka_run_knows(const struct ka_run *run)
{
    const json_t *last = run->known ? run->known->last : NULL;
    const char *forward = json_string_value(json_object_get(last, "forward"));
    const char *function = json_string_value(json_object_get(last, "function"));
    const char *own = run->settings.function ? run->settings.function : "";
    return run->given && forward && strcmp(forward, run->forward) == 0 && strcmp(function, own) == 0;
}

void ka_run_remember(const struct ka_run *run)
{
    if (!run->known || !run->given || ka_run_knows(run))
        return;
    const char *function = run->settings.function ? run->settings.function : "";
    json_t *seen =
        json_pack("{s:s, s:s, s:O, s:O, s:O, s:O?, s:O, s:O, s:b}", "forward", run->forward, "function",
                  function, "inspect", run->inspect, "shapes", run->shapes, "skipped", run->skipped,
                  "outputs", run->outputs, "grads", run->grads, "oracles", run->oracles, "half", run->half);
    json_decref(run->known->last);
    run->known->last = json_deep_copy(seen);
    json_decref(seen);
}

static void recall(const struct ka_run *run, const char *name, json_t **into)
{
    json_decref(*into);
    *into = json_deep_copy(json_object_get(run->known->last, name));
}

void ka_run_recall_inspect(struct ka_run *run)
{
    recall(run, "inspect", &run->inspect);
}

void ka_run_recall_shapes(struct ka_run *run)
{
    recall(run, "shapes", &run->shapes);
    recall(run, "skipped", &run->skipped);
    recall(run, "outputs", &run->outputs);
    recall(run, "grads", &run->grads);
    recall(run, "oracles", &run->oracles);
    run->half = json_is_true(json_object_get(run->known->last, "half"));
}
