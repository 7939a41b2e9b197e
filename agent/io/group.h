/* The control group of a service, as systemd gives it (`Delegate=yes`). Once, before the first child. */
#ifndef KA_GROUP_H
#define KA_GROUP_H

#include <stdbool.h>

/* In version 2 a group that holds processes has no limits for those below it, so the jail could make none:
 * this process goes into one below its own, "service". Only where systemd made it, and gave its group to this
 * user. False: nothing was changed. */
bool ka_group_step_down(void);

/* The same with /proc and /sys below `root`: for tests. */
bool ka_group_step_down_at(const char *root);

#endif
