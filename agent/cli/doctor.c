/* What this machine gives: the jail is asked by running something in it, Python likewise. */
#include "doctor.h"

#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "agent/app/app.h"
#include "agent/app/endpoints.h"
#include "agent/app/gpus.h"
#include "agent/app/jail_layers.h"
#include "agent/app/opts.h"
#include "agent/app/python.h"
#include "agent/core/fields.h"
#include "agent/disk/cache.h"
#include "agent/io/child.h"
#include "agent/io/machine.h"
#include "base/base.h"
#include "base/files.h"
#include "doctor_endpoints.h"
#include "show.h"

#define OUTPUT_MAX 65536
#define EXIT_USAGE 2
#define EXIT_LAYER 6

static const char versions_script[] = "import importlib, json, platform, sys\n"
                                      "sys.path = [path for path in sys.path if path]\n"
                                      "out = {'python': platform.python_version()}\n"
                                      "for name in ('torch', 'triton', 'numpy'):\n"
                                      "    try:\n"
                                      "        out[name] = str(importlib.import_module(name).__version__)\n"
                                      "    except Exception as exc:\n"
                                      "        out[name] = None\n"
                                      "        out['why_' + name] = f'{type(exc).__name__}: {exc}'[:300]\n"
                                      "print(json.dumps(out))\n";

struct doctor {
    bool json;
    struct ka_opts opts;
    struct ka_endpoints endpoints;
    json_t *asked; /* what the endpoints said; NULL: none is configured */
    char *jail, *scratch, *share, *cache;
    struct ka_pythons pythons;
    const struct ka_python *python; /* the one that was chosen; NULL: none */
    struct ka_machine machine;
    size_t cache_entries;
    uint64_t cache_bytes;
    json_t *layers;   /* the jail's report; NULL: it said nothing */
    json_t *versions; /* NULL: Python could not be run */
    struct ka_err trouble;
};

/* ---- examining ---- */

/* Imports may print before the line that we want: it is the last. */
static void examine_python(struct doctor *d)
{
    const char *program[] = {d->python->path, "-c", versions_script, NULL};
    KA_AUTO_BUF struct ka_buf out = {.max = OUTPUT_MAX}, report = {.max = OUTPUT_MAX};
    int rc = ka_layers_run(d->jail, d->scratch, program, &out, &report);
    while (out.len && out.data[out.len - 1] == '\n')
        out.data[--out.len] = '\0';
    const char *line = out.len ? strrchr(out.data, '\n') : NULL;
    d->versions = rc ? NULL : json_loads(line ? line + 1 : ka_buf_str(&out), 0, NULL);
    if (!d->versions)
        ka_fail(&d->trouble, 0, "%s ended with code %d in the jail: %.300s", d->python->path, rc,
                ka_buf_str(&out));
}

/* ---- judging ---- */

static bool python_is_usable(const struct doctor *d)
{
    return d->versions && ka_python_fits(d->versions, NULL);
}

static size_t count_gpus(void)
{
    json_auto_t *gpus = ka_gpus_find();
    return json_array_size(gpus);
}

static const char *find_compiler(void)
{
    static const char *const names[] = {"/usr/bin/gcc", "/usr/bin/clang", "/usr/bin/cc",
                                        "/usr/local/bin/gcc"};
    for (size_t i = 0; i < KA_COUNT(names); i++)
        if (access(names[i], X_OK) == 0)
            return names[i];
    return NULL;
}

static int exit_code(const struct doctor *d)
{
    if (!d->layers)
        return EXIT_USAGE;
    if (strcmp(ka_layers_level(d->layers), "missing") == 0)
        return EXIT_LAYER;
    return python_is_usable(d) ? 0 : EXIT_USAGE;
}

/* ---- saying it ---- */

static json_t *pythons_as_json(const struct doctor *d)
{
    json_t *list = json_array();
    for (size_t i = 0; i < d->pythons.count; i++) {
        const struct ka_python *p = &d->pythons.list[i];
        json_t *entry =
            json_pack("{s:s, s:s, s:s, s:b, s:b, s:s?}", "path", p->path, "found_at", p->place, "source",
                      p->source, "chosen", p == d->python, "usable", !p->lacks, "lacks", p->lacks);
        static const char *const names[] = {"python", "torch", "triton", "numpy"};
        for (size_t k = 0; k < KA_COUNT(names); k++) {
            json_t *version = json_object_get(p->versions, names[k]);
            json_object_set_new(entry, names[k], version ? json_incref(version) : json_null());
        }
        json_array_append_new(list, entry);
    }
    return list;
}

