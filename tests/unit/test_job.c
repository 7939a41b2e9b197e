/* The run's state machine, by tables of events. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <cmocka.h>
#include <errno.h>
#include <math.h>

#include "agent/core/job.h"

static const struct ka_job_limits defaults = {
    .max_iters = 10,
    .patience_parity = 2,
    .patience_perf = 2,
    .candidates = 1,
    .max_bad_answers = 3,
    .min_rel_impr = 0.05,
    .use_llm = true,
    .use_differentiator = false,
    .optimise = true,
};

/* One row: the event, the state it must lead to, the command that must come out, and the snapshot it must
 * name (-1: any). */
struct row {
    struct ka_event event;
    enum ka_job_state state;
    enum ka_command_type command;
    int snapshot;
};

#define OK                                                                                                   \
    {                                                                                                        \
        .type = KA_EV_OK                                                                                     \
    }
#define CANDIDATE(id)                                                                                        \
    {                                                                                                        \
        .type = KA_EV_CANDIDATE, .snapshot = (id)                                                            \
    }
#define OF(number, id)                                                                                       \
    {                                                                                                        \
        .type = KA_EV_CANDIDATE, .slot = (number), .snapshot = (id)                                          \
    }
#define WORD(number, name)                                                                                   \
    {                                                                                                        \
        .type = (name), .slot = (number)                                                                     \
    }
#define FAILED(n)                                                                                            \
    {                                                                                                        \
        .type = KA_EV_CHECKED, .passed = (n), .total = 5, .cost = INFINITY                                   \
    }
#define VERIFIED(c)                                                                                          \
    {                                                                                                        \
        .type = KA_EV_CHECKED, .passed = 5, .total = 5, .verified = true, .cost = (c)                        \
    }
#define EVENT(name)                                                                                          \
    {                                                                                                        \
        .type = (name)                                                                                       \
    }

/* Answers carry the number of their slot. An event that changes nothing but its slot leaves the operation. */
static void play(struct ka_job *job, const struct row *rows, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        struct ka_event event = rows[i].event;
        struct ka_command command = {0};
        bool answers = event.type >= KA_EV_CANDIDATE && event.type <= KA_EV_LLM_FAILED;
        event.op = answers ? job->slots[event.slot].op : job->op;
        uint64_t before = job->op;
        int rc = ka_job_step(job, &event, &command);
        if (rc || job->state != rows[i].state || command.type != rows[i].command ||
            (rows[i].snapshot >= 0 && command.snapshot != rows[i].snapshot))
            fail_msg("row %zu: rc %d, state %s, command %d, snapshot %lld", i, rc,
                     ka_job_state_name(job->state), (int)command.type, (long long)command.snapshot);
        assert_int_equal(command.op, job->op);
        assert_true(command.type == KA_CMD_NONE ? job->op == before : job->op > before);
    }
}

#define PLAY(job, ...)                                                                                       \
    do {                                                                                                     \
        const struct row rows_[] = {__VA_ARGS__};                                                            \
        play(job, rows_, KA_COUNT(rows_));                                                                   \
    } while (0)

static const struct row to_draft[] = {
    {EVENT(KA_EV_START), KA_JOB_INSPECT, KA_CMD_INSPECT, -1},
    {OK, KA_JOB_PREFLIGHT, KA_CMD_PREFLIGHT, -1},
    {OK, KA_JOB_RETRIEVE, KA_CMD_RETRIEVE, -1},
};

static void begin(struct ka_job *job, struct ka_job_limits limits)
{
    ka_job_init(job, &limits);
    play(job, to_draft, KA_COUNT(to_draft));
}

static void job__verified_draft_that_cannot_be_improved__is_done_with_it(void **state)
{
    (void)state;
    struct ka_job job;
    begin(&job, defaults);
    PLAY(&job, {OK, KA_JOB_DRAFT, KA_CMD_ASK, 0}, {CANDIDATE(1), KA_JOB_CHECK, KA_CMD_CHECK, 1},
         {VERIFIED(100), KA_JOB_OPTIMISE, KA_CMD_TUNE, 1},
         {EVENT(KA_EV_NO_CANDIDATE), KA_JOB_OPTIMISE, KA_CMD_ASK, 1},
         {CANDIDATE(2), KA_JOB_CHECK, KA_CMD_CHECK, 2}, {VERIFIED(99), KA_JOB_OPTIMISE, KA_CMD_ASK, 1},
         {CANDIDATE(3), KA_JOB_CHECK, KA_CMD_CHECK, 3}, {FAILED(4), KA_JOB_FIX, KA_CMD_ASK, 3},
         {CANDIDATE(4), KA_JOB_CHECK, KA_CMD_CHECK, 4}, {FAILED(4), KA_JOB_DONE, KA_CMD_FINISH, 1});
    assert_int_equal(job.best, 1);
    assert_int_equal(job.rollbacks, 2);
    assert_int_equal(ka_job_exit_code(&job), 0);
}

static void to_a_move(struct ka_job *job, struct ka_job_limits limits)
{
    begin(job, limits);
    PLAY(job, {OK, KA_JOB_DRAFT, KA_CMD_ASK, 0}, {CANDIDATE(1), KA_JOB_CHECK, KA_CMD_CHECK, 1},
         {VERIFIED(100), KA_JOB_OPTIMISE, KA_CMD_TUNE, 1},
         {EVENT(KA_EV_NO_CANDIDATE), KA_JOB_OPTIMISE, KA_CMD_ASK, 1});
}

