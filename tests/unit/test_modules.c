/* Which of the modules beside a forward file go into its run. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "agent/disk/modules.h"
#include "base/files.h"

static char root[64], last_hash[KA_HASH_HEX];
static const char *path;        /* folders to look in besides */
static const json_t *installed; /* and where the interpreter looks */

static int set_up(void **state)
{
    (void)state;
    snprintf(root, sizeof(root), "/tmp/ka-test-modules-XXXXXX");
    return mkdtemp(root) ? 0 : -1;
}

static int tear_down(void **state)
{
    (void)state;
    return ka_rmtree(root, NULL);
}

static void put(const char *name, const char *text)
{
    char *file = ka_path_join(root, name), *folder = ka_path_parent(file);
    assert_int_equal(ka_mkdirs(folder, NULL), 0);
    assert_int_equal(ka_file_put(file, text, strlen(text), NULL), 0);
    free(folder);
    free(file);
}

static bool is_frozen(const char *name)
{
    char *copies = ka_path_join(root, "run/modules"), *file = ka_path_join(copies, name);
    bool there = access(file, R_OK) == 0;
    free(copies);
    free(file);
    return there;
}

static size_t freeze_of(const char *name, const char *source)
{
    char *into = ka_path_join(root, "run/modules"), *file = ka_path_join(root, name);
    struct ka_err err = {{0}};
    struct ka_modules copied = {.count = 99}, seen;
    assert_int_equal(
        ka_modules_freeze(&(struct ka_modules_req){source, file, path, into, installed}, &copied, &err), 0);
    assert_int_equal(
        ka_modules_freeze(&(struct ka_modules_req){source, file, path, NULL, installed}, &seen, &err), 0);
    assert_string_equal(seen.hash, copied.hash);
    memcpy(last_hash, seen.hash, sizeof(last_hash));
    free(into);
    free(file);
    return copied.count;
}

static size_t freeze(const char *source)
{
    return freeze_of("forward.py", source);
}

static void modules__every_spelling_of_an_import__is_found(void **state)
{
    (void)state;
    put("one.py", "");
    put("two.py", "");
    put("three.py", "");
    put("four.py", "");
    put("five.py", "");
    put("never.py", "");
    assert_int_equal(freeze("import torch, one as first, two\n"
                            "from three import (a,\n    b)\n"
                            "def f():\n\timport four # here\n"
                            "important = five\nfrom five.six import x\n"
                            "# import never\n"),
                     5);
    assert_true(is_frozen("one.py") && is_frozen("two.py") && is_frozen("three.py") && is_frozen("four.py"));
    assert_true(is_frozen("five.py") && !is_frozen("never.py"));
}

static void modules__what_they_import__comes_along_and_circles_end(void **state)
{
    (void)state;
    put("a.py", "import b\n");
    put("b.py", "import a\nfrom pack.inner import x\n");
    put("pack/__init__.py", "");
    put("pack/inner/deep.py", "import c\n");
    put("pack/inner/data.bin", "no module");
    put("pack/__pycache__/old.py", "");
    put("c.py", "");
    assert_int_equal(freeze("import a\n"), 5);
    assert_true(is_frozen("pack/inner/deep.py") && is_frozen("c.py"));
    assert_false(is_frozen("pack/inner/data.bin") || is_frozen("pack/__pycache__/old.py"));
}

static void modules__nothing_of_the_folder__makes_no_folder(void **state)
{
    (void)state;
    put("other.py", "");
    assert_int_equal(freeze("import torch\nfrom triton import language\nimport ..other\n"), 0);
    assert_false(is_frozen(""));
}

static void modules__installed_elsewhere__come_after_all_others(void **state)
{
    (void)state;
    put("near.py", "");
    put("src/near.py", "import never\n");
    put("src/mine/__init__.py", "from mine import deep\nimport other\n");
    put("src/mine/deep.py", "");
    put("src/other.py", "");
    put("src/unasked.py", "");
    char *folder = ka_path_join(root, "src"), *gone = ka_path_join(root, "gone");
    json_t *folders = json_pack("[s, s, n]", gone, folder);
    installed = folders;
    assert_int_equal(freeze("import near\nfrom mine.deep import x\n"), 4);
    installed = NULL;
    assert_true(is_frozen("mine/deep.py") && is_frozen("other.py") && !is_frozen("unasked.py"));
    json_decref(folders);
    free(folder);
    free(gone);
}

static void modules__links__are_not_followed(void **state)
{
    (void)state;
    char *link = ka_path_join(root, "secret.py");
    assert_int_equal(symlink("/etc/passwd", link), 0);
    assert_int_equal(freeze("import secret\n"), 0);
    free(link);
}

static void modules__too_many__are_told(void **state)
{
    (void)state;
    for (int i = 0; i <= KA_MODULES_MAX; i++) {
        char name[40];
        snprintf(name, sizeof(name), "many/m%d.py", i);
        put(name, "");
    }
    char *into = ka_path_join(root, "run/modules"), *file = ka_path_join(root, "forward.py");
    struct ka_err err = {{0}};
    struct ka_modules found;
    const struct ka_modules_req request = {"import many\n", file, NULL, into, NULL};
    assert_int_equal(ka_modules_freeze(&request, &found, &err), -EFBIG);
    assert_non_null(strstr(err.msg, "more than 500 modules"));
    free(into);
    free(file);
}

