/* The command line of the jail, and the environment and readable folders that follow from it. Used by ka-jail
 * and, for the children of a zygote, by libka_jail.so. Knows nothing of processes. */
#include "jail.h"

#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <glob.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

const char ka_jail_usage[] =
    "usage: ka-jail --scratch DIR [options] -- PROGRAM [ARGS...]\n"
    "  --scratch DIR      absolute path; the only folder that the program can write\n"
    "  --ro PATH          one more path that it can read (repeat)\n"
    "  --profile P        cpu (default) or gpu\n"
    "  --env NAME=VALUE   add to its environment (repeat)\n"
    "  --mem-mb N  --cpu-s N  --fsize-mb N  --nproc N  --scratch-mb N\n"
    "  --require LAYERS   none, default, full, all, or names joined with '+'; exit 112 if one is missing\n"
    "  --without LAYERS   leave layers out\n"
    "  --result-fd N      write the report line here, with the scratch descriptor if N is a socket\n"
    "  --parent PID       end at once unless PID is the parent\n"
    "  --local-sockets    gpu profile: sockets between its own processes, given layers net and mount\n"
    "  --zygote           execute PROGRAM without layers, able to make jails (libka_jail.so)\n"
    "layers: limits caps pid mount net landlock seccomp cgroup\n";

static bool parse_number(const char *text, uint64_t max, uint64_t *out)
{
    char *end = NULL;
    errno = 0;
    unsigned long long value = strtoull(text, &end, 10);
    if (errno || end == text || *end || *text == '-' || value > max)
        return false;
    *out = value;
    return true;
}

static bool parse_layers(struct ka_jail_options *o, const char *name, const char *text)
{
    unsigned layers;
    bool files;
    if (ka_jail_layers_parse(text, &layers, &files) != 0)
        return false;
    if (strcmp(name, "without") == 0) {
        o->policy.want &= ~layers;
    } else {
        o->policy.require = layers;
        o->policy.require_files = files;
    }
    return true;
}

static bool add_ro(struct ka_jail_options *o, const char *path)
{
    if (path[0] != '/' || o->policy.ro_count == KA_JAIL_PATHS_MAX)
        return false;
    o->policy.ro[o->policy.ro_count++] = path;
    return true;
}

static bool parse_option(struct ka_jail_options *o, const char *name, const char *value)
{
    struct {
        const char *name;
        uint64_t max;
        uint64_t *out;
    } numbers[] = {
        {"mem-mb", 1u << 24, &o->policy.mem_mb},         {"cpu-s", 1u << 24, &o->policy.cpu_s},
        {"fsize-mb", 1u << 24, &o->policy.fsize_mb},     {"nproc", 1u << 20, &o->policy.nproc},
        {"scratch-mb", 1u << 24, &o->policy.scratch_mb},
    };
    uint64_t number;
    for (size_t i = 0; i < KA_JAIL_COUNT(numbers); i++)
        if (strcmp(name, numbers[i].name) == 0)
            return parse_number(value, numbers[i].max, numbers[i].out);
    if (strcmp(name, "scratch") == 0) {
        o->policy.scratch = value;
        return value[0] == '/';
    }
    if (strcmp(name, "ro") == 0)
        return add_ro(o, value);
    if (strcmp(name, "profile") == 0) {
        o->policy.profile = strcmp(value, "gpu") == 0 ? KA_PROFILE_GPU : KA_PROFILE_CPU;
        return strcmp(value, "gpu") == 0 || strcmp(value, "cpu") == 0;
    }
    if (strcmp(name, "env") == 0) {
        if (o->env_count == KA_JAIL_ENV_MAX || !strchr(value, '='))
            return false;
        o->env[o->env_count++] = (char *)value;
        return true;
    }
    if (strcmp(name, "require") == 0 || strcmp(name, "without") == 0)
        return parse_layers(o, name, value);
    if (strcmp(name, "result-fd") == 0 && parse_number(value, 1 << 16, &number)) {
        o->result_fd = (int)number;
        return number > 2 && fcntl(o->result_fd, F_GETFD) >= 0;
    }
    if (strcmp(name, "zygote") == 0)
        return o->zygote = true;
    if (strcmp(name, "local-sockets") == 0)
        return o->policy.local_sockets = true;
    if (strcmp(name, "parent") == 0 && parse_number(value, INT_MAX, &number)) {
        o->parent = (long)number;
        return true;
    }
    return false;
}

int ka_jail_options_parse(int argc, char **argv, struct ka_jail_options *o)
{
    static const struct option known[] = {
        {"scratch", 1, NULL, 1},  {"ro", 1, NULL, 1},      {"profile", 1, NULL, 1},
        {"env", 1, NULL, 1},      {"mem-mb", 1, NULL, 1},  {"cpu-s", 1, NULL, 1},
        {"fsize-mb", 1, NULL, 1}, {"nproc", 1, NULL, 1},   {"scratch-mb", 1, NULL, 1},
        {"require", 1, NULL, 1},  {"without", 1, NULL, 1}, {"result-fd", 1, NULL, 1},
        {"parent", 1, NULL, 1},   {"zygote", 0, NULL, 1},  {"local-sockets", 0, NULL, 1},
        {NULL, 0, NULL, 0},
    };
    int at = 0, got;
    memset(o, 0, sizeof(*o));
    ka_jail_policy_init(&o->policy);
    o->result_fd = -1;
    o->parent = -1;
    o->policy.mem_mb = UINT64_MAX; /* depends on the profile, see below */
    while ((got = getopt_long(argc, argv, "+", known, &at)) != -1) {
        if (got != 1)
            return -EINVAL;
        if (!parse_option(o, known[at].name, optarg)) {
            fprintf(stderr, "ka-jail: --%s: not a valid value: %s\n", known[at].name, optarg);
            return -EINVAL;
        }
    }
    if (o->policy.mem_mb == UINT64_MAX)
        o->policy.mem_mb = o->policy.profile == KA_PROFILE_GPU ? 16384 : 4096;
    o->argv = argv + optind;
    return o->policy.scratch && *o->argv && strchr(*o->argv, '/') ? 0 : -EINVAL;
}

