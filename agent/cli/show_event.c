/* Lines of a run's journal. Knows the names of members, not what made them. */
#include "show_event.h"

#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "agent/core/fields.h"
#include "base/base.h"
#include "base/utf8.h"

#define DETAIL_MAX 400

static void add_word(struct ka_buf *out, const char *before, const char *text)
{
    char line[DETAIL_MAX];
    if (!text || !*text)
        return;
    ka_utf8_line(text, strlen(text), line, sizeof(line));
    ka_buf_printf(out, "%s%s", before, line);
}

static void add_number(struct ka_buf *out, const json_t *event, const char *name, const char *unit)
{
    if (json_is_number(json_object_get(event, name)))
        ka_buf_printf(out, "  %.6g %s", ka_number_of(event, name, 0), unit);
}

static void describe(const char *type, const json_t *event, struct ka_buf *out)
{
    static const char *const texts[] = {"message", "reason", "why", "text", "note", "verdict"};
    if (strcmp(type, "state") == 0) {
        add_word(out, "  ", ka_text_of(event, "from", NULL));
        add_word(out, " -> ", ka_text_of(event, "to", NULL));
        return;
    }
    add_word(out, "  ", ka_text_of(event, "op", NULL));
    add_word(out, ", ", ka_text_of(event, "part", NULL));
    add_number(out, event, "ms", "ms");
    if (strcmp(type, "child") == 0 && ka_number_of(event, "status", 0) != 0)
        ka_buf_printf(out, "  status %g", ka_number_of(event, "status", 0));
    for (size_t i = 0; i < KA_COUNT(texts); i++)
        add_word(out, "  ", ka_text_of(event, texts[i], NULL));
}

static int flushed(void)
{
    return fflush(stdout) == 0 ? 0 : -EPIPE;
}

int ka_show_event(void *arg, const char *type, const char *data, size_t len)
{
    json_auto_t *event = json_loadb(data, len, 0, NULL);
    KA_AUTO_BUF struct ka_buf detail = {0};
    char when[32] = "-";
    bool end = strcmp(type, "end") == 0;
    time_t at = (time_t)ka_number_of(event, end ? "ended" : "t", 0);
    struct tm local;
    (void)arg;
    if (at)
        strftime(when, sizeof(when), "%H:%M:%S", localtime_r(&at, &local));
    if (end)
        add_word(&detail, "  ", ka_text_of(event, "state", NULL));
    describe(type, event, &detail);
    printf("%-8s  %-10s%s\n", when, type, ka_buf_str(&detail));
    return flushed();
}

int ka_show_event_json(void *arg, const char *type, const char *data, size_t len)
{
    (void)arg;
    (void)type;
    fwrite(data, 1, len, stdout);
    putchar('\n');
    return flushed();
}
