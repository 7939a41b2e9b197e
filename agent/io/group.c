/* Into a control group below our own. Knows nothing of what runs in the others. */
#include "group.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/base.h"
#include "base/files.h"
#include "base/log.h"

#define LIST_MAX ((size_t)64 << 10)
#define BELOW "service"

/* The process that systemd itself began: others share their group with whoever began them. */
static bool is_from_systemd(void)
{
    const char *pid = getenv("SYSTEMD_EXEC_PID");
    return pid && strtol(pid, NULL, 10) == (long)getpid();
}

/* Our group in version 2, the line "0::/path"; NULL. free() it. */
static char *own_group(const char *root)
{
    KA_AUTO_FREE char *path = ka_path_join(root, "proc/self/cgroup");
    KA_AUTO_BUF struct ka_buf list = {0};
    if (ka_file_read(path, LIST_MAX, &list, NULL))
        return NULL;
    const char *text = ka_buf_str(&list),
               *line = strncmp(text, "0::/", 4) == 0 ? text : strstr(text, "\n0::/");
    if (!line)
        return NULL;
    line = strchr(line, '/');
    KA_AUTO_FREE char *own = ka_strndup(line, strcspn(line, "\n"));
    return ka_format("%s/sys/fs/cgroup%s", strcmp(root, "/") == 0 ? "" : root, own);
}

/* systemd gives these files, and no more, to the user of a unit. */
static bool is_ours(const char *group)
{
    static const char *const files[] = {"cgroup.procs", "cgroup.subtree_control"};
    for (size_t i = 0; i < KA_COUNT(files); i++) {
        struct stat st;
        KA_AUTO_FREE char *path = ka_path_join(group, files[i]);
        if (stat(path, &st) != 0 || st.st_uid != geteuid())
            return false;
    }
    return true;
}

bool ka_group_step_down_at(const char *root)
{
    KA_AUTO_FREE char *group = is_from_systemd() ? own_group(root) : NULL;
    if (!group || !is_ours(group))
        return false;
    KA_AUTO_FREE char *below = ka_path_join(group, BELOW);
    KA_AUTO_FREE char *procs = ka_path_join(below, "cgroup.procs");
    bool made = mkdir(below, 0755) == 0 || errno == EEXIST;
    KA_AUTO_CLOSE int fd = made ? open(procs, O_WRONLY | O_CLOEXEC) : -1;
    bool moved = fd >= 0 && write(fd, "0", 1) == 1;
    if (!moved)
        ka_log(KA_LOG_WARN, "%s: %s: the jail may have no control group", procs, strerror(errno));
    return moved;
}

bool ka_group_step_down(void)
{
    return ka_group_step_down_at("/");
}
