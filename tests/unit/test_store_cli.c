/* `kernel-agent store` as a person uses it, in a folder of three pairs: exit codes, what is printed, what is
 * kept. */
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cmocka.h>

#include "agent/cli/store_cli.h"
#include "base/files.h"
#include "import_fixture.h"
#include "pair_fixture.h"
#include "rag/build.h"
#include "rag/search.h"

static char folder[64];
static struct ka_buf printed; /* stdout of the last command */

static char *below(const char *name)
{
    return ka_path_join(folder, name);
}

static void write_file(const char *name, const char *text)
{
    char *path = below(name), *slash = strrchr(path, '/');
    *slash = '\0';
    assert_int_equal(ka_mkdirs(path, NULL), 0);
    *slash = '/';
    assert_int_equal(ka_file_write(path, text, strlen(text), NULL), 0);
    free(path);
}

static int setup(void **state)
{
    (void)state;
    strcpy(folder, "/tmp/ka-cli-XXXXXX");
    if (!mkdtemp(folder))
        return -1;
    write_file("dataset/norm/rows.py", ROW_PAIR);
    write_file("dataset/matmul/dot.py", DOT_PAIR);
    write_file("dataset/README.md", "no pair");
    write_file("dataset/.hidden/x.py", "no pair");
    write_file("query.py", ROW_KERNEL("forward", "line", "  # mine") STUB_OF("forward"));
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    ka_buf_free(&printed);
    return ka_rmtree(folder, NULL);
}

static int count_verified; /* calls of the verdict */

static int verify_rows_only(const char *path, void *arg)
{
    (void)arg;
    count_verified++;
    return strstr(path, "norm/rows.py") && access(path, R_OK) == 0 ? 0 : 4;
}

/* Run `store WORDS --store pairs.db` in the folder; words are split at blanks and a leading @ means a file
 * there. */
static int store(const char *words)
{
    char *argv[16] = {ka_strdup("store")}, *copy = ka_strdup(words), *rest = copy;
    int argc = 1;
    for (char *word; (word = strsep(&rest, " ")) != NULL;)
        argv[argc++] = word[0] == '@' ? below(word + 1) : ka_strdup(word);
    argv[argc++] = ka_strdup("--store");
    argv[argc++] = below("pairs.db");
    char *out = below("stdout");
    fflush(stdout);
    int saved = dup(1), file = open(out, O_CREAT | O_TRUNC | O_WRONLY, 0600);
    dup2(file, 1);
    int code = ka_store_main_with(argc, argv, verify_rows_only, NULL);
    dup2(saved, 1);
    close(saved);
    close(file);
    ka_buf_clear(&printed);
    assert_int_equal(ka_file_read(out, 1 << 20, &printed, NULL), 0);
    free(out);
    while (argc)
        free(argv[--argc]);
    free(copy);
    return code;
}

static void build__folder__becomes_a_store(void **state)
{
    (void)state;
    assert_int_equal(store("build @dataset --json"), 0);
    json_t *o = json_loads(ka_buf_str(&printed), 0, NULL);
    assert_int_equal(json_integer_value(json_object_get(o, "pairs")), 2);
    assert_int_equal(json_integer_value(json_object_get(o, "families")), 2);
    json_decref(o);
    assert_int_equal(store("list"), 0);
    assert_non_null(strstr(printed.data, "rows"));
    assert_non_null(strstr(printed.data, "swap_owner"));
}

static void build__bad_file_or_twin__leaves_the_old_store(void **state)
{
    (void)state;
    assert_int_equal(store("build @dataset"), 0);
    write_file("dataset/norm/broken.py", "x = 1\n");
    assert_int_equal(store("build @dataset"), 3);
    assert_int_equal(store("show broken"), 2);
    assert_int_equal(store("show rows"), 0);
    char *broken = below("dataset/norm/broken.py");
    unlink(broken);
    free(broken);
    write_file("dataset/loss/rows.py", ROW_PAIR);
    assert_int_equal(store("build @dataset"), 3);
    assert_int_equal(store("build @nowhere"), 2);
    assert_int_equal(store("show rows"), 0);
}

static void build__logs_left_beside_the_old_store__do_not_reach_the_new_one(void **state)
{
    (void)state;
    assert_int_equal(store("build @dataset"), 0);
    write_file("pairs.db-wal", "left by a killed writer");
    assert_int_equal(store("build @dataset"), 0);
    write_file("pairs.db-journal", "left by another");
    assert_int_equal(store("build @dataset"), 0);
    const char *const left[] = {"pairs.db-wal", "pairs.db-shm", "pairs.db-journal"};
    for (size_t i = 0; i < KA_COUNT(left); i++) {
        char *path = below(left[i]);
        assert_int_not_equal(access(path, F_OK), 0);
        free(path);
    }
    assert_int_equal(store("show dot"), 0);
}

