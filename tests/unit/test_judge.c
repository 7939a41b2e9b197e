/* One case judged, from files as children leave them, on a thread that is not the loop's. */
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>

#include "agent/core/kinds.h"
#include "agent/run/judge.h"
#include "base/files.h"

#define COUNT 300000 /* a file of more than a megabyte */

struct side {
    char path[32];
    struct ka_child_result result;
};

/* Tensors for the file of one case: float64 or float32, of values that depend on the index alone, times
 * `factor`. */
struct part {
    const char *name, *dtype;
    double factor;
    size_t count;
};

static size_t noop_zeros; /* at the beginning of `noop` */
static size_t grad_zeros; /* and of `grad`, expected and found */
static size_t unpassed;   /* elements at the beginning of `passed` that are no upstream's */

static bool doubted; /* the last case, so that the oracle has to look closer */

static const char *report_changes = "{}", *oracle_changes = "{}"; /* what they say beside the usual */

static void write_side(struct side *side, const struct part *parts, size_t count)
{
    struct ka_buf header = {0}, data = {0}, file = {0};
    for (size_t i = 0; i < count; i++) {
        bool wide = strcmp(parts[i].dtype, "F64") == 0, half = strcmp(parts[i].dtype, "BF16") == 0;
        size_t begin = data.len, zeros = strcmp(parts[i].name, "noop/x") == 0 ? noop_zeros : 0;
        for (size_t k = 0; k < parts[i].count; k++) {
            double value = k < zeros ? 0 : parts[i].factor * ((double)(k % 97) - 48.5);
            if (k < grad_zeros && strcmp(parts[i].name, "grad/x") == 0)
                value = 0;
            if (k < unpassed && strcmp(parts[i].name, "passed/x") == 0)
                value = NAN;
            float narrow = (float)value;
            uint16_t bits[2]; /* little-endian: the second is bfloat16 */
            memcpy(bits, &narrow, sizeof(bits));
            ka_buf_add(&data,
                       wide   ? (const void *)&value
                       : half ? &bits[1]
                              : (const void *)&narrow,
                       wide   ? 8
                       : half ? 2
                              : 4);
        }
        ka_buf_printf(&header, "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[%zu],\"data_offsets\":[%zu,%zu]}",
                      i ? "," : "{", parts[i].name, parts[i].dtype, parts[i].count, begin, data.len);
    }
    ka_buf_puts(&header, "}");
    uint64_t n = header.len;
    ka_buf_add(&file, &n, 8);
    ka_buf_add(&file, header.data, header.len);
    ka_buf_add(&file, data.data, data.len);
    strcpy(side->path, "/tmp/ka-judge-XXXXXX");
    assert_non_null(mkdtemp(side->path));
    char *name = ka_path_join(side->path, "case-0.safetensors");
    assert_int_equal(ka_file_put(name, file.data, file.len, NULL), 0);
    free(name);
    side->result = (struct ka_child_result){.scratch_fd = open(side->path, O_RDONLY | O_DIRECTORY)};
    ka_buf_free(&header);
    ka_buf_free(&data);
    ka_buf_free(&file);
}

static void remove_side(struct side *side)
{
    close(side->result.scratch_fd);
    ka_rmtree(side->path, NULL);
}

struct call {
    struct ka_judged_case one;
    struct ka_err why;
    int rc;
};

static void *judge(void *arg)
{
    struct call *call = arg;
    call->rc = ka_judge_case(&call->one, 0, &call->why);
    return NULL;
}

static const char PLAN[] = "{\"upstream\": {\"kind\": \"normal\"}, \"twice\": true, \"linear\": [2, 3], "
                           "\"repeats\": 1, \"noop\": true}";
static const char ORACLE[] = "{\"ok\": true, \"grads\": [\"x\"], \"outputs\": [{\"kind\": \"tensor\", "
                             "\"differentiable\": true}]}";
static const char CANDIDATE[] =
    "{\"ok\": true, \"modified\": [], \"aliases\": [], \"kernels\": [], \"races\": [], "
    "\"untraced\": [], "
    "\"launches_backward\": 1, \"torch_ops_forward\": {}, "
    "\"torch_ops_backward\": {}}";

