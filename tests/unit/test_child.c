/* Children on a real loop, below the real jail. The "interpreter" is a shell script that finds out from the
 * request what to do, so that no Python starts here. */
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
    char out[512], err[512], layers[2048];
    struct ka_children *close_when_done;
    const char *keep_name; /* read this file */
    char file[256];
    int file_rc;
};

static char *script(const struct fixture *f)
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

static int set_up(void **state)
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

static int folder_is_empty(const char *path)
{
    return rmdir(path) == 0;
}

static int tear_down(void **state)
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

static struct fixture *need_jail(void **state)
{
    struct fixture *f = *state;
    if (!f->children) {
        print_message("ka-jail is not built beside the tests: skipped\n");
        skip();
    }
    return f;
}

static void on_done(void *arg, uint64_t op, const struct ka_child_result *r)
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

static uint64_t start_this(struct fixture *f, struct ka_child_req req, struct seen *seen)
{
    uint64_t op = 0;
    req.python = f->python;
    req.package_dir = f->package;
    assert_int_equal(ka_child_start(f->children, &req, on_done, seen, &op), 0);
    assert_int_equal(seen->calls, 0);
    return op;
}

static uint64_t start_as(struct fixture *f, enum ka_child_role role, const char *command, struct seen *seen,
                         unsigned deadline_ms)
{
    struct ka_child_req req = {.request = command, .role = role, .device = "cpu", .deadline_ms = deadline_ms};
    return start_this(f, req, seen);
}

static uint64_t start(struct fixture *f, const char *command, struct seen *seen, unsigned deadline_ms)
{
    return start_as(f, KA_CHILD_TRUSTED, command, seen, deadline_ms);
}

static void run_until(struct fixture *f, const struct seen *seen)
{
    while (!seen->calls && uv_run(ka_loop_uv(f->loop), UV_RUN_ONCE))
        ;
    assert_int_equal(seen->calls, 1);
}

static void run_one(struct fixture *f, const char *command, struct seen *seen)
{
    start(f, command, seen, 20000);
    run_until(f, seen);
}

static void child__that_ends__reports_status_output_and_layers(void **state)
{
    struct fixture *f = need_jail(state);
    struct seen s = {0};
    run_one(f, "echo hello; echo oops >&2; exit 7", &s);
    assert_int_equal(s.error, 0);
    assert_int_equal(s.exit_status, 7);
    assert_int_equal(s.term_signal, 0);
    assert_string_equal(s.out, "hello\n");
    assert_string_equal(s.err, "oops\n");
    assert_non_null(strstr(s.layers, "\"ok\": true"));
    assert_non_null(strstr(s.layers, "\"seccomp\": true"));
}

static void child__result_file__is_read_through_the_scratch(void **state)
{
    struct fixture *f = need_jail(state);
    struct seen s = {.keep_name = "result.json"};
    run_one(f, "echo '{}' > result.json", &s);
    assert_int_equal(s.file_rc, 0);
    assert_string_equal(s.file, "{}\n");
    ka_child_result_free(s.kept);
}

static void child__hostile_result_files__are_refused(void **state)
{
    static const struct {
        const char *command;
        int rc;
    } cases[] = {
        {"ln -s /etc/passwd result.json", -ELOOP},       {"mkfifo result.json", -EINVAL},
        {"echo x > a; ln a result.json", -EINVAL},       {"mkdir result.json", -EINVAL},
        {"head -c 101 /dev/zero > result.json", -EFBIG}, {"true", -ENOENT},
    };
    struct fixture *f = need_jail(state);
    for (size_t i = 0; i < KA_COUNT(cases); i++) {
        struct seen s = {.keep_name = "result.json"};
        run_one(f, cases[i].command, &s);
        assert_int_equal(s.file_rc, cases[i].rc);
        ka_child_result_free(s.kept);
    }
}

static void child__names_that_leave_the_scratch__are_refused(void **state)
{
    struct fixture *f = need_jail(state);
    struct seen s = {.keep_name = "../../python"};
    run_one(f, "true", &s);
    assert_int_equal(s.file_rc, -EXDEV);
    ka_child_result_free(s.kept);
}

static void child__past_its_deadline__is_killed_with_its_tree(void **state)
{
    struct fixture *f = need_jail(state);
    struct seen s = {0};
    start(f, "trap '' TERM INT; (setsid sleep 300 &) ; echo begun; while :; do sleep 1; done", &s, 600);
    run_until(f, &s);
    assert_int_equal(s.error, -ETIMEDOUT);
    assert_true(s.timed_out);
    assert_int_equal(s.term_signal, SIGKILL);
    assert_string_equal(s.out, "begun\n");
}

