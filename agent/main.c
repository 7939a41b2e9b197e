/* Entry of kernel-agent: which command is meant. */
#include <signal.h>
#include <sys/prctl.h>

#include "cli.h"

int main(int argc, char **argv)
{
    prctl(PR_SET_DUMPABLE, 0); /* the key and the secret seeds are in this process */
    signal(SIGPIPE, SIG_IGN);
    return ka_cli_main(argc, argv);
}
