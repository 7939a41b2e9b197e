/* See modules.h. */
#include "modules.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include <jansson.h>

#include "base/each.h"
#include "base/files.h"

#define NAME_MAX_LEN 200
#define DEPTH_MAX 16
#define PACKAGE_FILE ".package"
#define RUN_FILE "run.db"

struct freezing {
    char *folders[KA_MODULES_FOLDERS];
    size_t folder_count;
    size_t installed; /* the first of them where `pip install -e` may have left links to files */
    bool linked;      /* what is looked at is in one of those */
    const char *into;
    json_t *texts; /* name below its folder -> hash of the text */
    size_t bytes;
    struct ka_err *err;
};

static int freeze_imports(struct freezing *f, const char *source);

static bool exists(const char *path, mode_t kind)
{
    struct stat st;
    return lstat(path, &st) == 0 && (st.st_mode & S_IFMT) == kind;
}

static bool is_file(const struct freezing *f, const char *path)
{
    struct stat st;
    return exists(path, S_IFREG) || (f->linked && stat(path, &st) == 0 && S_ISREG(st.st_mode));
}

static int copy(const struct freezing *f, const char *name, const struct ka_buf *text)
{
    KA_AUTO_FREE char *to = ka_path_join(f->into, name), *parent = ka_path_parent(to);
    int rc = ka_mkdirs(parent, f->err);
    return rc ? rc : ka_file_put(to, text->data ? text->data : "", text->len, f->err);
}

/* One file, `name` below a folder and below the copies, unless it is there already. */
static int freeze_file(struct freezing *f, const char *folder, const char *name)
{
    KA_AUTO_FREE char *from = ka_path_join(folder, name);
    KA_AUTO_BUF struct ka_buf text = {0};
    char hash[KA_HASH_HEX];
    if (json_object_get(f->texts, name))
        return 0;
    int rc = ka_file_read(from, KA_MODULES_BYTES, &text, f->err);
    if (rc)
        return rc;
    ka_hash_hex(text.data, text.len, hash);
    json_object_set_new(f->texts, name, json_string(hash));
    f->bytes += text.len;
    if (json_object_size(f->texts) > KA_MODULES_MAX || f->bytes > KA_MODULES_BYTES)
        return ka_fail(f->err, -EFBIG,
                       "%s: the file imports more than %d modules, or %zu MiB of them, from its folder; keep "
                       "what its kernels need in a package of its own",
                       folder, KA_MODULES_MAX, KA_MODULES_BYTES >> 20);
    rc = f->into ? copy(f, name, &text) : 0;
    return rc ? rc : freeze_imports(f, ka_buf_str(&text));
}

static bool is_python(const char *name)
{
    size_t len = strlen(name);
    return len > 3 && strcmp(name + len - 3, ".py") == 0;
}

/* Whether a folder, or one in it, is a run's: what runs leave is no part of a package. */
static bool holds_runs(const char *path)
{
    KA_AUTO_FREE char *own = ka_path_join(path, RUN_FILE);
    DIR *folder = opendir(path);
    struct dirent *entry;
    bool found = exists(own, S_IFREG);
    while (folder && !found && (entry = readdir(folder))) {
        KA_AUTO_FREE char *below = ka_path_join(path, entry->d_name), *run = ka_path_join(below, RUN_FILE);
        found = entry->d_name[0] != '.' && exists(run, S_IFREG);
    }
    if (folder)
        closedir(folder);
    return found;
}

/* A folder `name` below another, with all that is below it. */
static int freeze_folder(struct freezing *f, const char *above, const char *name, int depth)
{
    KA_AUTO_FREE char *path = ka_path_join(above, name);
    DIR *folder = depth < DEPTH_MAX ? opendir(path) : NULL;
    struct dirent *entry;
    int rc = 0;
    while (folder && rc == 0 && (entry = readdir(folder))) {
        if (entry->d_name[0] == '.' || strcmp(entry->d_name, "__pycache__") == 0)
            continue;
        KA_AUTO_FREE char *below = ka_path_join(name, entry->d_name), *full = ka_path_join(above, below);
        if (is_python(entry->d_name) && is_file(f, full))
            rc = freeze_file(f, above, below);
        else if (exists(full, S_IFDIR) && !holds_runs(full))
            rc = freeze_folder(f, above, below, depth + 1);
    }
    if (folder)
        closedir(folder);
    return rc;
}

/* The module `top` of a folder. 1: it is none of this folder. */
static int freeze_of(struct freezing *f, const char *folder, const char *top)
{
    KA_AUTO_FREE char *file = ka_format("%s.py", top), *as_file = ka_path_join(folder, file);
    KA_AUTO_FREE char *as_folder = ka_path_join(folder, top);
    KA_AUTO_FREE char *marker = ka_path_join(as_folder, "__init__.py");
    if (exists(as_folder, S_IFDIR) && (is_file(f, marker) || !is_file(f, as_file)))
        return freeze_folder(f, folder, top, 0);
    return is_file(f, as_file) ? freeze_file(f, folder, file) : 1;
}

