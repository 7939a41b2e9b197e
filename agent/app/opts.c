/* The table of settings and its readers. Knows nothing of what the settings do. */
#include "opts.h"

#include <ctype.h>
#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/files.h"
#include "conf.h"
#include "older.h"

enum kind { TEXT, LIST, INT, REAL, FLAG, OPTIONAL_TEXT }; /* a list has commas, or is given again */

struct option_row {
    const char *name;
    const char *alias; /* older or common spelling, or NULL */
    enum kind kind;
    size_t offset;
    const char *initial;
    double low, high;
    const char *choices; /* "a|b|c", or NULL */
    const char *value;   /* how the value is called in the help */
    const char *help;
};

#define AT(member) offsetof(struct ka_opts, member)

static const struct option_row rows[] = {
    {"file-path", NULL, TEXT, AT(file_path), NULL, 0, 0, NULL, "FILE", "forward file to complete"},
    {"out", NULL, TEXT, AT(run.out), "generated", 0, 0, NULL, "DIR",
     "folder for run folders and finished pairs"},
    {"sweep", NULL, TEXT, AT(run.sweep), "all", 0, 0, NULL, "WHICH",
     "shapes to check: all, required, or a JSON list of dims"},
    {"path", NULL, LIST, AT(run.path), "", 0, 0, NULL, "DIR,DIR",
     "folders whose modules a forward file may import, besides its own and its package"},
    {"resume", NULL, OPTIONAL_TEXT, AT(resume), NULL, 0, 0, NULL, "[RUN]",
     "go on with a run folder (default: newest unfinished of FILE)"},
    {"store", NULL, TEXT, AT(store), NULL, 0, 0, NULL, "DB", "pair store"},
    {"topk", "rag-topk", INT, AT(run.topk), "4", 1, 64, NULL, "N",
     "similar pairs to retrieve (for none: --no-retrieval)"},
    {"min-sim", "rag-min-sim", REAL, AT(run.min_sim), "0.6", -1, 1, NULL, "X",
     "least similarity of a retrieved pair: from 0.6 about half help; the nearest is shown in any case"},
    {"rag-exclude", NULL, TEXT, AT(run.rag_exclude), "", 0, 0, NULL, "A,B",
     "leave out pairs whose path contains A or B"},
    {"no-retrieval", NULL, FLAG, AT(run.no_retrieval), "false", 0, 0, NULL, NULL,
     "show the model no similar pairs"},
    {"no-lessons", NULL, FLAG, AT(run.no_lessons), "false", 0, 0, NULL, NULL,
     "neither show the model what earlier runs learned, nor keep what this one learns"},
    {"backend", NULL, TEXT, AT(run.backend), "auto", 0, 0, NULL, "NAME",
     "openai, mailbox:DIR or none (auto: openai once a URL or key is set)"},
    {"base-url", NULL, LIST, AT(base_url), NULL, 0, 0, NULL, "URL,URL",
     "OpenAI-compatible endpoint, up to and with /v1; several are asked in turn"},
    {"model", "openai-model", TEXT, AT(run.model), "gpt-5", 0, 0, NULL, "NAME", "model to ask"},
    {"reasoning-effort", NULL, TEXT, AT(run.reasoning_effort), "", 0, 0, "|minimal|low|medium|high|xhigh",
     "LEVEL", "passed on to the model"},
    {"api-key-file", NULL, LIST, AT(api_key_file), NULL, 0, 0, NULL, "FILE,FILE",
     "file with the key, one for each endpoint (default: OPENAI_API_KEY)"},
    {"context-tokens", "context", INT, AT(run.context_tokens), "96000", 2000, 4000000, NULL, "N",
     "prompt budget"},
    {"llm-timeout", NULL, INT, AT(llm_timeout), "900", 1, 86400, NULL, "S", "longest time for one answer"},
    {"draft", NULL, TEXT, AT(run.draft), "auto", 0, 0, "auto|llm|differentiator", "WHO",
     "who writes the first candidate"},
    {"no-wait", NULL, FLAG, AT(run.no_wait), "false", 0, 0, NULL, NULL,
     "mailbox: exit 75 instead of waiting for the answer"},
    {"prompts", NULL, TEXT, AT(run.prompts), NULL, 0, 0, NULL, "DIR",
     "prompt templates to use instead of the built-in ones"},
    {"max-iters", NULL, INT, AT(run.max_iters), "12", 1, 10000, NULL, "N",
     "questions to the model in one run"},
    {"candidates", NULL, INT, AT(run.candidates), "1", 1, 32, NULL, "K",
     "questions a turn, asked at once, each for another schedule; the best answer is kept"},
    {"patience-parity", "patience-parity-restore", INT, AT(run.patience_parity), "3", 1, 1000, NULL, "N",
     "attempts below the best before rolling back to it"},
    {"patience-perf", "patience-perf-stop", INT, AT(run.patience_perf), "3", 1, 1000, NULL, "N",
     "optimise turns without gain before stopping"},
    {"min-rel-impr", NULL, REAL, AT(run.min_rel_impr), "0.02", 0, 1, NULL, "X",
     "relative gain that an optimisation must bring; a timed variant of the tuner half of it"},
    {"max-tokens", NULL, INT, AT(run.max_tokens), "0", 0, INT_MAX, NULL, "N",
     "token budget of a run, in and out (0: none)"},
    {"max-seconds", NULL, INT, AT(run.max_seconds), "0", 0, INT_MAX, NULL, "S",
     "time budget of a run (0: none)"},
    {"max-cost", NULL, REAL, AT(run.max_cost), "0", 0, 1e9, NULL, "X",
     "money budget of a run, with --price-in and --price-out (0: none)"},
    {"price-in", NULL, REAL, AT(run.price_in), "0", 0, 1e6, NULL, "X", "price of a million prompt tokens"},
    {"price-out", NULL, REAL, AT(run.price_out), "0", 0, 1e6, NULL, "X", "price of a million answer tokens"},
    {"no-optimise", NULL, FLAG, AT(run.no_optimise), "false", 0, 0, NULL, NULL,
     "stop at the first verified candidate"},
    {"device", NULL, TEXT, AT(run.device), "auto", 0, 0, "auto|cpu|cuda", "NAME", "where kernels run"},
    {"target", NULL, TEXT, AT(run.target), "sm_90", 0, 0, NULL, "ARCH",
     "GPU to compile for when there is none"},
    {"dtype", NULL, TEXT, AT(run.dtype), "", 0, 0, "|float32|float16|bfloat16|float64", "NAME",
     "dtype for make_args (default: the file's own)"},
    {"python", NULL, TEXT, AT(python), NULL, 0, 0, NULL, "PATH",
     "interpreter whose torch and triton run in the jail (default: the first on this machine that has both)"},
    {"require-sandbox", NULL, TEXT, AT(run.require_sandbox), "landlock+seccomp", 0, 0, NULL, "LAYERS",
     "refuse to run with less: full, landlock+seccomp, none"},
    {"deadline", NULL, INT, AT(run.deadline), "900", 1, 86400, NULL, "S", "longest time for one child"},
    {"gpus", NULL, LIST, AT(gpus), NULL, 0, 0, NULL, "N,N",
     "GPUs to use, by nvidia-smi's number or UUID; runs are spread over them (default: all)"},
    {"children", NULL, INT, AT(children), "0", 0, 256, NULL, "N",
     "most children at a time (0: by the machine)"},
    {"no-compile-cache", NULL, FLAG, AT(no_compile_cache), "false", 0, 0, NULL, NULL,
     "compile every kernel anew"},
    {"compile-cache-mb", NULL, INT, AT(compile_cache_mb), "512", 1, 1 << 20, NULL, "N",
     "size of the cache of compiled kernels"},
    {"json", NULL, FLAG, AT(json), "false", 0, 0, NULL, NULL, "one result object on stdout"},
    {"quiet", NULL, FLAG, AT(quiet), "false", 0, 0, NULL, NULL, "errors only on stderr"},
    {"log-level", NULL, TEXT, AT(log_level), "info", 0, 0, "error|warn|info|debug", "LEVEL",
     "what to show on stderr"},
    {"log-format", NULL, TEXT, AT(log_format), "auto", 0, 0, "auto|text|journal|json", "FORM",
     "lines on stderr: text, journal (a level for systemd) or json (auto: journal where stderr is one)"},
    {"config", NULL, TEXT, AT(config), NULL, 0, 0, NULL, "FILE", "configuration file"},
    {"jobs", NULL, INT, AT(jobs), "2", 1, 256, NULL, "N", "batch, serve: runs at a time"},
    {"force", NULL, FLAG, AT(force), "false", 0, 0, NULL, NULL, "batch: also what is verified and unchanged"},
    {"state", NULL, TEXT, AT(state), NULL, 0, 0, NULL, "DIR",
     "serve, its clients: folder of the queue (default: kernel-agent below $XDG_STATE_HOME)"},
    {"address", NULL, TEXT, AT(address), NULL, 0, 0, NULL, "ADDR",
     "serve, its clients: unix:PATH or 127.0.0.1:PORT (default: the socket in the state folder)"},
    {"token-file", NULL, TEXT, AT(token_file), NULL, 0, 0, NULL, "FILE",
     "serve, its clients: file with the token; over TCP it must be there"},
    {"rate", NULL, INT, AT(rate), "100", 0, 1000000, NULL, "N",
     "serve: requests a second of each client, four times as many of all (0: no limit)"},
    {"keep-days", NULL, INT, AT(keep_days), "0", 0, 36500, NULL, "N",
     "serve: remove runs so many days after their end (0: never)"},
    {"keep-runs", NULL, INT, AT(keep_runs), "0", 0, 1000000, NULL, "N",
     "serve: remove all but the newest runs that have ended (0: none)"},
    {"watch", NULL, TEXT, AT(watch), NULL, 0, 0, NULL, "DIR",
     "serve: submit forward files below a folder, again when they change"},
    {"priority", NULL, INT, AT(priority), "0", -1000, 1000, NULL, "N", "submit: larger ones go first"},
    {"wait", NULL, FLAG, AT(wait), "false", 0, 0, NULL, NULL,
     "submit, retry: until the run has ended, with its exit code"},
    {"follow", NULL, FLAG, AT(follow), "false", 0, 0, NULL, NULL, "logs: until the run has ended"},
    {"changed-since", NULL, TEXT, AT(changed_since), NULL, 0, 0, NULL, "REV",
     "batch: only files that differ from a revision (git), or may import what does"},
    {"part", NULL, TEXT, AT(part), NULL, 0, 0, NULL, "K/N",
     "batch: the K-th of N parts of the files, for jobs on several machines"},
    {"junit", NULL, TEXT, AT(junit), NULL, 0, 0, NULL, "FILE",
     "check, batch: write the verdicts as JUnit XML"},
    {"function", NULL, TEXT, AT(run.function), NULL, 0, 0, NULL, "NAME",
     "check, inspect: which function of a module is meant (default: check each of them)"},
    {"fail-fast", NULL, FLAG, AT(run.fail_fast), "false", 0, 0, NULL, NULL,
     "check: stop at the first case that fails"},
    {"sanitize", NULL, FLAG, AT(sanitize), "false", 0, 0, NULL, NULL,
     "check: also run memcheck, racecheck and initcheck of compute-sanitizer (GPU)"},
    {"print", NULL, FLAG, AT(print), "false", 0, 0, NULL, NULL,
     "print the finished backward; differentiate: in place of the summary"},
    {"only", NULL, TEXT, AT(only), "", 0, 0, "|bwd|fwd|both", "PASS",
     "bench: time the backward, the forward, or both in one call, and nothing else"},
    {"seconds", NULL, INT, AT(seconds), "60", 1, 86400, NULL, "N",
     "bench: seconds of timing, of all shapes together; compiling comes on top"},
};

