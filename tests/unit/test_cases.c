/* What is measured between the tensors of one case. */
#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <cmocka.h>

#include "agent/run/cases.h"
#include "tensor_fixture.h"

/* Three float64 tensors of two elements: grad/x, repeat0/x, repeat1/x. */
static struct ka_tensors *three(const double values[6])
{
    static const char header[] = "{\"grad/x\":{\"dtype\":\"F64\",\"shape\":[2],\"data_offsets\":[0,16]},"
                                 "\"repeat0/x\":{\"dtype\":\"F64\",\"shape\":[2],\"data_offsets\":[16,32]},"
                                 "\"repeat1/x\":{\"dtype\":\"F64\",\"shape\":[2],\"data_offsets\":[32,48]}}";
    unsigned char bytes[8 + sizeof(header) + 48];
    uint64_t len = sizeof(header) - 1;
    memcpy(bytes, &len, 8);
    memcpy(bytes + 8, header, len);
    memcpy(bytes + 8 + len, values, 48);
    struct ka_tensors *set;
    struct ka_err err;
    assert_int_equal(parse_bytes(bytes, 8 + len + 48, &set, &err), 0);
    return set;
}

static void case__spread__is_the_largest_difference_and_the_largest_norm(void **state)
{
    (void)state;
    const double values[] = {1, 2, 1, 2, 4, 6};
    struct ka_tensors *set = three(values);
    double most = -1, norm = -1;
    assert_int_equal(ka_case_spread(set, "x", 1, &most, &norm), 0);
    assert_true(most == 0 && norm == 0);
    assert_int_equal(ka_case_spread(set, "x", 2, &most, &norm), 0);
    assert_true(most == 4 && fabs(norm - 5) < 1e-12);
    ka_tensors_free(set);
}

static void case__spread_of_a_repeat_that_is_missing__is_not_measured(void **state)
{
    (void)state;
    const double values[6] = {0};
    struct ka_tensors *set = three(values);
    double most = -1, norm = -1;
    assert_int_equal(ka_case_spread(set, "x", 3, &most, &norm), -ENOENT);
    assert_int_equal(ka_case_spread(set, "w", 1, &most, &norm), -ENOENT);
    assert_true(most == -1);
    ka_tensors_free(set);
}

static void case__scaled_gap__below_the_smallest_number_is_rounding(void **state)
{
    (void)state;
    const double plain[] = {3e-5, 0.01, -0.02}, found[] = {0, 0.01 / 256, -0.02 / 256},
                 wrong[] = {0, 0.012 / 256, -0.02 / 256};
    const struct {
        const char *dtype;
        const double *scaled;
        bool equal;
    } all[] = {{"F16", found, true}, {"F16", wrong, false}, {"F32", found, false}};
    for (size_t i = 0; i < KA_COUNT(all); i++) {
        struct ka_tensors *a = make_set(all[i].dtype, "[3]", plain, 3),
                          *b = make_set(all[i].dtype, "[3]", all[i].scaled, 3);
        double gap = ka_case_scaled_gap(ka_tensors_get(a, 0), ka_tensors_get(b, 0), 1.0 / 256);
        assert_int_equal(gap == 0, all[i].equal);
        ka_tensors_free(a);
        ka_tensors_free(b);
    }
}

static void add_value(struct ka_buf *data, const char *dtype, double value)
{
    float narrow = (float)value;
    uint16_t half = half_of(value);
    bool is_half = strcmp(dtype, "F16") == 0;
    ka_buf_add(data, is_half ? (const void *)&half : &narrow, is_half ? 2 : 4);
}

/* An output of 96 elements by the forward, off by `error` of each at most, by eager PyTorch, which only
 * rounds, and by the oracle. */
static int agree_of(const char *dtype, double error, const char *values)
{
    struct ka_buf data = {0};
    for (uint64_t i = 0; i < 96; i++)
        add_value(&data, dtype, noise(i) * (1 + error * noise(i + 1000)));
    size_t own = data.len;
    for (uint64_t i = 0; i < 96; i++)
        add_value(&data, dtype, noise(i));
    for (uint64_t i = 0; i < 96; i++)
        ka_buf_add(&data, &(double){noise(i)}, 8);
    char header[300];
    snprintf(header, sizeof(header),
             "{\"fwd/0\":{\"dtype\":\"%s\",\"shape\":[96],\"data_offsets\":[0,%zu]},"
             "\"base_out/0\":{\"dtype\":\"%s\",\"shape\":[96],\"data_offsets\":[%zu,%zu]},"
             "\"out/0\":{\"dtype\":\"F64\",\"shape\":[96],\"data_offsets\":[%zu,%zu]}}",
             dtype, own, dtype, own, 2 * own, 2 * own, data.len);
    struct ka_tensors *set = NULL;
    struct ka_err err;
    assert_int_equal(parse_set(header, data.data, data.len, &set, &err), 0);
    json_t *entry = json_pack("{s:[{s:s}], s:[]}", "outputs", "kind", "tensor", "grads");
    json_t *plan = json_pack("{s:{s:s}}", "values", "x", values);
    int rc = ka_case_agrees(set, entry, plan, &err);
    json_decref(plan);
    json_decref(entry);
    ka_tensors_free(set);
    ka_buf_free(&data);
    return rc;
}

