/* What a run found, told for people: one function a section, each silent when it has nothing to say. What is
 * told in both forms goes through the marks of page.h. Must not decide anything. */
#include "report.h"

#include "base/each.h"
#include "describe.h"
#include "fields.h"
#include "report_html.h"
#include "timeline.h"

#include <errno.h>
#include <stdio.h>

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

static bool is_html(const struct ka_page *page)
{
    return page->form == KA_PAGE_HTML;
}

static void put_text_of(struct ka_page *page, const json_t *object, const char *name, const char *otherwise)
{
    const char *text = ka_page_text_of(object, name);
    ka_page_text(page, text ? text : otherwise);
}

/* Lines that stand as they are; in Markdown between `before` and `after`. */
static void put_lines(struct ka_page *page, const char *before, const char *lines, const char *after)
{
    ka_page_put(page, is_html(page) ? "<pre>" : before);
    if (is_html(page))
        ka_page_text(page, lines);
    else
        ka_page_put(page, lines);
    ka_page_put(page, is_html(page) ? "</pre>\n" : after);
}

static void open_fact(struct ka_page *page, const char *title)
{
    ka_page_mark(page, KA_FACT);
    ka_page_put(page, title);
    ka_page_mark(page, KA_FACT_VALUE);
}

static void put_fact(struct ka_page *page, const char *title, const json_t *value)
{
    if (!value || json_is_null(value))
        return;
    open_fact(page, title);
    ka_page_value(page, value);
    ka_page_mark(page, KA_FACT_END);
}

static void put_count(struct ka_page *page, const char *title, const json_t *object, const char *part,
                      const char *whole)
{
    if (!has_number(object, whole) || !has_number(object, part))
        return;
    open_fact(page, title);
    ka_page_putf(page, "%.0f of %.0f", number_of(object, part), number_of(object, whole));
    ka_page_mark(page, KA_FACT_END);
}

/* ---- sections of both */

static void put_name(struct ka_page *page, const json_t *result)
{
    put_text_of(page, result, "stub", "kernel-agent");
    ka_page_put(page, ": ");
}

static void put_title(struct ka_page *page, const json_t *result)
{
    ka_page_put(page, is_html(page) ? ka_html_head : "# ");
    put_name(page, result);
    ka_page_text(page, ka_page_verdict(result));
    if (!is_html(page)) {
        ka_page_put(page, "\n\n");
        return;
    }
    ka_page_put(page, "</title>\n</head>\n<body>\n<h1>");
    put_name(page, result);
    ka_page_putf(page, "<span class=\"%s\">", ka_page_verified(result) ? "good" : "bad");
    ka_page_text(page, ka_page_verdict(result));
    ka_page_put(page, "</span></h1>\n");
}

/* One fact for each member of `things`, a sentence by name. */
static void put_each(struct ka_page *page, const char *title, const json_t *things)
{
    KA_EACH_MEMBER(things, name, why) {
        ka_page_mark(page, KA_FACT);
        ka_page_put(page, title);
        ka_page_text(page, name);
        ka_page_mark(page, KA_FACT_VALUE);
        ka_page_text(page, json_is_string(why) ? json_string_value(why) : "?");
        ka_page_mark(page, KA_FACT_END);
    }
}

/* Numbers and flags that were varied, and all that was not. */
static void put_calls(struct ka_page *page, const json_t *oracles)
{
    json_t *varied = json_object_get(get(oracles, "scalars"), "varied");
    size_t told = 0;
    KA_EACH(varied, i, item) {
        if (get(item, "values"))
            continue; /* the same name once more */
        if (!told)
            open_fact(page, "also called with another");
        ka_page_put(page, told++ ? ", " : "");
        put_text_of(page, item, "name", "?");
    }
    if (told)
        ka_page_mark(page, KA_FACT_END);
    put_each(page, "not checked: the gradient of ", get(oracles, "unasked"));
    put_each(page, "size that the forward does not take: ", get(oracles, "sizes"));
    const json_t *crashed = get(oracles, "crashed");
    if (crashed) {
        open_fact(page, "cases in which the oracle itself failed, on which nothing is checked");
        ka_page_putf(page, "%lld: ", (long long)json_integer_value(get(crashed, "cases")));
        put_text_of(page, crashed, "message", "?");
        ka_page_mark(page, KA_FACT_END);
    }
}

