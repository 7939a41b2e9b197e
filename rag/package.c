/* Names, folders and what pip leaves beside them. Knows no modules and no licences. */
#include "package.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/files.h"
#include "base/lines.h"
#include "base/utf8.h"

#define RECORD_MAX ((size_t)32 << 20)
#define SMALL_MAX ((size_t)64 << 10)
#define SITES_MAX 256

static bool is_kind(const char *path, mode_t kind)
{
    struct stat st;
    return stat(path, &st) == 0 && (st.st_mode & S_IFMT) == kind;
}

static char *read_below(const char *dir, const char *name, size_t max)
{
    KA_AUTO_FREE char *path = ka_path_join(dir, name);
    KA_AUTO_BUF struct ka_buf text = {0};
    return ka_file_read(path, max, &text, NULL) == 0 ? ka_strdup(ka_buf_str(&text)) : NULL;
}

/* Call `each` with every entry of the folder by name, until it returns true. */
static bool any_entry(const char *dir, bool (*each)(void *arg, const char *name), void *arg)
{
    KA_AUTO_FREE struct dirent **entries = NULL;
    int count = scandir(dir, &entries, NULL, alphasort);
    bool found = false;
    for (int i = 0; i < count; i++) {
        found = found || each(arg, entries[i]->d_name);
        free(entries[i]);
    }
    return found;
}

/* ---- sites ---- */

struct site {
    struct ka_sites *sites;
    const char *dir;
};

static bool add_pth(void *arg, const char *name);

/* Takes over `path`. */
static void add_site(struct ka_sites *sites, char *path, bool with_pth)
{
    char *real = is_kind(path, S_IFDIR) ? ka_path_real(path, NULL) : NULL;
    bool known = !real || sites->count == SITES_MAX;
    free(path);
    for (size_t i = 0; i < sites->count && !known; i++)
        known = strcmp(sites->items[i], real) == 0;
    if (known) {
        free(real);
        return;
    }
    *KA_APPEND(sites->items, sites->count) = real;
    struct site site = {sites, real};
    if (with_pth)
        any_entry(real, add_pth, &site);
}

/* Lines of a .pth file are folders, or code, which no folder is called. */
static bool add_pth(void *arg, const char *name)
{
    const struct site *site = arg;
    KA_AUTO_FREE char *text = ka_ends_with(name, ".pth") ? read_below(site->dir, name, SMALL_MAX) : NULL;
    const char *cursor = text, *end = text ? text + strlen(text) : NULL;
    struct ka_line line;
    while (text && ka_line_next(&cursor, end, &line)) {
        line = ka_line_strip(line);
        if (!line.len || ka_line_starts(line, "#"))
            continue;
        KA_AUTO_FREE char *told = ka_strndup(line.at, line.len);
        add_site(site->sites, *told == '/' ? ka_strdup(told) : ka_path_join(site->dir, told), false);
    }
    return false;
}

static bool add_version(void *arg, const char *name)
{
    const struct site *lib = arg;
    if (ka_starts_with(name, "python3")) {
        add_site(lib->sites, ka_format("%s/%s/site-packages", lib->dir, name), true);
        add_site(lib->sites, ka_format("%s/%s/dist-packages", lib->dir, name), true);
    }
    return false;
}

static void add_beside(struct ka_sites *sites, const char *python)
{
    KA_AUTO_FREE char *bin = ka_path_parent(python), *prefix = ka_path_parent(bin);
    KA_AUTO_FREE char *lib = ka_path_join(prefix, "lib"), *local = ka_path_join(prefix, "local/lib");
    struct site at = {sites, lib}, beside = {sites, local};
    any_entry(lib, add_version, &at);
    any_entry(local, add_version, &beside);
}

void ka_sites_add(struct ka_sites *sites, const char *python)
{
    KA_AUTO_FREE char *real = ka_path_real(python, NULL), *bin = ka_path_parent(python);
    KA_AUTO_FREE char *prefix = ka_path_parent(bin), *own = ka_path_join(prefix, "pyvenv.cfg");
    add_beside(sites, python);
    if (real && access(own, F_OK) != 0) /* a virtual environment does not have what its interpreter has */
        add_beside(sites, real);
}

void ka_sites_free(struct ka_sites *sites)
{
    for (size_t i = 0; i < sites->count; i++)
        free(sites->items[i]);
    free(sites->items);
    *sites = (struct ka_sites){0};
}

/* ---- what pip leaves ---- */

bool ka_package_owns(const char *record, const char *top)
{
    const char *cursor = record, *end = record + strlen(record);
    size_t len = strlen(top);
    struct ka_line line;
    while (ka_line_next(&cursor, end, &line))
        if (ka_line_starts(line, top) && line.len > len &&
            (line.at[len] == '/' || ka_line_starts((struct ka_line){line.at + len, line.len - len}, ".py,")))
            return true;
    return false;
}

/* Letters, digits and underscores. */
static size_t word_length(const char *text)
{
    size_t n = 0;
    while (isalnum((unsigned char)text[n]) || text[n] == '_')
        n++;
    return n;
}

char *ka_package_first(const char *record)
{
    const char *cursor = record, *end = record + strlen(record);
    struct ka_line line;
    while (ka_line_next(&cursor, end, &line)) {
        size_t len = line.len ? word_length(line.at) : 0;
        if (len && len < line.len &&
            ka_line_starts((struct ka_line){line.at + len, line.len - len}, "/__init__.py,"))
            return ka_strndup(line.at, len);
    }
    return NULL;
}