static void child__cancelled__ends_at_once_and_says_so(void **state)
{
    struct fixture *f = need_jail(state);
    struct seen s = {0};
    uint64_t op = start(f, "sleep 300", &s, 20000);
    while (ka_children_running(f->children) == 0)
        uv_run(ka_loop_uv(f->loop), UV_RUN_ONCE);
    ka_child_cancel(f->children, op);
    ka_child_cancel(f->children, op);
    assert_int_equal(s.calls, 0);
    run_until(f, &s);
    assert_int_equal(s.error, -ECANCELED);
}

static void child__beyond_the_limit__waits_and_can_be_cancelled_there(void **state)
{
    struct fixture *f = need_jail(state);
    struct seen s[4] = {{0}};
    for (int i = 0; i < 3; i++)
        start(f, "sleep 0.2", &s[i], 20000);
    uint64_t last = start(f, "touch never", &s[3], 20000);
    assert_int_equal(ka_children_queued(f->children), 4);
    ka_child_cancel(f->children, last);
    run_until(f, &s[3]);
    assert_int_equal(s[3].error, -ECANCELED);
    unsigned most = 0;
    while (!s[0].calls || !s[1].calls || !s[2].calls) {
        uv_run(ka_loop_uv(f->loop), UV_RUN_ONCE);
        if (ka_children_running(f->children) > most)
            most = ka_children_running(f->children);
    }
    assert_int_equal(most, 2);
    assert_int_equal(s[2].error, 0);
}

static void child__flood_of_output__keeps_head_and_tail(void **state)
{
    struct fixture *f = need_jail(state);
    struct seen s = {0};
    run_one(f, "echo first; head -c 3000000 /dev/zero | tr '\\0' x; echo last", &s);
    assert_int_equal(s.error, 0);
    assert_memory_equal(s.out, "first\nxxx", 9);
}

static void child__that_fills_its_scratch__is_stopped_there_and_read(void **state)
{
    struct fixture *f = need_jail(state);
    struct seen s = {.keep_name = "result.json"};
    struct ka_child_req req = {.request =
                                   "echo early > result.json; head -c 3000000 /dev/zero > full; echo $?",
                               .python = f->python,
                               .package_dir = f->package,
                               .limits = {.scratch_mb = 1}};
    uint64_t op = 0;
    assert_int_equal(ka_child_start(f->children, &req, on_done, &s, &op), 0);
    run_until(f, &s);
    assert_int_equal(s.error, 0);
    assert_string_equal(s.out, "1\n");
    assert_string_equal(s.file, "early\n");
    ka_child_result_free(s.kept);
}

static void child__killed_in_the_middle_of_a_write__leaves_a_result_that_is_capped(void **state)
{
    struct fixture *f = need_jail(state);
    struct seen s = {.keep_name = "result.json"};
    start(f, "while :; do echo more >> result.json; done", &s, 500);
    run_until(f, &s);
    assert_int_equal(s.error, -ETIMEDOUT);
    assert_int_equal(s.file_rc, -EFBIG);
    ka_child_result_free(s.kept);
}

static void child__closing_inside_done__ends_the_others_first(void **state)
{
    struct fixture *f = need_jail(state);
    struct seen other = {0}, s = {.close_when_done = f->children};
    start(f, "sleep 300", &other, 20000);
    start(f, "true", &s, 20000);
    run_until(f, &other);
    assert_int_equal(other.error, -ECANCELED);
    assert_int_equal(s.calls, 1);
}

static void child__missing_layer__runs_nothing(void **state)
{
    struct fixture *f = need_jail(state);
    struct seen s = {0};
    struct ka_child_req req = {.request = "echo ran",
                               .python = f->python,
                               .package_dir = f->package,
                               .device = "cpu",
                               .require = "cgroup+nonsense"};
    uint64_t op = 0;
    assert_int_equal(ka_child_start(f->children, &req, on_done, &s, &op), 0);
    run_until(f, &s);
    assert_int_equal(s.error, -EIO);
    assert_string_equal(s.out, "");
    assert_non_null(strstr(s.err, "--require"));
}

static void child__request_without_parts__is_rejected(void **state)
{
    struct fixture *f = need_jail(state);
    struct ka_child_req req = {.request = "{}", .package_dir = "/"};
    uint64_t op = 77;
    assert_int_equal(ka_child_start(f->children, &req, on_done, NULL, &op), -EINVAL);
    req.python = "/bin/true";
    req.device = "tpu";
    assert_int_equal(ka_child_start(f->children, &req, on_done, NULL, &op), -EINVAL);
    assert_int_equal(op, 77);
}

