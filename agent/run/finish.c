/* What a run leaves behind: the pair, the reports. */
#include "finish.h"

#include <stdlib.h>

#include "agent/core/compose.h"
#include "agent/core/report.h"
#include "agent/io/work.h"
#include "base/files.h"
#include "base/log.h"
#include "learn.h"
#include "result.h"

/* What a thread writes, in this order, until one cannot be written. */
struct leaving {
    struct ka_run *run;
    struct {
        char *path;
        struct ka_buf text;
    } files[4];
    size_t count;
    int rc;
    struct ka_err err;
    struct ka_taught *taught; /* NULL: nothing */
    bool forgotten;           /* that could not be kept, */
    struct ka_err why;        /* and why */
};

static struct ka_buf *add_file(struct leaving *leaving, const char *name)
{
    leaving->files[leaving->count].path = ka_path_join(leaving->run->dir, name);
    return &leaving->files[leaving->count++].text;
}

static int add_pair(struct leaving *leaving)
{
    struct ka_run *run = leaving->run;
    struct ka_snapshot best;
    int rc = ka_state_snapshot_head(run->state, run->job.best, &best, &leaving->err);
    if (rc)
        return rc;
    KA_AUTO_FREE char *name = ka_format("%s%s.py", run->name, run->job.best_verified ? "" : ".unverified");
    rc = ka_compose_pair(run->forward, best.backward, add_file(leaving, name), &leaving->err);
    if (rc == 0) {
        free(run->pair_path);
        run->pair_path = ka_strdup(leaving->files[leaving->count - 1].path);
    }
    ka_snapshot_free(&best);
    return rc;
}

static int gather(struct leaving *leaving)
{
    struct ka_run *run = leaving->run;
    int rc = run->job.best ? add_pair(leaving) : 0;
    json_auto_t *result = ka_run_result(run);
    json_auto_t *full = json_copy(result);
    json_object_set(full, "history", run->history);
    json_object_set(full, "draft_report", json_object_get(run->draft, "report"));
    KA_AUTO_FREE char *text = json_dumps(result, JSON_INDENT(2) | JSON_REAL_PRECISION(6));
    if (rc == 0)
        rc = ka_report_markdown(full, add_file(leaving, "report.md"), &leaving->err);
    if (rc == 0)
        rc = ka_report_html(full, add_file(leaving, "report.html"), &leaving->err);
    if (rc == 0)
        ka_buf_puts(add_file(leaving, "result.json"), text);
    ka_record_add(run->record, "result", json_copy(result));
    return rc;
}

static void write_files(void *arg)
{
    struct leaving *leaving = arg;
    for (size_t i = 0; i < leaving->count && leaving->rc == 0; i++) {
        const struct ka_buf *text = &leaving->files[i].text;
        leaving->rc = ka_file_write(leaving->files[i].path, text->data, text->len, &leaving->err);
    }
    if (leaving->taught)
        leaving->forgotten = ka_run_lessons_write(leaving->taught, &leaving->why) != 0;
}

static void on_written(void *arg)
{
    struct leaving *leaving = arg;
    struct ka_run *run = leaving->run;
    if (leaving->rc) {
        ka_log(KA_LOG_ERROR, "%s: %s", run->name, leaving->err.msg);
        if (run->job.state == KA_JOB_DONE) { /* the state is safe: --resume writes the files again */
            run->job.state = KA_JOB_FAILED;
            run->job.reason = KA_REASON_INTERNAL;
        }
    }
    if (leaving->forgotten)
        ka_run_lessons_failed(run, &leaving->why);
    for (size_t i = 0; i < leaving->count; i++) {
        free(leaving->files[i].path);
        ka_buf_free(&leaving->files[i].text);
    }
    free(leaving);
    run->done(run, false, run->arg);
}

void ka_run_finish(struct ka_run *run)
{
    struct leaving *leaving = ka_calloc(1, sizeof(*leaving));
    leaving->run = run;
    ka_log_progress_end();
    run->finished = true; /* nothing can happen to it any more, until `done` */
    leaving->rc = gather(leaving);
    leaving->taught = ka_run_lessons_taught(run);
    ka_work_start(run->app->loop, write_files, on_written, leaving);
}
