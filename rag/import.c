/* Makes a pair's text of a class and of what it reaches. Knows no store, no files and no licences. */
#include "import.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/marker.h"

#define ALIASES_MAX 64 /* looked for, of a module */

enum { FORWARD = 1, BACKWARD = 2 };

struct composing {
    struct ka_follow *follow;
    ka_import_heading_fn heading;
    void *arg;
};

/* ---- the text ---- */

static bool is_shown(const struct ka_piece *piece, bool forward)
{
    return forward ? (piece->marks & FORWARD) != 0 : piece->marks == BACKWARD;
}

/* Is the name used in what the module shows? */
static bool is_used(const struct ka_module *m, const char *name, bool forward)
{
    for (size_t i = 0; i < m->count; i++)
        for (size_t k = m->pieces[i].first; is_shown(&m->pieces[i], forward) && k < m->pieces[i].end; k++)
            if (ka_token_is(&m->tokens, k, name))
                return true;
    return false;
}

/* Its imports are not shown: what it calls by another name is told. */
static void put_aliases(const struct ka_module *m, bool forward, struct ka_buf *out)
{
    for (size_t i = 0, other = 0; i < m->binding_count && other < ALIASES_MAX; i++) {
        const struct ka_binding *b = &m->bindings[i];
        const char *meant = b->member ? b->member : b->module;
        if (strcmp(b->name, meant) == 0 || strcmp(b->name, "*") == 0)
            continue;
        other++;
        if (is_used(m, b->name, forward))
            ka_buf_printf(out, "# %s is %s%s%s\n", b->name, meant, b->member ? " of " : "",
                          b->member ? b->module : "");
    }
}

/* What a part of the pair takes of one module. Constants of the class's own module stand with its lines. */
static void put_module(const struct composing *c, const struct ka_module *m, const struct ka_piece *class,
                       bool own, bool forward, bool *headed, struct ka_buf *out)
{
    struct ka_buf text = {0};
    if (own && forward)
        ka_module_put_lines(m, &text);
    for (size_t i = 0; i < m->count; i++)
        if (&m->pieces[i] == class ? !forward
                                   : is_shown(&m->pieces[i], forward) &&
                                         !(own && m->pieces[i].kind == KA_PIECE_CONSTANT))
            ka_module_put_piece(m, &m->pieces[i], &text);
    if (text.len && !*headed)
        c->heading(c->arg, m, out);
    if (text.len && !own)
        put_aliases(m, forward, out);
    if (text.len && (!*headed || !own))
        ka_buf_puts(out, "\n");
    *headed = *headed || text.len;
    ka_buf_puts(out, ka_buf_str(&text));
    ka_buf_free(&text);
}

static char *compose(const struct composing *c, const struct ka_module *own, const struct ka_piece *class)
{
    struct ka_buf text = {0};
    struct ka_module *const *marked;
    size_t count = ka_follow_marked(c->follow, &marked);
    bool headed[KA_FOLLOW_FILES] = {false}, own_headed = false;
    for (int forward = 1; forward >= 0; forward--) {
        for (size_t i = 0; i < count; i++)
            if (marked[i] != own)
                put_module(c, marked[i], NULL, false, forward, &headed[i], &text);
        put_module(c, own, class, true, forward, &own_headed, &text);
        if (forward)
            ka_buf_puts(&text, KA_MARKER "\n\n\n");
    }
    return ka_buf_steal(&text);
}

/* ---- units ---- */

static bool reaches_kernel(const struct ka_follow *follow, unsigned mark)
{
    struct ka_module *const *marked;
    size_t count = ka_follow_marked(follow, &marked);
    for (size_t i = 0; i < count; i++)
        for (size_t k = 0; k < marked[i]->count; k++)
            if (marked[i]->pieces[k].kind == KA_PIECE_KERNEL && marked[i]->pieces[k].marks & mark)
                return true;
    return false;
}

