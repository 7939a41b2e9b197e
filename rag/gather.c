/* The walk, the names and the report. Knows files and the store, not how a module is taken apart. */
#include "gather.h"

#include <ctype.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/each.h"
#include "base/files.h"
#include "base/hash.h"
#include "base/utf8.h"
#include "build.h"
#include "commit.h"
#include "import.h"
#include "license.h"

#define FILES_MAX 100000

struct gather {
    struct ka_store *store;
    const struct ka_gather_req *req;
    char *top;        /* absolute */
    size_t top_above; /* bytes of it in front of its own name */
    bool alone;       /* it is a file */
    char *commit;
    struct ka_follow *follow;
    json_t *taken, *not_taken;
    json_t *ids;     /* of the pairs taken */
    json_t *kernels; /* files with kernels and no function: path -> line */
    size_t files;
};

/* ---- where a file belongs ---- */

static bool has(const char *dir, const char *name)
{
    KA_AUTO_FREE char *path = ka_path_join(dir, name);
    return access(path, F_OK) == 0;
}

/* The nearest folder at or above `dir` with one of the files; NULL. */
static char *above_with(const char *dir, const char *const *names)
{
    KA_AUTO_FREE char *at = ka_strdup(dir);
    for (char *slash; strlen(at) > 1 && (slash = strrchr(at, '/')) != NULL; *slash = '\0')
        for (const char *const *name = names; *name; name++)
            if (has(at, *name))
                return ka_strdup(at);
    return NULL;
}

static char *outermost_package(const char *dir)
{
    char *at = ka_strdup(dir);
    for (;;) {
        KA_AUTO_FREE char *parent = ka_path_parent(at);
        if (!has(at, "__init__.py") || !has(parent, "__init__.py"))
            return at;
        free(at);
        at = ka_strdup(parent);
    }
}

static char *find_top(const char *dir)
{
    static const char *const repository[] = {".git", NULL};
    static const char *const project[] = {"pyproject.toml", "setup.py", "setup.cfg", NULL};
    char *top = above_with(dir, repository);
    if (!top)
        top = above_with(dir, project);
    return top ? top : outermost_package(dir);
}

/* "repo/ops/a.py" of "/home/me/repo/ops/a.py". */
static const char *path_in_top(const struct gather *g, const char *path)
{
    return path + g->top_above;
}

/* A path without what could end a line, a comment or a docstring, as UTF-8. free() it. */
static char *shown_path(const char *path)
{
    char *shown = ka_strdup(path);
    for (char *c = shown; *c; c++)
        if (iscntrl((unsigned char)*c) || *c == '"' || *c == '\\')
            *c = '_';
    return ka_utf8_clean(shown);
}

static char *absolute(const struct gather *g, const char *path)
{
    return ka_format("%.*s%s", (int)g->top_above, g->top, path);
}

/* Why the text is no module's; NULL: it may be one. */
static const char *unusable(const struct ka_buf *text)
{
    if (memchr(ka_buf_str(text), '\0', text->len))
        return "it holds a NUL byte, so it is no Python source";
    for (size_t at = 0, n; at < text->len; at += n)
        if ((n = ka_utf8_sequence(text->data + at, text->len - at)) == 0)
            return "it is not UTF-8";
    return NULL;
}

/* For ka_follow: only files of the top itself, also by way of links. */
static char *read_module(void *arg, const char *path)
{
    const struct gather *g = arg;
    KA_AUTO_BUF struct ka_buf text = {0};
    KA_AUTO_FREE char *full = absolute(g, path), *real = ka_path_real(full, NULL);
    size_t len = strlen(g->top);
    bool inside = real && strncmp(real, g->top, len) == 0 && (g->alone ? !real[len] : real[len] == '/');
    if (!inside || ka_file_read(full, KA_PAIR_MAX, &text, NULL) || unusable(&text))
        return NULL;
    return ka_strdup(ka_buf_str(&text));
}

/* ---- facts of a file ---- */

