/* JUnit XML from result objects. */
#include "junit.h"

#include <stdio.h>
#include <string.h>

#include "agent/core/page.h"
#include "base/each.h"
#include "base/files.h"

static void add_escaped(struct ka_buf *out, const char *text)
{
    for (; *text; text++) {
        unsigned char c = (unsigned char)*text;
        if (c == '&')
            ka_buf_puts(out, "&amp;");
        else if (c == '<')
            ka_buf_puts(out, "&lt;");
        else if (c == '>')
            ka_buf_puts(out, "&gt;");
        else if (c == '"')
            ka_buf_puts(out, "&quot;");
        else if (c >= 0x20 || c == '\n' || c == '\t')
            ka_buf_add(out, text, 1);
    }
}

/* `kind`: "failure", "error", "skipped" or NULL; its first line is the message that lists show. */
static void add_case(struct ka_buf *out, const char *file, const char *name, const char *kind,
                     const char *text)
{
    ka_buf_puts(out, "    <testcase classname=\"");
    add_escaped(out, file);
    ka_buf_puts(out, "\" name=\"");
    add_escaped(out, name);
    if (!kind) {
        ka_buf_puts(out, "\"/>\n");
        return;
    }
    size_t first = strcspn(text, "\n");
    KA_AUTO_FREE char *line = ka_strndup(text, first < 200 ? first : 200);
    ka_buf_printf(out, "\">\n      <%s message=\"", kind);
    add_escaped(out, line);
    ka_buf_puts(out, "\">");
    add_escaped(out, text);
    ka_buf_printf(out, "</%s>\n    </testcase>\n", kind);
}

/* Was this gradient itself found wrong, or not found at all? */
static bool is_wrong(const json_t *gradient)
{
    const json_t *error = json_object_get(gradient, "error"), *limit = json_object_get(gradient, "limit");
    return !json_is_number(error) ||
           (json_is_number(limit) && json_number_value(error) > json_number_value(limit));
}

void ka_junit_add(struct ka_buf *suites, const char *file, const json_t *result)
{
    const char *verdict = ka_page_text_of(result, "verdict"), *why = ka_page_text_of(result, "failures");
    const char *message = ka_page_text_of(json_object_get(result, "error"), "message");
    bool verified = ka_page_verified(result);
    bool skipped = verdict && strcmp(verdict, "not_checked") == 0;
    bool judged = verified || (verdict && strcmp(verdict, "not_verified") == 0);
    json_t *gradients = judged ? json_object_get(result, "gradients") : NULL;
    size_t wrong = 0;
    why = why ? why : message ? message : "the check could not begin";
    KA_EACH(gradients, i, gradient)
        wrong += !verified && is_wrong(gradient);
    ka_buf_puts(suites, "  <testsuite name=\"");
    add_escaped(suites, file);
    ka_buf_printf(suites, "\" tests=\"%zu\" failures=\"%zu\" errors=\"%d\" skipped=\"%d\" time=\"%.2f\">\n",
                  json_array_size(gradients) + 1, judged && !verified ? wrong + 1 : 0, !judged && !skipped,
                  skipped, json_number_value(json_object_get(result, "seconds")));
    add_case(suites, file, "verdict",
             verified  ? NULL
             : judged  ? "failure"
             : skipped ? "skipped"
                       : "error",
             why);
    KA_EACH(gradients, i, gradient) {
        char name[128];
        const char *input = ka_page_text_of(gradient, "name");
        snprintf(name, sizeof(name), "gradient of %.100s", input ? input : "?");
        add_case(suites, file, name, !verified && is_wrong(gradient) ? "failure" : NULL,
                 "wrong, or never returned, on at least one shape");
    }
    ka_buf_puts(suites, "  </testsuite>\n");
}

int ka_junit_write(const char *path, const struct ka_buf *suites, struct ka_err *err)
{
    KA_AUTO_BUF struct ka_buf xml = {0};
    ka_buf_printf(&xml,
                  "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<testsuites name=\"kernel-agent check\">\n"
                  "%s</testsuites>\n",
                  ka_buf_str(suites));
    return ka_file_write(path, xml.data, xml.len, err);
}