/* NULL: what it launches is marked. */
static const char *follow_class(struct ka_follow *follow, struct ka_module *m, const struct ka_piece *class)
{
    size_t first, end;
    ka_follow_clear(follow);
    if (!ka_module_method(m, class, "forward", &first, &end))
        return "it has no forward of its own";
    ka_follow_mark(follow, m, first, end, FORWARD);
    if (!ka_module_method(m, class, "backward", &first, &end))
        return "it has no backward of its own";
    ka_follow_mark(follow, m, first, end, BACKWARD);
    if (ka_follow_spent(follow))
        return "its file and those that it imports have more names than can be followed";
    if (!reaches_kernel(follow, FORWARD))
        return "its forward launches no Triton kernel of this file or of those that it imports";
    if (!reaches_kernel(follow, BACKWARD))
        return "its backward launches no Triton kernel of this file or of those that it imports";
    return NULL;
}

static void name_files(const struct ka_follow *follow, const struct ka_module *own,
                       struct ka_import_unit *unit)
{
    struct ka_module *const *marked;
    size_t count = ka_follow_marked(follow, &marked);
    *KA_APPEND(unit->files, unit->file_count) = ka_strdup(own->path);
    for (size_t i = 0; i < count; i++)
        if (marked[i] != own)
            *KA_APPEND(unit->files, unit->file_count) = ka_strdup(marked[i]->path);
}

static void take_class(const struct composing *c, struct ka_module *m, const struct ka_piece *class,
                       struct ka_import_unit *unit)
{
    unit->name = ka_token_text(&m->tokens, class->name);
    unit->line = m->tokens.items[class->name].line;
    unit->why = ka_strdup(follow_class(c->follow, m, class));
    name_files(c->follow, m, unit);
    if (!unit->why)
        unit->source = compose(c, m, class);
}

/* A Function that stands in a condition or in a function. */
static void refuse_nested(const struct ka_module *m, struct ka_import_units *units)
{
    for (size_t i = 0; i + 1 < m->tokens.count; i++) {
        const struct ka_token *token = &m->tokens.items[i];
        bool first = i == 0 || m->tokens.items[i - 1].kind == KA_TOKEN_NEWLINE;
        if (!first || !token->indent || !ka_token_is(&m->tokens, i, "class") || !ka_module_is_function(m, i))
            continue;
        struct ka_import_unit *unit = KA_APPEND(units->items, units->count);
        unit->name = ka_token_text(&m->tokens, i + 1);
        unit->line = token->line;
        unit->why = ka_strdup("it stands in a condition or in a function, not at the top level");
    }
}

int ka_import_split(struct ka_follow *follow, const char *path, ka_import_heading_fn heading, void *arg,
                    struct ka_import_units *out, struct ka_err *err)
{
    const struct composing c = {follow, heading, arg};
    struct ka_import_units units = {0};
    struct ka_module *m = ka_follow_module(follow, path, err);
    if (!m)
        return -ENOENT;
    for (size_t i = 0; i < m->count; i++) {
        const struct ka_piece *piece = &m->pieces[i];
        if (piece->kind == KA_PIECE_KERNEL && !units.kernel_line)
            units.kernel_line = m->tokens.items[piece->name].line;
        if (piece->kind == KA_PIECE_CLASS && ka_module_is_function(m, piece->name - 1))
            take_class(&c, m, piece, KA_APPEND(units.items, units.count));
    }
    refuse_nested(m, &units);
    *out = units;
    return 0;
}

void ka_import_free(struct ka_import_units *units)
{
    for (size_t i = 0; i < units->count; i++) {
        struct ka_import_unit *unit = &units->items[i];
        for (size_t k = 0; k < unit->file_count; k++)
            free(unit->files[k]);
        free(unit->files);
        free(unit->name);
        free(unit->source);
        free(unit->why);
    }
    free(units->items);
    *units = (struct ka_import_units){0};
}
