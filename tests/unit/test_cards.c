/* Cards: which run has which, and who has one alone. Two of them stand for two processes: the locks are their
 * descriptors'. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "agent/app/gpus.h"
#include "agent/io/cards.h"
#include "base/files.h"

static char folder[] = "/tmp/ka-test-cards-XXXXXX";

static int set_up(void **state)
{
    (void)state;
    return mkdtemp(folder) && setenv("XDG_RUNTIME_DIR", folder, 1) == 0 ? 0 : -1;
}

static int tear_down(void **state)
{
    (void)state;
    return ka_rmtree(folder, NULL);
}

/* The second after somebody had a card alone. */
static void let_the_pause_pass(void)
{
    static const struct timespec long_ago[2] = {{.tv_sec = 1}, {.tv_sec = 1}};
    KA_AUTO_FREE char *path = ka_format("%s/kernel-agent-bench-%u-0.lock", folder, (unsigned)getuid());
    assert_true(utimensat(AT_FDCWD, path, long_ago, 0) == 0 || errno == ENOENT);
}

static struct ka_cards *open_cards(const char *names, unsigned children)
{
    struct ka_cards *cards = NULL;
    struct ka_err err;
    let_the_pause_pass(); /* of the test before */
    assert_int_equal(ka_cards_new(names, children, &cards, &err), 0);
    return cards;
}

static bool enters(struct ka_cards *cards, size_t card)
{
    bool elsewhere = false;
    return ka_cards_enter(cards, card, &elsewhere);
}

static void cards__names__are_told_apart(void **state)
{
    static const char *const bad[] = {"0,", ",", "0,0", "0,GPU 1", "1,$(x)", " "};
    struct ka_cards *cards = open_cards("GPU-1a-2b, 3 ,MIG-9/1/0", 1);
    struct ka_err err;
    (void)state;
    assert_int_equal(ka_cards_count(cards), 3);
    assert_string_equal(ka_cards_name(cards, 1), "3");
    ka_cards_free(cards);
    for (size_t i = 0; i < KA_COUNT(bad); i++)
        assert_int_equal(ka_cards_new(bad[i], 1, &cards, &err), -EINVAL);
    cards = open_cards("", 1);
    assert_int_equal(ka_cards_count(cards), 1);
    assert_null(ka_cards_name(cards, 0));
    ka_cards_free(cards);
}

static void names__of_the_environment__are_what_cuda_makes_of_them(void **state)
{
    static const char *const pairs[][2] = {{"6,2", "6,2"}, {"3, 1", "3,1"}, {"0,-1,2", "0"},
                                           {"-1", ""},     {"", ""},        {"GPU-1a", "GPU-1a"}};
    (void)state;
    for (size_t i = 0; i < KA_COUNT(pairs); i++) {
        setenv("CUDA_VISIBLE_DEVICES", pairs[i][0], 1);
        KA_AUTO_FREE char *found = ka_gpus_names(NULL), *asked = ka_gpus_names("7");
        assert_string_equal(found, pairs[i][1]);
        assert_string_equal(asked, "7");
    }
    unsetenv("CUDA_VISIBLE_DEVICES");
}

static void cards__runs__are_spread_evenly(void **state)
{
    struct ka_cards *cards = open_cards("0,1,2", 1);
    (void)state;
    for (size_t i = 0; i < 6; i++)
        assert_int_equal(ka_cards_take(cards), i % 3);
    ka_cards_give(cards, 1);
    assert_int_equal(ka_cards_take(cards), 1);
    assert_int_equal(ka_cards_take(cards), 0);
    ka_cards_free(cards);
}

static void cards__children__are_limited_on_each(void **state)
{
    struct ka_cards *cards = open_cards("0,1", 2);
    bool elsewhere = false;
    (void)state;
    assert_true(enters(cards, 0) && enters(cards, 0) && enters(cards, 1));
    assert_false(ka_cards_enter(cards, 0, &elsewhere));
    assert_false(elsewhere);
    ka_cards_leave(cards, 0);
    assert_true(enters(cards, 0));
    ka_cards_free(cards);
}

