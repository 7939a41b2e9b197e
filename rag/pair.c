/* Takes a pair file apart. Knows no database and no embedding. */
#include "pair.h"

#include <ctype.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/files.h"
#include "base/lines.h"
#include "lex.h"

/* ---- path ---- */

/* The path's last components, as many as there are up to `count`. */
static const char *tail(const char *path, int count)
{
    const char *at = path + strlen(path);
    while (at > path && !(at[-1] == '/' && --count == 0))
        at--;
    return at;
}

static void parse_path(const char *path, struct ka_pair *p)
{
    const char *base = tail(path, 1), *family = tail(path, 2);
    p->id = ka_strndup(base, strlen(base) - (ka_ends_with(base, ".py") ? 3 : 0));
    p->family = ka_strndup(family, base > family ? (size_t)(base - family) - 1 : 0);
    p->path = ka_strdup(tail(path, 3));
}

/* ---- docstring ---- */

/* Text between the quotes of a string token. */
static struct ka_line string_content(const struct ka_tokens *t, size_t i)
{
    const char *text = t->source + t->items[i].start;
    size_t len = t->items[i].len, from = strcspn(text, "\"'");
    size_t quotes = len >= from + 6 && text[from + 1] == text[from] && text[from + 2] == text[from] ? 3 : 1;
    return (struct ka_line){text + from + quotes, len < from + 2 * quotes ? 0 : len - from - 2 * quotes};
}

static void replace(char **slot, struct ka_line value)
{
    free(*slot);
    *slot = ka_strndup(value.at, value.len);
}

/* "a, b" or "a; b" becomes "a,b". */
static void make_tag_list(char *list)
{
    char *end = list;
    for (const char *c = list; *c; c++)
        if (!isspace((unsigned char)*c))
            *end++ = *c == ';' ? ',' : *c;
    *end = '\0';
}

/* One `key: value` line of the block; false when it is none, which ends the block. */
static bool take_meta(struct ka_pair *p, struct ka_line line)
{
    const struct {
        const char *key;
        char **value;
        bool is_list;
    } texts[] = {{"op", &p->op, false},
                 {"schedule", &p->schedule, true},
                 {"dtypes", &p->dtypes, true},
                 {"imported", &p->imported, false},
                 {"license", &p->license, false}};
    const char *colon = memchr(line.at, ':', line.len);
    if (!colon)
        return false;
    size_t before = (size_t)(colon - line.at);
    struct ka_line key = ka_line_strip((struct ka_line){line.at, before});
    struct ka_line value = ka_line_strip((struct ka_line){colon + 1, line.len - before - 1});
    for (size_t i = 0; i < KA_COUNT(texts); i++) {
        if (!ka_line_is(key, texts[i].key))
            continue;
        replace(texts[i].value, value);
        if (texts[i].is_list)
            make_tag_list(*texts[i].value);
        return true;
    }
    if (!ka_line_is(key, "difficulty"))
        return false;
    p->difficulty = value.len == 1 && *value.at >= '1' && *value.at <= '5' ? *value.at - '0' : 0;
    return true;
}

/* The block is read from the end up, so that prose above it with a colon is never taken for it. */
static void parse_docstring(struct ka_pair *p, struct ka_line doc)
{
    const char *cursor = doc.at, *end = doc.at + doc.len;
    struct ka_line line = {doc.at, 0};
    while (!line.len && ka_line_next(&cursor, end, &line))
        line = ka_line_strip(line);
    replace(&p->title, line);
    for (const char *start = end; end > doc.at; end = start) {
        start = memrchr(doc.at, '\n', (size_t)(end - doc.at));
        line.at = start ? start + 1 : doc.at;
        line = ka_line_strip((struct ka_line){line.at, (size_t)(end - line.at)});
        if (!start || (line.len && !take_meta(p, line)))
            break;
    }
}

static void parse_license_line(struct ka_pair *p)
{
    static const char key[] = "SPDX-License-Identifier:";
    const char *found = strstr(p->source, key);
    if (!found || *p->license)
        return;
    found += sizeof(key) - 1;
    replace(&p->license, ka_line_strip((struct ka_line){found, strcspn(found, "\n")}));
}

/* ---- code ---- */

static int parse_functions(struct ka_pair *p, const char *path, const struct ka_tokens *t, size_t forward_len,
                           struct ka_err *err)
{
    KA_AUTO_BUF struct ka_buf kernels = {0};
    struct ka_block block;
    for (size_t at = 0; ka_block_next(t, &at, &block);) {
        const struct ka_token *token = &t->items[block.name];
        struct ka_line name = {t->source + token->start, token->len};
        bool forward = t->items[block.first].start < forward_len;
        if (!block.is_class && ka_block_decorated(t, &block, "jit"))
            ka_buf_printf(&kernels, "%s%.*s", kernels.len ? "," : "", (int)name.len, name.at);
        else if (forward && !block.is_class && ka_block_decorated(t, &block, "autodiff") && !*p->stub)
            replace(&p->stub, name);
    }
    replace(&p->kernels, (struct ka_line){ka_buf_str(&kernels), kernels.len});
    if (!*p->stub && !*p->imported)
        return ka_fail(err, -EINVAL, "%s: no function is decorated with @autodiff; decorate the stub", path);
    if (!*p->kernels)
        return ka_fail(err, -EINVAL,
                       "%s: no function is decorated with @triton.jit; a pair holds Triton kernels", path);
    return 0;
}

static int parse_source(struct ka_pair *p, const char *path, size_t len, struct ka_err *err)
{
    const char *below = NULL, *marker = ka_marker_find(p->source, len, &below);
    if (!marker || *marker != '#') /* indented, it is none of a pair's */
        return ka_fail(err, -EINVAL, "%s: no line `" KA_MARKER "`; a pair has its backward below that line",
                       path);
    size_t forward_len = (size_t)(marker - p->source);
    p->forward = ka_strndup(p->source, forward_len);
    p->backward = ka_strdup(below);
    struct ka_tokens tokens = {0};
    int rc = ka_lex(p->source, len, &tokens, err);
    if (rc)
        return rc;
    if (tokens.count && tokens.items[0].kind == KA_TOKEN_STRING)
        parse_docstring(p, string_content(&tokens, 0));
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
    KA_AUTO_BUF struct ka_buf text = {0};
    int rc = ka_file_read(path, KA_PAIR_MAX, &text, err);
    return rc ? rc : ka_pair_parse(path, ka_buf_str(&text), text.len, out, err);
}

void ka_pair_free(struct ka_pair *p)
{
    char *texts[] = {p->path, p->id,       p->family, p->source,  p->forward,  p->backward, p->title,
                     p->op,   p->schedule, p->dtypes, p->license, p->imported, p->stub,     p->kernels};
    for (size_t i = 0; i < KA_COUNT(texts); i++)
        free(texts[i]);
    *p = (struct ka_pair){0};
}
