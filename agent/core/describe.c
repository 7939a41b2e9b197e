/* Results told in Markdown. Must not judge: no thresholds, no advice. */
#include "describe.h"

#include "base/each.h"
#include "fields.h"
#include "rank.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define REFUSAL_MAX 2000 /* bytes of what a compiler says */
#define MAX_LISTED 200   /* of anything that a child may repeat at will */

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
static void put_json(const json_t *value, struct ka_buf *out)
{
    KA_AUTO_FREE char *text = ka_text_of_value(value, JSON_COMPACT);
    if (text)
        ka_buf_puts(out, text);
}

int ka_describe_dims(const json_t *dims, struct ka_buf *out)
{
    const char *comma = "";
    if (json_is_string(dims))
        ka_buf_puts(out, json_string_value(dims));
    else if (dims && !json_is_object(dims))
        put_json(dims, out);
    KA_EACH_MEMBER(dims, name, value) {
        ka_buf_printf(out, "%s%s=", comma, name);
        put_json(value, out);
        comma = ", ";
    }
    return out->failed;
}

/* "a, b, c" of an array of texts. */
static void put_names(const json_t *names, const char *quote, struct ka_buf *out)
{
    KA_EACH(names, i, name) {
        if (json_is_string(name) && i < MAX_LISTED)
            ka_buf_printf(out, "%s%s%s%s", i ? ", " : "", quote, json_string_value(name), quote);
    }
}

/* Inspect */

static void put_signature(const json_t *stub, struct ka_buf *out)
{
    bool keyword = false;
    ka_buf_printf(out, "- stub: `%s(", ka_text_of(stub, "name", "?"));
    KA_EACH(json_object_get(stub, "params"), i, param) {
        const char *value = ka_text_of(param, "default", NULL);
        bool star = !keyword && strcmp(ka_text_of(param, "kind", ""), "keyword") == 0;
        keyword = keyword || star;
        ka_buf_printf(out, "%s%s%s", i ? ", " : "", star ? "*, " : "", ka_text_of(param, "name", "?"));
        if (value)
            ka_buf_printf(out, "=%s", value);
    }
    ka_buf_puts(out, ")`\n");
}

static void put_kernel_line(const json_t *kernel, struct ka_buf *out)
{
    bool helper = json_is_true(json_object_get(kernel, "helper"));
    double line = ka_number_of(kernel, "line", -1);
    ka_buf_printf(out, "- %s `%s`", helper ? "helper" : "kernel", ka_text_of(kernel, "name", "?"));
    if (line >= 0)
        ka_buf_printf(out, " (line %.0f)", line);
    if (json_array_size(json_object_get(kernel, "constexpr"))) {
        ka_buf_puts(out, ", constexpr ");
        put_names(json_object_get(kernel, "constexpr"), "", out);
    }
    if (json_is_true(json_object_get(kernel, "autotuned")))
        ka_buf_puts(out, ", autotuned");
    if (json_is_true(json_object_get(kernel, "heuristics")))
        ka_buf_puts(out, ", with heuristics");
    ka_buf_puts(out, "\n");
}

static void put_list_line(const char *title, const json_t *names, const char *quote, struct ka_buf *out)
{
    if (!json_array_size(names))
        return;
    ka_buf_printf(out, "- %s: ", title);
    put_names(names, quote, out);
    ka_buf_puts(out, "\n");
}

/* "- title: M=8; M=16 (optional)"; nothing for no shapes. */
static void put_shape(const char *title, size_t shown, const json_t *dims, bool optional, struct ka_buf *out)
{
    ka_buf_puts(out, shown ? "; " : title);
    ka_describe_dims(dims, out);
    ka_buf_puts(out, optional ? " (optional)" : "");
}

static void put_sweep(const json_t *sweep, struct ka_buf *out)
{
    KA_EACH(sweep, i, entry) {
        if (i < MAX_LISTED)
            put_shape("- sweep: ", i, json_object_get(entry, "dims"),
                      json_is_false(json_object_get(entry, "required")), out);
    }
    if (json_array_size(sweep))
        ka_buf_puts(out, "\n");
}

