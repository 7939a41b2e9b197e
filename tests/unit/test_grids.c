/* Hidden shapes for their grids. Nothing here depends on a device: the programs of probes are made up. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>

#include "agent/core/grids.h"
#include "agent/core/shapes.h"

#define BUDGET KA_SHAPES_BUDGET

/* What is worth a look, by `probes` and shapes as JSON texts. */
static json_t *worth(const char *probes_text, const char *shapes_text, uint64_t seed)
{
    json_t *probes = json_loads(probes_text, 0, NULL), *shapes = json_loads(shapes_text, 0, NULL);
    assert_non_null(probes);
    assert_non_null(shapes);
    json_t *list = ka_grids_worth(probes, shapes, BUDGET, seed);
    json_decref(probes);
    json_decref(shapes);
    return list;
}

/* A size of the only shape of this kind; 0: there is none. */
static int64_t size_of(const json_t *list, const char *kind, const char *name)
{
    size_t i;
    json_t *entry;
    int64_t found = 0;
    json_array_foreach((json_t *)list, i, entry)
    {
        if (strcmp(json_string_value(json_object_get(entry, "kind")), kind) == 0) {
            assert_int_equal(found, 0);
            found = json_integer_value(json_object_get(json_object_get(entry, "dims"), name));
        }
    }
    return found;
}

#define ROWS                                                                                                 \
    "[{\"dims\":{\"M\":9,\"N\":20},\"programs\":9},"                                                         \
    "{\"dims\":{\"M\":18,\"N\":20},\"dim\":\"M\",\"programs\":18},"                                          \
    "{\"dims\":{\"M\":9,\"N\":40},\"dim\":\"N\",\"programs\":9}]"
#define SEEN "[{\"dims\":{\"M\":9,\"N\":20}},{\"dims\":{\"M\":128,\"N\":128}}]"

static void grids__a_program_a_row__has_more_than_256_without_a_long_shape(void **state)
{
    (void)state;
    int64_t least = INT64_MAX, most = 0;
    for (uint64_t seed = 0; seed < 20; seed++) {
        json_t *list = worth(ROWS, SEEN, seed);
        assert_int_equal(json_array_size(list), 1);
        int64_t rows = size_of(list, "many_programs", "M");
        assert_int_equal(size_of(list, "many_programs", "N"), 20);
        least = rows < least ? rows : least;
        most = rows > most ? rows : most;
        json_decref(list);
    }
    assert_true(least > 256 && least < most && most <= KA_GRIDS_MANY + KA_GRIDS_ODD + 1);
}

static void grids__as_many_programs_as_processors__meet_more_than_twice_as_many_rows(void **state)
{
    (void)state;
    static const char probes[] = "[{\"dims\":{\"M\":16,\"N\":20},\"programs\":132},"
                                 "{\"dims\":{\"M\":32,\"N\":20},\"dim\":\"M\",\"programs\":132}]";
    json_t *list = worth(probes, SEEN, 1);
    int64_t rows = size_of(list, "beyond_programs", "M");
    assert_true(rows > 264 && rows <= 264 + KA_GRIDS_ODD && rows % 2 == 1);
    assert_int_equal(json_array_size(list), 1);
    json_decref(list);
    list = worth(probes, "[{\"dims\":{\"M\":264,\"N\":20}}]", 1);
    assert_int_equal(json_array_size(list), 0);
    json_decref(list);
}

static void grids__long_shape_of_many_programs__stands_for_another(void **state)
{
    (void)state;
    json_t *list = worth("[{\"dims\":{\"M\":16},\"programs\":16},{\"dims\":{\"M\":32},\"dim\":\"M\","
                         "\"long\":{\"M\":4096},\"programs\":32}]",
                         "[]", 1);
    assert_int_equal(size_of(list, "long", "M"), 4096);
    assert_int_equal(json_array_size(list), 1);
    json_decref(list);
    list = worth("[{\"dims\":{\"M\":16},\"programs\":32},{\"dims\":{\"M\":32},\"dim\":\"M\","
                 "\"long\":{\"M\":4096},\"programs\":64}]",
                 "[]", 1);
    assert_int_equal(size_of(list, "long", "M"), 2176); /* 8192 programs would take minutes */
    assert_int_equal(json_array_size(list), 1);
    json_decref(list);
    list = worth("[{\"dims\":{\"M\":16},\"programs\":3200},{\"dims\":{\"M\":32},\"dim\":\"M\","
                 "\"long\":{\"M\":4096},\"programs\":6400}]",
                 "[]", 1);
    assert_int_equal(size_of(list, "long", "M"), 0); /* and here any that is longer */
    json_decref(list);
}

static void grids__unknown_programs_or_too_many_elements__are_worth_nothing(void **state)
{
    (void)state;
    json_t *list = worth("[{\"dims\":{\"M\":9}},{\"dims\":{\"M\":18},\"dim\":\"M\"}]", "[]", 1);
    assert_int_equal(json_array_size(list), 0);
    json_decref(list);
    list = worth("[{\"dims\":{\"M\":9,\"N\":4096},\"programs\":9},"
                 "{\"dims\":{\"M\":18,\"N\":4096},\"dim\":\"M\",\"programs\":18}]",
                 "[]", 1);
    assert_int_equal(json_array_size(list), 0);
    json_decref(list);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(grids__a_program_a_row__has_more_than_256_without_a_long_shape),
        cmocka_unit_test(grids__as_many_programs_as_processors__meet_more_than_twice_as_many_rows),
        cmocka_unit_test(grids__long_shape_of_many_programs__stands_for_another),
        cmocka_unit_test(grids__unknown_programs_or_too_many_elements__are_worth_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