struct facts {
    char *shown;
    char hash[KA_HASH_HEX];
    struct ka_license license;
    const char *allowed; /* the licence that counts, or that of the request; NULL: none */
};

static void facts_of(struct gather *g, const struct ka_module *m, struct facts *out)
{
    KA_AUTO_FREE char *full = absolute(g, m->path), *parent = g->alone ? ka_path_parent(g->top) : NULL;
    *out = (struct facts){.shown = shown_path(m->path)};
    ka_hash_hex(m->source, m->len, out->hash);
    ka_license_find(full, m->source, parent ? parent : g->top, g->req->info, &out->license);
    ka_utf8_clean(out->license.from);
    out->allowed = out->license.name ? out->license.name : g->req->license;
}

static void free_facts(struct facts *facts)
{
    free(facts->shown);
    ka_license_free(&facts->license);
}

/* The name of a licence file, from the top on. */
static const char *from_of(const struct gather *g, const struct ka_license *license)
{
    bool inside = license->from && strncmp(license->from, g->top, g->top_above) == 0;
    return inside ? license->from + g->top_above : license->from;
}

static void write_heading(void *arg, const struct ka_module *m, struct ka_buf *out)
{
    struct gather *g = arg;
    struct facts facts;
    facts_of(g, m, &facts);
    const struct ka_license *l = &facts.license;
    KA_AUTO_FREE char *from = l->from ? shown_path(from_of(g, l)) : NULL;
    ka_buf_printf(out, "# from %s, sha256 %s\n# licence: %s", facts.shown, facts.hash,
                  facts.allowed ? facts.allowed : "none");
    if (l->header)
        ka_buf_printf(out, "; of the file: %s", l->header);
    if (from)
        ka_buf_printf(out, "; of the repository: %s (%s)", l->repository ? l->repository : "not known", from);
    ka_buf_puts(out, "\n");
    ka_module_notices(m, out);
    free_facts(&facts);
}

/* ---- pairs ---- */

static void refuse(struct gather *g, const char *path, unsigned line, const char *class, const char *why)
{
    KA_AUTO_FREE char *shown = shown_path(path);
    json_array_append_new(g->not_taken, json_pack("{s:s, s:i, s:s*, s:s}", "path", shown, "line", (int)line,
                                                  "class", class, "why", why));
}

/* "repo/ops/softmax.py" and "Softmax" give "repo_ops_softmax_Softmax"; where "repo/ops_softmax.py" has that
 * already, its line behind it. free() it. */
static char *id_of(struct gather *g, const char *shown, const char *class, unsigned line)
{
    size_t len = strlen(shown);
    char *id = ka_format("%.*s_%s", (int)(ka_ends_with(shown, ".py") ? len - 3 : len), shown, class);
    for (char *c = id; *c; c++)
        if (!isalnum((unsigned char)*c))
            *c = '_';
    while (json_object_get(g->ids, id)) {
        char *longer = ka_format("%s_%u", id, line);
        free(id);
        id = longer;
    }
    json_object_set_new(g->ids, id, json_true());
    return id;
}

/* "A AND (B OR C)" of all that its files are under. free() it. */
static char *join_licenses(const json_t *names)
{
    struct ka_buf all = {0};
    const char *name;
    json_t *value;
    json_object_foreach((json_t *)names, name, value)
    {
        bool grouped = strstr(name, " OR ") && json_object_size(names) > 1;
        ka_buf_printf(&all, grouped ? "%s(%s)" : "%s%s", all.len ? " AND " : "", name);
    }
    return all.data ? ka_buf_steal(&all) : ka_strdup("");
}