static void child__interpreter_that_is_not_there__is_reported(void **state)
{
    struct fixture *f = need_jail(state);
    struct seen s = {0};
    struct ka_child_req req = {.request = "{}", .python = "/nowhere/python", .package_dir = f->package};
    uint64_t op = 0;
    assert_int_equal(ka_child_start(f->children, &req, on_done, &s, &op), 0);
    run_until(f, &s);
    assert_int_equal(s.exit_status, 127);
    assert_non_null(strstr(s.err, "/nowhere/python"));
}

static void children__base_that_others_can_write__is_refused(void **state)
{
    struct fixture *f = need_jail(state);
    struct ka_children *children = NULL;
    struct ka_err err = {{0}};
    char *open_base = ka_path_join(f->dir, "open");
    assert_int_equal(mkdir(open_base, 0777), 0);
    assert_int_equal(chmod(open_base, 0777), 0);
    struct ka_children_conf conf = {.jail = "/bin/true", .base = open_base};
    assert_int_equal(ka_children_new(f->loop, &conf, &children, &err), -EACCES);
    assert_null(children);
    free(open_base);
}

/* ---- zygotes: the real one, with a child module that runs the request in a shell ---- */

static void write_into(const char *folder, const char *name, const char *text, size_t len)
{
    char *path = ka_path_join(folder, name);
    assert_int_equal(ka_file_write(path, text, len, NULL), 0);
    free(path);
}

static void fill_package(const struct fixture *f)
{
    static const char child[] = "import os\n"
                                "def main(argv):\n"
                                "    with open('request.json') as request:\n"
                                "        return os.waitstatus_to_exitcode(os.system(request.read()))\n";
    struct ka_buf zygote = {0};
    char *folder = ka_path_join(f->package, "kernel_agent");
    assert_int_equal(ka_file_read("sandbox/kernel_agent/zygote.py", 1 << 20, &zygote, NULL), 0);
    assert_int_equal(mkdir(folder, 0755), 0);
    write_into(folder, "__init__.py", "", 0);
    write_into(folder, "zygote.py", zygote.data, zygote.len);
    write_into(folder, "child.py", child, sizeof(child) - 1);
    ka_buf_free(&zygote);
    free(folder);
}

static struct fixture *need_zygotes(void **state)
{
    struct fixture *f = need_jail(state);
    char *jail = ka_strdup(ka_children_jail(f->children)), *folder = ka_strdup(jail);
    *strrchr(folder, '/') = '\0';
    char *library = ka_path_join(folder, "libka_jail.so");
    bool here = access(library, R_OK) == 0 && access(".venv/bin/python", X_OK) == 0;
    if (here) {
        struct ka_children_conf conf = {.jail = jail, .base = f->base, .max_running = 2, .cards = f->cards};
        ka_children_close(f->children);
        assert_int_equal(ka_children_new(f->loop, &conf, &f->children, NULL), 0);
        free(f->python);
        char *here_path = getcwd(NULL, 0);
        f->python = ka_path_join(here_path, ".venv/bin/python");
        free(here_path);
        fill_package(f);
    }
    free(jail);
    free(folder);
    free(library);
    if (!here) {
        print_message("libka_jail.so or .venv is missing: skipped\n");
        skip();
    }
    return f;
}

#define PROCESSES_MAX 16

static size_t children_of(long parent, long *pids)
{
    char path[64], text[256] = "";
    size_t count = 0;
    snprintf(path, sizeof(path), "/proc/%ld/task/%ld/children", parent, parent);
    FILE *list = fopen(path, "r");
    assert_non_null(list);
    if (fgets(text, sizeof(text), list))
        for (char *at = text, *end; count < PROCESSES_MAX; at = end) {
            pids[count] = strtol(at, &end, 10);
            if (end == at)
                break;
            count++;
        }
    fclose(list);
    return count;
}

/* The processes that this one started: zygotes, here. */
static void kill_own_children(void)
{
    long pids[PROCESSES_MAX];
    for (size_t i = children_of(getpid(), pids); i-- > 0;)
        assert_int_equal(kill((pid_t)pids[i], SIGKILL), 0);
}

/* The one process at the end of the line below us. */
static long only_child(long parent)
{
    long pids[PROCESSES_MAX];
    assert_int_equal(children_of(parent, pids), 1);
    return pids[0];
}