static int agree(const char *dtype, double error)
{
    return agree_of(dtype, error, "none");
}

static void case__forward_of_values_that_cancel__agrees_less_exactly(void **state)
{
    (void)state;
    assert_int_equal(agree_of("F32", 5e-3, "flat"), 0);
    assert_int_equal(agree_of("F32", 5e-2, "flat"), -EDOM);
    assert_int_equal(agree_of("F32", 0.2, "mixed"), -EDOM);
}

static void case__forward_that_adds_in_half_precision__agrees_with_the_oracle(void **state)
{
    (void)state;
    assert_int_equal(agree("F16", 2e-3), 0);
    assert_int_equal(agree("F16", 2e-2), -EDOM);
    assert_int_equal(agree("F32", 2e-3), -EDOM);
}

/* An output of 96 elements by the oracle and by the user's reference, off by `error` of each at most; by the
 * forward and by eager PyTorch, off by `base_error`. */
static int reference_agrees(const char *dtype, double base_error, double error)
{
    struct ka_buf data = {0};
    for (uint64_t i = 0; i < 192; i++)
        add_value(&data, dtype, noise(i % 96) * (1 + base_error * noise(i % 96 + 1000)));
    size_t own = data.len / 2, both = data.len;
    for (uint64_t i = 0; i < 96; i++)
        ka_buf_add(&data, &(double){noise(i)}, 8);
    for (uint64_t i = 0; i < 96; i++)
        ka_buf_add(&data, &(double){noise(i) * (1 + error * noise(i + 2000))}, 8);
    char header[400];
    snprintf(header, sizeof(header),
             "{\"fwd/0\":{\"dtype\":\"%s\",\"shape\":[96],\"data_offsets\":[0,%zu]},"
             "\"base_out/0\":{\"dtype\":\"%s\",\"shape\":[96],\"data_offsets\":[%zu,%zu]},"
             "\"out/0\":{\"dtype\":\"F64\",\"shape\":[96],\"data_offsets\":[%zu,%zu]},"
             "\"ref_out/0\":{\"dtype\":\"F64\",\"shape\":[96],\"data_offsets\":[%zu,%zu]}}",
             dtype, own, dtype, own, both, both, both + 768, both + 768, both + 1536);
    struct ka_tensors *set = NULL;
    struct ka_err err;
    assert_int_equal(parse_set(header, data.data, data.len, &set, &err), 0);
    json_t *entry = json_pack("{s:[{s:s}], s:[]}", "outputs", "kind", "tensor", "grads");
    int rc = ka_case_agrees(set, entry, NULL, &err);
    json_decref(entry);
    ka_tensors_free(set);
    ka_buf_free(&data);
    return rc;
}

static void case__reference__is_as_exact_as_float32_allows(void **state)
{
    (void)state;
    assert_int_equal(reference_agrees("F32", 0, 1e-7), 0);
    assert_int_equal(reference_agrees("F32", 0, 5e-5), -EDOM);
    assert_int_equal(reference_agrees("F32", 5e-5, 5e-5), 0); /* angles of far positions */
    assert_int_equal(reference_agrees("F32", 5e-5, 1e-3), -EDOM);
    assert_int_equal(reference_agrees("F16", 0, 1e-5), 0);
    assert_int_equal(reference_agrees("F16", 1e-3, 1e-3), -EDOM);
}

static void case__tolerance__of_what_tf32_made_less_exact_is_float16s(void **state)
{
    (void)state;
    json_t *entry = json_pack("{s:[i,s,s]}", "tf32", 3, "grad/x", "out/0");
    struct ka_tolerance plain = ka_tolerance_of(KA_F32), half = ka_tolerance_of(KA_F16);
    struct ka_tolerance made = ka_case_tolerance(entry, NULL, "grad", "x", KA_F32);
    assert_true(made.dtype == KA_F32 && made.atol == half.atol && made.local == half.local);
    ka_tolerance_loosen(&made);
    ka_tolerance_loosen(&made); /* two inputs of such kinds */
    ka_tolerance_loosen(&half);
    assert_true(made.floor == half.floor && made.floor > 10 * ka_tolerance_of(KA_F16).floor);
    made = ka_case_tolerance(entry, NULL, "grad", "xy", KA_F32);
    assert_true(made.dtype == KA_F32 && made.atol == plain.atol);
    made = ka_case_tolerance(entry, NULL, "grad", "x", KA_BF16);
    assert_true(made.dtype == KA_BF16 && made.atol > half.atol);
    made = ka_case_tolerance(NULL, NULL, "out", "0", KA_F32);
    assert_true(made.atol == plain.atol);
    json_decref(entry);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(case__forward_of_values_that_cancel__agrees_less_exactly),
        cmocka_unit_test(case__forward_that_adds_in_half_precision__agrees_with_the_oracle),
        cmocka_unit_test(case__reference__is_as_exact_as_float32_allows),
        cmocka_unit_test(case__scaled_gap__below_the_smallest_number_is_rounding),
        cmocka_unit_test(case__tolerance__of_what_tf32_made_less_exact_is_float16s),
        cmocka_unit_test(case__spread__is_the_largest_difference_and_the_largest_norm),
        cmocka_unit_test(case__spread_of_a_repeat_that_is_missing__is_not_measured),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