/* "/a/b/bin/python" gives "/a/b", in place. False for "/a/bin/python", so that /root/bin/python does not open
 * /root. */
static bool to_prefix(char *path)
{
    for (int i = 0; i < 2; i++) {
        char *slash = strrchr(path, '/');
        if (!slash || (i == 0 && (slash - path < 4 || memcmp(slash - 4, "/bin", 4) != 0)))
            return false;
        *slash = '\0';
    }
    return strchr(path, '/') != strrchr(path, '/');
}

static bool is_installation(const char *prefix)
{
    char path[PATH_MAX + 16];
    glob_t found = {0};
    snprintf(path, sizeof(path), "%s/pyvenv.cfg", prefix);
    bool is = access(path, F_OK) == 0;
    snprintf(path, sizeof(path), "%s/lib/python3*", prefix);
    is = is || glob(path, GLOB_NOSORT | GLOB_NOESCAPE, NULL, &found) == 0;
    globfree(&found);
    return is;
}

/* The installation that a virtual environment was made from, by the links of its interpreter: the only trace
 * of it where the environment has a copy. */
static bool find_home(const char *environment, const char *name, char home[PATH_MAX])
{
    char line[PATH_MAX + 16], named[PATH_MAX], program[2 * PATH_MAX];
    bool found = false;
    snprintf(line, sizeof(line), "%s/pyvenv.cfg", environment);
    FILE *file = fopen(line, "re");
    while (file && !found && fgets(line, sizeof(line), file))
        found = sscanf(line, " home = %4095[^\r\n]", named) == 1 && *named == '/';
    if (file)
        fclose(file);
    snprintf(program, sizeof(program), "%s%s", found ? named : "", name);
    return found && realpath(program, home) && to_prefix(home) && is_installation(home);
}

/* A Python is readable with the folder that holds its bin/, before and after links are followed: a virtual
 * environment and the installation it was made from. Any other program is readable alone. */
void ka_jail_program_readable(struct ka_jail_options *o)
{
    char *folder = o->prefixes[0], *target = o->prefixes[1], *file = o->prefixes[2], *home = o->prefixes[3];
    const char *program = *o->argv, *name = strrchr(program, '/');
    char dir[PATH_MAX];
    if (snprintf(dir, sizeof(dir), "%.*s/", (int)(name - program), program) < (int)sizeof(dir) &&
        realpath(dir, folder) && strlen(folder) + strlen(name) < PATH_MAX) {
        strcat(folder, name);
        if (to_prefix(folder) && is_installation(folder)) {
            add_ro(o, folder);
            if (find_home(folder, name, home))
                add_ro(o, home);
        }
    }
    if (*program == '/')
        add_ro(o, program); /* the links on its way matter where view.c builds the root */
    if (realpath(program, target)) {
        strcpy(file, target);
        add_ro(o, to_prefix(target) && is_installation(target) ? target : file);
    }
}

static const char *env_value(const struct ka_jail_options *o, const char *name)
{
    size_t len = strlen(name);
    for (size_t i = 0; i < o->env_count; i++)
        if (strncmp(o->env[i], name, len) == 0 && o->env[i][len] == '=')
            return o->env[i] + len + 1;
    return NULL;
}

static void env_default(struct ka_jail_options *o, const char *name, const char *folder, const char *value)
{
    size_t size = strlen(name) + strlen(folder) + strlen(value) + 2;
    char *text = env_value(o, name) || o->env_count == KA_JAIL_ENV_MAX ? NULL : malloc(size);
    if (!text)
        return;
    snprintf(text, size, "%s=%s%s", name, folder, value);
    o->env[o->env_count++] = text;
}

/* Nothing is inherited: the caller's environment may hold keys. */
void ka_jail_environment_build(struct ka_jail_options *o)
{
    static const char *const threads[] = {"OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"};
    const char *scratch = o->policy.scratch;
    env_default(o, "PATH", "", "/usr/local/bin:/usr/bin:/bin");
    env_default(o, "LANG", "", "C.UTF-8");
    env_default(o, "USER", "", "kernel-agent");
    env_default(o, "LOGNAME", "", "kernel-agent");
    env_default(o, "HOME", scratch, "");
    env_default(o, "TMPDIR", scratch, "/tmp");
    env_default(o, "XDG_CACHE_HOME", scratch, "/cache");
    env_default(o, "TRITON_HOME", scratch, "");
    env_default(o, "TRITON_CACHE_DIR", scratch, "/triton");
    env_default(o, "TORCHINDUCTOR_CACHE_DIR", scratch, "/cache/inductor");
    env_default(o, "CUDA_CACHE_PATH", scratch, "/cache/cuda");
    env_default(o, "PYTHONDONTWRITEBYTECODE", "", "1");
    env_default(o, "PYTHONNOUSERSITE", "", "1");
    env_default(o, "PYTHONUNBUFFERED", "", "1");
    for (size_t i = 0; i < KA_JAIL_COUNT(threads); i++)
        env_default(o, threads[i], "", "1");
    o->env[o->env_count] = NULL;
}
