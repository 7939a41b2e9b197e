/* How a run begins: its folder, its documents, or those of an earlier process; and how it is let go. */
#include "run.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "agent/app/opts.h"
#include "agent/core/compose.h"
#include "agent/core/fields.h"
#include "agent/disk/modules.h"
#include "agent/io/cards.h"
#include "agent/ops/compile.h"
#include "base/files.h"
#include "base/hash.h"
#include "base/log.h"
#include "base/marker.h"
#include "commands.h"
#include "events.h"
#include "folder.h"
#include "sizes.h"

#define FORWARD_MAX ((size_t)4 << 20)

static struct ka_run *run_new(struct ka_app *app, const struct ka_settings *settings, ka_run_done_fn done,
                              void *arg)
{
    struct ka_run *run = ka_calloc(1, sizeof(*run));
    run->app = app;
    ka_settings_copy(&run->settings, settings);
    run->actions = &ka_run_commands;
    run->done = done;
    run->arg = arg;
    for (int i = 0; i < KA_JOB_SLOTS; i++)
        run->asked[i] = (struct ka_asked){.run = run, .slot = i};
    run->feedback = json_object();
    run->began = ka_clock_seconds();
    run->history = json_array();
    run->skipped = json_array();
    run->oracles = json_object();
    run->retrieved = json_array();
    run->lessons = json_pack("{s:[], s:[]}", "found", "told");
    run->grads = json_array();
    run->timeline = json_array();
    run->totals =
        json_pack("{s:i, s:i, s:i, s:f}", "requests", 0, "tokens_in", 0, "tokens_out", 0, "seconds", 0.0);
    return run;
}

static int make_folder(struct ka_run *run, struct ka_err *err)
{
    int rc = ka_run_folder_make(run->settings.out, run->name, &run->dir, err);
    if (rc)
        return rc;
    KA_AUTO_FREE char *candidates = ka_path_join(run->dir, "candidates");
    return ka_mkdirs(candidates, err);
}

static int read_forward(struct ka_run *run, const char *path, struct ka_err *err)
{
    KA_AUTO_BUF struct ka_buf text = {0};
    int rc = ka_file_read(path, FORWARD_MAX, &text, err);
    if (rc == 0 && memchr(ka_buf_str(&text), '\0', text.len))
        rc = ka_fail(err, -EINVAL, "%s: not a Python file (it holds NUL bytes)", path);
    if (rc == 0)
        run->forward = ka_buf_steal(&text);
    return rc;
}

/* A file with a marker line is a pair: its forward part is the run's, its backward part what a check is
 * about. Of a module written by hand nothing is split off: its backward part is empty (agent/core/compose.h).
 */
static int split_backward(struct ka_run *run, enum ka_run_mode mode, struct ka_err *err)
{
    KA_AUTO_BUF struct ka_buf forward = {0}, backward = {0};
    int rc = ka_compose_split(run->forward, &forward, &backward, NULL);
    if (rc == 0) {
        free(run->forward);
        run->forward = ka_buf_steal(&forward);
        if (mode == KA_RUN_CHECK)
            run->given = ka_buf_steal(&backward);
    } else if (rc == -ENOENT) {
        rc = 0;
        if (mode == KA_RUN_CHECK && ka_compose_by_hand(run->forward))
            run->given = ka_strdup("");
        else if (mode == KA_RUN_CHECK)
            rc = ka_fail(err, -EINVAL,
                         "%s has no line '%s', and no torch.autograd.Function with a backward: there is "
                         "nothing to check",
                         run->file, KA_MARKER);
    }
    return rc;
}

static int open_parts(struct ka_run *run, bool create, struct ka_err *err)
{
    KA_AUTO_FREE char *db = ka_path_join(run->dir, "run.db");
    KA_AUTO_FREE char *journal = ka_path_join(run->dir, "run.jsonl");
    const struct ka_endpoints *endpoints = &run->app->endpoints;
    const char *secrets[KA_LLM_ENDPOINTS_MAX + 1] = {NULL};
    for (size_t i = 0, count = 0; i < endpoints->count; i++)
        if (endpoints->list[i].api_key)
            secrets[count++] = endpoints->list[i].api_key;
    int rc = ka_state_open(db, create, run->app->loop, &run->state, err);
    if (rc == 0)
        rc = ka_record_open(journal, secrets, &run->record, err);
    return rc;
}

