/* Memory and processors, from files of the kernel. Knows nothing of children. */
#include "machine.h"

#include <inttypes.h>
#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/base.h"
#include "base/files.h"

#define FILE_MAX ((size_t)64 << 10)
#define CPUS_MAX 16384
#define NO_LIMIT ((uint64_t)1 << 62) /* version 1 says about twice as much where there is none */
#define GROUPS "sys/fs/cgroup"

/* ---- small files ---- */

static bool read_text(const char *folder, const char *name, struct ka_buf *out)
{
    KA_AUTO_FREE char *path = ka_path_join(folder, name);
    ka_buf_clear(out);
    return ka_file_read(path, FILE_MAX, out, NULL) == 0;
}

/* A file that holds one number. "max" is none. */
static bool read_number(const char *folder, const char *name, uint64_t *out)
{
    KA_AUTO_BUF struct ka_buf text = {0};
    return read_text(folder, name, &text) && sscanf(ka_buf_str(&text), "%" SCNu64, out) == 1;
}

/* The number after `key` at the start of a line. */
static bool find_number(const char *text, const char *key, uint64_t *out)
{
    size_t len = strlen(key);
    for (const char *line = text; *line; line += strcspn(line, "\n"), line += *line == '\n')
        if (strncmp(line, key, len) == 0)
            return sscanf(line + len, "%" SCNu64, out) == 1;
    return false;
}

static uint64_t smaller(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

/* ---- one group ---- */

struct group_files {
    const char *limit, *used, *cache; /* `cache`: line of memory.stat with what is given back on demand */
};

static const struct group_files v1 = {"memory.limit_in_bytes", "memory.usage_in_bytes",
                                      "total_inactive_file "};
static const struct group_files v2 = {"memory.max", "memory.current", "inactive_file "};

static void apply_memory(const char *group, const struct group_files *files, struct ka_machine *m)
{
    uint64_t limit, used = 0, cache = 0;
    KA_AUTO_BUF struct ka_buf stat = {0};
    if (!read_number(group, files->limit, &limit))
        return;
    if (read_number(group, files->used, &used) && read_text(group, "memory.stat", &stat) &&
        find_number(ka_buf_str(&stat), files->cache, &cache))
        used -= smaller(cache, used);
    m->memory_bytes = smaller(m->memory_bytes, limit);
    m->memory_available_bytes = smaller(m->memory_available_bytes, limit - smaller(used, limit));
}

static void apply_quota(uint64_t quota, uint64_t period, struct ka_machine *m)
{
    if (quota == 0 || period == 0)
        return;
    uint64_t paid = quota / period + (quota % period != 0);
    if (paid < m->cpus)
        m->cpus = (unsigned)paid;
}

static void apply_cpu_v2(const char *group, struct ka_machine *m)
{
    uint64_t quota, period;
    KA_AUTO_BUF struct ka_buf text = {0};
    if (read_text(group, "cpu.max", &text) &&
        sscanf(ka_buf_str(&text), "%" SCNu64 " %" SCNu64, &quota, &period) == 2)
        apply_quota(quota, period, m);
}

static void apply_cpu_v1(const char *group, struct ka_machine *m)
{
    uint64_t quota, period; /* a quota of -1 is none, and as a number more than all there is */
    if (read_number(group, "cpu.cfs_quota_us", &quota) && read_number(group, "cpu.cfs_period_us", &period))
        apply_quota(quota, period, m);
}

/* ---- the groups around this process ---- */

enum part { MEMORY_V1, CPU_V1, ALL_V2 };

static void apply(enum part part, const char *group, struct ka_machine *m)
{
    if (part == CPU_V1)
        apply_cpu_v1(group, m);
    else
        apply_memory(group, part == MEMORY_V1 ? &v1 : &v2, m);
    if (part == ALL_V2)
        apply_cpu_v2(group, m);
}

/* The group and its ancestors: the smallest limit counts. In a container the path is often the host's, of
 * which only the top is mounted here; what is missing limits nothing. */
static void walk(const char *root, const char *hierarchy, const char *path, enum part part,
                 struct ka_machine *m)
{
    KA_AUTO_FREE char *mount = ka_path_join(root, hierarchy);
    KA_AUTO_FREE char *at =
        ka_strdup(strcmp(path, "/") == 0 || strstr(path, "/..") ? "" : path); /* "/..": not visible here */
    for (size_t len = strlen(at);; len = (size_t)(strrchr(at, '/') - at)) {
        at[len] = '\0';
        KA_AUTO_FREE char *group = ka_path_join(mount, at[0] == '/' ? at + 1 : at);
        apply(part, group, m);
        if (!strchr(at, '/'))
            return;
    }
}

/* "0::/path" is the group of version 2, "4:cpu,cpuacct:/path" one of version 1. */
static void apply_line(const char *root, const char *line, struct ka_machine *m)
{
    const char *controllers = strchr(line, ':'), *path = controllers ? strchr(controllers + 1, ':') : NULL;
    if (!path)
        return;
    KA_AUTO_FREE char *list = ka_format(",%.*s,", (int)(path - controllers) - 1, controllers + 1);
    path++;
    if (strcmp(list, ",,") == 0)
        walk(root, GROUPS, path, ALL_V2, m);
    if (strstr(list, ",memory,"))
        walk(root, GROUPS "/memory", path, MEMORY_V1, m);
    if (strstr(list, ",cpu,")) {
        walk(root, GROUPS "/cpu", path, CPU_V1, m);
        walk(root, GROUPS "/cpu,cpuacct", path, CPU_V1, m); /* where nobody linked it to the former */
    }
}

static void apply_groups(const char *root, struct ka_machine *m)
{
    KA_AUTO_BUF struct ka_buf text = {0};
    char *rest = NULL;
    if (read_text(root, "proc/self/cgroup", &text) && text.len)
        for (char *line = strtok_r(text.data, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest))
            apply_line(root, line, m);
}

/* ---- the whole ---- */

static unsigned count_allowed(unsigned online)
{
    size_t size = CPU_ALLOC_SIZE(CPUS_MAX);
    cpu_set_t *set = CPU_ALLOC(CPUS_MAX);
    int count = set && sched_getaffinity(0, size, set) == 0 ? CPU_COUNT_S(size, set) : 0;
    CPU_FREE(set);
    return count > 0 ? (unsigned)count : online;
}

static void read_meminfo(const char *root, struct ka_machine *m)
{
    KA_AUTO_BUF struct ka_buf text = {0};
    uint64_t kib;
    read_text(root, "proc/meminfo", &text);
    if (find_number(ka_buf_str(&text), "MemTotal:", &kib))
        m->memory_bytes = m->host_memory_bytes = kib << 10;
    if (find_number(ka_buf_str(&text), "MemAvailable:", &kib))
        m->memory_available_bytes = kib << 10;
}

void ka_machine_read_at(const char *root, struct ka_machine *out)
{
    long online = sysconf(_SC_NPROCESSORS_ONLN);
    struct ka_machine m = {.memory_bytes = NO_LIMIT,
                           .memory_available_bytes = NO_LIMIT,
                           .host_cpus = online > 0 ? (unsigned)online : 1};
    m.cpus = count_allowed(m.host_cpus);
    read_meminfo(root, &m);
    apply_groups(root, &m);
    m.memory_bytes %= NO_LIMIT;
    m.memory_available_bytes %= NO_LIMIT;
    *out = m;
}

void ka_machine_read(struct ka_machine *out)
{
    ka_machine_read_at("/", out);
}
