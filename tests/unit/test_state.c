/* The run's SQLite file. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include <errno.h>
#include <math.h>
#include <semaphore.h>
#include <signal.h>
#include <stdio.h>
#include <sys/resource.h>
#include <unistd.h>

#include "agent/disk/state.h"
#include "agent/io/loop.h"
#include "agent/io/work.h"
#include "base/files.h"

struct fixture {
    char dir[64];
    char *path;
    struct ka_state *state;
};

static int setup(void **state)
{
    struct fixture *fixture = calloc(1, sizeof(*fixture));
    strcpy(fixture->dir, "/tmp/ka-state-XXXXXX");
    assert_non_null(mkdtemp(fixture->dir));
    fixture->path = ka_path_join(fixture->dir, "run.db");
    assert_int_equal(ka_state_open(fixture->path, true, NULL, &fixture->state, NULL), 0);
    *state = fixture;
    return 0;
}

static int teardown(void **state)
{
    struct fixture *fixture = *state;
    ka_state_close(fixture->state);
    ka_rmtree(fixture->dir, NULL);
    free(fixture->path);
    free(fixture);
    return 0;
}

static void reopen(struct fixture *fixture)
{
    ka_state_close(fixture->state);
    fixture->state = NULL;
    assert_int_equal(ka_state_open(fixture->path, false, NULL, &fixture->state, NULL), 0);
}

static void state__documents_and_job__survive_reopening(void **state)
{
    struct fixture *fixture = *state;
    json_t *doc = json_pack("{s:s}", "stub", "softmax");
    struct ka_job job = {.best = 7, .best_cost = INFINITY, .slot_count = 1}, again;
    job.slots[0] = (struct ka_job_slot){.state = KA_SLOT_JUDGED, .snapshot = 7, .cost = 2.5};
    assert_int_equal(ka_state_put(fixture->state, "inspect", doc, NULL), 0);
    assert_int_equal(ka_state_save_job(fixture->state, &job, NULL), 0);
    assert_int_equal(ka_state_commit(fixture->state, NULL), 0);
    reopen(fixture);
    json_t *read = ka_state_get(fixture->state, "inspect");
    assert_true(json_equal(read, doc));
    assert_null(ka_state_get(fixture->state, "nothing"));
    assert_int_equal(ka_state_load_job(fixture->state, &again, NULL), 0);
    assert_int_equal(again.best, 7);
    assert_true(isinf(again.best_cost) && again.slots[0].cost == 2.5);
    assert_int_equal(again.slots[0].state, KA_SLOT_JUDGED);
    json_decref(read);
    json_decref(doc);
}

static json_t *get(struct fixture *fixture, const char *name)
{
    json_t *doc = ka_state_get(fixture->state, name);
    json_decref(doc); /* only asked whether it is there */
    return doc;
}

static void state__what_was_not_committed__has_not_happened(void **state)
{
    struct fixture *fixture = *state;
    json_t *doc = json_true();
    assert_int_equal(ka_state_put(fixture->state, "kept", doc, NULL), 0);
    assert_int_equal(ka_state_commit(fixture->state, NULL), 0);
    assert_int_equal(ka_state_put(fixture->state, "dropped", doc, NULL), 0);
    assert_non_null(get(fixture, "dropped"));
    reopen(fixture);
    assert_non_null(get(fixture, "kept"));
    assert_null(get(fixture, "dropped"));
}

static void state__after_a_lost_write__nothing_is_written_any_more(void **state)
{
    struct fixture *fixture = *state;
    struct rlimit old, none;
    struct ka_err err;
    json_t *doc = json_true();
    assert_int_equal(ka_state_put(fixture->state, "kept", doc, NULL), 0);
    assert_int_equal(ka_state_commit(fixture->state, NULL), 0);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    none = old;
    none.rlim_cur = 1;
    signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &none); /* a full disk */
    assert_int_equal(ka_state_put(fixture->state, "lost", doc, NULL), 0);
    assert_int_equal(ka_state_commit(fixture->state, &err), -EIO);
    setrlimit(RLIMIT_FSIZE, &old); /* there is room again, but the job has gone on without its documents */
    assert_int_equal(ka_state_put(fixture->state, "later", doc, NULL), -EIO);
    assert_int_equal(ka_state_commit(fixture->state, &err), -EIO);
    assert_non_null(strstr(err.msg, fixture->path));
    reopen(fixture);
    assert_non_null(get(fixture, "kept"));
    assert_null(get(fixture, "lost"));
    assert_null(get(fixture, "later"));
}

