/* Building and closing what all runs share. Knows settings and paths, not phases. */
#include "app.h"

#include <errno.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "agent/disk/cache.h"
#include "agent/io/cards.h"
#include "agent/io/child.h"
#include "agent/io/llm.h"
#include "agent/io/loop.h"
#include "agent/io/machine.h"
#include "base/files.h"
#include "base/log.h"
#include "gpus.h"
#include "opts.h"
#include "python.h"
#include "rag/lessons.h"
#include "rag/search.h"
#include "rag/store.h"

#define GPU_CHILDREN 12 /* at a time, on one */
#define GPU_FAN_OF_SEVERAL 3

static bool holds_package(const char *share)
{
    struct stat st;
    KA_AUTO_FREE char *package = ka_path_join(share, "sandbox/kernel_agent");
    return stat(package, &st) == 0 && S_ISDIR(st.st_mode);
}

char *ka_app_find_share(struct ka_err *err)
{
    static const char *const places[] = {".", "..", "../..", "../share/kernel-agent"};
    const char *given = getenv("KA_SHARE");
    if (given && *given && holds_package(given))
        return ka_path_real(given, err);
    if (given && *given) {
        ka_fail(err, -ENOENT, "KA_SHARE=%s holds no sandbox/kernel_agent", given);
        return NULL;
    }
    KA_AUTO_FREE char *folder = ka_program_folder();
    if (!folder) {
        ka_fail(err, -errno, "/proc/self/exe: %s", strerror(errno));
        return NULL;
    }
    for (size_t i = 0; i < KA_COUNT(places); i++) {
        KA_AUTO_FREE char *path = ka_path_join(folder, places[i]);
        if (holds_package(path))
            return ka_path_real(path, err);
    }
    ka_fail(err, -ENOENT,
            "cannot find sandbox/kernel_agent near %s; set KA_SHARE to the folder that holds it", folder);
    return NULL;
}

/* Where the pair store is by default; free() it. */
static char *store_path(const struct ka_opts *opts, const char *share)
{
    if (opts->store)
        return ka_strdup(opts->store);
    const char *data = getenv("XDG_DATA_HOME");
    char *personal = data && *data ? ka_path_join(data, "kernel-agent/pairs.db") : NULL;
    if (personal && access(personal, R_OK) == 0)
        return personal;
    free(personal);
    char *built = ka_path_join(share, "build/pairs.db");
    if (access(built, R_OK) == 0)
        return built;
    free(built);
    return ka_path_join(share, "pairs.db");
}

static int find_python(struct ka_app *app, const char *wanted, struct ka_err *err)
{
    struct ka_pythons pythons;
    ka_pythons_find(wanted, app->share, false, &pythons);
    int rc = 0;
    if (pythons.chosen < pythons.count) {
        const struct ka_python *p = &pythons.list[pythons.chosen];
        app->python = ka_strdup(p->path);
        app->python_versions = json_incref(p->versions);
        ka_log(KA_LOG_INFO, "python: %s (%s), torch %s, triton %s", p->path, p->source,
               json_string_value(json_object_get(p->versions, "torch")),
               json_string_value(json_object_get(p->versions, "triton")));
    } else {
        ka_pythons_complain(&pythons, err);
        rc = -ENOENT;
    }
    ka_pythons_free(&pythons);
    return rc;
}

const json_t *ka_app_elsewhere(const struct ka_app *app)
{
    return json_object_get(app->python_versions, "elsewhere");
}

/* What `auto` means depends on whether there is anything to ask. */
static bool asks_endpoint(const struct ka_app *app, const struct ka_opts *opts)
{
    return strcmp(opts->run.backend, "openai") == 0 ||
           (strcmp(opts->run.backend, "auto") == 0 && app->endpoints.named);
}

static int open_llm(struct ka_app *app, const struct ka_opts *opts, int runs, struct ka_err *err)
{
    if (!asks_endpoint(app, opts))
        return 0;
    struct ka_llm_config config;
    ka_llm_config_init(&config);
    memcpy(config.endpoints, app->endpoints.list, sizeof(config.endpoints));
    config.endpoint_count = app->endpoints.count;
    config.total_ms = (long)opts->llm_timeout * 1000;
    unsigned at_once = (unsigned)runs * (unsigned)opts->run.candidates;
    if (config.max_concurrent < at_once)
        config.max_concurrent = at_once;
    return ka_llm_new(app->loop, &config, &app->llm, err);
}

/* A missing default store is no error: the run goes on without similar pairs, and says so. */
static int open_store(struct ka_app *app, const struct ka_opts *opts, struct ka_err *err)
{
    if (opts->run.no_retrieval)
        return 0;
    KA_AUTO_FREE char *path = store_path(opts, app->share);
    struct ka_err why;
    int rc = ka_store_open(path, KA_STORE_READ, &app->store, &why);
    if (rc == 0)
        rc = ka_search_open(app->store, &app->search, &why);
    if (rc != -ENOENT || opts->store)
        return rc ? ka_fail(err, rc, "%s", why.msg) : 0;
    ka_log(KA_LOG_WARN,
           "no pair store at %s: going on without similar pairs (kernel-agent store build dataset)", path);
    return 0;
}