/* What stands beside the oracle made from the forward. */
static void put_oracles(struct ka_page *page, const json_t *oracles)
{
    const json_t *differences = get(oracles, "finite_differences");
    const char *reason = ka_page_text_of(differences, "reason");
    put_fact(page, "reference() against the oracle", get(oracles, "reference"));
    if (!ka_page_text_of(differences, "verdict"))
        return;
    open_fact(page, "finite differences against the oracle");
    put_text_of(page, differences, "verdict", "");
    ka_page_putf(page, ": %.0f slopes agree, %.0f tell nothing", number_of(differences, "agree"),
                 number_of(differences, "open"));
    if (reason) {
        ka_page_put(page, " (");
        ka_page_text(page, reason);
        ka_page_put(page, ")");
    }
    ka_page_mark(page, KA_FACT_END);
}

static void put_costs(struct ka_page *page, const json_t *result)
{
    const json_t *llm = get(result, "llm");
    if (number_of(llm, "requests") > 0) {
        open_fact(page, "model");
        ka_page_putf(page, "%.0f requests, %.0f tokens in", number_of(llm, "requests"),
                     number_of(llm, "tokens_in"));
        if (number_of(llm, "tokens_cached") > 0)
            ka_page_putf(page, " (%.0f of them cached)", number_of(llm, "tokens_cached"));
        ka_page_putf(page, ", %.0f out", number_of(llm, "tokens_out"));
        if (has_number(llm, "cost"))
            ka_page_putf(page, ", cost %.4f", number_of(llm, "cost"));
        ka_page_mark(page, KA_FACT_END);
    }
    if (has_number(result, "seconds")) {
        open_fact(page, "seconds for the whole run");
        ka_page_putf(page, "%.1f", number_of(result, "seconds"));
        ka_page_mark(page, KA_FACT_END);
    }
}

static void put_summary(struct ka_page *page, const json_t *result)
{
    const json_t *shapes = get(result, "shapes"), *oracles = get(result, "oracles");
    ka_page_mark(page, KA_FACTS);
    put_fact(page, "forward file", get(result, "file"));
    put_fact(page, "pair", get(result, "pair"));
    put_fact(page, "best candidate, not verified", get(result, "best"));
    put_fact(page, "device", get(result, "device"));
    put_count(page, "required shapes passed", shapes, "passed", "required");
    put_count(page, "hidden shapes passed", shapes, "hidden_passed", "hidden");
    if (!is_html(page)) {
        if (number_of(shapes, "optional") > 0)
            put_count(page, "optional shapes passed", shapes, "optional_passed", "optional");
        put_oracles(page, oracles);
        put_calls(page, oracles);
    }
    put_fact(page, "other upstreams and inputs tried on", get(result, "variants_on"));
    put_fact(page, "draft", get(result, "draft"));
    put_fact(page, "attempts", get(result, "attempts"));
    put_fact(page, "roll-backs", get(result, "rollbacks"));
    put_fact(page, "atomic elements in the backward", get(result, "atomics"));
    put_fact(page, "tape bytes", get(result, "tape_bytes"));
    if (!is_html(page))
        put_costs(page, result);
    ka_page_mark(page, KA_TABLE_END);
}