int ka_describe_inspect(const json_t *inspect, struct ka_buf *out)
{
    if (json_object_get(inspect, "stub"))
        put_signature(json_object_get(inspect, "stub"), out);
    put_list_line("gradients for", json_object_get(inspect, "grads"), "`", out);
    KA_EACH(json_object_get(inspect, "kernels"), i, kernel) {
        if (i < MAX_LISTED)
            put_kernel_line(kernel, out);
    }
    put_list_line("Triton operations", json_object_get(inspect, "ops"), "", out);
    put_sweep(json_object_get(inspect, "sweep"), out);
    if (ka_text_of(inspect, "dtype", NULL))
        ka_buf_printf(out, "- default dtype: %s\n", ka_text_of(inspect, "dtype", NULL));
    return out->failed;
}

/* "- tensors on the first of these: `x` [8, 64] float32; `target` [8] int64" */
static void put_tensors(const json_t *tensors, struct ka_buf *out)
{
    KA_EACH(tensors, i, tensor) {
        if (i >= MAX_LISTED)
            break;
        ka_buf_printf(out, "%s`%s` ",
                      i ? "; " : "- tensors on the first of these: ", ka_text_of(tensor, "name", "?"));
        put_json(json_object_get(tensor, "shape"), out);
        ka_buf_printf(out, " %s", ka_text_of(tensor, "dtype", "?"));
    }
    if (json_array_size(tensors))
        ka_buf_puts(out, "\n");
}

int ka_describe_shapes(const json_t *shapes, struct ka_buf *out)
{
    size_t shown = 0;
    const json_t *tensors = NULL;
    KA_EACH(shapes, i, shape) {
        const char *class = ka_text_of(shape, "class", "");
        bool optional = strcmp(class, "optional") == 0;
        if (shown < MAX_LISTED && (optional || strcmp(class, "required") == 0)) {
            tensors = shown ? tensors : json_object_get(shape, "tensors");
            put_shape("- checked on: ", shown++, json_object_get(shape, "dims"), optional, out);
        }
    }
    if (shown)
        ka_buf_puts(out, "; and on hidden shapes near these\n");
    put_tensors(tensors, out);
    return out->failed;
}

/* Draft */

/* "- line 12" of an entry that may lack its line. */
static void put_line_number(const json_t *entry, struct ka_buf *out)
{
    double line = ka_number_of(entry, "line", -1);
    if (line < 0)
        ka_buf_puts(out, "- somewhere");
    else
        ka_buf_printf(out, "- line %.0f", line);
}

static void put_refusals(const json_t *refusals, struct ka_buf *out)
{
    if (json_array_size(refusals))
        ka_buf_puts(out, "There is no draft: the compiler that writes them could not handle\n\n");
    KA_EACH(refusals, i, refusal) {
        if (i >= MAX_LISTED)
            break;
        put_line_number(refusal, out);
        ka_buf_printf(out, ": `%s`: %s\n", ka_text_of(refusal, "construct", "?"),
                      ka_text_of(refusal, "message", ""));
    }
}

/* "- atomic adds: 0 (2 without what was proved)" */
static void put_against(const json_t *report, const char *title, const char *name, const char *naive_name,
                        bool bytes, struct ka_buf *out)
{
    char a[40], b[40];
    double value = ka_number_of(report, name, -1), naive = ka_number_of(report, naive_name, -1);
    if (value < 0)
        return;
    snprintf(a, sizeof(a), "%.0f", value);
    snprintf(b, sizeof(b), "%.0f", naive);
    if (bytes) {
        ka_describe_bytes(value, a, sizeof(a));
        ka_describe_bytes(naive, b, sizeof(b));
    }
    ka_buf_printf(out, "- %s: %s", title, a);
    if (naive >= 0 && strcmp(a, b) != 0)
        ka_buf_printf(out, " (%s without what was proved)", b);
    ka_buf_puts(out, "\n");
}

struct word {
    const char *name, *meaning;
};

/* The first ones: each is held against the others (new reference). */
static json_t *first_of(const json_t *list)
{
    json_t *first = json_array();
    KA_EACH(list, i, entry) {
        if (i < MAX_LISTED)
            json_array_append(first, entry);
    }
    return first;
}

