/* Other people's folders: what becomes a pair, what does not and why, and under which licence. */
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
#include "import_fixture.h"
#include "rag/commit.h"
#include "rag/gather.h"
#include "rag/license.h"
#include "rag/pair.h"

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

static void license__names_and_fields__are_known_or_nothing(void **state)
{
    (void)state;
    static const struct {
        const char *text, *name, *file;
    } cases[] = {
        {"[project]\nname = \"x\"\nlicense = \"MIT\"\n", "MIT", NULL},
        {"[project]\nlicense = { text = 'Apache-2.0 OR MIT' }\n", "Apache-2.0 OR MIT", NULL},
        {"[project]\nlicense = {file = \"LICENSE.md\"}\n", NULL, "LICENSE.md"},
        {"[project.license]\ntext = \"\"\"Permission is hereby granted, free of charge\nThe above copyright "
         "notice\"\"\"\n",
         "MIT", NULL},
        {"[tool.poetry]\nlicense=\"BSD-3-Clause\"", "BSD-3-Clause", NULL},
        {"[metadata]\r\nlicense = Apache License 2.0\r\n", "Apache-2.0", NULL},
        {"[tool.other]\nlicense = \"MIT\"\n", NULL, NULL},
        {"[project]\nlicense = \"Proprietary\"\nlicense-files = [\"MIT\"]\n", NULL, NULL},
        {"[project]\nlicense = \"MIT OR LicenseRef-Mine\"\n", NULL, NULL},
        {"[project]\nlicense = \"MIT OR \"\n", NULL, NULL},
        {"license = \"MIT\"\n", NULL, NULL},
    };
    for (size_t i = 0; i < KA_COUNT(cases); i++) {
        KA_AUTO_FREE char *file = NULL, *name = ka_license_of_project(cases[i].text, &file);
        assert_string_equal(name ? name : "-", cases[i].name ? cases[i].name : "-");
        assert_string_equal(file ? file : "-", cases[i].file ? cases[i].file : "-");
    }
    static const struct {
        const char *text, *name;
    } metadata[] = {{"Name: x\nLicense: custom\nLicense-Expression: Apache-2.0\n", "Apache-2.0"},
                    {"Classifier: License :: OSI Approved :: MIT License\n", "MIT"},
                    {"License: BSD\n\nbody\n", "BSD-3-Clause"},
                    {"Name: x\n\nLicense: MIT\n", NULL}};
    for (size_t i = 0; i < KA_COUNT(metadata); i++) {
        KA_AUTO_FREE char *name = ka_license_of_metadata(metadata[i].text);
        assert_string_equal(name ? name : "-", metadata[i].name ? metadata[i].name : "-");
    }
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
    const struct ka_gather_req req = {.path = path, .license = license};
    json_decref(place->report);
    place->report = NULL;
    if (ka_gather(place->store, &req, &place->report, &err))
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

#define GOOD_TEXT                                                                                            \
    MODULE_HEAD KERNEL("fwd", "return x_ptr") KERNEL("bwd", "return x_ptr")                                  \
        CLASS("Good", "fwd[(1,)](x, 1, BLOCK=2)", "bwd[(1,)](dy, 1, BLOCK=2)")
static const char GOOD[] = GOOD_TEXT;

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
    assert_string_equal(member_of(place, "taken", 0, "path"), "repo/ops/deep/good.py");
    assert_string_equal(member_of(place, "taken", 0, "license_repository"), "Apache-2.0");
    assert_true(ka_ends_with(member_of(place, "taken", 0, "license_from"), "/repo/LICENSE.txt"));
    assert_int_equal(strlen(member_of(place, "taken", 0, "sha256")), 64);
    assert_int_equal(ka_store_get(place->store, member_of(place, "taken", 0, "id"), &pair, NULL), 0);
    assert_string_equal(pair.license, "Apache-2.0");
    assert_string_equal(pair.family, KA_GATHER_FAMILY);
    assert_non_null(strstr(pair.backward, "class Good("));
    assert_non_null(strstr(pair.imported, member_of(place, "taken", 0, "sha256")));
    ka_pair_free(&pair);
    gather(place, "repo", NULL); /* again, from further up: the same pair */
    assert_int_equal(count_of(place, "taken"), 1);
    size_t count;
    assert_int_equal(ka_store_count(place->store, &count, NULL), 0);
    assert_int_equal(count, 1);
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
    assert_string_equal(member_of(place, "taken", 0, "license_header"), "Apache-2.0 OR MIT");
    assert_true(ka_ends_with(member_of(place, "taken", 0, "license_from"), "/repo/LICENSE"));
    assert_string_equal(member_of(place, "not_taken", 0, "path"), "repo/b.py");
    assert_non_null(strstr(member_of(place, "not_taken", 0, "why"), "none of those known"));
}