/* The files of a unit as an array, and their licences. *why of the first that nobody allows to copy. */
static json_t *list_files(struct gather *g, const struct ka_import_unit *unit, json_t *licenses, char **why)
{
    json_t *files = json_array();
    for (size_t i = 0; i < unit->file_count; i++) {
        struct facts facts;
        const struct ka_module *m = ka_follow_module(g->follow, unit->files[i], NULL);
        if (!m)
            continue;
        facts_of(g, m, &facts);
        const struct ka_license *l = &facts.license;
        if (facts.allowed)
            json_object_set_new(licenses, facts.allowed, json_true());
        else if (!*why)
            *why = ka_format(
                l->header || l->from
                    ? "the licence of %s is none of those known here (--license NAME if you may use it)"
                    : "no licence allows it: %s has no SPDX line, and neither a LICENSE nor a "
                      "licence field is beside or above it (--license NAME if you may use it)",
                facts.shown);
        json_array_append_new(files,
                              json_pack("{s:s, s:s, s:s*, s:s*, s:s*, s:s*}", "path", facts.shown, "sha256",
                                        facts.hash, "license", facts.allowed, "license_header", l->header,
                                        "license_repository", l->repository, "license_from", l->from));
        free_facts(&facts);
    }
    return files;
}

static char *pair_text(const struct gather *g, const struct ka_import_unit *unit, const char *shown,
                       const char *hash, const char *license)
{
    struct ka_buf text = {0};
    ka_buf_printf(&text, "\"\"\"%s of %s.\n\nimported: %s sha256 %s", unit->name, shown, shown, hash);
    if (g->commit)
        ka_buf_printf(&text, " commit %s", g->commit);
    if (g->req->version)
        ka_buf_printf(&text, " version %s", g->req->version);
    ka_buf_printf(&text, "\nop: %s\nlicense: %s\n\"\"\"\n\n", unit->name, license);
    ka_buf_puts(&text, unit->source);
    return ka_buf_steal(&text);
}

static int put_pair(struct gather *g, const char *id, const char *source, struct ka_err *why)
{
    struct ka_pair pair = {0};
    KA_AUTO_FREE char *path = ka_format("%.*s/" KA_GATHER_FAMILY "/%s.py", (int)strcspn(id, "/"), id, id);
    int rc = ka_pair_parse(path, source, strlen(source), &pair, why);
    if (rc == 0)
        rc = ka_build_put(g->store, &pair, why);
    ka_pair_free(&pair);
    return rc;
}

static void report_taken(struct gather *g, const struct ka_import_unit *unit, const char *id,
                         const char *license, json_t *files)
{
    json_t *own = json_array_get(files, 0);
    json_t *entry = json_pack("{s:s, s:s, s:O, s:i, s:s, s:O}", "id", id, "class", unit->name, "path",
                              json_object_get(own, "path"), "line", (int)unit->line, "license", license,
                              "sha256", json_object_get(own, "sha256"));
    static const char *const more[] = {"license_header", "license_repository", "license_from"};
    for (size_t i = 0; i < KA_COUNT(more); i++)
        if (json_object_get(own, more[i]))
            json_object_set(entry, more[i], json_object_get(own, more[i]));
    json_object_set(entry, "files", files);
    json_array_append_new(g->taken, entry);
}

static int take_unit(struct gather *g, const struct ka_import_unit *unit, struct ka_err *err)
{
    struct ka_err failed;
    KA_AUTO_FREE char *why = NULL;
    json_auto_t *licenses = json_object(), *files = list_files(g, unit, licenses, &why);
    KA_AUTO_FREE char *license = join_licenses(licenses);
    const json_t *own = json_array_get(files, 0);
    if (why) {
        refuse(g, unit->files[0], unit->line, unit->name, why);
        return 0;
    }
    const char *shown = json_string_value(json_object_get(own, "path"));
    KA_AUTO_FREE char *id = id_of(g, shown, unit->name, unit->line);
    KA_AUTO_FREE char *text =
        pair_text(g, unit, shown, json_string_value(json_object_get(own, "sha256")), license);
    int rc = put_pair(g, id, text, &failed);
    if (rc == -EINVAL || rc == -EFBIG) {
        refuse(g, unit->files[0], unit->line, unit->name, failed.msg);
        return 0;
    }
    if (rc)
        return ka_fail(err, rc, "%s", failed.msg);
    report_taken(g, unit, id, license, files);
    for (size_t i = 0; i < unit->file_count; i++)
        json_object_set_new(g->kernels, unit->files[i], json_integer(0));
    return 0;
}

