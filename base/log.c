/* Lines on stderr. Knows nothing of runs. */
#include "log.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "utf8.h"

static const char *const level_names[] = {"error", "warn", "info", "debug"};

/* There is one stderr, so there is one of these. */
static struct {
    enum ka_log_level threshold;
    enum ka_log_form form;
    bool live;
    bool line_open; /* an unfinished progress line is on the terminal */
} sink = {.threshold = KA_LOG_INFO};

void ka_log_setup(enum ka_log_level level, bool live, enum ka_log_form form)
{
    sink.threshold = level;
    sink.live = live && form == KA_LOG_TEXT;
    sink.form = form;
}

/* systemd names the stream that it connected: device and inode. */
static bool is_journal(void)
{
    const char *named = getenv("JOURNAL_STREAM");
    struct stat st;
    char own[64];
    if (!named || fstat(STDERR_FILENO, &st) != 0)
        return false;
    snprintf(own, sizeof(own), "%llu:%llu", (unsigned long long)st.st_dev, (unsigned long long)st.st_ino);
    return strcmp(named, own) == 0;
}

enum ka_log_form ka_log_form_of(const char *name)
{
    if (strcmp(name, "json") == 0)
        return KA_LOG_JSON;
    if (strcmp(name, "text") == 0)
        return KA_LOG_TEXT;
    return strcmp(name, "journal") == 0 || is_journal() ? KA_LOG_JOURNAL : KA_LOG_TEXT;
}

enum ka_log_level ka_log_level_of(const char *name)
{
    enum ka_log_level level = KA_LOG_DEBUG;
    while (level > KA_LOG_ERROR && strcmp(level_names[level], name) != 0)
        level--;
    return level;
}

static void write_text(enum ka_log_level level, char *message)
{
    char when[16];
    time_t now = time(NULL);
    struct tm local;
    strftime(when, sizeof(when), "%H:%M:%S", localtime_r(&now, &local));
    fprintf(stderr, "%s %-5s %s\n", when, level_names[level], message);
}

/* Each line of the message, since each is an entry of the journal. */
static void write_journal(enum ka_log_level level, char *message)
{
    static const int numbers[] = {3, 4, 6, 7};
    for (const char *at = message, *end; *at; at = *end ? end + 1 : end) {
        end = strchrnul(at, '\n');
        fprintf(stderr, "<%d>%.*s\n", numbers[level], (int)(end - at), at);
    }
}

static void write_json(enum ka_log_level level, char *message)
{
    struct timespec now;
    struct tm utc;
    char when[32];
    clock_gettime(CLOCK_REALTIME, &now);
    strftime(when, sizeof(when), "%Y-%m-%dT%H:%M:%S", gmtime_r(&now.tv_sec, &utc));
    KA_AUTO_FREE char *time = ka_format("%s.%03ldZ", when, now.tv_nsec / 1000000);
    json_auto_t *line = json_pack("{s:s, s:s, s:s}", "time", time, "level", level_names[level], "message",
                                  ka_utf8_clean(message));
    KA_AUTO_FREE char *dumped = json_dumps(line, JSON_COMPACT);
    fprintf(stderr, "%s\n", dumped);
}

void ka_log(enum ka_log_level level, const char *fmt, ...)
{
    static void (*const writers[])(enum ka_log_level level, char *message) = {
        [KA_LOG_TEXT] = write_text, [KA_LOG_JOURNAL] = write_journal, [KA_LOG_JSON] = write_json};
    KA_AUTO_FREE char *message = NULL;
    if (level > sink.threshold)
        return;
    ka_log_progress_end();
    va_list args;
    va_start(args, fmt);
    int len = vasprintf(&message, fmt, args);
    va_end(args);
    if (len >= 0)
        writers[sink.form](level, message);
    else
        message = NULL;
}

void ka_log_progress(const char *who, const char *fmt, ...)
{
    if (sink.threshold < KA_LOG_INFO)
        return;
    char text[512];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof(text), fmt, args);
    va_end(args);
    if (!sink.live) {
        ka_log(KA_LOG_INFO, "%s: %s", who, text);
        return;
    }
    struct winsize size;
    int width = ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 20 ? size.ws_col : 80;
    fputs("\r\033[K", stderr);
    fprintf(stderr, "%s: %.*s", who, width - (int)strlen(who) - 4, text);
    fflush(stderr);
    sink.line_open = true;
}

void ka_log_progress_end(void)
{
    if (!sink.line_open)
        return;
    fputs("\r\033[K", stderr);
    sink.line_open = false;
}