static void put_error(struct ka_page *page, const json_t *error)
{
    ka_page_mark(page, KA_PARAGRAPH);
    if (ka_page_text_of(error, "file")) {
        put_text_of(page, error, "file", "");
        if (has_number(error, "line"))
            ka_page_putf(page, ":%.0f", number_of(error, "line"));
        ka_page_put(page, ": ");
    }
    put_text_of(page, error, "message", "no message");
    ka_page_mark(page, KA_PARAGRAPH_END);
    if (ka_page_text_of(error, "remedy")) {
        ka_page_mark(page, KA_PARAGRAPH);
        ka_page_put(page, "What to do: ");
        put_text_of(page, error, "remedy", "");
        ka_page_mark(page, KA_PARAGRAPH_END);
    }
    if (ka_page_text_of(error, "traceback"))
        put_lines(page, "```\n", ka_page_text_of(error, "traceback"), "\n```\n\n");
}

static void put_failures(struct ka_page *page, const json_t *failures)
{
    put_lines(page, "", json_string_value(failures), "\n\n");
}

static void put_gradients(struct ka_page *page, const json_t *gradients)
{
    ka_page_paragraph(page, is_html(page)
                                ? "Norm of the difference to the float64 oracle over the norm of the "
                                  "oracle's gradient, on the worst shape."
                                : "Relative error of the norm against the float64 oracle; the baseline "
                                  "is eager PyTorch in the same dtype against the same oracle.");
    ka_page_put(page, is_html(page)
                          ? "<table>\n<tr><th>gradient</th><th>error</th><th>eager</th><th>tolerated</th>"
                            "<th>worst shape</th></tr>\n"
                          : "| gradient | error | baseline | worst shape |\n|---|---|---|---|\n");
    KA_EACH(gradients, i, gradient) {
        ka_page_mark(page, KA_ROW);
        ka_page_mark(page, KA_CELL);
        put_text_of(page, gradient, "name", "?");
        ka_page_mark(page, KA_CELL_END);
        ka_page_number(page, gradient, "error");
        ka_page_number(page, gradient, "baseline_error");
        if (is_html(page))
            ka_page_number(page, gradient, "limit");
        ka_page_mark(page, KA_CELL);
        ka_page_value(page, get(gradient, "worst_shape"));
        ka_page_mark(page, KA_CELL_END);
        ka_page_mark(page, KA_ROW_END);
    }
    ka_page_mark(page, KA_TABLE_END);
    if (is_html(page))
        ka_html_plot_gradients(page, gradients);
}

/* ---- what was checked: an item a line */

static void item(struct ka_page *page, const char *before, const char *text, const char *between,
                 const char *more)
{
    ka_page_mark(page, KA_ITEM);
    if (!is_html(page))
        ka_page_put(page, "- ");
    ka_page_put(page, before);
    ka_page_text(page, text ? text : "?");
    if (more) {
        ka_page_put(page, between);
        ka_page_text(page, more);
    }
    ka_page_mark(page, KA_ITEM_END);
}

static void put_tried(struct ka_page *page, const json_t *kinds)
{
    KA_AUTO_BUF struct ka_buf text = {0};
    KA_EACH(kinds, i, kind) {
        const char *name = ka_page_text_of(kind, "name");
        ka_buf_printf(&text, "%s%s (%.0f)", i ? "; " : "", name ? name : "?", number_of(kind, "cases"));
    }
    if (text.len)
        item(page, "kinds of cases, and how many of each: ", ka_buf_str(&text), "", NULL);
}

static void put_scaled(struct ka_page *page, const json_t *scaled)
{
    KA_EACH(scaled, i, entry) {
        KA_AUTO_BUF struct ka_buf own = {0}, checked = {0};
        ka_describe_dims(get(entry, "dims"), &own);
        ka_describe_dims(get(entry, "checked"), &checked);
        item(page, json_is_true(get(entry, "required")) ? "a required size was scaled: " : "scaled: ",
             ka_buf_str(&own), " was checked at ", ka_buf_str(&checked));
    }
}

static void put_texts(struct ka_page *page, const char *before, const json_t *texts)
{
    KA_EACH(texts, i, text)
        item(page, before, json_string_value(text), "", NULL);
}