static json_t *machine_as_json(const struct ka_machine *m)
{
    return json_pack("{s:I, s:I, s:i, s:I, s:i}", "memory_bytes", (json_int_t)m->memory_bytes,
                     "memory_available_bytes", (json_int_t)m->memory_available_bytes, "cpus", (int)m->cpus,
                     "host_memory_bytes", (json_int_t)m->host_memory_bytes, "host_cpus", (int)m->host_cpus);
}

static void print_json(const struct doctor *d)
{
    const char *compiler = find_compiler();
    json_auto_t *doc = json_pack(
        "{s:b, s:s, s:s?, s:O?, s:o, s:s?, s:O?, s:b, s:o, s:o, s:I, s:s?, s:{s:s?, s:I, s:I}, s:O?, s:s, "
        "s:s}",
        "ok", exit_code(d) == 0, "sandbox", ka_layers_level(d->layers), "jail", d->jail, "layers", d->layers,
        "lost", ka_layers_lost(d->layers), "python", d->python ? d->python->path : NULL, "versions",
        d->versions, "python_ok", python_is_usable(d), "pythons", pythons_as_json(d), "machine",
        machine_as_json(&d->machine), "gpus", (json_int_t)count_gpus(), "compiler", compiler, "cache",
        "folder", d->cache, "entries", (json_int_t)d->cache_entries, "bytes", (json_int_t)d->cache_bytes,
        "endpoints", d->asked, "model", d->opts.run.model, "trouble", d->trouble.msg);
    ka_show_json(doc, JSON_INDENT(2));
}

static void print_layers(const struct doctor *d)
{
    size_t count;
    const struct ka_layer *layers = ka_layers_list(&count);
    printf("sandbox    %s\n", ka_layers_level(d->layers));
    for (size_t i = 0; d->layers && i < count; i++) {
        const char *name = layers[i].name;
        if (ka_layers_hold(d->layers, name))
            printf("  %-9s yes\n", name);
        else
            printf("  %-9s no: %s\n            lost: %s\n", name,
                   ka_text_of(json_object_get(d->layers, "why"), name, "unknown"), layers[i].lost);
    }
    if (d->layers && ka_layers_hold(d->layers, "pid") &&
        !json_is_true(json_object_get(d->layers, "fresh_proc")))
        puts("  /proc     shared with this machine; only a child's own part is readable");
}

static void print_versions(const struct doctor *d)
{
    static const char *const names[] = {"torch", "triton", "numpy"};
    for (size_t i = 0; d->versions && i < KA_COUNT(names); i++) {
        char key[32];
        snprintf(key, sizeof(key), "why_%s", names[i]);
        const char *version = ka_text_of(d->versions, names[i], NULL);
        printf("  %-9s %s%s\n", names[i],
               version ? version : "none: ", version ? "" : ka_text_of(d->versions, key, "unknown"));
    }
}

/* What was found besides, in the order in which it would be taken. */
static void print_other(const struct ka_python *p)
{
    const char *names[] = {"python", "torch", "triton"}, *comma = "";
    printf("  found     %s (%s): ", p->path, p->source);
    if (p->lacks)
        printf("%s%s", p->versions ? "lacks " : "", p->lacks);
    for (size_t i = 0; !p->lacks && i < KA_COUNT(names); i++) {
        printf("%s%s %s", comma, names[i], json_string_value(json_object_get(p->versions, names[i])));
        comma = ", ";
    }
    putchar('\n');
}

static void print_python(const struct doctor *d)
{
    if (d->python)
        printf("python     %s (%s)", d->python->path, d->python->source);
    else
        printf("python     none that can be used; --python PATH names another");
    if (d->versions)
        printf(" %s", json_string_value(json_object_get(d->versions, "python")));
    puts(!d->python || python_is_usable(d)
             ? ""
             : ": cannot be used in the jail (needs Python 3.11, torch 2.6, triton 3.2 and numpy)");
    print_versions(d);
    for (size_t i = 0; i < d->pythons.count; i++)
        if (&d->pythons.list[i] != d->python)
            print_other(&d->pythons.list[i]);
}

