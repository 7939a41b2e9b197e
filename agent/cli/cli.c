/* Commands by name, their help, and one run from start to its result on stdout. */
#include "cli.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "agent/app/app.h"
#include "agent/app/asked.h"
#include "agent/app/logging.h"
#include "agent/io/loop.h"
#include "agent/io/signals.h"
#include "agent/run/run.h"
#include "agent/serve/service.h"
#include "base/log.h"
#include "batch.h"
#include "bench_cli.h"
#include "client_cli.h"
#include "doctor.h"
#include "oneshot.h"
#include "prompt_cli.h"
#include "show.h"
#include "store_cli.h"

#define FILES_MAX 1024 /* of one `check` */

static const char usage[] =
    "kernel-agent completes a Triton forward kernel with a verified backward.\n"
    "\n"
    "Usage:\n"
    "  kernel-agent --file-path FILE [options]     one forward file to a verified pair\n"
    "  kernel-agent --resume [RUN] [options]       go on with a run that was interrupted or waits for an "
    "answer\n"
    "  kernel-agent batch DIR [--jobs N]           every forward file below a folder\n"
    "  kernel-agent serve                          a queue of runs behind an HTTP API, for a machine with a "
    "GPU\n"
    "  kernel-agent submit FILE [--wait]           a file to the service\n"
    "  kernel-agent status [ID]                    the runs of the service, or one of them\n"
    "  kernel-agent cancel ID                      one that is queued or runs\n"
    "  kernel-agent retry ID [--wait]              one that has ended, once more from the beginning\n"
    "  kernel-agent logs ID [--follow]             what happened in one of them\n"
    "  kernel-agent inspect FILE                   what is understood of a forward file\n"
    "  kernel-agent check FILE... [--junit OUT]    the full verdict on a backward that exists already: a "
    "pair, or any module\n"
    "                                              with a torch.autograd.Function, make_args and SWEEP; of "
    "several in a module\n"
    "                                              each, or --function NAME\n"
    "  kernel-agent bench FILE [--only PASS]       times of a finished pair on a GPU, beside eager PyTorch "
    "and "
    "torch.compile\n"
    "  kernel-agent verify RUN                     repeat the verdict of a run, without a model\n"
    "  kernel-agent differentiate FILE [--print]   a backward from the built-in differentiator alone\n"
    "  kernel-agent prompt FILE                    what a run would ask the model first, and its tokens; no "
    "endpoint is needed\n"
    "  kernel-agent store COMMAND                  build, search, show and verify the pair store\n"
    "  kernel-agent doctor                         what this machine gives: sandbox layers, Python, GPU\n"
    "\n"
    "Examples:\n"
    "  kernel-agent --file-path examples/softmax.py\n"
    "  kernel-agent --file-path attn.py --topk 4 --min-sim 0.6 --base-url http://localhost:8000/v1 --model "
    "qwen3\n"
    "  kernel-agent --file-path attn.py --backend mailbox:box --no-wait; kernel-agent --file-path attn.py "
    "--backend mailbox:box --resume\n"
    "  kernel-agent prompt attn.py --draft llm > question.txt\n"
    "  kernel-agent batch kernels/ --jobs 4 --json\n"
    "\n"
    "Options (also as keys of the configuration file and as KA_<NAME> in the environment):\n";

static const char exit_codes[] = "\n"
                                 "Exit codes: 0 verified, 1 internal error, 2 usage or configuration, 3 the "
                                 "forward file cannot be used, 4 no candidate\n"
                                 "was verified, 5 the endpoint is unreachable or refuses, 6 a required "
                                 "sandbox layer is missing, 75 waiting for an answer\n"
                                 "in the mailbox, 130 interrupted and resumable. With --json one result "
                                 "object goes to stdout; progress goes to stderr.\n";

static int missing_word(const char *command)
{
    const char *word = strcmp(command, "batch") == 0    ? "DIR"
                       : strcmp(command, "verify") == 0 ? "RUN"
                       : strcmp(command, "cancel") == 0 ? "ID"
                       : strcmp(command, "retry") == 0  ? "ID"
                       : strcmp(command, "logs") == 0   ? "ID"
                                                        : "FILE";
    struct ka_err err;
    ka_fail(&err, 0, "%s is missing: kernel-agent %s %s (kernel-agent --help)", word, command, word);
    return ka_show_problem(&err, 2);
}