static void put_checked(struct ka_page *page, const json_t *checked)
{
    ka_page_mark(page, KA_LIST);
    put_tried(page, get(checked, "kinds"));
    KA_EACH(get(checked, "left_out"), i, entry)
        item(page, "not tried: ", ka_page_text_of(entry, "name"), ": ", ka_page_text_of(entry, "reason"));
    put_scaled(page, get(checked, "scaled"));
    put_texts(page, "never varied: ", get(checked, "never_varied"));
    put_texts(page, "not seen: ", get(checked, "not_seen"));
    put_texts(page, "note: ", get(checked, "notes"));
    put_texts(page, "note: ", get(checked, "remarks"));
    ka_page_mark(page, KA_LIST_END);
}

static void put_speed(struct ka_page *page, const json_t *result)
{
    if (!ka_page_verified(result))
        return;
    ka_page_heading(page, "Speed");
    KA_AUTO_BUF struct ka_buf text = {0};
    ka_describe_times(get(get(result, "measured"), "times"), &text);
    ka_page_paragraph(page,
                      text.len ? text.data : "Not timed: there is no time without a GPU to measure it on.");
    KA_AUTO_BUF struct ka_buf parts = {0};
    ka_describe_kernels(get(get(result, "measured"), "times"), &parts);
    if (parts.len)
        ka_page_paragraph(page, parts.data);
}

static void put_children(struct ka_page *page, const json_t *children)
{
    (is_html(page) ? ka_timeline_html : ka_timeline_markdown)(page, children);
}

static void put_decisions(struct ka_page *page, const json_t *report)
{
    json_auto_t *draft = json_pack("{s:O*}", "report", report);
    KA_AUTO_BUF struct ka_buf text = {0};
    ka_describe_draft(draft, &text);
    if (text.len) {
        ka_page_heading(page, "The differentiator's decisions");
        put_lines(page, "", text.data, "\n");
    }
}

static void put_history(struct ka_page *page, const json_t *history)
{
    ka_page_mark(page, KA_LIST);
    KA_EACH(history, i, entry) {
        KA_AUTO_BUF struct ka_buf line = {0};
        ka_describe_attempt(entry, &line);
        ka_page_mark(page, KA_ITEM);
        if (!is_html(page))
            ka_page_putf(page, "%zu. ", i + 1);
        ka_page_text(page, ka_buf_str(&line));
        ka_page_mark(page, KA_ITEM_END);
    }
    ka_page_mark(page, KA_LIST_END);
}

/* ---- sections of Markdown alone */

/* Atomics in another order round otherwise: how far that goes, where it could be seen. */
static void put_repeats(struct ka_page *page, const json_t *result)
{
    size_t shown = 0;
    if (ka_page_text_of(result, "repeatability"))
        ka_page_putf(page, "The same backward on the same bytes: %s.\n\n",
                     ka_page_text_of(result, "repeatability"));
    KA_EACH(get(result, "gradients"), i, gradient) {
        const json_t *repeats = get(gradient, "repeats");
        if (!json_is_object(repeats))
            continue;
        ka_page_putf(page, "%s the gradient of ", shown++ ? ";" : "Of the same backward on the same bytes");
        put_text_of(page, gradient, "name", "?");
        if (json_is_true(get(repeats, "bit_for_bit")))
            ka_page_putf(page, " is repeatable bit for bit (%.0f runs)", number_of(repeats, "runs"));
        else
            ka_page_putf(page, " varies by up to %.3g, %.3g of what the comparison allows (%.0f runs)",
                         number_of(repeats, "max_abs"), number_of(repeats, "of_limit"),
                         number_of(repeats, "runs"));
    }
    ka_page_put(page, shown ? ".\n\n" : "");
}

