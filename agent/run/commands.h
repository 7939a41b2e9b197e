/* Which file does what the machine commands. */
#ifndef KA_RUN_COMMANDS_H
#define KA_RUN_COMMANDS_H

#include "internal.h"

extern const struct ka_run_actions ka_run_commands;

#endif
