/* The report as Markdown: one function a section, each silent when it has nothing to say. Must not decide
 * anything. */
#include "report.h"

#include "describe.h"
#include "page.h"
#include "timeline.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void put_dims(struct ka_page *page, const json_t *dims)
{
    struct ka_buf text = {0};
    if (page->rc == 0)
        page->rc = ka_describe_dims(dims, &text);
    ka_page_put_inline(page, json_is_null(dims) ? "-" : ka_buf_str(&text));
    ka_buf_free(&text);
}

static const json_t *get(const json_t *object, const char *name)
{
    return json_object_get(object, name);
}

static bool has_number(const json_t *object, const char *name)
{
    return json_is_number(get(object, name));
}

static double number_of(const json_t *object, const char *name)
{
    return json_number_value(get(object, name));
}

/* "| title | value |" when the value is there. */
static void put_row(struct ka_page *page, const char *title, const json_t *value)
{
    if (!value || json_is_null(value))
        return;
    ka_page_putf(page, "| %s | ", title);
    put_dims(page, value);
    ka_page_put(page, " |\n");
}

static void put_of(struct ka_page *page, const char *title, const json_t *object, const char *part,
                   const char *whole)
{
    if (has_number(object, whole))
        ka_page_putf(page, "| %s | %.0f of %.0f |\n", title, number_of(object, part),
                     number_of(object, whole));
}

/* Sections */

static void put_title(struct ka_page *page, const json_t *result)
{
    const char *stub = ka_page_text_of(result, "stub");
    ka_page_put(page, "# ");
    ka_page_put_inline(page, stub ? stub : "kernel-agent");
    ka_page_put(page, ": ");
    ka_page_put_inline(page, ka_page_verdict(result));
    ka_page_put(page, "\n\n");
}

/* Kinds of inputs beside those that make_args draws. */
static void put_inputs(struct ka_page *page, const json_t *inputs)
{
    json_t *kept = json_object_get(inputs, "kept"), *left_out = json_object_get(inputs, "left_out"), *item;
    size_t i;
    const char *kind;
    json_array_foreach(kept, i, item)
    {
        ka_page_put(page, i == 0 ? "| also tried with inputs that are | " : ", ");
        ka_page_put_inline(page, json_is_string(item) ? json_string_value(item) : "?");
    }
    ka_page_put(page, json_array_size(kept) ? " |\n" : "");
    json_object_foreach(left_out, kind, item)
    {
        ka_page_put(page, "| not tried with inputs that are ");
        ka_page_put_inline(page, kind);
        ka_page_put(page, " | ");
        ka_page_put_inline(page, json_is_string(item) ? json_string_value(item) : "?");
        ka_page_put(page, " |\n");
    }
}

/* What stands beside the oracle made from the forward. */
static void put_oracles(struct ka_page *page, const json_t *oracles)
{
    const json_t *differences = get(oracles, "finite_differences");
    const char *verdict = ka_page_text_of(differences, "verdict"),
               *reason = ka_page_text_of(differences, "reason");
    put_row(page, "reference() against the oracle", get(oracles, "reference"));
    if (!verdict)
        return;
    ka_page_putf(page, "| finite differences against the oracle | %s: %.0f slopes agree, %.0f tell nothing",
                 verdict, number_of(differences, "agree"), number_of(differences, "open"));
    if (reason) {
        ka_page_put(page, " (");
        ka_page_put_inline(page, reason);
        ka_page_put(page, ")");
    }
    ka_page_put(page, " |\n");
}

