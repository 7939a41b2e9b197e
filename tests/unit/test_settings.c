/* Settings of runs: what options come to, copies, and runs with different ones in one process. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <glob.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/app/app.h"
#include "agent/app/opts.h"
#include "agent/app/asked.h"
#include "agent/io/child.h"
#include "agent/io/loop.h"
#include "agent/run/run.h"
#include "base/files.h"
#include "base/log.h"

static struct ka_opts options(const char *const *given, size_t count)
{
    struct ka_opts opts;
    const char *words[1];
    int found;
    char *argv[24];
    for (size_t i = 0; i < count; i++)
        argv[i] = (char *)given[i];
    assert_int_equal(ka_opts_init(&opts, NULL, NULL), 0);
    assert_int_equal(ka_opts_parse(&opts, (int)count, argv, words, 1, &found, NULL), 0);
    return opts;
}

#define OPTIONS(...)                                                                                         \
    options((const char *const[]){__VA_ARGS__}, KA_COUNT(((const char *const[]){__VA_ARGS__})))

/* A process that was not opened, which is enough to say what options come to. */
static const struct ka_app nothing = {.share = (char *)"/share"};

static void settings__options__come_to_what_a_run_needs(void **state)
{
    (void)state;
    struct ka_opts opts = OPTIONS("--model", "m", "--topk", "7", "--max-cost", "2.5", "--dtype", "float16");
    struct ka_settings settings;
    assert_int_equal(ka_settings_init(&settings, &opts, &nothing, false, NULL), 0);
    ka_opts_free(&opts);
    assert_string_equal(settings.model, "m");
    assert_string_equal(settings.device, "cpu"); /* auto, in a process without a GPU */
    assert_string_equal(settings.dtype, "float16");
    assert_string_equal(settings.prompts, "/share/prompts");
    assert_int_equal(settings.topk, 7);
    assert_true(settings.max_cost > 2.4 && settings.max_cost < 2.6);
    assert_int_equal(settings.answers, KA_BACKEND_NONE);
    ka_settings_free(&settings);
}

static void settings__short_name_of_a_dtype__is_the_dtype(void **state)
{
    (void)state;
    static const char *const names[][2] = {{"fp32", "float32"}, {"bf16", "bfloat16"}, {"float64", "float64"}};
    for (size_t i = 0; i < KA_COUNT(names); i++) {
        struct ka_opts opts = OPTIONS("--dtype", names[i][0]);
        assert_string_equal(opts.run.dtype, names[i][1]);
        ka_opts_free(&opts);
    }
}

static void settings__words_that_mean_nothing__are_refused(void **state)
{
    (void)state;
    static const char *const cases[][3] = {
        {"--sweep", "some", "is not all, required"},
        {"--target", "gfx90a", "is no GPU architecture"},
        {"--require-sandbox", "full+moat", "'moat' is not"},
    };
    for (size_t i = 0; i < KA_COUNT(cases); i++) {
        struct ka_opts opts = options(cases[i], 2);
        struct ka_err err;
        assert_int_equal(ka_settings_check(&opts, &err), -EINVAL);
        assert_non_null(strstr(err.msg, cases[i][2]));
        ka_opts_free(&opts);
    }
    struct ka_opts good = OPTIONS("--sweep", "[{\"M\": 4}]", "--target", "sm_90a");
    assert_int_equal(ka_settings_check(&good, NULL), 0);
    ka_opts_free(&good);
}

static void settings__command_line_of_the_earlier_program__is_understood(void **state)
{
    (void)state;
    struct ka_opts opts = OPTIONS("--openai-model", "m", "--patience_perf_stop", "5",
                                  "--patience_parity_restore=6", "-r", "high", "-c", "262144", "--mode",
                                  "phased", "--compiler", "--rag", "--rag-topk=2", "--rag_min_sim", "0.5");
    assert_string_equal(opts.run.model, "m");
    assert_int_equal(opts.run.patience_perf, 5);
    assert_int_equal(opts.run.patience_parity, 6);
    assert_string_equal(opts.run.reasoning_effort, "high");
    assert_int_equal(opts.run.context_tokens, 262144);
    assert_string_equal(opts.run.draft, "differentiator");
    assert_int_equal(opts.run.topk, 2);
    assert_true(opts.run.min_sim == 0.5 && !opts.run.no_retrieval);
    static const char *const said[] = {
        "--openai-model is --model; ", "--patience_perf_stop is --patience-perf", "-r is --reasoning-effort",
        "--mode changes nothing",      "--compiler is --draft differentiator",    "--rag is the default"};
    for (size_t i = 0; i < KA_COUNT(said); i++)
        assert_non_null(strstr(opts.older, said[i]));
    ka_opts_free(&opts);
    struct ka_opts today = OPTIONS("--model", "m", "--patience_perf", "5");
    assert_true(today.run.patience_perf == 5 && !today.older);
    ka_opts_free(&today);
}