static void put_races(struct ka_page *page, const json_t *races)
{
    const json_t *ordered = get(races, "ordered_by_atomics");
    ka_page_put(page, !json_is_true(get(races, "looked_for"))
                          ? "Races between programs were not looked for: only the interpreter sees them"
                      : json_is_true(get(races, "small_sizes"))
                          ? "Races between programs were looked for in every launch of small sizes"
                          : "Races between programs were looked for in every launch");
    KA_EACH(ordered, i, kernel) {
        ka_page_put(page, i ? ", " : "; taken at their word, since atomics put their programs in order: ");
        ka_page_text(page, json_string_value(kernel) ? json_string_value(kernel) : "?");
    }
    ka_page_put(page, ".\n\n");
}

static void put_skipped(struct ka_page *page, const json_t *shapes)
{
    json_t *skipped = json_object_get(shapes, "skipped");
    if (!json_array_size(skipped))
        return;
    ka_page_put(page, "## Skipped shapes\n\nNot judged, and not counted as passed.\n\n");
    KA_EACH(skipped, i, entry) {
        const json_t *dims = get(entry, "dims") ? get(entry, "dims") : get(entry, "shape");
        ka_page_put(page, "- ");
        ka_page_value(page, dims ? dims : entry);
        if (ka_page_text_of(entry, "reason")) {
            ka_page_put(page, ": ");
            put_text_of(page, entry, "reason", "");
        }
        ka_page_put(page, "\n");
    }
    ka_page_put(page, "\n");
}

/* "-" for what is missing. */
static void put_measure(struct ka_page *page, const char *title, double value, bool bytes)
{
    char cell[40] = "-";
    if (value >= 0 && bytes)
        ka_describe_bytes(value, cell, sizeof(cell));
    else if (value >= 0)
        snprintf(cell, sizeof(cell), "%.0f", value);
    ka_page_putf(page, "| %s | %s |\n", title, cell);
}

static void put_facts(struct ka_page *page, const json_t *result)
{
    const json_t *measured = get(result, "measured");
    struct ka_describe_sums sums;
    KA_AUTO_BUF struct ka_buf detail = {0};
    if (!json_is_object(measured))
        return;
    ka_describe_sum(measured, &sums);
    ka_page_put(page, "## Compile facts\n\n| backward | best |\n|---|---|\n");
    put_measure(page, "launches", sums.launches, false);
    put_measure(page, "bytes read", sums.bytes_read, true);
    put_measure(page, "bytes written", sums.bytes_written, true);
    put_measure(page, "atomic elements", sums.atomics, false);
    put_measure(page, "registers, most of a kernel", sums.registers, false);
    put_measure(page, "spills, most of a kernel", sums.spills, false);
    put_measure(page, "shared memory, most of a kernel", sums.shared, true);
    if (has_number(result, "modelled_cost")) {
        put_measure(page, "modelled cost", number_of(result, "modelled_cost"), false);
        ka_page_put(page,
                    "\nThe modelled cost is computed from the counts above to compare schedules of this one "
                    "backward. It is not a time, and no time follows from it.\n");
    }
    ka_page_put(page, "\n");
    ka_describe_facts(measured, &detail);
    if (detail.len)
        ka_page_putf(page, "%s\n", detail.data);
}

static void put_retrieved(struct ka_page *page, const json_t *retrieved)
{
    ka_page_put(page, "| pair | similarity |\n|---|---|\n");
    KA_EACH(retrieved, i, pair) {
        ka_page_put(page, "| ");
        put_text_of(page, pair, "id", "?");
        ka_page_putf(page, " | %.3f |\n", number_of(pair, "similarity"));
    }
    ka_page_put(page, "\n");
}

static void put_answers(struct ka_page *page, const json_t *answers)
{
    ka_page_put(page,
                "The file asked these of the device; without a GPU they were answered for the target.\n\n"
                "| line | asked | answer |\n|---|---|---|\n");
    KA_EACH(answers, i, answer) {
        ka_page_put(page, "| ");
        ka_page_value(page, get(answer, "line") ? get(answer, "line") : json_null());
        ka_page_put(page, " | ");
        put_text_of(page, answer, "asked", "?");
        ka_page_put(page, " | ");
        ka_page_value(page, get(answer, "answer") ? get(answer, "answer") : json_null());
        ka_page_put(page, " |\n");
    }
    ka_page_put(page, "\n");
}

