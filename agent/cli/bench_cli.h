/* The command bench: one file timed, its table or its JSON on stdout. */
#ifndef KA_BENCH_CLI_H
#define KA_BENCH_CLI_H

struct ka_opts;

/* Returns the exit code of the program. */
int ka_bench_cli_main(const struct ka_opts *opts, const char *path);

#endif