static void pick__takes_a_card_that_is_free_before_one_that_is_shared_or_somebodys_alone(void **state)
{
    (void)state;
    struct ka_cards *bench = open_cards("0,1,2", 4), *others = open_cards("0,1,2", 4);
    bool elsewhere = false;
    assert_int_equal(ka_cards_pick(bench), 0);
    assert_true(ka_cards_enter_alone(others, 0, false, &elsewhere) && enters(others, 1));
    assert_int_equal(ka_cards_pick(bench), 2);
    assert_true(enters(others, 2));
    assert_int_equal(ka_cards_pick(bench), 1);
    ka_cards_leave(others, 1);
    ka_cards_leave(others, 2);
    assert_true(ka_cards_enter_alone(others, 1, false, &elsewhere));
    assert_true(ka_cards_enter_alone(others, 2, false, &elsewhere));
    assert_int_equal(ka_cards_pick(bench), 0);
    ka_cards_free(others);
    ka_cards_free(bench);
}

static void child__that_is_alone__begins_after_those_at_work_and_before_any_other(void **state)
{
    (void)state;
    struct ka_cards *cards = open_cards("0,1", 4), *others = open_cards("0,1", 4);
    bool elsewhere = false;
    assert_true(enters(cards, 0));
    assert_false(ka_cards_enter_alone(cards, 0, false, &elsewhere) || elsewhere);
    assert_false(enters(cards, 0)); /* nobody goes before it */
    assert_true(enters(cards, 1));
    ka_cards_leave(cards, 0);
    assert_true(ka_cards_enter_alone(cards, 0, false, &elsewhere));
    struct ka_card_use use;
    ka_cards_look(cards, 0, &use);
    assert_true(use.alone && use.children == 1);
    assert_false(enters(cards, 0) || ka_cards_enter_alone(cards, 0, false, &elsewhere));
    assert_false(ka_cards_enter(others, 0, &elsewhere));
    assert_true(elsewhere && enters(others, 1));
    ka_cards_leave_alone(cards, 0, true);
    assert_true(enters(cards, 0) && enters(others, 0));
    ka_cards_free(others);
    ka_cards_free(cards);
}

static void child__that_is_to_be_alone__waits_for_others_and_may_give_up(void **state)
{
    (void)state;
    struct ka_cards *cards = open_cards("0", 4), *others = open_cards("0", 4);
    bool elsewhere = false;
    assert_true(enters(others, 0));
    assert_false(ka_cards_enter_alone(cards, 0, false, &elsewhere));
    assert_true(elsewhere);
    elsewhere = false;
    assert_false(ka_cards_enter(others, 0, &elsewhere)); /* nobody elsewhere begins any more */
    assert_true(elsewhere);
    ka_cards_leave_alone(cards, 0, false);
    assert_true(enters(others, 0) && enters(cards, 0));
    ka_cards_leave(cards, 0);
    assert_false(ka_cards_enter_alone(cards, 0, false, &elsewhere));
    ka_cards_leave(others, 0);
    ka_cards_leave(others, 0);
    assert_true(ka_cards_enter_alone(cards, 0, false, &elsewhere));
    assert_false(ka_cards_enter_alone(others, 0, false, &elsewhere)); /* two would time each other */
    ka_cards_leave_alone(cards, 0, true);
    let_the_pause_pass();
    assert_true(ka_cards_enter_alone(others, 0, false, &elsewhere));
    ka_cards_free(others);
    ka_cards_free(cards);
}

static void card__that_was_somebodys_alone__is_first_had_by_those_who_share_it(void **state)
{
    (void)state;
    struct ka_cards *cards = open_cards("0", 4), *others = open_cards("0", 4);
    bool elsewhere = false;
    assert_true(ka_cards_enter_alone(cards, 0, false, &elsewhere));
    ka_cards_leave_alone(cards, 0, true);
    assert_false(ka_cards_enter_alone(others, 0, false, &elsewhere));
    assert_true(elsewhere); /* so that it looks again */
    assert_false(ka_cards_enter_alone(cards, 0, false, &elsewhere));
    assert_true(enters(others, 0) && enters(cards, 0)); /* neither waits for who may not begin */
    ka_cards_leave(others, 0);
    ka_cards_leave(cards, 0);
    let_the_pause_pass();
    assert_true(ka_cards_enter_alone(others, 0, false, &elsewhere));
    ka_cards_free(others);
    ka_cards_free(cards);
}