static void show__source__is_printed_as_it_was_stored(void **state)
{
    (void)state;
    assert_int_equal(store("build @dataset"), 0);
    assert_int_equal(store("show rows"), 0);
    assert_string_equal(printed.data, ROW_PAIR);
    assert_int_equal(store("show nothing"), 2);
}

static void search__forward_file__finds_its_like_and_reports_twins(void **state)
{
    (void)state;
    write_file("dataset/norm/twin.py", ROW_PAIR_RENAMED);
    write_file("dataset/norm/near.py", HEAD("mean", "row_reduce_correct") ROW_KERNEL("k", "r", "")
                                           ROW_KERNEL("l", "r", "") STUB_OF("k") BACKWARD);
    assert_int_equal(store("build @dataset"), 0);
    assert_int_equal(store("search @query.py --json --topk 5"), 0);
    json_t *o = json_loads(ka_buf_str(&printed), 0, NULL), *hits = json_object_get(o, "hits");
    assert_int_equal(json_array_size(json_object_get(o, "excluded")),
                     2); /* rows and twin are the query itself */
    assert_int_equal(json_array_size(hits), 2);
    assert_string_equal(json_string_value(json_object_get(json_array_get(hits, 0), "id")), "near");
    assert_string_equal(json_string_value(json_object_get(json_array_get(hits, 1), "id")), "dot");
    json_t *common = json_object_get(json_array_get(hits, 0), "both_have");
    assert_int_equal(json_array_size(common), 1);
    assert_string_equal(json_string_value(json_array_get(common, 0)), "tl.sum");
    assert_int_equal(json_array_size(json_object_get(json_array_get(hits, 1), "both_have")), 0);
    json_decref(o);
    assert_int_equal(store("search @query.py --topk 5"), 0);
    assert_non_null(strstr(printed.data, "row_reduce_correct\n       both have tl.sum\n"));
    assert_non_null(strstr(printed.data, "swap_owner\n       alike in structure alone\n"));
    assert_int_equal(store("search @query.py --rag-exclude norm"), 0);
    assert_null(strstr(printed.data, "near"));
    assert_non_null(strstr(printed.data, "dot"));
    assert_int_equal(store("search @dataset/README.md"), 3);
}

static void search__hits__carry_the_backward_source(void **state)
{
    (void)state;
    assert_int_equal(store("build @dataset"), 0);
    char *path = below("pairs.db");
    struct ka_store *db = NULL;
    struct ka_search *search = NULL;
    assert_int_equal(ka_store_open(path, KA_STORE_READ, &db, NULL), 0);
    assert_int_equal(ka_search_open(db, &search, NULL), 0);
    struct ka_search_query query = {.forward = DOT_PAIR, .topk = 1, .min_sim = -1, .keep_duplicates = true};
    struct ka_search_result found = {0};
    assert_int_equal(ka_search_run(search, &query, &found, NULL), 0);
    assert_string_equal(found.hits[0].id, "dot");
    assert_true(found.hits[0].similarity > 0.999);
    assert_non_null(strstr(found.hits[0].code, "def back("));
    assert_null(strstr(found.hits[0].code, "def product("));
    ka_search_result_free(&found);
    struct ka_err err;
    query.forward = "no functions here";
    assert_int_equal(ka_search_run(search, &query, &found, &err), -EINVAL);
    ka_search_close(search);
    ka_store_close(db);
    free(path);
}

static void add__finished_pair__is_found_afterwards(void **state)
{
    (void)state;
    assert_int_equal(store("add @dataset/norm/rows.py"), 2); /* no store yet */
    assert_int_equal(store("build @dataset"), 0);
    write_file("generated/mine/mine.py", ROW_PAIR_RENAMED);
    assert_int_equal(store("add @generated/mine/mine.py"), 0);
    assert_int_equal(store("show mine"), 0);
    assert_string_equal(printed.data, ROW_PAIR_RENAMED);
    assert_int_equal(store("add @query.py"), 3); /* a forward file is no pair */
}

static void verify__every_pair__goes_through_the_verdict(void **state)
{
    (void)state;
    assert_int_equal(store("build @dataset"), 0);
    count_verified = 0;
    assert_int_equal(store("verify --json"), 4);
    assert_int_equal(count_verified, 2);
    assert_non_null(strstr(printed.data, "\"failed\": [\n    \"dot\""));
    assert_int_equal(store("verify rows"), 0);
    assert_int_equal(store("verify absent"), 2);
}