static void put_summary(struct ka_page *page, const json_t *result)
{
    const json_t *shapes = get(result, "shapes"), *llm = get(result, "llm");
    ka_page_put(page, "| | |\n|---|---|\n");
    put_row(page, "forward file", get(result, "file"));
    put_row(page, "pair", get(result, "pair"));
    put_row(page, "best candidate, not verified", get(result, "best"));
    put_row(page, "device", get(result, "device"));
    put_of(page, "required shapes passed", shapes, "passed", "required");
    put_of(page, "hidden shapes passed", shapes, "hidden_passed", "hidden");
    if (number_of(shapes, "optional") > 0)
        put_of(page, "optional shapes passed", shapes, "optional_passed", "optional");
    put_oracles(page, get(result, "oracles"));
    put_inputs(page, get(get(result, "oracles"), "inputs"));
    put_row(page, "draft", get(result, "draft"));
    put_row(page, "attempts", get(result, "attempts"));
    put_row(page, "roll-backs", get(result, "rollbacks"));
    put_row(page, "atomic elements in the backward", get(result, "atomics"));
    put_row(page, "tape bytes", get(result, "tape_bytes"));
    if (number_of(llm, "requests") > 0) {
        ka_page_putf(page, "| model | %.0f requests, %.0f tokens in, %.0f out", number_of(llm, "requests"),
                     number_of(llm, "tokens_in"), number_of(llm, "tokens_out"));
        if (has_number(llm, "cost"))
            ka_page_putf(page, ", cost %.4f", number_of(llm, "cost"));
        ka_page_put(page, " |\n");
    }
    if (has_number(result, "seconds"))
        ka_page_putf(page, "| seconds for the whole run | %.1f |\n", number_of(result, "seconds"));
    ka_page_put(page, "\n");
}

static void put_error(struct ka_page *page, const json_t *error)
{
    if (!json_is_object(error))
        return;
    ka_page_put(page, "## Why it ended\n\n");
    if (ka_page_text_of(error, "file")) {
        ka_page_put_inline(page, ka_page_text_of(error, "file"));
        if (has_number(error, "line"))
            ka_page_putf(page, ":%.0f", number_of(error, "line"));
        ka_page_put(page, ": ");
    }
    ka_page_put_inline(page,
                       ka_page_text_of(error, "message") ? ka_page_text_of(error, "message") : "no message");
    ka_page_put(page, "\n\n");
    if (ka_page_text_of(error, "remedy")) {
        ka_page_put(page, "What to do: ");
        ka_page_put_inline(page, ka_page_text_of(error, "remedy"));
        ka_page_put(page, "\n\n");
    }
    if (ka_page_text_of(error, "traceback"))
        ka_page_putf(page, "```\n%s\n```\n\n", ka_page_text_of(error, "traceback"));
}

static void put_gradients(struct ka_page *page, const json_t *gradients)
{
    size_t i;
    json_t *gradient;
    if (!json_array_size(gradients))
        return;
    ka_page_put(
        page,
        "## Gradients\n\n"
        "Relative error of the norm against the float64 oracle; the baseline is eager PyTorch in the same "
        "dtype against the same oracle.\n\n"
        "| gradient | error | baseline | worst shape |\n|---|---|---|---|\n");
    json_array_foreach((json_t *)gradients, i, gradient)
    {
        static const char *const numbers[] = {"error", "baseline_error"};
        ka_page_put(page, "| ");
        ka_page_put_inline(page, ka_page_text_of(gradient, "name") ? ka_page_text_of(gradient, "name") : "?");
        for (size_t k = 0; k < KA_COUNT(numbers); k++) {
            if (has_number(gradient, numbers[k]))
                ka_page_putf(page, " | %.3g", number_of(gradient, numbers[k]));
            else
                ka_page_put(page, " | -");
        }
        ka_page_put(page, " | ");
        put_dims(page, get(gradient, "worst_shape"));
        ka_page_put(page, " |\n");
    }
    ka_page_put(page, "\n");
}