static struct ka_job_limits limits_of(const struct ka_settings *settings)
{
    return (struct ka_job_limits){
        .max_iters = settings->max_iters,
        .patience_parity = settings->patience_parity,
        .patience_perf = settings->patience_perf,
        .candidates = settings->candidates,
        .max_bad_answers = 4,
        .min_rel_impr = settings->min_rel_impr,
        .use_llm = settings->answers != KA_BACKEND_NONE,
        .use_differentiator = true,
        .optimise = !settings->no_optimise,
    };
}

static void find_modules(struct ka_run *run)
{
    KA_AUTO_FREE char *modules = ka_path_join(run->dir, "modules");
    run->modules = ka_path_real(modules, NULL); /* none: nothing was imported */
}

static int freeze_modules(struct ka_run *run, struct ka_err *err)
{
    KA_AUTO_FREE char *modules = ka_path_join(run->dir, "modules");
    struct ka_modules found;
    const struct ka_modules_req request = {.source = run->forward,
                                           .file = run->file,
                                           .path = run->settings.path,
                                           .into = modules,
                                           .installed = ka_app_elsewhere(run->app)};
    int rc = ka_modules_freeze(&request, &found, err);
    if (rc == 0 && found.count)
        ka_log(KA_LOG_INFO, "%s: %zu modules of the user's are imported: copied into the run", run->name,
               found.count);
    memcpy(run->modules_hash, found.hash, sizeof(run->modules_hash));
    find_modules(run);
    return rc;
}

/* What a later process must know to go on. */
static int save_start(struct ka_run *run, struct ka_err *err)
{
    const struct ka_settings *settings = &run->settings;
    json_t *start = json_pack(
        "{s:s, s:s, s:s, s:s, s:s, s:s, s:s, s:s, s:s, s:b, s:i, s:i}", "file", run->file, "forward",
        run->forward, "modules", run->modules_hash, "path", settings->path, "device", run->settings.device,
        "target", settings->target, "dtype", settings->dtype, "sweep", settings->sweep, "backend",
        settings->backend, "no_optimise", settings->no_optimise, "pid", (int)getpid(), "version", 1);
    json_object_set_new(start, "options", ka_opts_texts(settings));
    int rc = ka_state_put(run->state, "start", start, err);
    ka_record_add(run->record, "start", json_incref(start));
    json_decref(start);
    if (rc == 0)
        rc = ka_file_replace(run->work_forward, run->forward, strlen(run->forward), err);
    if (rc == 0)
        rc = ka_state_save_job(run->state, &run->job, err);
    return rc ? rc : ka_state_commit(run->state, err);
}

/* Torch is imported while the run still reads and retrieves, also by the zygote of the candidates, which has
 * work last. */
static void warm(const struct ka_run *run)
{
    ka_children_warm(run->app->children, run->app->python, run->app->package_dir);
    ka_compile_warm(run->app, &run->settings);
}

/* The first command is given from the loop, so that `done` never runs from inside start or resume. */
static void on_first_turn(void *arg)
{
    struct ka_run *run = arg;
    struct ka_command command;
    run->first = NULL;
    if (run->job.state == KA_JOB_QUEUED) {
        struct ka_event event = {.type = KA_EV_START};
        ka_run_post(run, &event);
        return;
    }
    ka_job_resume(&run->job, &command);
    ka_run_resume_command(run, &command);
}

static void begin(struct ka_run *run)
{
    run->has_card = ka_run_on_gpu(run);
    if (run->has_card)
        run->settings.card = ka_cards_take(run->app->cards);
    run->first = ka_loop_soon(run->app->loop, on_first_turn, run);
    warm(run);
}

