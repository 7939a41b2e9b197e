/* Search over vectors in the plane: similarity is the cosine of an angle, so every expectation can be read
 * off. */
#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "rag/search.h"

static void add(struct ka_index *index, const char *id, const char *path, const char *op,
                const char *schedule, uint64_t tokens, double degrees)
{
    float vector[2] = {(float)cos(degrees * 0.017453292519943295),
                       (float)sin(degrees * 0.017453292519943295)};
    struct ka_index_row row = {id, path, op, schedule, tokens};
    assert_int_equal(ka_index_add(index, &row, vector), 0);
}

static const float EAST[2] = {1, 0};

static struct ka_index_query query(size_t topk)
{
    return (struct ka_index_query){.vector = EAST, .topk = topk, .min_sim = -1};
}

static void assert_hits(struct ka_index *index, const struct ka_index_query *q, const char *ids,
                        const char *duplicates)
{
    struct ka_hits hits = {0};
    struct ka_buf found = {0}, doubles = {0};
    assert_int_equal(ka_index_search(index, q, &hits, NULL), 0);
    for (size_t i = 0; i < hits.count; i++)
        ka_buf_printf(&found, "%s%s", i ? " " : "", hits.items[i].row.id);
    for (size_t i = 0; i < hits.duplicate_count; i++)
        ka_buf_printf(&doubles, "%s%s", i ? " " : "", hits.duplicates[i].row.id);
    assert_string_equal(ka_buf_str(&found), ids);
    assert_string_equal(ka_buf_str(&doubles), duplicates);
    ka_buf_free(&found);
    ka_buf_free(&doubles);
    ka_hits_free(&hits);
}

static struct ka_index *fan(void)
{
    struct ka_index *index = ka_index_new(2, 0);
    add(index, "c", "d/norm/c.py", "x", "s", 3, 60);
    add(index, "a", "d/norm/a.py", "y", "s", 1, 20);
    add(index, "opposite", "d/loss/o.py", "z", "s", 9, 180);
    add(index, "b", "d/attention/b.py", "w", "s", 2, -40);
    return index;
}

static void index__shares_of_words__bring_nearer(void **state)
{
    (void)state;
    struct ka_index *index = fan();
    struct ka_index_query q = query(2);
    const float none[4] = {0}, first[4] = {1, 0, 0, 0};
    assert_hits(index, &q, "a b", "");
    q.shares = none;
    assert_hits(index, &q, "a b", "");
    q.shares = first;
    assert_hits(index, &q, "c a", "");
    ka_index_free(index);
    index = ka_index_new(2, 0);
    add(index, "a", "a.py", "", "", 1, 0);
    add(index, "c", "c.py", "", "", 2, 0);
    assert_int_equal(ka_index_count(index), 2);
    assert_int_equal(ka_index_find(index, "c"), 1);
    assert_int_equal(ka_index_find(index, "b"), SIZE_MAX);
    ka_index_free(index);
}

static void index__topk_and_min_sim__bound_the_hits(void **state)
{
    (void)state;
    struct ka_index *index = fan();
    struct ka_index_query q = query(2);
    assert_hits(index, &q, "a b", "");
    q.topk = 10;
    assert_hits(index, &q, "a b c opposite", "");
    q.min_sim = 0.6;
    assert_hits(index, &q, "a b", "");
    q.min_sim = 2;
    assert_hits(index, &q, "", "");
    ka_index_free(index);
}

static void index__excludes__are_substrings_of_paths(void **state)
{
    (void)state;
    struct ka_index *index = fan();
    char **names = NULL;
    struct ka_index_query q = query(10);
    names = ka_search_split(" norm/a , ,loss,", &q.exclude_count);
    assert_int_equal(q.exclude_count, 2);
    q.excludes = (const char *const *)names;
    assert_hits(index, &q, "b c", "");
    free(names);
    ka_index_free(index);
}

static void index__near_duplicates_of_the_query__are_listed_apart(void **state)
{
    (void)state;
    struct ka_index *index = fan();
    add(index, "twin", "d/norm/t.py", "x", "s", 7, 2);
    struct ka_index_query q = query(2);
    q.tokens_hash = 2; /* b has the same tokens, though its vector is far */
    assert_hits(index, &q, "a c", "twin b");
    q.keep_duplicates = true;
    assert_hits(index, &q, "twin a", "");
    ka_index_free(index);
}

