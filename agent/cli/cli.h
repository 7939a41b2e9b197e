/* The command line: commands, help, and how results reach stdout. */
#ifndef KA_CLI_H
#define KA_CLI_H

/* Returns the exit code of the program. */
int ka_cli_main(int argc, char **argv);

#endif
