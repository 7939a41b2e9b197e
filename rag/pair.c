/* Takes a pair file apart. Knows no database and no embedding. */
#include "pair.h"

#include <ctype.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/files.h"
#include "lex.h"

size_t ka_pair_forward_len(const char *source, size_t len)
{
    const size_t marker = strlen(KA_MARKER);
    for (size_t i = 0; i < len;) {
        const char *newline = memchr(source + i, '\n', len - i);
        if (len - i >= marker && memcmp(source + i, KA_MARKER, marker) == 0)
            return i;
        i = newline ? (size_t)(newline - source) + 1 : len;
    }
    return len;
}

/* ---- path ---- */

/* Start of the path component that ends before `at`, which is just past a slash. */
static size_t component_before(const char *path, size_t at)
{
    at--;
    while (at > 0 && path[at - 1] != '/')
        at--;
    return at;
}

static void parse_path(const char *path, struct ka_pair *p)
{
    const char *base = strrchr(path, '/');
    base = base ? base + 1 : path;
    size_t len = strlen(base);
    p->id = ka_strndup(base, ka_ends_with(base, ".py") ? len - 3 : len);
    size_t name = (size_t)(base - path), start = name ? component_before(path, name) : 0,
           end = name ? name - 1 : 0;
    p->family = ka_strndup(path + start, end - start);
    p->path = ka_strdup(path + (start > 0 ? component_before(path, start) : 0));
}

/* ---- docstring ---- */

/* Text between the quotes of a string token. */
static char *string_content(const struct ka_tokens *t, size_t i)
{
    const char *text = t->source + t->items[i].start;
    size_t len = t->items[i].len, from = strcspn(text, "\"'");
    size_t quotes = len >= from + 6 && text[from + 1] == text[from] && text[from + 2] == text[from] ? 3 : 1;
    if (len < from + 2 * quotes)
        return ka_strdup("");
    return ka_strndup(text + from + quotes, len - from - 2 * quotes);
}

static char *trimmed(const char *text, size_t len)
{
    while (len && isspace((unsigned char)*text)) {
        text++;
        len--;
    }
    while (len && isspace((unsigned char)text[len - 1]))
        len--;
    return ka_strndup(text, len);
}

static void replace(char **slot, char *value)
{
    free(*slot);
    *slot = value;
}

/* "a, b" or "a; b" becomes "a,b". */
static char *tag_list(const char *text, size_t len)
{
    char *list = ka_calloc(len + 1, 1);
    size_t n = 0;
    for (size_t i = 0; i < len; i++)
        if (!isspace((unsigned char)text[i]))
            list[n++] = text[i] == ';' ? ',' : text[i];
    return list;
}

/* One `key: value` line of the block; false when it is none, which ends the block. */
static bool take_meta(struct ka_pair *p, const char *line, size_t len)
{
    const char *colon = memchr(line, ':', len);
    if (!colon)
        return false;
    char *key = trimmed(line, (size_t)(colon - line));
    const char *value = colon + 1;
    size_t value_len = len - (size_t)(value - line);
    bool known = true;
    if (strcmp(key, "op") == 0) {
        replace(&p->op, trimmed(value, value_len));
    } else if (strcmp(key, "schedule") == 0) {
        replace(&p->schedule, tag_list(value, value_len));
    } else if (strcmp(key, "dtypes") == 0) {
        replace(&p->dtypes, tag_list(value, value_len));
    } else if (strcmp(key, "imported") == 0) {
        replace(&p->imported, trimmed(value, value_len));
    } else if (strcmp(key, "license") == 0) {
        replace(&p->license, trimmed(value, value_len));
    } else if (strcmp(key, "difficulty") == 0) {
        char *number = trimmed(value, value_len);
        p->difficulty = number[0] >= '1' && number[0] <= '5' && !number[1] ? number[0] - '0' : 0;
        free(number);
    } else {
        known = false;
    }
    free(key);
    return known;
}

static bool is_blank(const char *text, size_t len)
{
    for (size_t i = 0; i < len; i++)
        if (!isspace((unsigned char)text[i]))
            return false;
    return true;
}

/* The block is read from the end up, so that prose above it with a colon is never taken for it. */
static void parse_docstring(struct ka_pair *p, const char *doc)
{
    size_t end = strlen(doc);
    while (end > 0) {
        size_t start = end;
        while (start > 0 && doc[start - 1] != '\n')
            start--;
        if (!is_blank(doc + start, end - start) && !take_meta(p, doc + start, end - start))
            break;
        end = start ? start - 1 : 0;
    }
    size_t from = strspn(doc, " \t\r\n");
    replace(&p->title, trimmed(doc + from, strcspn(doc + from, "\n")));
}