static void job__move_that_fails__has_one_turn_to_be_repaired(void **state)
{
    (void)state;
    struct ka_job job;
    to_a_move(&job, defaults);
    PLAY(&job, {CANDIDATE(2), KA_JOB_CHECK, KA_CMD_CHECK, 2}, {FAILED(4), KA_JOB_FIX, KA_CMD_ASK, 2});
    assert_true(ka_job_repairs(&job));
    assert_int_equal(job.no_gain, 0);
    PLAY(&job, {CANDIDATE(3), KA_JOB_CHECK, KA_CMD_CHECK, 3}, {VERIFIED(50), KA_JOB_OPTIMISE, KA_CMD_ASK, 3});
    assert_int_equal(job.best, 3);
    assert_int_equal(job.rollbacks, 0);
    assert_false(ka_job_repairs(&job));
    /* repaired, but no faster: dropped, and counted once */
    PLAY(&job, {CANDIDATE(4), KA_JOB_CHECK, KA_CMD_CHECK, 4}, {FAILED(1), KA_JOB_FIX, KA_CMD_ASK, 4},
         {CANDIDATE(5), KA_JOB_CHECK, KA_CMD_CHECK, 5}, {VERIFIED(50), KA_JOB_OPTIMISE, KA_CMD_ASK, 3});
    assert_int_equal(job.no_gain, 1);
    assert_int_equal(job.rollbacks, 1);
    assert_int_equal(job.best, 3);
}

static void job__variant_of_the_tuner__is_not_repaired(void **state)
{
    (void)state;
    struct ka_job job;
    begin(&job, defaults);
    PLAY(&job, {OK, KA_JOB_DRAFT, KA_CMD_ASK, 0}, {CANDIDATE(1), KA_JOB_CHECK, KA_CMD_CHECK, 1},
         {VERIFIED(100), KA_JOB_OPTIMISE, KA_CMD_TUNE, 1}, {CANDIDATE(2), KA_JOB_CHECK, KA_CMD_CHECK, 2},
         {FAILED(4), KA_JOB_OPTIMISE, KA_CMD_TUNE, 1});
    assert_int_equal(job.rollbacks, 1);
}

static void job__repair_without_questions_left__ends_with_the_best(void **state)
{
    (void)state;
    struct ka_job job;
    struct ka_job_limits limits = defaults;
    limits.max_iters = 2;
    to_a_move(&job, limits);
    PLAY(&job, {CANDIDATE(2), KA_JOB_CHECK, KA_CMD_CHECK, 2}, {FAILED(4), KA_JOB_DONE, KA_CMD_FINISH, 1});
    assert_int_equal(ka_job_exit_code(&job), 0);
}

static void job__resumed_repair__asks_the_same(void **state)
{
    (void)state;
    struct ka_job job, read;
    struct ka_command command;
    to_a_move(&job, defaults);
    PLAY(&job, {CANDIDATE(2), KA_JOB_CHECK, KA_CMD_CHECK, 2}, {FAILED(4), KA_JOB_FIX, KA_CMD_ASK, 2});
    json_t *saved = ka_job_to_json(&job);
    assert_int_equal(ka_job_from_json(saved, &read, NULL), 0);
    json_decref(saved);
    ka_job_resume(&read, &command);
    assert_int_equal(command.type, KA_CMD_ASK);
    assert_int_equal(command.snapshot, 2);
    assert_true(ka_job_repairs(&read));
}

static void job__failed_check__asks_for_a_fix_of_that_candidate(void **state)
{
    (void)state;
    struct ka_job job;
    begin(&job, defaults);
    PLAY(&job, {OK, KA_JOB_DRAFT, KA_CMD_ASK, 0}, {CANDIDATE(1), KA_JOB_CHECK, KA_CMD_CHECK, 1},
         {FAILED(3), KA_JOB_FIX, KA_CMD_ASK, 1}, {CANDIDATE(2), KA_JOB_CHECK, KA_CMD_CHECK, 2},
         {VERIFIED(9), KA_JOB_OPTIMISE, KA_CMD_TUNE, 2});
    assert_int_equal(job.attempts, 2);
    assert_int_equal(job.best, 2);
}

static void job__attempts_below_the_best__roll_back_after_patience(void **state)
{
    (void)state;
    struct ka_job job;
    begin(&job, defaults);
    PLAY(&job, {OK, KA_JOB_DRAFT, KA_CMD_ASK, 0}, {CANDIDATE(1), KA_JOB_CHECK, KA_CMD_CHECK, 1},
         {FAILED(4), KA_JOB_FIX, KA_CMD_ASK, 1}, {CANDIDATE(2), KA_JOB_CHECK, KA_CMD_CHECK, 2},
         {FAILED(2), KA_JOB_FIX, KA_CMD_ASK, 2}, {CANDIDATE(3), KA_JOB_CHECK, KA_CMD_CHECK, 3},
         {FAILED(3), KA_JOB_FIX, KA_CMD_ASK, 1});
    assert_int_equal(job.rollbacks, 1);
    assert_int_equal(job.below_best, 0);
}

static void job__gain_above_the_threshold__becomes_the_best(void **state)
{
    (void)state;
    struct ka_job job;
    begin(&job, defaults);
    PLAY(&job, {OK, KA_JOB_DRAFT, KA_CMD_ASK, 0}, {CANDIDATE(1), KA_JOB_CHECK, KA_CMD_CHECK, 1},
         {VERIFIED(100), KA_JOB_OPTIMISE, KA_CMD_TUNE, 1}, {CANDIDATE(2), KA_JOB_CHECK, KA_CMD_CHECK, 2},
         {VERIFIED(90), KA_JOB_OPTIMISE, KA_CMD_TUNE, 2},
         {EVENT(KA_EV_NO_CANDIDATE), KA_JOB_OPTIMISE, KA_CMD_ASK, 2},
         {EVENT(KA_EV_BUDGET), KA_JOB_DONE, KA_CMD_FINISH, 2});
    assert_true(job.best_cost == 90);
    assert_int_equal(job.rollbacks, 0);
}

