/* A text that is written piece by piece: what both forms of the report have in common. The same calls make
 * Markdown or a page of HTML. Pure.
 *
 * The first failure is kept in `text.failed`, and the rest is skipped. The writer frees `text`. */
#ifndef KA_PAGE_H
#define KA_PAGE_H

#include "base/base.h"

#include <jansson.h>

enum ka_page_form { KA_PAGE_MARKDOWN, KA_PAGE_HTML };

struct ka_page {
    struct ka_buf text;
    enum ka_page_form form;
};

/* Markup as it stands. */
#define ka_page_put(page, markup) ka_buf_puts(&(page)->text, markup)
#define ka_page_putf(page, ...) ka_buf_printf(&(page)->text, __VA_ARGS__)

/* Text as it was given: nothing in it becomes markup, in quoted attributes either. In Markdown it stays on
 * its line and in its cell. */
void ka_page_text(struct ka_page *page, const char *text);

/* What stands around texts. A fact is a row of a table that has no titles: its name and its value. */
enum ka_page_mark {
    KA_HEADING,
    KA_HEADING_END,
    KA_PARAGRAPH,
    KA_PARAGRAPH_END,
    KA_LIST,
    KA_ITEM,
    KA_ITEM_END,
    KA_LIST_END,
    KA_FACTS,
    KA_FACT,
    KA_FACT_VALUE,
    KA_FACT_END,
    KA_ROW,
    KA_CELL,
    KA_NUMBER, /* a cell too */
    KA_CELL_END,
    KA_ROW_END,
    KA_TABLE_END, /* of facts too */
};
void ka_page_mark(struct ka_page *page, enum ka_page_mark mark);

void ka_page_heading(struct ka_page *page, const char *markup);
void ka_page_paragraph(struct ka_page *page, const char *markup);

/* Dims or any other value in words; a dash for null, and in HTML for none. */
void ka_page_value(struct ka_page *page, const json_t *value);
/* A cell with this number of the object, or a dash. */
void ka_page_number(struct ka_page *page, const json_t *object, const char *name);

/* A member that is a text and not empty (borrowed), NULL otherwise. */
const char *ka_page_text_of(const json_t *object, const char *name);
/* The result's verdict as people say it; "no verdict" where there is none. */
const char *ka_page_verdict(const json_t *result);
bool ka_page_verified(const json_t *result);

#endif
