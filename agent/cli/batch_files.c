/* Files of a folder, by what is in them and what git says of them. Knows no run. */
#include "batch_files.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/disk/modules.h"
#include "agent/io/probe.h"
#include "base/files.h"
#include "rag/build.h"

#define FILES_MAX 100000
#define PARTS_MAX 100000
#define GIT_MS 60000

struct found {
    const struct ka_opts *opts;
    const json_t *installed;
    struct ka_batch_file *list;
    size_t count;
};

/* What cannot be read is told by its run. */
static void hash_file(const struct found *found, struct ka_batch_file *file, const struct ka_buf *text)
{
    struct ka_modules modules;
    const struct ka_modules_req request = {.source = ka_buf_str(text),
                                           .file = file->path,
                                           .path = found->opts->run.path,
                                           .installed = found->installed};
    ka_hash_hex(text->data, text->len, file->hash);
    if (ka_modules_freeze(&request, &modules, NULL) || modules.count == 0)
        return;
    KA_AUTO_FREE char *both = ka_format("%s %s", file->hash, modules.hash);
    ka_hash_hex(both, strlen(both), file->hash);
    file->imports = true;
}

static int add_file(void *arg, const char *path, struct ka_err *err)
{
    struct found *found = arg;
    KA_AUTO_BUF struct ka_buf text = {0};
    (void)err;
    if (found->count == FILES_MAX || ka_file_read(path, (size_t)4 << 20, &text, NULL) ||
        !strstr(ka_buf_str(&text), "@autodiff") || !strstr(ka_buf_str(&text), "SWEEP"))
        return 0;
    struct ka_batch_file *file = KA_APPEND(found->list, found->count);
    file->path = ka_strdup(path);
    hash_file(found, file, &text);
    return 0;
}

static void keep(struct found *found,
                 bool (*wanted)(const struct ka_batch_file *file, size_t i, const void *arg), const void *arg)
{
    size_t kept = 0;
    for (size_t i = 0; i < found->count; i++) {
        struct ka_batch_file file = found->list[i];
        if (wanted(&file, i, arg))
            found->list[kept++] = file;
        else
            free(file.path);
    }
    found->count = kept;
}

/* ---- since a revision */

/* Appends what git says of `root`: paths below it, each ended by a newline. */
static int ask_git(const char *root, const char *const *words, struct ka_buf *out, struct ka_err *err)
{
    const char *argv[16] = {"/usr/bin/env", "git", "-c", "core.quotePath=false", "-C", root};
    const char *path = getenv("PATH"), *home = getenv("HOME");
    KA_AUTO_FREE char *in_path = ka_format("PATH=%s", path ? path : "/usr/bin:/bin");
    KA_AUTO_FREE char *in_home = ka_format("HOME=%s", home ? home : "/");
    const char *const env[] = {in_path, in_home, NULL};
    KA_AUTO_BUF struct ka_buf said = {0};
    for (size_t i = 0; words[i]; i++)
        argv[6 + i] = words[i];
    int rc = ka_probe_run(argv, env, GIT_MS, &said, err);
    if (rc > 0)
        return ka_fail(err, -EINVAL, "--changed-since: git says: %.300s", ka_buf_str(&said));
    return rc ? rc : ka_buf_add(out, ka_buf_str(&said), said.len);
}

struct changed {
    const char *root;
    const char *lines; /* "\npath\npath\n" */
    bool module;       /* a Python file that is none of those found */
};

static bool is_listed(const struct changed *changed, const char *path)
{
    KA_AUTO_FREE char *line = ka_format("\n%s\n", path + strlen(changed->root) + 1);
    return strstr(changed->lines, line) != NULL;
}

/* Which module a file imports is not known here: a change of any counts. */
static bool has_changed(const struct ka_batch_file *file, size_t i, const void *arg)
{
    const struct changed *changed = arg;
    (void)i;
    return is_listed(changed, file->path) || (file->imports && changed->module);
}

static bool names_module(const struct found *found, const struct changed *changed)
{
    size_t python = 0, own = 0;
    for (const char *at = changed->lines; (at = strstr(at, ".py\n")); at++)
        python++;
    for (size_t i = 0; i < found->count; i++)
        own += is_listed(changed, found->list[i].path);
    return python > own;
}

static int keep_changed(struct found *found, const char *root, struct ka_err *err)
{
    const char *since = found->opts->changed_since;
    KA_AUTO_BUF struct ka_buf lines = {0};
    const char *const differ[] = {"diff", "--name-only", "--relative", since, "--", ".", NULL};
    const char *const untracked[] = {"ls-files", "--others", "--exclude-standard", "--", ".", NULL};
    if (!*since || *since == '-')
        return ka_fail(err, -EINVAL, "--changed-since: '%s' is no revision", since);
    ka_buf_puts(&lines, "\n");
    int rc = ask_git(root, differ, &lines, err);
    if (rc == 0)
        rc = ask_git(root, untracked, &lines, err);
    if (rc)
        return rc;
    struct changed changed = {.root = root, .lines = ka_buf_str(&lines)};
    changed.module = names_module(found, &changed);
    keep(found, has_changed, &changed);
    return 0;
}

/* ---- a part */

struct part {
    unsigned number, of;
};

static bool is_in_part(const struct ka_batch_file *file, size_t i, const void *arg)
{
    const struct part *part = arg;
    (void)file;
    return i % part->of == part->number - 1;
}

static int keep_part(struct found *found, const char *text, struct ka_err *err)
{
    struct part part;
    char rest;
    if (sscanf(text, "%u/%u%c", &part.number, &part.of, &rest) != 2 || part.number < 1 ||
        part.number > part.of || part.of > PARTS_MAX)
        return ka_fail(err, -EINVAL, "--part: '%s' is not like 2/8, the second of eight parts", text);
    keep(found, is_in_part, &part);
    return 0;
}

int ka_batch_files_find(const struct ka_app *app, const struct ka_opts *opts, const char *dir,
                        struct ka_batch_file **files, size_t *count, struct ka_err *err)
{
    struct found found = {.opts = opts, .installed = ka_app_elsewhere(app)};
    KA_AUTO_FREE char *root = ka_path_real(dir, err);
    if (!root)
        return -ENOENT;
    ka_build_walk(root, add_file, &found, NULL); /* a folder that cannot be read has nothing for us */
    int rc = found.count
                 ? 0
                 : ka_fail(err, -ENOENT, "%s: no forward file (with @autodiff and SWEEP) below it", dir);
    if (rc == 0 && opts->changed_since)
        rc = keep_changed(&found, root, err);
    if (rc == 0 && opts->part)
        rc = keep_part(&found, opts->part, err);
    if (rc)
        ka_batch_files_free(found.list, found.count);
    else {
        *files = found.list;
        *count = found.count;
    }
    return rc;
}

void ka_batch_files_free(struct ka_batch_file *files, size_t count)
{
    for (size_t i = 0; i < count; i++)
        free(files[i].path);
    free(files);
}
