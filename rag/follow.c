/* Resolves names through imports. Knows tokens and paths, not files. */
#include "follow.h"

#include <errno.h>
#include <search.h>
#include <stdlib.h>
#include <string.h>

#include "base/files.h"

#define DEPTH_MAX 8 /* of imports of imports */
#define PATH_BYTES 1024
#define KEPT_BYTES ((size_t)128 << 20)
#define EFFORT_MAX ((size_t)300 << 20) /* names compared for one file; honest ones take a thousandth of it */

struct asked { /* a path that was asked for */
    char *path;
    struct ka_module module; /* without a source: there is none */
    char *why;
};

struct ka_follow {
    ka_follow_read_fn read;
    void *arg;
    void *entries; /* tsearch() */
    size_t bytes, effort;
    struct ka_module *marked[KA_FOLLOW_FILES];
    size_t marked_count;
};

struct ka_follow *ka_follow_new(ka_follow_read_fn read, void *arg)
{
    struct ka_follow *follow = ka_calloc(1, sizeof(*follow));
    follow->read = read;
    follow->arg = arg;
    return follow;
}

static int by_path(const void *a, const void *b)
{
    return strcmp(((const struct asked *)a)->path, ((const struct asked *)b)->path);
}

static void free_asked(void *node)
{
    struct asked *e = node;
    ka_module_free(&e->module);
    free(e->path);
    free(e->why);
    free(e);
}

void ka_follow_forget(struct ka_follow *follow)
{
    ka_follow_clear(follow);
    follow->effort = 0;
    if (follow->bytes < KEPT_BYTES)
        return;
    tdestroy(follow->entries, free_asked);
    follow->entries = NULL;
    follow->bytes = 0;
}

void ka_follow_free(struct ka_follow *follow)
{
    if (!follow)
        return;
    tdestroy(follow->entries, free_asked);
    free(follow);
}

static struct asked *new_asked(struct ka_follow *follow, const char *path)
{
    struct asked *e = ka_calloc(1, sizeof(*e));
    struct ka_err err;
    KA_AUTO_FREE char *text = follow->read(follow->arg, path);
    e->path = ka_strdup(path);
    if (!text)
        e->why = ka_strdup("cannot be read");
    else if (ka_module_parse(path, text, &e->module, &err))
        e->why = ka_strdup(err.msg);
    follow->bytes +=
        sizeof(*e) + strlen(path) + e->module.len + e->module.tokens.count * sizeof(struct ka_token);
    return e;
}

struct ka_module *ka_follow_module(struct ka_follow *follow, const char *path, struct ka_err *err)
{
    const struct asked key = {.path = (char *)path};
    struct asked *const *known = tfind(&key, &follow->entries, by_path);
    struct asked *e = known ? *known : new_asked(follow, path);
    if (!known)
        tsearch(e, &follow->entries, by_path);
    if (e->why)
        ka_fail(err, -ENOENT, "%s", e->why);
    return e->why ? NULL : &e->module;
}

/* ---- where an import leads ---- */

/* `above`/`name` with the dots as slashes, as a file or a package; NULL where neither is. */
static struct ka_module *module_below(struct ka_follow *follow, const char *above, const char *name)
{
    static const char *const tails[] = {".py", "/__init__.py"};
    struct ka_module *found = NULL;
    KA_AUTO_FREE char *path = ka_strdup(name);
    for (char *c = path; *c; c++)
        *c = *c == '.' ? '/' : *c;
    if (strlen(above) + strlen(path) > PATH_BYTES || *path == '/' || strstr(path, "//"))
        return NULL;
    for (size_t i = 0; i < KA_COUNT(tails) && !found; i++) {
        KA_AUTO_FREE char *file = ka_format("%s%s%s%s", above, *above && *path ? "/" : "", path, tails[i]);
        found = *path || i > 0 ? ka_follow_module(follow, file, NULL) : NULL;
    }
    return found;
}

/* The folder that holds it, in place; false at the top. */
static bool go_up(char *path)
{
    char *slash = strrchr(path, '/');
    bool more = *path != '\0';
    *(slash ? slash : path) = '\0';
    return more;
}

static struct ka_module *resolve(struct ka_follow *follow, const struct ka_module *from, const char *name)
{
    static const char *const others[] = {"torch", "triton", "numpy", "typing", "math"};
    KA_AUTO_FREE char *at = ka_strdup(from->path);
    size_t dots = strspn(name, "."), top = strcspn(name, ".");
    for (size_t i = 0; i < KA_COUNT(others) && !dots; i++)
        if (top == strlen(others[i]) && strncmp(name, others[i], top) == 0)
            return NULL;
    go_up(at);
    for (size_t i = 1; i < dots; i++)
        if (!go_up(at))
            return NULL;
    if (dots)
        return module_below(follow, at, name + dots);
    struct ka_module *found = module_below(follow, at, name);
    while (!found && go_up(at))
        found = module_below(follow, at, name);
    return found;
}