/* What was decided about a line, in words that need no other table. */
static const struct word DECISIONS[] = {
    {"store", "plain store"},
    {"atomic", "atomic"},
    {"owner", "a kernel of its own, whose programs own tiles of the gradient"},
    {"partials", "private partial sums and a second kernel"},
    {"schedule", "stays atomic"},
    {"spill", "written by the main kernel for another one"},
    {"operand", "computed once, by a kernel in front of the products that take it"},
    {"stored", "read back, not recomputed"},
    {"max", "no gradient through the maximum"},
    {"assumption", "assumed of every call"},
};

static const struct word CARRIED[] = {
    {"A", "it has a closed form"},
    {"B",
     "a sum, whose adjoint is the same in every step: no tape, and any order or split of the loop is right"},
    {"C", "it is scaled and added to"},
    {"D", "a running maximum with rescaled sums, which telescopes to B"},
    {"E", "a maximum only"},
    {"F", "a product"},
    {"G", "anything else, on a tape"},
};

static const char *meaning_of(const struct word *words, size_t count, const char *name)
{
    for (size_t i = 0; i < count; i++)
        if (strcmp(words[i].name, name) == 0)
            return words[i].meaning;
    return NULL;
}

static bool is_of(const json_t *entry, const char *class)
{
    return ka_is_text(entry, "class", class);
}

static bool same_line(const json_t *a, const json_t *b)
{
    return ka_number_of(a, "line", -1) == ka_number_of(b, "line", -2);
}

/* What a plain store failed for, of a gradient that another decision then found a schedule for. */
static const json_t *superseded(const json_t *lines, const json_t *entry)
{
    if (!is_of(entry, "owner") && !is_of(entry, "partials"))
        return NULL;
    KA_EACH(lines, i, other) {
        if (is_of(other, "atomic") && same_line(other, entry))
            return other;
    }
    return NULL;
}

static bool is_superseded(const json_t *lines, const json_t *entry)
{
    if (!is_of(entry, "atomic"))
        return false;
    KA_EACH(lines, i, other) {
        if (same_line(other, entry) && (superseded(lines, other) == entry || is_of(other, "schedule")))
            return true;
    }
    return false;
}

/* Advice for "d_x stays atomic: ..." without the name: the same for every gradient with the same reason. */
static const char *advice_of(const json_t *entry)
{
    const char *text = is_of(entry, "schedule") ? strstr(ka_text_of(entry, "reason", ""), ": ") : NULL;
    return text ? text + 2 : NULL;
}

/* Names and lines of this entry and of the later ones with the same advice; false: an earlier one had it. */
static bool put_advised(const json_t *lines, size_t at, struct ka_buf *out)
{
    const char *advice = advice_of(json_array_get(lines, at));
    size_t count = 0;
    KA_EACH(lines, i, other) {
        const char *reason = ka_text_of(other, "reason", ""), *same = advice_of(other);
        if (!same || strcmp(same, advice) != 0)
            continue;
        if (i < at)
            return false;
        ka_buf_printf(out, "%s%.*s (line %.0f)",
                      count++ ? ", " : "- stays atomic: ", (int)strcspn(reason, " "), reason,
                      ka_number_of(other, "line", 0));
    }
    ka_buf_printf(out, ": %s\n", advice);
    return true;
}

static void put_decision(const json_t *lines, const json_t *entry, struct ka_buf *out)
{
    const char *class = ka_text_of(entry, "class", ""), *proof = ka_text_of(entry, "proof", "");
    const char *reason = ka_text_of(entry, "reason", "");
    const char *meaning = meaning_of(DECISIONS, KA_COUNT(DECISIONS), class);
    const json_t *failed = superseded(lines, entry);
    put_line_number(entry, out);
    if (*class)
        ka_buf_printf(out, ", %s%s", meaning ? "" : "class ", meaning ? meaning : class);
    if (*reason)
        ka_buf_printf(out, ": %s", reason);
    if (*proof && strcmp(proof, "none") != 0)
        ka_buf_printf(out, " (proof: %s)", proof);
    if (failed)
        ka_buf_printf(out, "; no plain store does: %s", ka_text_of(failed, "reason", "?"));
    ka_buf_puts(out, "\n");
}