static void child__of_a_zygote__behaves_like_one_alone(void **state)
{
    struct fixture *f = need_zygotes(state);
    for (int i = 0; i < 3; i++) {
        struct seen s = {.keep_name = "result.json"};
        run_one(f, "echo hello; echo oops >&2; echo $$ > result.json; touch /tmp/ka-out && exit 1; exit 7",
                &s);
        assert_int_equal(s.error, 0);
        assert_int_equal(s.exit_status, 7);
        assert_string_equal(s.out, "hello\n");
        assert_non_null(strstr(s.err, "oops\n"));
        assert_non_null(strstr(s.layers, "\"ok\": true"));
        assert_int_equal(s.file_rc, 0);
        assert_string_equal(s.file,
                            "2\n"); /* the first after the child itself, in a pid namespace of its own */
        ka_child_result_free(s.kept);
    }
}

static void child__of_a_zygote__is_killed_at_its_deadline(void **state)
{
    struct fixture *f = need_zygotes(state);
    struct seen s = {0};
    start(f, "trap '' TERM; (setsid sleep 300 &) ; echo begun; while :; do sleep 1; done", &s, 600);
    run_until(f, &s);
    assert_int_equal(s.error, -ETIMEDOUT);
    assert_int_equal(s.term_signal, SIGKILL);
    assert_string_equal(s.out, "begun\n");
}

static void child__of_a_zygote__can_be_cancelled_while_it_waits(void **state)
{
    struct fixture *f = need_zygotes(state);
    struct seen s = {0};
    uint64_t op = start(f, "true", &s, 20000);
    while (ka_children_running(f->children) == 0)
        uv_run(ka_loop_uv(f->loop), UV_RUN_ONCE);
    ka_child_cancel(f->children, op);
    run_until(f, &s);
    assert_int_equal(s.error, -ECANCELED);
}

/* Until `parent` has so many children; the test's own deadlines end it otherwise. */
static void wait_for_children(struct fixture *f, long parent, size_t count)
{
    long pids[PROCESSES_MAX];
    for (int i = 0; i < 1000 && children_of(parent, pids) != count; i++)
        uv_run(ka_loop_uv(f->loop), UV_RUN_NOWAIT), usleep(20000);
    assert_int_equal(children_of(parent, pids), count);
}

/* A zygote that sleeps has said what it had to say of the child that it forked; then we have heard it. */
static void wait_until_told(struct fixture *f, long zygote)
{
    char path[64], name[64], state = 'R';
    snprintf(path, sizeof(path), "/proc/%ld/stat", zygote);
    for (int i = 0; i < 1000 && state != 'S'; i++) {
        FILE *stat = fopen(path, "r");
        assert_non_null(stat);
        assert_int_equal(fscanf(stat, "%*d %63s %c", name, &state), 2);
        fclose(stat);
        usleep(20000);
    }
    assert_int_equal(state, 'S');
    for (int i = 0; i < 10; i++)
        uv_run(ka_loop_uv(f->loop), UV_RUN_NOWAIT);
}

/* Below a user namespace its supervisor is between us and it. */
static long own_zygote(void)
{
    long below = only_child(getpid());
    return geteuid() == 0 ? below : only_child(below);
}

static void child__whose_zygote_dies__is_reported_and_the_next_one_runs(void **state)
{
    struct fixture *f = need_zygotes(state);
    struct seen first = {0}, lost = {0}, next = {0};
    run_one(f, "true", &first);
    start(f, "sleep 300", &lost, 20000);
    wait_for_children(f, own_zygote(), 2); /* its twin is one */
    wait_until_told(f, own_zygote());
    kill_own_children();
    run_until(f, &lost);
    assert_int_equal(lost.error, -EIO);
    run_one(f, "exit 5", &next);
    assert_int_equal(next.error, 0);
    assert_int_equal(next.exit_status, 5);
}

/* What a child of one zygote does is not seen by the children of the other: they have no parent in common
 * that could have changed. */
static void child__of_a_candidate__comes_from_the_twin(void **state)
{
    struct fixture *f = need_zygotes(state);
    struct seen first = {0}, candidate = {0}, trusted = {0};
    run_one(f, "true", &first);
    long zygote = own_zygote(), twin = only_child(zygote);
    start_as(f, KA_CHILD_CANDIDATE, "sleep 300", &candidate, 60000);
    wait_for_children(f, twin, 1);
    wait_for_children(f, zygote, 1);
    start(f, "sleep 300", &trusted, 60000);
    wait_for_children(f, zygote, 2);
    wait_for_children(f, twin, 1);
    kill_own_children();
    run_until(f, &candidate);
    run_until(f, &trusted);
}