static void state__same_candidate_twice__has_one_snapshot(void **state)
{
    struct fixture *fixture = *state;
    struct ka_snapshot snapshot = {
        .phase = "draft", .origin = "llm", .note = "first", .backward = "def f():\n    pass\n"};
    int64_t first, second, third;
    assert_int_equal(ka_state_snapshot_add(fixture->state, &snapshot, &first, NULL), 0);
    assert_int_equal(ka_state_snapshot_add(fixture->state, &snapshot, &second, NULL), 0);
    snapshot.backward = "def g():\n    pass\n";
    assert_int_equal(ka_state_snapshot_add(fixture->state, &snapshot, &third, NULL), 0);
    assert_int_equal(first, second);
    assert_int_not_equal(first, third);
    assert_int_equal(ka_state_snapshot_count(fixture->state), 2);
}

static void state__snapshot__comes_back_with_its_verdict(void **state)
{
    struct fixture *fixture = *state;
    struct ka_snapshot snapshot = {.phase = "fix",
                                   .origin = "llm",
                                   .note = "n",
                                   .backward = "x = 1\n",
                                   .parent = 3},
                       read;
    json_t *verdict = json_pack("{s:b}", "verified", 1);
    int64_t id;
    assert_int_equal(ka_state_snapshot_add(fixture->state, &snapshot, &id, NULL), 0);
    assert_int_equal(ka_state_snapshot_get(fixture->state, id, &read, NULL), 0);
    assert_null(read.verdict);
    assert_true(isinf(read.cost));
    ka_snapshot_free(&read);
    assert_int_equal(ka_state_snapshot_judge(fixture->state, id, verdict, NULL, 12.5, NULL), 0);
    assert_int_equal(ka_state_snapshot_head(fixture->state, id, &read, NULL), 0);
    assert_string_equal(read.backward, "x = 1\n");
    assert_true(read.verdict == NULL && read.cost == 12.5);
    ka_snapshot_free(&read);
    assert_int_equal(ka_state_commit(fixture->state, NULL), 0);
    reopen(fixture);
    assert_int_equal(ka_state_snapshot_get(fixture->state, id, &read, NULL), 0);
    assert_string_equal(read.backward, "x = 1\n");
    assert_int_equal(read.parent, 3);
    assert_true(json_equal(read.verdict, verdict));
    assert_true(read.cost == 12.5);
    ka_snapshot_free(&read);
    json_decref(verdict);
    assert_int_equal(ka_state_snapshot_get(fixture->state, 999, &read, NULL), -ENOENT);
}

static void state__twin__is_the_first_judged_snapshot_with_the_same_content(void **state)
{
    struct fixture *fixture = *state;
    struct ka_snapshot snapshot = {.phase = "draft", .origin = "differentiator", .backward = "x = 1\n"}, twin;
    json_t *verdict = json_pack("{s:b}", "verified", 0);
    int64_t first, other, again;
    assert_int_equal(ka_state_snapshot_add(fixture->state, &snapshot, &first, NULL), 0);
    assert_int_equal(ka_state_snapshot_twin(fixture->state, first, &twin, NULL), -ENOENT);
    assert_int_equal(ka_state_snapshot_judge(fixture->state, first, verdict, NULL, 3.5, NULL), 0);
    snapshot.phase = "optimise";
    assert_int_equal(ka_state_snapshot_add(fixture->state, &snapshot, &again, NULL), 0);
    snapshot.backward = "x = 2\n";
    assert_int_equal(ka_state_snapshot_add(fixture->state, &snapshot, &other, NULL), 0);
    assert_int_equal(ka_state_snapshot_twin(fixture->state, other, &twin, NULL), -ENOENT);
    assert_int_equal(ka_state_snapshot_twin(fixture->state, again, &twin, NULL), 0);
    assert_int_equal(twin.id, first);
    assert_true(twin.cost == 3.5 && json_equal(twin.verdict, verdict));
    ka_snapshot_free(&twin);
    json_decref(verdict);
}

static void state__second_handle__is_refused_while_the_first_is_open(void **state)
{
    struct fixture *fixture = *state;
    struct ka_state *second = NULL;
    struct ka_err err;
    assert_int_equal(ka_state_open(fixture->path, false, NULL, &second, &err), -EBUSY);
    assert_non_null(strstr(err.msg, "another"));
    assert_null(second);
}

