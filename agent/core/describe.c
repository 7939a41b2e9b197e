/* Results told in Markdown. Must not judge: no thresholds, no advice. */
#include "describe.h"

#include "fields.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_LISTED 200 /* of anything that a child may repeat at will */

void ka_describe_bytes(double bytes, char *out, size_t size)
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    size_t unit = 0;
    while (bytes >= 1024 && unit + 1 < KA_COUNT(units)) {
        bytes /= 1024;
        unit++;
    }
    snprintf(out, size, unit && bytes < 100 ? "%.1f %s" : "%.0f %s", bytes, units[unit]);
}

/* JSON text of any value. */
static int put_json(const json_t *value, struct ka_buf *out)
{
    char *text = json_dumps(value, JSON_ENCODE_ANY | JSON_COMPACT);
    int rc = text ? ka_buf_puts(out, text) : 0;
    free(text);
    return rc;
}

int ka_describe_dims(const json_t *dims, struct ka_buf *out)
{
    if (json_is_string(dims))
        return ka_buf_puts(out, json_string_value(dims));
    if (!json_is_object(dims))
        return dims ? put_json(dims, out) : 0;
    const char *name, *comma = "";
    json_t *value;
    int rc = 0;
    json_object_foreach((json_t *)dims, name, value)
    {
        rc = rc ? rc : ka_buf_printf(out, "%s%s=", comma, name);
        rc = rc ? rc : put_json(value, out);
        comma = ", ";
    }
    return rc;
}

/* "a, b, c" of an array of texts. */
static int put_names(const json_t *names, const char *quote, struct ka_buf *out)
{
    size_t i;
    json_t *name;
    int rc = 0;
    json_array_foreach((json_t *)names, i, name)
    {
        if (json_is_string(name) && i < MAX_LISTED && rc == 0)
            rc = ka_buf_printf(out, "%s%s%s%s", i ? ", " : "", quote, json_string_value(name), quote);
    }
    return rc;
}

/* Inspect */

static int put_signature(const json_t *stub, struct ka_buf *out)
{
    size_t i;
    json_t *param;
    bool keyword = false;
    int rc = ka_buf_printf(out, "- stub: `%s(", ka_text_of(stub, "name", "?"));
    json_array_foreach(json_object_get(stub, "params"), i, param)
    {
        const char *kind = ka_text_of(param, "kind", NULL), *value = ka_text_of(param, "default", NULL),
                   *own = ka_text_of(param, "name", NULL);
        const char *star = kind && strcmp(kind, "keyword") == 0 && !keyword ? "*, " : "";
        keyword = keyword || *star;
        rc = rc ? rc : ka_buf_printf(out, "%s%s%s", i ? ", " : "", star, own ? own : "?");
        rc = rc || !value ? rc : ka_buf_printf(out, "=%s", value);
    }
    return rc ? rc : ka_buf_puts(out, ")`\n");
}

static int put_kernel_line(const json_t *kernel, struct ka_buf *out)
{
    const char *name = ka_text_of(kernel, "name", NULL);
    int rc =
        ka_buf_printf(out, "- %s `%s`", json_is_true(json_object_get(kernel, "helper")) ? "helper" : "kernel",
                      name ? name : "?");
    if (ka_number_of(kernel, "line", -1) >= 0)
        rc = rc ? rc : ka_buf_printf(out, " (line %.0f)", ka_number_of(kernel, "line", -1));
    if (json_array_size(json_object_get(kernel, "constexpr"))) {
        rc = rc ? rc : ka_buf_puts(out, ", constexpr ");
        rc = rc ? rc : put_names(json_object_get(kernel, "constexpr"), "", out);
    }
    if (json_is_true(json_object_get(kernel, "autotuned")))
        rc = rc ? rc : ka_buf_puts(out, ", autotuned");
    if (json_is_true(json_object_get(kernel, "heuristics")))
        rc = rc ? rc : ka_buf_puts(out, ", with heuristics");
    return rc ? rc : ka_buf_puts(out, "\n");
}

static int put_list_line(const char *title, const json_t *names, const char *quote, struct ka_buf *out)
{
    if (!json_array_size(names))
        return 0;
    int rc = ka_buf_printf(out, "- %s: ", title);
    rc = rc ? rc : put_names(names, quote, out);
    return rc ? rc : ka_buf_puts(out, "\n");
}