static void child__whose_twin_dies__is_reported_and_the_next_one_runs(void **state)
{
    struct fixture *f = need_zygotes(state);
    struct seen first = {0}, lost = {0}, next[2] = {{0}};
    run_one(f, "true", &first);
    start_as(f, KA_CHILD_CANDIDATE, "sleep 300", &lost, 60000);
    long twin = only_child(own_zygote());
    wait_for_children(f, twin, 1);
    wait_until_told(f, twin);
    assert_int_equal(kill((pid_t)twin, SIGKILL), 0);
    run_until(f, &lost);
    assert_int_equal(lost.error, -EIO);
    for (int i = 0; i < 2; i++) {
        start_as(f, i ? KA_CHILD_CANDIDATE : KA_CHILD_TRUSTED, "exit 5", &next[i], 20000);
        run_until(f, &next[i]);
        assert_int_equal(next[i].error, 0);
        assert_int_equal(next[i].exit_status, 5);
    }
}

/* Two lists of cards stand for two processes; their locks are below the test's folder. */
static struct fixture *with_cards(void **state, struct ka_cards **others)
{
    struct fixture *f = need_jail(state);
    assert_int_equal(setenv("XDG_RUNTIME_DIR", f->dir, 1), 0);
    assert_int_equal(ka_cards_new("0", 4, &f->cards, NULL), 0);
    assert_int_equal(ka_cards_new("0", 4, others, NULL), 0);
    return need_zygotes(state);
}

#define UNTIL_GO "while ! test -e \"$PYTHONPATH/go\"; do sleep 0.05; done"

static void go(const struct fixture *f)
{
    write_into(f->package, "go", "", 0);
}

static void run_until_it_runs(struct fixture *f)
{
    while (!ka_children_running(f->children))
        uv_run(ka_loop_uv(f->loop), UV_RUN_ONCE);
}

static void run_for(struct fixture *f, uint64_t ms)
{
    for (uint64_t until = uv_hrtime() + ms * 1000000; uv_hrtime() < until;) {
        uv_run(ka_loop_uv(f->loop), UV_RUN_NOWAIT);
        uv_sleep(5);
    }
}

static void child__on_a_card_that_another_process_wants_alone__stops_and_goes_on_later(void **state)
{
    struct ka_cards *others = NULL;
    struct fixture *f = with_cards(state, &others);
    struct seen s = {0}, next = {0};
    bool elsewhere = false;
    struct ka_child_req req = {.request = UNTIL_GO, .device = "cuda", .deadline_ms = 6000};
    start_this(f, req, &s);
    run_until_it_runs(f);
    while (!ka_cards_enter_alone(others, 0, false, &elsewhere))
        uv_run(ka_loop_uv(f->loop), UV_RUN_ONCE);
    go(f);
    req.request = "true";
    start_this(f, req, &next);
    run_for(f, 6500); /* its deadline too would be over */
    assert_int_equal(s.calls + next.calls, 0);
    ka_cards_leave_alone(others, 0, true);
    run_until(f, &s);
    run_until(f, &next);
    assert_int_equal(s.error, 0);
    assert_true(s.paused_ms >= 6500 && s.wall_ms < 6000);
    assert_true(next.error == 0 && next.paused_ms == 0);
    ka_cards_free(others);
}

static void child__that_times__stops_the_others_of_its_process_and_has_their_place(void **state)
{
    struct ka_cards *others = NULL;
    struct fixture *f = with_cards(state, &others);
    struct seen first = {0}, second = {0}, alone = {0};
    struct ka_child_req req = {.request = UNTIL_GO, .device = "cuda", .deadline_ms = 60000};
    start_this(f, req, &first);
    req.request = "true";
    req.alone = true;
    start_this(f, req, &alone);
    run_until(f, &alone);
    assert_true(alone.error == 0 && first.calls == 0);
    req.alone = false;
    start_this(f, req, &second); /* and the card is everybody's again */
    run_until(f, &second);
    go(f);
    run_until(f, &first);
    assert_true(first.error == 0 && first.paused_ms > 0);
    ka_cards_free(others);
}

static void child__that_is_stopped__can_be_cancelled(void **state)
{
    struct ka_cards *others = NULL;
    struct fixture *f = with_cards(state, &others);
    struct seen s = {0};
    bool elsewhere = false;
    struct ka_child_req req = {.request = UNTIL_GO, .device = "cuda", .deadline_ms = 60000};
    uint64_t op = start_this(f, req, &s);
    run_until_it_runs(f);
    while (!ka_cards_enter_alone(others, 0, false, &elsewhere))
        uv_run(ka_loop_uv(f->loop), UV_RUN_ONCE);
    ka_child_cancel(f->children, op);
    run_until(f, &s);
    assert_int_equal(s.error, -ECANCELED);
    ka_cards_leave_alone(others, 0, true);
    ka_cards_free(others);
}