static void state__missing_or_foreign_file__is_refused_with_its_path(void **state)
{
    struct fixture *fixture = *state;
    struct ka_state *other = NULL;
    struct ka_err err;
    char *path = ka_path_join(fixture->dir, "other.db");
    assert_int_equal(ka_state_open(path, false, NULL, &other, &err), -ENOENT);
    assert_int_equal(ka_file_write(path, "this is no database, only text that is long enough", 50, NULL), 0);
    assert_int_equal(ka_state_open(path, false, NULL, &other, &err), -EIO);
    assert_non_null(strstr(err.msg, path));
    free(path);
}

/* Commits while a thread is at an earlier one, and a close in the middle of it. */
static void state__with_a_loop__commits_and_closes_on_a_thread(void **state)
{
    struct fixture *fixture = *state;
    struct ka_loop *loop = ka_loop_new();
    struct ka_state *behind = NULL, *second = NULL;
    char *path = ka_path_join(fixture->dir, "behind.db");
    assert_int_equal(ka_state_open(path, true, loop, &behind, NULL), 0);
    for (int i = 0; i < 20; i++) {
        json_t *doc = json_integer(i);
        assert_int_equal(ka_state_put(behind, "count", doc, NULL), 0);
        assert_int_equal(ka_state_commit(behind, NULL), 0);
        json_decref(doc);
    }
    ka_loop_run(loop);
    assert_int_equal(ka_state_put(behind, "more", json_true(), NULL), 0);
    assert_int_equal(ka_state_commit(behind, NULL), 0);
    assert_int_equal(ka_state_open(path, false, NULL, &second, NULL), -EBUSY);
    ka_state_close(behind);
    ka_loop_run(loop);
    assert_int_equal(ka_loop_close(loop), 0);
    assert_int_equal(ka_state_open(path, false, NULL, &second, NULL), 0);
    json_t *count = ka_state_get(second, "count"), *more = ka_state_get(second, "more");
    assert_int_equal(json_integer_value(count), 19);
    assert_true(json_is_true(more));
    json_decref(count);
    json_decref(more);
    ka_state_close(second);
    free(path);
}

static void wait_for(void *arg)
{
    sem_wait(arg);
}

static void do_nothing(void *arg)
{
    (void)arg;
}

/* What a thread could not have the disk take is told by the next write. The only thread is kept until the log
 * is gone. */
static void state__with_a_loop__a_log_that_is_gone__refuses_the_next_write(void **state)
{
    struct fixture *fixture = *state;
    struct ka_loop *loop = ka_loop_new();
    struct ka_state *behind = NULL;
    struct ka_err err;
    char *path = ka_path_join(fixture->dir, "gone.db"), *log = ka_path_join(fixture->dir, "gone.db-wal");
    sem_t gone;
    assert_int_equal(sem_init(&gone, 0, 0), 0);
    ka_work_start(loop, wait_for, do_nothing, &gone);
    assert_int_equal(ka_state_open(path, true, loop, &behind, NULL), 0);
    assert_int_equal(unlink(log), 0);
    sem_post(&gone);
    ka_loop_run(loop);
    assert_int_equal(ka_state_put(behind, "more", json_true(), &err), -EIO);
    assert_non_null(strstr(err.msg, path));
    ka_state_close(behind);
    ka_loop_run(loop);
    assert_int_equal(ka_loop_close(loop), 0);
    sem_destroy(&gone);
    free(path);
    free(log);
}

int main(void)
{
    setenv("UV_THREADPOOL_SIZE", "1", 1);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(state__documents_and_job__survive_reopening, setup, teardown),
        cmocka_unit_test_setup_teardown(state__what_was_not_committed__has_not_happened, setup, teardown),
        cmocka_unit_test_setup_teardown(state__after_a_lost_write__nothing_is_written_any_more, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(state__same_candidate_twice__has_one_snapshot, setup, teardown),
        cmocka_unit_test_setup_teardown(state__snapshot__comes_back_with_its_verdict, setup, teardown),
        cmocka_unit_test_setup_teardown(state__twin__is_the_first_judged_snapshot_with_the_same_content,
                                        setup, teardown),
        cmocka_unit_test_setup_teardown(state__second_handle__is_refused_while_the_first_is_open, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(state__missing_or_foreign_file__is_refused_with_its_path, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(state__with_a_loop__commits_and_closes_on_a_thread, setup, teardown),
        cmocka_unit_test_setup_teardown(state__with_a_loop__a_log_that_is_gone__refuses_the_next_write, setup,
                                        teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
