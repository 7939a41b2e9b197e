/* The layers by name, their order in the child, and the report line. Knows nothing of how a layer works. */
#include "jail.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

static const char *const names[KA_LAYER_COUNT] = {
    [KA_LAYER_LIMITS] = "limits",   [KA_LAYER_CAPS] = "caps",     [KA_LAYER_PID] = "pid",
    [KA_LAYER_MOUNT] = "mount",     [KA_LAYER_NET] = "net",       [KA_LAYER_LANDLOCK] = "landlock",
    [KA_LAYER_SECCOMP] = "seccomp", [KA_LAYER_CGROUP] = "cgroup",
};

void ka_jail_policy_init(struct ka_jail_policy *policy)
{
    *policy = (struct ka_jail_policy){
        .profile = KA_PROFILE_CPU,
        .want = KA_LAYERS_ALL,
        .require =
            KA_LAYER_BIT(KA_LAYER_LIMITS) | KA_LAYER_BIT(KA_LAYER_CAPS) | KA_LAYER_BIT(KA_LAYER_SECCOMP),
        .require_files = true,
        .mem_mb = 4096,
        .cpu_s = 600,
        .fsize_mb = 1024,
        .nproc = 512,
        .scratch_mb = 2048,
        .scratch_inodes = 65536,
    };
}

void ka_jail_report_init(struct ka_jail_report *report)
{
    *report = (struct ka_jail_report){.scratch_fd = -1};
}

const char *ka_jail_layer_name(enum ka_jail_layer layer)
{
    return layer < KA_LAYER_COUNT ? names[layer] : NULL;
}

static int layer_by_name(const char *name, size_t len)
{
    for (int i = 0; i < KA_LAYER_COUNT; i++)
        if (strlen(names[i]) == len && memcmp(names[i], name, len) == 0)
            return i;
    return -EINVAL;
}

int ka_jail_layers_parse(const char *text, unsigned *layers, bool *files)
{
    unsigned set = 0;
    bool any_files = false;
    for (const char *at = text; *at;) {
        size_t len = strcspn(at, "+");
        int layer = layer_by_name(at, len);
        if (layer >= 0) {
            set |= KA_LAYER_BIT(layer);
        } else if (len == 4 && memcmp(at, "full", 4) == 0) {
            set |= KA_LAYERS_FULL;
        } else if (len == 3 && memcmp(at, "all", 3) == 0) {
            set |= KA_LAYERS_ALL;
        } else if (len == 7 && memcmp(at, "default", 7) == 0) {
            struct ka_jail_policy usual;
            ka_jail_policy_init(&usual);
            set |= usual.require;
            any_files = true;
        } else if (len != 4 || memcmp(at, "none", 4) != 0) {
            return -EINVAL;
        }
        at += len;
        at += *at == '+';
    }
    *layers = set;
    *files = any_files;
    return 0;
}

void ka_jail_note(struct ka_jail_report *report, enum ka_jail_layer layer, const char *what, int code)
{
    report->on &= ~KA_LAYER_BIT(layer);
    if (code)
        snprintf(report->why[layer], KA_JAIL_WHY_MAX, "%s: %s", what, strerror(code < 0 ? -code : code));
    else
        report->on |= KA_LAYER_BIT(layer);
}

bool ka_jail_wants(const struct ka_jail_policy *policy, enum ka_jail_layer layer)
{
    return policy->want & KA_LAYER_BIT(layer);
}

bool ka_jail_has(const struct ka_jail_report *report, enum ka_jail_layer layer)
{
    return report->on & KA_LAYER_BIT(layer);
}

unsigned ka_jail_missing(const struct ka_jail_policy *policy, const struct ka_jail_report *report)
{
    unsigned missing = policy->require & ~report->on;
    unsigned files = KA_LAYER_BIT(KA_LAYER_LANDLOCK) | KA_LAYER_BIT(KA_LAYER_MOUNT);
    if (policy->require_files && !(report->on & files))
        missing |= files;
    return missing;
}

