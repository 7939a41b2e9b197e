/* The layers by name, their order in the child, and the report line. Knows nothing of how a layer works. */
#include "jail.h"

#include <errno.h>
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
    snprintf(report->why[layer], KA_JAIL_WHY_MAX, "%s: %s", what, strerror(code < 0 ? -code : code));
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

int ka_jail_lock_down(const struct ka_jail_policy *policy, struct ka_jail_report *report)
{
    int rc = 0;
    if (ka_jail_wants(policy, KA_LAYER_LIMITS))
        rc = ka_jail_limits_apply(policy, report);
    if (!rc && ka_jail_wants(policy, KA_LAYER_CAPS))
        rc = ka_jail_caps_drop(report);
    if (!rc && ka_jail_wants(policy, KA_LAYER_LANDLOCK))
        rc = ka_jail_landlock_apply(policy, report);
    if (!rc && ka_jail_wants(policy, KA_LAYER_SECCOMP))
        rc = ka_jail_seccomp_apply(policy, report);
    return rc;
}

struct line {
    char *out;
    size_t size, len;
};

static void put(struct line *line, const char *text)
{
    size_t len = strlen(text);
    if (len < line->size - line->len) {
        memcpy(line->out + line->len, text, len + 1);
        line->len += len;
    }
}

static void put_string(struct line *line, const char *text)
{
    char one[2] = {0};
    put(line, "\"");
    for (; *text; text++) {
        one[0] = *text;
        if (*text == '"' || *text == '\\')
            put(line, "\\");
        if ((unsigned char)*text >= ' ')
            put(line, one);
    }
    put(line, "\"");
}

size_t ka_jail_report_json(const struct ka_jail_policy *policy, const struct ka_jail_report *report,
                           char *out, size_t size)
{
    struct line line = {out, size, 0};
    unsigned missing = ka_jail_missing(policy, report);
    char number[16];
    put(&line, missing ? "{\"ok\": false, \"profile\": " : "{\"ok\": true, \"profile\": ");
    put_string(&line, policy->profile == KA_PROFILE_GPU ? "gpu" : "cpu");
    put(&line, ", \"layers\": {");
    for (int i = 0; i < KA_LAYER_COUNT; i++) {
        put(&line, i ? ", " : "");
        put_string(&line, names[i]);
        put(&line, report->on & KA_LAYER_BIT(i) ? ": true" : ": false");
    }
    put(&line, "}, \"why\": {");
    for (int i = 0, seen = 0; i < KA_LAYER_COUNT; i++) {
        if (report->on & KA_LAYER_BIT(i))
            continue;
        put(&line, seen++ ? ", " : "");
        put_string(&line, names[i]);
        put(&line, ": ");
        put_string(&line, report->why[i][0] ? report->why[i] : "not asked for");
    }
    put(&line, "}, \"missing\": [");
    for (int i = 0, seen = 0; i < KA_LAYER_COUNT; i++)
        if (missing & KA_LAYER_BIT(i)) {
            put(&line, seen++ ? ", " : "");
            put_string(&line, names[i]);
        }
    snprintf(number, sizeof(number), "%d", report->landlock_abi);
    put(&line, "], \"landlock_abi\": ");
    put(&line, number);
    put(&line, report->user_ns ? ", \"user_ns\": true" : ", \"user_ns\": false");
    put(&line, report->fresh_proc ? ", \"fresh_proc\": true" : ", \"fresh_proc\": false");
    put(&line, "}\n");
    return line.len;
}

int ka_jail_report_send(int fd, const struct ka_jail_policy *policy, const struct ka_jail_report *report)
{
    char text[2048];
    size_t len = ka_jail_report_json(policy, report, text, sizeof(text));
    struct stat st;
    if (fstat(fd, &st) != 0)
        return -errno;
    if (!S_ISSOCK(st.st_mode) || report->scratch_fd < 0)
        return write(fd, text, len) == (ssize_t)len ? 0 : -EIO;

    union {
        char bytes[CMSG_SPACE(sizeof(int))];
        struct cmsghdr align;
    } control = {{0}};
    struct iovec iov = {text, len};
    struct msghdr msg = {.msg_iov = &iov,
                         .msg_iovlen = 1,
                         .msg_control = control.bytes,
                         .msg_controllen = sizeof(control.bytes)};
    struct cmsghdr *cmsg = CMSG_FIRSTHDR(&msg);
    cmsg->cmsg_level = SOL_SOCKET;
    cmsg->cmsg_type = SCM_RIGHTS;
    cmsg->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(cmsg), &report->scratch_fd, sizeof(int));
    return sendmsg(fd, &msg, MSG_NOSIGNAL) == (ssize_t)len ? 0 : -EIO;
}
