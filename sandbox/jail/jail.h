/* The jail: what a child that runs other people's Python may still do, layer by layer.
 *
 * Candidate code is hostile until proven otherwise. It may compute, compile, load what it compiled, use the
 * GPU and write into its own scratch folder. Nothing else. One file per concern; layers.c owns the order:
 *
 *   namespaces.c  user, pid, mount, ipc, network and host-name namespaces
 *   mounts.c      the whole tree read-only, a sized private scratch, own /dev/shm, fresh /proc
 *   view.c        the mounts where there is no Landlock: a root that holds only what may be read
 *   cgroup.c      memory and process caps for the whole tree of a check
 *   paths.c       the list of what may be read
 *   limits.c      resource limits, capabilities, descriptors, the environment
 *   landlock.c    which paths can be read, which written; no TCP; no signals to the outside
 *   seccomp.c     which system calls exist
 *   options.c     the command line, and the environment that a program gets
 *   enter.c       the last steps of a process that becomes, or already is, the program; children of a zygote
 *   ka_jail.c     ka-jail: the supervisor and the init of the jail
 *
 * Everything here runs between fork and exec (or, in a zygote's child, between fork and the first candidate
 * byte), so it is single-threaded, allocates nothing after a fork, and reports through `struct
 * ka_jail_report`. Functions return 0 or a negative errno. A layer that this machine does not give is no
 * error: it is noted, and ka_jail_missing() decides.
 *
 * Exit codes of ka-jail. The program's own code otherwise; its death by a signal is repeated by the
 * supervisor. 112  a required layer is missing; not one byte of the program ran 113  usage 114  the jail
 * could not be built (says why on stderr) 127  the program could not be executed A program can exit with
 * these as well: the report line says `"ok": true` if it was started.
 *
 * To add an allowed or a refused system call: a name or a line in seccomp.c, an attempt in tests/jail. To add
 * a readable path: a name in paths.c. To add a layer: a name here and in layers.c, a file, a call in
 * layers.c, a line in the table of agent/cli/doctor.c, and a control run in tests/jail. */
#ifndef KA_JAIL_H
#define KA_JAIL_H

#include <limits.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define KA_JAIL_COUNT(array) (sizeof(array) / sizeof((array)[0]))

/* A descriptor that is closed where its name ends; -1 is none. */
#define KA_JAIL_AUTO_CLOSE __attribute__((cleanup(ka_jail_close_at)))
void ka_jail_close_at(const int *fd);
/* Has nobody the reading end of this pipe any more? */
bool ka_jail_reader_is_gone(int fd);
/* A text into a file of the kernel's, at once. `dir`: as for openat(). */
int ka_jail_write(int dir, const char *path, const char *text);

enum {
    KA_JAIL_EXIT_MISSING = 112,
    KA_JAIL_EXIT_USAGE = 113,
    KA_JAIL_EXIT_FAILED = 114,
    KA_JAIL_EXIT_NOEXEC = 127,
};

enum ka_jail_layer {
    KA_LAYER_LIMITS,   /* resource limits, closed descriptors */
    KA_LAYER_CAPS,     /* no capabilities, no_new_privs */
    KA_LAYER_PID,      /* own pid namespace: the whole tree dies together */
    KA_LAYER_MOUNT,    /* own mount and ipc namespace, all read-only but a sized scratch */
    KA_LAYER_NET,      /* own, empty network namespace */
    KA_LAYER_LANDLOCK, /* reading and writing by path */
    KA_LAYER_SECCOMP,  /* system calls */
    KA_LAYER_CGROUP,   /* memory and processes of the whole tree */
    KA_LAYER_COUNT
};
#define KA_LAYER_BIT(layer) (1u << (layer))

/* `--require` names: "full" is every layer but the cgroup (which many machines do not delegate). */
#define KA_LAYERS_ALL (KA_LAYER_BIT(KA_LAYER_COUNT) - 1)
#define KA_LAYERS_FULL (KA_LAYERS_ALL & ~KA_LAYER_BIT(KA_LAYER_CGROUP))

enum ka_jail_profile { KA_PROFILE_CPU, KA_PROFILE_GPU };

