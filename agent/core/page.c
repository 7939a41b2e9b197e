#include "page.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void ka_page_put(struct ka_page *page, const char *text)
{
    if (page->rc == 0)
        page->rc = ka_buf_puts(&page->text, text);
}

void ka_page_putf(struct ka_page *page, const char *fmt, ...)
{
    char *text = NULL;
    va_list args;
    va_start(args, fmt);
    int len = vasprintf(&text, fmt, args);
    va_end(args);
    if (len < 0) {
        page->rc = page->rc ? page->rc : -ENOMEM;
        return;
    }
    ka_page_put(page, text);
    free(text);
}

void ka_page_put_escaped(struct ka_page *page, const char *text)
{
    for (; *text && page->rc == 0; text++) {
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
            page->rc = ka_buf_add(&page->text, text, 1);
    }
}

/* No newlines, no column separators. */
void ka_page_put_inline(struct ka_page *page, const char *text)
{
    for (; *text && page->rc == 0; text++) {
        char c = *text;
        if (c == '|')
            ka_page_put(page, "\\|");
        else
            page->rc = ka_buf_add(&page->text, c == '\n' || c == '\r' ? " " : &c, 1);
    }
}

const char *ka_page_text_of(const json_t *object, const char *name)
{
    const char *text = json_string_value(json_object_get(object, name));
    return text && *text ? text : NULL;
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
    for (size_t i = 0; verdict && i < KA_COUNT(titles); i++) {
        if (strcmp(verdict, titles[i].verdict) == 0)
            return titles[i].title;
    }
    return verdict ? verdict : "no verdict";
}
