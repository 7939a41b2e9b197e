/* What people see on stderr: a log line a thing, or one live line a run on a terminal. stdout is for results
 * alone. It belongs to the process, as stderr does: no run has a level of its own. Loop thread only. Nothing
 * secret may be passed here: the caller redacts. */
#ifndef KA_LOG_H
#define KA_LOG_H

#include "base.h"

enum ka_log_level { KA_LOG_ERROR, KA_LOG_WARN, KA_LOG_INFO, KA_LOG_DEBUG };

/* How a line is written. */
enum ka_log_form {
    KA_LOG_TEXT,    /* time, level, message */
    KA_LOG_JOURNAL, /* "<3>message", the number being syslog's for the level: the journal has its own time */
    KA_LOG_JSON,    /* {"time", "level", "message"} */
};

/* Once, before anything is logged. `live`: redraw one line for progress (a terminal); otherwise progress is
 * printed as info lines. Again: from now on. */
void ka_log_setup(enum ka_log_level level, bool live, enum ka_log_form form);
/* "text", "journal" and "json"; for any other word, what stderr is connected to: the journal or not. */
enum ka_log_form ka_log_form_of(const char *name);
enum ka_log_level ka_log_level_of(const char *name); /* "error", "warn", "info", "debug" */

void ka_log(enum ka_log_level level, const char *fmt, ...) KA_PRINTF(2, 3);

/* Progress of something that takes long: `who` names the run. The next log line or progress replaces it. */
void ka_log_progress(const char *who, const char *fmt, ...) KA_PRINTF(2, 3);
void ka_log_progress_end(void);

#endif
