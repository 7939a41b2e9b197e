/* What this process may use of the machine: what is built in, less what its control groups allow. Containers
 * and batch systems set such limits, and /proc/meminfo does not show them.
 *
 * Reads a few small files of /proc and /sys, asks the kernel for the affinity, and keeps nothing: any
 * thread. */
#ifndef KA_MACHINE_H
#define KA_MACHINE_H

#include <stdint.h>

struct ka_machine {
    uint64_t memory_bytes; /* built in, or the smallest limit of a group around us; 0: unknown */
    uint64_t
        memory_available_bytes; /* what may still be taken, page cache counted as free; 0: none or unknown */
    unsigned cpus; /* that we may run on, no more than the quota pays for (rounded up); at least 1 */
    uint64_t host_memory_bytes; /* built in; 0: unknown */
    unsigned host_cpus;         /* online; at least 1 */
};

/* Never fails: what cannot be read limits nothing. Groups of version 1 and 2, with all their ancestors. */
void ka_machine_read(struct ka_machine *out);

/* The same with /proc and /sys below `root`: for tests. The affinity and `host_cpus` are the kernel's own. */
void ka_machine_read_at(const char *root, struct ka_machine *out);

#endif
