/* Building and closing what all runs share. Knows settings and paths, not phases. */
#include "app.h"

#include <errno.h>
#include <jansson.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "agent/disk/cache.h"
#include "agent/io/child.h"
#include "agent/io/llm.h"
#include "agent/io/loop_watch.h"
#include "agent/io/machine.h"
#include "base/files.h"
#include "base/log.h"
#include "python.h"
#include "rag/search.h"
#include "rag/store.h"

#define KEY_MAX 4096
#define DEFAULT_BASE_URL "https://api.openai.com/v1"

static bool is_folder(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0 && S_ISDIR(st.st_mode);
}

static bool holds_package(const char *share)
{
    char *package = ka_path_join(share, "sandbox/kernel_agent");
    bool found = is_folder(package);
    free(package);
    return found;
}

char *ka_app_find_share(struct ka_err *err)
{
    const char *given = getenv("KA_SHARE");
    if (given && *given)
        return holds_package(given)
                   ? ka_path_real(given, err)
                   : (ka_fail(err, -ENOENT, "KA_SHARE=%s holds no sandbox/kernel_agent", given), NULL);
    char *folder = ka_program_folder(), *real = NULL;
    if (!folder) {
        ka_fail(err, -errno, "/proc/self/exe: %s", strerror(errno));
        return NULL;
    }
    static const char *const places[] = {".", "..", "../..", "../share/kernel-agent"};
    bool found = false;
    for (size_t i = 0; i < KA_COUNT(places) && !found; i++) {
        char *path = ka_path_join(folder, places[i]);
        found = holds_package(path);
        real = found ? ka_path_real(path, err) : NULL;
        free(path);
    }
    if (!found)
        ka_fail(err, -ENOENT,
                "cannot find sandbox/kernel_agent near %s; set KA_SHARE to the folder that holds it", folder);
    free(folder);
    return real;
}

char *ka_app_store_path(const struct ka_opts *opts, const char *share)
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