/* What the verdict says of a candidate that left these tensors; free() it. */
static char *facts_of(const struct part *found, size_t count)
{
    const struct part expected[] = {{"out/0", "F64", 1, COUNT},      {"fwd/0", "F32", 1, COUNT},
                                    {"base_out/0", "F32", 1, COUNT}, {"grad/x", "F64", 2, COUNT},
                                    {"base/x", "F32", 2, COUNT},     {"jitter/x", "F64", 2.0000001, COUNT},
                                    {"passed/x", "F32", 2, COUNT}};
    struct side oracle, candidate;
    write_side(&oracle, expected, KA_COUNT(expected) - (unpassed == 0));
    write_side(&candidate, found, count);
    const char *const grads[] = {"x"};
    json_t *plan = json_loads(PLAN, 0, NULL), *said = json_loads(ORACLE, 0, NULL),
           *report = json_loads(CANDIDATE, 0, NULL), *dims = json_pack("{s:i}", "N", COUNT);
    json_auto_t *more = json_loads(report_changes, 0, NULL), *says = json_loads(oracle_changes, 0, NULL);
    assert_int_equal(json_object_update(report, more) + json_object_update(said, says), 0);
    struct ka_verdict *verdict = ka_verdict_new(grads, 1);
    size_t shape = ka_verdict_shape(verdict, KA_SHAPE_REQUIRED, dims, NULL);
    struct call call = {.one = {.verdict = verdict,
                                .shape = shape,
                                .at = ka_verdict_case(verdict, shape, "normal upstream"),
                                .plan = plan,
                                .oracle = said,
                                .candidate = report,
                                .oracle_files = &oracle.result,
                                .candidate_files = &candidate.result}};
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, judge, &call), 0);
    pthread_join(thread, NULL);
    assert_int_equal(call.rc, 0);
    struct ka_buf facts = {0};
    assert_int_equal(ka_verdict_facts(verdict, 3, &facts), 0);
    assert_int_equal(ka_verdict_verified(verdict), facts.len == 0);
    ka_verdict_free(verdict);
    json_decref(plan);
    json_decref(said);
    json_decref(report);
    json_decref(dims);
    remove_side(&oracle);
    remove_side(&candidate);
    return ka_buf_steal(&facts);
}

enum { OUT, GRAD, AGAIN, OTHER, SUM, REPEAT, NOOP, PARTS };

/* A right candidate; `sum`: the factor of the combined upstream. */
static void right(struct part parts[PARTS], double sum)
{
    const struct part all[PARTS] = {
        [OUT] = {"out/0", "F32", 1, COUNT},     [GRAD] = {"grad/x", "F32", 2, COUNT},
        [AGAIN] = {"again/x", "F32", 2, COUNT}, [OTHER] = {"other/x", "F32", 5, COUNT},
        [SUM] = {"sum/x", "F32", sum, COUNT},   [REPEAT] = {"repeat0/x", "F32", 2, COUNT},
        [NOOP] = {"noop/x", "F32", 0, COUNT},
    };
    memcpy(parts, all, sizeof(all));
}

#define LINEAR_SUM (KA_KIND_LINEAR_U * 2 + KA_KIND_LINEAR_W * 5)

static void assert_facts(const struct part *parts, const char *words)
{
    char *facts = facts_of(parts, PARTS);
    if (*words ? !strstr(facts, words) : *facts)
        fail_msg("'%s', expected '%s'", facts, words);
    free(facts);
}

static void judge__right_candidate__has_nothing_against_it(void **state)
{
    (void)state;
    struct part parts[PARTS];
    right(parts, LINEAR_SUM);
    assert_facts(parts, "");
}