/* ---- one run */

struct one_run {
    const struct ka_opts *opts;
    struct ka_app app;
    struct ka_settings settings;
    struct ka_run *run;
    struct ka_signals *signals;
    int exit_code;
};

static void on_run_done(struct ka_run *run, bool waiting, void *arg)
{
    struct one_run *one = arg;
    (void)waiting;
    one->exit_code = ka_run_exit_code(run);
    ka_log_progress_end();
    json_auto_t *result = ka_run_result(run);
    if (one->opts->json) {
        ka_show_json(result, JSON_INDENT(2) | JSON_REAL_PRECISION(6));
    } else {
        ka_show_result(result);
        if (one->opts->print)
            ka_show_backward(json_string_value(json_object_get(result, "pair")));
    }
    fflush(stdout);
    ka_run_free(run);
    one->run = NULL;
    ka_signals_stop(one->signals);
    ka_loop_stop(one->app.loop); /* warm interpreters keep handles open until the app is closed */
}

static void on_interrupt(void *arg)
{
    struct one_run *one = arg;
    if (!one->run)
        return;
    ka_log(KA_LOG_WARN, "interrupted; go on with: kernel-agent --resume %s", ka_run_dir(one->run));
    ka_run_interrupt(one->run);
}

/* The folder that --resume means. free() it. */
static char *folder_to_resume(const struct ka_opts *opts, struct ka_err *err)
{
    char *dir = NULL;
    if (opts->resume[0])
        dir = ka_strdup(opts->resume);
    else if (opts->file_path)
        dir = ka_run_find_unfinished(opts->run.out, opts->file_path);
    if (!dir)
        ka_fail(err, -EINVAL, "--resume: no unfinished run of %s below %s; name the run folder",
                opts->file_path ? opts->file_path : "a file", opts->run.out);
    return dir;
}

static int start_or_resume(struct one_run *one, const char *folder, struct ka_err *err)
{
    const struct ka_run_req request = {.settings = &one->settings,
                                       .file = one->opts->file_path,
                                       .mode = KA_RUN_COMPLETE,
                                       .done = on_run_done,
                                       .arg = one};
    return folder ? ka_run_resume(&one->app, &one->settings, folder, on_run_done, one, &one->run, err)
                  : ka_run_start(&one->app, &request, &one->run, err);
}

static int run_main(struct ka_opts *opts)
{
    struct ka_err err;
    if (!opts->file_path && !opts->resume)
        return missing_word("--file-path");
    KA_AUTO_FREE char *folder = opts->resume ? folder_to_resume(opts, &err) : NULL;
    json_auto_t *options = folder ? ka_run_options(folder) : NULL;
    if ((opts->resume && !folder) || ka_opts_go_on(opts, options, &err))
        return ka_show_problem(&err, 2);
    struct one_run one = {.opts = opts, .exit_code = 1};
    int code = ka_app_open(&one.app, opts, true, 1, &err);
    if (code == 0 && ka_settings_init(&one.settings, opts, &one.app, true, &err))
        code = 2;
    if (code) {
        ka_app_close(&one.app);
        return ka_show_problem(&err, code);
    }
    one.signals = ka_signals_start(one.app.loop, on_interrupt, &one);
    int rc = start_or_resume(&one, folder, &err);
    if (rc) {
        ka_signals_stop(one.signals);
        code = ka_show_problem(&err, (rc == -ENOENT || rc == -EFBIG) && !folder ? 3 : 2);
    } else {
        ka_loop_run(one.app.loop);
        code = one.exit_code;
    }
    ka_settings_free(&one.settings);
    ka_app_close(&one.app);
    return code;
}

/* ---- commands */

struct command_line {
    int argc; /* without program and command */
    char **argv;
    const char *config; /* --config, or NULL */
};

static int read_settings(void *arg, struct ka_opts *opts, struct ka_err *err)
{
    const struct command_line *line = arg;
    int count, rc = ka_opts_init(opts, line->config, err);
    if (rc == 0)
        rc = ka_opts_parse(opts, line->argc, line->argv, NULL, 0, &count, err);
    if (rc == 0)
        rc = ka_settings_check(opts, err);
    if (rc)
        ka_opts_free(opts);
    return rc;
}

