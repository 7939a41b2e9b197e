/* The store: what is put comes back, and everything wrong with a file is said with its remedy. */
#include <errno.h>
#include <setjmp.h>
#include <sqlite3.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>

#include "base/files.h"
#include "pair_fixture.h"
#include "rag/store.h"

struct place {
    char folder[64], path[96];
};

static int make_place(void **state)
{
    struct place *place = ka_calloc(1, sizeof(*place));
    strcpy(place->folder, "/tmp/ka-store-XXXXXX");
    if (!mkdtemp(place->folder))
        return -1;
    snprintf(place->path, sizeof(place->path), "%s/pairs.db", place->folder);
    *state = place;
    return 0;
}

static int remove_place(void **state)
{
    struct place *place = *state;
    ka_rmtree(place->folder, NULL);
    free(place);
    return 0;
}

static struct ka_store *create(const struct place *place)
{
    struct ka_store *store = NULL;
    assert_int_equal(ka_store_open(place->path, KA_STORE_CREATE, &store, NULL), 0);
    return store;
}

static void put(struct ka_store *store, const char *path, const char *source, const char *embedder, float x)
{
    struct ka_pair pair;
    assert_int_equal(ka_pair_parse(path, source, strlen(source), &pair, NULL), 0);
    float vector[2] = {x, 0};
    struct ka_embedding e = {embedder, 1, 2, vector, UINT64_MAX - 1};
    assert_int_equal(ka_store_put(store, &pair, &e, NULL), 0);
    ka_pair_free(&pair);
}

static void store__pairs__come_back_after_reopening(void **state)
{
    struct place *place = *state;
    struct ka_store *store = create(place);
    put(store, "dataset/norm/rows.py", ROW_PAIR, "e", 1);
    put(store, "dataset/matmul/dot.py", DOT_PAIR, "e", 1);
    ka_store_close(store);
    assert_int_equal(ka_store_open(place->path, KA_STORE_READ, &store, NULL), 0);
    size_t count = 0;
    assert_int_equal(ka_store_count(store, &count, NULL), 0);
    assert_int_equal(count, 2);
    struct ka_pair pair;
    assert_int_equal(ka_store_get(store, "rows", &pair, NULL), 0);
    assert_string_equal(pair.source, ROW_PAIR);
    assert_string_equal(pair.family, "norm");
    ka_pair_free(&pair);
    assert_int_equal(ka_store_check(store, NULL), 0);
    ka_store_close(store);
}

static void tell(const char *id, double share, void *arg)
{
    assert_true(share > 0);
    strcat(strcat(arg, id), " ");
}

static void store__pair_put_twice__is_replaced_with_its_vectors(void **state)
{
    struct place *place = *state;
    struct ka_store *store = create(place);
    put(store, "dataset/norm/rows.py", ROW_PAIR, "old", 1);
    put(store, "dataset/norm/rows.py", ROW_PAIR_RENAMED, "e", 1);
    size_t count = 0;
    assert_int_equal(ka_store_count(store, &count, NULL), 0);
    assert_int_equal(count, 1);
    struct ka_pair pair;
    assert_int_equal(ka_store_get(store, "rows", &pair, NULL), 0);
    assert_string_equal(pair.schedule, "partials_then_reduce");
    ka_pair_free(&pair);
    put(store, "dataset/matmul/dot.py", DOT_PAIR, "e", 1);
    put(store, "dataset/matmul/other.py", DOT_PAIR, "e", 1);
    char told[32] = "";
    assert_int_equal(ka_store_each_share(store, ROW_PAIR, strlen(ROW_PAIR), tell, told, NULL), 0);
    assert_string_equal(told, "rows ");
    ka_store_close(store);
    sqlite3 *db = NULL;
    assert_int_equal(sqlite3_open(place->path, &db), SQLITE_OK);
    sqlite3_stmt *stmt = NULL;
    assert_int_equal(sqlite3_prepare_v2(db,
                                        "SELECT group_concat(embedder) FROM embeddings WHERE pair = 'rows'",
                                        -1, &stmt, NULL),
                     SQLITE_OK);
    assert_int_equal(sqlite3_step(stmt), SQLITE_ROW);
    assert_string_equal((const char *)sqlite3_column_text(stmt, 0), "e");
    sqlite3_finalize(stmt);
    sqlite3_close(db);
}