static void gather__licence_of_ones_own__allows_nothing(void **state)
{
    struct place *place = *state;
    char text[4000];
    snprintf(text, sizeof(text), "# SPDX-License-Identifier: LicenseRef-Mine\n%s", GOOD);
    write_file(place, "repo/pyproject.toml", "[project]\nlicense = \"MIT\"\n");
    write_file(place, "repo/a.py", text);
    write_file(place, "repo/b.py", GOOD);
    gather(place, "repo", NULL);
    assert_int_equal(count_of(place, "taken"), 1);
    assert_string_equal(member_of(place, "taken", 0, "path"), "repo/b.py");
    assert_string_equal(member_of(place, "taken", 0, "license"), "MIT");
    assert_true(ka_ends_with(member_of(place, "taken", 0, "license_from"), "/repo/pyproject.toml"));
    assert_string_equal(member_of(place, "not_taken", 0, "path"), "repo/a.py");
    json_t *refused = json_array_get(json_object_get(place->report, "not_taken"), 0);
    assert_int_equal(json_integer_value(json_object_get(refused, "line")), 19);
}

static void gather__package__is_followed_and_each_licence_kept(void **state)
{
    struct place *place = *state;
    struct ka_pair pair;
    write_file(place, "repo/LICENSE", "Apache License\nVersion 2.0\n");
    write_file(place, "repo/pyproject.toml", "");
    write_file(place, "repo/pkg/ops/fwd.py", "# SPDX-License-Identifier: MIT OR ISC\n" FWD_FILE);
    write_file(place, "repo/pkg/ops/tools.py", TOOLS_FILE);
    write_file(place, "repo/pkg/ops/lone.py", KERNEL("lone", "pass"));
    write_file(place, "repo/pkg/ops/op.py", OPS_FILE("from .fwd import run", "run(x)"));
    gather(place, "repo/pkg/ops", NULL);
    assert_int_equal(count_of(place, "taken"), 1);
    assert_string_equal(member_of(place, "taken", 0, "license"), "Apache-2.0 AND (MIT OR ISC)");
    assert_int_equal(count_of(place, "not_taken"), 1); /* fwd.py and tools.py stand in a pair */
    assert_string_equal(member_of(place, "not_taken", 0, "path"), "repo/pkg/ops/lone.py");
    json_t *files = json_object_get(json_array_get(json_object_get(place->report, "taken"), 0), "files");
    assert_int_equal(json_array_size(files), 3);
    assert_int_equal(ka_store_get(place->store, "repo_pkg_ops_op_Op", &pair, NULL), 0);
    assert_string_equal(pair.license, "Apache-2.0 AND (MIT OR ISC)");
    assert_string_equal(pair.stub, "");
    assert_non_null(strstr(pair.forward,
                           "# licence: MIT OR ISC; of the file: MIT OR ISC; of the repository: Apache-2.0 "
                           "(repo/LICENSE)\n# SPDX-License-Identifier: MIT OR ISC\n# Copyright (c)"));
    ka_pair_free(&pair);
    write_file(place, "repo/pkg/ops/tools.py", "# SPDX-License-Identifier: LicenseRef-Mine\n" TOOLS_FILE);
    gather(place, "repo/pkg/ops", NULL); /* all that a pair takes has to be allowed */
    assert_int_equal(count_of(place, "taken"), 0);
    assert_non_null(strstr(member_of(place, "not_taken", 0, "why"), "licence of repo/pkg/ops/tools.py"));
}

static void gather__link_out_of_the_top__is_not_followed(void **state)
{
    struct place *place = *state;
    write_file(place, "repo/LICENSE", "Apache License\nVersion 2.0\n");
    write_file(place, "repo/pyproject.toml", "");
    write_file(place, "repo/op.py", OPS_FILE("from .fwd import run", "run(x)"));
    static const char *const outside[] = {"repo_two/fwd.py", "repx/fwd.py"};
    KA_AUTO_FREE char *link = ka_path_join(place->dir, "repo/fwd.py");
    for (size_t i = 0; i < KA_COUNT(outside); i++) {
        KA_AUTO_FREE char *to = ka_path_join(place->dir, outside[i]);
        write_file(place, outside[i], FWD_FILE TOOLS_FILE);
        unlink(link);
        assert_int_equal(symlink(to, link), 0);
        gather(place, "repo", NULL);
        assert_int_equal(count_of(place, "taken"), 0);
        assert_non_null(strstr(member_of(place, "not_taken", 0, "why"), "forward launches no"));
    }
}

static void gather__two_of_one_name__are_both_kept(void **state)
{
    struct place *place = *state;
    size_t count;
    write_file(place, "repo/pyproject.toml", "[project]\nlicense = \"MIT\"\n");
    write_file(place, "repo/ops/norm.py", GOOD);
    write_file(place, "repo/ops_norm.py", GOOD);
    for (int i = 0; i < 2; i++) /* again: the same two */
        gather(place, "repo", NULL);
    assert_string_equal(member_of(place, "taken", 0, "id"), "repo_ops_norm_Good");
    assert_string_equal(member_of(place, "taken", 1, "id"), "repo_ops_norm_Good_18");
    assert_int_equal(ka_store_count(place->store, &count, NULL), 0);
    assert_int_equal(count, 2);
}