static int put_sweep(const json_t *sweep, struct ka_buf *out)
{
    size_t i;
    json_t *entry;
    int rc = json_array_size(sweep) ? ka_buf_puts(out, "- sweep: ") : 0;
    json_array_foreach((json_t *)sweep, i, entry)
    {
        if (i >= MAX_LISTED || rc)
            break;
        rc = ka_buf_puts(out, i ? "; " : "");
        rc = rc ? rc : ka_describe_dims(json_object_get(entry, "dims"), out);
        if (json_is_false(json_object_get(entry, "required")))
            rc = rc ? rc : ka_buf_puts(out, " (optional)");
    }
    return rc || !json_array_size(sweep) ? rc : ka_buf_puts(out, "\n");
}

int ka_describe_inspect(const json_t *inspect, struct ka_buf *out)
{
    if (!json_is_object(inspect))
        return 0;
    size_t i;
    json_t *kernel;
    const json_t *stub = json_object_get(inspect, "stub");
    int rc = stub ? put_signature(stub, out) : 0;
    rc = rc ? rc : put_list_line("gradients for", json_object_get(inspect, "grads"), "`", out);
    json_array_foreach(json_object_get(inspect, "kernels"), i, kernel)
    {
        if (i < MAX_LISTED && rc == 0)
            rc = put_kernel_line(kernel, out);
    }
    rc = rc ? rc : put_list_line("Triton operations", json_object_get(inspect, "ops"), "", out);
    rc = rc ? rc : put_sweep(json_object_get(inspect, "sweep"), out);
    if (ka_text_of(inspect, "dtype", NULL))
        rc = rc ? rc : ka_buf_printf(out, "- default dtype: %s\n", ka_text_of(inspect, "dtype", NULL));
    return rc;
}

int ka_describe_shapes(const json_t *shapes, struct ka_buf *out)
{
    size_t i, shown = 0;
    json_t *shape;
    int rc = 0;
    json_array_foreach((json_t *)shapes, i, shape)
    {
        const char *class = ka_text_of(shape, "class", NULL);
        bool optional = class && strcmp(class, "optional") == 0;
        if (rc || shown >= MAX_LISTED || !class || (!optional && strcmp(class, "required") != 0))
            continue;
        rc = ka_buf_puts(out, shown++ ? "; " : "- checked on: ");
        rc = rc ? rc : ka_describe_dims(json_object_get(shape, "dims"), out);
        if (optional)
            rc = rc ? rc : ka_buf_puts(out, " (optional)");
    }
    return rc || !shown ? rc : ka_buf_puts(out, "; and on hidden shapes near these\n");
}

/* Draft */

/* "- line 12" of an entry that may lack its line. */
static int put_line_number(const json_t *entry, struct ka_buf *out)
{
    double line = ka_number_of(entry, "line", -1);
    return line < 0 ? ka_buf_puts(out, "- somewhere") : ka_buf_printf(out, "- line %.0f", line);
}

static int put_refusals(const json_t *refusals, struct ka_buf *out)
{
    size_t i;
    json_t *refusal;
    int rc = json_array_size(refusals) ? ka_buf_puts(out, "The differentiator could not handle:\n\n") : 0;
    json_array_foreach((json_t *)refusals, i, refusal)
    {
        if (i >= MAX_LISTED || rc)
            break;
        const char *construct = ka_text_of(refusal, "construct", NULL),
                   *message = ka_text_of(refusal, "message", NULL);
        rc = put_line_number(refusal, out);
        rc =
            rc ? rc : ka_buf_printf(out, ": `%s`: %s\n", construct ? construct : "?", message ? message : "");
    }
    return rc;
}

/* "atomics: 0 (naive 2)" */
static int put_against(const json_t *report, const char *title, const char *name, const char *naive_name,
                       bool bytes, struct ka_buf *out)
{
    char a[40], b[40];
    double value = ka_number_of(report, name, -1), naive = ka_number_of(report, naive_name, -1);
    if (value < 0)
        return 0;
    snprintf(a, sizeof(a), "%.0f", value);
    snprintf(b, sizeof(b), "%.0f", naive);
    if (bytes) {
        ka_describe_bytes(value, a, sizeof(a));
        ka_describe_bytes(naive, b, sizeof(b));
    }
    return naive < 0 ? ka_buf_printf(out, "- %s: %s\n", title, a)
                     : ka_buf_printf(out, "- %s: %s (naive %s)\n", title, a, b);
}

static int put_line_entry(const json_t *entry, struct ka_buf *out)
{
    static const char *const parts[] = {"class", "proof", "reason"};
    const char *lead = ": ";
    int rc = put_line_number(entry, out);
    for (size_t i = 0; i < KA_COUNT(parts) && rc == 0; i++) {
        const char *part = ka_text_of(entry, parts[i], NULL);
        if (!part || !*part)
            continue;
        rc = ka_buf_printf(out, "%s%s%s", lead, i == 0 ? "class " : "", part);
        lead = "; ";
    }
    return rc ? rc : ka_buf_puts(out, "\n");
}