static void *slot(struct ka_opts *opts, const struct option_row *row)
{
    return (char *)opts + row->offset;
}

static bool is_choice(const char *choices, const char *value)
{
    size_t len = strlen(value);
    for (const char *at = choices; at; at = strchr(at, '|') ? strchr(at, '|') + 1 : NULL)
        if (strncmp(at, value, len) == 0 && (at[len] == '|' || at[len] == '\0'))
            return true;
    return false;
}

/* The dtype that people mean by its short name; else the value itself. */
static const char *spelled_out(const char *value)
{
    static const char *const names[][2] = {{"fp32", "float32"},
                                           {"fp16", "float16"},
                                           {"bf16", "bfloat16"},
                                           {"fp64", "float64"},
                                           {"half", "float16"}};
    for (size_t i = 0; i < KA_COUNT(names); i++)
        if (strcmp(value, names[i][0]) == 0)
            return names[i][1];
    return value;
}

static int set_number(struct ka_opts *opts, const struct option_row *row, const char *value,
                      const char *where, struct ka_err *err)
{
    char *end;
    errno = 0;
    double number = row->kind == INT ? (double)strtol(value, &end, 10) : strtod(value, &end);
    if (end == value || *end || errno || !isfinite(number))
        return ka_fail(err, -EINVAL, "%s%s: '%s' is no %s", where, row->name, value,
                       row->kind == INT ? "whole number" : "number");
    if (number < row->low || number > row->high)
        return ka_fail(err, -EINVAL, "%s%s: %s is out of range (%g to %g)", where, row->name, value, row->low,
                       row->high);
    if (row->kind == INT)
        *(int *)slot(opts, row) = (int)number;
    else
        *(double *)slot(opts, row) = number;
    return 0;
}