/* Of the classes that occur ("C-G" is two). */
static void put_legend(const json_t *lines, struct ka_buf *out)
{
    const char *lead = "\nClasses of what loops carry: ";
    for (size_t k = 0; k < KA_COUNT(CARRIED); k++) {
        bool occurs = false;
        KA_EACH(lines, i, entry) {
            const char *class = ka_text_of(entry, "class", "");
            bool letters = class[0] && (!class[1] || (class[1] == '-' && class[2] && !class[3]));
            occurs = occurs || (letters && strchr(class, CARRIED[k].name[0]));
        }
        if (occurs)
            ka_buf_printf(out, "%s%s: %s", lead, CARRIED[k].name, CARRIED[k].meaning);
        lead = occurs ? "; " : lead;
    }
    if (*lead == ';')
        ka_buf_puts(out, ".\n");
}

int ka_describe_draft(const json_t *draft, struct ka_buf *out)
{
    static const char menu[] =
        "\nSchedules: `owner` gives each element of a gradient one program, `partials` sums "
        "privately and adds up in a second kernel, `atomic` adds in place.\n";
    const json_t *report = json_object_get(draft, "report");
    json_auto_t *lines = first_of(json_object_get(report, "lines"));
    put_refusals(json_object_get(draft, "refusals"), out);
    put_against(report, "kept from forward to backward (tape)", "tape_bytes", "tape_naive_bytes", true, out);
    put_against(report, "gradients that are added up by atomics", "atomics", "atomics_naive", false, out);
    if (ka_text_of(report, "schedule", NULL))
        ka_buf_printf(out, "- schedule of the draft: %s\n", ka_text_of(report, "schedule", NULL));
    put_list_line("schedules that are also provable", json_object_get(report, "alternatives"), "", out);
    KA_EACH(lines, i, entry) {
        if (is_superseded(lines, entry))
            continue;
        if (advice_of(entry))
            put_advised(lines, i, out);
        else
            put_decision(lines, entry, out);
    }
    put_legend(lines, out);
    if (ka_text_of(report, "schedule", NULL))
        ka_buf_puts(out, menu);
    return out->failed;
}

/* Facts */

static void add_to(double *sum, double value)
{
    if (value >= 0)
        *sum = (*sum < 0 ? 0 : *sum) + value;
}

static void sum_pass(const json_t *facts, const char *pass, struct ka_describe_sums *sums)
{
    KA_EACH(json_object_get(facts, "cases"), i, entry) {
        const json_t *counts = json_object_get(entry, pass);
        add_to(&sums->launches, ka_number_of(counts, "launches", -1));
        add_to(&sums->bytes_read, ka_number_of(counts, "bytes_read", -1));
        add_to(&sums->bytes_written, ka_number_of(counts, "bytes_written", -1));
        add_to(&sums->atomics, ka_number_of(counts, "atomics", -1));
        add_to(&sums->programs, ka_number_of(counts, "programs", -1));
    }
}

static void add_different(json_t *list, const json_t *more)
{
    KA_EACH(more, i, item) {
        bool known = json_array_size(list) >= MAX_LISTED;
        KA_EACH(list, k, other)
            known = known || json_equal(other, item);
        if (!known)
            json_array_append(list, item);
    }
}

/* The kernels of all cases and of the result itself, each different one once, in order (new reference). */
static json_t *kernels_of(const json_t *facts)
{
    json_t *kernels = json_array();
    KA_EACH(json_object_get(facts, "cases"), i, entry) {
        add_different(kernels, json_object_get(entry, "kernels"));
    }
    add_different(kernels, json_object_get(facts, "kernels"));
    return kernels;
}

static const struct ka_describe_sums no_sums = {-1, -1, -1, -1, -1, -1, -1, -1, -1};

