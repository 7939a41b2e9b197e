/* Statements of SQLite. Knows no table. */
#include "sql.h"

#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

void ka_sql_end(sqlite3_stmt **stmt)
{
    sqlite3_finalize(*stmt);
}

static int start(sqlite3 *db, sqlite3_stmt **stmt, const char *sql, const char *types, va_list values)
{
    int rc = sqlite3_prepare_v2(db, sql, -1, stmt, NULL);
    for (int i = 1; rc == SQLITE_OK && *types; i++, types++) {
        const void *bytes = *types == 's' || *types == 'b' ? va_arg(values, const void *) : NULL;
        if (*types == 's')
            rc = sqlite3_bind_text(*stmt, i, bytes, -1, SQLITE_STATIC);
        else if (*types == 'b')
            rc = sqlite3_bind_blob64(*stmt, i, bytes, va_arg(values, size_t), SQLITE_STATIC);
        else if (*types == 'i')
            rc = sqlite3_bind_int64(*stmt, i, va_arg(values, int64_t));
        else
            rc = sqlite3_bind_double(*stmt, i, va_arg(values, double));
    }
    return rc;
}

int ka_sql_start(sqlite3 *db, sqlite3_stmt **stmt, const char *sql, const char *types, ...)
{
    va_list values;
    va_start(values, types);
    int rc = start(db, stmt, sql, types, values);
    va_end(values);
    return rc;
}

int ka_sql_run(sqlite3 *db, const char *sql, const char *types, ...)
{
    KA_AUTO_STMT sqlite3_stmt *stmt = NULL;
    va_list values;
    va_start(values, types);
    int rc = start(db, &stmt, sql, types, values);
    va_end(values);
    rc = rc ? rc : sqlite3_step(stmt);
    return rc == SQLITE_DONE ? SQLITE_OK : rc;
}

const char *ka_sql_text(sqlite3_stmt *stmt, int column)
{
    const unsigned char *text = sqlite3_column_text(stmt, column);
    return text ? (const char *)text : "";
}