const char *ka_run_gpu(const struct ka_run *run)
{
    return run->has_card ? ka_cards_name(run->app->cards, run->settings.card) : NULL;
}

int ka_run_start(struct ka_app *app, const struct ka_run_req *req, struct ka_run **out, struct ka_err *err)
{
    struct ka_run *run = run_new(app, req->settings, req->done, req->arg);
    run->known = req->known;
    int rc = ka_settings_fit(&run->settings, app, err);
    if (req->mode == KA_RUN_QUESTION) /* put together as for whoever would answer; nobody has to be there */
        run->settings.answers =
            ka_starts_with(run->settings.backend, "mailbox:") ? KA_BACKEND_MAILBOX : KA_BACKEND_OPENAI;
    run->file = rc ? NULL : ka_path_real(req->file, err);
    if (!run->file) {
        rc = rc ? rc : -ENOENT;
        goto fail;
    }
    run->name = ka_run_folder_name(run->file);
    rc = read_forward(run, run->file, err);
    if (rc == 0)
        rc = split_backward(run, req->mode, err);
    if (rc == 0)
        rc = make_folder(run, err);
    if (rc == 0)
        rc = open_parts(run, true, err);
    if (rc)
        goto fail;
    run->work_forward = ka_path_join(run->dir, "forward.py");
    struct ka_job_limits limits = limits_of(&run->settings);
    if (req->mode == KA_RUN_CHECK) {
        limits.use_llm = false;
        limits.optimise = false;
        limits.use_differentiator = true; /* the draft turn then takes the backward of the file */
    }
    run->ends_at_question = req->mode == KA_RUN_QUESTION;
    ka_job_init(&run->job, &limits);
    rc = freeze_modules(run, err);
    if (rc == 0)
        rc = save_start(run, err);
    if (rc)
        goto fail;
    begin(run);
    *out = run;
    return 0;
fail:
    ka_run_free(run);
    return rc;
}

static json_t *get_or(struct ka_run *run, const char *name, json_t *fallback)
{
    json_t *doc = ka_state_get(run->state, name);
    if (!doc)
        return fallback;
    json_decref(fallback);
    return doc;
}

static void load_documents(struct ka_run *run)
{
    run->inspect = ka_state_get(run->state, "inspect");
    run->shapes = ka_state_get(run->state, "shapes");
    run->outputs = ka_state_get(run->state, "outputs");
    run->draft = ka_state_get(run->state, "draft");
    run->failure = ka_state_get(run->state, "failure");
    run->feedback = get_or(run, "feedback", run->feedback);
    run->skipped = get_or(run, "skipped", run->skipped);
    run->oracles = get_or(run, "oracles", run->oracles);
    run->retrieved = get_or(run, "retrieved", run->retrieved);
    run->lessons = get_or(run, "lessons", run->lessons);
    run->grads = get_or(run, "grads", run->grads);
    run->history = get_or(run, "history", run->history);
    run->totals = get_or(run, "totals", run->totals);
    json_auto_t *half = ka_state_get(run->state, "half");
    run->half = json_is_true(half);
    run->seconds_before = json_number_value(json_object_get(run->totals, "seconds"));
}

/* Shapes, dtype and target decide what its verdicts and times are of. */
static int check_options(const struct ka_run *run, const json_t *start, struct ka_err *err)
{
    const struct ka_settings *now = &run->settings;
    const char *const options[][2] = {
        {"sweep", now->sweep}, {"dtype", now->dtype}, {"target", now->target}, {"path", now->path}};
    for (size_t i = 0; i < KA_COUNT(options); i++) {
        const char *name = options[i][0], *began = ka_text_of(start, name, options[i][1]);
        if (strcmp(began, options[i][1]) != 0)
            return ka_fail(err, -ESTALE, "the run %s began with --%s '%s', not '%s'; start a fresh run",
                           run->dir, name, began, options[i][1]);
    }
    return 0;
}

