/* Markdown and HTML beside each other. Must not know what a page is about. */
#include "page.h"

#include "describe.h"
#include "fields.h"

#include <string.h>

static const char *const marks[][2] = {
    [KA_HEADING] = {"## ", "<h2>"},
    [KA_HEADING_END] = {"\n\n", "</h2>\n"},
    [KA_PARAGRAPH] = {"", "<p>"},
    [KA_PARAGRAPH_END] = {"\n\n", "</p>\n"},
    [KA_LIST] = {"", "<ol>\n"},
    [KA_ITEM] = {"", "<li>"},
    [KA_ITEM_END] = {"\n", "</li>\n"},
    [KA_LIST_END] = {"\n", "</ol>\n"},
    [KA_FACTS] = {"| | |\n|---|---|\n", "<table>\n"},
    [KA_FACT] = {"| ", "<tr><th>"},
    [KA_FACT_VALUE] = {" | ", "</th><td>"},
    [KA_FACT_END] = {" |\n", "</td></tr>\n"},
    [KA_ROW] = {"|", "<tr>"},
    [KA_CELL] = {" ", "<td>"},
    [KA_NUMBER] = {" ", "<td class=\"n\">"},
    [KA_CELL_END] = {" |", "</td>"},
    [KA_ROW_END] = {"\n", "</tr>\n"},
    [KA_TABLE_END] = {"\n", "</table>\n"},
};

void ka_page_mark(struct ka_page *page, enum ka_page_mark mark)
{
    ka_page_put(page, marks[mark][page->form]);
}

static void put_escaped(struct ka_page *page, const char *text)
{
    for (; *text; text++) {
        unsigned char c = (unsigned char)*text;
        const char *entity = c == '<'    ? "&lt;"
                             : c == '>'  ? "&gt;"
                             : c == '&'  ? "&amp;"
                             : c == '"'  ? "&quot;"
                             : c == '\'' ? "&#39;"
                                         : NULL;
        if (entity)
            ka_page_put(page, entity);
        else if (c >= ' ' || c == '\n' || c == '\t')
            ka_buf_add(&page->text, text, 1);
    }
}

/* No newlines, no column separators. */
static void put_inline(struct ka_page *page, const char *text)
{
    for (; *text; text++) {
        if (*text == '|')
            ka_page_put(page, "\\|");
        else
            ka_buf_add(&page->text, *text == '\n' || *text == '\r' ? " " : text, 1);
    }
}

void ka_page_text(struct ka_page *page, const char *text)
{
    (page->form == KA_PAGE_HTML ? put_escaped : put_inline)(page, text);
}

void ka_page_heading(struct ka_page *page, const char *markup)
{
    ka_page_mark(page, KA_HEADING);
    ka_page_put(page, markup);
    ka_page_mark(page, KA_HEADING_END);
}

void ka_page_paragraph(struct ka_page *page, const char *markup)
{
    ka_page_mark(page, KA_PARAGRAPH);
    ka_page_put(page, markup);
    ka_page_mark(page, KA_PARAGRAPH_END);
}

void ka_page_value(struct ka_page *page, const json_t *value)
{
    KA_AUTO_BUF struct ka_buf text = {0};
    if (ka_describe_dims(value, &text))
        page->text.failed = text.failed;
    bool none = json_is_null(value) || (page->form == KA_PAGE_HTML && !text.len);
    ka_page_text(page, none ? "-" : ka_buf_str(&text));
}

void ka_page_number(struct ka_page *page, const json_t *object, const char *name)
{
    const json_t *number = json_object_get(object, name);
    ka_page_mark(page, KA_NUMBER);
    if (json_is_number(number))
        ka_page_putf(page, "%.3g", json_number_value(number));
    else
        ka_page_put(page, "-");
    ka_page_mark(page, KA_CELL_END);
}

const char *ka_page_text_of(const json_t *object, const char *name)
{
    const char *text = ka_text_of(object, name, "");
    return *text ? text : NULL;
}

const char *ka_page_verdict(const json_t *result)
{
    static const struct {
        const char *verdict, *title;
    } titles[] = {{"verified", "verified"},
                  {"not_verified", "not verified"},
                  {"unusable", "the forward file cannot be used"},
                  {"waiting", "waiting for an answer"},
                  {"error", "ended with an error"}};
    const char *verdict = ka_page_text_of(result, "verdict");
    for (size_t i = 0; verdict && i < KA_COUNT(titles); i++)
        if (strcmp(verdict, titles[i].verdict) == 0)
            return titles[i].title;
    return verdict ? verdict : "no verdict";
}

bool ka_page_verified(const json_t *result)
{
    return strcmp(ka_text_of(result, "verdict", ""), "verified") == 0;
}