/* Numbers that are not CUDA_VISIBLE_DEVICES' own are those of nvidia-smi. */
static int open_cards(struct ka_app *app, const struct ka_opts *opts, unsigned cpus, struct ka_err *err)
{
    KA_AUTO_FREE char *names = ka_gpus_names(opts->gpus);
    if (opts->gpus || !getenv("CUDA_VISIBLE_DEVICES"))
        setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID", 0);
    return ka_cards_new(names, cpus < GPU_CHILDREN ? cpus : GPU_CHILDREN, &app->cards, err);
}

/* Each child has a context of its own: they are made one after another, and the GPU goes from one to the
 * next. */
static size_t gpu_fan(const struct ka_app *app, unsigned cpus, int runs)
{
    size_t most = cpus < GPU_CHILDREN ? cpus : GPU_CHILDREN;
    size_t width = (most + 1) / 2; /* the candidate and the oracle at a time */
    bool shared = (size_t)runs > ka_cards_count(app->cards);
    return shared && width > GPU_FAN_OF_SEVERAL ? GPU_FAN_OF_SEVERAL : width;
}

static int open_children(struct ka_app *app, const struct ka_opts *opts, int runs, struct ka_err *err)
{
    struct ka_machine machine;
    ka_machine_read(&machine);
    if (opts->children)
        machine.cpus = (unsigned)opts->children;
    struct ka_children_conf config = {.max_running = machine.cpus, .keep_bytecode = !opts->no_compile_cache};
    app->fan_width = machine.cpus;
    if (app->gpu) {
        double mb = (double)machine.memory_bytes / (1 << 20);
        app->gpu_child =
            (struct ka_app_limits){.mem_mb = (unsigned)(mb / 2), .scratch_mb = (unsigned)(mb / 4)};
        int rc = open_cards(app, opts, machine.cpus, err);
        if (rc)
            return rc;
        config.gpu = true;
        config.cards = app->cards;
        config.child_mem_mb = app->gpu_child.mem_mb;
        config.total_mem_mb = (unsigned)(mb * 0.9);
        app->gpu_fan_width = gpu_fan(app, machine.cpus, runs);
    }
    return ka_children_new(app->loop, &config, &app->children, err);
}

static bool uses_gpu(const struct ka_opts *opts)
{
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    bool hidden = visible && !opts->gpus && (!*visible || *visible == '-');
    if (strcmp(opts->run.device, "auto") == 0)
        return access("/dev/nvidiactl", F_OK) == 0 && !hidden;
    return strcmp(opts->run.device, "cuda") == 0;
}

int ka_app_open(struct ka_app *app, const struct ka_opts *opts, bool with_model, int runs, struct ka_err *err)
{
    memset(app, 0, sizeof(*app));
    app->loop = ka_loop_new();
    app->gpu = uses_gpu(opts);
    app->cache_bytes = opts->no_compile_cache ? 0 : (uint64_t)opts->compile_cache_mb << 20;
    app->share = ka_app_find_share(err);
    if (!app->share)
        return 2;
    app->package_dir = ka_path_join(app->share, "sandbox");
    if (find_python(app, opts->python, err))
        return 2;
    app->lessons = ka_user_data(KA_LESSONS_NAME);
    if (ka_endpoints_read(opts->base_url, opts->api_key_file, &app->endpoints, err))
        return 2;
    if (with_model && (open_llm(app, opts, runs, err) || open_store(app, opts, err)))
        return 2;
    return open_children(app, opts, runs, err) ? 2 : 0;
}

void ka_app_close(struct ka_app *app)
{
    if (app->llm)
        ka_llm_close(app->llm, NULL, NULL);
    if (app->children)
        ka_children_close(app->children);
    ka_loop_run(app->loop);
    unsigned left = ka_loop_close(app->loop);
    if (left)
        ka_log(KA_LOG_ERROR, "internal: %u handles left open at exit", left);
    ka_cards_free(app->cards);
    ka_cache_close(app->cache);
    ka_search_close(app->search);
    ka_store_close(app->store);
    ka_endpoints_free(&app->endpoints);
    free(app->lessons);
    free(app->share);
    free(app->package_dir);
    free(app->python);
    json_decref(app->python_versions);
}

int ka_settings_fit(const struct ka_settings *settings, const struct ka_app *app, struct ka_err *err)
{
    if (strcmp(settings->device, "cuda") == 0 && !app->gpu)
        return ka_fail(err, -EINVAL, "a run on cuda, in a process that was not opened for it");
    if (settings->answers == KA_BACKEND_OPENAI && !app->llm)
        return ka_fail(err, -EINVAL, "a run that asks an endpoint, in a process that has none");
    return 0;
}