/* Forward and backward are timed, and a tuner changes the backward alone. */
static void job__variant_of_the_tuner__has_to_gain_half_as_much_as_a_model(void **state)
{
    (void)state;
    struct ka_job job;
    begin(&job, defaults); /* min_rel_impr is 0.05 */
    PLAY(&job, {OK, KA_JOB_DRAFT, KA_CMD_ASK, 0}, {CANDIDATE(1), KA_JOB_CHECK, KA_CMD_CHECK, 1},
         {VERIFIED(100), KA_JOB_OPTIMISE, KA_CMD_TUNE, 1}, {CANDIDATE(2), KA_JOB_CHECK, KA_CMD_CHECK, 2},
         {VERIFIED(98), KA_JOB_OPTIMISE, KA_CMD_TUNE, 1}, {CANDIDATE(3), KA_JOB_CHECK, KA_CMD_CHECK, 3},
         {VERIFIED(97), KA_JOB_OPTIMISE, KA_CMD_TUNE, 3},
         {EVENT(KA_EV_NO_CANDIDATE), KA_JOB_OPTIMISE, KA_CMD_ASK, 3},
         {CANDIDATE(4), KA_JOB_CHECK, KA_CMD_CHECK, 4}, {VERIFIED(93), KA_JOB_OPTIMISE, KA_CMD_ASK, 3});
    assert_true(job.best_cost == 97);
}

static void job__model_that_sees_nothing_to_gain__ends_with_the_best(void **state)
{
    (void)state;
    struct ka_job job;
    struct ka_job_limits limits = defaults;
    begin(&job, limits);
    PLAY(&job, {OK, KA_JOB_DRAFT, KA_CMD_ASK, 0}, {CANDIDATE(1), KA_JOB_CHECK, KA_CMD_CHECK, 1},
         {VERIFIED(100), KA_JOB_OPTIMISE, KA_CMD_TUNE, 1},
         {EVENT(KA_EV_NO_CANDIDATE), KA_JOB_OPTIMISE, KA_CMD_ASK, 1},
         {EVENT(KA_EV_NO_CANDIDATE), KA_JOB_DONE, KA_CMD_FINISH, 1});
    assert_int_equal(ka_job_exit_code(&job), 0);
    limits.candidates = 2; /* what the same turn brought is judged */
    begin(&job, limits);
    PLAY(&job, {OK, KA_JOB_DRAFT, KA_CMD_ASK, 0}, {OF(0, 1), KA_JOB_CHECK, KA_CMD_CHECK, 1},
         {VERIFIED(100), KA_JOB_DRAFT, KA_CMD_AWAIT, 0},
         {WORD(1, KA_EV_BAD_ANSWER), KA_JOB_OPTIMISE, KA_CMD_TUNE, 1},
         {EVENT(KA_EV_NO_CANDIDATE), KA_JOB_OPTIMISE, KA_CMD_ASK, 1},
         {WORD(0, KA_EV_NO_CANDIDATE), KA_JOB_OPTIMISE, KA_CMD_AWAIT, 1},
         {OF(1, 3), KA_JOB_CHECK, KA_CMD_CHECK, 3}, {VERIFIED(50), KA_JOB_OPTIMISE, KA_CMD_ASK, 3},
         {WORD(1, KA_EV_BAD_ANSWER), KA_JOB_OPTIMISE, KA_CMD_AWAIT, 3},
         {WORD(0, KA_EV_NO_CANDIDATE), KA_JOB_DONE, KA_CMD_FINISH, 3});
    assert_int_equal(job.best, 3);
}

static struct ka_job_limits several(int candidates)
{
    struct ka_job_limits limits = defaults;
    limits.candidates = candidates;
    return limits;
}

static void job__several_candidates_a_turn__keep_the_best_of_them(void **state)
{
    (void)state;
    struct ka_job job;
    begin(&job, several(3));
    PLAY(&job, {OK, KA_JOB_DRAFT, KA_CMD_ASK, 0}, {OF(0, 1), KA_JOB_CHECK, KA_CMD_CHECK, 1},
         {FAILED(1), KA_JOB_DRAFT, KA_CMD_AWAIT, 0}, {OF(1, 2), KA_JOB_CHECK, KA_CMD_CHECK, 2},
         {FAILED(4), KA_JOB_DRAFT, KA_CMD_AWAIT, 0}, {OF(2, 3), KA_JOB_CHECK, KA_CMD_CHECK, 3},
         {FAILED(2), KA_JOB_FIX, KA_CMD_ASK, 2});
    assert_int_equal(job.iters, 6);
    assert_int_equal(job.best, 2);
    assert_int_equal(job.attempts, 3);
}

static void job__answers_during_a_check__wait_and_are_checked_by_slots(void **state)
{
    (void)state;
    struct ka_job job;
    begin(&job, several(4));
    PLAY(&job, {OK, KA_JOB_DRAFT, KA_CMD_ASK, 0}, {OF(2, 1), KA_JOB_CHECK, KA_CMD_CHECK, 1},
         {OF(3, 2), KA_JOB_CHECK, KA_CMD_NONE, 0}, {OF(0, 3), KA_JOB_CHECK, KA_CMD_NONE, 0},
         {WORD(1, KA_EV_BAD_ANSWER), KA_JOB_CHECK, KA_CMD_NONE, 0},
         {FAILED(1), KA_JOB_CHECK, KA_CMD_CHECK, 3}, {FAILED(1), KA_JOB_CHECK, KA_CMD_CHECK, 2},
         {FAILED(1), KA_JOB_FIX, KA_CMD_ASK, 3});
    assert_int_equal(job.best, 3); /* of equals the first slot's */
    assert_int_equal(job.bad_answers, 0);
}