static int find_python(struct ka_app *app, struct ka_err *err)
{
    struct ka_python_where where;
    struct ka_pythons pythons;
    ka_python_where_init(&where, app->opts->python, app->share);
    ka_pythons_list(&where, &pythons);
    ka_pythons_choose(&pythons, false, NULL, NULL);
    int rc = 0;
    if (pythons.chosen < pythons.count) {
        const struct ka_python *p = &pythons.list[pythons.chosen];
        app->python = ka_strdup(p->path);
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

/* A wrong word would else be found out by each child for itself. */
static int check_sandbox_words(const char *wanted, struct ka_err *err)
{
    static const char *const known[] = {"none", "default", "full", "all",      "limits",  "caps",
                                        "pid",  "mount",   "net",  "landlock", "seccomp", "cgroup"};
    for (const char *at = wanted;; at++) {
        size_t len = strcspn(at, "+"), i = 0;
        while (i < KA_COUNT(known) && (strlen(known[i]) != len || memcmp(known[i], at, len) != 0))
            i++;
        if (i == KA_COUNT(known))
            return ka_fail(
                err, -EINVAL,
                "--require-sandbox: '%.*s' is not full, all, none, or layers (limits caps pid mount net "
                "landlock seccomp cgroup) joined with '+'",
                (int)len, at);
        at += len;
        if (!*at)
            return 0;
    }
}

static char *find_device(const struct ka_opts *opts)
{
    if (strcmp(opts->device, "auto") != 0)
        return ka_strdup(opts->device);
    return ka_strdup(access("/dev/nvidiactl", F_OK) == 0 ? "cuda" : "cpu");
}

static int read_key(struct ka_app *app, struct ka_err *err)
{
    const char *path = app->opts->api_key_file;
    if (!path) {
        const char *value = getenv("OPENAI_API_KEY");
        app->api_key = value && *value ? ka_strdup(value) : NULL;
        unsetenv("OPENAI_API_KEY"); /* no child inherits it */
        return 0;
    }
    struct ka_buf text = {0};
    int rc = ka_file_read(path, KEY_MAX, &text, err);
    if (rc == 0) {
        size_t len = strcspn(ka_buf_str(&text), "\r\n");
        app->api_key = ka_strndup(ka_buf_str(&text), len);
        if (len == 0)
            rc = ka_fail(err, -EINVAL, "%s: holds no key on its first line", path);
    }
    if (text.data)
        explicit_bzero(text.data, text.len);
    ka_buf_free(&text);
    return rc;
}

static int choose_backend(struct ka_app *app, struct ka_err *err)
{
    const char *name = app->opts->backend;
    if (strcmp(name, "auto") == 0) {
        app->backend = app->api_key || app->opts->base_url ? KA_BACKEND_OPENAI : KA_BACKEND_NONE;
        if (app->backend == KA_BACKEND_NONE && strcmp(app->opts->model, "gpt-5") != 0)
            ka_log(KA_LOG_WARN,
                   "--model %s is not asked: there is neither --base-url nor a key in OPENAI_API_KEY",
                   app->opts->model);
    } else if (strcmp(name, "none") == 0) {
        app->backend = KA_BACKEND_NONE;
    } else if (strcmp(name, "openai") == 0) {
        app->backend = KA_BACKEND_OPENAI;
    } else if (ka_starts_with(name, "mailbox:") && name[strlen("mailbox:")]) {
        app->backend = KA_BACKEND_MAILBOX;
        int rc = ka_mkdirs(name + strlen("mailbox:"), err);
        if (rc)
            return rc;
        app->mailbox = ka_path_real(name + strlen("mailbox:"), err);
        return app->mailbox ? 0 : -ENOENT;
    } else {
        return ka_fail(err, -EINVAL, "--backend: '%s' is not one of openai, mailbox:DIR, none", name);
    }
    if (app->backend == KA_BACKEND_OPENAI && !app->opts->model[strspn(app->opts->model, " \t")])
        return ka_fail(err, -EINVAL,
                       "--model: no model is named; use one that the endpoint has (GET %s/models lists them)",
                       app->opts->base_url ? app->opts->base_url : DEFAULT_BASE_URL);
    if (app->backend == KA_BACKEND_NONE && strcmp(app->opts->draft, "llm") == 0)
        return ka_fail(err, -EINVAL, "--draft llm wants a model: set --base-url or --backend mailbox:DIR");
    return 0;
}

static int open_llm(struct ka_app *app, struct ka_err *err)
{
    if (app->backend != KA_BACKEND_OPENAI)
        return 0;
    struct ka_llm_config config;
    ka_llm_config_init(&config);
    config.base_url = app->opts->base_url ? app->opts->base_url : DEFAULT_BASE_URL;
    config.api_key = app->api_key;
    config.total_ms = (long)app->opts->llm_timeout * 1000;
    if (config.max_concurrent < (unsigned)app->opts->jobs)
        config.max_concurrent = (unsigned)app->opts->jobs;
    return ka_llm_new(&app->loop, &config, &app->llm, err);
}

/* A missing default store is no error: the run goes on without similar pairs, and says so. */
static int open_store(struct ka_app *app, struct ka_err *err)
{
    if (app->opts->no_retrieval)
        return 0;
    char *path = ka_app_store_path(app->opts, app->share);
    struct ka_err why;
    int rc = ka_store_open(path, KA_STORE_READ, &app->store, &why);
    if (rc == 0)
        rc = ka_search_open(app->store, &app->search, &why);
    if (rc == -ENOENT && !app->opts->store) {
        ka_log(KA_LOG_WARN,
               "no pair store at %s: going on without similar pairs (kernel-agent store build dataset)",
               path);
        rc = 0;
    } else if (rc) {
        ka_fail(err, rc, "%s", why.msg);
    }
    free(path);
    return rc;
}

/* compute-sanitizer watches compiled kernels. KA_SANITIZE_ANYWHERE is for tests of what follows a report, with a tool that is none. */
static int find_sanitizer(struct ka_app *app, struct ka_err *err)
{
    const char *name = "compute-sanitizer", *path = getenv("PATH");
    if (strcmp(app->device, "cuda") != 0 && !getenv("KA_SANITIZE_ANYWHERE"))
        return ka_fail(err, -EINVAL,
                       "--sanitize watches compiled kernels on a GPU, and this check runs on the CPU: "
                       "use --device cuda on a machine that has one");
    for (const char *at = path ? path : ""; *at && !app->sanitizer;) {
        size_t len = strcspn(at, ":");
        char *folder = ka_strndup(at, len);
        app->sanitizer = ka_path_join(folder, name);
        free(folder);
        if (access(app->sanitizer, X_OK) != 0) {
            free(app->sanitizer);
            app->sanitizer = NULL;
        }
        at += len + (at[len] == ':');
    }
    return app->sanitizer
               ? 0
               : ka_fail(err, -ENOENT, "--sanitize: there is no %s on PATH; it comes with the CUDA toolkit",
                         name);
}

/* Children that use the GPU at a time. Each has a context, which takes the driver half a second in which no other gets one, and the
 * GPU goes from one context to the next: more of them than this make every verdict slower (measured on an H200). */
static unsigned gpu_places(unsigned cpus)
{
    return cpus < 6 ? cpus : 6;
}

static int open_children(struct ka_app *app, struct ka_err *err)
{
    struct ka_machine machine;
    ka_machine_read(&machine);
    if (app->opts->children)
        machine.cpus = (unsigned)app->opts->children;
    struct ka_children_conf config = {.max_running = machine.cpus,
                                      .keep_bytecode = !app->opts->no_compile_cache};
    app->fan_width = machine.cpus;
    if (strcmp(app->device, "cuda") == 0) {
        double mb = (double)machine.memory_bytes / (1 << 20);
        app->gpu_child =
            (struct ka_app_limits){.mem_mb = (unsigned)(mb / 2), .scratch_mb = (unsigned)(mb / 4)};
        config.gpu = true;
        config.child_mem_mb = app->gpu_child.mem_mb;
        config.total_mem_mb = (unsigned)(mb * 0.9);
        config.max_running = machine.cpus;
        config.max_gpu = gpu_places(machine.cpus);
        app->fan_width = (config.max_gpu + 1) / 2; /* the candidate and the oracle at a time */
    }
    return ka_children_new(&app->loop, &config, &app->children, err);
}

static bool is_sweep(const char *text)
{
    if (strcmp(text, "all") == 0 || strcmp(text, "required") == 0)
        return true;
    json_t *list = json_loads(text, 0, NULL), *dims;
    bool good = json_is_array(list) && json_array_size(list) > 0;
    size_t i;
    json_array_foreach(list, i, dims) good = good && json_is_object(dims);
    json_decref(list);
    return good;
}

/* sm_50 to sm_200, as the Python package reads it. */
static bool is_target(const char *text)
{
    char *end;
    long number = ka_starts_with(text, "sm_") ? strtol(text + 3, &end, 10) : 0;
    return number >= 50 && number <= 200 && text[3] != '+' && (!*end || strcmp(end, "a") == 0);
}

/* What a child would only find out after seconds, and in its own words. */
static int check_words(const struct ka_opts *opts, struct ka_err *err)
{
    if (!is_sweep(opts->sweep))
        return ka_fail(
            err, -EINVAL,
            "--sweep: '%.200s' is not all, required, or a JSON list of dims like [{\"M\": 4, \"N\": 24}]",
            opts->sweep);
    if (!is_target(opts->target))
        return ka_fail(err, -EINVAL, "--target: '%.200s' is no GPU architecture like sm_80, sm_90 or sm_100",
                       opts->target);
    return 0;
}

int ka_app_open(struct ka_app *app, struct ka_opts *opts, bool with_model, struct ka_err *err)
{
    memset(app, 0, sizeof(*app));
    app->opts = opts;
    uv_loop_init(&app->loop);
    uv_loop_configure(&app->loop, UV_METRICS_IDLE_TIME);
    app->watch = ka_loop_watch_new(&app->loop);
    app->share = ka_app_find_share(err);
    if (!app->share)
        return 2;
    app->package_dir = ka_path_join(app->share, "sandbox");
    app->prompts_dir = opts->prompts ? ka_strdup(opts->prompts) : ka_path_join(app->share, "prompts");
    app->device = find_device(opts);
    if (check_words(opts, err) || check_sandbox_words(opts->require_sandbox, err))
        return 2;
    if (opts->sanitize && find_sanitizer(app, err))
        return 2;
    if (find_python(app, err))
        return 2;
    if (read_key(app, err))
        return 2;
    if (with_model && (choose_backend(app, err) || open_llm(app, err) || open_store(app, err)))
        return 2;
    return open_children(app, err) ? 2 : 0;
}

static void count_handle(uv_handle_t *handle, void *arg)
{
    (void)handle;
    ++*(int *)arg;
}

void ka_app_close(struct ka_app *app)
{
    if (app->llm)
        ka_llm_close(app->llm, NULL, NULL);
    if (app->children)
        ka_children_close(app->children);
    ka_loop_watch_close(app->watch);
    uv_run(&app->loop, UV_RUN_DEFAULT);
    int left = 0;
    if (uv_loop_close(&app->loop) != 0) {
        uv_walk(&app->loop, count_handle, &left);
        ka_log(KA_LOG_ERROR, "internal: %d handles left open at exit", left);
    }
    ka_cache_close(app->cache);
    ka_search_close(app->search);
    ka_store_close(app->store);
    if (app->api_key)
        explicit_bzero(app->api_key, strlen(app->api_key));
    json_decref(app->known);
    free(app->api_key);
    free(app->mailbox);
    free(app->share);
    free(app->package_dir);
    free(app->prompts_dir);
    free(app->python);
    free(app->device);
    free(app->sanitizer);
}