/* `name` up to its first dot, if it is a module of one of the folders. */
static int freeze_module(struct freezing *f, const char *name, size_t len)
{
    static const char *const installed[] = {"torch", "triton", "numpy", "kernel_agent"};
    for (size_t i = 0; i < KA_COUNT(installed); i++)
        if (len == strlen(installed[i]) && strncmp(name, installed[i], len) == 0)
            return 0; /* these come first in any case */
    if (len == 0 || len > NAME_MAX_LEN)
        return 0;
    KA_AUTO_FREE char *top = ka_format("%.*s", (int)len, name);
    bool linked = f->linked;
    int rc = 1;
    for (size_t i = 0; i < f->folder_count && rc == 1; i++) {
        f->linked = i >= f->installed;
        rc = freeze_of(f, f->folders[i], top);
    }
    f->linked = linked;
    return rc == 1 ? 0 : rc;
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

/* ---- the package that the file is in */

static bool imports_relatively(const char *source)
{
    for (const char *line = source; *line; line += strcspn(line, "\n"), line += *line == '\n') {
        const char *name = after_word(skip_blanks(line), "from");
        if (name && *name == '.')
            return true;
    }
    return false;
}

static bool has_marker(const char *folder)
{
    KA_AUTO_FREE char *marker = ka_path_join(folder, "__init__.py");
    return exists(marker, S_IFREG);
}

static const char *last_part(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

/* The dotted name of the folder's package, "" for none, and in `*above` the folder that has it. A folder
 * without an __init__.py is a package where something is imported relatively to it. */
static char *package_of(const char *folder, bool relative, char **above)
{
    char *name = ka_strdup(""), *at = ka_strdup(folder);
    for (int depth = 0; depth < DEPTH_MAX && (has_marker(at) || (relative && !*name)); depth++) {
        char *longer = *name ? ka_format("%s.%s", last_part(at), name) : ka_strdup(last_part(at));
        char *parent = ka_path_parent(at);
        free(name);
        free(at);
        name = longer;
        at = parent;
    }
    *above = at;
    return name;
}

static int freeze_package(struct freezing *f, const char *above, const char *package)
{
    KA_AUTO_FREE char *top = ka_format("%.*s", (int)strcspn(package, "."), package);
    int rc = freeze_folder(f, above, top, 0);
    if (rc || !f->into || json_object_size(f->texts) == 0)
        return rc;
    const struct ka_buf text = {.data = (char *)package, .len = strlen(package)};
    return copy(f, PACKAGE_FILE, &text);
}

/* Of a pair in a run's folder: what the run found. */
static int freeze_again(struct freezing *f, const char *copies)
{
    KA_AUTO_FREE char *marker = ka_path_join(copies, PACKAGE_FILE);
    KA_AUTO_BUF struct ka_buf package = {0};
    f->folders[f->folder_count++] = ka_strdup(copies);
    if (!exists(marker, S_IFREG))
        return 0;
    int rc = ka_file_read(marker, NAME_MAX_LEN * DEPTH_MAX, &package, f->err);
    return rc ? rc : freeze_package(f, copies, ka_buf_str(&package));
}

static int add_path(struct freezing *f, const char *path)
{
    while (path && *path) {
        size_t len = strcspn(path, ",");
        KA_AUTO_FREE char *folder = ka_format("%.*s", (int)len, path);
        char *real = *folder ? ka_path_real(folder, NULL) : NULL;
        if (*folder && (!real || !exists(real, S_IFDIR))) {
            free(real);
            return ka_fail(f->err, -ENOENT, "--path %s: there is no such folder", folder);
        }
        if (real && f->folder_count == KA_MODULES_FOLDERS) {
            free(real);
            return ka_fail(f->err, -E2BIG, "--path: more than %d folders", KA_MODULES_FOLDERS - 2);
        }
        if (real)
            f->folders[f->folder_count++] = real;
        path += len + (path[len] == ',');
    }
    return 0;
}

/* A folder that has gone since has nothing. */
static void add_installed(struct freezing *f, const json_t *folders)
{
    KA_EACH(folders, i, entry) {
        char *real = json_is_string(entry) ? ka_path_real(json_string_value(entry), NULL) : NULL;
        if (real && f->folder_count < KA_MODULES_FOLDERS && exists(real, S_IFDIR))
            f->folders[f->folder_count++] = real;
        else
            free(real);
    }
}

static int freeze_all(struct freezing *f, const struct ka_modules_req *req)
{
    KA_AUTO_FREE char *folder = ka_path_parent(req->file), *state = ka_path_join(folder, RUN_FILE);
    KA_AUTO_FREE char *copies = ka_path_join(folder, "modules"), *above = NULL;
    int rc;
    if (exists(state, S_IFREG)) {
        rc = freeze_again(f, copies);
    } else {
        bool relative = imports_relatively(req->source);
        KA_AUTO_FREE char *package = package_of(folder, relative, &above);
        f->folders[f->folder_count++] = ka_strdup(folder);
        if (*package)
            f->folders[f->folder_count++] = ka_strdup(above);
        rc = add_path(f, req->path);
        f->installed = f->folder_count;
        add_installed(f, req->installed);
        if (rc == 0 && relative)
            rc = freeze_package(f, above, package);
    }
    return rc ? rc : freeze_imports(f, req->source);
}

int ka_modules_freeze(const struct ka_modules_req *req, struct ka_modules *found, struct ka_err *err)
{
    struct freezing f = {.installed = SIZE_MAX, .into = req->into, .texts = json_object(), .err = err};
    int rc = freeze_all(&f, req);
    *found = (struct ka_modules){.count = json_object_size(f.texts)};
    if (found->count) {
        KA_AUTO_FREE char *texts = json_dumps(f.texts, JSON_SORT_KEYS | JSON_COMPACT);
        ka_hash_hex(texts, strlen(texts), found->hash);
    }
    for (size_t i = 0; i < f.folder_count; i++)
        free(f.folders[i]);
    json_decref(f.texts);
    return rc;
}
