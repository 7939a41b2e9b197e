/* SQLite's statements, prepared and bound in one call. All return SQLite's codes. */
#ifndef KA_SQL_H
#define KA_SQL_H

#include <sqlite3.h>

/* A statement that is finalised where its name ends. */
#define KA_AUTO_STMT __attribute__((cleanup(ka_sql_end)))
void ka_sql_end(sqlite3_stmt **stmt);

/* Prepare `sql` and bind what follows to ?1, ?2, ...: for each letter of `types` a text ('s'; NULL is null),
 * an int64_t ('i'), a double ('d'), or bytes and their size_t ('b'). Borrowed until the statement ends. */
int ka_sql_start(sqlite3 *db, sqlite3_stmt **stmt, const char *sql, const char *types, ...);

/* The same for a statement that gives no rows, to its end: SQLITE_OK. */
int ka_sql_run(sqlite3 *db, const char *sql, const char *types, ...);

/* A column's text, "" for null; valid until the next step. */
const char *ka_sql_text(sqlite3_stmt *stmt, int column);

#endif
