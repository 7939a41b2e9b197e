/* Any bytes as a tensor file; what is accepted is compared with itself and its neighbours and described. */
#include "sandbox/compare.h"
#include "tests/unit/tensor_fixture.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void compare_and_describe(const struct ka_tensor *got, const struct ka_tensor *want)
{
    struct ka_tolerance tol = ka_tolerance_of(got->dtype);
    struct ka_compare_other other = {"other", got};
    struct ka_diff diff;
    struct ka_buf text = {0};
    if (ka_compare(got, want, NULL, &tol, &other, 1, &diff, NULL) == 0) {
        ka_diff_describe(&diff, "it", KA_DESCRIBE_FULL, &text);
        ka_diff_describe(&diff, "it", KA_DESCRIBE_HIDDEN, &text);
        json_decref(ka_diff_json(&diff));
    }
    ka_buf_free(&text);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct ka_tensors *set = NULL;
    struct ka_err err;
    if (parse_bytes(data, size, &set, &err) != 0)
        return 0;
    for (size_t i = 0; i + 1 < ka_tensors_count(set) && i < 4; i++)
        compare_and_describe(ka_tensors_get(set, i), ka_tensors_get(set, i + 1));
    ka_tensors_free(set);
    return 0;
}
