/* A text that is written piece by piece: what both forms of the report have in common. Pure. */
#ifndef KA_PAGE_H
#define KA_PAGE_H

#include "base/base.h"

#include <jansson.h>

/* After a failure the rest is skipped, and `rc` tells. The writer frees `text`. */
struct ka_page {
    struct ka_buf text;
    int rc;
};

void ka_page_put(struct ka_page *page, const char *text);
void ka_page_putf(struct ka_page *page, const char *fmt, ...) KA_PRINTF(2, 3);

/* Text as it was given: for HTML, also in quoted attributes; for a line or a cell of Markdown. */
void ka_page_put_escaped(struct ka_page *page, const char *text);
void ka_page_put_inline(struct ka_page *page, const char *text);

/* A member that is a text and not empty (borrowed), NULL otherwise. */
const char *ka_page_text_of(const json_t *object, const char *name);
/* The result's verdict as people say it; "no verdict" where there is none. */
const char *ka_page_verdict(const json_t *result);

#endif