static void import__no_store_yet__is_made_where_something_was_taken(void **state)
{
    (void)state;
    char *db = below("pairs.db");
    write_file("repo/pyproject.toml", "[project]\nlicense = \"MIT\"\n");
    write_file("repo/fwd.py", FWD_FILE);
    write_file("repo/tools.py", TOOLS_FILE);
    assert_int_equal(store("import @repo"), 3);
    assert_non_null(strstr(printed.data, "not taken  repo/fwd.py:5: it has Triton kernels"));
    assert_int_equal(access(db, F_OK), -1); /* a store without pairs is none */
    write_file("repo/op.py", OPS_FILE("from .fwd import run", "run(x)"));
    assert_int_equal(store("import @repo --json"), 0);
    json_t *all = json_loads(ka_buf_str(&printed), 0, NULL);
    json_t *taken = json_object_get(json_array_get(all, 0), "taken");
    assert_int_equal(json_array_size(taken), 1);
    assert_int_equal(json_integer_value(json_object_get(json_array_get(taken, 0), "line")), 9);
    json_decref(all);
    struct ka_store *made = NULL;
    struct ka_measures *measures = ka_calloc(1, sizeof(*measures));
    assert_int_equal(ka_store_open(db, KA_STORE_READ, &made, NULL), 0);
    assert_int_equal(ka_store_load_measures(made, measures, NULL), 0);
    assert_int_equal(measures->idf.documents, 1); /* features are weighed by what came */
    assert_int_equal(measures->parts[0].rows, 1);
    ka_store_close(made);
    free(measures);
    assert_int_equal(store("show repo_op_Op"), 0);
    assert_int_equal(store("import @repo"), 0); /* again, into the store that there is */
    assert_non_null(strstr(printed.data, "taken      repo/op.py:9: Op (MIT), as repo_op_Op"));
    assert_int_equal(store("search @query.py --min-sim -1"), 0);
    assert_non_null(strstr(printed.data, "repo_op_Op"));
    free(db);
}

static void import__name_of_a_package__is_found_and_not_imported(void **state)
{
    (void)state;
    write_file("env/bin/python", "#!/bin/sh\nexit 1\n");
    char *python = below("env/bin/python");
    assert_int_equal(chmod(python, 0755), 0);
    write_file("env/pyvenv.cfg", "");
    write_file("env/lib/python3.12/site-packages/ka_kern/__init__.py", "raise SystemExit\n");
    write_file("env/lib/python3.12/site-packages/ka_kern/op.py",
               "# SPDX-License-Identifier: MIT\n" OPS_FILE("", "bwd[(1,)](x, 1, BLOCK=2)"));
    assert_int_equal(store("import ka_kern --python @env/bin/python"), 0);
    assert_non_null(strstr(printed.data, "taken      ka_kern/op.py:10: Op (MIT), as ka_kern_op_Op"));
    assert_int_equal(store("import ka_no_such_package --python @env/bin/python"), 3);
    assert_int_equal(store("import @nowhere"), 3);
    free(python);
}

static void export__writes_every_pair_to_its_family(void **state)
{
    (void)state;
    assert_int_equal(store("build @dataset"), 0);
    assert_int_equal(store("export @copy"), 0);
    struct ka_buf text = {0};
    char *path = below("copy/matmul/dot.py");
    assert_int_equal(ka_file_read(path, 1 << 20, &text, NULL), 0);
    assert_string_equal(text.data, DOT_PAIR);
    ka_buf_free(&text);
    free(path);
}

static void usage__mistakes__give_code_two(void **state)
{
    (void)state;
    const char *const mistakes[] = {"frobnicate",
                                    "build",
                                    "build a b",
                                    "list x",
                                    "search a --topk 0",
                                    "search a --topk x",
                                    "search a --min-sim 2",
                                    "list --unknown",
                                    "list --topk"};
    for (size_t i = 0; i < KA_COUNT(mistakes); i++)
        assert_int_equal(store(mistakes[i]), 2);
    assert_int_equal(store("--help"), 0);
    assert_non_null(strstr(printed.data, "Examples:"));
    assert_int_equal(store("list"), 2); /* no store yet */
}

#define CLI_TEST(f) cmocka_unit_test_setup_teardown(f, setup, teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        CLI_TEST(build__folder__becomes_a_store),
        CLI_TEST(build__bad_file_or_twin__leaves_the_old_store),
        CLI_TEST(build__logs_left_beside_the_old_store__do_not_reach_the_new_one),
        CLI_TEST(show__source__is_printed_as_it_was_stored),
        CLI_TEST(search__forward_file__finds_its_like_and_reports_twins),
        CLI_TEST(search__hits__carry_the_backward_source),
        CLI_TEST(add__finished_pair__is_found_afterwards),
        CLI_TEST(verify__every_pair__goes_through_the_verdict),
        CLI_TEST(import__no_store_yet__is_made_where_something_was_taken),
        CLI_TEST(import__name_of_a_package__is_found_and_not_imported),
        CLI_TEST(export__writes_every_pair_to_its_family),
        CLI_TEST(usage__mistakes__give_code_two),
    };
    return cmocka_run_group_tests_name("store_cli", tests, NULL, NULL);
}