static int take_units(struct gather *g, const char *path, struct ka_err *err)
{
    struct ka_import_units units;
    struct ka_err why;
    int rc = 0;
    if (ka_import_split(g->follow, path, write_heading, g, &units, &why)) {
        refuse(g, path, 1, NULL, why.msg);
        return 0;
    }
    if (!units.count && units.kernel_line && !json_object_get(g->kernels, path))
        json_object_set_new(g->kernels, path, json_integer(units.kernel_line));
    for (size_t i = 0; i < units.count && rc == 0; i++) {
        const struct ka_import_unit *unit = &units.items[i];
        if (unit->why)
            refuse(g, path, unit->line, unit->name, unit->why);
        else
            rc = take_unit(g, unit, err);
    }
    ka_import_free(&units);
    return rc;
}

static int take_file(void *arg, const char *path, struct ka_err *err)
{
    struct gather *g = arg;
    KA_AUTO_BUF struct ka_buf text = {0};
    struct ka_err why;
    if (++g->files > FILES_MAX)
        return ka_fail(err, -EFBIG, "more than %d files; import a smaller folder", FILES_MAX);
    ka_follow_forget(g->follow);
    if (ka_file_read(path, KA_PAIR_MAX, &text, &why))
        refuse(g, path_in_top(g, path), 1, NULL, why.msg);
    else if (unusable(&text))
        refuse(g, path_in_top(g, path), 1, NULL, unusable(&text));
    else
        return take_units(g, path_in_top(g, path), err);
    return 0;
}

/* ---- the whole ---- */

static void refuse_kernels(struct gather *g)
{
    const char *path;
    json_t *line;
    json_object_foreach(g->kernels, path, line)
    {
        if (json_integer_value(line))
            refuse(g, path, (unsigned)json_integer_value(line), NULL,
                   "it has Triton kernels, but no torch.autograd.Function, and no pair uses them");
    }
}

static json_t *report_of(const struct gather *g)
{
    return json_pack("{s:I, s:s*, s:s*, s:O, s:O}", "files", (json_int_t)g->files, "commit", g->commit,
                     "version", g->req->version, "taken", g->taken, "not_taken", g->not_taken);
}

int ka_gather(struct ka_store *store, const struct ka_gather_req *req, json_t **report, struct ka_err *err)
{
    struct stat st;
    KA_AUTO_FREE char *real = ka_path_real(req->path, err);
    if (!real)
        return -ENOENT;
    if (stat(real, &st) != 0 || !(S_ISDIR(st.st_mode) || S_ISREG(st.st_mode)))
        return ka_fail(err, -ENOENT, "%s: neither a file nor a folder", req->path);
    bool folder = S_ISDIR(st.st_mode);
    KA_AUTO_FREE char *dir = folder ? ka_strdup(real) : ka_path_parent(real);
    char *top = req->top ? ka_path_real(req->top, err) : find_top(dir);
    if (!top)
        return -ENOENT;
    struct gather g = {.store = store,
                       .req = req,
                       .top = top,
                       .top_above = (size_t)(strrchr(top, '/') + 1 - top),
                       .alone = stat(top, &st) == 0 && S_ISREG(st.st_mode),
                       .commit = ka_commit_find(top),
                       .taken = json_array(),
                       .not_taken = json_array(),
                       .ids = json_object(),
                       .kernels = json_object()};
    g.follow = ka_follow_new(read_module, &g);
    int rc = ka_store_begin(store, err);
    if (rc == 0)
        rc = folder ? ka_build_walk(real, take_file, &g, err) : take_file(&g, real, err);
    if (rc == 0)
        rc = ka_store_commit(store, err);
    refuse_kernels(&g);
    if (rc == 0)
        *report = report_of(&g);
    ka_follow_free(g.follow);
    json_decref(g.taken);
    json_decref(g.not_taken);
    json_decref(g.ids);
    json_decref(g.kernels);
    free(g.commit);
    free(g.top);
    return rc;
}
