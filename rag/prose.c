/* Words, their weights, and the question to FTS5. Knows no pairs and no vectors. */
#include "prose.h"

#include <ctype.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "base/sql.h"

#define MOST_WORDS 256 /* of a text: the rarest, which decide */
#define LONGEST 40     /* letters of a word; longer ones are none */

const char KA_PROSE_SCHEMA[] =
    "CREATE VIRTUAL TABLE prose USING fts5(id UNINDEXED, text, tokenize = 'unicode61');"
    "CREATE VIRTUAL TABLE prose_words USING fts5vocab(prose, row);";

struct word {
    char text[LONGEST + 1];
    double idf;
};

struct words {
    struct word *items;
    size_t count;
};

int ka_prose_put(sqlite3 *db, const char *id, const char *text, size_t len)
{
    KA_AUTO_FREE char *copy = ka_strndup(text, len);
    return ka_sql_run(db, "INSERT INTO prose (id, text) VALUES (?1, ?2)", "ss", id, copy);
}

int ka_prose_remove(sqlite3 *db, const char *id)
{
    return ka_sql_run(db, "DELETE FROM prose WHERE id = ?1", "s", id);
}

/* ---- words of a text */

static bool in_word(unsigned char c)
{
    return isalnum(c) || c >= 0x80;
}

static void add_word(struct words *words, const char *text, size_t len)
{
    if (len == 0 || len > LONGEST)
        return;
    struct word word = {.idf = 0};
    for (size_t i = 0; i < len; i++) {
        if ((unsigned char)text[i] >= 0x80)
            return;
        word.text[i] = (char)tolower((unsigned char)text[i]);
    }
    *KA_APPEND(words->items, words->count) = word;
}

static int by_text(const void *a, const void *b)
{
    return strcmp(((const struct word *)a)->text, ((const struct word *)b)->text);
}

static int by_weight(const void *a, const void *b)
{
    const struct word *x = a, *y = b;
    return x->idf != y->idf ? (x->idf < y->idf ? 1 : -1) : by_text(a, b);
}

static void find_words(const char *text, size_t len, struct words *words)
{
    for (size_t at = 0; at < len;) {
        size_t end = at;
        while (end < len && in_word((unsigned char)text[end]))
            end++;
        add_word(words, text + at, end - at);
        at = end + 1;
    }
    if (words->count)
        qsort(words->items, words->count, sizeof(*words->items), by_text);
    size_t kept = 0;
    for (size_t i = 0; i < words->count; i++)
        if (kept == 0 || strcmp(words->items[kept - 1].text, words->items[i].text) != 0)
            words->items[kept++] = words->items[i];
    words->count = kept;
}

/* ---- their weights */

static int count_pairs(sqlite3 *db, double *out)
{
    KA_AUTO_STMT sqlite3_stmt *stmt = NULL;
    int code = ka_sql_start(db, &stmt, "SELECT count(*) FROM prose", "");
    if (code)
        return code;
    code = sqlite3_step(stmt);
    *out = sqlite3_column_double(stmt, 0);
    return code == SQLITE_ROW ? SQLITE_OK : code;
}

/* FTS5's own idf, and 0 where FTS5 has next to nothing. Words that no pair has go. */
static int weigh(sqlite3 *db, struct words *words)
{
    double pairs;
    int code = count_pairs(db, &pairs);
    size_t kept = 0;
    for (size_t i = 0; code == SQLITE_OK && i < words->count; i++) {
        KA_AUTO_STMT sqlite3_stmt *stmt = NULL;
        code =
            ka_sql_start(db, &stmt, "SELECT doc FROM prose_words WHERE term = ?1", "s", words->items[i].text);
        if (code)
            break;
        code = sqlite3_step(stmt);
        double with = code == SQLITE_ROW ? sqlite3_column_double(stmt, 0) : 0;
        code = code == SQLITE_ROW || code == SQLITE_DONE ? SQLITE_OK : code;
        words->items[i].idf = log((pairs - with + 0.5) / (with + 0.5));
        if (with > 0 && words->items[i].idf > 0)
            words->items[kept++] = words->items[i];
    }
    words->count = kept;
    if (kept)
        qsort(words->items, kept, sizeof(*words->items), by_weight);
    if (kept > MOST_WORDS)
        words->count = MOST_WORDS;
    return code;
}

/* ---- the question */

static int ask(sqlite3 *db, const struct words *words, ka_prose_fn each, void *arg)
{
    KA_AUTO_BUF struct ka_buf match = {0};
    KA_AUTO_STMT sqlite3_stmt *stmt = NULL;
    double all = 0;
    for (size_t i = 0; i < words->count; i++) {
        ka_buf_printf(&match, "%s\"%s\"", i ? " OR " : "", words->items[i].text);
        all += words->items[i].idf;
    }
    int code = ka_sql_start(db, &stmt, "SELECT id, bm25(prose) FROM prose WHERE prose MATCH ?1", "s",
                            ka_buf_str(&match));
    if (code)
        return code;
    while ((code = sqlite3_step(stmt)) == SQLITE_ROW)
        each(ka_sql_text(stmt, 0), -sqlite3_column_double(stmt, 1) / all, arg);
    return code == SQLITE_DONE ? SQLITE_OK : code;
}

int ka_prose_each(sqlite3 *db, const char *text, size_t len, ka_prose_fn each, void *arg)
{
    struct words words = {0};
    find_words(text, len, &words);
    int code = weigh(db, &words);
    if (code == SQLITE_OK && words.count)
        code = ask(db, &words, each, arg);
    free(words.items);
    return code;
}
