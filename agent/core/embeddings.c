/* Embedding requests to JSON and bodies to vectors. Knows nothing of what is embedded or where vectors are
 * kept. */
#include "embeddings.h"

#include "base/utf8.h"
#include "chat.h"

#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define DIM_MAX 65536

void ka_vectors_free(struct ka_vectors *vectors)
{
    free(vectors->values);
    *vectors = (struct ka_vectors){0};
}

char *ka_embeddings_request_json(const char *model, const char *const *texts, size_t count,
                                 struct ka_err *err)
{
    json_t *input = json_array();
    int rc = 0;
    for (size_t i = 0; i < count && rc == 0; i++) {
        struct ka_buf valid = {0};
        rc = ka_buf_repair(&valid, texts[i], strlen(texts[i]));
        if (rc == 0)
            rc = json_array_append_new(input, json_stringn(ka_buf_str(&valid), valid.len));
        ka_buf_free(&valid);
    }
    json_t *body = json_pack("{s:s, s:O}", "model", model, "input", input);
    char *text = rc == 0 && body ? json_dumps(body, JSON_COMPACT) : NULL;
    if (!text)
        ka_fail(err, -EINVAL, "the embedding request for model %s cannot be written as JSON", model);
    json_decref(body);
    json_decref(input);
    return text;
}

/* One row of `vectors`, whose dim is set by then. */
static int read_row(const json_t *values, size_t row, struct ka_vectors *vectors, struct ka_err *err)
{
    if (json_array_size(values) != vectors->dim)
        return ka_fail(err, -EBADMSG, "vector %zu has %zu values, others have %zu", row,
                       json_array_size(values), vectors->dim);
    size_t i;
    json_t *value;
    json_array_foreach(values, i, value)
    {
        float number = (float)json_number_value(value);
        if (!json_is_number(value) || !isfinite(number))
            return ka_fail(err, -EBADMSG, "vector %zu: value %zu is not a finite number", row, i);
        vectors->values[row * vectors->dim + i] = number;
    }
    return 0;
}

/* The list may be in any order: `index` names the text. */
static int read_rows(const json_t *list, bool *seen, struct ka_vectors *vectors, struct ka_err *err)
{
    size_t i;
    json_t *item;
    json_array_foreach(list, i, item)
    {
        const json_t *index = json_object_get(item, "index");
        json_int_t row = json_is_integer(index) ? json_integer_value(index) : (json_int_t)i;
        if (row < 0 || (size_t)row >= vectors->count || seen[row])
            return ka_fail(err, -EBADMSG, "the answer has no or two vectors for one of the texts");
        seen[row] = true;
        int rc = read_row(json_object_get(item, "embedding"), (size_t)row, vectors, err);
        if (rc)
            return rc;
    }
    return 0;
}

static int read_list(const json_t *list, size_t count, struct ka_vectors *vectors, struct ka_err *err)
{
    size_t dim = json_array_size(json_object_get(json_array_get(list, 0), "embedding"));
    if (json_array_size(list) != count)
        return ka_fail(err, -EBADMSG, "the answer has %zu vectors for %zu texts", json_array_size(list),
                       count);
    if (dim == 0 || dim > DIM_MAX)
        return ka_fail(err, -EBADMSG, "the vectors have %zu values; 1 to %d can be used", dim, DIM_MAX);
    struct ka_vectors got = {.values = calloc(count, dim * sizeof(float)), .count = count, .dim = dim};
    bool *seen = ka_calloc(count, sizeof(*seen));
    int rc = got.values ? read_rows(list, seen, &got, err)
                        : ka_fail(err, -ENOMEM, "no memory for %zu vectors", count);
    if (rc)
        ka_vectors_free(&got);
    else
        *vectors = got;
    free(seen);
    return rc;
}

int ka_embeddings_parse(const char *body, size_t len, size_t count, struct ka_vectors *vectors,
                        struct ka_err *err)
{
    json_error_t why;
    json_t *root = json_loadb(body, len, 0, &why);
    const json_t *error = json_object_get(root, "error");
    int rc;
    if (!root) {
        rc = ka_fail(err, -EBADMSG, "the answer is not valid JSON: %s", why.text);
    } else if (error && !json_is_null(error)) {
        struct ka_chat_error said;
        ka_chat_error_read(body, len, &said);
        rc = ka_fail(err, -EREMOTEIO, "the endpoint answered with an error: %s", said.message);
    } else {
        rc = read_list(json_object_get(root, "data"), count, vectors, err);
    }
    json_decref(root);
    return rc;
}