static void store__transaction_left_open__changes_nothing(void **state)
{
    struct place *place = *state;
    struct ka_store *store = create(place);
    assert_int_equal(ka_store_begin(store, NULL), 0);
    put(store, "dataset/norm/rows.py", ROW_PAIR, "e", 1);
    ka_store_close(store);
    assert_int_equal(ka_store_open(place->path, KA_STORE_READ, &store, NULL), 0);
    struct ka_pair pair;
    struct ka_err err;
    assert_int_equal(ka_store_get(store, "rows", &pair, &err), -ENOENT);
    assert_non_null(strstr(err.msg, "store list"));
    ka_store_close(store);
}

static int count_vector(const struct ka_store_row *row, const struct ka_embedding *e, void *arg)
{
    assert_string_equal(row->id, "rows");
    assert_true(e->vector[0] == 0.5f);
    assert_true(e->tokens_hash == UINT64_MAX - 1);
    ++*(int *)arg;
    return 0;
}

static void store__vectors_of_another_embedder__are_never_mixed(void **state)
{
    struct place *place = *state;
    struct ka_store *store = create(place);
    put(store, "dataset/norm/rows.py", ROW_PAIR, "mine", 0.5f);
    int seen = 0;
    struct ka_err err;
    assert_int_equal(ka_store_each_vector(store, "mine", 1, 2, count_vector, &seen, &err), 0);
    assert_int_equal(seen, 1);
    assert_int_equal(ka_store_each_vector(store, "mine", 2, 2, count_vector, &seen, &err), -ESTALE);
    assert_int_equal(ka_store_each_vector(store, "mine", 1, 3, count_vector, &seen, &err), -ESTALE);
    put(store, "dataset/matmul/dot.py", DOT_PAIR, "other", 0.5f);
    assert_int_equal(ka_store_each_vector(store, "mine", 1, 2, count_vector, &seen, &err), -ESTALE);
    assert_non_null(strstr(err.msg, "pair dot has no vector of embedder mine version 1"));
    assert_int_equal(seen, 1);
    ka_store_close(store);
}

static void store__missing_damaged_foreign_or_newer_file__is_explained(void **state)
{
    struct place *place = *state;
    struct ka_store *store = NULL;
    struct ka_err err;
    assert_int_equal(ka_store_open(place->path, KA_STORE_READ, &store, &err), -ENOENT);
    assert_non_null(strstr(err.msg, "store build"));
    char junk[4096];
    memset(junk, 'j', sizeof(junk));
    assert_int_equal(ka_file_write(place->path, junk, sizeof(junk), NULL), 0);
    assert_int_equal(ka_store_open(place->path, KA_STORE_READ, &store, &err), -EILSEQ);
    assert_non_null(strstr(err.msg, "store build"));
    assert_int_equal(ka_store_open(place->path, KA_STORE_CREATE, &store, &err), -EEXIST);
    unlink(place->path);
    sqlite3 *db = NULL;
    assert_int_equal(sqlite3_open(place->path, &db), SQLITE_OK);
    sqlite3_exec(db, "CREATE TABLE t (x)", NULL, NULL, NULL);
    sqlite3_close(db);
    assert_int_equal(ka_store_open(place->path, KA_STORE_READ, &store, &err), -EILSEQ);
    unlink(place->path);
    ka_store_close(create(place));
    assert_int_equal(sqlite3_open(place->path, &db), SQLITE_OK);
    sqlite3_exec(db, "PRAGMA user_version = 9", NULL, NULL, NULL);
    sqlite3_close(db);
    assert_int_equal(ka_store_open(place->path, KA_STORE_READ, &store, &err), -EPROTO);
    assert_non_null(strstr(err.msg, "schema 9"));
    assert_null(store);
}

static void store__source_changed_behind_its_back__fails_the_check(void **state)
{
    struct place *place = *state;
    struct ka_store *store = create(place);
    put(store, "dataset/norm/rows.py", ROW_PAIR, "e", 1);
    ka_store_close(store);
    sqlite3 *db = NULL;
    assert_int_equal(sqlite3_open(place->path, &db), SQLITE_OK);
    assert_int_equal(sqlite3_exec(db, "UPDATE pairs SET source = source || ' '", NULL, NULL, NULL),
                     SQLITE_OK);
    sqlite3_close(db);
    assert_int_equal(ka_store_open(place->path, KA_STORE_READ, &store, NULL), 0);
    struct ka_err err;
    assert_int_equal(ka_store_check(store, &err), -EILSEQ);
    assert_non_null(strstr(err.msg, "rows"));
    ka_store_close(store);
}

