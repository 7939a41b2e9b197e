/* Similarity as people expect it: names and comments do not matter, structure does. */
#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "pair_fixture.h"
#include "rag/embed.h"

static const char *const CORPUS[] = {ROW_PAIR, ROW_PAIR_RENAMED, DOT_PAIR};

static struct ka_features features(const char *source)
{
    struct ka_features f = {0};
    assert_int_equal(ka_features_of(source, strlen(source), &f, NULL), 0);
    return f;
}

/* What a store of the corpus measures. */
static struct ka_measures *measured(void)
{
    struct ka_measures *measures = ka_calloc(1, sizeof(*measures));
    struct ka_features f[KA_COUNT(CORPUS)];
    for (size_t i = 0; i < KA_COUNT(CORPUS); i++) {
        f[i] = features(CORPUS[i]);
        ka_measures_count(measures, &f[i]);
    }
    for (size_t i = 0; i < KA_COUNT(CORPUS); i++) {
        ka_measures_add(measures, &f[i]);
        ka_features_free(&f[i]);
    }
    ka_measures_end(measures);
    return measures;
}

static float product(const float *x, const float *y, size_t n)
{
    double dot = 0;
    for (size_t i = 0; i < n; i++)
        dot += (double)x[i] * (double)y[i];
    return (float)dot;
}

/* Similarity of two sources in a store of the corpus. */
static double similarity(const char *a, const char *b)
{
    struct ka_measures *measures = measured();
    float x[KA_EMBED_DIM], y[KA_EMBED_DIM];
    struct ka_features fa = features(a), fb = features(b);
    assert_int_equal(ka_embed(&fa, measures, x, NULL), 0);
    assert_int_equal(ka_embed(&fb, measures, y, NULL), 0);
    ka_features_free(&fa);
    ka_features_free(&fb);
    free(measures);
    assert_true(fabs((double)product(x, x, KA_EMBED_STRUCTURE) - 1) < 1e-5);
    assert_true(fabs((double)product(x + KA_EMBED_STRUCTURE, x + KA_EMBED_STRUCTURE, KA_EMBED_WORDS) - 1) <
                1e-5);
    return (double)ka_embed_similarity(
        product(x, y, KA_EMBED_STRUCTURE),
        product(x + KA_EMBED_STRUCTURE, y + KA_EMBED_STRUCTURE, KA_EMBED_WORDS));
}

static void embed__another_class_of_operations__is_further_away(void **state)
{
    (void)state;
    struct ka_measures *measures = measured();
    float x[KA_EMBED_DIM], y[KA_EMBED_DIM];
    struct ka_features f = features(ROW_PAIR), dot = features(DOT_PAIR);
    assert_true(dot.classes[KA_CLASS_PRODUCT] && !f.classes[KA_CLASS_PRODUCT]);
    assert_true(f.classes[KA_CLASS_REDUCTION] && !f.classes[KA_CLASS_INDIRECT]);
    assert_int_equal(ka_embed(&f, measures, x, NULL), 0);
    for (size_t i = 0; i < KA_CLASS_COUNT; i++) {
        f.classes[i] = !f.classes[i];
        assert_int_equal(ka_embed(&f, measures, y, NULL), 0);
        f.classes[i] = !f.classes[i];
        assert_true(product(x, y, KA_EMBED_STRUCTURE) < 0.99f);
    }
    ka_features_free(&f);
    ka_features_free(&dot);
    free(measures);
}

static void embed__renamed_and_commented_copy__is_the_same(void **state)
{
    (void)state;
    assert_true(similarity(ROW_PAIR, ROW_PAIR_RENAMED) > 0.9999);
    struct ka_features a = features(ROW_PAIR), b = features(ROW_PAIR_RENAMED), c = features(DOT_PAIR);
    assert_true(a.tokens_hash == b.tokens_hash);
    assert_true(a.tokens_hash != c.tokens_hash);
    ka_features_free(&a);
    ka_features_free(&b);
    ka_features_free(&c);
}

static void embed__other_structure__is_far(void **state)
{
    (void)state;
    double far = similarity(ROW_PAIR, DOT_PAIR);
    double near = similarity(
        ROW_PAIR, HEAD("x", "y") "@triton.jit\n"
                                 "def mean(x_ptr, y_ptr, N, BLOCK: tl.constexpr):\n"
                                 "    row = tl.program_id(0)\n"
                                 "    cols = tl.arange(0, BLOCK)\n"
                                 "    x = tl.load(x_ptr + row * N + cols, mask=cols < N, other=0.0)\n"
                                 "    tl.store(y_ptr + row, tl.sum(x, axis=0) / N)\n\n\n" STUB BACKWARD);
    assert_true(near > far + 0.2);
}

