/* A client's request for a run, read strictly: what is not known is refused by its name. */
#include "submission.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/each.h"

#define NAME_MAX_LEN 100
#define OPTION_MAX ((size_t)4096)

static bool is_name(const char *name)
{
    static const char letters[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.";
    size_t len = strlen(name);
    return len > strlen(".py") && len <= NAME_MAX_LEN && strspn(name, letters) == len && name[0] != '.' &&
           name[0] != '-' && ka_ends_with(name, ".py");
}

/* A value as the command line would have it; NULL for lists, objects and null. */
static json_t *as_text(const json_t *value)
{
    if (json_is_string(value))
        return json_string(json_string_value(value));
    if (json_is_boolean(value))
        return json_string(json_is_true(value) ? "true" : "false");
    if (json_is_integer(value))
        return json_sprintf("%lld", (long long)json_integer_value(value));
    return json_is_real(value) ? json_sprintf("%.17g", json_real_value(value)) : NULL;
}

static int read_option(json_t *options, const char *name, const json_t *value, struct ka_err *err)
{
    KA_AUTO_FREE char *dashed = ka_strdup(name);
    for (char *at = dashed; *at; at++)
        *at = *at == '_' ? '-' : *at;
    if (json_object_get(options, dashed))
        return ka_fail(err, -EINVAL, "options: '%.100s' is there twice", dashed);
    json_t *text = as_text(value);
    if (!text)
        return ka_fail(err, -EINVAL, "options: the value of '%.100s' is no text, number, true or false",
                       dashed);
    if (json_string_length(text) > OPTION_MAX) {
        json_decref(text);
        return ka_fail(err, -EINVAL, "options: the value of '%.100s' is too long", dashed);
    }
    json_object_set_new(options, dashed, text);
    return 0;
}

static int read_options(struct ka_submission *read, const json_t *value, struct ka_err *err)
{
    if (!json_is_object(value))
        return ka_fail(err, -EINVAL, "options: not an object");
    KA_EACH_MEMBER(value, name, option) {
        int rc = read_option(read->options, name, option, err);
        if (rc)
            return rc;
    }
    return 0;
}

static int read_text(char **text, const char *name, const json_t *value, struct ka_err *err)
{
    if (!json_is_string(value))
        return ka_fail(err, -EINVAL, "%s: not a text", name);
    free(*text);
    *text = ka_strdup(json_string_value(value));
    return 0;
}

static int read_member(struct ka_submission *read, const char *name, const json_t *value, struct ka_err *err)
{
    if (strcmp(name, "source") == 0)
        return read_text(&read->source, name, value, err);
    if (strcmp(name, "name") == 0)
        return read_text(&read->name, name, value, err);
    if (strcmp(name, "options") == 0)
        return read_options(read, value, err);
    if (strcmp(name, "priority") == 0) {
        json_int_t number = json_integer_value(value);
        if (!json_is_integer(value) || number < -KA_SUBMISSION_PRIORITY || number > KA_SUBMISSION_PRIORITY)
            return ka_fail(err, -EINVAL, "priority: not a whole number from %d to %d",
                           -KA_SUBMISSION_PRIORITY, KA_SUBMISSION_PRIORITY);
        read->priority = (int)number;
        return 0;
    }
    if (strcmp(name, "force") == 0) {
        read->force = json_is_true(value);
        return json_is_boolean(value) ? 0 : ka_fail(err, -EINVAL, "force: neither true nor false");
    }
    return ka_fail(err, -EINVAL, "'%.100s' is not known: there are source, name, options, priority and force",
                   name);
}

static int read_members(struct ka_submission *read, const json_t *doc, struct ka_err *err)
{
    KA_EACH_MEMBER(doc, name, value) {
        int rc = read_member(read, name, value, err);
        if (rc)
            return rc;
    }
    if (!read->source || !read->source[strspn(read->source, " \t\r\n")])
        return ka_fail(err, -EINVAL, "source: the text of the forward file is missing");
    if (!is_name(read->name))
        return ka_fail(
            err, -EINVAL,
            "name: not a file name like softmax.py (letters, digits, '_', '-' and '.', at most %d)",
            NAME_MAX_LEN);
    return 0;
}

int ka_submission_parse(const char *body, size_t len, struct ka_submission *out, struct ka_err *err)
{
    struct ka_submission read = {.name = ka_strdup("forward.py"), .options = json_object()};
    json_error_t where;
    json_auto_t *doc = len > KA_SUBMISSION_MAX ? NULL : json_loadb(body, len, JSON_REJECT_DUPLICATES, &where);
    int rc;
    if (len > KA_SUBMISSION_MAX)
        rc = ka_fail(err, -EINVAL, "the request is larger than %zu bytes", KA_SUBMISSION_MAX);
    else if (!doc)
        rc = ka_fail(err, -EINVAL, "the request is no JSON: %s (line %d)", where.text, where.line);
    else if (!json_is_object(doc))
        rc = ka_fail(err, -EINVAL, "the request is no JSON object");
    else
        rc = read_members(&read, doc, err);
    if (rc)
        ka_submission_free(&read);
    else
        *out = read;
    return rc;
}

void ka_submission_free(struct ka_submission *submission)
{
    free(submission->name);
    free(submission->source);
    json_decref(submission->options);
    memset(submission, 0, sizeof(*submission));
}