static void card__whose_children_stepped_aside__is_had_alone_and_theirs_again_later(void **state)
{
    (void)state;
    struct ka_cards *cards = open_cards("0", 4), *others = open_cards("0", 4);
    bool elsewhere = false;
    assert_true(enters(cards, 0) && enters(cards, 0) && enters(others, 0));
    assert_false(ka_cards_is_wanted(cards, 0) || ka_cards_enter_alone(cards, 0, false, &elsewhere));
    assert_true(ka_cards_is_wanted(cards, 0)); /* by one of its own */
    ka_cards_step_aside(cards, 0);
    assert_false(ka_cards_step_back(cards, 0) || ka_cards_enter_alone(cards, 0, false, &elsewhere));
    assert_true(ka_cards_is_wanted(others, 0)); /* by one elsewhere */
    ka_cards_step_aside(others, 0);
    assert_true(ka_cards_enter_alone(cards, 0, false, &elsewhere));
    struct ka_card_use use;
    ka_cards_look(cards, 0, &use);
    assert_true(use.alone && use.children == 3);
    ka_cards_leave(cards, 0); /* one of them is killed meanwhile */
    assert_false(ka_cards_step_back(others, 0) || enters(others, 0) || ka_cards_step_back(cards, 0));
    ka_cards_leave_alone(cards, 0, true);
    assert_false(ka_cards_is_wanted(cards, 0) || ka_cards_is_wanted(others, 0));
    assert_false(enters(cards, 0)); /* before those that are there go on */
    assert_true(ka_cards_step_back(cards, 0) && ka_cards_step_back(others, 0));
    assert_true(enters(cards, 0));
    let_the_pause_pass();
    assert_false(ka_cards_enter_alone(others, 0, false, &elsewhere)); /* their locks are held again */
    ka_cards_free(others);
    ka_cards_free(cards);
}

static void card__that_is_wanted_empty__is_stepped_aside_from_by_nobody(void **state)
{
    (void)state;
    struct ka_cards *cards = open_cards("0", 4), *others = open_cards("0", 4);
    bool elsewhere = false;
    assert_true(enters(cards, 0));
    assert_false(ka_cards_enter_alone(others, 0, true, &elsewhere));
    assert_false(ka_cards_is_wanted(cards, 0) || enters(cards, 0));
    ka_cards_leave(cards, 0);
    assert_true(ka_cards_enter_alone(others, 0, true, &elsewhere));
    ka_cards_leave_alone(others, 0, true);
    let_the_pause_pass();
    assert_true(enters(cards, 0)); /* and the next who does not want it so says so */
    assert_false(ka_cards_enter_alone(others, 0, false, &elsewhere));
    assert_true(ka_cards_is_wanted(cards, 0));
    ka_cards_free(others);
    ka_cards_free(cards);
}

static void child__that_asks__is_not_waited_for_and_keeps_its_place(void **state)
{
    (void)state;
    struct ka_cards *cards = open_cards("0", 2), *others = open_cards("0", 2);
    struct ka_card_use use;
    bool elsewhere = false;
    assert_true(enters(cards, 0) && enters(others, 0));
    ka_cards_turn_ask(cards, 0);
    assert_true(enters(cards, 0) && !enters(cards, 0)); /* it is one of two */
    ka_cards_look(cards, 0, &use);
    assert_true(use.children == 2 && !use.alone);
    assert_false(ka_cards_turn_begin(cards, 0, &elsewhere) || elsewhere);
    assert_true(ka_cards_is_wanted(cards, 0));
    ka_cards_look(cards, 0, &use);
    assert_true(use.alone && !use.timed);
    ka_cards_step_aside(cards, 0);
    assert_false(ka_cards_turn_begin(cards, 0, &elsewhere));
    assert_true(elsewhere && ka_cards_is_wanted(others, 0));
    ka_cards_step_aside(others, 0);
    assert_true(ka_cards_turn_begin(cards, 0, &elsewhere));
    assert_false(ka_cards_step_back(cards, 0) || ka_cards_step_back(others, 0));
    ka_cards_look(cards, 0, &use);
    assert_true(use.timed && use.children == 2);
    ka_cards_turn_end(cards, 0);
    assert_true(ka_cards_step_back(cards, 0) && ka_cards_step_back(others, 0));
    ka_cards_look(cards, 0, &use);
    assert_true(use.children == 2 && !use.timed);
    ka_cards_leave(cards, 0);
    ka_cards_leave(cards, 0);
    ka_cards_leave(others, 0);
    let_the_pause_pass();
    assert_true(ka_cards_enter_alone(others, 0, false, &elsewhere)); /* nobody is left */
    ka_cards_free(others);
    ka_cards_free(cards);
}

