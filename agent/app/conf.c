/* The configuration file's syntax. Must not know which keys there are, but for the one that must not be
 * there. Messages never quote a value: it may be a secret in the wrong place. */
#include "conf.h"

#include "base/lines.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct parser {
    const char *name;
    int line;
    char *keys[KA_CONF_MAX_KEYS];
    int key_lines[KA_CONF_MAX_KEYS];
    size_t key_count;
    struct ka_err *err;
};

static int fail_at(const struct parser *p, int code, const char *fmt, ...) KA_PRINTF(3, 4);

static int fail_at(const struct parser *p, int code, const char *fmt, ...)
{
    char what[700];
    va_list args;
    va_start(args, fmt);
    vsnprintf(what, sizeof(what), fmt, args);
    va_end(args);
    return ka_fail(p->err, code, "%.200s:%d: %s", p->name, p->line, what);
}

/* "[a-zA-Z0-9_-]+ =" off the front of the line. Returns the key, lower case, with `_` for `-`; free() it. */
static char *take_key(struct ka_line *line)
{
    size_t len = 0;
    while (len < line->len && (isalnum((unsigned char)line->at[len]) || strchr("_-", line->at[len])))
        len++;
    struct ka_line rest = ka_line_strip((struct ka_line){line->at + len, line->len - len});
    if (!len || !rest.len || rest.at[0] != '=')
        return NULL;
    char *key = ka_strndup(line->at, len);
    for (char *c = key; *c; c++)
        *c = *c == '-' ? '_' : (char)tolower((unsigned char)*c);
    *line = ka_line_strip((struct ka_line){rest.at + 1, rest.len - 1});
    return key;
}

/* The key is new and may be in a file at all. Takes `key`. */
static int register_key(struct parser *p, char *key)
{
    if (p->key_count == KA_CONF_MAX_KEYS) {
        free(key);
        return fail_at(p, -EFBIG, "more than %d settings", KA_CONF_MAX_KEYS);
    }
    p->key_lines[p->key_count] = p->line;
    p->keys[p->key_count++] = key;
    if (ka_ends_with(key, "api_key") || ka_ends_with(key, "apikey"))
        return fail_at(
            p, -EINVAL,
            "a key does not belong in this file; put it alone into a file that only you can read and "
            "write `api_key_file = \"that file\"`, or set OPENAI_API_KEY");
    for (size_t i = 0; i + 1 < p->key_count; i++)
        if (strcmp(p->keys[i], key) == 0)
            return fail_at(p, -EINVAL, "'%s' is already set in line %d", key, p->key_lines[i]);
    return 0;
}

/* A quoted string off the front of the line into `text`. */
static int take_string(const struct parser *p, struct ka_line *line, struct ka_buf *text)
{
    char quote = line->at[0];
    size_t i = 1;
    for (; i < line->len && line->at[i] != quote; i++) {
        char c = line->at[i];
        if (quote == '"' && c == '\\') {
            static const char written[] = "\"\\nt", meant[] = "\"\\\n\t";
            const char *known = ++i < line->len ? strchr(written, line->at[i]) : NULL;
            if (!known)
                return fail_at(p, -EINVAL,
                               "a backslash in double quotes may only stand before \", \\, n or t; use "
                               "single quotes for a text as it is");
            c = meant[known - written];
        } else if ((unsigned char)c < ' ' && c != '\t') {
            return fail_at(p, -EINVAL, "a control character is in the value");
        }
        int rc = ka_buf_add(text, &c, 1);
        if (rc)
            return fail_at(p, rc, "the value is too long");
    }
    if (i >= line->len)
        return fail_at(p, -EINVAL, "the closing %c is missing", quote);
    *line = ka_line_strip((struct ka_line){line->at + i + 1, line->len - i - 1});
    return 0;
}

/* true, false, an integer or a number; `word` holds nothing else. */
static bool read_word(const char *word, struct ka_conf_value *value)
{
    char *end;
    if (strcmp(word, "true") == 0 || strcmp(word, "false") == 0) {
        value->type = KA_CONF_BOOLEAN;
        value->boolean = word[0] == 't';
        return true;
    }
    if (!*word || strspn(word, "0123456789+-.eE") != strlen(word))
        return false;
    errno = 0;
    value->number = strtod(word, &end);
    if (*end || !isfinite(value->number))
        return false;
    value->type = KA_CONF_NUMBER;
    if (strpbrk(word, ".eE"))
        return true;
    errno = 0;
    value->type = KA_CONF_INTEGER;
    value->integer = strtoll(word, &end, 10);
    return !errno && !*end;
}

static int take_value(const struct parser *p, struct ka_line *line, struct ka_buf *text,
                      struct ka_conf_value *value)
{
    *value = (struct ka_conf_value){0};
    if (line->len && (line->at[0] == '"' || line->at[0] == '\'')) {
        int rc = take_string(p, line, text);
        value->type = KA_CONF_STRING;
        value->string = ka_buf_str(text);
        return rc;
    }
    size_t len = 0;
    while (len < line->len && !strchr(" \t#", line->at[len]))
        len++;
    KA_AUTO_FREE char *word = ka_strndup(line->at, len);
    bool known = strlen(word) == len && read_word(word, value);
    *line = ka_line_strip((struct ka_line){line->at + len, line->len - len});
    if (!known)
        return fail_at(p, -EINVAL, "the value is no quoted text, no number in range, and not true or false");
    return 0;
}

static int parse_line(struct parser *p, struct ka_line line, ka_conf_fn fn, void *arg)
{
    line = ka_line_strip(line);
    if (line.len && memchr(line.at, '\0', line.len))
        return fail_at(p, -EINVAL, "a NUL byte is in the line");
    if (!line.len || line.at[0] == '#')
        return 0;
    if (line.at[0] == '[')
        return fail_at(p, -EINVAL, "there are no sections in this file; write all settings without one");
    KA_AUTO_BUF struct ka_buf text = {0};
    struct ka_conf_value value;
    struct ka_err why = {{0}};
    char *key = take_key(&line);
    if (!key)
        return fail_at(p, -EINVAL, "this line is not of the form `key = value`");
    int rc = register_key(p, key);
    rc = rc ? rc : take_value(p, &line, &text, &value);
    if (rc == 0 && line.len && line.at[0] != '#')
        rc = fail_at(p, -EINVAL, "something follows the value of '%.60s'; a text with blanks needs quotes",
                     key);
    if (rc)
        return rc;
    rc = fn(arg, key, &value, p->line, &why);
    return rc ? fail_at(p, rc, "%s", why.msg) : 0;
}

int ka_conf_parse(const char *text, size_t len, const char *name, ka_conf_fn fn, void *arg,
                  struct ka_err *err)
{
    struct parser p = {.name = name, .err = err};
    const char *cursor = text, *end = text + len;
    struct ka_line line;
    int rc = 0;
    if (len > KA_CONF_MAX_BYTES)
        return ka_fail(err, -EFBIG, "%.200s: longer than %zu bytes", name, KA_CONF_MAX_BYTES);
    while (rc == 0 && ka_line_next(&cursor, end, &line)) {
        p.line++;
        rc = parse_line(&p, line, fn, arg);
    }
    for (size_t i = 0; i < p.key_count; i++)
        free(p.keys[i]);
    return rc;
}

char *ka_conf_default_path(const char *xdg_config_home, const char *home)
{
    if (xdg_config_home && xdg_config_home[0] == '/')
        return ka_format("%s/kernel-agent/config", xdg_config_home);
    return home && home[0] == '/' ? ka_format("%s/.config/kernel-agent/config", home) : NULL;
}