static int set_flag(struct ka_opts *opts, const struct option_row *row, const char *value, const char *where,
                    struct ka_err *err)
{
    bool on = strcmp(value, "true") == 0 || strcmp(value, "1") == 0;
    if (!on && strcmp(value, "false") != 0 && strcmp(value, "0") != 0)
        return ka_fail(err, -EINVAL, "%s%s: '%s' is neither true nor false", where, row->name, value);
    *(bool *)slot(opts, row) = on;
    return 0;
}

/* `where` is put before the name in messages: "--" or "file:line: ". */
static int set_value(struct ka_opts *opts, const struct option_row *row, const char *value, const char *where,
                     struct ka_err *err)
{
    if (row->kind == INT || row->kind == REAL)
        return set_number(opts, row, value, where, err);
    if (row->kind == FLAG)
        return set_flag(opts, row, value, where, err);
    if (strcmp(row->name, "dtype") == 0)
        value = spelled_out(value);
    if (row->choices && !is_choice(row->choices, value))
        return ka_fail(err, -EINVAL, "%s%s: '%s' is not one of %s", where, row->name, value,
                       row->choices[0] == '|' ? row->choices + 1 : row->choices);
    char **text = slot(opts, row);
    free(*text);
    *text = ka_strdup(value);
    return 0;
}

