/* Children that come from zygotes, and the card that they share. */
#include "zygote_fixture.h"

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
    assert_non_null(strstr(lost.told, "signal 9"));
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

int main(void)
{
    const struct CMUnitTest tests[] = {
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
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
