/* The command `prompt`: a run in a folder that does not stay, up to its first question. Knows what is
 * printed, not how a prompt is made. */
#include "prompt_cli.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/app/asked.h"
#include "agent/core/fields.h"
#include "agent/io/loop.h"
#include "agent/io/signals.h"
#include "agent/run/run.h"
#include "base/each.h"
#include "base/files.h"
#include "base/log.h"
#include "show.h"

struct asking {
    const struct ka_opts *opts;
    struct ka_app app;
    struct ka_settings settings;
    struct ka_signals *signals;
    struct ka_run *run;
    int exit_code;
};

static void show_messages(const json_t *question)
{
    KA_EACH(json_object_get(question, "messages"), i, message)
        printf("%s==== %s ====\n\n%s\n", i ? "\n" : "", ka_text_of(message, "role", "?"),
               ka_text_of(message, "content", ""));
}

/* Beside the text, which may go into a file. */
static void show_parts(const json_t *question)
{
    fprintf(stderr, "\n%s question, about %.0f tokens of %.0f (bytes / %.1f):\n",
            ka_text_of(question, "phase", "?"), ka_number_of(question, "tokens", 0),
            ka_number_of(question, "budget", 0), ka_number_of(question, "bytes_per_token", 0));
    KA_EACH(json_object_get(question, "parts"), i, part)
        fprintf(stderr, "  %6.0f  %s\n", ka_number_of(part, "tokens", 0), ka_text_of(part, "name", "?"));
    KA_EACH(json_object_get(question, "left_out"), i, text)
        fprintf(stderr, "  left out: %s\n", json_string_value(text));
}

static void on_done(struct ka_run *run, bool waiting, void *arg)
{
    struct asking *asking = arg;
    const json_t *question = ka_run_question(run);
    (void)waiting;
    ka_log_progress_end();
    asking->exit_code = question ? 0 : ka_run_exit_code(run);
    if (question && asking->opts->json) {
        ka_show_json(question, JSON_INDENT(2) | JSON_REAL_PRECISION(6));
    } else if (question) {
        show_messages(question);
        fflush(stdout);
        show_parts(question);
    } else {
        json_auto_t *result = ka_run_result(run);
        if (asking->exit_code == 0)
            fprintf(stderr, "no question: the draft of the differentiator is verified, and nothing else is "
                            "wanted of a model (--draft llm asks for a draft)\n");
        else
            ka_show_error(json_object_get(result, "error"), ka_text_of(result, "file", "?"));
    }
    fflush(stdout);
    asking->run = NULL;
    ka_run_free(run);
    ka_signals_stop(asking->signals);
    ka_loop_stop(asking->app.loop);
}

static void on_stop(void *arg)
{
    struct asking *asking = arg;
    if (asking->run)
        ka_run_interrupt(asking->run);
}

static int ask_in(struct asking *asking, const char *folder, const char *path)
{
    struct ka_err err;
    const struct ka_run_req request = {
        .settings = &asking->settings, .file = path, .mode = KA_RUN_QUESTION, .done = on_done, .arg = asking};
    ka_settings_set(&asking->settings.out, folder);
    asking->signals = ka_signals_start(asking->app.loop, on_stop, asking);
    if (ka_run_start(&asking->app, &request, &asking->run, &err)) {
        ka_signals_stop(asking->signals);
        return ka_show_problem(&err, 3);
    }
    ka_loop_run(asking->app.loop);
    return asking->exit_code;
}

int ka_prompt_cli_main(const struct ka_opts *opts, const char *path)
{
    struct ka_err err;
    struct asking asking = {.opts = opts, .exit_code = 1};
    const char *base = getenv("TMPDIR");
    KA_AUTO_FREE char *folder = ka_path_join(base && *base ? base : "/tmp", "kernel-agent-prompt-XXXXXX");
    int code = ka_app_open(&asking.app, opts, true, 1, &err);
    if (code == 0 && ka_settings_init(&asking.settings, opts, &asking.app, false, &err))
        code = 2;
    if (code == 0 && !mkdtemp(folder)) {
        ka_fail(&err, -errno, "%s: %s; set TMPDIR to a folder that can be written", folder, strerror(errno));
        code = 2;
    }
    if (code) {
        ka_show_problem(&err, code);
    } else {
        code = ask_in(&asking, folder, path);
        ka_rmtree(folder, NULL);
    }
    ka_settings_free(&asking.settings);
    ka_app_close(&asking.app);
    return code;
}