/* What the command line says comes in place of other settings; a list that it gives again is longer. */
static int set_option(struct ka_opts *opts, const struct option_row *row, const char *value,
                      struct ka_err *err)
{
    _Static_assert(KA_COUNT(rows) <= KA_OPTS_MAX, "a place for each");
    bool *begun = &opts->begun[row - rows], again = row->kind == LIST && *begun;
    KA_AUTO_FREE char *longer = again ? ka_format("%s,%s", *(char **)slot(opts, row), value) : NULL;
    *begun = true;
    return set_value(opts, row, longer ? longer : value, "--", err);
}

/* Words of a name may be joined by underscores too. */
static bool is_called(const char *row, const char *name, size_t len)
{
    size_t i = 0;
    while (row && i < len && row[i] && row[i] == (name[i] == '_' ? '-' : name[i]))
        i++;
    return row && i == len && !row[i];
}

static const struct option_row *find_row(const char *name, size_t len)
{
    for (size_t i = 0; i < KA_COUNT(rows); i++)
        if (is_called(rows[i].name, name, len) || is_called(rows[i].alias, name, len))
            return &rows[i];
    return NULL;
}

int ka_opts_set(struct ka_opts *opts, const char *name, const char *value, struct ka_err *err)
{
    const struct option_row *row = find_row(name, strlen(name));
    return row ? set_value(opts, row, value, "", err)
               : ka_fail(err, -EINVAL, "there is no option '%.100s'", name);
}