int ka_describe_draft(const json_t *draft, struct ka_buf *out)
{
    const json_t *report = json_object_get(draft, "report");
    int rc = put_refusals(json_object_get(draft, "refusals"), out);
    if (!json_is_object(report))
        return rc;
    rc = rc ? rc : put_against(report, "tape", "tape_bytes", "tape_naive_bytes", true, out);
    rc = rc ? rc : put_against(report, "atomics", "atomics", "atomics_naive", false, out);
    if (ka_text_of(report, "schedule", NULL))
        rc = rc ? rc
                : ka_buf_printf(out, "- schedule of the draft: %s\n", ka_text_of(report, "schedule", NULL));
    rc = rc ? rc
            : put_list_line("schedules that are also provable", json_object_get(report, "alternatives"), "",
                            out);
    size_t i;
    json_t *entry;
    json_array_foreach(json_object_get(report, "lines"), i, entry)
    {
        if (i < MAX_LISTED && rc == 0)
            rc = put_line_entry(entry, out);
    }
    return rc;
}

/* Facts */

static void add_to(double *sum, double value)
{
    if (value >= 0)
        *sum = (*sum < 0 ? 0 : *sum) + value;
}

static void sum_pass(const json_t *facts, const char *pass, struct ka_describe_sums *sums)
{
    size_t i;
    json_t *entry;
    json_array_foreach(json_object_get(facts, "cases"), i, entry)
    {
        const json_t *counts = json_object_get(entry, pass);
        add_to(&sums->launches, ka_number_of(counts, "launches", -1));
        add_to(&sums->bytes_read, ka_number_of(counts, "bytes_read", -1));
        add_to(&sums->bytes_written, ka_number_of(counts, "bytes_written", -1));
        add_to(&sums->atomics, ka_number_of(counts, "atomics", -1));
        add_to(&sums->programs, ka_number_of(counts, "programs", -1));
    }
}

/* Calls `each` for the kernels of all cases and of the result itself, each different one once, in order. */
static int for_kernels(const json_t *facts, int (*each)(const json_t *kernel, void *arg), void *arg)
{
    json_t *seen = json_array(), *entry, *kernel, *other;
    const json_t *lists[2] = {NULL, json_object_get(facts, "kernels")};
    size_t cases = json_array_size(json_object_get(facts, "cases")), i, k;
    int rc = 0;
    for (size_t c = 0; c <= cases; c++) {
        entry = json_array_get(json_object_get(facts, "cases"), c);
        const json_t *list = c < cases ? json_object_get(entry, "kernels") : lists[1];
        json_array_foreach((json_t *)list, i, kernel)
        {
            bool known = json_array_size(seen) >= MAX_LISTED;
            json_array_foreach(seen, k, other) known = known || json_equal(other, kernel);
            if (known || rc)
                continue;
            json_array_append(seen, kernel);
            rc = each(kernel, arg);
        }
    }
    json_decref(seen);
    return rc;
}

static int sum_kernel(const json_t *kernel, void *arg)
{
    struct ka_describe_sums *sums = arg;
    add_to(&sums->kernels, 1);
    sums->registers = fmax(sums->registers, ka_number_of(kernel, "registers", -1));
    sums->spills = fmax(sums->spills, ka_number_of(kernel, "spills", -1));
    sums->shared = fmax(sums->shared, ka_number_of(kernel, "shared", -1));
    return 0;
}

static const struct ka_describe_sums no_sums = {-1, -1, -1, -1, -1, -1, -1, -1, -1};

void ka_describe_sum(const json_t *facts, struct ka_describe_sums *sums)
{
    *sums = no_sums;
    sum_pass(facts, "backward", sums);
    for_kernels(facts, sum_kernel, sums);
}

static int put_traffic(const json_t *facts, const char *pass, struct ka_buf *out)
{
    struct ka_describe_sums sums = no_sums;
    char in[40], written[40];
    sum_pass(facts, pass, &sums);
    if (sums.launches < 0)
        return 0;
    ka_describe_bytes(fmax(sums.bytes_read, 0), in, sizeof(in));
    ka_describe_bytes(fmax(sums.bytes_written, 0), written, sizeof(written));
    return ka_buf_printf(out,
                         "- %s: %.0f launches of %.0f programs, %s read, %s written, %.0f atomic elements\n",
                         pass, sums.launches, fmax(sums.programs, 0), in, written, fmax(sums.atomics, 0));
}