static void settings__older_options_that_mean_nothing_today__say_what_does(void **state)
{
    (void)state;
    static const char *const cases[][3] = {
        {"--checkpoint", "folder", "--base-url URL"},
        {"--checkpoint=folder", NULL, "OpenAI-compatible endpoint"},
        {"-r", NULL, "-r wants a value (LEVEL)"},
        {"-r", "often", "is not one of minimal"},
        {"-x", NULL, "unknown option '-x'"},
        {"-rhigh", NULL, "unknown option '-rhigh'"},
    };
    for (size_t i = 0; i < KA_COUNT(cases); i++) {
        struct ka_opts opts;
        struct ka_err err;
        const char *words[1];
        int found;
        char *argv[] = {(char *)cases[i][0], (char *)cases[i][1]};
        assert_int_equal(ka_opts_init(&opts, NULL, NULL), 0);
        assert_int_equal(ka_opts_parse(&opts, cases[i][1] ? 2 : 1, argv, words, 1, &found, &err), -EINVAL);
        assert_non_null(strstr(err.msg, cases[i][2]));
        ka_opts_free(&opts);
    }
}

static void settings__what_the_process_has_not__is_refused(void **state)
{
    (void)state;
    static const char *const cases[][3] = {
        {"--device", "cuda", "not opened for it"},
        {"--backend", "openai", "that has none"},
        {"--backend", "carrier-pigeon", "is not one of"},
        {"--backend", "vllm", "serve the checkpoint behind"},
        {"--draft", "llm", "wants a model"},
    };
    for (size_t i = 0; i < KA_COUNT(cases); i++) {
        struct ka_opts opts = options(cases[i], 2);
        struct ka_settings settings;
        struct ka_err err;
        assert_true(ka_settings_init(&settings, &opts, &nothing, true, &err) < 0);
        assert_non_null(strstr(err.msg, cases[i][2]));
        assert_null(settings.model);
        ka_opts_free(&opts);
    }
}

static void settings__copy__shares_nothing(void **state)
{
    (void)state;
    struct ka_opts opts = OPTIONS("--model", "first");
    struct ka_settings one, two;
    assert_int_equal(ka_settings_init(&one, &opts, &nothing, false, NULL), 0);
    ka_settings_copy(&two, &one);
    ka_settings_set(&two.model, "second");
    two.topk = 9;
    assert_string_equal(one.model, "first");
    ka_settings_free(&one);
    assert_string_equal(two.model, "second");
    assert_string_equal(two.target, "sm_90");
    ka_settings_free(&two);
    ka_opts_free(&opts);
}

/* ---- two runs in one process */

#define RUNS 2

static const char forward[] = "import torch\n"
                              "import triton\n"
                              "import triton.language as tl\n"
                              "from kernel_agent import autodiff\n"
                              "SWEEP = [{'N': 8}, {'N': 16}]\n"
                              "@triton.jit\n"
                              "def kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):\n"
                              "    at = tl.arange(0, BLOCK)\n"
                              "    x = tl.load(x_ptr + at, mask=at < n)\n"
                              "    tl.store(y_ptr + at, x * x, mask=at < n)\n"
                              "@autodiff(inputs_require_grad=(0,))\n"
                              "def square(x):\n"
                              "    y = torch.empty_like(x)\n"
                              "    kernel[(1,)](x, y, x.numel(), BLOCK=triton.next_power_of_2(x.numel()))\n"
                              "    return y\n"
                              "def make_args(dims, device='cuda', dtype=torch.float32):\n"
                              "    return (torch.randn(dims['N'], device=device, dtype=dtype),)\n";

struct process {
    struct ka_app app;
    int left;
    struct ka_run *runs[RUNS];
    char *out[RUNS], *box[RUNS];
};

static void on_done(struct ka_run *run, bool waiting, void *arg)
{
    struct process *process = arg;
    assert_true(waiting); /* for the answer to its question */
    assert_int_equal(ka_run_exit_code(run), 75);
    ka_run_free(run);
    if (--process->left == 0)
        ka_loop_stop(process->app.loop);
}

