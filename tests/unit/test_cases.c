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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(case__scaled_gap__below_the_smallest_number_is_rounding),
        cmocka_unit_test(case__spread__is_the_largest_difference_and_the_largest_norm),
        cmocka_unit_test(case__spread_of_a_repeat_that_is_missing__is_not_measured),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
