/* Children that ask for their card alone: stopped until they have it, and nobody in their way. In the shell
 * that stands for Python the word and its answer go through standard input. */
#include "zygote_fixture.h"

#define ASK "printf '?' >&0; test \"$(head -c 1)\" = '!'"
#define THROUGH "printf . >&0"
#define UNTIL(name) "while ! test -e \"$PYTHONPATH/" name "\"; do sleep 0.05; done"
#define NOW "date +%s%N"

static void say(const struct fixture *f, const char *name)
{
    write_into(f->package, name, "", 0);
}

static struct ka_child_req asking(const char *request)
{
    return (struct ka_child_req){.request = request, .device = "cuda", .turns = true, .deadline_ms = 60000};
}

static bool is_timed(const struct fixture *f)
{
    struct ka_card_use use;
    ka_cards_look(f->cards, 0, &use);
    return use.timed;
}

static void run_until_timed(struct fixture *f, bool timed)
{
    for (int i = 0; i < 1000 && is_timed(f) != timed; i++)
        run_for(f, 20);
    assert_true(is_timed(f) == timed);
}

static bool enters(struct ka_cards *cards)
{
    bool elsewhere = false;
    return ka_cards_enter(cards, 0, &elsewhere);
}

/* Starts the zygotes, so that what comes next takes no second. */
static void run_first(struct fixture *f)
{
    struct seen s = {0};
    run_one(f, "true", &s);
    assert_int_equal(s.error, 0);
}

static void child__that_asks__has_the_card_alone_until_it_is_through(void **state)
{
    struct ka_cards *others = NULL;
    struct fixture *f = with_cards(state, &others);
    struct seen shares = {0}, times = {0};
    struct ka_child_req req = asking(UNTIL("go"));
    req.turns = false;
    start_this(f, req, &shares);
    start_this(f,
               asking(UNTIL("ask") ";" ASK " && echo alone;" UNTIL("through") ";" THROUGH ";" UNTIL("end")),
               &times);
    while (ka_children_running(f->children) < 2)
        uv_run(ka_loop_uv(f->loop), UV_RUN_ONCE);
    assert_true(enters(others)); /* while it gets ready, the card is everybody's */
    ka_cards_leave(others, 0);
    say(f, "ask");
    run_until_timed(f, true);
    assert_false(enters(others));
    say(f, "go");
    run_for(f, 500);
    assert_int_equal(shares.calls, 0); /* it is stopped */
    say(f, "through");
    run_until_timed(f, false);
    assert_true(enters(others)); /* while it still writes */
    run_until(f, &shares);
    assert_true(shares.error == 0 && shares.paused_ms >= 500);
    assert_int_equal(times.calls, 0);
    say(f, "end");
    run_until(f, &times);
    assert_int_equal(times.error, 0);
    assert_string_equal(times.out, "alone\n");
    ka_cards_free(others);
}

static void child__that_waits_for_its_turn__is_stopped_and_so_is_its_clock(void **state)
{
    struct ka_cards *others = NULL;
    struct fixture *f = with_cards(state, &others);
    struct seen s = {0};
    bool elsewhere = false;
    struct ka_child_req req = asking(ASK " && echo alone");
    run_first(f);
    assert_true(enters(others));
    req.deadline_ms = 2000;
    start_this(f, req, &s);
    run_for(f, 2500);
    assert_int_equal(s.calls, 0);
    assert_false(enters(others)); /* the gate is its own: nobody begins */
    ka_cards_leave(others, 0);
    run_until(f, &s);
    assert_int_equal(s.error, 0);
    assert_string_equal(s.out, "alone\n");
    assert_true(s.paused_ms >= 1500 && s.wall_ms < 2000);
    while (!ka_cards_enter_alone(others, 0, false, &elsewhere))
        uv_sleep(50); /* its end was the end of its turn */
    ka_cards_free(others);
}

