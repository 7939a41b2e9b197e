/* The machine as a document, of what others know. */
#include "about.h"

#include <stdlib.h>
#include <string.h>

#include "agent/app/gpus.h"
#include "agent/app/jail_layers.h"
#include "agent/io/cards.h"
#include "agent/io/child.h"
#include "agent/io/machine.h"
#include "agent/io/url.h"
#include "base/files.h"
#include "base/log.h"
#include "rag/store.h"

static json_t *ask_sandbox(const struct ka_app *app)
{
    char scratch[] = "/tmp/kernel-agent-serve-XXXXXX";
    struct ka_err err = {{0}};
    json_auto_t *report = NULL;
    if (mkdtemp(scratch)) {
        report = ka_layers_ask(ka_children_jail(app->children), scratch, &err);
        ka_rmtree(scratch, NULL);
    }
    if (!report)
        ka_log(KA_LOG_WARN, "the jail's layers are not known: %s", err.msg);
    return json_pack("{s:s, s:O?, s:O?, s:o}", "level", ka_layers_level(report), "layers",
                     json_object_get(report, "layers"), "why", json_object_get(report, "why"), "lost",
                     ka_layers_lost(report));
}

static json_t *endpoint_of(const struct ka_app *app, const struct ka_opts *opts)
{
    if (!app->llm)
        return json_null();
    json_t *urls = json_array();
    for (size_t i = 0; i < app->endpoints.count; i++) {
        KA_AUTO_FREE char *shown = ka_url_shown(app->endpoints.list[i].base_url);
        json_array_append_new(urls, json_string(shown ? shown : ""));
    }
    return json_pack("{s:o, s:s}", "urls", urls, "model", opts->run.model);
}

static json_t *count_pairs(const struct ka_app *app)
{
    size_t count;
    return app->store && ka_store_count(app->store, &count, NULL) == 0 ? json_integer((json_int_t)count)
                                                                       : json_null();
}

/* Which model it is can be told of a number, which counts as the devices do. */
static json_t *slots(const struct ka_app *app, const json_t *gpus)
{
    json_t *list = json_array();
    for (size_t i = 0; app->cards && i < ka_cards_count(app->cards); i++) {
        struct ka_card_use use;
        const char *name = ka_cards_name(app->cards, i);
        char *end = NULL;
        size_t number = name ? strtoul(name, &end, 10) : 0;
        json_t *model = end && *end ? NULL : json_array_get(gpus, number);
        ka_cards_look(app->cards, i, &use);
        json_array_append_new(list, json_pack("{s:s, s:O?, s:i, s:i, s:b}", "gpu", name ? name : "0", "model",
                                              model, "runs", (int)use.runs, "children", (int)use.children,
                                              "benchmark", (int)use.alone));
    }
    return list;
}

json_t *ka_about_fixed(const struct ka_app *app, const struct ka_opts *opts)
{
    return json_pack("{s:s, s:s, s:o, s:o, s:{s:s, s:O?}, s:o, s:i, s:o}", "version", KA_VERSION, "device",
                     app->gpu ? "cuda" : "cpu", "gpus", ka_gpus_find(), "sandbox", ask_sandbox(app), "python",
                     "path", app->python, "versions", app->python_versions, "endpoint",
                     endpoint_of(app, opts), "jobs", opts->jobs, "pairs", count_pairs(app));
}

json_t *ka_about_now(const struct ka_app *app, const json_t *fixed)
{
    struct ka_machine machine;
    ka_machine_read(&machine);
    json_t *doc = json_copy((json_t *)fixed);
    json_object_set_new(doc, "cpus", json_integer(machine.cpus));
    json_object_set_new(doc, "memory_bytes", json_integer((json_int_t)machine.memory_bytes));
    json_object_set_new(doc, "memory_available_bytes",
                        json_integer((json_int_t)machine.memory_available_bytes));
    json_object_set_new(doc, "slots", slots(app, json_object_get(fixed, "gpus")));
    return doc;
}