static void judge__each_thing_that_is_asked__can_fail(void **state)
{
    (void)state;
    static const struct {
        int part;
        double factor;
        const char *words;
    } rows[] = {{OUT, 1.5, "output 0 of the forward is wrong"},
                {GRAD, 2.5, "the gradient of x is wrong"},
                {AGAIN, 4, "second backward over the same graph) the gradient of x is wrong"},
                {SUM, 1, "not_linear"},
                {NOOP, 2, "decoy_kernel"}};
    for (size_t i = 0; i < KA_COUNT(rows); i++) {
        struct part parts[PARTS];
        right(parts, LINEAR_SUM);
        parts[rows[i].part].factor = rows[i].factor;
        assert_facts(parts, rows[i].words);
    }
}

static void judge__part_that_is_there_without_kernels__is_told_from_chance(void **state)
{
    (void)state;
    struct part parts[PARTS];
    right(parts, LINEAR_SUM);
    parts[NOOP].factor = parts[GRAD].factor;
    noop_zeros = COUNT / 4;
    assert_facts(parts, "decoy_kernel: 75% of the gradient of x is the same");
    noop_zeros = COUNT - COUNT / 20;
    assert_facts(parts, "");
    noop_zeros = 0;
}

/* Three quarters of the gradient are there without kernels. */
static void judge__part_that_is_the_upstream__may_be_there_without_kernels(void **state)
{
    (void)state;
    struct part parts[PARTS];
    right(parts, LINEAR_SUM);
    parts[NOOP].factor = parts[GRAD].factor;
    noop_zeros = unpassed = COUNT / 4;
    assert_facts(parts, "");
    noop_zeros = COUNT / 8;
    assert_facts(parts, "decoy_kernel: 12.5% of the gradient of x is the same");
    noop_zeros = unpassed = 0;
}

/* Elements that are zero in the gradient, as no other of these tests has them. */
static void judge__zeros_that_the_host_puts_beside_the_upstream__are_a_choice(void **state)
{
    (void)state;
    struct part parts[PARTS];
    right(parts, LINEAR_SUM);
    parts[NOOP].factor = parts[GRAD].factor;
    noop_zeros = grad_zeros = unpassed = COUNT / 4;
    char *facts = facts_of(parts, PARTS);
    assert_non_null(strstr(facts, "decoy_kernel: the gradient of x is the same"));
    free(facts);
    noop_zeros = grad_zeros = unpassed = 0;
}

static void judge__gradient_that_is_free__comes_from_nowhere_if_it_is_right(void **state)
{
    (void)state;
    static const char *const told[] = {"decoy_kernel", "alias: ", "no_launch"};
    for (int is_free = 0; is_free < 2; is_free++) {
        for (int is_right = 0; is_right < 2; is_right++) {
            struct part parts[PARTS];
            right(parts, LINEAR_SUM);
            parts[GRAD].factor = is_right ? 2 : 3;
            parts[NOOP].factor = parts[GRAD].factor;
            report_changes = "{\"untraced\": [\"x\"], \"aliases\": [\"grad/x=upstream/0\"], "
                             "\"launches_backward\": 0}";
            oracle_changes = is_free ? "{\"free\": [\"x\"]}" : "{}";
            char *facts = facts_of(parts, PARTS);
            for (size_t i = 0; i < KA_COUNT(told); i++)
                assert_int_equal(strstr(facts, told[i]) == NULL, is_free && is_right);
            free(facts);
            report_changes = oracle_changes = "{}";
        }
    }
}

/* Nothing is done for sizes that the oracle's tensors do not have: two such tensors are never compared with
 * each other. */
/* The verdict on one case of a hidden shape, judged in a part of its own. Takes plan, oracle's entry and
 * candidate's; frees nothing else. */
static struct ka_verdict *verdict_of(json_t *plan, json_t *said, json_t *report, struct side *oracle,
                                     struct side *candidate)
{
    const char *const grads[] = {"x"};
    json_t *dims = json_pack("{s:i}", "N", COUNT);
    struct ka_verdict *verdict = ka_verdict_new(grads, 1);
    size_t shape = ka_verdict_shape(verdict, KA_SHAPE_HIDDEN, dims, "one");
    struct ka_verdict *part = ka_verdict_part(verdict);
    struct ka_judged_case one = {.verdict = part,
                                 .shape = shape,
                                 .at = ka_verdict_case(part, shape, "normal upstream"),
                                 .plan = plan,
                                 .oracle = said,
                                 .candidate = report,
                                 .place = &(struct ka_place){.pair = ""},
                                 .oracle_files = &oracle->result,
                                 .candidate_files = candidate ? &candidate->result : NULL};
    struct ka_err why;
    assert_int_equal(ka_judge_case(&one, 0, &why), 0);
    doubted = one.doubted;
    ka_verdict_join(verdict, part);
    json_decref(plan);
    json_decref(said);
    json_decref(report);
    json_decref(dims);
    remove_side(oracle);
    if (candidate)
        remove_side(candidate);
    return verdict;
}

