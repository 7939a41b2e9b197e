/* Licences by SPDX lines, by the words of their texts, and by fields. Knows no pairs. */
#include "license.h"

#include <ctype.h>
#include <dirent.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "base/files.h"
#include "base/lines.h"

#define TEXT_MAX ((size_t)256 << 10)
#define NAME_MAX_BYTES 80

/* The first rule of which every part occurs. */
static const struct {
    const char *name, *parts[3];
} rules[] = {
    {"Apache-2.0", {"Apache License", "Version 2.0"}},
    {"LGPL-3.0", {"GNU LESSER GENERAL PUBLIC LICENSE", "Version 3"}},
    {"AGPL-3.0", {"GNU AFFERO GENERAL PUBLIC LICENSE", "Version 3"}},
    {"GPL-3.0", {"GNU GENERAL PUBLIC LICENSE", "Version 3"}},
    {"GPL-2.0", {"GNU GENERAL PUBLIC LICENSE", "Version 2"}},
    {"MPL-2.0", {"Mozilla Public License", "2.0"}},
    {"BSD-3-Clause", {"Redistribution and use in source and binary forms", "Neither the name"}},
    {"BSD-2-Clause", {"Redistribution and use in source and binary forms"}},
    {"ISC", {"Permission to use, copy, modify, and/or distribute"}},
    {"MIT", {"Permission is hereby granted, free of charge", "The above copyright notice"}},
    {"Unlicense", {"This is free and unencumbered software released into the public domain"}},
};

/* Licence texts are wrapped in every way: blanks of any kind count as one space. */
static char *unwrapped(const char *text)
{
    char *flat = ka_calloc(strlen(text) + 1, 1);
    size_t n = 0;
    for (; *text; text++) {
        if (!isspace((unsigned char)*text))
            flat[n++] = *text;
        else if (n && flat[n - 1] != ' ')
            flat[n++] = ' ';
    }
    return flat;
}

const char *ka_license_of_text(const char *text)
{
    KA_AUTO_FREE char *flat = unwrapped(text);
    for (size_t i = 0; i < KA_COUNT(rules); i++) {
        bool all = true;
        for (size_t k = 0; k < KA_COUNT(rules[i].parts) && rules[i].parts[k]; k++)
            all = all && strcasestr(flat, rules[i].parts[k]);
        if (all)
            return rules[i].name;
    }
    return NULL;
}

/* "SPDX-License-Identifier: Apache-2.0 OR MIT" gives what stands behind the colon; NULL without such a
 * line. */
static char *spdx_line(const char *source)
{
    static const char key[] = "SPDX-License-Identifier:";
    const char *at = strstr(source, key);
    if (!at)
        return NULL;
    at += sizeof(key) - 1;
    at += strspn(at, " \t");
    size_t len = 0;
    while (len < NAME_MAX_BYTES && at[len] && (isalnum((unsigned char)at[len]) || strchr(" .+-()", at[len])))
        len++;
    while (len && at[len - 1] == ' ')
        len--;
    return len ? ka_strndup(at, len) : NULL;
}

/* ---- names ---- */

/* Usual names that are no SPDX identifiers, and identifiers that have no rule above. */
static const struct {
    const char *says, *name;
} names[] = {
    {"MIT License", "MIT"},
    {"The MIT License", "MIT"},
    {"MIT-0", "MIT-0"},
    {"Apache 2.0", "Apache-2.0"},
    {"Apache 2", "Apache-2.0"},
    {"Apache License 2.0", "Apache-2.0"},
    {"Apache Software License", "Apache-2.0"},
    {"BSD", "BSD-3-Clause"},
    {"BSD License", "BSD-3-Clause"},
    {"BSD 3-Clause", "BSD-3-Clause"},
    {"BSD 3-Clause License", "BSD-3-Clause"},
    {"BSD 2-Clause", "BSD-2-Clause"},
    {"0BSD", "0BSD"},
    {"CC0-1.0", "CC0-1.0"},
    {"GPL-3.0-only", "GPL-3.0-only"},
    {"GPL-3.0-or-later", "GPL-3.0-or-later"},
    {"LGPL-3.0-only", "LGPL-3.0-only"},
    {"LGPL-3.0-or-later", "LGPL-3.0-or-later"},
    {"ISC License", "ISC"},
};

static bool says(struct ka_line text, const char *name)
{
    return strlen(name) == text.len && strncasecmp(text.at, name, text.len) == 0;
}

