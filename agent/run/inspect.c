/* What the user's file is: operation inspect. */
#include "inspect.h"

#include "base/log.h"
#include "events.h"
#include "known.h"
#include "operations.h"

/* A module with several functions: the operations after this one, of which one reads only text, are about
 * the same of them. */
static void settle_function(struct ka_run *run)
{
    const json_t *stub = json_object_get(run->inspect, "stub");
    const char *name = json_string_value(json_object_get(stub, "name"));
    if (json_array_size(json_object_get(run->inspect, "functions")) > 1 && name)
        ka_settings_set(&run->settings.function, name);
}

static void inspected(struct ka_run *run)
{
    settle_function(run);
    ka_run_put(run, "inspect", run->inspect);
    ka_record_add(run->record, "inspected", json_deep_copy(run->inspect));
    ka_run_post_type(run, KA_EV_OK);
}

static void on_inspected(struct ka_run *run, const struct ka_op_result *result)
{
    if (result->status != KA_OP_OK) {
        ka_run_op_failed(run, result);
        return;
    }
    json_decref(run->inspect);
    run->inspect = json_deep_copy(result->doc);
    inspected(run);
}

void ka_run_inspect(struct ka_run *run)
{
    if (ka_run_knows(run)) {
        ka_run_recall_inspect(run);
        inspected(run);
        return;
    }
    ka_log_progress(run->name, "inspect");
    ka_run_op(run, "inspect", run->work_forward, NULL, on_inspected);
}
