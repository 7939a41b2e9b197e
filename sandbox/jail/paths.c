/* What may be read, and which device nodes exist, in a jail: the one list that Landlock enforces, or the
 * mounts where there is no Landlock. Knows neither of them.
 *
 * Nothing in /etc that holds a secret: names of users, the loader's cache, the clock's zone. A path that this
 * machine does not have is skipped by whoever visits. */
#include "jail.h"

#include <glob.h>
#include <stddef.h>

static const char *const readable[] = {
    /* programs and libraries */
    "/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/opt", "/nix/store",
    /* the loader, the clock's zone, names of users */
    "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/ld.so.preload", "/etc/alternatives",
    "/etc/localtime", "/etc/timezone", "/etc/passwd", "/etc/group", "/etc/nsswitch.conf",
    "/etc/ssl/openssl.cnf",
    /* the machine */
    "/dev/random", "/dev/urandom", "/sys/devices/system", "/sys/fs/cgroup/memory.max",
    "/sys/kernel/mm/transparent_hugepage"};

static const char *const devices[] = {"/dev/null", "/dev/zero", "/dev/full"};

static const char *const gpu[] = {"/sys/devices", "/sys/bus/pci", "/sys/module/nvidia",
                                  "/sys/module/nvidia_uvm"};

static const char *const gpu_nodes[] = {"/dev/nvidia[0-9]*", "/dev/nvidiactl", "/dev/nvidia-uvm*",
                                        "/dev/nvidia-caps", "/dev/nvidia-modeset"};

/* Of a /proc that is shared with others only what tells nothing of them. */
static const char *const shared_proc[] = {
    "/proc/cpuinfo", "/proc/meminfo", "/proc/stat",   "/proc/version",
    "/proc/devices", "/proc/modules", "/proc/uptime", "/proc/filesystems",
    "/proc/loadavg", "/proc/driver",  "/proc/sys/vm", "/proc/sys/kernel",
};

static int visit_all(const char *const *paths, size_t count, enum ka_jail_access access,
                     ka_jail_visit_fn visit, void *arg)
{
    int rc = 0;
    for (size_t i = 0; i < count && !rc; i++)
        rc = visit(arg, paths[i], access);
    return rc;
}

static int visit_gpu_nodes(ka_jail_visit_fn visit, void *arg)
{
    int rc = 0;
    for (size_t i = 0; i < KA_JAIL_COUNT(gpu_nodes) && !rc; i++) {
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
    int rc = visit_all(readable, KA_JAIL_COUNT(readable), KA_PATH_READ, visit, arg);
    if (!rc)
        rc = visit_all(devices, KA_JAIL_COUNT(devices), KA_PATH_DEVICE, visit, arg);
    if (!rc && with_gpu)
        rc = visit_all(gpu, KA_JAIL_COUNT(gpu), KA_PATH_READ, visit, arg);
    if (!rc && with_gpu)
        rc = visit_gpu_nodes(visit, arg);
    return rc ? rc : visit_all(policy->ro, policy->ro_count, KA_PATH_READ, visit, arg);
}

int ka_jail_paths_visit_shared_proc(ka_jail_visit_fn visit, void *arg)
{
    return visit_all(shared_proc, KA_JAIL_COUNT(shared_proc), KA_PATH_READ, visit, arg);
}