char *ka_package_editable(const char *text)
{
    json_auto_t *told = json_loads(text, 0, NULL);
    const char *url = json_string_value(json_object_get(told, "url"));
    const json_t *editable = json_object_get(json_object_get(told, "dir_info"), "editable");
    if (!json_is_true(editable) || !url || !ka_starts_with(url, "file:///"))
        return NULL;
    return strchr(url, '%') ? NULL : ka_strdup(url + strlen("file://"));
}

/* "Some-Package-1.0.dist-info" is of "some_package". */
static bool is_info_of(const char *entry, const char *name)
{
    for (; *name && *entry; name++, entry++) {
        bool blank = strchr("-_.", *name) && strchr("-_.", *entry);
        if (!blank && tolower((unsigned char)*name) != tolower((unsigned char)*entry))
            return false;
    }
    return !*name && *entry == '-' && isdigit((unsigned char)entry[1]) && ka_ends_with(entry, ".dist-info");
}

struct wanted {
    const char *site, *name;
    bool by_record;
    char *info; /* found */
};

static bool find_info(void *arg, const char *entry)
{
    struct wanted *w = arg;
    bool found = !w->by_record && is_info_of(entry, w->name);
    KA_AUTO_FREE char *path = ka_path_join(w->site, entry);
    if (w->by_record && ka_ends_with(entry, ".dist-info")) {
        KA_AUTO_FREE char *record = read_below(path, "RECORD", RECORD_MAX);
        found = record && ka_package_owns(record, w->name);
    }
    if (found)
        w->info = ka_strdup(path);
    return found;
}

/* The .dist-info of a package or a distribution of that name; NULL. */
static char *info_of(const char *site, const char *name, bool by_record)
{
    struct wanted w = {site, name, false, NULL};
    if (!any_entry(site, find_info, &w) && by_record) {
        w.by_record = true;
        any_entry(site, find_info, &w);
    }
    return w.info;
}

/* ---- finding ---- */

/* "a.b" below the folder, as a folder or a file; fills path and top. */
static bool find_below(const char *dir, const char *name, struct ka_package *out)
{
    KA_AUTO_FREE char *path = ka_format("%s/%s", dir, name);
    for (char *c = path + strlen(dir); *c; c++)
        *c = *c == '.' ? '/' : *c == '-' ? '_' : *c;
    size_t top = strlen(dir) + 1 + strcspn(path + strlen(dir) + 1, "/");
    KA_AUTO_FREE char *file = ka_format("%s.py", path);
    bool folder = is_kind(path, S_IFDIR), whole = !path[top];
    if (!folder && !is_kind(file, S_IFREG))
        return false;
    out->path = ka_strdup(folder ? path : file);
    out->top = folder || !whole ? ka_strndup(path, top) : ka_strdup(file);
    return true;
}

/* Where the distribution `info` was installed from, or its package by another name. */
static bool find_by_info(const char *site, const char *info, const char *name, struct ka_package *out)
{
    static const char *const below[] = {"", "/src", "/python"};
    KA_AUTO_FREE char *url = read_below(info, "direct_url.json", SMALL_MAX);
    KA_AUTO_FREE char *record = read_below(info, "RECORD", RECORD_MAX);
    KA_AUTO_FREE char *from = url ? ka_package_editable(url) : NULL;
    KA_AUTO_FREE char *first = record ? ka_package_first(record) : NULL;
    for (size_t i = 0; from && i < KA_COUNT(below); i++) {
        KA_AUTO_FREE char *dir = ka_format("%s%s", from, below[i]);
        if (find_below(dir, name, out)) {
            free(out->top);
            out->top = NULL;
            return true;
        }
    }
    return first && find_below(site, first, out);
}

static char *version_of(const char *info)
{
    const char *slash = strrchr(info, '/'), *dash = slash ? strchr(slash, '-') : NULL;
    return dash ? ka_utf8_clean(ka_strndup(dash + 1, strlen(dash + 1) - strlen(".dist-info"))) : NULL;
}

static bool is_name(const char *name)
{
    for (const char *at = name;; at++) {
        size_t len = word_length(at);
        at += len;
        if (!len || (*at && *at != '.' && *at != '-'))
            return false;
        if (!*at)
            return true;
    }
}

int ka_package_find(const struct ka_sites *sites, const char *name, struct ka_package *out,
                    struct ka_err *err)
{
    struct ka_package found = {0};
    if (!is_name(name))
        return ka_fail(err, -EINVAL, "%s: neither a file, a folder nor the name of a package", name);
    KA_AUTO_FREE char *top = ka_strndup(name, strcspn(name, "."));
    for (size_t i = 0; i < sites->count && !found.path; i++) {
        bool direct = find_below(sites->items[i], name, &found);
        found.info = info_of(sites->items[i], top, direct);
        if (direct && !ka_ends_with(sites->items[i], "-packages")) { /* a folder that a .pth file names */
            free(found.top);
            found.top = NULL;
        }
        if (!direct && (!found.info || !find_by_info(sites->items[i], found.info, name, &found))) {
            free(found.info);
            found.info = NULL;
        }
    }
    if (!found.path)
        return ka_fail(err, -ENOENT,
                       "%s: no such file or folder, and no package of that name in the %zu folders of the "
                       "interpreters found here (--python PATH names another)",
                       name, sites->count);
    found.version = found.info ? version_of(found.info) : NULL;
    *out = found;
    return 0;
}

void ka_package_free(struct ka_package *package)
{
    free(package->path);
    free(package->top);
    free(package->info);
    free(package->version);
    *package = (struct ka_package){0};
}