static void store__what_the_embedder_measured__is_kept_with_it(void **state)
{
    struct place *place = *state;
    struct ka_store *store = create(place);
    struct ka_measures *measures = ka_calloc(1, sizeof(*measures)), *back = ka_calloc(1, sizeof(*back));
    back->idf.documents = 9;
    assert_int_equal(ka_store_load_measures(store, back, NULL), 0);
    assert_int_equal(back->idf.documents, 0);
    measures->idf.documents = 3;
    measures->idf.df[KA_IDF_BUCKETS - 1] = 2;
    measures->parts[1].factor[7] = 0.5f;
    assert_int_equal(ka_store_save_measures(store, measures, NULL), 0);
    assert_int_equal(ka_store_load_measures(store, back, NULL), 0);
    assert_memory_equal(measures, back, sizeof(*measures));
    ka_store_close(store);
    free(measures);
    free(back);
}

static void store__reader_beside_a_writer__sees_the_last_commit(void **state)
{
    struct place *place = *state;
    ka_store_close(create(place));
    struct ka_store *writer = NULL, *reader = NULL;
    assert_int_equal(ka_store_open(place->path, KA_STORE_WRITE, &writer, NULL), 0);
    assert_int_equal(ka_store_open(place->path, KA_STORE_READ, &reader, NULL), 0);
    size_t count = 9;
    assert_int_equal(ka_store_begin(writer, NULL), 0);
    put(writer, "dataset/norm/rows.py", ROW_PAIR, "e", 1);
    assert_int_equal(ka_store_count(reader, &count, NULL), 0); /* no waiting for the writer */
    assert_int_equal(count, 0);
    assert_int_equal(ka_store_commit(writer, NULL), 0);
    assert_int_equal(ka_store_count(reader, &count, NULL), 0);
    assert_int_equal(count, 1);
    struct ka_pair pair;
    assert_int_equal(ka_pair_parse("x/y.py", ROW_PAIR, strlen(ROW_PAIR), &pair, NULL), 0);
    float vector[1] = {1};
    struct ka_embedding e = {"e", 1, 1, vector, 0};
    struct ka_err err;
    assert_int_equal(ka_store_put(reader, &pair, &e, &err), -EROFS);
    ka_pair_free(&pair);
    ka_store_close(reader);
    ka_store_close(writer);
}

static int stop_at_dot(const struct ka_store_row *row, void *arg)
{
    ++*(int *)arg;
    return strcmp(row->id, "dot") == 0 ? -ECANCELED : 0;
}

static void store__walk__is_sorted_and_stops_when_told(void **state)
{
    struct place *place = *state;
    struct ka_store *store = create(place);
    put(store, "dataset/norm/rows.py", ROW_PAIR, "e", 1);
    put(store, "dataset/matmul/dot.py", DOT_PAIR, "e", 1);
    int seen = 0;
    assert_int_equal(ka_store_each(store, stop_at_dot, &seen, NULL), -ECANCELED);
    assert_int_equal(seen, 1);
    ka_store_close(store);
}

#define STORE_TEST(f) cmocka_unit_test_setup_teardown(f, make_place, remove_place)

int main(void)
{
    const struct CMUnitTest tests[] = {
        STORE_TEST(store__pairs__come_back_after_reopening),
        STORE_TEST(store__pair_put_twice__is_replaced_with_its_vectors),
        STORE_TEST(store__transaction_left_open__changes_nothing),
        STORE_TEST(store__vectors_of_another_embedder__are_never_mixed),
        STORE_TEST(store__missing_damaged_foreign_or_newer_file__is_explained),
        STORE_TEST(store__source_changed_behind_its_back__fails_the_check),
        STORE_TEST(store__what_the_embedder_measured__is_kept_with_it),
        STORE_TEST(store__reader_beside_a_writer__sees_the_last_commit),
        STORE_TEST(store__walk__is_sorted_and_stops_when_told),
    };
    return cmocka_run_group_tests_name("store", tests, NULL, NULL);
}