static void child__whose_card_is_wanted_empty__is_waited_for(void **state)
{
    struct ka_cards *others = NULL;
    struct fixture *f = with_cards(state, &others);
    struct seen s = {0};
    bool elsewhere = false;
    struct ka_child_req req = {.request = UNTIL_GO, .device = "cuda", .deadline_ms = 60000};
    start_this(f, req, &s);
    run_until_it_runs(f);
    assert_false(ka_cards_enter_alone(others, 0, true, &elsewhere));
    run_for(f, 300);
    assert_false(ka_cards_enter_alone(others, 0, true, &elsewhere));
    go(f);
    run_until(f, &s);
    assert_true(s.error == 0 && s.paused_ms == 0);
    assert_true(ka_cards_enter_alone(others, 0, true, &elsewhere));
    ka_cards_free(others);
}

static void child__whose_zygote_cannot_start__runs_without_it(void **state)
{
    struct fixture *f = need_zygotes(state);
    char *folder = ka_path_join(f->package, "kernel_agent");
    write_into(folder, "zygote.py", "raise SystemExit(9)\n", 20);
    free(folder);
    for (int i = 0; i < 3; i++) {
        struct seen s = {0};
        run_one(f, "exit 5", &s);
        assert_int_equal(s.error, 0); /* this child.py has no main below __main__, so nothing ran in it */
        assert_int_equal(s.exit_status, 0);
    }
}

static void children__folder_of_a_killed_daemon__is_removed_by_the_next(void **state)
{
    struct fixture *f = need_jail(state);
    struct ka_children *next = NULL;
    char *dead = ka_path_join(f->base, "daemon-abcdef"), *left = ka_path_join(dead, "check-123456");
    struct ka_children_conf conf = {.jail = "/bin/true", .base = f->base};
    struct seen s = {0};
    assert_int_equal(ka_mkdirs(left, NULL), 0);
    assert_int_equal(ka_children_new(f->loop, &conf, &next, NULL), 0);
    assert_int_equal(access(dead, F_OK), -1);
    run_one(f, "exit 4", &s); /* the folder of one that lives is still there */
    assert_int_equal(s.exit_status, 4);
    ka_children_close(next);
    free(dead);
    free(left);
}

static void capture__short_output__is_kept_whole(void **state)
{
    (void)state;
    struct ka_capture c = {.half = 4};
    struct ka_buf out = {0};
    ka_capture_add(&c, "abcdef", 6);
    assert_int_equal(ka_capture_text(&c, &out), 0);
    assert_string_equal(ka_buf_str(&out), "abcdef");
    ka_buf_free(&out);
    ka_capture_free(&c);
}

static void capture__long_output__drops_the_middle(void **state)
{
    static const size_t steps[] = {1, 3, 7, 26};
    (void)state;
    for (size_t i = 0; i < KA_COUNT(steps); i++) {
        struct ka_capture c = {.half = 4};
        struct ka_buf out = {0};
        const char *text = "abcdefghijklmnopqrstuvwx\0z";
        for (size_t at = 0; at < 26; at += steps[i])
            ka_capture_add(&c, text + at, 26 - at < steps[i] ? 26 - at : steps[i]);
        assert_int_equal(ka_capture_text(&c, &out), 0);
        assert_string_equal(ka_buf_str(&out), "abcd\n[... 18 bytes left out ...]\nwx?z");
        ka_buf_free(&out);
        ka_capture_free(&c);
    }
}

static void capture__characters_cut_at_the_gap__leave_valid_text(void **state)
{
    (void)state;
    for (size_t shift = 0; shift < 3; shift++) {
        struct ka_capture c = {.half = 4};
        struct ka_buf out = {0};
        ka_capture_add(&c, "xy", shift);
        for (int i = 0; i < 9; i++)
            ka_capture_add(&c, "\xE2\x82\xAC", 3);
        assert_int_equal(ka_capture_text(&c, &out), 0);
        json_t *text = json_string(ka_buf_str(&out)); /* NULL for what is no UTF-8 */
        assert_non_null(text);
        assert_non_null(strstr(ka_buf_str(&out), "\xE2\x82\xAC"));
        json_decref(text);
        ka_buf_free(&out);
        ka_capture_free(&c);
    }
}

static enum ka_child_memory memory_of(uint64_t all, uint64_t available)
{
    struct ka_machine machine = {.memory_bytes = all, .memory_available_bytes = available};
    return ka_child_memory(&machine);
}

