/* The log as the options ask for it. */
#ifndef KA_LOGGING_H
#define KA_LOGGING_H

struct ka_opts;

/* May be called again. Says what older spellings on the command line stand for. */
void ka_logging_setup(const struct ka_opts *opts);

#endif