static void embed__backward_and_harness__do_not_count(void **state)
{
    (void)state;
    struct ka_features a = features(ROW_KERNEL("k", "r", "") STUB);
    struct ka_features b = features("SWEEP = [{}]\n\nclass Dims:\n    n = 3\n\n" ROW_KERNEL("k", "r", "") STUB
                                    "def make_args(dims):\n    return torch.randn(3)\n" BACKWARD);
    assert_true(a.tokens_hash == b.tokens_hash);
    assert_int_equal(a.count, b.count);
    assert_memory_equal(a.items, b.items, a.count * sizeof(*a.items));
    ka_features_free(&a);
    ka_features_free(&b);
}

static void embed__both_spellings_of_triton_language__are_one(void **state)
{
    (void)state;
    struct ka_features a = features("@triton.jit\ndef k(p):\n    tl.store(p, tl.load(p + 1))\n");
    struct ka_features b =
        features("@triton.jit\ndef k(p):\n    triton.language.store(p, triton.language.load(p + 1))\n");
    assert_true(a.tokens_hash == b.tokens_hash);
    ka_features_free(&a);
    ka_features_free(&b);
}

static size_t common(const struct ka_features *a, const struct ka_features *b)
{
    size_t n = 0;
    for (size_t i = 0, k = 0; i < a->count && k < b->count;) {
        n += a->items[i] == b->items[k];
        if (a->items[i] <= b->items[k])
            i++;
        else
            k++;
    }
    return n;
}

static void features__gather_through_a_loaded_index__differs_from_a_plain_load(void **state)
{
    (void)state;
    const char *const variants[] = {"i * 4", "j * 4"};
    struct ka_features f[2];
    for (size_t v = 0; v < 2; v++) {
        struct ka_buf source = {0};
        ka_buf_printf(
            &source,
            "@triton.jit\ndef k(p, q, i):\n    j = tl.load(q)\n    at = p + %s\n    x = tl.load(at)\n",
            variants[v]);
        f[v] = features(source.data);
        ka_buf_free(&source);
    }
    assert_true(f[0].tokens_hash == f[1].tokens_hash); /* i and j are both just names */
    assert_true(f[1].count > f[0].count);              /* a load through a loaded address */
    assert_true(common(&f[0], &f[1]) == f[0].count);
    ka_features_free(&f[0]);
    ka_features_free(&f[1]);
}

static void features__operation_in_a_loop__differs_from_one_outside(void **state)
{
    (void)state;
    struct ka_features a =
        features("@triton.jit\ndef k(p):\n    for i in range(2):\n        x = tl.sum(p)\n");
    struct ka_features b =
        features("@triton.jit\ndef k(p):\n    for i in range(2):\n        pass\n    x = tl.sum(p)\n");
    assert_true(common(&a, &b) < a.count);
    ka_features_free(&a);
    ka_features_free(&b);
}

/* `body` in a kernel of its own. */
static struct ka_features of_body(const char *body)
{
    struct ka_buf source = {0};
    ka_buf_printf(&source, "@triton.jit\ndef k(p, q, n, B: tl.constexpr):\n%s", body);
    struct ka_features f = features(source.data);
    ka_buf_free(&source);
    return f;
}

static void assert_same_structure(const char *a, const char *b, bool same)
{
    struct ka_features x = of_body(a), y = of_body(b);
    bool equal = x.count == y.count && common(&x, &y) == x.count;
    if (equal != same)
        fail_msg("%s\n%s", a, b);
    ka_features_free(&x);
    ka_features_free(&y);
}

static void features__spelling_of_an_operation__makes_no_difference(void **state)
{
    (void)state;
    static const char *const same[][2] = {
        {"    y = tl.exp(tl.load(p))\n", "    x = tl.load(p)\n    y = libdevice.exp2(x)\n"},
        {"    y = 1 / (1 + tl.exp(-tl.load(p)))\n", "    y = 1 / tl.sigmoid(tl.load(p))\n"},
        {"    y = tl.sigmoid(2 * tl.load(p))\n", "    y = tanh(2 * tl.load(p))\n"},
        {"    x = tl.load(p)\n    y = tl.max(x, axis=0)\n", "    y = tl.max(tl.load(p), 0)\n"},
        {"    q += 1; x = tl.load(q)\n", "    q += 1\n    x = tl.load(q)\n"}};
    for (size_t i = 0; i < KA_COUNT(same); i++)
        assert_same_structure(same[i][0], same[i][1], true);
    assert_same_structure("    y = tl.exp(-tl.load(p))\n", "    y = tl.load(p) - tl.exp(1)\n", false);
}

