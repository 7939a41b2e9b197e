/* Any bytes as what says where somebody's file is from: licence texts and fields, git's HEAD and refs, what
 * pip leaves. */
#include <stdlib.h>
#include <string.h>

#include "rag/commit.h"
#include "rag/license.h"
#include "rag/package.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* A hash, or a ref that stays in its folder; free()s it. */
static void check_hash(char *hash)
{
    if (hash && strspn(hash, "0123456789abcdef") != strlen(hash))
        abort();
    free(hash);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char *text = ka_strndup((const char *)data, size), *file = NULL;
    ka_license_of_text(text);
    char *name = ka_license_of_name(text), *again = name ? ka_license_of_name(name) : NULL;
    if (name && (!again || strcmp(name, again) != 0))
        abort();
    free(again);
    free(name);
    free(ka_license_of_project(text, &file));
    free(file);
    free(ka_license_of_metadata(text));
    check_hash(ka_commit_hash(text));
    check_hash(ka_commit_packed(text, "refs/heads/main"));
    char *ref = ka_commit_ref(text);
    if (ref && (strstr(ref, "..") || *ref == '/'))
        abort();
    free(ref);
    char *first = ka_package_first(text);
    if (first && (!*first || strpbrk(first, "/.") || !ka_package_owns(text, first)))
        abort();
    free(first);
    char *from = ka_package_editable(text);
    if (from && *from != '/')
        abort();
    free(from);
    free(text);
    return 0;
}
