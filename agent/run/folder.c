/* What a run folder is called. */
#include "folder.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "base/files.h"
#include "base/hash.h"

char *ka_run_folder_name(const char *path)
{
    const char *slash = strrchr(path, '/');
    const char *name = slash ? slash + 1 : path;
    size_t len = strlen(name);
    return ka_strndup(name, ka_ends_with(name, ".py") ? len - 3 : len);
}

int ka_run_folder_make(const char *out, const char *name, char **dir, struct ka_err *err)
{
    time_t now = time(NULL);
    struct tm local;
    localtime_r(&now, &local);
    char when[32], folder[512];
    strftime(when, sizeof(when), "%Y%m%d-%H%M%S", &local);
    snprintf(folder, sizeof(folder), "%.200s-%s-%04x", name, when, (unsigned)(ka_random_u64() & 0xffff));
    KA_AUTO_FREE char *path = ka_path_join(out, folder);
    int rc = ka_mkdirs(path, err);
    char *real = rc ? NULL : ka_path_real(path, err);
    if (real)
        *dir = real;
    return rc ? rc : real ? 0 : -EIO;
}