void ka_describe_sum(const json_t *facts, struct ka_describe_sums *sums)
{
    json_auto_t *kernels = kernels_of(facts);
    *sums = no_sums;
    sum_pass(facts, "backward", sums);
    KA_EACH(kernels, i, kernel) {
        add_to(&sums->kernels, 1);
        sums->registers = fmax(sums->registers, ka_number_of(kernel, "registers", -1));
        sums->spills = fmax(sums->spills, ka_number_of(kernel, "spills", -1));
        sums->shared = fmax(sums->shared, ka_number_of(kernel, "shared", -1));
    }
}

static void put_traffic(const json_t *facts, const char *pass, struct ka_buf *out)
{
    struct ka_describe_sums sums = no_sums;
    char in[40], written[40];
    sum_pass(facts, pass, &sums);
    if (sums.launches < 0)
        return;
    ka_describe_bytes(fmax(sums.bytes_read, 0), in, sizeof(in));
    ka_describe_bytes(fmax(sums.bytes_written, 0), written, sizeof(written));
    ka_buf_printf(out, "- %s: %.0f launches of %.0f programs, %s read, %s written, %.0f atomic elements\n",
                  pass, sums.launches, fmax(sums.programs, 0), in, written, fmax(sums.atomics, 0));
}

/* Why it does not compile, without saying so again. */
static const char *refusal_of(const json_t *kernel)
{
    static const char said[] = " does not compile: ";
    const json_t *error = json_object_get(kernel, "error");
    const char *text = json_is_object(error) ? ka_text_of(error, "message", "no reason given")
                                             : ka_text_of(kernel, "error", "no reason given");
    const char *name = ka_text_of(kernel, "name", "");
    size_t len = strlen(name);
    return ka_starts_with(text, name) && ka_starts_with(text + len, said) ? text + len + strlen(said) : text;
}

static void put_kernel_row(const json_t *kernel, struct ka_buf *out)
{
    static const char *const cells[] = {"registers",    "spills",    "shared",
                                        "instructions", "num_warps", "num_stages"};
    ka_buf_printf(out, "| `%s` | ", ka_text_of(kernel, "name", "?"));
    ka_describe_dims(json_object_get(kernel, "constexprs"), out);
    ka_buf_puts(out, " |");
    for (size_t i = 0; i < KA_COUNT(cells); i++) {
        double value = ka_number_of(kernel, cells[i], -1);
        if (value < 0)
            ka_buf_puts(out, " - |");
        else
            ka_buf_printf(out, " %.0f |", value);
    }
    bool compiled = !json_is_false(json_object_get(kernel, "ok")) &&
                    ka_number_of(kernel, "registers", -1) >= 0 && ka_number_of(kernel, "num_warps", 0) > 0;
    if (compiled)
        ka_buf_printf(out, " %.0f |", ka_rank_programs(kernel) * ka_number_of(kernel, "num_warps", 0));
    else
        ka_buf_puts(out, " - |");
    ka_buf_puts(out, "\n");
    if (json_is_false(json_object_get(kernel, "ok"))) {
        const char *error = refusal_of(kernel);
        ka_buf_printf(out, "| | does not compile: %.*s | | | | | | | |\n", (int)strcspn(error, "\n|"), error);
    }
}

bool ka_describe_uncompiled(const json_t *facts, const struct ka_place *place, struct ka_buf *out)
{
    json_auto_t *kernels = kernels_of(facts);
    KA_EACH(kernels, i, kernel) {
        if (!ka_is_text(json_object_get(kernel, "error"), "kind", "unsupported_op") ||
            !ka_is_text(kernel, "pass", "backward"))
            continue;
        KA_AUTO_BUF struct ka_buf where = {0};
        ka_place_line(place, json_integer_value(json_object_get(json_object_get(kernel, "error"), "line")),
                      &where);
        ka_buf_printf(out, "%s%s%s does not compile: ", ka_buf_str(&where), where.len ? ": " : "",
                      ka_text_of(kernel, "name", "a kernel"));
        KA_AUTO_FREE char *why = ka_strndup(refusal_of(kernel), strnlen(refusal_of(kernel), REFUSAL_MAX));
        ka_place_without_paths(why, out);
        return true;
    }
    return false;
}

