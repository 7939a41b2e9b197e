/* Other people's files: what becomes a pair, what does not and why, and under which licence. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include <errno.h>
#include <stdio.h>
#include <unistd.h>

#include "base/files.h"
#include "rag/gather.h"
#include "rag/import.h"
#include "rag/license.h"
#include "rag/pair.h"

#define HEAD "\"\"\"Text of the module.\"\"\"\nimport torch\nimport triton\n\nSCALE = 2.0\n\n"
#define KERNEL(name, body) "\n@triton.jit\ndef " name "(x_ptr, N, BLOCK: tl.constexpr):\n    " body "\n\n"
#define CLASS(name, forward, backward)                                                                       \
    "\nclass " name                                                                                          \
    "(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x):\n        " forward              \
    "\n\n    @staticmethod\n    def backward(ctx, dy):\n        " backward "\n"

static const char MODULE[] = HEAD KERNEL("shared", "return x_ptr") KERNEL(
    "fwd", "return shared(x_ptr)") "# about the next one\n" KERNEL("bwd", "return shared(x_ptr) + own(x_ptr)")
    KERNEL("own", "return x_ptr")
        KERNEL("unused", "pass") "def launch(dy):\n    bwd[(1,)](dy, 1, BLOCK=2)\n\n" CLASS(
            "Good", "fwd[(1,)](x, 1, BLOCK=2)", "return launch(dy)") CLASS("Torch", "return x", "return dy")
            CLASS("NoBackwardKernel", "fwd[(1,)](x, 1, BLOCK=2)",
                  "return dy") "\nif __name__ == \"__main__\":\n    print(Good)\n";

static size_t offset(const char *text, const char *part)
{
    assert_non_null(text);
    const char *at = strstr(text, part);
    if (!at)
        fail_msg("'%s' is not in:\n%s", part, text);
    return (size_t)(at - text);
}

static void import__function_with_kernels__is_split_by_who_mentions_whom(void **state)
{
    (void)state;
    struct ka_import_units units;
    struct ka_pair pair;
    assert_int_equal(ka_import_split("repo/ops.py", MODULE, "MIT", &units, NULL), 0);
    assert_int_equal(units.count, 3);
    assert_string_equal(units.items[0].name, "Good");
    assert_null(units.items[0].why);
    const char *text = units.items[0].source;
    size_t marker = offset(text, KA_MARKER);
    assert_true(offset(text, "def shared(") < offset(text, "def fwd("));
    assert_true(offset(text, "def fwd(") < marker && offset(text, "SCALE = 2.0") < marker);
    assert_true(offset(text, "def bwd(") > marker && offset(text, "def own(") > marker);
    assert_null(strstr(text + marker, "def shared(")); /* once, where the forward needs it */
    assert_true(offset(text, "def launch(") < offset(text, "class Good("));
    assert_null(strstr(text, "unused"));
    assert_null(strstr(text, "Text of the module"));
    assert_null(strstr(text, "__main__"));
    assert_null(strstr(text, "class Torch"));
    assert_int_equal(ka_pair_parse("repo/imported/good.py", text, strlen(text), &pair, NULL), 0);
    assert_string_equal(pair.license, "MIT");
    assert_string_equal(pair.op, "Good");
    assert_int_equal(offset(pair.imported, "repo/ops.py sha256 "), 0);
    assert_string_equal(pair.stub, "");
    ka_pair_free(&pair);
    assert_non_null(strstr(units.items[1].why, "forward launches no Triton kernel"));
    assert_non_null(strstr(units.items[2].why, "backward launches no Triton kernel"));
    ka_import_free(&units);
}

static void import__file_without_functions__gives_no_unit(void **state)
{
    (void)state;
    struct ka_import_units units;
    assert_int_equal(ka_import_split("a.py", HEAD KERNEL("k", "pass"), "MIT", &units, NULL), 0);
    assert_int_equal(units.count, 0);
    assert_true(units.kernels);
    ka_import_free(&units);
    assert_int_equal(ka_import_split("a.py", "class (:\n\t\"\"\"", "MIT", &units, NULL), 0);
    assert_true(units.count == 0 && !units.kernels);
    ka_import_free(&units);
}