static void index__siblings__leave_half_of_the_hits_to_others(void **state)
{
    (void)state;
    struct ka_index *index = ka_index_new(2, 1);
    const char *const schedules[] = {"owner", "owner", "atomic", "partials", "scan"};
    char id[16];
    for (size_t i = 0; i < 5; i++) {
        snprintf(id, sizeof(id), "s%zu", i);
        add(index, id, "d/f/s.py", "attention", schedules[i], 10 + i, 10 + (double)i);
    }
    add(index, "far", "d/f/far.py", "other", "owner", 2, 70);
    add(index, "farther", "d/f/farther.py", "another", "owner", 3, 80);
    struct ka_index_query q = query(4);
    assert_hits(index, &q, "s0 s2 far farther", ""); /* s1 shows s0's schedule; s3 and s4 are beyond half */
    q.min_sim = 0.5;
    assert_hits(index, &q, "s0 s1 s2 s3", ""); /* nothing else is left: the most similar siblings fill up */
    ka_index_free(index);
}

static void index__many_pairs_of_one_forward__do_not_crowd_out_others(void **state)
{
    (void)state;
    struct ka_index *index = ka_index_new(2, 1);
    char id[16];
    for (size_t i = 0; i < 200; i++) {
        snprintf(id, sizeof(id), "s%03zu", i);
        add(index, id, "d/f/s.py", id, i % 2 ? "owner" : "atomic", 10, 10);
    }
    add(index, "far", "d/f/far.py", "other", "owner", 2, 70);
    add(index, "farther", "d/f/farther.py", "another", "owner", 3, 80);
    struct ka_index_query q = query(4);
    assert_hits(index, &q, "s000 s001 far farther", "");
    q.topk = 1;
    assert_hits(index, &q, "s000", "");
    ka_index_free(index);
}

static void index__empty_index_or_bad_topk__is_handled(void **state)
{
    (void)state;
    struct ka_index *index = ka_index_new(2, 0);
    struct ka_index_query q = query(3);
    assert_hits(index, &q, "", "");
    struct ka_hits hits = {0};
    struct ka_err err;
    q.topk = 0;
    assert_int_equal(ka_index_search(index, &q, &hits, &err), -EINVAL);
    q.topk = KA_INDEX_TOPK_MAX + 1;
    assert_int_equal(ka_index_search(index, &q, &hits, &err), -EINVAL);
    ka_index_free(index);
}

static void index__many_rows__gives_the_same_as_sorting_all(void **state)
{
    (void)state;
    enum { ROWS = 3000 };
    struct ka_index *index = ka_index_new(2, 0);
    for (int i = 0; i < ROWS; i++) {
        char id[16];
        snprintf(id, sizeof(id), "%d", i);
        add(index, id, "p", "", "", 0, 10 + 160.0 * ((i * 1237) % ROWS) / ROWS);
    }
    struct ka_index_query q = query(100);
    struct ka_hits hits = {0};
    assert_int_equal(ka_index_search(index, &q, &hits, NULL), 0);
    assert_int_equal(hits.count, 100);
    for (int i = 0; i < 100; i++)
        assert_int_equal(atoi(hits.items[i].row.id) * 1237 % ROWS, i);
    ka_hits_free(&hits);
    ka_index_free(index);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(index__shares_of_words__bring_nearer),
        cmocka_unit_test(index__topk_and_min_sim__bound_the_hits),
        cmocka_unit_test(index__excludes__are_substrings_of_paths),
        cmocka_unit_test(index__near_duplicates_of_the_query__are_listed_apart),
        cmocka_unit_test(index__siblings__leave_half_of_the_hits_to_others),
        cmocka_unit_test(index__many_pairs_of_one_forward__do_not_crowd_out_others),
        cmocka_unit_test(index__empty_index_or_bad_topk__is_handled),
        cmocka_unit_test(index__many_rows__gives_the_same_as_sorting_all),
    };
    return cmocka_run_group_tests_name("index", tests, NULL, NULL);
}
