/* The template language of prompts: names and sections, nothing more. Must not know which names there are. */
#include "prompt.h"

#include "base/lines.h"

#include <errno.h>
#include <string.h>

#define MAX_DEPTH 8

struct section {
    struct ka_line name;
    size_t line;
    bool shown;
};

struct renderer {
    const struct ka_prompt_template *source;
    const char *at, *end;
    size_t line;
    struct section open[MAX_DEPTH];
    size_t depth;
    const struct ka_prompt_var *vars;
    size_t var_count;
    struct ka_buf out;
    struct ka_err *err;
};

static int fail_at(struct renderer *r, const char *what, struct ka_line name)
{
    return ka_fail(r->err, -EINVAL, "%s:%zu: %s '%.*s'", r->source->name, r->line, what,
                   (int)(name.len < 60 ? name.len : 60), name.at);
}

static bool is_shown(const struct renderer *r)
{
    return r->depth == 0 || r->open[r->depth - 1].shown;
}

static int put(struct renderer *r, const char *text, size_t len)
{
    return is_shown(r) ? ka_buf_add(&r->out, text, len) : 0;
}

static const struct ka_prompt_var *find_var(const struct renderer *r, struct ka_line name)
{
    for (size_t i = 0; i < r->var_count; i++)
        if (ka_line_is(name, r->vars[i].name))
            return &r->vars[i];
    return NULL;
}

static int open_section(struct renderer *r, struct ka_line name)
{
    const struct ka_prompt_var *var = find_var(r, name);
    if (!var)
        return fail_at(r, "there is no name", name);
    if (r->depth == MAX_DEPTH)
        return fail_at(r, "too many sections are open at", name);
    bool shown = is_shown(r) && var->value && *var->value;
    r->open[r->depth++] = (struct section){name, r->line, shown};
    return 0;
}

static int close_section(struct renderer *r, struct ka_line name)
{
    if (r->depth == 0)
        return fail_at(r, "no section is open that could be closed by", name);
    if (!ka_line_same(r->open[r->depth - 1].name, name))
        return fail_at(r, "another section is open where it closes", name);
    r->depth--;
    return 0;
}

static int put_value(struct renderer *r, struct ka_line name)
{
    const struct ka_prompt_var *var = find_var(r, name);
    if (!var)
        return fail_at(r, "there is no name", name);
    const char *value = var->value ? var->value : "";
    size_t len = strlen(value);
    while (len && value[len - 1] == '\n')
        len--;
    return put(r, value, len);
}

/* A section tag that is alone on its line takes the whole line with it: where does that line begin and end?
 */
static bool stands_alone(const struct renderer *r, const char *tag, const char *after, const char **from,
                         const char **to)
{
    const char *start = tag;
    while (start > r->source->text && (start[-1] == ' ' || start[-1] == '\t'))
        start--;
    if (start > r->source->text && start[-1] != '\n')
        return false;
    while (after < r->end && (*after == ' ' || *after == '\t'))
        after++;
    if (after < r->end && *after != '\n')
        return false;
    *from = start;
    *to = after < r->end ? after + 1 : after;
    return true;
}

/* One tag that starts at `tag`; everything before it is still unwritten. */
static int render_tag(struct renderer *r, const char *tag)
{
    const char *newline = memchr(tag, '\n', (size_t)(r->end - tag));
    const char *line_end = newline ? newline : r->end;
    const char *close = memmem(tag, (size_t)(line_end - tag), "}}", 2);
    struct ka_line name =
        ka_line_strip((struct ka_line){tag + 2, (size_t)((close ? close : line_end) - tag - 2)});
    if (!close)
        return fail_at(r, "a tag is not closed on its line:", name);
    char kind = name.len && (name.at[0] == '#' || name.at[0] == '/') ? name.at[0] : 0;
    const char *from = tag, *to = close + 2;
    if (kind) {
        stands_alone(r, tag, close + 2, &from, &to);
        name = ka_line_strip((struct ka_line){name.at + 1, name.len - 1});
    }
    int rc = from > r->at ? put(r, r->at, (size_t)(from - r->at)) : 0;
    if (rc)
        return rc;
    rc = kind == '#' ? open_section(r, name) : kind == '/' ? close_section(r, name) : put_value(r, name);
    r->line += to > line_end;
    r->at = to;
    return rc;
}

int ka_prompt_render(const struct ka_prompt_template *template, const struct ka_prompt_var *vars,
                     size_t count, struct ka_buf *out, struct ka_err *err)
{
    struct renderer r = {.source = template,
                         .at = template->text,
                         .line = 1,
                         .vars = vars,
                         .var_count = count,
                         .err = err,
                         .out.max = KA_PROMPT_MAX_BYTES};
    r.end = r.at + strlen(r.at);
    int rc = 0;
    while (rc == 0) {
        const char *tag = strstr(r.at, "{{");
        for (const char *c = r.at; c < (tag ? tag : r.end); c++)
            r.line += *c == '\n';
        if (!tag)
            break;
        rc = render_tag(&r, tag);
    }
    if (rc == 0)
        rc = put(&r, r.at, (size_t)(r.end - r.at));
    if (rc == 0 && r.depth) {
        r.line = r.open[r.depth - 1].line;
        rc = fail_at(&r, "this section is never closed:", r.open[r.depth - 1].name);
    }
    if (rc == 0)
        rc = ka_buf_add(out, ka_buf_str(&r.out), r.out.len);
    if (rc == -EFBIG)
        ka_fail(err, rc, "%s: a prompt may have at most %zu bytes", template->name, KA_PROMPT_MAX_BYTES);
    ka_buf_free(&r.out);
    return rc;
}