static void modules__of_a_pair_in_a_run_s_folder__are_that_run_s(void **state)
{
    (void)state;
    put("earlier/run.db", "");
    put("earlier/helper.py", "");
    put("earlier/modules/pack/__init__.py", "");
    assert_int_equal(freeze_of("earlier/pair.py", "import pack, helper\n"), 1);
    assert_true(is_frozen("pack/__init__.py"));
}

static char *text_of(const char *name)
{
    char *copies = ka_path_join(root, "run/modules"), *file = ka_path_join(copies, name);
    struct ka_buf text = {0};
    assert_int_equal(ka_file_read(file, 1000, &text, NULL), 0);
    free(copies);
    free(file);
    return ka_buf_steal(&text);
}

static void modules__relative_imports__bring_the_package_and_its_name(void **state)
{
    (void)state;
    put("lib/__init__.py", "");
    put("lib/utils.py", "");
    put("lib/ops/__init__.py", "");
    put("lib/ops/forward.py", "");
    put("lib/generated/pair.py", "");
    put("lib/generated/run-1/run.db", "");
    put("lib/generated/run-1/pair.py", "");
    assert_int_equal(freeze_of("lib/ops/forward.py", "from ..utils import x\n"), 4);
    assert_true(is_frozen("lib/utils.py") && !is_frozen("lib/generated"));
    char *package = text_of(".package");
    assert_string_equal(package, "lib.ops");
    free(package);
}

static void modules__relative_import_without_a_package__makes_the_folder_one(void **state)
{
    (void)state;
    put("kernels/utils.py", "");
    assert_int_equal(freeze_of("kernels/forward.py", "from .utils import x\n"), 1);
    char *package = text_of(".package");
    assert_string_equal(package, "kernels");
    free(package);
}

static void modules__own_package_by_its_name__is_found_above(void **state)
{
    (void)state;
    put("lib/__init__.py", "");
    put("lib/utils.py", "");
    put("lib/ops/__init__.py", "");
    assert_int_equal(freeze_of("lib/ops/forward.py", "from lib.utils import x\n"), 3);
    assert_false(is_frozen(".package"));
}

static void modules__folders_of_the_path__come_after_the_file_s_own(void **state)
{
    (void)state;
    put("here/one.py", "1");
    put("there/one.py", "2");
    put("there/two.py", "");
    char *there = ka_format("%s/there,", root);
    path = there;
    assert_int_equal(freeze_of("here/forward.py", "import one, two\n"), 2);
    char *one = text_of("one.py");
    assert_string_equal(one, "1");
    free(one);
    free(there);
    path = NULL;
}

static void modules__folder_of_the_path_that_is_none__is_named(void **state)
{
    (void)state;
    struct ka_modules found;
    struct ka_err err;
    const struct ka_modules_req request = {"import one\n", "/tmp/forward.py", "/nowhere/at/all", NULL, NULL};
    assert_int_equal(ka_modules_freeze(&request, &found, &err), -ENOENT);
    assert_non_null(strstr(err.msg, "--path /nowhere/at/all"));
}

static void modules__hash__is_that_of_names_and_texts(void **state)
{
    (void)state;
    char first[KA_HASH_HEX];
    assert_int_equal(freeze("import torch\n"), 0);
    assert_string_equal(last_hash, "");
    put("one.py", "x = 1");
    freeze("import one\n");
    memcpy(first, last_hash, sizeof(first));
    put("never.py", "");
    freeze("import one\n");
    assert_string_equal(last_hash, first);
    put("one.py", "x = 2");
    freeze("import one\n");
    assert_string_not_equal(last_hash, first);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(modules__every_spelling_of_an_import__is_found, set_up, tear_down),
        cmocka_unit_test_setup_teardown(modules__what_they_import__comes_along_and_circles_end, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(modules__nothing_of_the_folder__makes_no_folder, set_up, tear_down),
        cmocka_unit_test_setup_teardown(modules__installed_elsewhere__come_after_all_others, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(modules__links__are_not_followed, set_up, tear_down),
        cmocka_unit_test_setup_teardown(modules__too_many__are_told, set_up, tear_down),
        cmocka_unit_test_setup_teardown(modules__of_a_pair_in_a_run_s_folder__are_that_run_s, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(modules__relative_imports__bring_the_package_and_its_name, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(modules__relative_import_without_a_package__makes_the_folder_one,
                                        set_up, tear_down),
        cmocka_unit_test_setup_teardown(modules__own_package_by_its_name__is_found_above, set_up, tear_down),
        cmocka_unit_test_setup_teardown(modules__folders_of_the_path__come_after_the_file_s_own, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(modules__folder_of_the_path_that_is_none__is_named, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(modules__hash__is_that_of_names_and_texts, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