/* Two lots of children stand for two processes. */
static void children__of_two_processes_that_ask__have_the_card_one_after_another(void **state)
{
    struct ka_cards *others = NULL;
    struct fixture *f = with_cards(state, &others), second = *f;
    const char *turn = ASK " && " NOW "; sleep 0.3; " NOW "; " THROUGH "; ";
    KA_AUTO_FREE char *twice = ka_format("%s%s", turn, turn);
    struct ka_children_conf conf = {
        .jail = ka_children_jail(f->children), .base = f->base, .max_running = 2, .cards = others};
    struct seen s[4] = {{0}};
    unsigned long long at[4][4];
    assert_int_equal(ka_children_new(f->loop, &conf, &second.children, NULL), 0);
    for (int i = 0; i < 4; i++)
        start_this(i % 2 ? &second : f, asking(twice), &s[i]);
    for (int i = 0; i < 4; i++) {
        while (!s[i].calls)
            uv_run(ka_loop_uv(f->loop), UV_RUN_ONCE);
        assert_int_equal(s[i].error, 0);
        assert_int_equal(sscanf(s[i].out, "%llu %llu %llu %llu", &at[i][0], &at[i][1], &at[i][2], &at[i][3]),
                         4);
    }
    for (int i = 0; i < 16; i++)
        for (int k = 0; k < 16; k++) {
            const unsigned long long *a = &at[i / 4][i % 4 / 2 * 2], *b = &at[k / 4][k % 4 / 2 * 2];
            assert_true(a == b || a[1] <= b[0] || b[1] <= a[0]);
        }
    ka_children_close(second.children);
    run_for(f, 300);
    ka_cards_free(others);
}

/* One that nothing stops is the last to go, when all others are stopped already. */
static void child__that_asks_beside_one_that_cannot_be_stopped__waits_for_the_end_of_that(void **state)
{
    struct ka_cards *others = NULL;
    struct fixture *f = with_cards(state, &others), more = *f;
    struct ka_children_conf conf = {
        .jail = ka_children_jail(f->children), .base = f->base, .max_running = 3, .cards = f->cards};
    struct seen stopped = {0}, tool = {0}, times = {0};
    struct ka_child_req req = asking(UNTIL("end"));
    assert_int_equal(ka_children_new(f->loop, &conf, &more.children, NULL), 0);
    req.turns = false;
    start_this(&more, req, &stopped);
    req.request = UNTIL("go");
    req.local_sockets = true;
    start_this(&more, req, &tool);
    start_this(&more, asking(ASK " && echo alone"), &times);
    while (ka_children_running(more.children) < 3)
        uv_run(ka_loop_uv(f->loop), UV_RUN_ONCE);
    while (!ka_cards_is_wanted(f->cards, 0))
        uv_run(ka_loop_uv(f->loop), UV_RUN_ONCE);
    run_for(f, 500);
    assert_int_equal(times.calls, 0);
    say(f, "go");
    for (int i = 0; i < 250 && !times.calls; i++)
        run_for(f, 20);
    say(f, "end");
    for (int i = 0; i < 250 && !stopped.calls; i++)
        run_for(f, 20);
    ka_children_close(more.children);
    run_for(f, 300);
    assert_string_equal(times.out, "alone\n");
    assert_true(stopped.error == 0 && stopped.paused_ms > 0 && tool.calls == 1 && tool.paused_ms == 0);
    ka_cards_free(others);
}

/* Every process that began below this one: who is stopped does not hear that its child has died. */
static void signal_zygotes(int number)
{
    char path[64], line[4096] = "";
    snprintf(path, sizeof(path), "/proc/self/task/%d/children", (int)getpid());
    FILE *file = fopen(path, "r");
    if (!file) {
        print_message("this kernel names no children below /proc: skipped\n");
        skip();
    }
    char *at = fgets(line, sizeof(line), file);
    fclose(file);
    for (long pid; at && (pid = strtol(at, &at, 10)) > 0;)
        assert_int_equal(kill((pid_t)pid, number), 0);
}

/* As a GPU's driver holds it for some time. */
static void child__that_is_killed_and_not_gone__has_no_clock_that_goes_on(void **state)
{
    struct ka_cards *others = NULL;
    struct fixture *f = with_cards(state, &others);
    struct seen s = {0};
    bool elsewhere = false;
    struct ka_child_req req = asking(UNTIL("go"));
    run_first(f);
    req.turns = false;
    req.deadline_ms = 1500;
    start_this(f, req, &s);
    run_until_it_runs(f);
    run_for(f, 500);
    signal_zygotes(SIGSTOP);
    run_until(f, &s);
    assert_int_equal(s.error, -ETIMEDOUT);
    for (int i = 0; i < 2; i++) { /* it is on the card while others want that alone, and when they leave */
        ka_cards_enter_alone(others, 0, false, &elsewhere);
        run_for(f, 300);
        ka_cards_leave_alone(others, 0, false);
        run_for(f, 1200);
    }
    assert_int_equal(s.calls, 1);
    signal_zygotes(SIGCONT);
    while (ka_children_running(f->children))
        uv_run(ka_loop_uv(f->loop), UV_RUN_ONCE);
    ka_cards_free(others);
}