static int on_conf_key(void *arg, const char *key, const struct ka_conf_value *value, int line,
                       struct ka_err *err)
{
    char text[64];
    (void)line;
    const struct option_row *row = find_row(key, strlen(key));
    if (!row)
        return ka_fail(err, -EINVAL, "unknown setting '%s' (kernel-agent --help lists them)", key);
    if (value->type == KA_CONF_BOOLEAN)
        snprintf(text, sizeof(text), "%s", value->boolean ? "true" : "false");
    else if (value->type == KA_CONF_INTEGER)
        snprintf(text, sizeof(text), "%lld", (long long)value->integer);
    else if (value->type == KA_CONF_NUMBER)
        snprintf(text, sizeof(text), "%.17g", value->number);
    return set_value(arg, row, value->type == KA_CONF_STRING ? value->string : text, "", err);
}

static int read_config(struct ka_opts *opts, const char *config_path, struct ka_err *err)
{
    KA_AUTO_FREE char *path = config_path ? ka_strdup(config_path)
                                          : ka_conf_default_path(getenv("XDG_CONFIG_HOME"), getenv("HOME"));
    KA_AUTO_BUF struct ka_buf text = {0};
    int rc = path ? ka_file_read(path, 1 << 20, &text, err) : 0;
    if (rc)
        return rc == -ENOENT && !config_path ? 0 : rc; /* having none is normal */
    return ka_conf_parse(ka_buf_str(&text), text.len, path, on_conf_key, opts, err);
}

static int read_environment(struct ka_opts *opts, struct ka_err *err)
{
    for (size_t i = 0; i < KA_COUNT(rows); i++) {
        char name[80];
        int n = snprintf(name, sizeof(name), "KA_%s", rows[i].name);
        for (int at = 0; at < n; at++)
            name[at] = name[at] == '-' ? '_' : (char)toupper((unsigned char)name[at]);
        const char *value = getenv(name);
        int rc = value ? set_value(opts, &rows[i], value, "environment: KA_", err) : 0;
        if (rc)
            return rc;
    }
    return 0;
}

int ka_opts_init(struct ka_opts *opts, const char *config_path, struct ka_err *err)
{
    memset(opts, 0, sizeof(*opts));
    for (size_t i = 0; i < KA_COUNT(rows); i++)
        if (rows[i].initial)
            set_value(opts, &rows[i], rows[i].initial, "default ", NULL);
    int rc = read_config(opts, config_path, err);
    return rc ? rc : read_environment(opts, err);
}

void ka_opts_free(struct ka_opts *opts)
{
    for (size_t i = 0; i < KA_COUNT(rows); i++)
        if (rows[i].kind == TEXT || rows[i].kind == LIST || rows[i].kind == OPTIONAL_TEXT)
            free(*(char **)slot(opts, &rows[i]));
    free(opts->older);
    memset(opts, 0, sizeof(*opts));
}

static void say_older(struct ka_opts *opts, const char *dashes, const char *name, const char *text)
{
    struct ka_buf said = {0};
    ka_buf_printf(&said, "%s%s%s%s %s", opts->older ? opts->older : "", opts->older ? "; " : "", dashes, name,
                  text);
    free(opts->older);
    opts->older = ka_strdup(ka_buf_str(&said));
    ka_buf_free(&said);
}

/* Something that the earlier program had; `*at` is at it. */
static int follow_older(struct ka_opts *opts, const struct ka_older *older, bool has_value, int argc, int *at,
                        struct ka_err *err)
{
    if (older->refused)
        return ka_fail(err, -EINVAL, "--%s: %s", older->name, older->text);
    *at += older->has_value && !has_value && *at + 1 < argc ? 2 : 1;
    say_older(opts, "--", older->name, older->text);
    return older->option
               ? set_value(opts, find_row(older->option, strlen(older->option)), older->value, "--", err)
               : 0;
}

