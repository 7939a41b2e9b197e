/* `kernel-agent store ...`: build, add, list, show, search, verify, export. */
#ifndef KA_STORE_CLI_H
#define KA_STORE_CLI_H

/* Does the verdict on one finished pair file and says on stderr what is wrong; 0 means verified. */
typedef int (*ka_verify_pair_fn)(const char *path, void *arg);

/* argv[0] is "store", argv[1] the command. Results go to stdout, progress and errors to stderr. Returns the
 * exit code: 0, 1 internal error, 2 usage or no usable store, 3 a file that cannot be used, 4 a pair that is
 * not verified. `verify` runs `kernel-agent check FILE`, the program itself, on a copy of each pair. */
int ka_store_main(int argc, char **argv);

/* The same with another way to verify a pair. */
int ka_store_main_with(int argc, char **argv, ka_verify_pair_fn verify, void *arg);

#endif
