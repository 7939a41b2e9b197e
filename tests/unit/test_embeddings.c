/* Embedding requests and answers: order, completeness and finite values. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "agent/core/embeddings.h"

static void embeddings__request__holds_model_and_valid_texts(void **state)
{
    (void)state;
    const char *texts[] = {"a", "b\xFF"};
    char *body = ka_embeddings_request_json("m", texts, 2, NULL);
    assert_string_equal(body, "{\"model\":\"m\",\"input\":[\"a\",\"b\xEF\xBF\xBD\"]}");
    free(body);
}

static void embeddings__vectors_in_any_order__are_put_in_the_order_of_the_texts(void **state)
{
    (void)state;
    const char *body = "{\"data\":[{\"index\":1,\"embedding\":[3,4.5]},{\"index\":0,\"embedding\":[1,2]}]}";
    struct ka_vectors vectors;
    assert_int_equal(ka_embeddings_parse(body, strlen(body), 2, &vectors, NULL), 0);
    assert_int_equal(vectors.count, 2);
    assert_int_equal(vectors.dim, 2);
    const float want[] = {1.0f, 2.0f, 3.0f, 4.5f};
    assert_memory_equal(vectors.values, want, sizeof(want));
    ka_vectors_free(&vectors);
}

static void embeddings__missing_index__means_the_order_of_the_list(void **state)
{
    (void)state;
    const char *body = "{\"data\":[{\"embedding\":[1]},{\"embedding\":[2]}]}";
    struct ka_vectors vectors;
    assert_int_equal(ka_embeddings_parse(body, strlen(body), 2, &vectors, NULL), 0);
    assert_true(vectors.values[0] == 1.0f && vectors.values[1] == 2.0f);
    ka_vectors_free(&vectors);
}

static void embeddings__unusable_answers__are_refused_with_a_reason(void **state)
{
    (void)state;
    static const struct {
        const char *body;
        int rc;
        const char *reason;
    } cases[] = {
        {"{", -EBADMSG, "not valid JSON"},
        {"{}", -EBADMSG, "0 vectors for 2"},
        {"{\"data\":[{\"embedding\":[1]}]}", -EBADMSG, "1 vectors for 2"},
        {"{\"data\":[{\"embedding\":[]},{\"embedding\":[]}]}", -EBADMSG, "0 values"},
        {"{\"data\":[{\"embedding\":[1]},{\"embedding\":[1,2]}]}", -EBADMSG, "others have"},
        {"{\"data\":[{\"index\":0,\"embedding\":[1]},{\"index\":0,\"embedding\":[1]}]}", -EBADMSG,
         "two vectors"},
        {"{\"data\":[{\"index\":0,\"embedding\":[1]},{\"index\":2,\"embedding\":[1]}]}", -EBADMSG,
         "no or two"},
        {"{\"data\":[{\"index\":0,\"embedding\":[1]},{\"index\":-1,\"embedding\":[1]}]}", -EBADMSG,
         "no or two"},
        {"{\"data\":[{\"embedding\":[1]},{\"embedding\":[\"1\"]}]}", -EBADMSG, "finite"},
        {"{\"data\":[{\"embedding\":[1]},{\"embedding\":[1e300]}]}", -EBADMSG, "finite"},
        {"{\"data\":[{\"embedding\":[1]},7]}", -EBADMSG, "0 values"},
        {"{\"error\":{\"message\":\"busy\"}}", -EREMOTEIO, "busy"},
    };
    for (size_t i = 0; i < KA_COUNT(cases); i++) {
        struct ka_vectors vectors = {0};
        struct ka_err err = {0};
        assert_int_equal(ka_embeddings_parse(cases[i].body, strlen(cases[i].body), 2, &vectors, &err),
                         cases[i].rc);
        assert_non_null(strstr(err.msg, cases[i].reason));
        assert_null(vectors.values);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(embeddings__request__holds_model_and_valid_texts),
        cmocka_unit_test(embeddings__vectors_in_any_order__are_put_in_the_order_of_the_texts),
        cmocka_unit_test(embeddings__missing_index__means_the_order_of_the_list),
        cmocka_unit_test(embeddings__unusable_answers__are_refused_with_a_reason),
    };
    return cmocka_run_group_tests_name("embeddings", tests, NULL, NULL);
}