static void child__that_ends_in_its_turn__lets_the_card_go(void **state)
{
    static const struct {
        const char *request;
        unsigned deadline_ms;
        int error;
    } ways[] = {{ASK "; exit 0", 60000, 0}, {ASK "; sleep 300", 1500, -ETIMEDOUT}};
    struct ka_cards *others = NULL;
    struct fixture *f = with_cards(state, &others);
    for (size_t i = 0; i < KA_COUNT(ways); i++) {
        struct seen s = {0};
        struct ka_child_req req = asking(ways[i].request);
        req.deadline_ms = ways[i].deadline_ms;
        start_this(f, req, &s);
        run_until(f, &s);
        assert_int_equal(s.error, ways[i].error);
        assert_false(is_timed(f));
        assert_true(enters(others));
        ka_cards_leave(others, 0);
    }
    ka_cards_free(others);
}

static void child__that_is_cancelled_while_it_waits__waits_no_longer(void **state)
{
    struct ka_cards *others = NULL;
    struct fixture *f = with_cards(state, &others);
    struct seen s = {0}, next = {0};
    bool elsewhere = false;
    run_first(f);
    assert_true(enters(others));
    uint64_t op = start_this(f, asking(ASK), &s);
    while (!ka_cards_is_wanted(others, 0))
        uv_run(ka_loop_uv(f->loop), UV_RUN_ONCE);
    ka_child_cancel(f->children, op);
    run_until(f, &s);
    assert_int_equal(s.error, -ECANCELED);
    assert_false(ka_cards_is_wanted(others, 0));
    ka_cards_leave(others, 0);
    assert_true(ka_cards_enter_alone(others, 0, false, &elsewhere));
    ka_cards_leave_alone(others, 0, true);
    start_this(f, asking(ASK " && " THROUGH), &next);
    run_until(f, &next);
    assert_true(next.error == 0 && next.exit_status == 0);
    ka_cards_free(others);
}

static void child__that_says_what_is_not_due__has_no_more_turns(void **state)
{
    static const char *const ways[] = {"printf x >&0; ", "printf . >&0; ",
                                       "printf '?%s' '?' >&0; head -c 1; "};
    struct ka_cards *others = NULL;
    struct fixture *f = with_cards(state, &others);
    run_first(f);
    for (size_t i = 0; i < KA_COUNT(ways); i++) {
        struct seen s = {0};
        KA_AUTO_FREE char *request = ka_format("%s%s && echo again", ways[i], ASK);
        struct ka_child_req req = asking(request);
        req.deadline_ms = 2500;
        start_this(f, req, &s);
        run_for(f, 1500);
        assert_false(is_timed(f));
        assert_true(enters(others));
        run_until(f, &s);
        assert_int_equal(s.error, -ETIMEDOUT);
        assert_null(strstr(s.out, "again"));
        ka_cards_leave(others, 0);
    }
    ka_cards_free(others);
}

static void child__that_has_its_card_alone_from_its_start__is_answered_at_once_and_keeps_it(void **state)
{
    struct ka_cards *others = NULL;
    struct fixture *f = with_cards(state, &others);
    struct seen s = {0};
    struct ka_child_req req = asking(ASK " && " THROUGH " && " ASK " && echo both;" UNTIL("go"));
    req.alone = true;
    start_this(f, req, &s);
    run_until_timed(f, true);
    run_for(f, 500);
    assert_false(enters(others));
    say(f, "go");
    run_until(f, &s);
    assert_string_equal(s.out, "both\n");
    assert_int_equal(s.paused_ms, 0);
    ka_cards_free(others);
}