/* Whatever the order in which answers come, the turn ends with the same job. */
static void job__order_of_the_answers__changes_nothing(void **state)
{
    (void)state;
    static const int orders[][3] = {{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};
    static const int passes[] = {2, 4, 4};
    for (size_t i = 0; i < KA_COUNT(orders); i++) {
        for (int busy = 0; busy < 2; busy++) { /* one after the other, or all while the first is checked */
            struct ka_job job;
            begin(&job, several(3));
            PLAY(&job, {OK, KA_JOB_DRAFT, KA_CMD_ASK, 0});
            for (int k = 0; k < 3; k++) {
                int slot = orders[i][k];
                bool last = !busy && k == 2;
                const struct row came = {OF(slot, slot + 1), KA_JOB_CHECK,
                                         busy && k ? KA_CMD_NONE : KA_CMD_CHECK, -1};
                const struct row checked = {FAILED(passes[slot]), last ? KA_JOB_FIX : KA_JOB_DRAFT,
                                            last ? KA_CMD_ASK : KA_CMD_AWAIT, -1};
                play(&job, &came, 1);
                if (!busy)
                    play(&job, &checked, 1);
            }
            for (int k = 0; busy && k < 3; k++) {
                const struct row checked = {FAILED(passes[job.checking]), k < 2 ? KA_JOB_CHECK : KA_JOB_FIX,
                                            k < 2 ? KA_CMD_CHECK : KA_CMD_ASK, -1};
                play(&job, &checked, 1);
            }
            assert_int_equal(job.current, 2);
            assert_int_equal(job.best, 2);
            assert_int_equal(job.best_passed, 4);
            assert_int_equal(job.iters, 6);
            assert_int_equal(job.slots[2].question, 6);
        }
    }
}

static void job__no_answer_is_of_use__all_are_asked_again_and_then_given_up(void **state)
{
    (void)state;
    struct ka_job job;
    struct ka_job_limits limits = several(2);
    limits.max_bad_answers = 2;
    limits.max_iters = 3;
    begin(&job, limits);
    PLAY(&job, {OK, KA_JOB_DRAFT, KA_CMD_ASK, 0}, {WORD(1, KA_EV_BAD_ANSWER), KA_JOB_DRAFT, KA_CMD_AWAIT, 0},
         {WORD(0, KA_EV_BAD_ANSWER), KA_JOB_DRAFT, KA_CMD_ASK, 0});
    assert_int_equal(job.slot_count, 1); /* one question is left */
    PLAY(&job, {WORD(0, KA_EV_BAD_ANSWER), KA_JOB_FAILED, KA_CMD_FINISH, 0});
    assert_int_equal(ka_job_exit_code(&job), 4);
}

static void job__one_endpoint_lost_of_several__goes_on_with_the_others(void **state)
{
    (void)state;
    struct ka_job job;
    begin(&job, several(3));
    PLAY(&job, {OK, KA_JOB_DRAFT, KA_CMD_ASK, 0}, {WORD(1, KA_EV_LLM_FAILED), KA_JOB_DRAFT, KA_CMD_AWAIT, 0},
         {OF(2, 1), KA_JOB_CHECK, KA_CMD_CHECK, 1}, {FAILED(1), KA_JOB_DRAFT, KA_CMD_AWAIT, 0},
         {WORD(0, KA_EV_LLM_FAILED), KA_JOB_FIX, KA_CMD_ASK, 1},
         {WORD(0, KA_EV_BAD_ANSWER), KA_JOB_FIX, KA_CMD_AWAIT, 1},
         {WORD(1, KA_EV_LLM_FAILED), KA_JOB_FIX, KA_CMD_AWAIT, 1},
         {WORD(2, KA_EV_BAD_ANSWER), KA_JOB_FAILED, KA_CMD_FINISH, 1});
    assert_int_equal(ka_job_exit_code(&job), 5);
}

static void job__fewer_questions_left_than_candidates__asks_that_many(void **state)
{
    (void)state;
    struct ka_job job;
    struct ka_job_limits limits = several(4);
    limits.max_iters = 5;
    begin(&job, limits);
    PLAY(&job, {OK, KA_JOB_DRAFT, KA_CMD_ASK, 0}, {OF(0, 1), KA_JOB_CHECK, KA_CMD_CHECK, 1},
         {FAILED(1), KA_JOB_DRAFT, KA_CMD_AWAIT, 0},
         {WORD(1, KA_EV_BAD_ANSWER), KA_JOB_DRAFT, KA_CMD_AWAIT, 0},
         {WORD(2, KA_EV_BAD_ANSWER), KA_JOB_DRAFT, KA_CMD_AWAIT, 0},
         {WORD(3, KA_EV_BAD_ANSWER), KA_JOB_FIX, KA_CMD_ASK, 1});
    assert_int_equal(job.slot_count, 1);
    assert_int_equal(job.iters, 5);
    PLAY(&job, {OF(0, 2), KA_JOB_CHECK, KA_CMD_CHECK, 2}, {FAILED(2), KA_JOB_FAILED, KA_CMD_FINISH, 2});
}

static void job__second_answer_of_a_slot__is_late(void **state)
{
    (void)state;
    struct ka_job job, before;
    struct ka_command command;
    begin(&job, several(2));
    PLAY(&job, {OK, KA_JOB_DRAFT, KA_CMD_ASK, 0}, {OF(1, 1), KA_JOB_CHECK, KA_CMD_CHECK, 1});
    before = job;
    struct ka_event again = {.type = KA_EV_CANDIDATE, .op = job.slots[1].op, .slot = 1, .snapshot = 2};
    assert_int_equal(ka_job_step(&job, &again, &command), -ESTALE);
    struct ka_event beyond = {.type = KA_EV_CANDIDATE, .op = job.slots[0].op, .slot = 2, .snapshot = 2};
    assert_int_equal(ka_job_step(&job, &beyond, &command), -ESTALE);
    assert_memory_equal(&job, &before, sizeof(job));
}

/* A budget ends the run with the next question: what the turn has is judged first. */
static void job__budget_in_the_middle_of_a_turn__judges_what_there_is(void **state)
{
    (void)state;
    struct ka_job job;
    begin(&job, several(3));
    PLAY(&job, {OK, KA_JOB_DRAFT, KA_CMD_ASK, 0}, {OF(1, 1), KA_JOB_CHECK, KA_CMD_CHECK, 1},
         {VERIFIED(9), KA_JOB_DRAFT, KA_CMD_AWAIT, 0}, {EVENT(KA_EV_BUDGET), KA_JOB_OPTIMISE, KA_CMD_TUNE, 1},
         {EVENT(KA_EV_BUDGET), KA_JOB_DONE, KA_CMD_FINISH, 1});
    begin(&job, several(3));
    PLAY(&job, {OK, KA_JOB_DRAFT, KA_CMD_ASK, 0}, {WORD(1, KA_EV_BAD_ANSWER), KA_JOB_DRAFT, KA_CMD_AWAIT, 0},
         {EVENT(KA_EV_BUDGET), KA_JOB_FAILED, KA_CMD_FINISH, 0});
    assert_int_equal(ka_job_exit_code(&job), 4);
}

static void job__questions_used_up__fail_with_the_best_kept(void **state)
{
    (void)state;
    struct ka_job job;
    struct ka_job_limits limits = defaults;
    limits.max_iters = 2;
    begin(&job, limits);
    PLAY(&job, {OK, KA_JOB_DRAFT, KA_CMD_ASK, 0}, {CANDIDATE(1), KA_JOB_CHECK, KA_CMD_CHECK, 1},
         {FAILED(3), KA_JOB_FIX, KA_CMD_ASK, 1}, {CANDIDATE(2), KA_JOB_CHECK, KA_CMD_CHECK, 2},
         {FAILED(1), KA_JOB_FAILED, KA_CMD_FINISH, 1});
    assert_int_equal(ka_job_exit_code(&job), 4);
}

static void job__unusable_answers__are_asked_again_and_then_given_up(void **state)
{
    (void)state;
    struct ka_job job;
    begin(&job, defaults);
    PLAY(&job, {OK, KA_JOB_DRAFT, KA_CMD_ASK, 0}, {EVENT(KA_EV_BAD_ANSWER), KA_JOB_DRAFT, KA_CMD_ASK, 0},
         {EVENT(KA_EV_BAD_ANSWER), KA_JOB_DRAFT, KA_CMD_ASK, 0},
         {EVENT(KA_EV_BAD_ANSWER), KA_JOB_FAILED, KA_CMD_FINISH, 0});
    assert_int_equal(ka_job_exit_code(&job), 4);
}

static void job__a_usable_answer__forgives_earlier_bad_ones(void **state)
{
    (void)state;
    struct ka_job job;
    begin(&job, defaults);
    PLAY(&job, {OK, KA_JOB_DRAFT, KA_CMD_ASK, 0}, {EVENT(KA_EV_BAD_ANSWER), KA_JOB_DRAFT, KA_CMD_ASK, 0},
         {EVENT(KA_EV_BAD_ANSWER), KA_JOB_DRAFT, KA_CMD_ASK, 0},
         {CANDIDATE(1), KA_JOB_CHECK, KA_CMD_CHECK, 1}, {FAILED(1), KA_JOB_FIX, KA_CMD_ASK, 1},
         {EVENT(KA_EV_BAD_ANSWER), KA_JOB_FIX, KA_CMD_ASK, 1});
}

static void job__without_a_model__the_differentiator_alone_decides(void **state)
{
    (void)state;
    struct ka_job job;
    struct ka_job_limits limits = defaults;
    limits.use_llm = false;
    limits.use_differentiator = true;
    begin(&job, limits);
    PLAY(&job, {OK, KA_JOB_DRAFT, KA_CMD_DIFFERENTIATE, 0},
         {EVENT(KA_EV_NO_CANDIDATE), KA_JOB_FAILED, KA_CMD_FINISH, 0});
    assert_int_equal(job.reason, KA_REASON_REFUSED_DRAFT);
    assert_int_equal(ka_job_exit_code(&job), 4);
    begin(&job, limits);
    PLAY(&job, {OK, KA_JOB_DRAFT, KA_CMD_DIFFERENTIATE, 0}, {CANDIDATE(1), KA_JOB_CHECK, KA_CMD_CHECK, 1},
         {VERIFIED(5), KA_JOB_OPTIMISE, KA_CMD_TUNE, 1}, {CANDIDATE(2), KA_JOB_CHECK, KA_CMD_CHECK, 2},
         {VERIFIED(7), KA_JOB_OPTIMISE, KA_CMD_TUNE, 1},
         {EVENT(KA_EV_NO_CANDIDATE), KA_JOB_DONE, KA_CMD_FINISH, 1});
}

static void job__refused_ahead__ends_preflight_without_a_model_alone(void **state)
{
    (void)state;
    struct ka_command command;
    for (int model = 0; model < 2; model++) {
        for (int drafts = 0; drafts < 2; drafts++) {
            struct ka_job job;
            struct ka_job_limits limits = defaults;
            limits.use_llm = model;
            limits.use_differentiator = drafts;
            ka_job_init(&job, &limits);
            const struct ka_event start = {.type = KA_EV_START};
            assert_int_equal(ka_job_step(&job, &start, &command), 0);
            struct ka_event refused = {.type = KA_EV_NO_CANDIDATE, .op = job.op};
            assert_int_equal(ka_job_step(&job, &refused, &command), -EINVAL); /* inspect drafts nothing */
            const struct ka_event looked = {.type = KA_EV_OK, .op = job.op};
            assert_int_equal(ka_job_step(&job, &looked, &command), 0);
            assert_int_equal(job.state, KA_JOB_PREFLIGHT);
            assert_int_equal(ka_job_step(&job, &refused, &command), -ESTALE);
            refused.op = job.op;
            bool ends = !model && drafts;
            assert_int_equal(ka_job_step(&job, &refused, &command), ends ? 0 : -EINVAL);
            assert_int_equal(job.state, ends ? KA_JOB_FAILED : KA_JOB_PREFLIGHT);
            assert_int_equal(job.reason, ends ? KA_REASON_REFUSED_DRAFT : KA_REASON_NONE);
        }
    }
}

static void job__refused_draft_with_a_model__asks_the_model(void **state)
{
    (void)state;
    struct ka_job job;
    struct ka_job_limits limits = defaults;
    limits.use_differentiator = true;
    begin(&job, limits);
    PLAY(&job, {OK, KA_JOB_DRAFT, KA_CMD_DIFFERENTIATE, 0},
         {EVENT(KA_EV_NO_CANDIDATE), KA_JOB_DRAFT, KA_CMD_ASK, 0});
    assert_int_equal(job.iters, 1);
}

static void job__draft_that_fails_where_there_is_another__takes_the_other(void **state)
{
    (void)state;
    struct ka_job job;
    struct ka_job_limits limits = defaults;
    limits.use_llm = false;
    limits.use_differentiator = true;
    const struct ka_event first = {.type = KA_EV_CANDIDATE, .snapshot = 1, .another = true};
    begin(&job, limits);
    PLAY(&job, {OK, KA_JOB_DRAFT, KA_CMD_DIFFERENTIATE, 0}, {first, KA_JOB_CHECK, KA_CMD_CHECK, 1},
         {VERIFIED(5), KA_JOB_OPTIMISE, KA_CMD_TUNE, 1});
    begin(&job, limits);
    PLAY(&job, {OK, KA_JOB_DRAFT, KA_CMD_DIFFERENTIATE, 0}, {first, KA_JOB_CHECK, KA_CMD_CHECK, 1},
         {FAILED(2), KA_JOB_DRAFT, KA_CMD_DIFFERENTIATE, 1}, {CANDIDATE(2), KA_JOB_CHECK, KA_CMD_CHECK, 2},
         {VERIFIED(5), KA_JOB_OPTIMISE, KA_CMD_TUNE, 2});
    begin(&job, limits);
    PLAY(&job, {OK, KA_JOB_DRAFT, KA_CMD_DIFFERENTIATE, 0}, {first, KA_JOB_CHECK, KA_CMD_CHECK, 1},
         {FAILED(2), KA_JOB_DRAFT, KA_CMD_DIFFERENTIATE, 1}, {CANDIDATE(2), KA_JOB_CHECK, KA_CMD_CHECK, 2},
         {FAILED(1), KA_JOB_FAILED, KA_CMD_FINISH, -1});
    assert_int_equal(job.reason, KA_REASON_NOT_VERIFIED);
    assert_int_equal(job.best, 1);
    begin(&job, limits);
    PLAY(&job, {OK, KA_JOB_DRAFT, KA_CMD_DIFFERENTIATE, 0}, {first, KA_JOB_CHECK, KA_CMD_CHECK, 1},
         {FAILED(2), KA_JOB_DRAFT, KA_CMD_DIFFERENTIATE, 1},
         {EVENT(KA_EV_NO_CANDIDATE), KA_JOB_FAILED, KA_CMD_FINISH, -1});
    assert_int_equal(job.reason, KA_REASON_NOT_VERIFIED);
}

/* The model repairs the better of both, and once that is verified the tuner has its turn all the same. */
static void job__two_drafts_that_fail__are_repaired_by_the_model(void **state)
{
    (void)state;
    struct ka_job job;
    struct ka_job_limits limits = defaults;
    limits.use_differentiator = true;
    const struct ka_event first = {.type = KA_EV_CANDIDATE, .snapshot = 1, .another = true};
    begin(&job, limits);
    PLAY(&job, {OK, KA_JOB_DRAFT, KA_CMD_DIFFERENTIATE, 0}, {first, KA_JOB_CHECK, KA_CMD_CHECK, 1},
         {FAILED(2), KA_JOB_DRAFT, KA_CMD_DIFFERENTIATE, 1}, {CANDIDATE(2), KA_JOB_CHECK, KA_CMD_CHECK, 2},
         {FAILED(1), KA_JOB_FIX, KA_CMD_ASK, 1});
    begin(&job, limits);
    PLAY(&job, {OK, KA_JOB_DRAFT, KA_CMD_DIFFERENTIATE, 0}, {first, KA_JOB_CHECK, KA_CMD_CHECK, 1},
         {FAILED(2), KA_JOB_DRAFT, KA_CMD_DIFFERENTIATE, 1},
         {EVENT(KA_EV_NO_CANDIDATE), KA_JOB_FIX, KA_CMD_ASK, 1},
         {CANDIDATE(2), KA_JOB_CHECK, KA_CMD_CHECK, 2}, {VERIFIED(5), KA_JOB_OPTIMISE, KA_CMD_TUNE, 2});
}

static void job__no_optimise__is_done_at_the_first_verified_candidate(void **state)
{
    (void)state;
    struct ka_job job;
    struct ka_job_limits limits = defaults;
    limits.optimise = false;
    begin(&job, limits);
    PLAY(&job, {OK, KA_JOB_DRAFT, KA_CMD_ASK, 0}, {CANDIDATE(1), KA_JOB_CHECK, KA_CMD_CHECK, 1},
         {VERIFIED(5), KA_JOB_DONE, KA_CMD_FINISH, 1});
}

static void job__endpoint_lost__ends_with_code_5_unless_something_is_verified(void **state)
{
    (void)state;
    struct ka_job job;
    begin(&job, defaults);
    PLAY(&job, {OK, KA_JOB_DRAFT, KA_CMD_ASK, 0}, {EVENT(KA_EV_LLM_FAILED), KA_JOB_FAILED, KA_CMD_FINISH, 0});
    assert_int_equal(ka_job_exit_code(&job), 5);
    begin(&job, defaults);
    PLAY(&job, {OK, KA_JOB_DRAFT, KA_CMD_ASK, 0}, {CANDIDATE(1), KA_JOB_CHECK, KA_CMD_CHECK, 1},
         {VERIFIED(5), KA_JOB_OPTIMISE, KA_CMD_TUNE, 1},
         {EVENT(KA_EV_NO_CANDIDATE), KA_JOB_OPTIMISE, KA_CMD_ASK, 1},
         {EVENT(KA_EV_LLM_FAILED), KA_JOB_DONE, KA_CMD_FINISH, 1});
    assert_int_equal(ka_job_exit_code(&job), 0);
}

static void job__unusable_file_and_missing_layer__have_their_exit_codes(void **state)
{
    (void)state;
    struct ka_job job;
    struct ka_job_limits limits = defaults;
    ka_job_init(&job, &limits);
    PLAY(&job, to_draft[0], {EVENT(KA_EV_UNUSABLE), KA_JOB_FAILED, KA_CMD_FINISH, 0});
    assert_int_equal(ka_job_exit_code(&job), 3);
    ka_job_init(&job, &limits);
    PLAY(&job, to_draft[0], {EVENT(KA_EV_SANDBOX), KA_JOB_FAILED, KA_CMD_FINISH, 0});
    assert_int_equal(ka_job_exit_code(&job), 6);
}

static void job__late_or_foreign_events__change_nothing(void **state)
{
    (void)state;
    struct ka_job job, before;
    struct ka_command command;
    begin(&job, defaults);
    before = job;
    struct ka_event late = {.type = KA_EV_OK, .op = job.op - 1};
    assert_int_equal(ka_job_step(&job, &late, &command), -ESTALE);
    struct ka_event foreign = {.type = KA_EV_CHECKED, .op = job.op};
    assert_int_equal(ka_job_step(&job, &foreign, &command), -EINVAL);
    assert_memory_equal(&job, &before, sizeof(job));
    struct ka_event cancel = {.type = KA_EV_CANCEL};
    assert_int_equal(ka_job_step(&job, &cancel, &command), 0);
    assert_int_equal(ka_job_exit_code(&job), 130);
    assert_int_equal(ka_job_step(&job, &cancel, &command), -ESTALE);
}

/* A kill in any state: the saved job gives the command of that state again, and the run ends the same way. */
static void job__saved_and_resumed_in_every_state__goes_on_with_its_command(void **state)
{
    (void)state;
    static const struct row script[] = {
        {EVENT(KA_EV_START), KA_JOB_INSPECT, KA_CMD_INSPECT, -1},
        {OK, KA_JOB_PREFLIGHT, KA_CMD_PREFLIGHT, -1},
        {OK, KA_JOB_RETRIEVE, KA_CMD_RETRIEVE, -1},
        {OK, KA_JOB_DRAFT, KA_CMD_DIFFERENTIATE, 0},
        {CANDIDATE(1), KA_JOB_CHECK, KA_CMD_CHECK, 1},
        {FAILED(2), KA_JOB_FIX, KA_CMD_ASK, 1},
        {CANDIDATE(2), KA_JOB_CHECK, KA_CMD_CHECK, 2},
        {VERIFIED(50), KA_JOB_OPTIMISE, KA_CMD_TUNE, 2},
        {EVENT(KA_EV_NO_CANDIDATE), KA_JOB_OPTIMISE, KA_CMD_ASK, 2},
        {CANDIDATE(3), KA_JOB_CHECK, KA_CMD_CHECK, 3},
        {VERIFIED(40), KA_JOB_OPTIMISE, KA_CMD_ASK, 3},
        {EVENT(KA_EV_BUDGET), KA_JOB_DONE, KA_CMD_FINISH, 3},
    };
    struct ka_job job;
    struct ka_job_limits limits = defaults;
    limits.use_differentiator = true;
    ka_job_init(&job, &limits);
    for (size_t i = 0; i < KA_COUNT(script); i++) {
        play(&job, &script[i], 1);
        json_t *doc = ka_job_to_json(&job);
        struct ka_job again;
        struct ka_err err;
        struct ka_command command;
        assert_int_equal(ka_job_from_json(doc, &again, &err), 0);
        json_decref(doc);
        ka_job_resume(&again, &command);
        assert_int_equal(again.state, script[i].state);
        assert_int_equal(command.type, script[i].command);
        assert_int_equal(command.op, job.op + 1);
        job = again;
    }
    assert_int_equal(job.best, 3);
    assert_int_equal(job.attempts, 3);
}

/* The same in the middle of a turn of several: what was answered is kept, what is open is asked again. */
static void job__killed_among_several_answers__goes_on_with_those_that_are_open(void **state)
{
    (void)state;
    static const struct row script[] = {
        {OK, KA_JOB_DRAFT, KA_CMD_ASK, 0},
        {OF(2, 1), KA_JOB_CHECK, KA_CMD_CHECK, 1},
        {WORD(0, KA_EV_LLM_FAILED), KA_JOB_CHECK, KA_CMD_NONE, 0},
        {OF(3, 2), KA_JOB_CHECK, KA_CMD_NONE, 0},
        {FAILED(2), KA_JOB_CHECK, KA_CMD_CHECK, 2},
        {FAILED(3), KA_JOB_DRAFT, KA_CMD_AWAIT, 0},
        {WORD(1, KA_EV_BAD_ANSWER), KA_JOB_FIX, KA_CMD_ASK, 2},
    };
    static const enum ka_command_type resumed[] = {KA_CMD_ASK,   KA_CMD_CHECK, KA_CMD_CHECK, KA_CMD_CHECK,
                                                   KA_CMD_CHECK, KA_CMD_ASK,   KA_CMD_ASK};
    static const int open[] = {4, 3, 2, 1, 1, 1, 4};
    struct ka_job job;
    begin(&job, several(4));
    for (size_t i = 0; i < KA_COUNT(script); i++) {
        play(&job, &script[i], 1);
        json_t *doc = ka_job_to_json(&job);
        struct ka_job again;
        struct ka_err err;
        struct ka_command command;
        assert_int_equal(ka_job_from_json(doc, &again, &err), 0);
        json_decref(doc);
        uint64_t before = job.slots[1].op;
        ka_job_resume(&again, &command);
        assert_int_equal(again.state, script[i].state);
        assert_int_equal(command.type, resumed[i]);
        int count = 0;
        for (int slot = 0; slot < KA_JOB_SLOTS; slot++)
            count += ka_job_is_open(&again, slot);
        assert_int_equal(count, open[i]);
        struct ka_event late = {.type = KA_EV_CANDIDATE, .op = before, .slot = 1, .snapshot = 9};
        assert_int_equal(ka_job_step(&again, &late, &command), -ESTALE);
        job = again;
    }
    assert_int_equal(job.best, 2);
    assert_int_equal(job.iters, 8);
}

static void job__broken_document__is_refused_and_leaves_the_job_alone(void **state)
{
    (void)state;
    struct ka_job job;
    struct ka_job_limits limits = defaults;
    ka_job_init(&job, &limits);
    json_t *doc = ka_job_to_json(&job);
    struct ka_job again = {.best = 77};
    struct ka_err err;
    json_object_set_new(doc, "state", json_string("dancing"));
    assert_int_equal(ka_job_from_json(doc, &again, &err), -EINVAL);
    json_object_set_new(doc, "state", json_string("draft"));
    json_object_del(doc, "iters");
    assert_int_equal(ka_job_from_json(doc, &again, &err), -EINVAL);
    assert_non_null(strstr(err.msg, "iters"));
    json_object_set_new(doc, "iters", json_integer(1));
    json_object_set_new(doc, "checking", json_integer(3)); /* of no slots */
    assert_int_equal(ka_job_from_json(doc, &again, &err), -EINVAL);
    assert_non_null(strstr(err.msg, "slot 3"));
    assert_int_equal(again.best, 77);
    json_decref(doc);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(job__verified_draft_that_cannot_be_improved__is_done_with_it),
        cmocka_unit_test(job__failed_check__asks_for_a_fix_of_that_candidate),
        cmocka_unit_test(job__move_that_fails__has_one_turn_to_be_repaired),
        cmocka_unit_test(job__variant_of_the_tuner__is_not_repaired),
        cmocka_unit_test(job__variant_of_the_tuner__has_to_gain_half_as_much_as_a_model),
        cmocka_unit_test(job__repair_without_questions_left__ends_with_the_best),
        cmocka_unit_test(job__resumed_repair__asks_the_same),
        cmocka_unit_test(job__attempts_below_the_best__roll_back_after_patience),
        cmocka_unit_test(job__gain_above_the_threshold__becomes_the_best),
        cmocka_unit_test(job__model_that_sees_nothing_to_gain__ends_with_the_best),
        cmocka_unit_test(job__several_candidates_a_turn__keep_the_best_of_them),
        cmocka_unit_test(job__answers_during_a_check__wait_and_are_checked_by_slots),
        cmocka_unit_test(job__order_of_the_answers__changes_nothing),
        cmocka_unit_test(job__no_answer_is_of_use__all_are_asked_again_and_then_given_up),
        cmocka_unit_test(job__one_endpoint_lost_of_several__goes_on_with_the_others),
        cmocka_unit_test(job__fewer_questions_left_than_candidates__asks_that_many),
        cmocka_unit_test(job__second_answer_of_a_slot__is_late),
        cmocka_unit_test(job__budget_in_the_middle_of_a_turn__judges_what_there_is),
        cmocka_unit_test(job__killed_among_several_answers__goes_on_with_those_that_are_open),
        cmocka_unit_test(job__questions_used_up__fail_with_the_best_kept),
        cmocka_unit_test(job__unusable_answers__are_asked_again_and_then_given_up),
        cmocka_unit_test(job__a_usable_answer__forgives_earlier_bad_ones),
        cmocka_unit_test(job__without_a_model__the_differentiator_alone_decides),
        cmocka_unit_test(job__refused_ahead__ends_preflight_without_a_model_alone),
        cmocka_unit_test(job__refused_draft_with_a_model__asks_the_model),
        cmocka_unit_test(job__draft_that_fails_where_there_is_another__takes_the_other),
        cmocka_unit_test(job__two_drafts_that_fail__are_repaired_by_the_model),
        cmocka_unit_test(job__no_optimise__is_done_at_the_first_verified_candidate),
        cmocka_unit_test(job__endpoint_lost__ends_with_code_5_unless_something_is_verified),
        cmocka_unit_test(job__unusable_file_and_missing_layer__have_their_exit_codes),
        cmocka_unit_test(job__late_or_foreign_events__change_nothing),
        cmocka_unit_test(job__saved_and_resumed_in_every_state__goes_on_with_its_command),
        cmocka_unit_test(job__broken_document__is_refused_and_leaves_the_job_alone),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
