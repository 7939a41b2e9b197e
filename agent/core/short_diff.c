/* A longest common subsequence of lines, between what the texts begin and end with alike. */
#include "short_diff.h"

#include <stdlib.h>
#include <string.h>

#include "base/lines.h"

#define CELLS_MAX ((size_t)4 << 20)

struct lines {
    struct ka_line *items;
    size_t count;
};

static struct lines split(const char *text)
{
    struct lines lines = {0};
    const char *end = text + strlen(text);
    struct ka_line line;
    while (ka_line_next(&text, end, &line))
        *KA_APPEND(lines.items, lines.count) = line;
    return lines;
}

struct telling {
    struct ka_buf *out;
    size_t most, told;
    bool gap; /* equal lines since the last that was told */
};

static void tell(struct telling *t, char sign, struct ka_line line)
{
    if (t->told++ >= t->most)
        return;
    if (t->gap && t->told > 1)
        ka_buf_puts(t->out, "..\n");
    t->gap = false;
    ka_buf_printf(t->out, "%c", sign);
    ka_line_put(ka_line_rstrip(line), t->out);
}

/* length[i][k]: of the longest sequence that a[i..] and b[k..] have in common. */
static uint16_t *common_lengths(struct lines a, struct lines b)
{
    size_t width = b.count + 1;
    uint16_t *length = ka_calloc((a.count + 1) * width, sizeof(*length));
    for (size_t i = a.count; i-- > 0;) {
        for (size_t k = b.count; k-- > 0;) {
            uint16_t down = length[(i + 1) * width + k], right = length[i * width + k + 1];
            length[i * width + k] = ka_line_same(a.items[i], b.items[k])
                                        ? (uint16_t)(length[(i + 1) * width + k + 1] + 1)
                                    : down > right ? down
                                                   : right;
        }
    }
    return length;
}

static void tell_all(struct telling *t, struct lines a, struct lines b)
{
    KA_AUTO_FREE uint16_t *length = common_lengths(a, b);
    size_t width = b.count + 1, i = 0, k = 0;
    while (i < a.count || k < b.count) {
        if (i < a.count && k < b.count && ka_line_same(a.items[i], b.items[k])) {
            t->gap = true;
            i++;
            k++;
        } else if (i < a.count &&
                   (k == b.count || length[(i + 1) * width + k] >= length[i * width + k + 1])) {
            tell(t, '-', a.items[i++]);
        } else {
            tell(t, '+', b.items[k++]);
        }
    }
}

void ka_short_diff(const char *before, const char *after, size_t most, struct ka_buf *out)
{
    struct lines all_a = split(before), all_b = split(after), a = all_a, b = all_b;
    while (a.count && b.count && ka_line_same(a.items[0], b.items[0])) {
        a.items++, a.count--;
        b.items++, b.count--;
    }
    while (a.count && b.count && ka_line_same(a.items[a.count - 1], b.items[b.count - 1]))
        a.count--, b.count--;
    struct telling t = {.out = out, .most = most};
    if ((a.count + 1) * (b.count + 1) > CELLS_MAX || a.count >= UINT16_MAX || b.count >= UINT16_MAX)
        ka_buf_printf(out, ".. %zu lines became %zu others\n", a.count, b.count);
    else
        tell_all(&t, a, b);
    if (t.told > most)
        ka_buf_printf(out, ".. and %zu more lines\n", t.told - most);
    free(all_a.items);
    free(all_b.items);
}
