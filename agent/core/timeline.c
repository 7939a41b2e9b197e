/* Children as rows of bars. Must not decide anything. */
#include "timeline.h"

#include "base/each.h"
#include "fields.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHILDREN_MAX 4096
#define SINGLE_MAX 40 /* so many have a row each */
#define ROWS_MAX 60
#define OPS_MAX 24
#define TICKS 8.0
#define WIDTH 860.0
#define LEFT 170.0 /* names */
#define RIGHT 20.0
#define ROW 18.0
#define BAR 12.0
#define NAME_MAX 22 /* characters that fit */

struct bar {
    const char *op, *part, *status;
    double start, end, cases; /* `cases`: NAN where it has none */
    bool warm;
    size_t row;
};

struct timeline {
    struct bar *bars;
    size_t count, left_out;
    double end;
};

/* Rows that are taken until `free_at`, each by one operation. */
struct rows {
    struct {
        const char *op;
        double free_at;
        size_t bars;
    } list[ROWS_MAX];
    size_t count;
};

static double seconds_of(const json_t *child, const char *name)
{
    double number = ka_number_of(child, name, NAN);
    return number >= 0 && number < 1e9 ? number : NAN;
}

static void read_children(const json_t *children, struct timeline *t)
{
    *t = (struct timeline){.bars = ka_calloc(CHILDREN_MAX, sizeof(*t->bars))};
    KA_EACH(children, i, child) {
        const char *op = ka_page_text_of(child, "op"), *status = ka_page_text_of(child, "status");
        double start = seconds_of(child, "start"), end = seconds_of(child, "end");
        if (!isfinite(start) || t->count == CHILDREN_MAX) {
            t->left_out++;
            continue;
        }
        struct bar bar = {.op = op ? op : "?",
                          .part = ka_page_text_of(child, "part"),
                          .status = status ? status : "?",
                          .start = start,
                          .end = end >= start ? end : start,
                          .cases = seconds_of(child, "cases"),
                          .warm = json_is_true(json_object_get(child, "warm"))};
        t->end = fmax(t->end, bar.end);
        t->bars[t->count++] = bar;
    }
}

static const char *seconds_text(double seconds, char *text, size_t size)
{
    snprintf(text, size, seconds < 10 ? "%.2f" : "%.1f", seconds);
    return text;
}

/* ---- rows ---- */

static void place_bars(struct timeline *t, struct rows *rows)
{
    bool alone = t->count <= SINGLE_MAX;
    size_t kept = 0;
    for (size_t i = 0; i < t->count; i++) {
        struct bar bar = t->bars[i];
        size_t row = 0;
        while (row < rows->count &&
               (alone || strcmp(rows->list[row].op, bar.op) != 0 || !(rows->list[row].free_at <= bar.start)))
            row++;
        if (row == ROWS_MAX) {
            t->left_out++;
            continue;
        }
        rows->count = row == rows->count ? row + 1 : rows->count;
        rows->list[row].op = bar.op;
        rows->list[row].free_at = bar.end;
        rows->list[row].bars++;
        bar.row = row;
        t->bars[kept++] = bar;
    }
    t->count = kept;
}

/* ---- the drawing ---- */

/* 1, 2 or 5 times a power of ten. */
static double step_of(double end)
{
    double least = end / TICKS, step = pow(10, floor(log10(least)));
    static const double factors[] = {1, 2, 5, 10};
    for (size_t i = 0; i < KA_COUNT(factors); i++)
        if (step * factors[i] >= least)
            return step * factors[i];
    return step * 10;
}

static double place(const struct timeline *t, double seconds)
{
    return LEFT + seconds / t->end * (WIDTH - LEFT - RIGHT);
}

static void put_axis(struct ka_page *page, const struct timeline *t, double bottom)
{
    double step = step_of(t->end);
    int digits = step < 1 ? (int)ceil(-log10(step) - 1e-9) : 0;
    for (int i = 0; i * step <= t->end * (1 + 1e-9) && i <= 10 * (int)TICKS; i++) {
        double x = place(t, i * step);
        ka_page_putf(page, "<line x1=\"%.1f\" y1=\"0\" x2=\"%.1f\" y2=\"%.1f\" stroke=\"#ddd\"/>", x, x,
                     bottom);
        ka_page_putf(page, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"middle\">%.*f s</text>\n", x,
                     bottom + 16, digits, i * step);
    }
}

/* At most NAME_MAX characters, cut between two of them. */
static void put_name(struct ka_page *page, const char *name)
{
    size_t characters = 0, len = 0;
    while (name[len] && characters < NAME_MAX) {
        do
            len++;
        while (((unsigned char)name[len] & 0xc0) == 0x80);
        characters++;
    }
    KA_AUTO_FREE char *text = ka_strndup(name, len);
    ka_page_text(page, text);
    ka_page_put(page, name[len] ? "\xe2\x80\xa6" : "");
}