/* What stands for a value, or NULL. `*at`, past the option, is moved past what was used. */
static const char *take_value(const struct option_row *row, int argc, char **argv, int *at)
{
    const char *next = *at < argc ? argv[*at] : NULL;
    if (row->kind == FLAG)
        return "true";
    if (row->kind == OPTIONAL_TEXT && (!next || next[0] == '-'))
        return "";
    *at += next ? 1 : 0;
    return next;
}

/* "-r value" */
static int parse_letter(struct ka_opts *opts, int argc, char **argv, int *at, struct ka_err *err)
{
    const char *arg = argv[*at], *option = arg[2] ? NULL : ka_older_letter(arg[1]);
    if (!option)
        return ka_fail(err, -EINVAL, "unknown option '%s' (options are spelled --like-this)", arg);
    const struct option_row *row = find_row(option, strlen(option));
    char text[64];
    ++*at;
    const char *value = take_value(row, argc, argv, at);
    if (!value)
        return ka_fail(err, -EINVAL, "%s wants a value (%s)", arg, row->value);
    snprintf(text, sizeof(text), "is --%s", option);
    say_older(opts, "", arg, text);
    return set_option(opts, row, value, err);
}

/* One "--name", "--name=value" or "--name value". `*at` is moved past what was used. */
static int parse_one(struct ka_opts *opts, int argc, char **argv, int *at, struct ka_err *err)
{
    const char *name = argv[*at] + 2;
    const char *equals = strchr(name, '=');
    size_t len = equals ? (size_t)(equals - name) : strlen(name);
    const struct option_row *row = find_row(name, len);
    const struct ka_older *older = row ? NULL : ka_older_find(name, len);
    if (older)
        return follow_older(opts, older, equals != NULL, argc, at, err);
    if (!row)
        return ka_fail(err, -EINVAL, "unknown option '%s' (kernel-agent --help lists the options)",
                       argv[*at]);
    ++*at;
    const char *value = equals ? equals + 1 : take_value(row, argc, argv, at);
    if (!value)
        return ka_fail(err, -EINVAL, "--%s wants a value (%s)", row->name, row->value);
    if (!is_called(row->name, name, len)) {
        char used[64], text[80];
        snprintf(used, sizeof(used), "%.*s", (int)(len < 60 ? len : 60), name);
        snprintf(text, sizeof(text), "is --%s", row->name);
        say_older(opts, "--", used, text);
    }
    return set_option(opts, row, value, err);
}

int ka_opts_parse(struct ka_opts *opts, int argc, char **argv, const char **words, int max, int *count,
                  struct ka_err *err)
{
    int found = 0;
    bool only_words = false;
    for (int at = 0; at < argc;) {
        const char *arg = argv[at];
        if (!only_words && strcmp(arg, "--") == 0) {
            only_words = true;
            at++;
        } else if (!only_words && arg[0] == '-' && arg[1] == '-') {
            int rc = parse_one(opts, argc, argv, &at, err);
            if (rc)
                return rc;
        } else if (!only_words && arg[0] == '-' && arg[1]) {
            int rc = parse_letter(opts, argc, argv, &at, err);
            if (rc)
                return rc;
        } else {
            if (found == max)
                return ka_fail(err, -EINVAL, "'%s': one word too many", arg);
            words[found++] = arg;
            at++;
        }
    }
    *count = found;
    return 0;
}

static bool is_one_of(const char *const *names, const char *name)
{
    while (*names && strcmp(*names, name) != 0)
        names++;
    return *names != NULL;
}

static size_t size_of(const struct option_row *row)
{
    return row->kind == INT    ? sizeof(int)
           : row->kind == REAL ? sizeof(double)
           : row->kind == FLAG ? sizeof(bool)
                               : sizeof(char *);
}