static void child__whose_turn_is_over__stays_stopped_while_others_have_theirs(void **state)
{
    (void)state;
    struct ka_cards *cards = open_cards("0", 2), *others = open_cards("0", 2);
    bool elsewhere = false;
    assert_true(enters(cards, 0));
    ka_cards_turn_ask(cards, 0);
    assert_true(ka_cards_turn_begin(cards, 0, &elsewhere));
    ka_cards_turn_end(cards, 0);
    let_the_pause_pass();
    assert_true(ka_cards_enter_alone(others, 0, false, &elsewhere)); /* before it has stepped back */
    assert_false(ka_cards_step_back(cards, 0));
    ka_cards_leave_alone(others, 0, true);
    assert_true(ka_cards_step_back(cards, 0));
    ka_cards_leave(cards, 0);
    ka_cards_free(others);
    ka_cards_free(cards);
}

static void child__that_asked_and_ends__lets_the_card_go(void **state)
{
    (void)state;
    struct ka_cards *cards = open_cards("0", 1), *others = open_cards("0", 1);
    bool elsewhere = false;
    assert_true(enters(cards, 0) && enters(others, 0));
    ka_cards_turn_ask(cards, 0);
    assert_false(ka_cards_turn_begin(cards, 0, &elsewhere) || enters(cards, 0));
    ka_cards_turn_drop(cards, 0);
    assert_false(ka_cards_is_wanted(others, 0));
    assert_true(enters(cards, 0));
    ka_cards_turn_ask(cards, 0);
    ka_cards_leave(others, 0);
    assert_true(ka_cards_turn_begin(cards, 0, &elsewhere));
    ka_cards_leave_alone(cards, 0, true); /* in its turn */
    assert_true(enters(cards, 0) && enters(others, 0));
    ka_cards_free(others);
    ka_cards_free(cards);
}

static void child__that_asks__goes_before_one_of_its_process_that_wants_the_card_empty(void **state)
{
    (void)state;
    struct ka_cards *cards = open_cards("0", 4), *others = open_cards("0", 4);
    bool elsewhere = false;
    assert_true(enters(others, 0) && enters(cards, 0));
    ka_cards_turn_ask(cards, 0);
    assert_false(ka_cards_enter_alone(cards, 0, true, &elsewhere));
    assert_false(ka_cards_is_wanted(others, 0)); /* they are waited for */
    assert_false(ka_cards_turn_begin(cards, 0, &elsewhere));
    assert_true(ka_cards_is_wanted(others, 0)); /* to make way, for who asks */
    ka_cards_step_aside(others, 0);
    assert_true(ka_cards_turn_begin(cards, 0, &elsewhere));
    ka_cards_turn_end(cards, 0);
    assert_true(ka_cards_step_back(cards, 0) && ka_cards_step_back(others, 0));
    ka_cards_leave(cards, 0);
    let_the_pause_pass();
    assert_false(ka_cards_enter_alone(cards, 0, true, &elsewhere) || ka_cards_is_wanted(others, 0));
    ka_cards_leave(others, 0);
    assert_true(ka_cards_enter_alone(cards, 0, true, &elsewhere));
    ka_cards_free(others);
    ka_cards_free(cards);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(cards__names__are_told_apart),
        cmocka_unit_test(names__of_the_environment__are_what_cuda_makes_of_them),
        cmocka_unit_test(cards__runs__are_spread_evenly),
        cmocka_unit_test(cards__children__are_limited_on_each),
        cmocka_unit_test(pick__takes_a_card_that_is_free_before_one_that_is_shared_or_somebodys_alone),
        cmocka_unit_test(child__that_is_alone__begins_after_those_at_work_and_before_any_other),
        cmocka_unit_test(child__that_is_to_be_alone__waits_for_others_and_may_give_up),
        cmocka_unit_test(card__that_was_somebodys_alone__is_first_had_by_those_who_share_it),
        cmocka_unit_test(card__whose_children_stepped_aside__is_had_alone_and_theirs_again_later),
        cmocka_unit_test(card__that_is_wanted_empty__is_stepped_aside_from_by_nobody),
        cmocka_unit_test(child__that_asks__is_not_waited_for_and_keeps_its_place),
        cmocka_unit_test(child__whose_turn_is_over__stays_stopped_while_others_have_theirs),
        cmocka_unit_test(child__that_asked_and_ends__lets_the_card_go),
        cmocka_unit_test(child__that_asks__goes_before_one_of_its_process_that_wants_the_card_empty),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
