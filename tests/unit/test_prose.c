/* Shares of what a text says: which pairs have one, in what order, and that no text breaks the question. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "base/base.h"
#include "rag/prose.h"

static const char *const TEXTS[][2] = {
    {"attn", "flash attention, causal: softmax of scores, q_ptr k_ptr v_ptr x_ptr"},
    {"ce", "cross entropy of logits: log softmax and a label, x_ptr"},
    {"dot", "product of two matrices by tiles, a_ptr b_ptr x_ptr"},
    {"norm", "layer norm over rows, mean and rstd, x_ptr"},
    {"scan", "cumulative sum with a carry, x_ptr"},
};

static sqlite3 *open_db(void)
{
    sqlite3 *db = NULL;
    assert_int_equal(sqlite3_open(":memory:", &db), SQLITE_OK);
    assert_int_equal(sqlite3_exec(db, KA_PROSE_SCHEMA, NULL, NULL, NULL), SQLITE_OK);
    for (size_t i = 0; i < KA_COUNT(TEXTS); i++)
        assert_int_equal(ka_prose_put(db, TEXTS[i][0], TEXTS[i][1], strlen(TEXTS[i][1])), SQLITE_OK);
    return db;
}

struct found {
    char best[16];
    double share;
    size_t count;
};

static void note(const char *id, double share, void *arg)
{
    struct found *found = arg;
    assert_true(share > 0);
    if (share > found->share) {
        found->share = share;
        snprintf(found->best, sizeof(found->best), "%s", id);
    }
    found->count++;
}

static struct found asked(sqlite3 *db, const char *text, size_t len)
{
    struct found found = {0};
    assert_int_equal(ka_prose_each(db, text, len, note, &found), SQLITE_OK);
    return found;
}

static void prose__words_in_common__rare_ones_decide(void **state)
{
    (void)state;
    sqlite3 *db = open_db();
    const char *query = "def soft(x_ptr):  # Softmax, then the LABEL's entropy";
    struct found found = asked(db, query, strlen(query));
    assert_string_equal(found.best, "ce");
    assert_int_equal(found.count, 2); /* that all have x_ptr finds nobody */
    struct found twice = asked(db, "entropy entropy ENTROPY", 23), once = asked(db, "entropy", 7);
    assert_true(twice.share == once.share && once.share > 0.5);
    /* What else a text says lessens the share, where some pair says it. */
    const char *longer = "entropy carry";
    assert_true(asked(db, longer, strlen(longer)).share < once.share);
    const char *unknown = "entropy zebra";
    assert_true(asked(db, unknown, strlen(unknown)).share == once.share);
    sqlite3_close(db);
}

static void prose__text_of_any_kind__is_no_syntax(void **state)
{
    (void)state;
    sqlite3 *db = open_db();
    static const char *const NONE[] = {"",         "x_ptr", "\"", "\" OR \"", "NOT * ^ ( ) : {w z}",
                                       "\xff\xfe", "größe"};
    for (size_t i = 0; i < KA_COUNT(NONE); i++)
        assert_int_equal(asked(db, NONE[i], strlen(NONE[i])).count, 0);
    assert_string_equal(asked(db, "carry\" AND NEAR(", 16).best, "scan");
    assert_string_equal(asked(db, "zz\0carry", 8).best, "scan");
    size_t len = 1 << 20;
    char *text = ka_calloc(len, 1);
    for (size_t i = 0; i < len; i++)
        text[i] = (char)('a' + (i * i / 7 + i) % 27);
    for (size_t i = 0; i < len; i++)
        text[i] = text[i] > 'z' ? ' ' : text[i];
    asked(db, text, len);
    free(text);
    sqlite3_close(db);
}

static void prose__pair_removed__has_no_share(void **state)
{
    (void)state;
    sqlite3 *db = open_db();
    assert_int_equal(ka_prose_remove(db, "scan"), SQLITE_OK);
    assert_int_equal(asked(db, "carry", 5).count, 0);
    sqlite3_close(db);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(prose__words_in_common__rare_ones_decide),
        cmocka_unit_test(prose__text_of_any_kind__is_no_syntax),
        cmocka_unit_test(prose__pair_removed__has_no_share),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