static void license__texts__are_told_apart(void **state)
{
    (void)state;
    static const struct {
        const char *name, *text;
    } cases[] = {
        {"MIT",
         "Copyright X\nPermission is hereby\ngranted, free of charge, to any\n\nThe above copyright\nnotice"},
        {"Apache-2.0", "   Apache License\n   Version 2.0, January 2004"},
        {"BSD-3-Clause", "Redistribution and use in source and\nbinary forms ... Neither the name of X"},
        {"BSD-2-Clause", "Redistribution and use in source and binary forms, with or without"},
        {"GPL-3.0", "GNU GENERAL PUBLIC LICENSE\n  Version 3, 29 June 2007"},
        {"LGPL-3.0", "GNU LESSER GENERAL PUBLIC LICENSE\n Version 3\n ... the GNU GENERAL PUBLIC LICENSE"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++)
        assert_string_equal(ka_license_of_text(cases[i].text), cases[i].name);
    assert_null(ka_license_of_text("All rights reserved."));
}

/* ---- folders */

struct place {
    char dir[64];
    char *db;
    struct ka_store *store;
    json_t *report;
};

static void write_file(const struct place *place, const char *name, const char *text)
{
    char *path = ka_path_join(place->dir, name), *slash = strrchr(path, '/');
    *slash = '\0';
    assert_int_equal(ka_mkdirs(path, NULL), 0);
    *slash = '/';
    assert_int_equal(ka_file_write(path, text, strlen(text), NULL), 0);
    free(path);
}

static int setup(void **state)
{
    struct place *place = calloc(1, sizeof(*place));
    strcpy(place->dir, "/tmp/ka-import-XXXXXX");
    assert_non_null(mkdtemp(place->dir));
    place->db = ka_path_join(place->dir, "pairs.db");
    assert_int_equal(ka_store_open(place->db, KA_STORE_CREATE, &place->store, NULL), 0);
    *state = place;
    return 0;
}

static int teardown(void **state)
{
    struct place *place = *state;
    json_decref(place->report);
    ka_store_close(place->store);
    ka_rmtree(place->dir, NULL);
    free(place->db);
    free(place);
    return 0;
}

static void gather(struct place *place, const char *name, const char *license)
{
    struct ka_err err;
    char *path = ka_path_join(place->dir, name);
    json_decref(place->report);
    place->report = NULL;
    if (ka_gather(place->store, path, license, &place->report, &err))
        fail_msg("%s", err.msg);
    free(path);
}

static size_t count_of(const struct place *place, const char *list)
{
    return json_array_size(json_object_get(place->report, list));
}

static const char *member_of(const struct place *place, const char *list, size_t i, const char *name)
{
    return json_string_value(json_object_get(json_array_get(json_object_get(place->report, list), i), name));
}

static const char GOOD[] = HEAD KERNEL("fwd", "return x_ptr") KERNEL("bwd", "return x_ptr")
    CLASS("Good", "fwd[(1,)](x, 1, BLOCK=2)", "bwd[(1,)](dy, 1, BLOCK=2)");

static void gather__licence_above__is_recorded_with_path_and_hash(void **state)
{
    struct place *place = *state;
    struct ka_pair pair;
    write_file(place, "repo/LICENSE.txt", "Apache License\nVersion 2.0, January 2004\n");
    write_file(place, "repo/.git/HEAD", "ref\n");
    write_file(place, "repo/ops/deep/good.py", GOOD);
    write_file(place, "repo/ops/plain.py", "x = 1\n");
    write_file(place, "repo/.hidden/good.py", GOOD);
    gather(place, "repo/ops", NULL); /* the licence is above what was asked for, within the repository */
    assert_int_equal(json_integer_value(json_object_get(place->report, "files")), 2);
    assert_int_equal(count_of(place, "taken"), 1);
    assert_int_equal(count_of(place, "not_taken"), 0);
    assert_string_equal(member_of(place, "taken", 0, "license"), "Apache-2.0");
    assert_string_equal(member_of(place, "taken", 0, "path"), "ops/deep/good.py");
    assert_true(ka_ends_with(member_of(place, "taken", 0, "license_from"), "/repo/LICENSE.txt"));
    assert_int_equal(strlen(member_of(place, "taken", 0, "sha256")), 64);
    assert_int_equal(ka_store_get(place->store, member_of(place, "taken", 0, "id"), &pair, NULL), 0);
    assert_string_equal(pair.license, "Apache-2.0");
    assert_string_equal(pair.family, KA_GATHER_FAMILY);
    assert_non_null(strstr(pair.backward, "class Good("));
    assert_non_null(strstr(pair.imported, member_of(place, "taken", 0, "sha256")));
    ka_pair_free(&pair);
    gather(place, "repo", NULL); /* again, from further up: other names, and no error */
    assert_int_equal(count_of(place, "taken"), 1);
    gather(place, "repo", NULL);
    size_t count;
    assert_int_equal(ka_store_count(place->store, &count, NULL), 0);
    assert_int_equal(count, 2);
}

static void gather__no_licence__is_not_taken_unless_one_is_named(void **state)
{
    struct place *place = *state;
    size_t count;
    write_file(place, "LICENSE",
               "The above copyright notice. Permission is hereby granted, free of charge"); /* outside */
    write_file(place, "repo/good.py", GOOD);
    gather(place, "repo", NULL);
    assert_int_equal(count_of(place, "taken"), 0);
    assert_non_null(strstr(member_of(place, "not_taken", 0, "why"), "no licence"));
    gather(place, "repo/good.py", "Proprietary");
    assert_int_equal(count_of(place, "taken"), 1);
    assert_string_equal(member_of(place, "taken", 0, "license"), "Proprietary");
    assert_int_equal(ka_store_count(place->store, &count, NULL), 0);
    assert_int_equal(count, 1);
}

static void gather__spdx_line__goes_before_the_licence_file(void **state)
{
    struct place *place = *state;
    char text[4000];
    snprintf(text, sizeof(text), "# SPDX-License-Identifier: Apache-2.0 OR MIT \"\"\"\n%s", GOOD);
    write_file(place, "repo/LICENSE", "All rights reserved.");
    write_file(place, "repo/a.py", text);
    write_file(place, "repo/b.py", GOOD);
    gather(place, "repo", NULL);
    assert_int_equal(count_of(place, "taken"), 1);
    assert_string_equal(member_of(place, "taken", 0, "license"), "Apache-2.0 OR MIT");
    assert_string_equal(member_of(place, "not_taken", 0, "path"), "repo/b.py");
    assert_non_null(strstr(member_of(place, "not_taken", 0, "why"), "none of those known"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(import__function_with_kernels__is_split_by_who_mentions_whom),
        cmocka_unit_test(import__file_without_functions__gives_no_unit),
        cmocka_unit_test(license__texts__are_told_apart),
        cmocka_unit_test_setup_teardown(gather__licence_above__is_recorded_with_path_and_hash, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(gather__no_licence__is_not_taken_unless_one_is_named, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(gather__spdx_line__goes_before_the_licence_file, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
