/* Lines on stderr. Knows nothing of runs. */
#include "log.h"

#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

static const char *const level_names[] = {"error", "warn", "info", "debug"};

/* There is one stderr, so there is one of these. */
static struct {
    enum ka_log_level threshold;
    bool live;
    bool line_open; /* an unfinished progress line is on the terminal */
} sink = {.threshold = KA_LOG_INFO};

void ka_log_setup(enum ka_log_level level, bool live)
{
    sink.threshold = level;
    sink.live = live;
}

enum ka_log_level ka_log_level_of(const char *name)
{
    enum ka_log_level level = KA_LOG_DEBUG;
    while (level > KA_LOG_ERROR && strcmp(level_names[level], name) != 0)
        level--;
    return level;
}

void ka_log(enum ka_log_level level, const char *fmt, ...)
{
    if (level > sink.threshold)
        return;
    ka_log_progress_end();
    char when[16];
    time_t now = time(NULL);
    struct tm local;
    strftime(when, sizeof(when), "%H:%M:%S", localtime_r(&now, &local));
    fprintf(stderr, "%s %-5s ", when, level_names[level]);
    va_list args;
    va_start(args, fmt);
    vfprintf(stderr, fmt, args);
    va_end(args);
    fputc('\n', stderr);
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