static int serve_main(struct ka_opts *opts, struct command_line *line)
{
    struct ka_err err;
    int code = ka_service_run(opts, read_settings, line, &err);
    return code ? ka_show_problem(&err, code) : 0;
}

static int run_command(const char *name, struct ka_opts *opts, const char **words, int count)
{
    const char *word = count ? words[0] : opts->file_path;
    if (strcmp(name, "run") == 0) {
        struct ka_err err;
        if (count && opts->file_path) {
            ka_fail(&err, 0, "'%s': one word too many beside --file-path %s", words[0], opts->file_path);
            return ka_show_problem(&err, 2);
        }
        if (count)
            opts->file_path = ka_strdup(words[0]);
        return run_main(opts);
    }
    if (strcmp(name, "status") == 0)
        return ka_client_main(opts, name, word);
    if (!word)
        return missing_word(name);
    if (strcmp(name, "submit") == 0 || strcmp(name, "cancel") == 0 || strcmp(name, "retry") == 0 ||
        strcmp(name, "logs") == 0)
        return ka_client_main(opts, name, word);
    if (strcmp(name, "batch") == 0)
        return ka_batch_main(opts, word);
    if (count > 1 && strcmp(name, "check") == 0)
        return ka_oneshot_check_all(opts, words, (size_t)count);
    if (strcmp(name, "bench") == 0)
        return ka_bench_cli_main(opts, word);
    if (strcmp(name, "prompt") == 0)
        return ka_prompt_cli_main(opts, word);
    return ka_oneshot_main(opts, name, word);
}

static bool is_command(const char *word)
{
    static const char *const names[] = {"run",           "batch",  "inspect", "check", "verify",
                                        "differentiate", "prompt", "bench",   "serve", "submit",
                                        "status",        "cancel", "retry",   "logs"};
    for (size_t i = 0; i < KA_COUNT(names); i++)
        if (strcmp(names[i], word) == 0)
            return true;
    return false;
}

static bool wants(int argc, char **argv, const char *option)
{
    for (int i = 1; i < argc && strcmp(argv[i], "--") != 0; i++)
        if (strcmp(argv[i], option) == 0)
            return true;
    return false;
}

int ka_cli_main(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], "store") == 0)
        return ka_store_main(argc - 1, argv + 1);
    if (argc > 1 && strcmp(argv[1], "doctor") == 0)
        return ka_doctor_main(argc - 1, argv + 1);
    if (argc < 2 || strcmp(argv[1], "help") == 0 || wants(argc, argv, "--help") || wants(argc, argv, "-h")) {
        fputs(usage, stdout);
        ka_opts_print_help();
        fputs(exit_codes, stdout);
        return argc < 2 ? 2 : 0;
    }
    if (wants(argc, argv, "--version")) {
        puts("kernel-agent " KA_VERSION);
        return 0;
    }
    const char *name = is_command(argv[1]) ? argv[1] : "run";
    int skip = is_command(argv[1]) ? 2 : 1;
    struct ka_opts opts;
    struct ka_err err;
    if (argv[1][0] != '-' && skip == 1) {
        bool file = access(argv[1], F_OK) == 0;
        ka_fail(&err, 0, "unknown command '%s' (%s%s)", argv[1],
                file ? "a file is named by --file-path " : "kernel-agent --help lists the commands",
                file ? argv[1] : "");
        return ka_show_problem(&err, 2);
    }
    const char *words[FILES_MAX];
    int count = 0, most = strcmp(name, "check") == 0 ? FILES_MAX : strcmp(name, "serve") == 0 ? 0 : 1;
    int rc = ka_opts_init(&opts, ka_opts_config_path(argc, argv), &err);
    if (rc == 0)
        rc = ka_opts_parse(&opts, argc - skip, argv + skip, words, most, &count, &err);
    if (rc == 0)
        rc = ka_settings_check(&opts, &err);
    if (rc == 0)
        ka_logging_setup(&opts);
    struct command_line line = {argc - skip, argv + skip, ka_opts_config_path(argc, argv)};
    int code = rc                           ? ka_show_problem(&err, 2)
               : strcmp(name, "serve") == 0 ? serve_main(&opts, &line)
                                            : run_command(name, &opts, words, count);
    ka_opts_free(&opts);
    return code;
}