/* Nothing would stop it while it waits for a turn. */
static void child__without_a_zygote__begins_when_it_has_the_card_alone(void **state)
{
    struct fixture *f = need_jail(state);
    struct ka_cards *others = NULL;
    struct seen s = {0};
#ifdef __SANITIZE_ADDRESS__
    print_message("ka-jail with a sanitizer has no profile for GPUs: skipped\n");
    skip();
#endif
    assert_int_equal(setenv("XDG_RUNTIME_DIR", f->dir, 1), 0);
    assert_int_equal(ka_cards_new("0", 4, &f->cards, NULL), 0);
    assert_int_equal(ka_cards_new("0", 4, &others, NULL), 0);
    KA_AUTO_FREE char *jail = ka_strdup(ka_children_jail(f->children));
    struct ka_children_conf conf = {
        .jail = jail, .base = f->base, .max_running = 2, .cards = f->cards, .no_zygotes = true};
    ka_children_close(f->children);
    assert_int_equal(ka_children_new(f->loop, &conf, &f->children, NULL), 0);
    assert_true(enters(others));
    start_this(f, asking("echo begun;" ASK " && " THROUGH " && echo alone"), &s);
    run_for(f, 500);
    assert_true(s.calls == 0 && ka_children_running(f->children) == 0);
    assert_false(enters(others));
    ka_cards_leave(others, 0);
    run_until(f, &s);
    assert_int_equal(s.error, 0);
    assert_string_equal(s.out, "begun\nalone\n");
    assert_false(is_timed(f));
    ka_cards_free(others);
}

static void child__whose_zygote_cannot_start__begins_when_it_has_the_card_alone(void **state)
{
    struct ka_cards *others = NULL;
    struct fixture *f = with_cards(state, &others);
    struct seen s = {0}, cancelled = {0};
    KA_AUTO_FREE char *folder = ka_path_join(f->package, "kernel_agent");
    write_into(folder, "zygote.py", "raise SystemExit(9)\n", 20);
    assert_true(enters(others));
    start_this(f, asking(""), &s);
    uint64_t op = start_this(f, asking(""), &cancelled);
    for (int i = 0; i < 1000 && ka_children_queued(f->children) != 0; i++)
        run_for(f, 1);
    for (int i = 0; i < 1000 && ka_children_queued(f->children) != 2; i++)
        run_for(f, 20);
    assert_int_equal(ka_children_queued(f->children), 2); /* once more, alone */
    run_for(f, 300);
    assert_int_equal(s.calls, 0);
    ka_child_cancel(f->children, op);
    run_until(f, &cancelled);
    assert_int_equal(cancelled.error, -ECANCELED);
    ka_cards_leave(others, 0);
    run_until(f, &s);
#ifndef __SANITIZE_ADDRESS__ /* ka-jail with a sanitizer has no profile for GPUs */
    assert_int_equal(s.error, 0);
#endif
    ka_cards_free(others);
}

static void child__that_shares_no_card__has_nobody_to_ask(void **state)
{
    struct ka_cards *others = NULL;
    struct fixture *f = with_cards(state, &others);
    struct seen s = {0};
    struct ka_child_req req = asking("head -c 1 | wc -c");
    req.device = "cpu";
    start_this(f, req, &s);
    run_until(f, &s);
    assert_string_equal(s.out, "0\n");
    ka_cards_free(others);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        WITH_JAIL(child__that_asks__has_the_card_alone_until_it_is_through),
        WITH_JAIL(child__that_waits_for_its_turn__is_stopped_and_so_is_its_clock),
        WITH_JAIL(children__of_two_processes_that_ask__have_the_card_one_after_another),
        WITH_JAIL(child__that_asks_beside_one_that_cannot_be_stopped__waits_for_the_end_of_that),
        WITH_JAIL(child__that_is_killed_and_not_gone__has_no_clock_that_goes_on),
        WITH_JAIL(child__that_ends_in_its_turn__lets_the_card_go),
        WITH_JAIL(child__that_is_cancelled_while_it_waits__waits_no_longer),
        WITH_JAIL(child__that_says_what_is_not_due__has_no_more_turns),
        WITH_JAIL(child__that_has_its_card_alone_from_its_start__is_answered_at_once_and_keeps_it),
        WITH_JAIL(child__without_a_zygote__begins_when_it_has_the_card_alone),
        WITH_JAIL(child__whose_zygote_cannot_start__begins_when_it_has_the_card_alone),
        WITH_JAIL(child__that_shares_no_card__has_nobody_to_ask),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
