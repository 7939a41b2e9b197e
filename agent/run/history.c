/* The list of attempts. Knows its order, not what an entry says. */
#include "history.h"

#include "agent/core/direction.h"
#include "events.h"

static bool comes_after(const json_t *entry, int turn, int slot)
{
    return json_integer_value(json_object_get(entry, "turn")) == turn &&
           json_integer_value(json_object_get(entry, "slot")) > slot;
}

void ka_run_history_add(struct ka_run *run, int slot, json_t *entry)
{
    const struct ka_job *job = &run->job;
    json_object_set_new(entry, "turn", json_integer(job->turn));
    json_object_set_new(entry, "slot", json_integer(slot));
    if (job->slot_count > 1) {
        KA_AUTO_BUF struct ka_buf direction = {0};
        ka_direction(job->phase, job->turn, slot, &direction);
        json_object_set_new(entry, "direction", json_string(ka_buf_str(&direction)));
    }
    size_t at = json_array_size(run->history);
    while (at && comes_after(json_array_get(run->history, at - 1), job->turn, slot))
        at--;
    json_array_insert_new(run->history, at, entry);
    ka_run_put(run, "history", run->history);
}