/* Both numbers where this process gets less than there is. */
static void print_machine(const struct ka_machine *m)
{
    const double gib = 1 << 30;
    printf("memory     %.1f GiB", (double)m->memory_bytes / gib);
    if (m->memory_bytes < m->host_memory_bytes)
        printf(" (a control group's limit; the machine has %.1f)", (double)m->host_memory_bytes / gib);
    printf(", %.1f available\nprocessors %u", (double)m->memory_available_bytes / gib, m->cpus);
    if (m->cpus < m->host_cpus)
        printf(" (affinity or a control group's quota; the machine has %u)", m->host_cpus);
    putchar('\n');
}

static void print_text(const struct doctor *d)
{
    size_t gpus = count_gpus();
    const char *compiler = find_compiler();
    print_layers(d);
    print_python(d);
    print_machine(&d->machine);
    if (gpus)
        printf("gpu        %zu NVIDIA device%s\n", gpus, gpus == 1 ? "" : "s");
    else
        puts("gpu        none: kernels run in Triton's interpreter, and no timing is claimed");
    if (compiler)
        printf("compiler   %s\n", compiler);
    else
        puts("compiler   none: Triton cannot launch kernels on a GPU without one");
    if (d->cache)
        printf("cache      %s (%zu compiled kernels, %.1f MB)\n", d->cache, d->cache_entries,
               (double)d->cache_bytes / (1 << 20));
    else
        puts("cache      none: neither XDG_CACHE_HOME nor HOME is set, kernels are compiled anew each time");
    if (d->asked)
        ka_doctor_print_endpoints(d->asked, d->opts.run.model);
    else
        puts("endpoint   none: neither --base-url nor a key is set, and no model is asked");
    if (d->trouble.msg[0])
        printf("trouble    %s\n", d->trouble.msg);
}

/* The options of a run, of which those count that say where things are. */
static int parse(struct doctor *d, int argc, char **argv, struct ka_err *err)
{
    int count;
    int rc = ka_opts_init(&d->opts, ka_opts_config_path(argc, argv), err);
    if (rc == 0)
        rc = ka_opts_parse(&d->opts, argc - 1, argv + 1, NULL, 0, &count, err);
    d->json = d->opts.json;
    return rc ? rc : ka_endpoints_read(d->opts.base_url, d->opts.api_key_file, &d->endpoints, err);
}

/* The same choice as a run makes, and what else there is. */
static void choose_python(struct doctor *d)
{
    d->share = ka_app_find_share(NULL);
    ka_pythons_find(d->opts.python, d->share, true, &d->pythons);
    if (d->pythons.chosen < d->pythons.count)
        d->python = &d->pythons.list[d->pythons.chosen];
}

int ka_doctor_main(int argc, char **argv)
{
    struct doctor d = {.json = false};
    char scratch[] = "/tmp/kernel-agent-doctor-XXXXXX";
    struct ka_err err;
    if (parse(&d, argc, argv, &err) != 0) {
        fprintf(stderr,
                "%s\nusage: kernel-agent doctor [--json] [--python PATH] [--base-url URL] [--model NAME]\n",
                err.msg);
        ka_opts_free(&d.opts);
        return EXIT_USAGE;
    }
    choose_python(&d);
    ka_machine_read(&d.machine);
    d.cache = ka_user_cache(KA_CACHE_NAME);
    if (d.cache)
        ka_cache_measure(d.cache, &d.cache_entries, &d.cache_bytes);
    d.scratch = mkdtemp(scratch);
    if (!d.scratch)
        ka_fail(&d.trouble, 0, "%s: %s", scratch, strerror(errno));
    else if (ka_child_find_program("KA_JAIL", "ka-jail", &d.jail, &d.trouble) == 0) {
        d.layers = ka_layers_ask(d.jail, d.scratch, &d.trouble);
        if (d.layers && d.python)
            examine_python(&d);
    }
    if (d.endpoints.named)
        d.asked = ka_doctor_endpoints(&d.endpoints, d.opts.run.model);
    int code = exit_code(&d);
    if (d.json)
        print_json(&d);
    else
        print_text(&d);
    if (d.scratch)
        ka_rmtree(d.scratch, NULL);
    json_decref(d.layers);
    json_decref(d.versions);
    json_decref(d.asked);
    ka_endpoints_free(&d.endpoints);
    ka_opts_free(&d.opts);
    free(d.jail);
    ka_pythons_free(&d.pythons);
    free(d.share);
    free(d.cache);
    return code;
}
