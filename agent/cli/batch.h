/* `kernel-agent batch DIR`: every forward file below a folder, N runs at a time on one loop.
 *
 * What is verified and unchanged is skipped (DIR of results remembers the hash of each forward file), unfinished runs are
 * resumed, so that a killed batch goes on where it was. Ends with a table; exit code 0 if every file is verified, else the
 * largest exit code of a run (130 after an interrupt). */
#ifndef KA_BATCH_H
#define KA_BATCH_H

#include "agent/app/opts.h"

int ka_batch_main(struct ka_opts *opts, const char *dir);

#endif