static bool is_same(struct ka_opts *opts, struct ka_opts *other, const struct option_row *row)
{
    if (row->kind == INT || row->kind == REAL || row->kind == FLAG)
        return memcmp(slot(opts, row), slot(other, row), size_of(row)) == 0;
    const char *text = *(char **)slot(opts, row), *others = *(char **)slot(other, row);
    return text && others ? strcmp(text, others) == 0 : text == others;
}

void ka_opts_adopt(struct ka_opts *opts, struct ka_opts *from, const char *const *names, struct ka_buf *left)
{
    _Static_assert(AT(run) == 0, "those of runs come first");
    for (size_t i = 0; i < KA_COUNT(rows); i++) {
        const struct option_row *row = &rows[i];
        bool of_run = row->offset < sizeof(opts->run);
        char mine[sizeof(double)];
        if (is_same(opts, from, row))
            continue;
        if (!of_run && !is_one_of(names, row->name)) {
            ka_buf_printf(left, "%s--%s", left->len ? ", " : "", row->name);
            continue;
        }
        memcpy(mine, slot(opts, row), size_of(row)); /* what was is freed with `from` */
        memcpy(slot(opts, row), slot(from, row), size_of(row));
        memcpy(slot(from, row), mine, size_of(row));
    }
}

/* Of the command line itself. */
static bool is_clients_own(const char *name)
{
    static const char *const own[] = {"state",  "address",    "token-file", "priority", "wait",
                                      "json",   "log-level",  "quiet",      "config",   "file-path",
                                      "follow", "log-format", NULL};
    return is_one_of(own, name);
}

static json_t *value_of(const struct ka_opts *opts, const struct option_row *row)
{
    const void *at = (const char *)opts + row->offset;
    if (row->kind == INT)
        return json_sprintf("%d", *(const int *)at);
    if (row->kind == REAL)
        return json_sprintf("%.17g", *(const double *)at);
    return json_string(row->kind == FLAG ? *(const bool *)at ? "true" : "false" : *(char *const *)at);
}

json_t *ka_opts_given(const struct ka_opts *opts)
{
    json_t *given = json_object();
    for (size_t i = 0; i < KA_COUNT(rows); i++)
        if (opts->begun[i] && !is_clients_own(rows[i].name))
            json_object_set_new(given, rows[i].name, value_of(opts, &rows[i]));
    return given;
}

json_t *ka_opts_texts(const struct ka_settings *run)
{
    _Static_assert(AT(run) == 0, "those of runs come first");
    json_t *texts = json_object();
    for (size_t i = 0; i < KA_COUNT(rows); i++)
        if (rows[i].offset < sizeof(*run))
            json_object_set_new(texts, rows[i].name, value_of((const struct ka_opts *)run, &rows[i]));
    return texts; /* without those that are NULL */
}

int ka_opts_go_on(struct ka_opts *opts, const json_t *texts, struct ka_err *err)
{
    static const char *const anew[] = {"out", "backend", "draft", "no-wait", "device", NULL};
    int rc = 0;
    for (size_t i = 0; i < KA_COUNT(rows) && rc == 0; i++) {
        const char *text = json_string_value(json_object_get(texts, rows[i].name));
        if (text && rows[i].offset < sizeof(opts->run) && !opts->begun[i] && !is_one_of(anew, rows[i].name))
            rc = set_value(opts, &rows[i], text, "of the run that began: --", err);
    }
    return rc;
}

const char *ka_opts_config_path(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--") == 0)
            break;
        if (ka_starts_with(argv[i], "--config="))
            return argv[i] + strlen("--config=");
        if (strcmp(argv[i], "--config") == 0 && i + 1 < argc)
            return argv[i + 1];
    }
    return NULL;
}

void ka_opts_print_help(void)
{
    for (size_t i = 0; i < KA_COUNT(rows); i++) {
        char left[64];
        snprintf(left, sizeof(left), "--%s %s", rows[i].name, rows[i].value ? rows[i].value : "");
        printf("  %-27s %s", left, rows[i].help);
        if (rows[i].initial && rows[i].initial[0] && rows[i].kind != FLAG)
            printf(" [%s]", rows[i].initial);
        putchar('\n');
    }
}
