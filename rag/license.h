/* Which licence a file of somebody else's is under: by its SPDX line, else by the licence file beside it or
 * above it. */
#ifndef KA_LICENSE_H
#define KA_LICENSE_H

#include "base/base.h"

struct ka_license {
    char *name; /* SPDX identifier; NULL: there is no licence, or one that is not known here */
    char *from; /* the file that says so, or whose text is not known; NULL */
};

/* The SPDX identifier of a licence's text; NULL for one that is not known. Static. */
const char *ka_license_of_text(const char *text);

/* Of the file at `path` (absolute) with this content, looking upwards as far as `root` (absolute, a folder
 * above it) and no further. Free with ka_license_free(). */
void ka_license_find(const char *path, const char *source, const char *root, struct ka_license *out);
void ka_license_free(struct ka_license *license);

#endif
