/* Findings into failures of the verdict; see sanitize.h. */
#include "sanitize.h"

#include "base/each.h"
#include "fields.h"

#include <stdio.h>
#include <string.h>

static const char *const TOOLS[] = {"memcheck", "racecheck", "initcheck"};

static void judge_finding(const json_t *finding, const char *tool, struct ka_verdict *verdict)
{
    const json_t *line = json_object_get(finding, "line");
    const char *kernel = ka_text_of(finding, "kernel", NULL);
    char place[300] = "", text[700];
    if (kernel && !json_is_integer(line))
        snprintf(place, sizeof(place), " in kernel %.80s", kernel);
    if (json_is_integer(line))
        snprintf(place, sizeof(place), " in kernel %.80s, %.180s line %lld", kernel ? kernel : "?",
                 ka_text_of(finding, "file", "?"), (long long)json_integer_value(line));
    snprintf(text, sizeof(text), "%.300s%s (%lld times)", ka_text_of(finding, "what", "an error"), place,
             (long long)json_integer_value(json_object_get(finding, "times")));
    ka_verdict_fail_whole(verdict, tool, text);
}

static void judge_run(const json_t *run, const char *tool, struct ka_verdict *verdict)
{
    const json_t *findings = json_object_get(run, "findings");
    const char *reason = ka_text_of(run, "reason", NULL);
    char text[1300];
    KA_EACH(findings, i, finding)
        judge_finding(finding, tool, verdict);
    if (json_array_size(findings) || json_is_true(json_object_get(run, "complete")))
        return;
    if (run)
        snprintf(text, sizeof(text), "%s gave no report to its end%s%.300s; its last words: %.600s", tool,
                 reason ? ": " : "", reason ? reason : "", ka_text_of(run, "tail", "none"));
    else
        snprintf(text, sizeof(text), "%s was not run", tool);
    ka_verdict_fail_whole(verdict, "sanitizer", text);
}

void ka_sanitize_judge(const json_t *doc, const char *message, struct ka_verdict *verdict)
{
    if (!doc) {
        ka_verdict_fail_whole(verdict, "sanitizer", message);
        return;
    }
    for (size_t t = 0; t < KA_COUNT(TOOLS); t++) {
        const json_t *found = NULL;
        KA_EACH(json_object_get(doc, "runs"), i, run) {
            if (strcmp(ka_text_of(run, "tool", ""), TOOLS[t]) == 0)
                found = run;
        }
        judge_run(found, TOOLS[t], verdict);
    }
}
