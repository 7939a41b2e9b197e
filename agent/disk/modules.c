/* See modules.h. */
#include "modules.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/files.h"

#define NAME_MAX_LEN 200
#define DEPTH_MAX 16

struct freezing {
    const char *folder, *into;
    size_t count, bytes;
    struct ka_err *err;
};

static int freeze_imports(struct freezing *f, const char *source);

static bool exists(const char *path, mode_t kind)
{
    struct stat st;
    return lstat(path, &st) == 0 && (st.st_mode & S_IFMT) == kind;
}

/* One file, `name` below the folder and below the copies, unless it is there already. */
static int freeze_file(struct freezing *f, const char *name)
{
    KA_AUTO_FREE char *from = ka_path_join(f->folder, name), *to = ka_path_join(f->into, name);
    KA_AUTO_FREE char *parent = ka_path_parent(to);
    KA_AUTO_BUF struct ka_buf text = {0};
    if (exists(to, S_IFREG))
        return 0;
    int rc = ka_file_read(from, KA_MODULES_BYTES, &text, f->err);
    if (rc)
        return rc;
    f->count++;
    f->bytes += text.len;
    if (f->count > KA_MODULES_MAX || f->bytes > KA_MODULES_BYTES)
        return ka_fail(f->err, -EFBIG,
                       "%s: the file imports more than %d modules, or %zu MiB of them, from its folder; keep "
                       "what its kernels need in a package of its own",
                       f->folder, KA_MODULES_MAX, KA_MODULES_BYTES >> 20);
    rc = ka_mkdirs(parent, f->err);
    if (rc == 0)
        rc = ka_file_put(to, text.data ? text.data : "", text.len, f->err);
    return rc ? rc : freeze_imports(f, ka_buf_str(&text));
}

static bool is_python(const char *name)
{
    size_t len = strlen(name);
    return len > 3 && strcmp(name + len - 3, ".py") == 0;
}

/* A folder `name` below the folder, with all that is below it. */
static int freeze_folder(struct freezing *f, const char *name, int depth)
{
    KA_AUTO_FREE char *path = ka_path_join(f->folder, name);
    DIR *folder = depth < DEPTH_MAX ? opendir(path) : NULL;
    struct dirent *entry;
    int rc = 0;
    while (folder && rc == 0 && (entry = readdir(folder))) {
        if (entry->d_name[0] == '.' || strcmp(entry->d_name, "__pycache__") == 0)
            continue;
        KA_AUTO_FREE char *below = ka_path_join(name, entry->d_name), *full = ka_path_join(f->folder, below);
        if (is_python(entry->d_name) && exists(full, S_IFREG))
            rc = freeze_file(f, below);
        else if (exists(full, S_IFDIR))
            rc = freeze_folder(f, below, depth + 1);
    }
    if (folder)
        closedir(folder);
    return rc;
}

/* `name` up to its first dot, if it is a module of the folder. */
static int freeze_module(struct freezing *f, const char *name, size_t len)
{
    static const char *const installed[] = {"torch", "triton", "numpy", "kernel_agent"};
    for (size_t i = 0; i < KA_COUNT(installed); i++)
        if (len == strlen(installed[i]) && strncmp(name, installed[i], len) == 0)
            return 0; /* these come first in any case */
    if (len == 0 || len > NAME_MAX_LEN)
        return 0;
    KA_AUTO_FREE char *top = ka_format("%.*s", (int)len, name), *file = ka_format("%s.py", top);
    KA_AUTO_FREE char *as_file = ka_path_join(f->folder, file), *as_folder = ka_path_join(f->folder, top);
    KA_AUTO_FREE char *frozen = ka_path_join(f->into, top);
    if (exists(as_folder, S_IFDIR) && !exists(frozen, S_IFDIR)) {
        KA_AUTO_FREE char *marker = ka_path_join(as_folder, "__init__.py");
        if (exists(marker, S_IFREG) || !exists(as_file, S_IFREG))
            return freeze_folder(f, top, 0);
    }
    return exists(as_file, S_IFREG) ? freeze_file(f, file) : 0;
}

static size_t name_length(const char *at)
{
    size_t n = 0;
    while (isalnum((unsigned char)at[n]) || at[n] == '_' || (unsigned char)at[n] >= 0x80)
        n++;
    return n;
}

static const char *skip_blanks(const char *at)
{
    return at + strspn(at, " \t");
}

/* The keyword, and a blank behind it; NULL: something else is there. */
static const char *after_word(const char *at, const char *word)
{
    size_t len = strlen(word);
    return strncmp(at, word, len) == 0 && (at[len] == ' ' || at[len] == '\t') ? skip_blanks(at + len) : NULL;
}

/* "a.b as c, d": the names before the dots. */
static int freeze_list(struct freezing *f, const char *at)
{
    for (;;) {
        int rc = freeze_module(f, at, name_length(at));
        if (rc)
            return rc;
        at += strcspn(at, ",;\n#");
        if (*at != ',')
            return 0;
        at = skip_blanks(at + 1);
    }
}

static int freeze_imports(struct freezing *f, const char *source)
{
    for (const char *line = source; *line; line += strcspn(line, "\n"), line += *line == '\n') {
        const char *at = skip_blanks(line), *names;
        int rc = 0;
        if ((names = after_word(at, "import")))
            rc = freeze_list(f, names);
        else if ((names = after_word(at, "from")))
            rc = freeze_module(f, names, name_length(names));
        if (rc)
            return rc;
    }
    return 0;
}

int ka_modules_freeze(const char *source, const char *file, const char *into, size_t *count,
                      struct ka_err *err)
{
    KA_AUTO_FREE char *folder = ka_path_parent(file), *state = ka_path_join(folder, "run.db");
    KA_AUTO_FREE char *copies = ka_path_join(folder, "modules");
    struct freezing f = {.folder = exists(state, S_IFREG) ? copies : folder, .into = into, .err = err};
    int rc = freeze_imports(&f, source);
    *count = f.count;
    return rc;
}