#define KA_JAIL_PATHS_MAX 96
#define KA_JAIL_ENV_MAX 96
#define KA_JAIL_ENV_CGROUP                                                                                   \
    "KA_JAIL_CGROUP" /* set for a zygote whose children are born in its control group */

/* What is wanted. Strings are borrowed and outlive the jail. */
struct ka_jail_policy {
    const char *scratch;               /* absolute path of an existing folder; the only place to write */
    const char *ro[KA_JAIL_PATHS_MAX]; /* more absolute paths that may be read */
    size_t ro_count;
    enum ka_jail_profile profile;
    bool local_sockets; /* its processes may connect to each other, given the layers net and mount */
    unsigned want;      /* layers to try */
    unsigned require;   /* layers without which nothing runs */
    bool require_files; /* at least one of landlock and mount */
    uint64_t mem_mb;    /* private memory of a process, and of the tree with a cgroup; 0: no limit */
    uint64_t cpu_s;
    uint64_t fsize_mb;
    uint64_t nproc;
    uint64_t scratch_mb;
    uint64_t scratch_inodes;
};

/* A command line, taken apart. Strings are borrowed from it. */
struct ka_jail_options {
    struct ka_jail_policy policy;
    bool zygote;   /* exec the program with what it needs to make jails itself */
    int result_fd; /* -1: no report */
    long parent;   /* -1: any */
    char *env[KA_JAIL_ENV_MAX + 2];
    size_t env_count;
    char **argv; /* the program */
    char prefixes[4][PATH_MAX];
};

#define KA_JAIL_WHY_MAX 120

/* What was achieved. */
struct ka_jail_report {
    unsigned on;
    int landlock_abi;                          /* 0: none */
    bool user_ns;                              /* the namespaces hang below an own user namespace */
    bool fresh_proc;                           /* /proc shows this jail only */
    bool pid_max;                              /* the number of processes is capped by the pid namespace */
    int scratch_fd;                            /* the scratch, opened after it was mounted; -1 until then */
    char why[KA_LAYER_COUNT][KA_JAIL_WHY_MAX]; /* why a layer is off */
};

void ka_jail_policy_init(struct ka_jail_policy *policy);
void ka_jail_report_init(struct ka_jail_report *report);

enum ka_jail_access { KA_PATH_READ, KA_PATH_DEVICE, KA_PATH_GPU_NODE };
typedef int (*ka_jail_visit_fn)(void *arg, const char *path, enum ka_jail_access access);
/* Every path that may be read besides /proc and the scratch, until `visit` fails. */
int ka_jail_paths_visit(const struct ka_jail_policy *policy, ka_jail_visit_fn visit, void *arg);
int ka_jail_paths_visit_shared_proc(ka_jail_visit_fn visit, void *arg);

/* "pid", "mount", ...; NULL past the end. */
const char *ka_jail_layer_name(enum ka_jail_layer layer);
/* Parse "full", "default", "none", "all" or names joined with '+'. -EINVAL for an unknown name. */
int ka_jail_layers_parse(const char *text, unsigned *layers, bool *files);
/* The layer is on (`code` 0), or off: `what` failed with that. */
void ka_jail_note(struct ka_jail_report *report, enum ka_jail_layer layer, const char *what, int code);
bool ka_jail_wants(const struct ka_jail_policy *policy, enum ka_jail_layer layer);
bool ka_jail_has(const struct ka_jail_report *report, enum ka_jail_layer layer);
/* The required layers that are off; 0 when the program may run. */
unsigned ka_jail_missing(const struct ka_jail_policy *policy, const struct ka_jail_report *report);
/* One JSON line over `fd`; with the scratch descriptor attached if `fd` is a socket. */
int ka_jail_report_send(int fd, const struct ka_jail_policy *policy, const struct ka_jail_report *report);

/* Supervisor: leave for new namespaces, below an own user namespace unless privileged. The pid namespace
 * begins with the next fork. */
void ka_jail_namespaces_enter(const struct ka_jail_policy *policy, struct ka_jail_report *report);
/* Child of a zygote: the same, but the pid and user namespaces are there already. */
void ka_jail_namespaces_join(const struct ka_jail_policy *policy, struct ka_jail_report *report);
/* An own user namespace with identity maps: files keep their owner, and nobody becomes root. */
int ka_jail_user_namespace_enter(void);
bool ka_jail_is_privileged(void); /* CAP_SYS_ADMIN in the current user namespace */

