/* Installed packages, found in the folders of interpreters by their files: nothing is imported or run. */
#ifndef KA_PACKAGE_H
#define KA_PACKAGE_H

#include "base/base.h"

/* Folders that interpreters import from. Free with ka_sites_free(). */
struct ka_sites {
    char **items;
    size_t count;
};

/* Append those of the interpreter at `python` (a path): lib/python3X/site-packages and dist-packages beside
 * its bin, and what their .pth files name. */
void ka_sites_add(struct ka_sites *sites, const char *python);
void ka_sites_free(struct ka_sites *sites);

struct ka_package {
    char *path; /* what was asked for: a folder or a file */
    char *top;  /* the package's outermost folder, or its one file; NULL: it is in no interpreter's folder */
    char *info; /* its .dist-info folder; NULL: none was found */
    char *version; /* NULL */
};

/* `name` is "package", "package.part", or a distribution's name ("some-package"). One that is installed from
 * a folder of its own (editable) is found there. -ENOENT; -EINVAL for what is no name. */
int ka_package_find(const struct ka_sites *sites, const char *name, struct ka_package *out,
                    struct ka_err *err);
void ka_package_free(struct ka_package *package);

/* Of a distribution's RECORD: does it hold files of the package `top`? And: the first package in it; free()
 * it, NULL: none. */
bool ka_package_owns(const char *record, const char *top);
char *ka_package_first(const char *record);

/* Of direct_url.json: the folder that it is installed from; NULL: it is not. free() it. */
char *ka_package_editable(const char *json);

#endif
