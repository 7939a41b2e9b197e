/* Any text, asked of an index of three: no answer is an error, and every share is positive and finite. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "rag/prose.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check(const char *id, double share, void *arg)
{
    (void)arg;
    if (strlen(id) != 1 || !isfinite(share) || !(share > 0))
        abort();
}

static sqlite3 *index_of_three(void)
{
    static const char *const TEXTS[] = {"softmax rows or not", "near and far 12", "product of tiles"};
    sqlite3 *db = NULL;
    if (sqlite3_open(":memory:", &db) || sqlite3_exec(db, KA_PROSE_SCHEMA, NULL, NULL, NULL))
        abort();
    for (size_t i = 0; i < 3; i++) {
        const char id[2] = {(char)('a' + i), '\0'};
        if (ka_prose_put(db, id, TEXTS[i], strlen(TEXTS[i])))
            abort();
    }
    return db;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static sqlite3 *db;
    if (!db)
        db = index_of_three();
    if (ka_prose_each(db, (const char *)data, size, check, NULL))
        abort();
    return 0;
}