static void put_cases(struct ka_page *page, const json_t *cases)
{
    size_t i, k;
    json_t *entry, *gradient;
    if (!json_array_size(cases))
        return;
    ka_page_put(page, "## Cases\n\n| shape | case | verdict | errors |\n|---|---|---|---|\n");
    json_array_foreach((json_t *)cases, i, entry)
    {
        ka_page_put(page, "| ");
        put_dims(page, get(entry, "shape"));
        ka_page_put(page, " | ");
        ka_page_put_inline(page, ka_page_text_of(entry, "case") ? ka_page_text_of(entry, "case") : "");
        ka_page_put(page, json_is_true(get(entry, "ok")) ? " | passed | " : " | failed | ");
        json_array_foreach(get(entry, "gradients"), k, gradient)
        {
            ka_page_put(page, k ? ", " : "");
            ka_page_put_inline(page,
                               ka_page_text_of(gradient, "name") ? ka_page_text_of(gradient, "name") : "?");
            ka_page_putf(page, " %.3g", number_of(gradient, "error"));
            if (has_number(gradient, "baseline_error"))
                ka_page_putf(page, " (baseline %.3g)", number_of(gradient, "baseline_error"));
        }
        ka_page_put(page, " |\n");
    }
    ka_page_put(page, "\n");
}

/* Atomics in another order round otherwise: how far that goes, where it could be seen. */
static void put_repeats(struct ka_page *page, const json_t *result)
{
    size_t i, shown = 0;
    json_t *gradient;
    if (ka_page_text_of(result, "repeatability"))
        ka_page_putf(page, "The same backward on the same bytes: %s.\n\n",
                     ka_page_text_of(result, "repeatability"));
    json_array_foreach(get(result, "gradients"), i, gradient)
    {
        const json_t *repeats = get(gradient, "repeats");
        if (!json_is_object(repeats))
            continue;
        ka_page_putf(page, "%s the gradient of ", shown++ ? ";" : "Of the same backward on the same bytes");
        ka_page_put_inline(page, ka_page_text_of(gradient, "name") ? ka_page_text_of(gradient, "name") : "?");
        if (json_is_true(get(repeats, "bit_for_bit")))
            ka_page_putf(page, " is repeatable bit for bit (%.0f runs)", number_of(repeats, "runs"));
        else
            ka_page_putf(page, " varies by up to %.3g, %.3g of what the comparison allows (%.0f runs)",
                         number_of(repeats, "max_abs"), number_of(repeats, "of_limit"),
                         number_of(repeats, "runs"));
    }
    ka_page_put(page, shown ? ".\n\n" : "");
}

static void put_failures(struct ka_page *page, const json_t *failures)
{
    size_t i;
    json_t *failure;
    const char *text = json_string_value(failures);
    if (!json_array_size(failures) && !(text && *text))
        return;
    ka_page_put(page, "## What does not pass\n\n");
    if (text)
        ka_page_putf(page, "%s\n\n", text);
    json_array_foreach((json_t *)failures, i, failure)
    {
        ka_page_put(page, "- ");
        if (get(failure, "shape") && !json_is_null(get(failure, "shape"))) {
            put_dims(page, get(failure, "shape"));
            ka_page_put(page, ": ");
        }
        ka_page_put_inline(page, ka_page_text_of(failure, "text") ? ka_page_text_of(failure, "text")
                                                                  : "no reason given");
        ka_page_put(page, "\n");
    }
    ka_page_put(page, text ? "" : "\n");
}

static void put_skipped(struct ka_page *page, const json_t *skipped)
{
    size_t i;
    json_t *entry;
    if (!json_array_size(skipped))
        return;
    ka_page_put(page, "## Skipped shapes\n\nNot judged, and not counted as passed.\n\n");
    json_array_foreach((json_t *)skipped, i, entry)
    {
        const json_t *dims = get(entry, "dims") ? get(entry, "dims") : get(entry, "shape");
        ka_page_put(page, "- ");
        put_dims(page, dims ? dims : entry);
        if (ka_page_text_of(entry, "reason")) {
            ka_page_put(page, ": ");
            ka_page_put_inline(page, ka_page_text_of(entry, "reason"));
        }
        ka_page_put(page, "\n");
    }
    ka_page_put(page, "\n");
}