bool ka_describe_raised(const json_t *facts, const struct ka_place *place, struct ka_buf *out)
{
    const json_t *cases = json_object_get(facts, "cases"), *first = NULL;
    KA_EACH(cases, i, entry) {
        const json_t *error = json_object_get(entry, "error");
        if (!json_is_true(json_object_get(entry, "everywhere")) || !json_is_object(error))
            return false;
        if (first && !json_equal(json_object_get(first, "line"), json_object_get(error, "line")))
            return false;
        first = first ? first : error;
    }
    if (first)
        ka_place_error(place, first, out);
    return first;
}

void ka_describe_times(const json_t *times, struct ka_buf *out)
{
    if (!json_is_object(times))
        return;
    bool graphs = strcmp(ka_text_of(times, "way", ""), "graph") == 0;
    ka_buf_printf(out, "Measured on the GPU, forward and backward together, %s: ",
                  graphs ? "as CUDA graphs" : "by plain calls");
    KA_EACH(json_object_get(times, "shapes"), i, shape) {
        ka_buf_puts(out, i ? "; " : "");
        ka_describe_dims(json_object_get(shape, "dims"), out);
        ka_buf_printf(out, ": %.4g ms", ka_number_of(shape, "ms", 0));
    }
    ka_buf_puts(out, ".");
}

static const char *pass_name(const char *pass)
{
    return strcmp(pass, "fwd") == 0 ? "forward" : "backward";
}

static void put_kernel_times(const json_t *kernels, struct ka_buf *out)
{
    KA_EACH(kernels, i, kernel) {
        double launches = ka_number_of(kernel, "launches", 1);
        ka_buf_printf(out, "%s`%s` (%s) %.4g ms", i ? "; " : "", ka_text_of(kernel, "name", "?"),
                      pass_name(ka_text_of(kernel, "pass", "")), ka_number_of(kernel, "ms", 0));
        if (launches > 1)
            ka_buf_printf(out, " in %.0f launches", launches);
    }
}

static void put_floor(const json_t *floor, const char *pass, struct ka_buf *out)
{
    bool products = strcmp(ka_text_of(floor, "floor_of", "bytes"), "flops") == 0;
    ka_buf_printf(out, "%s %.4g ms (%s, %.4g %s at %.4g T%s/s)", pass_name(pass),
                  ka_number_of(floor, "floor_ms", 0), products ? "its products" : "its bytes",
                  ka_number_of(floor, products ? "flops" : "bytes", 0) / (products ? 1e9 : 1e6),
                  products ? "GFLOP" : "MB",
                  ka_number_of(floor, products ? "flops_per_s" : "bytes_per_s", 0) / 1e12,
                  products ? "FLOP" : "B");
}

void ka_describe_kernels(const json_t *times, struct ka_buf *out)
{
    const json_t *kernels = json_object_get(times, "kernels"), *floor = json_object_get(times, "floor");
    const json_t *shapes = json_object_get(times, "shapes");
    if (json_array_size(kernels)) {
        ka_buf_puts(out, "Each kernel by itself, in plain calls on ");
        ka_describe_dims(json_object_get(json_array_get(shapes, json_array_size(shapes) - 1), "dims"), out);
        ka_buf_puts(out, ": ");
    }
    put_kernel_times(kernels, out);
    ka_buf_puts(out, json_array_size(kernels) ? "." : "");
    if (json_is_object(floor)) {
        ka_buf_printf(out, "%sAt what a copy and a product of matrices reach on this GPU, ",
                      json_array_size(kernels) ? " " : "");
        put_floor(json_object_get(floor, "fwd"), "fwd", out);
        ka_buf_puts(out, " and ");
        put_floor(json_object_get(floor, "bwd"), "bwd", out);
        ka_buf_puts(out, " are the least.");
    }
}

