/* `prompt`: what a run would ask the model first, without asking. */
#ifndef KA_PROMPT_CLI_H
#define KA_PROMPT_CLI_H

struct ka_opts;

/* Returns the exit code of the program: 0 also where no question would be put, which is said. */
int ka_prompt_cli_main(const struct ka_opts *opts, const char *path);

#endif