static void put_speed(struct ka_page *page, const json_t *speed)
{
    size_t i, k;
    json_t *shape;
    ka_page_put(page, "## Speed\n\n");
    if (!json_is_object(speed)) {
        ka_page_put(page, "Not timed: there is no time without a GPU to measure it on.\n\n");
        return;
    }
    if (has_number(speed, "geomean_vs_compile"))
        ka_page_putf(page, "Geometric mean against `torch.compile`: %.2fx.\n\n",
                     number_of(speed, "geomean_vs_compile"));
    json_array_foreach(get(speed, "per_shape"), i, shape)
    {
        const char *name, *comma = "";
        json_t *value;
        ka_page_put(page, "- ");
        put_dims(page, get(shape, "dims") ? get(shape, "dims") : get(shape, "shape"));
        ka_page_put(page, ": ");
        k = 0;
        json_object_foreach(shape, name, value)
        {
            if (!json_is_number(value) || k++ > 16)
                continue;
            ka_page_put(page, comma);
            ka_page_put_inline(page, name);
            ka_page_putf(page, " %.4g", json_number_value(value));
            comma = ", ";
        }
        ka_page_put(page, "\n");
    }
    ka_page_put(page, "\n");
}

/* One row of the comparison: a number of each side, "-" where it is missing. */
static void put_fact_row(struct ka_page *page, const char *title, bool both, double before, double after,
                         bool bytes)
{
    char cells[2][40];
    const double values[2] = {before, after};
    for (int i = 0; i < 2; i++) {
        if (!(values[i] >= 0))
            snprintf(cells[i], sizeof(cells[i]), "-");
        else if (bytes)
            ka_describe_bytes(values[i], cells[i], sizeof(cells[i]));
        else
            snprintf(cells[i], sizeof(cells[i]), "%.0f", values[i]);
    }
    if (both)
        ka_page_putf(page, "| %s | %s | %s |\n", title, cells[0], cells[1]);
    else
        ka_page_putf(page, "| %s | %s |\n", title, cells[1]);
}

static double cost_of(const json_t *result, const char *name)
{
    return has_number(result, name) ? number_of(result, name) : -1;
}

static void put_facts(struct ka_page *page, const json_t *result)
{
    const json_t *first = get(result, "measured_before"), *last = get(result, "measured");
    bool both = json_is_object(first);
    struct ka_describe_sums a, b;
    struct ka_buf detail = {0};
    if (!json_is_object(last))
        return;
    ka_describe_sum(first, &a);
    ka_describe_sum(last, &b);
    ka_page_put(page, "## Compile facts\n\n");
    ka_page_put(page, both ? "| backward | first verified | best |\n|---|---|---|\n"
                           : "| backward | best |\n|---|---|\n");
    put_fact_row(page, "launches", both, a.launches, b.launches, false);
    put_fact_row(page, "bytes read", both, a.bytes_read, b.bytes_read, true);
    put_fact_row(page, "bytes written", both, a.bytes_written, b.bytes_written, true);
    put_fact_row(page, "atomic elements", both, a.atomics, b.atomics, false);
    put_fact_row(page, "registers, most of a kernel", both, a.registers, b.registers, false);
    put_fact_row(page, "spills, most of a kernel", both, a.spills, b.spills, false);
    put_fact_row(page, "shared memory, most of a kernel", both, a.shared, b.shared, true);
    put_fact_row(page, "modelled cost", both, cost_of(result, "modelled_cost_before"),
                 cost_of(result, "modelled_cost"), false);
    ka_page_put(
        page,
        "\nThe modelled cost is computed from the counts above to compare schedules of this one backward. "
        "It is not a time, and no time follows from it.\n\n");
    if (page->rc == 0)
        page->rc = ka_describe_facts(last, &detail);
    if (detail.len) {
        ka_page_put(page, ka_buf_str(&detail));
        ka_page_put(page, "\n");
    }
    ka_buf_free(&detail);
}