static void gather__bytes_that_are_no_text__are_shown_or_refused(void **state)
{
    struct place *place = *state;
    write_file(place, "repo/LICEN\xff/LICENSE", "Apache License\nVersion 2.0\n");
    write_file(place, "repo/pyproject.toml", "");
    write_file(place, "repo/LICEN\xff/go\xc3\"od.py", GOOD);
    write_file(place, "repo/latin.py", "# caf\xe9\n" GOOD_TEXT);
    write_file(place, "repo/op.py", OPS_FILE("from .latin import Good", "Good.apply(x)"));
    gather(place, "repo", NULL);
    assert_int_equal(count_of(place, "taken"), 1);
    assert_string_equal(member_of(place, "taken", 0, "path"), "repo/LICEN?/go?_od.py");
    assert_true(ka_ends_with(member_of(place, "taken", 0, "license_from"), "/repo/LICEN?/LICENSE"));
    assert_int_equal(count_of(place, "not_taken"), 2);
    assert_string_equal(member_of(place, "not_taken", 0, "why"), "it is not UTF-8");
    assert_non_null(strstr(member_of(place, "not_taken", 1, "why"), "forward launches no"));
}

#define HASH_A "0123456789abcdef0123456789abcdef01234567"
#define HASH_B "89abcdef0123456789abcdef0123456789abcdef"

static void commit__of_every_kind_of_repository__is_read(void **state)
{
    struct place *place = *state;
    static const struct {
        const char *files[8], *hash;
    } cases[] = {
        {{"repo/.git/HEAD", HASH_A "\n"}, HASH_A},
        {{"repo/.git/HEAD", "ref: refs/heads/a/b\n", "repo/.git/refs/heads/a/b", HASH_B "\n"}, HASH_B},
        {{"repo/.git/HEAD", "ref: refs/heads/m\n", "repo/.git/packed-refs",
          "# pack-refs with: peeled\n" HASH_B " refs/heads/mm\n" HASH_A " refs/heads/m\n^" HASH_B "\n"},
         HASH_A},
        {{"repo/.git", "gitdir: ../main/.git/worktrees/w\n", "main/.git/worktrees/w/HEAD",
          "ref: refs/heads/m\n", "main/.git/worktrees/w/commondir", "../..\n", "main/.git/refs/heads/m",
          HASH_A "\n"},
         HASH_A},
        {{"repo/.git/HEAD", "ref: refs/../../secret\n", "repo/secret", HASH_A "\n", "repo/.git/refs/x", ""},
         NULL},
        {{"repo/.git/HEAD", "ref: refs/heads/m\n"}, NULL},
        {{"repo/.git/HEAD", HASH_A "0\n"}, NULL},
        {{"repo/a.py", ""}, NULL},
    };
    for (size_t i = 0; i < KA_COUNT(cases); i++) {
        for (size_t k = 0; k < KA_COUNT(cases[i].files) && cases[i].files[k]; k += 2)
            write_file(place, cases[i].files[k], cases[i].files[k + 1]);
        KA_AUTO_FREE char *repo = ka_path_join(place->dir, "repo"), *hash = ka_commit_find(repo);
        assert_string_equal(hash ? hash : "-", cases[i].hash ? cases[i].hash : "-");
        ka_rmtree(repo, NULL);
    }
}

static void gather__commit__is_kept_with_the_pair(void **state)
{
    struct place *place = *state;
    struct ka_pair pair;
    write_file(place, "repo/LICENSE", "Apache License\nVersion 2.0\n");
    write_file(place, "repo/.git/HEAD", HASH_A "\n");
    write_file(place, "repo/good.py", GOOD);
    gather(place, "repo/good.py", NULL);
    assert_string_equal(json_string_value(json_object_get(place->report, "commit")), HASH_A);
    assert_int_equal(ka_store_get(place->store, "repo_good_Good", &pair, NULL), 0);
    assert_non_null(strstr(pair.imported, " commit " HASH_A));
    ka_pair_free(&pair);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(license__texts__are_told_apart),
        cmocka_unit_test(license__names_and_fields__are_known_or_nothing),
        cmocka_unit_test_setup_teardown(gather__licence_above__is_recorded_with_path_and_hash, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(gather__no_licence__is_not_taken_unless_one_is_named, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(gather__spdx_line__goes_before_the_licence_file, setup, teardown),
        cmocka_unit_test_setup_teardown(gather__licence_of_ones_own__allows_nothing, setup, teardown),
        cmocka_unit_test_setup_teardown(gather__package__is_followed_and_each_licence_kept, setup, teardown),
        cmocka_unit_test_setup_teardown(gather__link_out_of_the_top__is_not_followed, setup, teardown),
        cmocka_unit_test_setup_teardown(gather__two_of_one_name__are_both_kept, setup, teardown),
        cmocka_unit_test_setup_teardown(gather__bytes_that_are_no_text__are_shown_or_refused, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(commit__of_every_kind_of_repository__is_read, setup, teardown),
        cmocka_unit_test_setup_teardown(gather__commit__is_kept_with_the_pair, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
