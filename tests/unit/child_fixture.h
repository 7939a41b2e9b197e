/* Children on a real loop, below the real jail, for the tests of them. The "interpreter" is a shell script
 * that finds out from the request what to do, so that no Python starts here. */
#ifndef KA_TEST_CHILD_FIXTURE_H
#define KA_TEST_CHILD_FIXTURE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "agent/io/capture.h"
#include "agent/io/cards.h"
#include "agent/io/child.h"
#include "agent/io/child_internal.h"
#include "agent/io/loop.h"
#include "agent/io/loop_uv.h"
#include "base/files.h"

struct fixture {
    struct ka_loop *loop;
    struct ka_cards *cards; /* only where a test asks for them */
    struct ka_children *children;
    char dir[64];
    char *python, *package, *base;
};

struct seen {
    int calls, error, exit_status, term_signal;
    bool timed_out;
    uint64_t paused_ms, wall_ms;
    const struct ka_child_result *kept;
    char out[512], err[512], layers[2048], told[1024];
    struct ka_children *close_when_done;
    const char *keep_name; /* read this file */
    char file[256];
    int file_rc;
};

static inline char *script(const struct fixture *f)
{
    char *path = ka_path_join(f->dir, "python");
    static const char text[] = "#!/bin/sh\n"
                               "dir=$3\n"
                               "cmd=$(cat \"$dir/request.json\")\n"
                               "eval \"$cmd\"\n";
    assert_int_equal(ka_file_write(path, text, strlen(text), NULL), 0);
    assert_int_equal(chmod(path, 0755), 0);
    return path;
}

static inline int set_up(void **state)
{
    struct fixture *f = ka_calloc(1, sizeof(*f));
    char *jail = NULL;
    *state = f;
    if (ka_child_find_program("KA_JAIL", "ka-jail", &jail, NULL) != 0)
        return 0;
    snprintf(f->dir, sizeof(f->dir), "/tmp/ka-test-child-XXXXXX");
    assert_non_null(mkdtemp(f->dir));
    f->python = script(f);
    f->package = ka_path_join(f->dir, "package");
    f->base = ka_path_join(f->dir, "base");
    assert_int_equal(mkdir(f->package, 0755), 0);
    f->loop = ka_loop_new();
    struct ka_children_conf conf = {.jail = jail, .base = f->base, .max_running = 2, .no_zygotes = true};
    struct ka_err err = {{0}};
    if (ka_children_new(f->loop, &conf, &f->children, &err) != 0)
        fail_msg("%s", err.msg);
    free(jail);
    return 0;
}

static inline int folder_is_empty(const char *path)
{
    return rmdir(path) == 0;
}

static inline int tear_down(void **state)
{
    struct fixture *f = *state;
    int rc = 0;
    if (f->children) {
        ka_children_close(f->children);
        ka_loop_run(f->loop);
        rc = ka_loop_close(f->loop); /* nothing is left open */
        if (!rc && !folder_is_empty(f->base))
            rc = -ENOTEMPTY; /* nor on disk */
        ka_rmtree(f->dir, NULL);
    }
    ka_cards_free(f->cards);
    free(f->python);
    free(f->package);
    free(f->base);
    free(f);
    return rc;
}

static inline struct fixture *need_jail(void **state)
{
    struct fixture *f = *state;
    if (!f->children) {
        print_message("ka-jail is not built beside the tests: skipped\n");
        skip();
    }
    return f;
}

static inline void on_done(void *arg, uint64_t op, const struct ka_child_result *r)
{
    struct seen *s = arg;
    assert_true(op != 0);
    s->calls++;
    s->error = r->error;
    s->exit_status = r->exit_status;
    s->term_signal = r->term_signal;
    s->timed_out = r->timed_out;
    s->paused_ms = r->paused_ms;
    s->wall_ms = r->wall_ms;
    snprintf(s->told, sizeof(s->told), "%s", r->msg.msg);
    snprintf(s->out, sizeof(s->out), "%s", r->out);
    snprintf(s->err, sizeof(s->err), "%s", r->err);
    snprintf(s->layers, sizeof(s->layers), "%s", r->layers);
    if (s->keep_name) {
        struct ka_buf buf = {0};
        s->file_rc = ka_child_read(r, s->keep_name, 100, &buf);
        snprintf(s->file, sizeof(s->file), "%s", ka_buf_str(&buf));
        ka_buf_free(&buf);
        s->kept = ka_child_result_keep(r);
    }
    if (s->close_when_done)
        ka_children_close(s->close_when_done);
}

static inline uint64_t start_this(struct fixture *f, struct ka_child_req req, struct seen *seen)
{
    uint64_t op = 0;
    req.python = f->python;
    req.package_dir = f->package;
    assert_int_equal(ka_child_start(f->children, &req, on_done, seen, &op), 0);
    assert_int_equal(seen->calls, 0);
    return op;
}

static inline uint64_t start_as(struct fixture *f, enum ka_child_role role, const char *command,
                                struct seen *seen, unsigned deadline_ms)
{
    struct ka_child_req req = {.request = command, .role = role, .device = "cpu", .deadline_ms = deadline_ms};
    return start_this(f, req, seen);
}

static inline uint64_t start(struct fixture *f, const char *command, struct seen *seen, unsigned deadline_ms)
{
    return start_as(f, KA_CHILD_TRUSTED, command, seen, deadline_ms);
}

static inline void run_until(struct fixture *f, const struct seen *seen)
{
    while (!seen->calls && uv_run(ka_loop_uv(f->loop), UV_RUN_ONCE))
        ;
    assert_int_equal(seen->calls, 1);
}

static inline void run_one(struct fixture *f, const char *command, struct seen *seen)
{
    start(f, command, seen, 20000);
    run_until(f, seen);
}

#define WITH_JAIL(test) cmocka_unit_test_setup_teardown(test, set_up, tear_down)

#endif