/* A gradient of next to nothing where scores are saturated, found as `share` of the upstream. */
static bool passes_where_nothing_is_left(const char *made_in, const char *dtype, double share)
{
    const struct part expected[] = {{"out/0", "F64", 1, COUNT},
                                    {"fwd/0", dtype, 1, COUNT},
                                    {"base_out/0", dtype, 1, COUNT},
                                    {"grad/x", "F64", 1e-9, COUNT},
                                    {"base/x", dtype, 1e-9, COUNT}},
                      found[] = {{"out/0", dtype, 1, COUNT}, {"grad/x", dtype, share / 28, COUNT}};
    struct side oracle, candidate;
    write_side(&oracle, expected, KA_COUNT(expected));
    write_side(&candidate, found, KA_COUNT(found));
    json_t *said = json_loads(ORACLE, 0, NULL);
    json_object_set_new(said, made_in, json_pack("[s]", "grad/x"));
    json_t *plan = json_pack("{s:{s:s}, s:{s:s}}", "upstream", "kind", "normal", "values", "q", "mixed");
    struct ka_verdict *verdict = verdict_of(plan, said, json_loads(CANDIDATE, 0, NULL), &oracle, &candidate);
    bool passed = ka_verdict_count(verdict).cases_failed == 0;
    ka_verdict_free(verdict);
    return passed;
}

static void judge__rounding_where_nothing_is_left__is_tf32s_where_that_was_used(void **state)
{
    (void)state;
    assert_true(passes_where_nothing_is_left("tf32", "F32", 0.01));
    assert_false(passes_where_nothing_is_left("float32", "F32", 0.01));
}

static void judge__rounding_where_nothing_is_left__in_half_precision__is_a_few_percent(void **state)
{
    (void)state;
    assert_true(passes_where_nothing_is_left("bfloat16", "BF16", 0.04));
    assert_false(passes_where_nothing_is_left("bfloat16", "BF16", 0.06));
}

static void judge__gradient_that_is_off_by_little__is_doubted(void **state)
{
    (void)state;
    /* The gradient, what was found, and which of right, doubted and wrong that is; of zero the norm counts,
     * per unit of upstream: 28 is the rms of a part's values. */
    static const struct {
        double want, found;
        bool right, doubted;
    } rows[] = {{2, 2 * (1 + 5e-6), true, false},  {2, 2 * (1 + 1e-4), false, true},
                {2, 2 * (1 + 1e-3), false, false}, {0, 5e-4 / 28, true, false},
                {0, 1e-2 / 28, false, true},       {0, 1e-1 / 28, false, false}};
    for (size_t i = 0; i < KA_COUNT(rows); i++) {
        const struct part expected[] = {{"out/0", "F64", 1, COUNT},
                                        {"fwd/0", "F32", 1, COUNT},
                                        {"base_out/0", "F32", 1, COUNT},
                                        {"grad/x", "F64", rows[i].want, COUNT},
                                        {"base/x", "F32", rows[i].want, COUNT}},
                          found[] = {{"out/0", "F32", 1, COUNT}, {"grad/x", "F32", rows[i].found, COUNT}};
        struct side oracle, candidate;
        write_side(&oracle, expected, KA_COUNT(expected));
        write_side(&candidate, found, KA_COUNT(found));
        json_t *plan = json_pack("{s:{s:s}}", "upstream", "kind", "normal");
        struct ka_verdict *verdict = verdict_of(plan, json_loads(ORACLE, 0, NULL),
                                                json_loads(CANDIDATE, 0, NULL), &oracle, &candidate);
        assert_int_equal(ka_verdict_count(verdict).cases_failed == 0, rows[i].right);
        assert_int_equal(doubted, rows[i].doubted);
        ka_verdict_free(verdict);
    }
}