/* ---- the whole */

enum { MARKDOWN = 1 << KA_PAGE_MARKDOWN, HTML = 1 << KA_PAGE_HTML, BOTH = MARKDOWN | HTML };

static const struct {
    void (*put)(struct ka_page *page, const json_t *value);
    int forms;
    const char *of;      /* the member that is told; NULL: the whole result */
    json_type type;      /* what it must be, and not empty */
    const char *heading; /* NULL: the section has its own, or none */
} sections[] = {
    {put_title, BOTH, NULL, JSON_OBJECT, NULL},
    {put_summary, BOTH, NULL, JSON_OBJECT, NULL},
    {put_error, BOTH, "error", JSON_OBJECT, "Why it ended"},
    {put_failures, BOTH, "failures", JSON_STRING, "What does not pass"},
    {put_gradients, BOTH, "gradients", JSON_ARRAY, "Gradients"},
    {put_checked, BOTH, "checked", JSON_OBJECT, "What was checked"},
    {put_repeats, MARKDOWN, NULL, JSON_OBJECT, NULL},
    {put_races, MARKDOWN, "races", JSON_OBJECT, NULL},
    {ka_html_shapes, HTML, "per_shape", JSON_ARRAY, "Shapes"},
    {put_skipped, MARKDOWN, "shapes", JSON_OBJECT, NULL},
    {put_speed, BOTH, NULL, JSON_OBJECT, NULL},
    {put_facts, MARKDOWN, NULL, JSON_OBJECT, NULL},
    {put_children, BOTH, "children", JSON_ARRAY, NULL},
    {put_decisions, BOTH, "draft_report", JSON_OBJECT, NULL},
    {put_history, BOTH, "history", JSON_ARRAY, "Attempts"},
    {put_retrieved, MARKDOWN, "retrieved", JSON_ARRAY, "Retrieved pairs"},
    {put_answers, MARKDOWN, "device_answers", JSON_ARRAY, "Device answers"},
};

static void put_section(struct ka_page *page, size_t i, const json_t *result)
{
    const json_t *value = sections[i].of ? get(result, sections[i].of) : result;
    bool empty = !json_object_size(value) && !json_array_size(value) && !json_string_length(value);
    if (!(sections[i].forms & 1 << page->form) || (empty && sections[i].of) ||
        json_typeof(value) != sections[i].type)
        return;
    if (sections[i].heading)
        ka_page_heading(page, sections[i].heading);
    sections[i].put(page, value);
}

static int report(const json_t *result, enum ka_page_form form, struct ka_buf *out, struct ka_err *err)
{
    if (!json_is_object(result))
        return ka_fail(err, -EINVAL, "the result to report on is not a JSON object");
    struct ka_page page = {.form = form};
    for (size_t i = 0; i < KA_COUNT(sections); i++)
        put_section(&page, i, result);
    if (is_html(&page))
        ka_page_put(&page, "</body>\n</html>\n");
    while (page.text.len > 1 && page.text.data[page.text.len - 2] == '\n')
        page.text.data[--page.text.len] = '\0'; /* one newline at the end */
    int rc = page.text.failed ? page.text.failed : ka_buf_add(out, page.text.data, page.text.len);
    if (rc)
        ka_fail(err, rc, "no room for the report");
    ka_buf_free(&page.text);
    return rc;
}

int ka_report_markdown(const json_t *result, struct ka_buf *out, struct ka_err *err)
{
    return report(result, KA_PAGE_MARKDOWN, out, err);
}

int ka_report_html(const json_t *result, struct ka_buf *out, struct ka_err *err)
{
    return report(result, KA_PAGE_HTML, out, err);
}