/* The budgets may be raised on resume; what the run is about may not change. */
static int check_same(struct ka_run *run, const json_t *start, struct ka_err *err)
{
    KA_AUTO_BUF struct ka_buf now = {0}, forward = {0}, rest = {0};
    int rc = ka_file_read(run->file, FORWARD_MAX, &now, err);
    bool pair = rc == 0 && ka_compose_split(ka_buf_str(&now), &forward, &rest, NULL) == 0;
    if (rc == 0 && strcmp(ka_buf_str(pair ? &forward : &now), run->forward) != 0)
        rc = ka_fail(err, -ESTALE, "%s has changed since the run %s began; start a fresh run", run->file,
                     run->dir);
    const char *modules = ka_text_of(start, "modules", NULL);
    struct ka_modules found;
    const struct ka_modules_req request = {.source = run->forward,
                                           .file = run->file,
                                           .path = ka_text_of(start, "path", NULL),
                                           .installed = ka_app_elsewhere(run->app)};
    if (rc == 0 && modules)
        rc = ka_modules_freeze(&request, &found, err);
    if (rc == 0 && modules && strcmp(modules, found.hash) != 0)
        rc = ka_fail(err, -ESTALE,
                     "a module that %s imports has changed since the run %s began; start a "
                     "fresh run",
                     run->file, run->dir);
    if (rc == 0)
        rc = check_options(run, start, err);
    const char *device = ka_text_of(start, "device", "?");
    if (rc == 0 && strcmp(device, run->settings.device) != 0)
        rc = ka_fail(err, -ESTALE, "the run %s began on %s; resume it there, or with --device %s", run->dir,
                     device, device);
    return rc;
}

/* A run that stopped at a question can only go on with somebody who answers. */
static int check_answered(const struct ka_run *run, const json_t *start, struct ka_err *err)
{
    struct ka_job next = run->job;
    struct ka_command command;
    ka_job_resume(&next, &command);
    if (command.type != KA_CMD_ASK || run->settings.answers != KA_BACKEND_NONE)
        return 0;
    const char *backend = json_string_value(json_object_get(start, "backend"));
    return ka_fail(
        err, -EINVAL,
        "the run %s waits for a model's answer, and no model is set: add --backend %s or --base-url URL",
        run->dir, backend && ka_starts_with(backend, "mailbox:") ? backend : "mailbox:DIR");
}

int ka_run_resume(struct ka_app *app, const struct ka_settings *settings, const char *dir,
                  ka_run_done_fn done, void *arg, struct ka_run **out, struct ka_err *err)
{
    struct ka_run *run = run_new(app, settings, done, arg);
    json_auto_t *start = NULL;
    int rc = ka_settings_fit(&run->settings, app, err);
    run->dir = rc ? NULL : ka_path_real(dir, err);
    if (!run->dir) {
        rc = rc ? rc : -ENOENT;
        goto fail;
    }
    rc = open_parts(run, false, err);
    if (rc)
        goto fail;
    start = ka_state_get(run->state, "start");
    run->file = ka_strdup(json_string_value(json_object_get(start, "file")));
    run->forward = ka_strdup(json_string_value(json_object_get(start, "forward")));
    if (!run->file || !run->forward) {
        rc = ka_fail(err, -EINVAL, "%s: not a run folder of kernel-agent", dir);
        goto fail;
    }
    run->name = ka_run_folder_name(run->file);
    run->work_forward = ka_path_join(run->dir, "forward.py");
    rc = check_same(run, start, err);
    find_modules(run);
    if (rc == 0)
        rc = ka_state_load_job(run->state, &run->job, err);
    if (rc == 0)
        rc = ka_file_replace(run->work_forward, run->forward, strlen(run->forward), err);
    if (rc)
        goto fail;
    if (json_is_true(json_object_get(start, "no_optimise"))) /* what the run is for; a budget may change */
        run->settings.no_optimise = true;
    if (run->settings.answers != KA_BACKEND_NONE && strcmp(run->settings.draft, "auto") == 0)
        ka_settings_set(&run->settings.draft,
                        ka_text_of(json_object_get(start, "options"), "draft", run->settings.draft));
    run->job.limits = limits_of(&run->settings);
    rc = check_answered(run, start, err);
    if (rc)
        goto fail;
    load_documents(run);
    ka_record_add(run->record, "resume", NULL);
    begin(run);
    *out = run;
    return 0;
fail:
    ka_run_free(run);
    return rc;
}