#define TOO_LARGE "{\"message\": \"shared memory\", \"out_of_resources\": true}"

static void assert_raised(const char *kind, const char *error, const char *skipped)
{
    struct side oracle;
    write_side(&oracle, &(struct part){"grad/x", "F64", 2, COUNT}, 1);
    json_t *plan = json_pack("{s:{s:s}, s:s}", "upstream", "kind", "normal", "kind", kind),
           *report = json_pack("{s:b, s:o}", "ok", 0, "error", json_loads(error, 0, NULL));
    struct ka_verdict *verdict = verdict_of(plan, json_loads(ORACLE, 0, NULL), report, &oracle, NULL);
    json_t *made = ka_verdict_json(verdict, false), *list;
    ka_verdict_free(verdict);
    list = json_object_get(json_object_get(made, "shapes"), "skipped");
    assert_int_equal(json_array_size(list), skipped != NULL);
    assert_int_equal(json_array_size(json_object_get(made, "failures")) == 0, skipped != NULL);
    if (skipped)
        assert_non_null(
            strstr(json_string_value(json_object_get(json_array_get(list, 0), "reason")), skipped));
    json_decref(made);
}

static void judge__kernel_too_large_for_the_gpu__is_left_out_past_the_sweeps_blocks_only(void **state)
{
    (void)state;
    assert_raised("past_block", TOO_LARGE, "out of resources");
    assert_raised("past_block", "{\"message\": \"shared memory\"}", NULL);
    assert_raised("one_more", TOO_LARGE, NULL);
}

static void judge__raise_where_there_are_no_elements__is_told_and_no_failure(void **state)
{
    (void)state;
    static const char *const error = "{\"message\": \"ZeroDivisionError: M is 0\"}";
    assert_raised("zero", error, "no elements, the backward raises");
    assert_raised("one", error, NULL);
    assert_raised("zero", "{\"message\": \"OutOfBounds: row 0 of none\"}", NULL);
}

static void judge__tensors_of_other_sizes__are_wrong_and_no_more(void **state)
{
    (void)state;
    struct part parts[PARTS];
    right(parts, LINEAR_SUM);
    for (int i = GRAD; i < PARTS; i++)
        parts[i].count = 2 * COUNT;
    parts[NOOP].factor = parts[GRAD].factor;
    char *facts = facts_of(parts, PARTS);
    assert_non_null(strstr(facts, "the gradient of x has shape [600000], expected [300000]"));
    assert_null(strstr(facts, "decoy_kernel"));
    free(facts);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(judge__gradient_that_is_off_by_little__is_doubted),
        cmocka_unit_test(judge__right_candidate__has_nothing_against_it),
        cmocka_unit_test(judge__each_thing_that_is_asked__can_fail),
        cmocka_unit_test(judge__part_that_is_there_without_kernels__is_told_from_chance),
        cmocka_unit_test(judge__part_that_is_the_upstream__may_be_there_without_kernels),
        cmocka_unit_test(judge__zeros_that_the_host_puts_beside_the_upstream__are_a_choice),
        cmocka_unit_test(judge__gradient_that_is_free__comes_from_nowhere_if_it_is_right),
        cmocka_unit_test(judge__kernel_too_large_for_the_gpu__is_left_out_past_the_sweeps_blocks_only),
        cmocka_unit_test(judge__raise_where_there_are_no_elements__is_told_and_no_failure),
        cmocka_unit_test(judge__rounding_where_nothing_is_left__is_tf32s_where_that_was_used),
        cmocka_unit_test(judge__rounding_where_nothing_is_left__in_half_precision__is_a_few_percent),
        cmocka_unit_test(judge__tensors_of_other_sizes__are_wrong_and_no_more),
    };
    return cmocka_run_group_tests_name("judge", tests, NULL, NULL);
}
