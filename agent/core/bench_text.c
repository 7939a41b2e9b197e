/* The table of a benchmark. Decides nothing. */
#include "bench_text.h"

#include <stdio.h>
#include <string.h>

#include "base/each.h"
#include "bench_result.h"
#include "describe.h"
#include "fields.h"

#define MOST_NOTES 40
#define FAR 0.05 /* gradients that differ by more are said to */

/* Columns after the floor: whose time, and how it was called. */
static const struct column {
    const char *title, *subject, *way;
} columns[] = {
    {"eager", "eager", "alone"}, {"compile", "compile", "alone"},  {"baseline", "baseline", "alone"},
    {"ours", "ours", "alone"},   {"ours, graph", "ours", "graph"},
};

static const char *title_of(const char *pass)
{
    return pass[0] == 'f' ? "forward" : pass[1] == 'w' ? "backward" : "forward and backward";
}

static const json_t *at(const json_t *object, const char *a, const char *b)
{
    return json_object_get(json_object_get(object, a), b);
}

static void put_time(const json_t *time, struct ka_buf *out)
{
    char text[64];
    double median = ka_number_of(time, "median_ms", 0.0);
    if (median > 0.0)
        snprintf(text, sizeof(text), "%.4g%s +-%.1g", median, json_object_get(time, "below_floor") ? "!" : "",
                 (ka_number_of(time, "high_ms", 0.0) - ka_number_of(time, "low_ms", 0.0)) / 2);
    ka_buf_printf(out, " %17s", median > 0.0 ? text : json_object_get(time, "refused") ? "refused" : "-");
}

static void put_row(const json_t *shape, const char *pass, struct ka_buf *out)
{
    KA_AUTO_BUF struct ka_buf dims = {0};
    const json_t *found = at(shape, "passes", pass);
    ka_describe_dims(json_object_get(shape, "dims"), &dims);
    ka_buf_printf(out, "  %-32.60s", ka_buf_str(&dims));
    if (!found) {
        ka_buf_puts(out, "  no result\n");
        return;
    }
    ka_buf_printf(out, " %9.4g", ka_number_of(found, "floor_ms", 0.0));
    const json_t *subjects = json_object_get(found, "subjects");
    for (size_t i = 0; i < KA_COUNT(columns); i++)
        put_time(at(subjects, columns[i].subject, columns[i].way), out);
    double floor = ka_number_of(found, "floor_ms", 0.0);
    double ours = ka_number_of(at(subjects, "ours", "graph"), "median_ms", 0.0);
    if (!(ours > 0.0))
        ours = ka_number_of(at(subjects, "ours", "alone"), "median_ms", 0.0);
    if (ours > 0.0)
        ka_buf_printf(out, " %7.0f%%", 100.0 * floor / ours);
    ka_buf_puts(out, "\n");
}

/* "calls 1.80x of eager (2 of 3 shapes faster, 0 slower)" */
static void put_means(const json_t *means, const char *of, struct ka_buf *out)
{
    bool any = false;
    KA_EACH_MEMBER(means, name, mean) {
        ka_buf_printf(out, "%s %.2fx as fast as %s (faster on %lld of %lld, slower on %lld)", any ? ";" : of,
                      ka_number_of(mean, "ratio", 0.0), name,
                      (long long)json_integer_value(json_object_get(mean, "faster")),
                      (long long)json_integer_value(json_object_get(mean, "shapes")),
                      (long long)json_integer_value(json_object_get(mean, "slower")));
        any = true;
    }
    if (any)
        ka_buf_puts(out, "\n");
}

static void put_pass(const json_t *result, const char *pass, struct ka_buf *out)
{
    const json_t *shapes = json_object_get(result, "shapes");
    bool any = false;
    KA_EACH(shapes, i, shape)
        any = any || at(shape, "passes", pass);
    if (!any)
        return;
    ka_buf_printf(out, "\n%-34s %9s", title_of(pass), "floor");
    for (size_t i = 0; i < KA_COUNT(columns); i++)
        ka_buf_printf(out, " %17s", columns[i].title);
    ka_buf_puts(out, " of floor\n");
    KA_EACH(shapes, i, shape)
        put_row(shape, pass, out);
    put_means(at(json_object_get(result, "geomean"), pass, "alone"), "  calls:", out);
    put_means(at(json_object_get(result, "geomean"), pass, "graph"), "  graphs:", out);
}

