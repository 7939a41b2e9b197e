/* What a run leaves behind: the pair, the reports. */
#include "finish.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/core/compose.h"
#include "agent/core/report.h"
#include "agent/core/report_html.h"
#include "base/files.h"
#include "base/log.h"
#include "result.h"

static int write_pair(struct ka_run *run, struct ka_err *err)
{
    struct ka_snapshot best;
    int rc = ka_state_snapshot_head(run->state, run->job.best, &best, err);
    if (rc)
        return rc;
    struct ka_buf text = {0};
    char *name = ka_calloc(strlen(run->name) + 16, 1);
    sprintf(name, "%s%s.py", run->name, run->job.best_verified ? "" : ".unverified");
    char *path = ka_path_join(run->dir, name);
    rc = ka_compose_pair(run->forward, best.backward, &text, err);
    if (rc == 0)
        rc = ka_file_write(path, text.data, text.len, err);
    if (rc == 0) {
        free(run->pair_path);
        run->pair_path = path;
        path = NULL;
    }
    free(path);
    free(name);
    ka_buf_free(&text);
    ka_snapshot_free(&best);
    return rc;
}

static int write_text(const struct ka_run *run, const char *name, const char *text, struct ka_err *err)
{
    char *path = ka_path_join(run->dir, name);
    int rc = ka_file_write(path, text, strlen(text), err);
    free(path);
    return rc;
}

static int write_results(struct ka_run *run, struct ka_err *err)
{
    int rc = run->job.best ? write_pair(run, err) : 0;
    json_t *result = ka_run_result(run);
    json_t *full = json_copy(result);
    json_object_set(full, "history", run->history);
    json_object_set(full, "draft_report", json_object_get(run->draft, "report"));
    struct ka_buf report = {0}, page = {0};
    char *text = json_dumps(result, JSON_INDENT(2) | JSON_REAL_PRECISION(6));
    if (rc == 0)
        rc = ka_report_markdown(full, &report, err);
    if (rc == 0)
        rc = write_text(run, "report.md", ka_buf_str(&report), err);
    if (rc == 0)
        rc = ka_report_html(full, &page, err);
    if (rc == 0)
        rc = write_text(run, "report.html", ka_buf_str(&page), err);
    if (rc == 0)
        rc = write_text(run, "result.json", text, err);
    ka_record_add(run->record, "result", json_copy(result));
    free(text);
    ka_buf_free(&report);
    ka_buf_free(&page);
    json_decref(full);
    json_decref(result);
    return rc;
}

void ka_run_finish(struct ka_run *run)
{
    struct ka_err err;
    ka_log_progress_end();
    if (write_results(run, &err)) {
        ka_log(KA_LOG_ERROR, "%s: %s", run->name, err.msg);
        if (run->job.state == KA_JOB_DONE) { /* the state is safe: --resume writes the files again */
            run->job.state = KA_JOB_FAILED;
            run->job.reason = KA_REASON_INTERNAL;
        }
    }
    run->finished = true;
    run->done(run, false, run->arg);
}
