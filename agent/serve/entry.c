/* The value of a run that was taken on. Knows no queue and no disk. */
#include "entry.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/core/fields.h"
#include "base/each.h"

static const char *const states[KA_ENTRY_STATES] = {"queued", "running", "done", "failed", "cancelled"};

const char *ka_entry_state_name(enum ka_entry_state state)
{
    return states[state];
}

enum ka_entry_state ka_entry_state_of(const char *name)
{
    size_t i = 0;
    while (i < KA_ENTRY_STATES && strcmp(states[i], name) != 0)
        i++;
    return (enum ka_entry_state)i;
}

bool ka_entry_ended(const struct ka_entry *entry)
{
    return entry->state != KA_ENTRY_QUEUED && entry->state != KA_ENTRY_RUNNING;
}

bool ka_entry_is_id(const char *text, size_t len)
{
    return len == KA_ENTRY_ID - 1 && strspn(text, "0123456789abcdef") >= len;
}

void ka_entry_hash(const char *source, const json_t *options, char out[static KA_HASH_HEX])
{
    KA_AUTO_FREE char *sorted = json_dumps(options, JSON_COMPACT | JSON_SORT_KEYS);
    KA_AUTO_BUF struct ka_buf both = {0};
    ka_buf_printf(&both, "%zu %s", strlen(source), source);
    ka_buf_puts(&both, sorted);
    ka_hash_hex(both.data, both.len, out);
}

struct ka_entry *ka_entry_new(const char *name, const char *source, json_t *options, int priority)
{
    struct ka_entry *entry = ka_calloc(1, sizeof(*entry));
    snprintf(entry->id, sizeof(entry->id), "%016llx", (unsigned long long)ka_random_u64());
    ka_entry_hash(source, options, entry->hash);
    entry->name = ka_strdup(name);
    entry->options = json_incref(options);
    entry->priority = priority;
    entry->attempt = 1;
    return entry;
}

void ka_entry_free(struct ka_entry *entry)
{
    if (!entry)
        return;
    free(entry->name);
    free(entry->verdict);
    free(entry->reason);
    free(entry->folder);
    free(entry->gpu);
    json_decref(entry->options);
    free(entry);
}

void ka_entry_spent(struct ka_entry *entry, const json_t *result)
{
    const json_t *llm = json_object_get(result, "llm");
    entry->tokens_in = ka_number_of(llm, "tokens_in", 0);
    entry->tokens_out = ka_number_of(llm, "tokens_out", 0);
    entry->cost = ka_number_of(llm, "cost", 0);
    entry->gpu_seconds = entry->child_failures = 0;
    bool gpu = ka_is_text(result, "device", "cuda");
    KA_EACH(json_object_get(result, "children"), i, child) {
        entry->child_failures +=
            ka_is_text(child, "status", "died") || ka_is_text(child, "status", "timeout");
        entry->gpu_seconds += gpu ? ka_number_of(child, "end", 0) - ka_number_of(child, "start", 0) : 0;
    }
}

static void put_time(json_t *doc, const char *name, double seconds)
{
    json_object_set_new(doc, name, seconds > 0 ? json_real(seconds) : json_null());
}

json_t *ka_entry_json(const struct ka_entry *entry)
{
    json_t *doc = json_pack("{s:s, s:s, s:s, s:s, s:i, s:i, s:i, s:O}", "id", entry->id, "name", entry->name,
                            "hash", entry->hash, "state", states[entry->state], "priority", entry->priority,
                            "attempt", entry->attempt, "starts", entry->starts, "options", entry->options);
    put_time(doc, "submitted", entry->submitted);
    put_time(doc, "started", entry->started);
    put_time(doc, "ended", entry->ended);
    put_time(doc, "not_before", entry->state == KA_ENTRY_QUEUED ? entry->not_before : 0);
    bool known = entry->state == KA_ENTRY_DONE || entry->state == KA_ENTRY_FAILED;
    json_object_set_new(doc, "exit_code", known ? json_integer(entry->exit_code) : json_null());
    json_object_set_new(doc, "tokens_in", json_integer((json_int_t)entry->tokens_in));
    json_object_set_new(doc, "tokens_out", json_integer((json_int_t)entry->tokens_out));
    json_object_set_new(doc, "cost", json_real(entry->cost));
    json_object_set_new(doc, "gpu_seconds", json_real(entry->gpu_seconds));
    json_object_set_new(doc, "gpu", entry->gpu ? json_string(entry->gpu) : json_null());
    json_object_set_new(doc, "child_failures", json_integer(entry->child_failures));
    json_object_set_new(doc, "verdict", entry->verdict ? json_string(entry->verdict) : json_null());
    json_object_set_new(doc, "reason", entry->reason ? json_string(entry->reason) : json_null());
    json_object_set_new(doc, "folder", entry->folder ? json_string(entry->folder) : json_null());
    return doc;
}

struct ka_entry *ka_entry_read(const char *id, const json_t *doc)
{
    const char *hash = ka_text_of(doc, "hash", ""), *name = ka_text_of(doc, "name", NULL);
    enum ka_entry_state state = ka_entry_state_of(ka_text_of(doc, "state", ""));
    json_t *options = json_object_get(doc, "options");
    if (!ka_entry_is_id(id, strlen(id)) || !name || strlen(hash) != KA_HASH_HEX - 1 ||
        state == KA_ENTRY_STATES || !json_is_object(options))
        return NULL;
    struct ka_entry *entry = ka_calloc(1, sizeof(*entry));
    snprintf(entry->id, sizeof(entry->id), "%s", id);
    snprintf(entry->hash, sizeof(entry->hash), "%s", hash);
    entry->name = ka_strdup(name);
    entry->options = json_incref(options);
    entry->state = state;
    entry->priority = (int)ka_number_of(doc, "priority", 0);
    entry->attempt = (int)ka_number_of(doc, "attempt", 1);
    entry->starts = (int)ka_number_of(doc, "starts", 0);
    entry->submitted = ka_number_of(doc, "submitted", 0);
    entry->started = ka_number_of(doc, "started", 0);
    entry->ended = ka_number_of(doc, "ended", 0);
    entry->not_before = ka_number_of(doc, "not_before", 0);
    entry->exit_code = (int)ka_number_of(doc, "exit_code", 0);
    entry->tokens_in = ka_number_of(doc, "tokens_in", 0);
    entry->tokens_out = ka_number_of(doc, "tokens_out", 0);
    entry->cost = ka_number_of(doc, "cost", 0);
    entry->gpu_seconds = ka_number_of(doc, "gpu_seconds", 0);
    entry->gpu = ka_strdup(ka_text_of(doc, "gpu", NULL));
    entry->child_failures = (int)ka_number_of(doc, "child_failures", 0);
    entry->verdict = ka_strdup(ka_text_of(doc, "verdict", NULL));
    entry->reason = ka_strdup(ka_text_of(doc, "reason", NULL));
    entry->folder = ka_strdup(ka_text_of(doc, "folder", NULL));
    return entry;
}