static void put_memory(const json_t *result, struct ka_buf *out)
{
    bool any = false;
    KA_EACH(json_object_get(result, "shapes"), n, some)
        any = any || json_object_get(some, "memory");
    if (!any)
        return;
    ka_buf_printf(out, "\n%-34s", "MiB saved for the backward / most");
    for (size_t i = 0; ka_bench_subject(i); i++)
        ka_buf_printf(out, " %21s", ka_bench_subject(i));
    ka_buf_puts(out, "\n");
    KA_EACH(json_object_get(result, "shapes"), i, shape) {
        KA_AUTO_BUF struct ka_buf dims = {0};
        ka_describe_dims(json_object_get(shape, "dims"), &dims);
        ka_buf_printf(out, "  %-32.60s", ka_buf_str(&dims));
        for (size_t k = 0; ka_bench_subject(k); k++) {
            char text[64] = "-";
            const json_t *memory = at(shape, "memory", ka_bench_subject(k));
            if (memory)
                snprintf(text, sizeof(text), "%.1f / %.1f",
                         ka_number_of(memory, "saved_bytes", 0.0) / 1048576,
                         ka_number_of(memory, "peak_bytes", 0.0) / 1048576);
            ka_buf_printf(out, " %21s", text);
        }
        ka_buf_puts(out, "\n");
    }
}

/* ---- notes: the first line of each sentence once, with the first shape that it is about */

static void note(json_t *notes, const char *dims, const char *about, const char *text)
{
    KA_AUTO_BUF struct ka_buf key = {0};
    size_t line = strcspn(text, "\n");
    ka_buf_printf(&key, "%s: %.*s", about, (int)(line < 300 ? line : 300), text);
    if (json_object_size(notes) < MOST_NOTES && !json_object_get(notes, ka_buf_str(&key)))
        json_object_set_new(notes, ka_buf_str(&key), json_string(dims));
}

static void note_refused(json_t *notes, const char *dims, const json_t *passes)
{
    KA_EACH_MEMBER(passes, pass, found) {
        KA_EACH_MEMBER(json_object_get(found, "subjects"), name, ways) {
            KA_EACH_MEMBER(ways, way, time) {
                KA_AUTO_BUF struct ka_buf about = {0};
                ka_buf_printf(&about, "%s, %s %s, refused", name, title_of(pass), way);
                if (ka_text_of(time, "refused", NULL))
                    note(notes, dims, ka_buf_str(&about), ka_text_of(time, "refused", ""));
            }
        }
    }
}

static void note_shape(json_t *notes, const json_t *shape)
{
    KA_AUTO_BUF struct ka_buf dims = {0};
    ka_describe_dims(json_object_get(shape, "dims"), &dims);
    const char *where = ka_buf_str(&dims);
    const json_t *error = json_object_get(shape, "error");
    if (error)
        note(notes, where, "no result", ka_text_of(error, "message", "unknown error"));
    note_refused(notes, where, json_object_get(shape, "passes"));
    KA_EACH_MEMBER(json_object_get(shape, "missing"), name, why) {
        note(notes, where, name, json_is_string(why) ? json_string_value(why) : "?");
    }
    KA_EACH_MEMBER(json_object_get(shape, "no_graph"), name, why) {
        KA_AUTO_BUF struct ka_buf about = {0};
        ka_buf_printf(&about, "%s, no graph", name);
        note(notes, where, ka_buf_str(&about), json_is_string(why) ? json_string_value(why) : "?");
    }
    KA_EACH_MEMBER(json_object_get(shape, "difference"), name, gap) {
        if (json_number_value(gap) > FAR)
            note(notes, where, name, "its gradients are not those of eager PyTorch: kernel-agent check");
    }
}

static void put_notes(const json_t *result, struct ka_buf *out)
{
    json_auto_t *notes = json_object();
    KA_EACH(json_object_get(result, "shapes"), i, shape)
        note_shape(notes, shape);
    if (json_object_size(notes))
        ka_buf_puts(out, "\n");
    KA_EACH_MEMBER(notes, text, dims) {
        ka_buf_printf(out, "  %s (%s)\n", text, json_string_value(dims));
    }
}

void ka_bench_text(const json_t *result, struct ka_buf *out)
{
    const json_t *ceilings = json_object_get(result, "ceilings");
    ka_buf_printf(out, "%.200s on %.200s: %.2f TB/s copied, %.0f TFLOP/s in %s\n",
                  ka_text_of(result, "stub", "?"), ka_text_of(json_object_get(result, "device"), "name", "?"),
                  ka_number_of(ceilings, "bytes_per_s", 0.0) / 1e12,
                  ka_number_of(ceilings, "flops_per_s", 0.0) / 1e12, ka_text_of(ceilings, "dtype", "?"));
    if (ka_text_of(result, "refused", NULL)) {
        ka_buf_printf(out, "refused: %s\n", ka_text_of(result, "refused", ""));
        return;
    }
    ka_buf_puts(out, "milliseconds: median +- half of its interval at 95 %; ! is below the floor\n");
    for (size_t i = 0; ka_bench_pass(i); i++)
        put_pass(result, ka_bench_pass(i), out);
    put_memory(result, out);
    put_notes(result, out);
}