static const char *known_name(struct ka_line text)
{
    for (size_t i = 0; i < KA_COUNT(rules); i++)
        if (says(text, rules[i].name))
            return rules[i].name;
    for (size_t i = 0; i < KA_COUNT(names); i++)
        if (says(text, names[i].says))
            return names[i].name;
    return NULL;
}

char *ka_license_of_name(const char *name)
{
    struct ka_line text = ka_line_strip((struct ka_line){name, strlen(name)});
    KA_AUTO_BUF struct ka_buf out = {0};
    while (text.at && text.len && text.len <= NAME_MAX_BYTES) { /* gcc's sanitizers want the first of these */
        const char *either = memmem(text.at, text.len, " OR ", 4),
                   *both = memmem(text.at, text.len, " AND ", 5);
        const char *stop = either && (!both || either < both) ? either : both;
        const char *id = known_name((struct ka_line){text.at, stop ? (size_t)(stop - text.at) : text.len});
        if (!id)
            return NULL;
        ka_buf_puts(&out, id);
        if (!stop)
            return ka_buf_steal(&out);
        size_t word = stop == either ? 4 : 5;
        ka_buf_add(&out, stop, word);
        text = (struct ka_line){stop + word, text.len - (size_t)(stop - text.at) - word};
    }
    return NULL;
}

/* A field holds a name, or the whole text of a licence. */
static char *of_value(const char *value)
{
    char *name = ka_license_of_name(value);
    return name ? name : ka_strdup(ka_license_of_text(value));
}

/* ---- fields ---- */

/* The text between the quotes at `at`, over lines where there are three; the rest of the line where there are
 * none. free() it. */
static char *quoted(const char *at)
{
    at += strspn(at, " \t");
    if (*at != '"' && *at != '\'')
        return ka_strndup(at, strcspn(at, "\r\n"));
    const char three[] = {*at, *at, *at, '\0'}, one[] = {*at, '\0'};
    bool triple = ka_starts_with(at, three);
    at += triple ? 3 : 1;
    const char *end = strstr(at, triple ? three : one);
    return ka_strndup(at, end ? (size_t)(end - at) : strcspn(at, "\r\n"));
}

/* The value behind `key =`, in a line or in braces; NULL: it is not there. */
static const char *value_of(const char *at, const char *key)
{
    at += strspn(at, " \t{,");
    size_t len = strlen(key);
    if (strncmp(at, key, len) != 0)
        return NULL;
    at += len + strspn(at + len, " \t");
    return *at == '=' ? at + 1 + strspn(at + 1, " \t") : NULL;
}

static bool is_table(struct ka_line line, const char *const *tables)
{
    for (; *tables; tables++)
        if (ka_line_is(line, *tables))
            return true;
    return false;
}

/* `text = ...` or `file = ...`, in the braces of `license = {...}` or in a table of its own. */
static void take_field(const char *at, char **name, char **file)
{
    const char *text = value_of(at, "text"), *named = value_of(at, "file");
    if (text && !*name) {
        KA_AUTO_FREE char *value = quoted(text);
        *name = of_value(value);
    } else if (named && !*file) {
        *file = quoted(named);
    }
}

char *ka_license_of_project(const char *text, char **file)
{
    static const char *const tables[] = {"[project]", "[tool.poetry]", "[metadata]", NULL};
    static const char *const own[] = {"[project.license]", NULL};
    const char *cursor = text, *end = text + strlen(text);
    bool inside = false, inside_own = false;
    char *name = NULL, *named = NULL;
    struct ka_line line;
    while (!name && ka_line_next(&cursor, end, &line)) {
        line = ka_line_strip(line);
        if (ka_line_starts(line, "[")) {
            inside = is_table(line, tables);
            inside_own = is_table(line, own);
        }
        const char *value = inside && line.len ? value_of(line.at, "license") : NULL;
        if (inside_own && line.len)
            take_field(line.at, &name, &named);
        else if (value && *value == '{')
            take_field(value, &name, &named);
        else if (value) {
            KA_AUTO_FREE char *plain = quoted(value);
            name = of_value(plain);
        }
    }
    *file = named;
    return name;
}

char *ka_license_of_metadata(const char *text)
{
    static const char *const keys[] = {"License-Expression:", "License:", "Classifier: License ::"};
    const char *end = strstr(text, "\n\n");
    struct ka_line line;
    char *name = NULL;
    end = end ? end : text + strlen(text);
    for (size_t i = 0; i < KA_COUNT(keys) && !name; i++) {
        for (const char *cursor = text; !name && ka_line_next(&cursor, end, &line);) {
            if (!ka_line_starts(line, keys[i]))
                continue;
            KA_AUTO_FREE char *value = ka_strndup(line.at + strlen(keys[i]), line.len - strlen(keys[i]));
            const char *last = i == 2 ? strrchr(value, ':') : NULL;
            name = of_value(last ? last + 1 : value);
        }
    }
    return name;
}

