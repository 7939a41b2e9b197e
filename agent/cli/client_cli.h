/* `submit`, `status` and `cancel`: requests to a service that runs somewhere else. */
#ifndef KA_CLIENT_CLI_H
#define KA_CLIENT_CLI_H

#include "agent/app/opts.h"

/* `word` is a file, or a run's id; NULL: none (`status` lists all). Returns the exit code of the program: 0;
 * with --wait the run's; 2 where the service is not there or refuses. */
int ka_client_main(const struct ka_opts *opts, const char *command, const char *word);

#endif