static void put_draft(struct ka_page *page, const json_t *result)
{
    json_t *draft = json_object();
    struct ka_buf text = {0};
    json_object_set(draft, "report", (json_t *)get(result, "draft_report"));
    if (page->rc == 0)
        page->rc = ka_describe_draft(draft, &text);
    if (text.len) {
        ka_page_put(page, "## The differentiator's decisions\n\n");
        ka_page_put(page, ka_buf_str(&text));
        ka_page_put(page, "\n");
    }
    json_decref(draft);
    ka_buf_free(&text);
}

static void put_history(struct ka_page *page, const json_t *history)
{
    size_t i;
    json_t *entry;
    if (!json_array_size(history))
        return;
    ka_page_put(page, "## Attempts\n\n");
    json_array_foreach((json_t *)history, i, entry)
    {
        struct ka_buf line = {0};
        if (page->rc == 0)
            page->rc = ka_describe_attempt(entry, &line);
        ka_page_putf(page, "%zu. ", i + 1);
        ka_page_put_inline(page, ka_buf_str(&line));
        ka_page_put(page, "\n");
        ka_buf_free(&line);
    }
    ka_page_put(page, "\n");
}

static void put_retrieved(struct ka_page *page, const json_t *retrieved)
{
    size_t i;
    json_t *pair;
    if (!json_array_size(retrieved))
        return;
    ka_page_put(page, "## Retrieved pairs\n\n| pair | similarity |\n|---|---|\n");
    json_array_foreach((json_t *)retrieved, i, pair)
    {
        ka_page_put(page, "| ");
        ka_page_put_inline(page, ka_page_text_of(pair, "id") ? ka_page_text_of(pair, "id") : "?");
        ka_page_putf(page, " | %.3f |\n", number_of(pair, "similarity"));
    }
    ka_page_put(page, "\n");
}

static void put_answers(struct ka_page *page, const json_t *answers)
{
    size_t i;
    json_t *answer;
    if (!json_array_size(answers))
        return;
    ka_page_put(page,
                "## Device answers\n\n"
                "The file asked these of the device; without a GPU they were answered for the target.\n\n"
                "| line | asked | answer |\n|---|---|---|\n");
    json_array_foreach((json_t *)answers, i, answer)
    {
        ka_page_put(page, "| ");
        put_dims(page, get(answer, "line") ? get(answer, "line") : json_null());
        ka_page_put(page, " | ");
        ka_page_put_inline(page, ka_page_text_of(answer, "asked") ? ka_page_text_of(answer, "asked") : "?");
        ka_page_put(page, " | ");
        put_dims(page, get(answer, "answer") ? get(answer, "answer") : json_null());
        ka_page_put(page, " |\n");
    }
    ka_page_put(page, "\n");
}

int ka_report_markdown(const json_t *result, struct ka_buf *out, struct ka_err *err)
{
    if (!json_is_object(result))
        return ka_fail(err, -EINVAL, "the result to report on is not a JSON object");
    struct ka_page page = {{0}, 0};
    put_title(&page, result);
    put_summary(&page, result);
    put_error(&page, get(result, "error"));
    put_failures(&page, get(result, "failures"));
    put_gradients(&page, get(result, "gradients"));
    put_repeats(&page, result);
    put_cases(&page, get(result, "cases"));
    put_skipped(&page, get(get(result, "shapes"), "skipped"));
    if (ka_page_text_of(result, "verdict") && strcmp(ka_page_text_of(result, "verdict"), "verified") == 0)
        put_speed(&page, get(result, "speed"));
    put_facts(&page, result);
    ka_timeline_markdown(&page, get(result, "children"));
    put_draft(&page, result);
    put_history(&page, get(result, "history"));
    put_retrieved(&page, get(result, "retrieved"));
    put_answers(&page, get(result, "device_answers"));
    while (page.text.len > 1 && page.text.data[page.text.len - 2] == '\n')
        page.text.data[--page.text.len] = '\0'; /* one newline at the end */
    int rc = page.rc ? page.rc : ka_buf_add(out, ka_buf_str(&page.text), page.text.len);
    if (rc)
        ka_fail(err, rc, "no room for the report");
    ka_buf_free(&page.text);
    return rc;
}