/* ---- files ---- */

static bool is_license_name(const char *name)
{
    static const char *const stems[] = {"LICENSE", "LICENCE", "COPYING", "UNLICENSE"};
    for (size_t i = 0; i < KA_COUNT(stems); i++) {
        size_t len = strlen(stems[i]);
        if (strncasecmp(name, stems[i], len) == 0 && (!name[len] || name[len] == '.' || name[len] == '-'))
            return true;
    }
    return false;
}

/* The licence file of one folder; of several the first by name. free() it. */
static char *license_file(const char *dir)
{
    KA_AUTO_FREE struct dirent **entries = NULL;
    int count = scandir(dir, &entries, NULL, alphasort);
    char *found = NULL;
    for (int i = 0; i < count; i++) {
        if (!found && is_license_name(entries[i]->d_name))
            found = ka_path_join(dir, entries[i]->d_name);
        free(entries[i]);
    }
    return found;
}

static char *read_text(const char *path)
{
    KA_AUTO_BUF struct ka_buf text = {0};
    if (ka_file_read(path, TEXT_MAX, &text, NULL) || memchr(ka_buf_str(&text), '\0', text.len))
        return NULL;
    return ka_strdup(ka_buf_str(&text));
}

/* Takes over `path`, where there is such a file. The first file that names a known licence stays, else the
 * first of all. */
static void take_text(struct ka_license *out, char *path, char *name)
{
    if (path && (!out->from || (name && !out->repository))) {
        free(out->from);
        out->from = path;
        out->repository = name;
        return;
    }
    free(path);
    free(name);
}

static void take_license_file(struct ka_license *out, char *path)
{
    KA_AUTO_FREE char *text = path ? read_text(path) : NULL;
    char *line = text ? spdx_line(text) : NULL;
    if (text)
        take_text(out, path, line ? line : ka_strdup(ka_license_of_text(text)));
    else
        free(path);
}

/* A licence's name out of pyproject.toml or setup.cfg, or of the file that they name in their folder. */
static void take_project(struct ka_license *out, const char *dir, const char *name)
{
    char *path = ka_path_join(dir, name);
    KA_AUTO_FREE char *text = read_text(path), *file = NULL;
    char *license = text ? ka_license_of_project(text, &file) : NULL;
    if (license)
        take_text(out, path, license);
    else
        free(path);
    if (!license && file && *file != '/' && !strstr(file, ".."))
        take_license_file(out, ka_path_join(dir, file));
}

static void look_in(const char *dir, struct ka_license *out)
{
    take_license_file(out, license_file(dir));
    if (!out->repository)
        take_project(out, dir, "pyproject.toml");
    if (!out->repository)
        take_project(out, dir, "setup.cfg");
}

static void look_in_info(const char *info, struct ka_license *out)
{
    KA_AUTO_FREE char *below = ka_path_join(info, "licenses");
    char *path = ka_path_join(info, "METADATA");
    KA_AUTO_FREE char *text = read_text(path);
    char *name = text ? ka_license_of_metadata(text) : NULL;
    take_license_file(out, license_file(info));
    if (!out->repository)
        take_license_file(out, license_file(below));
    if (name && !out->repository)
        take_text(out, path, name);
    else {
        free(path);
        free(name);
    }
}

static bool is_within(const char *dir, const char *root)
{
    size_t len = strlen(root);
    return strncmp(dir, root, len) == 0 && (!dir[len] || dir[len] == '/');
}

void ka_license_find(const char *path, const char *source, const char *root, const char *info,
                     struct ka_license *out)
{
    *out = (struct ka_license){.header = spdx_line(source)};
    KA_AUTO_FREE char *dir = ka_strdup(path);
    for (char *slash; !out->from && (slash = strrchr(dir, '/')) != NULL && slash > dir;) {
        *slash = '\0';
        if (!is_within(dir, root))
            break;
        look_in(dir, out);
    }
    if (!out->from && info)
        look_in_info(info, out);
    out->name = out->header ? out->header : out->repository;
    /* a name of somebody's own (LicenseRef-...) allows nothing by itself */
    if (out->name && strcasestr(out->name, "LicenseRef"))
        out->name = NULL;
}

void ka_license_free(struct ka_license *license)
{
    free(license->header);
    free(license->repository);
    free(license->from);
    *license = (struct ka_license){0};
}