static char *text_of_the_one(const char *folder, const char *pattern)
{
    char *wanted = ka_path_join(folder, pattern);
    struct ka_buf text = {0};
    glob_t found;
    assert_int_equal(glob(wanted, 0, NULL, &found), 0);
    assert_int_equal(found.gl_pathc, 1);
    assert_int_equal(ka_file_read(found.gl_pathv[0], (size_t)16 << 20, &text, NULL), 0);
    globfree(&found);
    free(wanted);
    return ka_buf_steal(&text);
}

static void assert_holds(const char *folder, const char *pattern, const char *wanted, const char *foreign)
{
    char *text = text_of_the_one(folder, pattern);
    assert_non_null(strstr(text, wanted));
    assert_null(strstr(text, foreign));
    free(text);
}

/* Everything that the options hold is gone when the runs go on. */
static void begin(struct process *process, int i, const char *file, const char *const *given)
{
    struct ka_err err;
    struct ka_settings settings;
    struct ka_buf backend = {0};
    ka_buf_printf(&backend, "mailbox:%s", process->box[i]);
    struct ka_opts opts =
        OPTIONS("--model", given[0], "--sweep", given[1], "--target", given[2], "--out", process->out[i],
                "--backend", ka_buf_str(&backend), "--draft", "llm", "--no-wait", "--require-sandbox=none");
    assert_int_equal(ka_settings_init(&settings, &opts, &process->app, true, &err), 0);
    const struct ka_run_req request = {
        .settings = &settings, .file = file, .mode = KA_RUN_COMPLETE, .done = on_done, .arg = process};
    assert_int_equal(ka_run_start(&process->app, &request, &process->runs[i], &err), 0);
    ka_settings_free(&settings);
    ka_opts_free(&opts);
    ka_buf_free(&backend);
    process->left++;
}

static void runs__of_one_process__each_keep_their_own_settings(void **state)
{
    (void)state;
    static const char *const given[RUNS][3] = {{"model-of-the-first", "[{\"N\": 8}]", "sm_80"},
                                               {"model-of-the-second", "[{\"N\": 24}]", "sm_100"}};
    char dir[] = "/tmp/ka-test-settings-XXXXXX";
    struct process process = {0};
    struct ka_err err;
    struct ka_opts opts = OPTIONS("--no-compile-cache", "--no-retrieval", "--backend", "none");
    ka_log_setup(KA_LOG_ERROR, false, KA_LOG_TEXT);
    if (ka_app_open(&process.app, &opts, false, 1, &err)) {
        print_message("%s: skipped\n", err.msg);
        ka_app_close(&process.app);
        ka_opts_free(&opts);
        skip();
    }
    ka_opts_free(&opts);
    assert_non_null(mkdtemp(dir));
    char *file = ka_path_join(dir, "square.py");
    assert_int_equal(ka_file_put(file, forward, strlen(forward), NULL), 0);
    for (int i = 0; i < RUNS; i++) {
        process.out[i] = ka_path_join(dir, i ? "out-two" : "out-one");
        process.box[i] = ka_path_join(dir, i ? "box-two" : "box-one");
        begin(&process, i, file, given[i]);
    }
    ka_loop_run(process.app.loop);
    assert_int_equal(process.left, 0);
    for (int i = 0; i < RUNS; i++) {
        const char *const *mine = given[i], *const *other = given[!i];
        assert_holds(process.box[i], "square-*.request.md", mine[0], other[0]);
        assert_holds(process.out[i], "square-*/run.jsonl", mine[2], other[2]);
        assert_holds(process.out[i], "square-*/run.jsonl", i ? "{\\\"N\\\": 24}" : "{\\\"N\\\": 8}",
                     i ? "{\\\"N\\\": 8}" : "{\\\"N\\\": 24}");
        free(process.out[i]);
        free(process.box[i]);
    }
    ka_app_close(&process.app);
    ka_rmtree(dir, NULL);
    free(file);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(settings__options__come_to_what_a_run_needs),
        cmocka_unit_test(settings__command_line_of_the_earlier_program__is_understood),
        cmocka_unit_test(settings__older_options_that_mean_nothing_today__say_what_does),
        cmocka_unit_test(settings__short_name_of_a_dtype__is_the_dtype),
        cmocka_unit_test(settings__words_that_mean_nothing__are_refused),
        cmocka_unit_test(settings__what_the_process_has_not__is_refused),
        cmocka_unit_test(settings__copy__shares_nothing),
        cmocka_unit_test(runs__of_one_process__each_keep_their_own_settings),
    };
    setenv("XDG_CONFIG_HOME", "/nonexistent", 1); /* nobody's own settings */
    return cmocka_run_group_tests(tests, NULL, NULL);
}