/* A cell with a number, or a dash. */
static int put_cell(const json_t *object, const char *name, struct ka_buf *out)
{
    double value = ka_number_of(object, name, -1);
    return value < 0 ? ka_buf_puts(out, " - |") : ka_buf_printf(out, " %.0f |", value);
}

struct table {
    struct ka_buf *out;
    size_t rows;
};

static int put_kernel_row(const json_t *kernel, void *arg)
{
    static const char *const cells[] = {"registers",    "spills",    "shared",
                                        "instructions", "num_warps", "num_stages"};
    struct table *table = arg;
    const char *name = ka_text_of(kernel, "name", NULL), *error = ka_text_of(kernel, "error", NULL);
    int rc = 0;
    if (!table->rows++)
        rc = ka_buf_puts(
            table->out,
            "\n| kernel | constexprs | registers | spills | shared bytes | instructions | warps | "
            "stages |\n|---|---|---|---|---|---|---|---|\n");
    rc = rc ? rc : ka_buf_printf(table->out, "| `%s` | ", name ? name : "?");
    rc = rc ? rc : ka_describe_dims(json_object_get(kernel, "constexprs"), table->out);
    rc = rc ? rc : ka_buf_puts(table->out, " |");
    for (size_t i = 0; i < KA_COUNT(cells) && rc == 0; i++)
        rc = put_cell(kernel, cells[i], table->out);
    rc = rc ? rc : ka_buf_puts(table->out, "\n");
    if (json_is_false(json_object_get(kernel, "ok")) && rc == 0)
        rc = ka_buf_printf(table->out, "| | does not compile: %.*s | | | | | | |\n",
                           (int)strcspn(error ? error : "no reason given", "\n|"),
                           error ? error : "no reason given");
    return rc;
}

int ka_describe_facts(const json_t *facts, struct ka_buf *out)
{
    if (!json_is_object(facts))
        return 0;
    struct ka_buf body = {0};
    struct table table = {&body, 0};
    int rc = put_traffic(facts, "forward", &body);
    rc = rc ? rc : put_traffic(facts, "backward", &body);
    rc = rc ? rc : for_kernels(facts, put_kernel_row, &table);
    if (body.len && rc == 0) {
        rc = ka_buf_puts(
            out,
            "Counted over the measured cases and read off the compiled code; nothing here is a time.\n\n");
        rc = rc ? rc : ka_buf_add(out, body.data, body.len);
    }
    ka_buf_free(&body);
    return rc;
}

/* Attempts */

/* What of a verdict's facts says most in one line: its first finding, else its first line. */
static int put_finding(const char *facts, struct ka_buf *out)
{
    const char *bullet = ka_starts_with(facts, "- ") ? facts : strstr(facts, "\n- ");
    const char *line = bullet ? bullet + strspn(bullet, "\n- ") : facts;
    return ka_buf_printf(out, "; %.*s", (int)strcspn(line, "\n"), line);
}

int ka_describe_attempt(const json_t *entry, struct ka_buf *out)
{
    const char *phase = ka_text_of(entry, "phase", NULL), *origin = ka_text_of(entry, "origin", NULL),
               *note = ka_text_of(entry, "note", NULL);
    const char *facts = ka_text_of(entry, "facts", NULL);
    bool verified = json_is_true(json_object_get(entry, "verified"));
    double required = ka_number_of(entry, "required", -1), hidden = ka_number_of(entry, "hidden", -1),
           cost = ka_number_of(entry, "cost", -1);
    int rc = ka_buf_printf(out, "%s by %s", phase ? phase : "attempt", origin ? origin : "?");
    if (note && *note)
        rc = rc ? rc : ka_buf_printf(out, " (%.*s)", (int)strcspn(note, "\n"), note);
    rc = rc ? rc : ka_buf_puts(out, verified ? ": verified" : ": not verified");
    if (!verified && required >= 0)
        rc = rc ? rc
                : ka_buf_printf(out, ", %.0f of %.0f shapes", fmax(ka_number_of(entry, "passed", -1), 0),
                                required);
    if (!verified && hidden > 0)
        rc = rc ? rc
                : ka_buf_printf(out, ", %.0f of %.0f hidden ones",
                                fmax(ka_number_of(entry, "hidden_passed", -1), 0), hidden);
    if (cost >= 0)
        rc = rc ? rc : ka_buf_printf(out, ", cost %.4g", cost);
    if (json_is_boolean(json_object_get(entry, "kept")))
        rc = rc ? rc
                : ka_buf_puts(out, json_is_true(json_object_get(entry, "kept")) ? ", kept" : ", rolled back");
    if (!verified && facts && *facts)
        rc = rc ? rc : put_finding(facts, out);
    return rc;
}
