/* The command bench. Knows not how anything is timed. */
#include "bench_cli.h"

#include <errno.h>
#include <stdio.h>

#include "agent/app/asked.h"
#include "agent/core/bench_text.h"
#include "agent/core/fields.h"
#include "agent/io/loop.h"
#include "agent/io/signals.h"
#include "agent/run/bench.h"
#include "base/log.h"
#include "show.h"

struct command {
    const struct ka_opts *opts;
    const char *path;
    struct ka_app app;
    struct ka_settings settings;
    struct ka_signals *signals;
    struct ka_bench *bench;
    int code;
};

static void show(const struct command *command, const json_t *result)
{
    KA_AUTO_BUF struct ka_buf text = {0};
    if (command->opts->json) {
        ka_show_json(result, JSON_INDENT(2) | JSON_REAL_PRECISION(6));
        return;
    }
    ka_bench_text(result, &text);
    printf("%s\n  all figures: %s\n", ka_buf_str(&text), ka_text_of(result, "written", "not written"));
}

static void on_done(void *arg, int code, const json_t *result, const json_t *error)
{
    struct command *command = arg;
    ka_log_progress_end();
    command->code = code;
    if (result)
        show(command, result);
    if (error)
        ka_show_error(error, command->path);
    fflush(stdout);
    ka_bench_free(command->bench);
    command->bench = NULL;
    ka_signals_stop(command->signals);
    ka_loop_stop(command->app.loop);
}

static void on_stop(void *arg)
{
    struct command *command = arg;
    if (command->bench)
        ka_bench_interrupt(command->bench);
}

static int start(struct command *command, struct ka_err *err)
{
    const struct ka_bench_req request = {.settings = &command->settings,
                                         .file = command->path,
                                         .only = command->opts->only,
                                         .seconds = command->opts->seconds,
                                         .done = on_done,
                                         .arg = command};
    return ka_bench_start(&command->app, &request, &command->bench, err);
}

int ka_bench_cli_main(const struct ka_opts *opts, const char *path)
{
    struct ka_err err;
    struct command command = {.opts = opts, .path = path, .code = 1};
    int code = ka_app_open(&command.app, opts, false, 1, &err);
    if (code == 0 && ka_settings_init(&command.settings, opts, &command.app, false, &err))
        code = 2;
    if (code) {
        ka_app_close(&command.app);
        return ka_show_problem(&err, code);
    }
    command.signals = ka_signals_start(command.app.loop, on_stop, &command);
    int rc = start(&command, &err);
    if (rc) {
        ka_signals_stop(command.signals);
        command.code = ka_show_problem(&err, rc == -ENOENT || rc == -EINVAL || rc == -EFBIG ? 3 : 2);
    } else {
        ka_loop_run(command.app.loop);
    }
    ka_settings_free(&command.settings);
    ka_app_close(&command.app);
    return command.code;
}