static void memory__of_a_small_machine__goes_by_parts(void **state)
{
    (void)state;
    assert_int_equal(memory_of(2000000, 99999), KA_MEMORY_LOW);
    assert_int_equal(memory_of(2000000, 100000), KA_MEMORY_TIGHT);
    assert_int_equal(memory_of(2000000, 249999), KA_MEMORY_TIGHT);
    assert_int_equal(memory_of(2000000, 250000), KA_MEMORY_ENOUGH);
    assert_int_equal(memory_of(2000000, 666665), KA_MEMORY_ENOUGH);
    assert_int_equal(memory_of(2000000, 666666), KA_MEMORY_AMPLE);
}

static void memory__of_a_large_machine__goes_by_gigabytes(void **state)
{
    (void)state;
    const uint64_t gib = (uint64_t)1 << 30;
    assert_int_equal(memory_of(900 * gib, 2 * gib - 1), KA_MEMORY_LOW);
    assert_int_equal(memory_of(900 * gib, 2 * gib), KA_MEMORY_TIGHT);
    assert_int_equal(memory_of(900 * gib, 16 * gib), KA_MEMORY_ENOUGH);
    assert_int_equal(memory_of(900 * gib, 64 * gib), KA_MEMORY_AMPLE);
}

static void memory__that_cannot_be_told__is_enough(void **state)
{
    (void)state;
    assert_int_equal(memory_of(0, 0), KA_MEMORY_ENOUGH);
    assert_int_equal(memory_of(2000000, 0), KA_MEMORY_LOW);
}

static void set_memory(const struct fixture *f, unsigned available_mib)
{
    char *folder = ka_path_join(f->dir, "proc"), *path = ka_path_join(folder, "meminfo"), text[100];
    snprintf(text, sizeof(text), "MemTotal: %u kB\nMemAvailable: %u kB\n", 8192U << 10, available_mib << 10);
    assert_int_equal(ka_mkdirs(folder, NULL), 0);
    assert_int_equal(ka_file_put(path, text, strlen(text), NULL), 0);
    free(folder);
    free(path);
}

static struct fixture *with_memory(void **state, unsigned available_mib)
{
    struct fixture *f = need_jail(state);
    char *jail = ka_strdup(ka_children_jail(f->children));
    struct ka_children_conf conf = {
        .jail = jail, .base = f->base, .max_running = 2, .no_zygotes = true, .machine = f->dir};
    ka_children_close(f->children);
    ka_loop_run(f->loop);
    set_memory(f, available_mib);
    assert_int_equal(ka_children_new(f->loop, &conf, &f->children, NULL), 0);
    free(jail);
    return f;
}

static void children__while_memory_is_tight__run_one_at_a_time(void **state)
{
    struct fixture *f = with_memory(state, 900);
    struct seen first = {0}, second = {0};
    start(f, "while ! test -e go; do sleep 0.05; done", &first, 20000);
    start(f, "true", &second, 20000);
    while (ka_children_running(f->children) == 0)
        uv_run(ka_loop_uv(f->loop), UV_RUN_ONCE);
    for (int i = 0; i < 20; i++)
        uv_run(ka_loop_uv(f->loop), UV_RUN_NOWAIT);
    assert_int_equal(ka_children_running(f->children), 1);
    set_memory(f, 2000);
    run_until(f, &second);
    assert_int_equal(second.error, 0);
    assert_int_equal(first.calls, 0);
    set_memory(f, 100); /* which costs it its life unless its control group caps it: then it runs on */
    while (!first.calls && !strstr(second.layers, "\"cgroup\": true"))
        uv_run(ka_loop_uv(f->loop), UV_RUN_ONCE);
    assert_int_equal(first.calls ? first.error : -ENOMEM, -ENOMEM);
}

static void children__where_no_memory_is_left__wait_for_some(void **state)
{
    struct fixture *f = with_memory(state, 100);
    struct seen s = {0};
    start(f, "true", &s, 20000);
    for (int i = 0; i < 20; i++)
        uv_run(ka_loop_uv(f->loop), UV_RUN_NOWAIT);
    assert_int_equal(ka_children_queued(f->children), 1);
    set_memory(f, 900);
    run_until(f, &s);
    assert_int_equal(s.error, 0);
}

