/* What may be read, and which device nodes exist, in a jail: the one list that Landlock enforces, or the
 * mounts where there is no Landlock. Knows neither of them.
 *
 * Nothing in /etc that holds a secret: names of users, the loader's cache, the clock's zone. A path that this
 * machine does not have is skipped by whoever visits. */
#include "jail.h"

#include <glob.h>
#include <stddef.h>

#define R KA_PATH_READ
#define D KA_PATH_DEVICE

struct entry {
    const char *path;
    enum ka_jail_access access;
};

static const struct entry always[] = {
    {"/usr", R},
    {"/lib", R},
    {"/lib32", R},
    {"/lib64", R},
    {"/bin", R},
    {"/sbin", R},
    {"/opt", R},
    {"/nix/store", R},
    {"/etc/ld.so.cache", R},
    {"/etc/ld.so.conf", R},
    {"/etc/ld.so.conf.d", R},
    {"/etc/ld.so.preload", R},
    {"/etc/alternatives", R},
    {"/etc/localtime", R},
    {"/etc/timezone", R},
    {"/etc/passwd", R},
    {"/etc/group", R},
    {"/etc/nsswitch.conf", R},
    {"/etc/ssl/openssl.cnf", R},
    {"/dev/null", D},
    {"/dev/zero", D},
    {"/dev/full", D},
    {"/dev/random", R},
    {"/dev/urandom", R},
    {"/sys/devices/system", R},
    {"/sys/fs/cgroup/memory.max", R},
    {"/sys/kernel/mm/transparent_hugepage", R},
};

static const struct entry gpu[] = {
    {"/sys/devices", R},
    {"/sys/bus/pci", R},
    {"/sys/module/nvidia", R},
    {"/sys/module/nvidia_uvm", R},
};

static const char *const gpu_nodes[] = {"/dev/nvidia[0-9]*", "/dev/nvidiactl", "/dev/nvidia-uvm*",
                                        "/dev/nvidia-caps", "/dev/nvidia-modeset"};

/* Of a /proc that is shared with others only what tells nothing of them. */
static const char *const shared_proc[] = {
    "/proc/cpuinfo", "/proc/meminfo", "/proc/stat",   "/proc/version",
    "/proc/devices", "/proc/modules", "/proc/uptime", "/proc/filesystems",
    "/proc/loadavg", "/proc/driver",  "/proc/sys/vm", "/proc/sys/kernel",
};

static int visit_all(const struct entry *entries, size_t count, ka_jail_visit_fn visit, void *arg)
{
    int rc = 0;
    for (size_t i = 0; i < count && !rc; i++)
        rc = visit(arg, entries[i].path, entries[i].access);
    return rc;
}

static int visit_gpu_nodes(ka_jail_visit_fn visit, void *arg)
{
    int rc = 0;
    for (size_t i = 0; i < sizeof(gpu_nodes) / sizeof(gpu_nodes[0]) && !rc; i++) {
        glob_t found = {0};
        if (glob(gpu_nodes[i], 0, NULL, &found) == 0)
            for (size_t j = 0; j < found.gl_pathc && !rc; j++)
                rc = visit(arg, found.gl_pathv[j], KA_PATH_GPU_NODE);
        globfree(&found);
    }
    return rc;
}

int ka_jail_paths_visit(const struct ka_jail_policy *policy, ka_jail_visit_fn visit, void *arg)
{
    bool with_gpu = policy->profile == KA_PROFILE_GPU;
    int rc = visit_all(always, sizeof(always) / sizeof(always[0]), visit, arg);
    if (!rc && with_gpu)
        rc = visit_all(gpu, sizeof(gpu) / sizeof(gpu[0]), visit, arg);
    if (!rc && with_gpu)
        rc = visit_gpu_nodes(visit, arg);
    for (size_t i = 0; i < policy->ro_count && !rc; i++)
        rc = visit(arg, policy->ro[i], KA_PATH_READ);
    return rc;
}

int ka_jail_paths_visit_shared_proc(ka_jail_visit_fn visit, void *arg)
{
    int rc = 0;
    for (size_t i = 0; i < sizeof(shared_proc) / sizeof(shared_proc[0]) && !rc; i++)
        rc = visit(arg, shared_proc[i], KA_PATH_READ);
    return rc;
}
