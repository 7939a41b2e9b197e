/* Which licence a file of somebody else's is under: by its own SPDX line, else by the licence file, or what
 * pyproject.toml or setup.cfg say, beside it or above it. Both are told. */
#ifndef KA_LICENSE_H
#define KA_LICENSE_H

#include "base/base.h"

struct ka_license {
    const char
        *name;    /* what counts: the header's, else the repository's; NULL: none, or one not known here */
    char *header; /* what its SPDX line says; NULL */
    char *repository; /* of the nearest licence file or field; NULL: none, or one not known here */
    char *from;       /* that file; NULL: there is none */
};

/* The SPDX identifier of a licence's text; NULL for one that is not known. Static. */
const char *ka_license_of_text(const char *text);

/* An SPDX expression of identifiers known here, or a usual name such as "MIT License", as an expression; NULL
 * for anything else. free() it. */
char *ka_license_of_name(const char *name);

/* The licence that the text of a pyproject.toml or setup.cfg names; NULL: none that is known. Where it names
 * a file instead, *file is that name. free() both. */
char *ka_license_of_project(const char *text, char **file);

/* The same of an installed package's METADATA: License-Expression, License, or a classifier. */
char *ka_license_of_metadata(const char *text);

/* Of the file at `path` (absolute) with this content, looking upwards as far as `root` (absolute, a folder
 * above it) and no further; where nothing is found there, in `info`, an installed package's .dist-info folder
 * (NULL: none). Free with ka_license_free(). */
void ka_license_find(const char *path, const char *source, const char *root, const char *info,
                     struct ka_license *out);
void ka_license_free(struct ka_license *license);

#endif
