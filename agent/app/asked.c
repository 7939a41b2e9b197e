/* What the options ask of a run, checked against this process. Knows not what a run does with it. */
#include "asked.h"

#include <errno.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/each.h"
#include "base/files.h"
#include "base/log.h"
#include "older.h"

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

static bool is_sweep(const char *text)
{
    if (strcmp(text, "all") == 0 || strcmp(text, "required") == 0)
        return true;
    json_auto_t *list = json_loads(text, 0, NULL);
    bool good = json_is_array(list) && json_array_size(list) > 0;
    KA_EACH(list, i, dims)
        good = good && json_is_object(dims);
    return good;
}

/* sm_50 to sm_200, as the Python package reads it. */
static bool is_target(const char *text)
{
    char *end;
    long number = ka_starts_with(text, "sm_") ? strtol(text + 3, &end, 10) : 0;
    return number >= 50 && number <= 200 && text[3] != '+' && (!*end || strcmp(end, "a") == 0);
}

int ka_settings_check(const struct ka_opts *opts, struct ka_err *err)
{
    if (!is_sweep(opts->run.sweep))
        return ka_fail(
            err, -EINVAL,
            "--sweep: '%.200s' is not all, required, or a JSON list of dims like [{\"M\": 4, \"N\": 24}]",
            opts->run.sweep);
    if (!is_target(opts->run.target))
        return ka_fail(err, -EINVAL, "--target: '%.200s' is no GPU architecture like sm_80, sm_90 or sm_100",
                       opts->run.target);
    return check_sandbox_words(opts->run.require_sandbox, err);
}

/* compute-sanitizer watches compiled kernels. KA_SANITIZE_ANYWHERE is for tests of what follows a report,
 * with a tool that is none. */
static int find_sanitizer(struct ka_settings *settings, struct ka_err *err)
{
    const char *name = "compute-sanitizer", *path = getenv("PATH");
    if (strcmp(settings->device, "cuda") != 0 && !getenv("KA_SANITIZE_ANYWHERE"))
        return ka_fail(err, -EINVAL,
                       "--sanitize watches compiled kernels on a GPU, and this check runs on the CPU: "
                       "use --device cuda on a machine that has one");
    for (const char *at = path ? path : ""; *at && !settings->sanitizer;) {
        size_t len = strcspn(at, ":");
        KA_AUTO_FREE char *folder = ka_strndup(at, len), *program = ka_path_join(folder, name);
        if (access(program, X_OK) == 0)
            settings->sanitizer = ka_strdup(program);
        at += len + (at[len] == ':');
    }
    return settings->sanitizer
               ? 0
               : ka_fail(err, -ENOENT, "--sanitize: there is no %s on PATH; it comes with the CUDA toolkit",
                         name);
}

static int open_mailbox(struct ka_settings *settings, const char *folder, struct ka_err *err)
{
    int rc = ka_mkdirs(folder, err);
    if (rc)
        return rc;
    settings->mailbox = ka_path_real(folder, err);
    return settings->mailbox ? 0 : -ENOENT;
}

static int choose_backend(struct ka_settings *settings, const struct ka_app *app, struct ka_err *err)
{
    const char *name = settings->backend;
    if (strcmp(name, "auto") == 0) {
        settings->answers = app->llm ? KA_BACKEND_OPENAI : KA_BACKEND_NONE;
        if (!app->llm && strcmp(settings->model, "gpt-5") != 0)
            ka_log(KA_LOG_WARN,
                   "--model %s is not asked: there is neither --base-url nor a key in OPENAI_API_KEY",
                   settings->model);
    } else if (strcmp(name, "none") == 0) {
        settings->answers = KA_BACKEND_NONE;
    } else if (strcmp(name, "openai") == 0) {
        settings->answers = KA_BACKEND_OPENAI;
    } else if (ka_starts_with(name, "mailbox:") && name[strlen("mailbox:")]) {
        settings->answers = KA_BACKEND_MAILBOX;
        return open_mailbox(settings, name + strlen("mailbox:"), err);
    } else {
        const char *older = ka_older_backend(name);
        return older ? ka_fail(err, -EINVAL, "--backend %s: %s", name, older)
                     : ka_fail(err, -EINVAL, "--backend: '%s' is not one of openai, mailbox:DIR, none", name);
    }
    if (settings->answers == KA_BACKEND_OPENAI && !settings->model[strspn(settings->model, " \t")])
        return ka_fail(err, -EINVAL,
                       "--model: no model is named; use one that the endpoint has (GET %s/models lists them)",
                       app->endpoints.list[0].base_url);
    if (settings->answers == KA_BACKEND_NONE && strcmp(settings->draft, "llm") == 0)
        return ka_fail(err, -EINVAL, "--draft llm wants a model: set --base-url or --backend mailbox:DIR");
    return 0;
}

int ka_settings_init(struct ka_settings *settings, const struct ka_opts *opts, const struct ka_app *app,
                     bool with_model, struct ka_err *err)
{
    ka_settings_copy(settings, &opts->run);
    if (!settings->prompts)
        settings->prompts = ka_path_join(app->share, "prompts");
    if (strcmp(settings->device, "auto") == 0)
        ka_settings_set(&settings->device, app->gpu ? "cuda" : "cpu");
    int rc = opts->sanitize ? find_sanitizer(settings, err) : 0;
    if (rc == 0 && with_model)
        rc = choose_backend(settings, app, err);
    if (rc == 0)
        rc = ka_settings_fit(settings, app, err);
    if (rc)
        ka_settings_free(settings);
    return rc;
}