json_t *ka_run_options(const char *dir)
{
    KA_AUTO_FREE char *db = ka_path_join(dir, "run.db");
    struct ka_state *state = NULL;
    json_auto_t *start = ka_state_open(db, false, NULL, &state, NULL) ? NULL : ka_state_get(state, "start");
    ka_state_close(state);
    return json_incref(json_object_get(start, "options"));
}

/* Says its record that it is of this file? For a run whose state another process has open. */
static bool began_with(const char *dir, const char *file)
{
    KA_AUTO_FREE char *path = ka_path_join(dir, "run.jsonl"), *line = NULL;
    size_t room = 0;
    FILE *record = fopen(path, "re");
    ssize_t len = record ? getline(&line, &room, record) : -1;
    if (record)
        fclose(record);
    json_auto_t *start = len > 0 ? json_loadb(line, (size_t)len, 0, NULL) : NULL;
    return ka_is_text(start, "file", file);
}

static bool is_unfinished_of(const char *dir, const char *file)
{
    KA_AUTO_FREE char *db = ka_path_join(dir, "run.db");
    struct ka_state *state = NULL;
    struct ka_job job;
    bool match = false;
    int rc = ka_state_open(db, false, NULL, &state, NULL);
    if (rc == -EBUSY)
        match = began_with(dir, file);
    else if (rc == 0 && ka_state_load_job(state, &job, NULL) == 0 && !ka_job_ended(&job)) {
        json_auto_t *start = ka_state_get(state, "start");
        match = ka_is_text(start, "file", file);
    }
    ka_state_close(state);
    return match;
}

char *ka_run_find_unfinished(const char *out, const char *file)
{
    KA_AUTO_FREE char *real = ka_path_real(file, NULL);
    KA_AUTO_FREE struct dirent **entries = NULL;
    int count = real ? scandir(out, &entries, NULL, alphasort) : -1;
    KA_AUTO_FREE char *name = real ? ka_run_folder_name(real) : NULL;
    char *newest = NULL;
    for (int i = count - 1; i >= 0; i--) {
        char *dir = ka_path_join(out, entries[i]->d_name);
        if (!newest && ka_starts_with(entries[i]->d_name, name) && is_unfinished_of(dir, real))
            newest = dir;
        else
            free(dir);
        free(entries[i]);
    }
    return newest;
}

static void run_gone(void *arg)
{
    struct ka_run *run = arg;
    ka_settings_free(&run->settings);
    free(run->dir);
    free(run);
}

void ka_run_free(struct ka_run *run)
{
    if (!run)
        return;
    run->actions->stop_all(run);
    if (run->has_card)
        ka_cards_give(run->app->cards, run->settings.card);
    ka_state_close(run->state);
    ka_record_close(run->record);
    json_t *documents[] = {run->inspect,    run->shapes,    run->outputs, run->timeline,  run->skipped,
                           run->oracles,    run->sanitized, run->grads,   run->retrieved, run->draft,
                           run->history,    run->totals,    run->failure, run->feedback,  run->variant,
                           run->race_cases, run->question,  run->lessons};
    for (size_t i = 0; i < KA_COUNT(documents); i++)
        json_decref(documents[i]);
    free(run->file);
    free(run->name);
    free(run->forward);
    free(run->work_forward);
    free(run->modules);
    free(run->pair_path);
    free(run->given);
    free(run->waiting_for);
    ka_soon_cancel(run->first);
    ka_loop_soon(run->app->loop, run_gone, run); /* whoever called may still look at it */
}
