/* JUnit XML from a result object. */
#include "junit.h"

#include <stdio.h>
#include <string.h>

#include "files.h"

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

static void add_case(struct ka_buf *out, const char *file, const char *name, const char *failure)
{
    ka_buf_puts(out, "  <testcase classname=\"");
    add_escaped(out, file);
    ka_buf_puts(out, "\" name=\"");
    add_escaped(out, name);
    if (!failure) {
        ka_buf_puts(out, "\"/>\n");
        return;
    }
    ka_buf_puts(out, "\">\n    <failure>");
    add_escaped(out, failure);
    ka_buf_puts(out, "</failure>\n  </testcase>\n");
}

int ka_junit_write(const char *path, const char *checked_file, const json_t *result, struct ka_err *err)
{
    const char *verdict = json_string_value(json_object_get(result, "verdict"));
    const char *failures = json_string_value(json_object_get(result, "failures"));
    const char *message = json_string_value(json_object_get(json_object_get(result, "error"), "message"));
    bool verified = verdict && strcmp(verdict, "verified") == 0;
    const char *why = verified ? NULL : failures && *failures ? failures : message ? message : "not verified";
    json_t *gradients = json_object_get(result, "gradients"), *gradient;
    struct ka_buf xml = {0};
    size_t i, failed = verified ? 0 : 1;
    json_array_foreach(gradients, i, gradient) failed += json_is_false(json_object_get(gradient, "passed"));
    ka_buf_printf(&xml,
                  "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<testsuite name=\"kernel-agent check\" "
                  "tests=\"%zu\" failures=\"%zu\" time=\"%.2f\">\n",
                  json_array_size(gradients) + 1, failed,
                  json_number_value(json_object_get(result, "seconds")));
    add_case(&xml, checked_file, "verdict", why);
    json_array_foreach(gradients, i, gradient)
    {
        char name[128];
        const char *input = json_string_value(json_object_get(gradient, "name"));
        snprintf(name, sizeof(name), "gradient of %.100s", input ? input : "?");
        add_case(&xml, checked_file, name,
                 json_is_false(json_object_get(gradient, "passed")) ? "failed on at least one shape" : NULL);
    }
    ka_buf_puts(&xml, "</testsuite>\n");
    int rc = ka_file_write(path, xml.data, xml.len, err);
    ka_buf_free(&xml);
    return rc;
}