static void put_row_name(struct ka_page *page, const struct rows *rows, const struct bar *first)
{
    size_t bars = rows->list[first->row].bars;
    KA_AUTO_FREE char *name =
        bars > 1 ? ka_format("%zu x %s", bars, first->op)
                 : ka_format("%s%s%s", first->op, first->part ? " " : "", first->part ? first->part : "");
    ka_page_putf(page, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"end\">", LEFT - 8,
                 ROW * ((double)first->row + 0.5) + 4);
    put_name(page, name);
    ka_page_put(page, "</text>\n");
}

static const char *class_of(const struct bar *bar)
{
    if (strcmp(bar->status, "cancelled") == 0)
        return "off";
    if (strcmp(bar->status, "ok") != 0)
        return "lost";
    return bar->warm ? "warm" : "cold";
}

static void put_bar(struct ka_page *page, const struct timeline *t, const struct bar *bar)
{
    char start[32], end[32], took[32];
    double x = place(t, bar->start), width = fmax(place(t, bar->end) - x, 1.5);
    ka_page_putf(page, "<rect class=\"%s\" x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\"><title>",
                 class_of(bar), x, ROW * (double)bar->row + (ROW - BAR) / 2, width, BAR);
    ka_page_text(page, bar->op);
    if (bar->part) {
        ka_page_put(page, ", part ");
        ka_page_text(page, bar->part);
    }
    if (isfinite(bar->cases))
        ka_page_putf(page, ", %.0f case%s", bar->cases, bar->cases == 1 ? "" : "s");
    ka_page_putf(page, ": %s s, from %s to %s, %s start, ",
                 seconds_text(bar->end - bar->start, took, sizeof(took)),
                 seconds_text(bar->start, start, sizeof(start)), seconds_text(bar->end, end, sizeof(end)),
                 bar->warm ? "warm" : "cold");
    ka_page_text(page, bar->status);
    ka_page_put(page, "</title></rect>\n");
}

static void put_svg(struct ka_page *page, const struct timeline *t, const struct rows *rows)
{
    double bottom = ROW * (double)rows->count, height = bottom + 24;
    bool named[ROWS_MAX] = {false};
    ka_page_putf(page,
                 "<svg class=\"timeline\" role=\"img\" viewBox=\"0 0 %.0f %.0f\" width=\"%.0f\" "
                 "height=\"%.0f\">\n<title>Children over time, in seconds since the run began</title>\n",
                 WIDTH, height, WIDTH, height);
    put_axis(page, t, bottom);
    for (size_t i = 0; i < t->count; i++) {
        if (!named[t->bars[i].row])
            put_row_name(page, rows, &t->bars[i]);
        named[t->bars[i].row] = true;
        put_bar(page, t, &t->bars[i]);
    }
    ka_page_put(page, "</svg>\n");
}

void ka_timeline_html(struct ka_page *page, const json_t *children)
{
    struct timeline t;
    struct rows rows = {.count = 0};
    read_children(children, &t);
    if (t.count) {
        t.end = fmax(t.end, 0.001);
        place_bars(&t, &rows);
        ka_page_heading(page, "Time");
        put_svg(page, &t, &rows);
        ka_page_put(page, "<p>A bar is one child; pointing at it tells what it was. Pale: started cold. Red: "
                          "failed, died or out of time. Grey: cancelled.");
        if (t.left_out)
            ka_page_putf(page, " %zu more %s not drawn.", t.left_out, t.left_out == 1 ? "is" : "are");
        ka_page_put(page, "</p>\n");
    }
    free(t.bars);
}

/* ---- the table ---- */

struct sum {
    const char *op;
    size_t count;
    double seconds, longest;
};

static size_t sum_by_op(const struct timeline *t, struct sum sums[OPS_MAX])
{
    size_t count = 0;
    for (size_t i = 0; i < t->count; i++) {
        const struct bar *bar = &t->bars[i];
        size_t at = 0;
        while (at < count && strcmp(sums[at].op, bar->op) != 0)
            at++;
        if (at == OPS_MAX) /* the last row is for all that is too much */
            sums[--at].op = "others";
        else if (at == count)
            sums[count++] = (struct sum){.op = bar->op};
        sums[at].count++;
        sums[at].seconds += bar->end - bar->start;
        sums[at].longest = fmax(sums[at].longest, bar->end - bar->start);
    }
    return count;
}

void ka_timeline_markdown(struct ka_page *page, const json_t *children)
{
    struct timeline t;
    struct sum sums[OPS_MAX];
    char all[32], longest[32];
    read_children(children, &t);
    size_t count = sum_by_op(&t, sums);
    if (count)
        ka_page_put(page, "## Time\n\nSeconds of the children, some of which ran at the same time.\n\n"
                          "| operation | children | seconds | longest |\n|---|---|---|---|\n");
    for (size_t i = 0; i < count; i++) {
        ka_page_put(page, "| ");
        ka_page_text(page, sums[i].op);
        ka_page_putf(page, " | %zu | %s | %s |\n", sums[i].count,
                     seconds_text(sums[i].seconds, all, sizeof(all)),
                     seconds_text(sums[i].longest, longest, sizeof(longest)));
    }
    ka_page_put(page, count ? "\n" : "");
    free(t.bars);
}