static void parse_license_line(struct ka_pair *p)
{
    static const char key[] = "SPDX-License-Identifier:";
    const char *found = strstr(p->source, key);
    if (!found || *p->license)
        return;
    found += sizeof(key) - 1;
    replace(&p->license, trimmed(found, strcspn(found, "\n")));
}

/* ---- code ---- */

static int parse_functions(struct ka_pair *p, const char *path, const struct ka_tokens *t, size_t forward_len,
                           struct ka_err *err)
{
    struct ka_buf kernels = {0};
    struct ka_block block;
    int rc = 0;
    for (size_t at = 0; rc == 0 && ka_block_next(t, &at, &block);) {
        char *name = ka_token_text(t, block.name);
        bool forward = t->items[block.first].start < forward_len;
        if (!block.is_class && ka_block_decorated(t, &block, "jit"))
            rc = ka_buf_printf(&kernels, "%s%s", kernels.len ? "," : "", name);
        else if (forward && !block.is_class && ka_block_decorated(t, &block, "autodiff") && !*p->stub)
            replace(&p->stub, ka_strdup(name));
        free(name);
    }
    replace(&p->kernels, ka_strdup(ka_buf_str(&kernels)));
    ka_buf_free(&kernels);
    if (rc)
        return ka_fail(err, rc, "%s: too many kernels", path);
    if (!*p->stub && !*p->imported)
        return ka_fail(err, -EINVAL, "%s: no function is decorated with @autodiff; decorate the stub", path);
    if (!*p->kernels)
        return ka_fail(err, -EINVAL,
                       "%s: no function is decorated with @triton.jit; a pair holds Triton kernels", path);
    return 0;
}

static int parse_source(struct ka_pair *p, const char *path, size_t len, struct ka_err *err)
{
    size_t forward_len = ka_pair_forward_len(p->source, len);
    if (forward_len == len)
        return ka_fail(err, -EINVAL,
                       "%s: no line `" KA_MARKER "`; a pair has its backward below that line", path);
    const char *below = strchr(p->source + forward_len, '\n');
    p->forward = ka_strndup(p->source, forward_len);
    p->backward = ka_strdup(below ? below + 1 : "");
    struct ka_tokens tokens = {0};
    int rc = ka_lex(p->source, len, &tokens, err);
    if (rc)
        return rc;
    if (tokens.count && tokens.items[0].kind == KA_TOKEN_STRING) {
        char *doc = string_content(&tokens, 0);
        parse_docstring(p, doc);
        free(doc);
    }
    parse_license_line(p);
    rc = parse_functions(p, path, &tokens, forward_len, err);
    ka_tokens_free(&tokens);
    return rc;
}

int ka_pair_parse(const char *path, const char *source, size_t len, struct ka_pair *out, struct ka_err *err)
{
    if (len > KA_PAIR_MAX)
        return ka_fail(err, -EFBIG, "%s: larger than %zu bytes", path, KA_PAIR_MAX);
    if (memchr(source, '\0', len))
        return ka_fail(err, -EINVAL, "%s: holds a NUL byte, so it is no Python source", path);
    struct ka_pair p = {.source = ka_strndup(source, len)};
    char **texts[] = {&p.title, &p.op, &p.schedule, &p.dtypes, &p.license, &p.imported, &p.stub, &p.kernels};
    for (size_t i = 0; i < KA_COUNT(texts); i++)
        *texts[i] = ka_strdup("");
    parse_path(path, &p);
    ka_hash_hex(source, len, p.hash);
    int rc = parse_source(&p, path, len, err);
    if (rc)
        ka_pair_free(&p);
    else
        *out = p;
    return rc;
}

int ka_pair_read(const char *path, struct ka_pair *out, struct ka_err *err)
{
    struct ka_buf text = {0};
    int rc = ka_file_read(path, KA_PAIR_MAX, &text, err);
    if (rc == 0)
        rc = ka_pair_parse(path, ka_buf_str(&text), text.len, out, err);
    ka_buf_free(&text);
    return rc;
}

void ka_pair_free(struct ka_pair *p)
{
    char *texts[] = {p->path, p->id,       p->family, p->source,  p->forward,  p->backward, p->title,
                     p->op,   p->schedule, p->dtypes, p->license, p->imported, p->stub,     p->kernels};
    for (size_t i = 0; i < KA_COUNT(texts); i++)
        free(texts[i]);
    *p = (struct ka_pair){0};
}