int ka_describe_facts(const json_t *facts, struct ka_buf *out)
{
    KA_AUTO_BUF struct ka_buf body = {0};
    const json_t *times = json_object_get(facts, "times");
    KA_AUTO_BUF struct ka_buf parts = {0};
    ka_describe_times(times, out);
    ka_buf_puts(out, json_is_object(times) ? "\n\n" : "");
    ka_describe_kernels(times, &parts);
    if (parts.len)
        ka_buf_printf(out, "%s\n\n", parts.data);
    json_auto_t *kernels = kernels_of(facts);
    put_traffic(facts, "forward", &body);
    put_traffic(facts, "backward", &body);
    if (json_array_size(kernels))
        ka_buf_puts(&body,
                    "\n| kernel | constexprs | registers | spills | shared bytes | instructions | warps | "
                    "stages | warps at once |\n|---|---|---|---|---|---|---|---|---|\n");
    KA_EACH(kernels, i, kernel)
        put_kernel_row(kernel, &body);
    if (body.len)
        ka_buf_printf(
            out,
            "Counted over the measured cases and read off the compiled code; nothing here is a time.%s\n\n%s",
            json_array_size(kernels) ? " Warps at once are of the 64 that a multiprocessor holds." : "",
            body.data);
    return body.failed ? body.failed : out->failed;
}

/* Attempts */

void ka_describe_finding(const char *facts, struct ka_buf *out)
{
    const char *bullet = ka_starts_with(facts, "- ") ? facts : strstr(facts, "\n- ");
    const char *line = bullet ? bullet + strspn(bullet, "\n- ") : facts;
    ka_buf_printf(out, "%.*s", (int)strcspn(line, "\n"), line);
}

int ka_describe_attempt(const json_t *entry, struct ka_buf *out)
{
    const char *note = ka_text_of(entry, "note", ""), *facts = ka_text_of(entry, "facts", "");
    const json_t *kept = json_object_get(entry, "kept");
    bool verified = json_is_true(json_object_get(entry, "verified"));
    double required = ka_number_of(entry, "required", -1), hidden = ka_number_of(entry, "hidden", -1),
           cost = ka_number_of(entry, "cost", -1);
    const char *direction = ka_text_of(entry, "direction", ""), *unusable = ka_text_of(entry, "unusable", ""),
               *untimed = ka_text_of(entry, "untimed", "");
    ka_buf_printf(out, "%s by %s", ka_text_of(entry, "phase", "attempt"), ka_text_of(entry, "origin", "?"));
    if (*direction)
        ka_buf_printf(out, ", direction \"%s\"", direction);
    if (*unusable) {
        ka_buf_printf(out, ": the answer was no use: %.*s", (int)strcspn(unusable, "\n"), unusable);
        return out->failed;
    }
    if (*note)
        ka_buf_printf(out, " (%.*s)", (int)strcspn(note, "\n"), note);
    ka_buf_puts(out, verified ? ": verified" : ": not verified");
    if (!verified && required >= 0)
        ka_buf_printf(out, ", %.0f of %.0f shapes", fmax(ka_number_of(entry, "passed", 0), 0), required);
    if (!verified && hidden > 0)
        ka_buf_printf(out, ", %.0f of %.0f hidden ones", fmax(ka_number_of(entry, "hidden_passed", 0), 0),
                      hidden);
    const json_t *times = json_object_get(entry, "times");
    if (json_is_number(json_object_get(times, "ratio")))
        ka_buf_printf(out, ", %.3f of the best's time (%.3f to %.3f)", ka_number_of(times, "ratio", 0),
                      ka_number_of(times, "low", 0), ka_number_of(times, "high", 0));
    else if (json_is_object(times))
        ka_buf_printf(out, ", %.4g ms", ka_number_of(times, "ms", 0));
    else if (*untimed)
        ka_buf_printf(out, ", not timed (%.*s)", (int)strcspn(untimed, "\n"), untimed);
    else if (cost >= 0)
        ka_buf_printf(out, ", cost %.4g", cost);
    if (json_is_boolean(kept))
        ka_buf_puts(out, json_is_true(kept) ? ", kept" : *direction ? ", not kept" : ", rolled back");
    if (json_is_false(kept) && json_object_get(times, "kernels")) { /* the best's are told by themselves */
        ka_buf_puts(out, "; its kernels: ");
        put_kernel_times(json_object_get(times, "kernels"), out);
    }
    if (!verified && *facts) {
        ka_buf_puts(out, "; ");
        ka_describe_finding(facts, out);
    }
    return out->failed;
}
