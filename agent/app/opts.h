/* Every setting of the program: one table gives the long option, the key in the configuration file, the
 * default, the range, and the help text. The order of authority: command line, then KA_<NAME> in the
 * environment, then the configuration file, then the default. */
#ifndef KA_OPTS_H
#define KA_OPTS_H

#include <jansson.h>

#include "settings.h"

#define KA_OPTS_MAX 96 /* rows of the table */

struct ka_opts {
    struct ka_settings run; /* what each run is to do, as it was asked for */
    char *file_path;
    char *resume; /* run folder; "" means the newest unfinished run of the file; NULL: a fresh run */
    char *store;
    char *base_url, *api_key_file; /* lists: agent/app/endpoints.h */
    int llm_timeout;
    char *python;
    char *gpus;   /* names, with commas; NULL: all */
    int children; /* 0: as many as the machine has places for */
    bool no_compile_cache;
    int compile_cache_mb;
    bool json;
    bool quiet;
    char *log_level, *log_format;
    char *config;
    int jobs;                           /* batch, serve */
    char *state, *address, *token_file; /* serve and its clients */
    int rate, keep_days, keep_runs;     /* serve; 0: no limit, for ever, all */
    char *watch;                        /* serve: a folder; NULL */
    int priority;                       /* submit */
    bool follow;                        /* logs */
    bool wait;
    bool force;
    char *junit;                /* check, batch */
    char *changed_since, *part; /* batch; NULL */
    bool sanitize;
    bool print;
    char *only; /* bench */
    int seconds;
    bool begun[KA_OPTS_MAX]; /* options that the command line gave */
    char *older;             /* what older spellings on the command line stand for, for the log; or NULL */
};

/* Defaults, then the configuration file, then the environment. -EINVAL / -ENOENT with file and line. */
int ka_opts_init(struct ka_opts *opts, const char *config_path, struct ka_err *err);
void ka_opts_free(struct ka_opts *opts);

/* Read the command line. Words that are no options are put into `words` (at most `max`), in order.
 * -EINVAL with a message for unknown options, values out of range, or too many words. */
int ka_opts_parse(struct ka_opts *opts, int argc, char **argv, const char **words, int max, int *count,
                  struct ka_err *err);

/* One option by its name, without the dashes, as on the command line. -EINVAL with a message. */
int ka_opts_set(struct ka_opts *opts, const char *name, const char *value, struct ka_err *err);

/* Take over from `from` what it has of runs' settings and of the options named (a list that NULL ends). Of
 * the others the names of those that differ are appended to `left`, with commas; both own what they have. */
void ka_opts_adopt(struct ka_opts *opts, struct ka_opts *from, const char *const *names, struct ka_buf *left);

/* What the command line gave of the options that are a run's, and not the client's own: name -> text (new
 * reference). */
json_t *ka_opts_given(const struct ka_opts *opts);

/* Every option that is a run's, as text: name -> text (new reference). */
json_t *ka_opts_texts(const struct ka_settings *run);

/* Take over texts of a run that began earlier, but for what the command line gives, and for where a run is
 * kept, who answers it and which machine it needs: those are asked for anew. -EINVAL with a message. */
int ka_opts_go_on(struct ka_opts *opts, const json_t *texts, struct ka_err *err);

/* The value of --config in argv, or NULL: wanted before anything else is read. */
const char *ka_opts_config_path(int argc, char **argv);

/* The table as help text, to stdout. */
void ka_opts_print_help(void);

#endif
