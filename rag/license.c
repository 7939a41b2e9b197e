/* Licences by SPDX lines and by the words of their texts. Knows no pairs. */
#include "license.h"

#include <ctype.h>
#include <dirent.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "base/files.h"

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

/* Takes over `path`; false where it cannot be read. */
static bool take_file(char *path, struct ka_license *out)
{
    KA_AUTO_BUF struct ka_buf text = {0};
    if (ka_file_read(path, TEXT_MAX, &text, NULL)) {
        free(path);
        return false;
    }
    char *line = spdx_line(ka_buf_str(&text));
    out->name = line ? line : ka_strdup(ka_license_of_text(ka_buf_str(&text)));
    out->from = path;
    return true;
}

void ka_license_find(const char *path, const char *source, const char *root, struct ka_license *out)
{
    *out = (struct ka_license){.name = spdx_line(source)};
    if (out->name) {
        out->from = ka_strdup(path);
        return;
    }
    KA_AUTO_FREE char *dir = ka_strdup(path);
    for (char *slash; (slash = strrchr(dir, '/')) != NULL && slash > dir;) {
        *slash = '\0';
        if (!ka_starts_with(dir, root))
            break;
        char *file = license_file(dir);
        if (file && take_file(file, out))
            break;
    }
}

void ka_license_free(struct ka_license *license)
{
    free(license->name);
    free(license->from);
    *license = (struct ka_license){0};
}
