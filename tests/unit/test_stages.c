/* Preflight's order: a table of what may start after what has ended. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <errno.h>

#include "agent/core/stages.h"

#define BIT(stage) (1u << KA_STAGE_##stage)

static unsigned all_next(struct ka_stages *stages)
{
    unsigned begun = 0;
    for (enum ka_stage stage; (stage = ka_stages_next(stages)) < KA_STAGE_COUNT;)
        begun |= 1u << stage;
    return begun;
}

static void stages__what_starts__is_what_waited_for_what_has_ended(void **state)
{
    static const struct {
        enum ka_stage ended;
        unsigned starts;
    } table[] = {
        {KA_STAGE_SWEEP, BIT(DRAFT) | BIT(HIDDEN) | BIT(DIFFERENCES) | BIT(INPUTS) | BIT(SCALARS)},
        {KA_STAGE_DRAFT, 0},
        {KA_STAGE_INPUTS, 0},
        {KA_STAGE_SCALARS, 0},
        {KA_STAGE_HIDDEN, BIT(LONG)},
        {KA_STAGE_LONG, 0},
        {KA_STAGE_DIFFERENCES, 0},
    };
    struct ka_stages stages = {0};
    (void)state;
    assert_int_equal(all_next(&stages), BIT(SWEEP));
    for (size_t i = 0; i < KA_COUNT(table); i++) {
        assert_false(ka_stages_through(&stages));
        assert_int_equal(all_next(&stages), 0);
        assert_int_equal(ka_stages_end(&stages, table[i].ended), 0);
        assert_int_equal(all_next(&stages), table[i].starts);
    }
    assert_true(ka_stages_through(&stages));
}

static void stages__part_that_is_not_under_way__cannot_end(void **state)
{
    struct ka_stages stages = {0};
    (void)state;
    assert_int_equal(ka_stages_end(&stages, KA_STAGE_SWEEP), -EINVAL);
    assert_int_equal(ka_stages_next(&stages), KA_STAGE_SWEEP);
    assert_int_equal(ka_stages_end(&stages, KA_STAGE_HIDDEN), -EINVAL);
    assert_int_equal(ka_stages_end(&stages, KA_STAGE_SWEEP), 0);
    assert_int_equal(ka_stages_end(&stages, KA_STAGE_SWEEP), -EINVAL);
    assert_int_equal(ka_stages_end(&stages, KA_STAGE_COUNT), -EINVAL);
    assert_false(ka_stages_through(&stages));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(stages__what_starts__is_what_waited_for_what_has_ended),
        cmocka_unit_test(stages__part_that_is_not_under_way__cannot_end),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