/* Supervisor, before the namespaces: a control group with limits. Its first process joins; removed when it is
 * gone. */
void ka_jail_cgroup_make(const struct ka_jail_policy *policy, struct ka_jail_report *report);
void ka_jail_cgroup_join(struct ka_jail_report *report);
void ka_jail_cgroup_remove(void);

/* First process of the pid namespace: build the view of the file system. Fails only when it stopped half-way.
 */
int ka_jail_mounts_build(const struct ka_jail_policy *policy, struct ka_jail_report *report);
/* The parts that mounts.c and view.c share: mounted below `root` ("" for the root itself). `outside` is the
 * scratch folder as it was, whose files are copied in. */
int ka_jail_mount_scratch(const struct ka_jail_policy *policy, const char *root, int outside);
int ka_jail_mount_shm(const char *root);
int ka_jail_mount_proc(const struct ka_jail_policy *policy, struct ka_jail_report *report, const char *root);
int ka_jail_mount_read_only(const char *path, bool recursive);
/* A new root with only the readable paths, at their names; no way back. */
int ka_jail_view_build(const struct ka_jail_policy *policy, struct ka_jail_report *report);
/* tmp, cache and triton inside the scratch; opens report->scratch_fd. */
int ka_jail_scratch_prepare(const struct ka_jail_policy *policy, struct ka_jail_report *report);

/* The process that will become the program: limits, capabilities, Landlock, seccomp, in this order. */
void ka_jail_lock_down(const struct ka_jail_policy *policy, struct ka_jail_report *report);

void ka_jail_limits_apply(const struct ka_jail_policy *policy, struct ka_jail_report *report);
/* The kernel's choice when memory is gone: this tree, not the daemon. Before the mounts hide the file. */
void ka_jail_oom_first(void);
void ka_jail_caps_drop(struct ka_jail_report *report);
int ka_jail_landlock_abi(void); /* < 1: this kernel has none */
void ka_jail_landlock_apply(const struct ka_jail_policy *policy, struct ka_jail_report *report);
void ka_jail_seccomp_apply(const struct ka_jail_policy *policy, struct ka_jail_report *report);

/* Close everything from 3 up but the descriptors in `keep` (in any order, -1 ignored). */
int ka_jail_close_fds(const int *keep, size_t count);

extern const char ka_jail_usage[];
/* -EINVAL for anything that is not understood, said on stderr. */
int ka_jail_options_parse(int argc, char **argv, struct ka_jail_options *options);
/* Let the program's own installation be read. Resolves links, so before the layers. */
void ka_jail_program_readable(struct ka_jail_options *options);
/* Complete options->env; nothing is inherited. */
void ka_jail_environment_build(struct ka_jail_options *options);

/* Say `what` and strerror(error) on stderr; returns `code`. */
int ka_jail_complain(int code, const char *what, int error);
/* The file system and the scratch. 0, or the code to exit with. */
int ka_jail_furnish(const struct ka_jail_options *options, struct ka_jail_report *report);
/* Into the scratch, layers, report, verdict on missing layers. 0, or the code to exit with. */
int ka_jail_become(const struct ka_jail_options *options, struct ka_jail_report *report);
/* Ambient capabilities over the own user namespace, so that they survive exec. For a zygote only. */
int ka_jail_caps_keep(void);

/* For a zygote, through ctypes: kernel_agent/zygote.py has the order. All return 0 or -errno, ka_jail_enter()
 * an exit code.
 *
 * begin    once, single-threaded: die with the daemon, be unreadable for others
 * unshare  the next fork begins a pid namespace
 * back     after the fork, in the zygote
 * enter    in the child: the options of ka-jail, then "--" and the interpreter; 0 when every layer is in
 * place env      after enter: the i-th NAME=VALUE of the environment, NULL past the end */
int ka_jail_zygote_begin(void);
int ka_jail_zygote_unshare(void);
int ka_jail_zygote_back(void);
int ka_jail_enter(int argc, char **argv);
const char *ka_jail_env(int i);

#endif