static void args__of_a_request__are_the_options_of_the_jail(void **state)
{
    (void)state;
    static const char *const ro[] = {"/a"}, *const env[] = {"N=v"};
    static const char *const wanted[] = {"--scratch", "/s",   "--profile", "cpu", "--mem-mb", "7",
                                         "--require", "full", "--ro",      "/p",  "--env",    "PYTHONPATH=/p",
                                         "--ro",      "/a",   "--env",     "N=v", "--",       "/bin/python"};
    struct ka_child_req req = {.request = "{}",
                               .python = "/bin/python",
                               .package_dir = "/p",
                               .ro = ro,
                               .ro_count = 1,
                               .env = env,
                               .env_count = 1,
                               .require = "full",
                               .limits = {.mem_mb = 7}};
    struct ka_args args = {.count = 0};
    struct ka_child_req *copy = ka_child_req_copy(&req);
    ka_child_args_jail(&args, copy, "/s", NULL);
    assert_int_equal(args.count, KA_COUNT(wanted));
    for (size_t i = 0; i < args.count; i++)
        assert_string_equal(args.argv[i], wanted[i]);
    assert_null(args.argv[args.count]);
    ka_args_clear(&args);
    ka_child_req_free(copy);
}

static void args__of_a_child_on_a_gpu__name_its_card(void **state)
{
    const struct ka_child_req req = {
        .request = "{}", .python = "/bin/python", .package_dir = "/p", .device = "cuda", .card = 1};
    struct ka_args args = {.count = 0};
    bool named = false;
    (void)state;
    setenv("CUDA_VISIBLE_DEVICES", "4,7", 1);
    ka_child_args_jail(&args, &req, "/s", "7");
    for (size_t i = 0; i + 1 < args.count; i++) {
        named = named || (strcmp(args.argv[i], "--env") == 0 &&
                          strcmp(args.argv[i + 1], "CUDA_VISIBLE_DEVICES=7") == 0);
        assert_null(strstr(args.argv[i], "4,7"));
    }
    assert_true(named);
    unsetenv("CUDA_VISIBLE_DEVICES");
    ka_args_clear(&args);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(capture__short_output__is_kept_whole),
        cmocka_unit_test(capture__long_output__drops_the_middle),
        cmocka_unit_test(capture__characters_cut_at_the_gap__leave_valid_text),
        cmocka_unit_test(memory__of_a_small_machine__goes_by_parts),
        cmocka_unit_test(memory__of_a_large_machine__goes_by_gigabytes),
        cmocka_unit_test(memory__that_cannot_be_told__is_enough),
        cmocka_unit_test(args__of_a_request__are_the_options_of_the_jail),
        cmocka_unit_test(args__of_a_child_on_a_gpu__name_its_card),
#define WITH_JAIL(test) cmocka_unit_test_setup_teardown(test, set_up, tear_down)
        WITH_JAIL(children__while_memory_is_tight__run_one_at_a_time),
        WITH_JAIL(children__where_no_memory_is_left__wait_for_some),
        WITH_JAIL(child__that_ends__reports_status_output_and_layers),
        WITH_JAIL(child__result_file__is_read_through_the_scratch),
        WITH_JAIL(child__hostile_result_files__are_refused),
        WITH_JAIL(child__names_that_leave_the_scratch__are_refused),
        WITH_JAIL(child__past_its_deadline__is_killed_with_its_tree),
        WITH_JAIL(child__cancelled__ends_at_once_and_says_so),
        WITH_JAIL(child__beyond_the_limit__waits_and_can_be_cancelled_there),
        WITH_JAIL(child__flood_of_output__keeps_head_and_tail),
        WITH_JAIL(child__that_fills_its_scratch__is_stopped_there_and_read),
        WITH_JAIL(child__killed_in_the_middle_of_a_write__leaves_a_result_that_is_capped),
        WITH_JAIL(child__closing_inside_done__ends_the_others_first),
        WITH_JAIL(child__missing_layer__runs_nothing),
        WITH_JAIL(child__request_without_parts__is_rejected),
        WITH_JAIL(child__interpreter_that_is_not_there__is_reported),
        WITH_JAIL(child__of_a_zygote__behaves_like_one_alone),
        WITH_JAIL(child__of_a_zygote__is_killed_at_its_deadline),
        WITH_JAIL(child__on_a_card_that_another_process_wants_alone__stops_and_goes_on_later),
        WITH_JAIL(child__that_times__stops_the_others_of_its_process_and_has_their_place),
        WITH_JAIL(child__that_is_stopped__can_be_cancelled),
        WITH_JAIL(child__whose_card_is_wanted_empty__is_waited_for),
        WITH_JAIL(child__of_a_zygote__can_be_cancelled_while_it_waits),
        WITH_JAIL(child__whose_zygote_dies__is_reported_and_the_next_one_runs),
        WITH_JAIL(child__of_a_candidate__comes_from_the_twin),
        WITH_JAIL(child__whose_twin_dies__is_reported_and_the_next_one_runs),
        WITH_JAIL(child__whose_zygote_cannot_start__runs_without_it),
        WITH_JAIL(children__folder_of_a_killed_daemon__is_removed_by_the_next),
        WITH_JAIL(children__base_that_others_can_write__is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
