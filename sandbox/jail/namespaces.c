/* Namespaces: what the jail cannot see, it cannot touch. Knows nothing of mounts; mounts.c fills the new
 * view. */
#include "jail.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <sched.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <unistd.h>

bool ka_jail_is_privileged(void)
{
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct data[2] = {{0}};
    if (syscall(SYS_capget, &header, data) != 0)
        return false;
    return data[0].effective & (1u << CAP_SYS_ADMIN);
}

/* Identity maps: files keep their owner, and nobody is root who was not. */
int ka_jail_user_namespace_enter(void)
{
    char map[64];
    unsigned uid = geteuid(), gid = getegid();
    if (unshare(CLONE_NEWUSER) != 0)
        return -errno;
    snprintf(map, sizeof(map), "%u %u 1\n", uid, uid);
    int rc = ka_jail_write(AT_FDCWD, "/proc/self/uid_map", map);
    if (!rc)
        rc = ka_jail_write(AT_FDCWD, "/proc/self/setgroups", "deny");
    snprintf(map, sizeof(map), "%u %u 1\n", gid, gid);
    return rc ? rc : ka_jail_write(AT_FDCWD, "/proc/self/gid_map", map);
}

/* The first user namespace maps every number there is. */
static bool in_user_namespace(void)
{
    unsigned inside, outside, count = 0;
    FILE *map = fopen("/proc/self/uid_map", "re");
    bool known = map && fscanf(map, "%u %u %u", &inside, &outside, &count) == 3;
    if (map)
        fclose(map);
    return known && count != UINT32_MAX;
}

static void enter(const struct ka_jail_policy *policy, struct ka_jail_report *report,
                  enum ka_jail_layer layer, int flags, const char *what)
{
    if (ka_jail_wants(policy, layer))
        ka_jail_note(report, layer, what, unshare(flags) == 0 ? 0 : errno);
}

static void enter_mount_and_net(const struct ka_jail_policy *policy, struct ka_jail_report *report)
{
    enter(policy, report, KA_LAYER_MOUNT, CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWUTS,
          "unshare mount namespace");
    enter(policy, report, KA_LAYER_NET, CLONE_NEWNET, "unshare network namespace");
}

void ka_jail_namespaces_enter(const struct ka_jail_policy *policy, struct ka_jail_report *report)
{
    static const enum ka_jail_layer below[] = {KA_LAYER_PID, KA_LAYER_MOUNT, KA_LAYER_NET};
    unsigned set = 0;
    for (size_t i = 0; i < KA_JAIL_COUNT(below); i++)
        set |= KA_LAYER_BIT(below[i]);
    if (!(policy->want & set))
        return;

    if (!ka_jail_is_privileged()) {
        int rc = ka_jail_user_namespace_enter();
        if (rc) {
            for (size_t i = 0; i < KA_JAIL_COUNT(below); i++)
                ka_jail_note(report, below[i], "no user namespace", rc);
            return;
        }
        report->user_ns = true;
    }
    enter_mount_and_net(policy, report);
    enter(policy, report, KA_LAYER_PID, CLONE_NEWPID, "unshare pid namespace");
}

void ka_jail_namespaces_join(const struct ka_jail_policy *policy, struct ka_jail_report *report)
{
    ka_jail_note(report, KA_LAYER_PID, "not the first of a pid namespace", getpid() == 1 ? 0 : ESRCH);
    report->user_ns = in_user_namespace();
    enter_mount_and_net(policy, report);
}
