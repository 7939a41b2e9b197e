/* Memory and processes of a whole tree: a control group per jail or zygote, where this user may make one
 * (root, or a delegated unit of systemd). Both versions. Knows nothing of the other layers.
 *
 * A group is made below the caller's own (or beside it, where that one may hold no processes of its own),
 * joined by the first process of the jail, and removed by the supervisor. What a killed supervisor left is
 * removed by the next. */
#include "jail.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define PREFIX "kernel-agent-"

struct group {
    int parent; /* opened before the mount namespace, so that it stays writable */
    int procs;
};

static struct group groups[2];
static size_t group_count;
static char group_name[48];

static int write_number(int dir, const char *name, uint64_t value)
{
    char text[24];
    snprintf(text, sizeof(text), "%llu", (unsigned long long)value);
    return ka_jail_write(dir, name, text);
}

/* One that was made a moment ago is still empty: its maker's number, in its name, tells. */
static bool maker_is_gone(const char *name)
{
    int pid = atoi(name + strlen(PREFIX));
    return pid > 0 && kill(pid, 0) != 0 && errno == ESRCH;
}

/* Groups of jails that are gone; a group with processes in it refuses. */
static void sweep(int parent)
{
    int fd = openat(parent, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *dir = fd < 0 ? NULL : fdopendir(fd);
    if (!dir)
        return;
    for (struct dirent *entry; (entry = readdir(dir));)
        if (strncmp(entry->d_name, PREFIX, strlen(PREFIX)) == 0 && maker_is_gone(entry->d_name))
            unlinkat(parent, entry->d_name, AT_REMOVEDIR);
    closedir(dir);
}

/* The group's path in a hierarchy: the line "N:controller,...:/path" of /proc/self/cgroup; "" names
 * version 2. */
static bool own_path(const char *controller, char *path, size_t size)
{
    char line[PATH_MAX + 64];
    bool found = false;
    FILE *list = fopen("/proc/self/cgroup", "re");
    while (list && !found && fgets(line, sizeof(line), list)) {
        char *names = strchr(line, ':'), *at = names ? strchr(names + 1, ':') : NULL;
        if (!at)
            continue;
        *at++ = '\0';
        at[strcspn(at, "\n")] = '\0';
        found = strcmp(names + 1, controller) == 0 && snprintf(path, size, "%s", at) < (int)size;
    }
    if (list)
        fclose(list);
    return found;
}

static int set_limits(int dir, const char *controller, const struct ka_jail_policy *policy)
{
    int rc = 0;
    bool all = !*controller;
    if (policy->mem_mb && (all || strcmp(controller, "memory") == 0))
        rc = write_number(dir, all ? "memory.max" : "memory.limit_in_bytes",
                          (policy->mem_mb + policy->scratch_mb) << 20); /* the scratch lives in memory */
    if (!rc && (all || strcmp(controller, "pids") == 0))
        rc = write_number(dir, "pids.max", policy->nproc);
    return rc;
}

static int make_below(int parent, const char *controller, const struct ka_jail_policy *policy)
{
    sweep(parent);
    if (!*controller)
        ka_jail_write(parent, "cgroup.subtree_control",
                      "+memory +pids"); /* may be so already, or refused: seen below */
    if (mkdirat(parent, group_name, 0755) != 0)
        return -errno;
    int procs = -1;
    KA_JAIL_AUTO_CLOSE int dir = openat(parent, group_name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int rc = dir < 0 ? -errno : set_limits(dir, controller, policy);
    if (!rc && (procs = openat(dir, "cgroup.procs", O_WRONLY | O_CLOEXEC)) < 0)
        rc = -errno;
    if (rc)
        unlinkat(parent, group_name, AT_REMOVEDIR);
    else
        groups[group_count++] = (struct group){parent, procs};
    return rc;
}

static int make(const char *root, const char *controller, const struct ka_jail_policy *policy)
{
    char own[PATH_MAX], path[2 * PATH_MAX];
    if (!own_path(controller, own, sizeof(own)))
        return -ENOENT;
    int rc = -ENOENT;
    for (int up = 0; up < 2 && rc; up++) {
        snprintf(path, sizeof(path), "%s%s%s", root, own, up ? "/.." : "");
        if (up && strcmp(own, "/") == 0)
            break;
        int parent = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        rc = parent < 0 ? -errno : make_below(parent, controller, policy);
        if (rc && parent >= 0)
            close(parent);
    }
    return rc;
}

void ka_jail_cgroup_make(const struct ka_jail_policy *policy, struct ka_jail_report *report)
{
    if (!ka_jail_wants(policy, KA_LAYER_CGROUP))
        return;
    struct timespec now; /* numbers of processes repeat in other pid namespaces */
    clock_gettime(CLOCK_REALTIME, &now);
    snprintf(group_name, sizeof(group_name), PREFIX "%d-%lx", (int)getpid(), now.tv_nsec);
    int rc;
    if (access("/sys/fs/cgroup/cgroup.controllers", F_OK) == 0) {
        rc = make("/sys/fs/cgroup", "", policy);
    } else {
        rc = make("/sys/fs/cgroup/memory", "memory", policy);
        if (!rc)
            rc = make("/sys/fs/cgroup/pids", "pids", policy);
    }
    if (rc)
        ka_jail_cgroup_remove();
    ka_jail_note(report, KA_LAYER_CGROUP, "no control group of our own", rc);
}

void ka_jail_cgroup_join(struct ka_jail_report *report)
{
    for (size_t i = 0; i < group_count; i++) {
        if (write(groups[i].procs, "0", 1) != 1)
            ka_jail_note(report, KA_LAYER_CGROUP, "join", errno);
        close(groups[i].procs);
        groups[i].procs = -1;
    }
}

/* Processes that were killed a moment ago may still be there: the next sweep then takes the group. */
void ka_jail_cgroup_remove(void)
{
    for (size_t i = 0; i < group_count; i++) {
        unlinkat(groups[i].parent, group_name, AT_REMOVEDIR);
        close(groups[i].parent);
        ka_jail_close_at(&groups[i].procs);
    }
    group_count = 0;
}
