/* The walk, the names and the report. Knows files and the store, not how a module is taken apart. */
#include "gather.h"

#include <ctype.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/files.h"
#include "base/hash.h"
#include "build.h"
#include "import.h"
#include "license.h"

#define FILES_MAX 100000

struct gather {
    struct ka_store *store;
    const char *root;    /* absolute; what is shown begins with its last component */
    char *license_root;  /* as far up as licences count */
    const char *license; /* for files without one; NULL */
    json_t *taken, *not_taken;
    size_t files;
};

/* The nearest folder with .git at or above `dir`, else `dir`. free() it. */
static char *find_license_root(const char *dir)
{
    for (size_t len = strlen(dir); len > 1; len = (size_t)((char *)memrchr(dir, '/', len) - dir)) {
        KA_AUTO_FREE char *git = ka_format("%.*s/.git", (int)len, dir);
        if (access(git, F_OK) == 0)
            return ka_strndup(dir, len);
    }
    return ka_strdup(dir);
}

/* The path from the last component of the root on, without what could end a docstring. free() it. */
static char *shown_path(const struct gather *g, const char *path)
{
    const char *slash = strrchr(g->root, '/');
    char *shown = ka_strdup(path + (slash ? (size_t)(slash + 1 - g->root) : 0));
    for (char *c = shown; *c; c++)
        if (iscntrl((unsigned char)*c) || *c == '"' || *c == '\\')
            *c = '_';
    return shown;
}

/* "repo/ops/softmax.py" and "Softmax" give "repo_ops_softmax_Softmax". free() it. */
static char *id_of(const char *shown, const char *class)
{
    size_t len = strlen(shown);
    char *id = ka_format("%.*s_%s", (int)(ka_ends_with(shown, ".py") ? len - 3 : len), shown, class);
    for (char *c = id; *c; c++)
        if (!isalnum((unsigned char)*c))
            *c = '_';
    return id;
}

static void refuse(struct gather *g, const char *shown, const char *class, const char *why)
{
    json_array_append_new(g->not_taken,
                          json_pack("{s:s, s:s*, s:s}", "path", shown, "class", class, "why", why));
}

static int take_unit(struct gather *g, const char *shown, const char *hash, const struct ka_license *license,
                     const struct ka_import_unit *unit, struct ka_err *err)
{
    struct ka_err why;
    struct ka_pair pair = {0};
    KA_AUTO_FREE char *id = id_of(shown, unit->name);
    KA_AUTO_FREE char *path =
        ka_format("%.*s/" KA_GATHER_FAMILY "/%s.py", (int)strcspn(shown, "/"), shown, id);
    int rc = ka_pair_parse(path, unit->source, strlen(unit->source), &pair, &why);
    if (rc == 0)
        rc = ka_build_put(g->store, &pair, &why);
    ka_pair_free(&pair);
    if (rc == -EINVAL || rc == -EFBIG) {
        refuse(g, shown, unit->name, why.msg);
        return 0;
    }
    if (rc)
        return ka_fail(err, rc, "%s", why.msg);
    json_array_append_new(g->taken, json_pack("{s:s, s:s, s:s, s:s, s:s*, s:s}", "id", id, "class",
                                              unit->name, "path", shown, "license", license->name,
                                              "license_from", license->from, "sha256", hash));
    return 0;
}

static const char none[] = "no licence allows it: neither an SPDX line nor a LICENSE file beside or above it "
                           "(--license NAME if you may use it)";
static const char unknown[] = "its licence is none of those known here (--license NAME if you may use it)";

static int take_units(struct gather *g, const char *shown, const char *source,
                      const struct ka_license *license, struct ka_err *err)
{
    struct ka_import_units units;
    struct ka_err why;
    char hash[KA_HASH_HEX];
    int rc = ka_import_split(shown, source, license->name ? license->name : "none", &units, &why);
    if (rc) {
        refuse(g, shown, NULL, why.msg);
        return 0;
    }
    ka_hash_hex(source, strlen(source), hash);
    if (!units.count && units.kernels)
        refuse(g, shown, NULL, "it has Triton kernels, but no torch.autograd.Function");
    for (size_t i = 0; i < units.count && rc == 0; i++) {
        if (units.items[i].why)
            refuse(g, shown, units.items[i].name, units.items[i].why);
        else if (!license->name)
            refuse(g, shown, units.items[i].name, license->from ? unknown : none);
        else
            rc = take_unit(g, shown, hash, license, &units.items[i], err);
    }
    ka_import_free(&units);
    return rc;
}

static int take_file(void *arg, const char *path, struct ka_err *err)
{
    struct gather *g = arg;
    KA_AUTO_BUF struct ka_buf text = {0};
    struct ka_err why;
    struct ka_license license = {0};
    KA_AUTO_FREE char *shown = shown_path(g, path);
    int rc = 0;
    if (++g->files > FILES_MAX) {
        rc = ka_fail(err, -EFBIG, "more than %d files; import a smaller folder", FILES_MAX);
    } else if (ka_file_read(path, KA_PAIR_MAX, &text, &why)) {
        refuse(g, shown, NULL, why.msg);
    } else if (memchr(ka_buf_str(&text), '\0', text.len)) {
        refuse(g, shown, NULL, "it holds a NUL byte, so it is no Python source");
    } else {
        ka_license_find(path, ka_buf_str(&text), g->license_root, &license);
        if (!license.name)
            license.name = ka_strdup(g->license);
        rc = take_units(g, shown, ka_buf_str(&text), &license, err);
    }
    ka_license_free(&license);
    return rc;
}

int ka_gather(struct ka_store *store, const char *path, const char *license, json_t **report,
              struct ka_err *err)
{
    struct stat st;
    KA_AUTO_FREE char *real = ka_path_real(path, err);
    if (!real)
        return -ENOENT;
    if (stat(real, &st) != 0 || !(S_ISDIR(st.st_mode) || S_ISREG(st.st_mode)))
        return ka_fail(err, -ENOENT, "%s: neither a file nor a folder", path);
    bool folder = S_ISDIR(st.st_mode);
    KA_AUTO_FREE char *root = folder ? ka_strdup(real) : ka_path_parent(real);
    struct gather g = {.store = store,
                       .root = root,
                       .license_root = find_license_root(root),
                       .license = license,
                       .taken = json_array(),
                       .not_taken = json_array()};
    int rc = ka_store_begin(store, err);
    if (rc == 0)
        rc = folder ? ka_build_walk(real, take_file, &g, err) : take_file(&g, real, err);
    if (rc == 0)
        rc = ka_store_commit(store, err);
    if (rc == 0)
        *report = json_pack("{s:I, s:O, s:O}", "files", (json_int_t)g.files, "taken", g.taken, "not_taken",
                            g.not_taken);
    json_decref(g.taken);
    json_decref(g.not_taken);
    free(g.license_root);
    return rc;
}