static void features__axis_and_carried_values__are_told_apart(void **state)
{
    (void)state;
    assert_same_structure("    x = tl.sum(tl.load(p), 0)\n", "    x = tl.sum(tl.load(p), 1)\n", false);
    assert_same_structure("    a = tl.zeros([B])\n    for i in range(n):\n        a += tl.load(p)\n",
                          "    a = tl.zeros([B])\n    for i in range(n):\n        a = tl.load(p)\n", false);
    assert_same_structure("    for i in range(n):\n        tl.store(p, i)\n",
                          "    for i in range(tl.load(q)):\n        tl.store(p, i)\n", false);
}

static void features__what_the_stub_does_not_launch__does_not_count(void **state)
{
    (void)state;
    struct ka_features a = features(ROW_KERNEL("kernel", "r", "") STUB);
    struct ka_features b = features(ROW_KERNEL("kernel", "r", "") DOT_KERNEL
                                    "def unrelated(x):\n    return product[(1,)](x)\n\n\n" STUB);
    assert_int_equal(a.count, b.count);
    assert_memory_equal(a.items, b.items, a.count * sizeof(*a.items));
    assert_int_equal(a.word_count, b.word_count);
    assert_memory_equal(a.words, b.words, a.word_count * sizeof(*a.words));
    struct ka_features by_helper =
        features(ROW_KERNEL("kernel", "r", "") DOT_KERNEL "def helper(x):\n    return product[(1,)](x)\n\n\n"
                                                          "@autodiff()\ndef run(x):\n    return helper(x)\n");
    assert_true(by_helper.count > a.count); /* the dot kernel is reached, the row kernel is not */
    ka_features_free(&a);
    ka_features_free(&b);
    ka_features_free(&by_helper);
}

static void embed__common_names__bring_nearer_and_never_push_away(void **state)
{
    (void)state;
    assert_true(ka_embed_similarity(0.3f, 0.5f) > ka_embed_similarity(0.3f, 0));
    assert_true(ka_embed_similarity(0.3f, -0.5f) == ka_embed_similarity(0.3f, 0));
    assert_true(ka_embed_similarity(1, 0) == 1);
    assert_true(fabs((double)ka_embed_similarity(0.5f, 0) - 0.6) < 1e-3);
    assert_true(ka_embed_similarity(-0.2f, 0) == 0);
    assert_true(ka_embed_with_prose(0, 0) == 0 && ka_embed_with_prose(1, 3) == 1);
    assert_true(ka_embed_with_prose(0.4f, 0.5f) > ka_embed_with_prose(0.4f, 0.1f));
    assert_true(ka_embed_with_prose(0.6f, 0.5f) > ka_embed_with_prose(0.4f, 0.5f));
}

static void features__nothing_to_describe__is_an_error(void **state)
{
    (void)state;
    struct ka_features f;
    struct ka_err err;
    assert_int_equal(ka_features_of("", 0, &f, &err), -EINVAL);
    assert_int_equal(ka_features_of("x = 1\n", 6, &f, &err), -EINVAL);
    char *big = ka_calloc((5u << 20) + 1, 1);
    memset(big, 'a', 5u << 20);
    assert_int_equal(ka_features_of(big, 5u << 20, &f, &err), -EFBIG);
    free(big);
}

static void normalise__zero_or_nonfinite_vector__is_refused(void **state)
{
    (void)state;
    float zero[3] = {0}, wild[2] = {1, INFINITY}, good[2] = {3, 4};
    assert_int_equal(ka_embed_normalise(zero, 3), -EINVAL);
    assert_int_equal(ka_embed_normalise(wild, 2), -EINVAL);
    assert_int_equal(ka_embed_normalise(good, 2), 0);
    assert_true(good[0] == 0.6f && good[1] == 0.8f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(embed__another_class_of_operations__is_further_away),
        cmocka_unit_test(embed__renamed_and_commented_copy__is_the_same),
        cmocka_unit_test(embed__other_structure__is_far),
        cmocka_unit_test(embed__backward_and_harness__do_not_count),
        cmocka_unit_test(embed__both_spellings_of_triton_language__are_one),
        cmocka_unit_test(features__gather_through_a_loaded_index__differs_from_a_plain_load),
        cmocka_unit_test(features__operation_in_a_loop__differs_from_one_outside),
        cmocka_unit_test(features__spelling_of_an_operation__makes_no_difference),
        cmocka_unit_test(features__axis_and_carried_values__are_told_apart),
        cmocka_unit_test(features__what_the_stub_does_not_launch__does_not_count),
        cmocka_unit_test(embed__common_names__bring_nearer_and_never_push_away),
        cmocka_unit_test(features__nothing_to_describe__is_an_error),
        cmocka_unit_test(normalise__zero_or_nonfinite_vector__is_refused),
    };
    return cmocka_run_group_tests_name("embed", tests, NULL, NULL);
}
