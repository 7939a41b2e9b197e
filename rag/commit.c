/* HEAD, a ref, packed refs. Knows nothing of objects. */
#include "commit.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#include "base/files.h"
#include "base/lines.h"

#define SMALL_MAX ((size_t)4 << 10)
#define PACKED_MAX ((size_t)64 << 20)

/* SHA-1 or SHA-256. */
static size_t hash_length(const char *text)
{
    size_t len = strspn(text, "0123456789abcdef");
    return len == 40 || len == 64 ? len : 0;
}

char *ka_commit_hash(const char *text)
{
    size_t len = hash_length(text);
    return len && strspn(text + len, " \t\r\n") == strlen(text + len) ? ka_strndup(text, len) : NULL;
}

/* What stands behind `key` up to the end of the line; NULL. */
static char *value_of(const char *text, const char *key)
{
    if (!ka_starts_with(text, key))
        return NULL;
    const char *at = text + strlen(key);
    struct ka_line line = ka_line_strip((struct ka_line){at, strcspn(at, "\n")});
    return ka_strndup(line.at, line.len);
}

char *ka_commit_ref(const char *text)
{
    char *ref = value_of(text, "ref:");
    bool usable = ref && ka_starts_with(ref, "refs/") && !strstr(ref, "..");
    for (const char *c = ref; usable && *c; c++)
        usable = !iscntrl((unsigned char)*c) && *c != ' ' && *c != '\\';
    if (usable)
        return ref;
    free(ref);
    return NULL;
}

char *ka_commit_packed(const char *text, const char *ref)
{
    const char *cursor = text, *end = text + strlen(text);
    struct ka_line line;
    while (ka_line_next(&cursor, end, &line)) {
        size_t len = line.len ? hash_length(line.at) : 0;
        if (len && line.len > len && line.at[len] == ' ' &&
            ka_line_is((struct ka_line){line.at + len + 1, line.len - len - 1}, ref))
            return ka_strndup(line.at, len);
    }
    return NULL;
}

static char *read_below(const char *dir, const char *name, size_t max)
{
    KA_AUTO_FREE char *path = ka_path_join(dir, name);
    KA_AUTO_BUF struct ka_buf text = {0};
    return ka_file_read(path, max, &text, NULL) == 0 ? ka_strdup(ka_buf_str(&text)) : NULL;
}

/* A path out of a file, from the folder of that file on. Takes over `told`. */
static char *path_from(const char *dir, char *told)
{
    char *path = told && *told && *told != '/' ? ka_path_join(dir, told) : ka_strdup(told);
    free(told);
    return path;
}

/* The ref as a file in the folder, or among its packed ones. */
static char *look_up(const char *dir, const char *ref)
{
    KA_AUTO_FREE char *loose = read_below(dir, ref, SMALL_MAX);
    char *hash = loose ? ka_commit_hash(loose) : NULL;
    if (hash)
        return hash;
    KA_AUTO_FREE char *packed = read_below(dir, "packed-refs", PACKED_MAX);
    return packed ? ka_commit_packed(packed, ref) : NULL;
}

char *ka_commit_find(const char *root)
{
    KA_AUTO_FREE char *link = read_below(root, ".git", SMALL_MAX); /* a worktree has a file there */
    KA_AUTO_FREE char *dir = link ? path_from(root, value_of(link, "gitdir:")) : ka_path_join(root, ".git");
    KA_AUTO_FREE char *head = dir ? read_below(dir, "HEAD", SMALL_MAX) : NULL;
    if (!head)
        return NULL;
    KA_AUTO_FREE char *ref = ka_commit_ref(head), *told = read_below(dir, "commondir", SMALL_MAX);
    KA_AUTO_FREE char *common = told ? path_from(dir, value_of(told, "")) : NULL;
    if (!ref)
        return ka_commit_hash(head);
    char *hash = look_up(dir, ref);
    return hash || !common ? hash : look_up(common, ref);
}