void ka_jail_lock_down(const struct ka_jail_policy *policy, struct ka_jail_report *report)
{
    if (ka_jail_wants(policy, KA_LAYER_LIMITS))
        ka_jail_limits_apply(policy, report);
    if (ka_jail_wants(policy, KA_LAYER_CAPS))
        ka_jail_caps_drop(report);
    if (ka_jail_wants(policy, KA_LAYER_LANDLOCK))
        ka_jail_landlock_apply(policy, report);
    if (ka_jail_wants(policy, KA_LAYER_SECCOMP))
        ka_jail_seccomp_apply(policy, report);
}

struct line {
    char *out;
    size_t size, len;
};

static void put(struct line *line, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* Whole, or not at all. */
static void put(struct line *line, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    int len = vsnprintf(line->out + line->len, line->size - line->len, fmt, args);
    va_end(args);
    line->len += len > 0 && (size_t)len < line->size - line->len ? (size_t)len : 0;
    line->out[line->len] = '\0';
}

/* Without what JSON would want escaped. */
static void put_why(struct line *line, const char *text)
{
    for (; *text; text++)
        if ((unsigned char)*text >= ' ')
            put(line, *text == '"' || *text == '\\' ? "\\%c" : "%c", *text);
}

static size_t report_json(const struct ka_jail_policy *policy, const struct ka_jail_report *report, char *out,
                          size_t size)
{
    static const char *const words[] = {"false", "true"};
    struct line line = {out, size, 0};
    unsigned missing = ka_jail_missing(policy, report);
    put(&line, "{\"ok\": %s, \"profile\": \"%s\", \"layers\": {", words[!missing],
        policy->profile == KA_PROFILE_GPU ? "gpu" : "cpu");
    for (int i = 0; i < KA_LAYER_COUNT; i++)
        put(&line, "%s\"%s\": %s", i ? ", " : "", names[i], words[ka_jail_has(report, i)]);
    put(&line, "}, \"why\": {");
    for (int i = 0, seen = 0; i < KA_LAYER_COUNT; i++) {
        if (ka_jail_has(report, i))
            continue;
        put(&line, "%s\"%s\": \"", seen++ ? ", " : "", names[i]);
        put_why(&line, report->why[i][0] ? report->why[i] : "not asked for");
        put(&line, "\"");
    }
    put(&line, "}, \"missing\": [");
    for (int i = 0, seen = 0; i < KA_LAYER_COUNT; i++)
        if (missing & KA_LAYER_BIT(i))
            put(&line, "%s\"%s\"", seen++ ? ", " : "", names[i]);
    put(&line, "], \"landlock_abi\": %d, \"user_ns\": %s, \"fresh_proc\": %s}\n", report->landlock_abi,
        words[report->user_ns], words[report->fresh_proc]);
    return line.len;
}

int ka_jail_report_send(int fd, const struct ka_jail_policy *policy, const struct ka_jail_report *report)
{
    char text[2048];
    size_t len = report_json(policy, report, text, sizeof(text));
    struct stat st;
    if (fstat(fd, &st) != 0)
        return -errno;
    if (!S_ISSOCK(st.st_mode) || report->scratch_fd < 0)
        return write(fd, text, len) == (ssize_t)len ? 0 : -EIO;

    union {
        char bytes[CMSG_SPACE(sizeof(int))];
        struct cmsghdr header;
    } control = {.header = {CMSG_LEN(sizeof(int)), SOL_SOCKET, SCM_RIGHTS}};
    struct iovec iov = {text, len};
    struct msghdr msg = {.msg_iov = &iov,
                         .msg_iovlen = 1,
                         .msg_control = control.bytes,
                         .msg_controllen = sizeof(control.bytes)};
    memcpy(CMSG_DATA(&control.header), &report->scratch_fd, sizeof(int));
    return sendmsg(fd, &msg, MSG_NOSIGNAL) == (ssize_t)len ? 0 : -EIO;
}
