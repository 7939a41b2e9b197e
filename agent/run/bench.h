/* A benchmark of a finished pair, or of a module that somebody wrote by hand: what operation check takes.
 *
 * Three children, one after another: inspect says what the file is; ceilings, which sees the forward part
 * alone, what the device gives and what each shape asks of it; bench times the whole file. The result
 * (agent/core/bench_result.h) is written as bench.json into the run folder that the file lies in, or into a
 * fresh one below `out`. The last two share a GPU and ask for it alone where they time; where its memory runs
 * out, they begin anew once nobody else is there. Loop thread only.
 *
 * Nothing here is a verdict: a backward that was never checked is timed too. */
#ifndef KA_RUN_BENCH_H
#define KA_RUN_BENCH_H

#include <jansson.h>

#include "agent/app/app.h"
#include "agent/app/settings.h"

struct ka_bench;

/* Runs once, from the loop. `code` is the program's exit code: 0 where ours has a time on each shape, 4 where
 * not on all, 3 for a file that cannot be used, 6, 1; 130 after ka_bench_interrupt(). `result` and `error` (a
 * document of docs/protocol.md) may be NULL; both are borrowed. The benchmark may be freed from inside. */
typedef void (*ka_bench_done_fn)(void *arg, int code, const json_t *result, const json_t *error);

struct ka_bench_req {
    const struct ka_settings *settings; /* device: "cuda" */
    const char *file;
    const char *only; /* "bwd", "fwd" or "both"; "": each of them */
    int seconds;      /* that timing may take, of all shapes together; what is compiled first comes on top */
    ka_bench_done_fn done;
    void *arg;
};

/* Copies `req`. -ENOENT, -EINVAL for a file that is none or has nothing to time; -ENODEV where the settings
 * name no GPU. */
int ka_bench_start(struct ka_app *app, const struct ka_bench_req *req, struct ka_bench **out,
                   struct ka_err *err);
void ka_bench_interrupt(struct ka_bench *bench);
void ka_bench_free(struct ka_bench *bench);

#endif
