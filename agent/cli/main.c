/* Entry of kernel-agent: which command is meant. */
#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "cli.h"

/* A table of descriptors that grows in a program with threads waits for all processors (synchronize_rcu): up to 100 ms in
 * a pipe2() on the loop. It grows here, once. */
static void grow_descriptor_table(void)
{
    int fd = fcntl(STDIN_FILENO, F_DUPFD_CLOEXEC, 1000);
    if (fd >= 0)
        close(fd);
}

int main(int argc, char **argv)
{
    prctl(PR_SET_DUMPABLE, 0); /* the key and the secret seeds are in this process */
    signal(SIGPIPE, SIG_IGN);
    grow_descriptor_table();
    return ka_cli_main(argc, argv);
}
