/* Installed packages in an environment made of files: how they are named, where they lie, whose they are. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>
#include <errno.h>

#include "base/files.h"
#include "import_fixture.h"
#include "rag/gather.h"
#include "rag/package.h"

#define SITE "env/lib/python3.12/site-packages/"

static char folder[64];
static struct ka_sites sites;

static char *below(const char *name)
{
    return ka_path_join(folder, name);
}

static void write_file(const char *name, const char *text)
{
    KA_AUTO_FREE char *path = below(name), *parent = ka_path_parent(path);
    assert_int_equal(ka_mkdirs(parent, NULL), 0);
    assert_int_equal(ka_file_put(path, text, strlen(text), NULL), 0);
}

static int setup(void **state)
{
    (void)state;
    strcpy(folder, "/tmp/ka-package-XXXXXX");
    if (!mkdtemp(folder))
        return -1;
    write_file("env/bin/python", "");
    write_file("env/pyvenv.cfg", "");
    write_file(SITE "kern/__init__.py", "raise SystemExit('imported')\n");
    write_file(SITE "kern/ops/op.py", OPS_FILE("from .fwd import run", "run(x)"));
    write_file(SITE "kern/ops/fwd.py", FWD_FILE);
    write_file(SITE "kern/ops/tools.py", TOOLS_FILE);
    write_file(SITE "kernels_of_other/__init__.py", "");
    write_file(SITE "Kern_Dist-2.1.dist-info/METADATA", "Name: kern-dist\nLicense-Expression: MIT\n\n");
    write_file(SITE "Kern_Dist-2.1.dist-info/RECORD",
               "../../bin/x,,\nkern/__init__.py,sha256=x,1\nkern/ops/op.py,sha256=y,2\n");
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    ka_sites_free(&sites);
    return ka_rmtree(folder, NULL);
}

static int find(const char *name, struct ka_package *out)
{
    KA_AUTO_FREE char *python = below("env/bin/python");
    ka_sites_free(&sites);
    ka_sites_add(&sites, python);
    return ka_package_find(&sites, name, out, NULL);
}

static void package__of_a_name_or_a_distribution__is_found_with_its_info(void **state)
{
    (void)state;
    static const struct {
        const char *name, *path;
    } cases[] = {{"kern", "kern"},
                 {"kern.ops", "kern/ops"},
                 {"kern.ops.op", "kern/ops/op.py"},
                 {"kern-dist", "kern"},
                 {"Kern_dist", "kern"}};
    for (size_t i = 0; i < KA_COUNT(cases); i++) {
        struct ka_package package;
        assert_int_equal(find(cases[i].name, &package), 0);
        KA_AUTO_FREE char *site = below(SITE), *wanted = ka_format("%s%s", site, cases[i].path);
        KA_AUTO_FREE char *top = ka_format("%skern", site);
        assert_string_equal(package.path, wanted);
        assert_string_equal(package.top, top);
        assert_true(ka_ends_with(package.info, "/Kern_Dist-2.1.dist-info"));
        assert_string_equal(package.version, "2.1");
        ka_package_free(&package);
    }
}

static void package__that_is_not_there__is_told(void **state)
{
    (void)state;
    struct ka_package package;
    static const char *const names[] = {"ker", "kern.absent", "absent"};
    for (size_t i = 0; i < KA_COUNT(names); i++)
        assert_int_equal(find(names[i], &package), -ENOENT);
    static const char *const none[] = {"../env", "a/b", "", "kern.", ".kern", "a b", "/etc"};
    for (size_t i = 0; i < KA_COUNT(none); i++)
        assert_int_equal(find(none[i], &package), -EINVAL);
}

static void package__installed_from_a_folder__is_found_there(void **state)
{
    (void)state;
    struct ka_package package;
    KA_AUTO_FREE char *repo = below("repo"), *path = below("repo/src/edit");
    KA_AUTO_FREE char *url = ka_format("{\"dir_info\": {\"editable\": true}, \"url\": \"file://%s\"}", repo);
    write_file("repo/src/edit/__init__.py", "");
    write_file(SITE "edit-1.0.dist-info/direct_url.json", url);
    assert_int_equal(find("edit", &package), 0);
    assert_string_equal(package.path, path);
    assert_null(package.top); /* its repository tells */
    ka_package_free(&package);
    KA_AUTO_FREE char *info = below(SITE "edit-1.0.dist-info");
    ka_rmtree(info, NULL);
    assert_int_equal(find("edit", &package), -ENOENT);
    KA_AUTO_FREE char *pth = ka_format("# comment\nimport os; os.abort()\n%s/src\n", repo);
    write_file(SITE "edit.pth", pth);
    assert_int_equal(find("edit", &package), 0);
    assert_string_equal(package.path, path);
    assert_null(package.top);
    ka_package_free(&package);
}

static void package__imported__keeps_version_and_the_licence_of_its_info(void **state)
{
    (void)state;
    struct ka_package package;
    struct ka_store *store = NULL;
    struct ka_pair pair;
    json_t *report = NULL;
    KA_AUTO_FREE char *db = below("pairs.db");
    write_file(SITE "LICENSE", "Apache License\nVersion 2.0\n"); /* nobody's */
    assert_int_equal(ka_store_open(db, KA_STORE_CREATE, &store, NULL), 0);
    assert_int_equal(find("kern.ops", &package), 0);
    const struct ka_gather_req req = {
        .path = package.path, .top = package.top, .info = package.info, .version = package.version};
    assert_int_equal(ka_gather(store, &req, &report, NULL), 0);
    const json_t *taken = json_array_get(json_object_get(report, "taken"), 0);
    assert_string_equal(json_string_value(json_object_get(taken, "path")), "kern/ops/op.py");
    assert_string_equal(json_string_value(json_object_get(taken, "license")), "MIT");
    assert_int_equal(ka_store_get(store, "kern_ops_op_Op", &pair, NULL), 0);
    assert_non_null(strstr(pair.imported, " version 2.1"));
    ka_pair_free(&pair);
    json_decref(report);
    ka_store_close(store);
    ka_package_free(&package);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(package__of_a_name_or_a_distribution__is_found_with_its_info, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(package__that_is_not_there__is_told, setup, teardown),
        cmocka_unit_test_setup_teardown(package__installed_from_a_folder__is_found_there, setup, teardown),
        cmocka_unit_test_setup_teardown(package__imported__keeps_version_and_the_licence_of_its_info, setup,
                                        teardown),
    };
    return cmocka_run_group_tests_name("package", tests, NULL, NULL);
}