/* `from M import member` where the member is a module of the package M. */
static struct ka_module *resolve_member(struct ka_follow *follow, const struct ka_module *from,
                                        const struct ka_binding *b)
{
    size_t len = strlen(b->module);
    KA_AUTO_FREE char *name =
        ka_format("%s%s%s", b->module, len && b->module[len - 1] != '.' ? "." : "", b->member);
    return resolve(follow, from, name);
}

/* ---- names ---- */

struct found {
    struct ka_module *module;
    struct ka_piece *piece;
};

static bool token_is(const struct ka_module *m, size_t token, const char *text, size_t len)
{
    const struct ka_token *t = &m->tokens.items[token];
    return t->len == len && memcmp(m->source + t->start, text, len) == 0;
}

bool ka_follow_spent(const struct ka_follow *follow)
{
    return follow->effort > EFFORT_MAX;
}

static bool find_name(struct ka_follow *follow, struct ka_module *m, const char *name, size_t len, int depth,
                      struct found *out)
{
    follow->effort += 1 + m->count + m->binding_count;
    if (ka_follow_spent(follow))
        return false;
    for (size_t i = 0; i < m->count; i++) {
        if (token_is(m, m->pieces[i].name, name, len)) {
            *out = (struct found){m, &m->pieces[i]};
            return true;
        }
    }
    for (size_t i = 0; i < m->binding_count && depth < DEPTH_MAX; i++) {
        const struct ka_binding *b = &m->bindings[i];
        bool all = strcmp(b->name, "*") == 0;
        if (!b->member || !(all || (strlen(b->name) == len && memcmp(b->name, name, len) == 0)))
            continue;
        struct ka_module *other = resolve(follow, m, b->module);
        const char *wanted = all ? name : b->member;
        size_t wanted_len = all ? len : strlen(b->member);
        if (other && other != m && find_name(follow, other, wanted, wanted_len, depth + 1, out))
            return true;
    }
    return false;
}

/* Does the text at token i read `name` ("a.b"), followed by a dot? Then *after is the token behind the dot.
 */
static bool reads(const struct ka_module *m, size_t i, const char *name, size_t *after)
{
    while (i < m->tokens.count) {
        size_t len = strcspn(name, ".");
        if (!token_is(m, i, name, len) || !ka_token_is(&m->tokens, i + 1, "."))
            return false;
        name += len + (name[len] == '.');
        i += 2;
        if (!*name) {
            *after = i;
            return i < m->tokens.count;
        }
    }
    return false;
}

/* `utils.f`, where utils is a module. */
static bool find_member(struct ka_follow *follow, struct ka_module *m, size_t i, struct found *out)
{
    size_t after;
    if (!ka_token_is(&m->tokens, i + 1, "."))
        return false;
    for (size_t k = 0; k < m->binding_count; k++) {
        const struct ka_binding *b = &m->bindings[k];
        if (!*b->name || !reads(m, i, b->name, &after))
            continue;
        struct ka_module *other = b->member ? resolve_member(follow, m, b) : resolve(follow, m, b->module);
        const struct ka_token *token = &m->tokens.items[after];
        if (other && find_name(follow, other, m->source + token->start, token->len, 0, out))
            return true;
    }
    return false;
}

/* ---- marking ---- */

struct work {
    struct found *items;
    size_t count;
};

static bool may_mark(struct ka_follow *follow, struct ka_module *module)
{
    for (size_t i = 0; i < follow->marked_count; i++)
        if (follow->marked[i] == module)
            return true;
    if (follow->marked_count == KA_FOLLOW_FILES)
        return false;
    follow->marked[follow->marked_count++] = module;
    return true;
}

static void mark_mentioned(struct ka_follow *follow, struct ka_module *m, size_t first, size_t end,
                           unsigned mark, struct work *work)
{
    for (size_t i = first; i < end; i++) {
        const struct ka_token *token = &m->tokens.items[i];
        struct found found;
        if (token->kind != KA_TOKEN_NAME || (i > 0 && ka_token_is(&m->tokens, i - 1, ".")))
            continue;
        bool known = find_name(follow, m, m->source + token->start, token->len, 0, &found) ||
                     find_member(follow, m, i, &found);
        if (!known || (found.piece->marks & mark) == mark || !may_mark(follow, found.module))
            continue;
        found.piece->marks |= mark;
        *KA_APPEND(work->items, work->count) = found;
    }
}

void ka_follow_mark(struct ka_follow *follow, struct ka_module *module, size_t first, size_t end,
                    unsigned mark)
{
    struct work work = {0};
    mark_mentioned(follow, module, first, end, mark, &work);
    while (work.count) {
        struct found next = work.items[--work.count];
        mark_mentioned(follow, next.module, next.piece->first, next.piece->end, mark, &work);
    }
    free(work.items);
}

size_t ka_follow_marked(const struct ka_follow *follow, struct ka_module *const **out)
{
    *out = follow->marked;
    return follow->marked_count;
}

void ka_follow_clear(struct ka_follow *follow)
{
    for (size_t i = 0; i < follow->marked_count; i++)
        for (size_t k = 0; k < follow->marked[i]->count; k++)
            follow->marked[i]->pieces[k].marks = 0;
    follow->marked_count = 0;
}
