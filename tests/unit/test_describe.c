/* Descriptions: exact text for whole results, and silence for what is missing. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "agent/core/describe.h"

typedef int (*describe_fn)(const json_t *doc, struct ka_buf *out);

static void assert_describes(describe_fn describe, const char *doc, const char *want)
{
    struct ka_buf out = {0};
    json_t *value = json_loads(doc, JSON_DECODE_ANY, NULL);
    assert_non_null(value);
    assert_int_equal(describe(value, &out), 0);
    assert_string_equal(ka_buf_str(&out), want);
    ka_buf_free(&out);
    json_decref(value);
}

static const char INSPECT[] =
    "{\"stub\":{\"name\":\"norm\",\"line\":30,\"params\":[{\"name\":\"x\",\"kind\":\"positional\",\"grad\":"
    "true},"
    "{\"name\":\"eps\",\"kind\":\"keyword\",\"default\":\"1e-6\"},{\"name\":\"k\",\"kind\":\"keyword\","
    "\"default\":\"2\"}]},"
    "\"grads\":[\"x\"],\"kernels\":[{\"name\":\"norm_fwd\",\"line\":7,\"constexpr\":[\"BLOCK\"],"
    "\"autotuned\":true},"
    "{\"name\":\"gelu\",\"helper\":true}],\"ops\":[\"dot\",\"load\"],\"dtype\":\"float32\","
    "\"sweep\":[{\"dims\":{\"M\":8,\"N\":100},\"required\":true},{\"dims\":{\"M\":1},\"required\":false}]}";

static void describe__inspect__tells_signature_kernels_and_sweep(void **state)
{
    (void)state;
    assert_describes(
        ka_describe_inspect, INSPECT,
        "- stub: `norm(x, *, eps=1e-6, k=2)`\n- gradients for: `x`\n"
        "- kernel `norm_fwd` (line 7), constexpr BLOCK, autotuned\n- helper `gelu`\n"
        "- Triton operations: dot, load\n- sweep: M=8, N=100; M=1 (optional)\n- default dtype: float32\n");
}

#define MENU                                                                                                 \
    "\nSchedules: `owner` gives each element of a gradient one program, `partials` sums privately and adds " \
    "up in a second kernel, `atomic` adds in place.\n"

static void describe__draft__tells_tape_schedule_and_lines(void **state)
{
    (void)state;
    assert_describes(
        ka_describe_draft,
        "{\"report\":{\"tape_bytes\":0,\"tape_naive_bytes\":4429185024,\"atomics\":2,\"atomics_naive\":2,"
        "\"schedule\":\"atomic\",\"alternatives\":[\"owner\",\"partials\"],\"lines\":["
        "{\"line\":12,\"class\":\"D\",\"proof\":\"telescoped\",\"reason\":\"online softmax\"},"
        "{\"line\":13,\"class\":\"C-G\",\"proof\":\"structure\",\"reason\":\"`h`\"},"
        "{\"line\":9,\"class\":\"atomic\",\"proof\":\"none\",\"reason\":\"gradient of w: no\"},"
        "{\"line\":9,\"class\":\"partials\",\"proof\":\"affine nest\",\"reason\":\"d_w: in registers\"},"
        "{\"line\":14,\"reason\":\"integer\"}]}}",
        "- kept from forward to backward (tape): 0 B (4.1 GiB without what was proved)\n"
        "- gradients that are added up by atomics: 2\n- schedule of the draft: atomic\n"
        "- schedules that are also provable: owner, partials\n"
        "- line 12, class D: online softmax (proof: telescoped)\n"
        "- line 13, class C-G: `h` (proof: structure)\n"
        "- line 9, private partial sums and a second kernel: d_w: in registers (proof: affine nest); no "
        "plain "
        "store does: gradient of w: no\n"
        "- line 14: integer\n"
        "\nClasses of what loops carry: C: it is scaled and added to; D: a running maximum with rescaled "
        "sums, "
        "which telescopes to B; G: anything else, on a tape.\n" MENU);
}

static void describe__draft__says_the_same_advice_once(void **state)
{
    (void)state;
    assert_describes(ka_describe_draft,
                     "{\"report\":{\"lines\":["
                     "{\"line\":3,\"class\":\"atomic\",\"proof\":\"none\",\"reason\":\"gradient of x: no\"},"
                     "{\"line\":3,\"class\":\"schedule\",\"proof\":\"p\",\"reason\":\"d_x stays atomic: no "
                     "owner. Try this.\"},"
                     "{\"line\":4,\"class\":\"schedule\",\"proof\":\"p\",\"reason\":\"d_w stays atomic: no "
                     "owner. Try this.\"},"
                     "{\"line\":5,\"class\":\"schedule\",\"proof\":\"p\",\"reason\":\"d_b stays atomic: no "
                     "owner. Try that.\"}]}}",
                     "- stays atomic: d_x (line 3), d_w (line 4): no owner. Try this.\n"
                     "- stays atomic: d_b (line 5): no owner. Try that.\n");
}

static void describe__refused_draft__tells_the_construct_and_speaks_of_no_draft(void **state)
{
    (void)state;
    assert_describes(
        ka_describe_draft,
        "{\"ok\":false,\"refusals\":[{\"line\":9,\"construct\":\"tl.sort\",\"message\":\"no rule\"},{}]}",
        "There is no draft: the compiler that writes them could not handle\n\n"
        "- line 9: `tl.sort`: no rule\n- somewhere: `?`: \n");
}

static const char FACTS[] =
    "{\"cases\":[{\"id\":0,\"dims\":{\"SECRET\":97},\"backward\":{\"launches\":2,\"bytes_read\":2048,\"bytes_"
    "written\":100,"
    "\"atomics\":8,\"programs\":4},\"forward\":{\"launches\":1,\"bytes_read\":1024,\"bytes_written\":10,"
    "\"atomics\":0,"
    "\"programs\":2},\"kernels\":[{\"name\":\"bwd\",\"constexprs\":{\"BLOCK\":64},\"num_warps\":4,\"num_"
    "stages\":3,"
    "\"registers\":32,\"spills\":0,\"shared\":4096,\"instructions\":210,\"ok\":true}]},"
    "{\"id\":1,\"backward\":{\"launches\":1,\"bytes_read\":1024,\"bytes_written\":1,\"atomics\":0,"
    "\"programs\":1},"
    "\"kernels\":[{\"name\":\"bwd\",\"constexprs\":{\"BLOCK\":64},\"num_warps\":4,\"num_stages\":3,"
    "\"registers\":32,\"spills\":0,\"shared\":4096,\"instructions\":210,\"ok\":true},"
    "{\"name\":\"sum\",\"registers\":40,\"spills\":7,\"ok\":false,\"error\":\"too much\\nmore\"}]}]}";

static void describe__facts__sum_cases_and_list_each_kernel_once(void **state)
{
    (void)state;
    assert_describes(
        ka_describe_facts, FACTS,
        "Counted over the measured cases and read off the compiled code; nothing here is a time. Warps at "
        "once are of the 64 that a multiprocessor holds.\n\n"
        "- forward: 1 launches of 2 programs, 1.0 KiB read, 10 B written, 0 atomic elements\n"
        "- backward: 3 launches of 5 programs, 3.0 KiB read, 101 B written, 8 atomic elements\n\n"
        "| kernel | constexprs | registers | spills | shared bytes | instructions | warps | stages | warps "
        "at "
        "once |\n|---|---|---|---|---|---|---|---|---|\n"
        "| `bwd` | BLOCK=64 | 32 | 0 | 4096 | 210 | 4 | 3 | 64 |\n| `sum` |  | 40 | 7 | - | - | - | - | - |\n"
        "| | does not compile: too much | | | | | | | |\n");
}

static void describe__uncompiled_kernel__has_line_type_and_message(void **state)
{
    (void)state;
    static const char facts[] =
        "{\"cases\":[{\"kernels\":[{\"name\":\"fwd\",\"pass\":\"forward\",\"error\":{\"kind\":\"unsupported_"
        "op\"}},"
        "{\"name\":\"bwd\",\"pass\":\"backward\",\"ok\":false,\"error\":{\"kind\":\"unsupported_op\","
        "\"line\":5,"
        "\"message\":\"bwd does not compile: TypeError('no fp8')\\nin /home/someone/x.py\"}}]}]}";
    const struct ka_place place = {.pair = "import a\n\n# ---- backward ----\n\nx = fp8\n"};
    json_auto_t *doc = json_loads(facts, 0, NULL);
    KA_AUTO_BUF struct ka_buf out = {0};
    assert_true(ka_describe_uncompiled(doc, &place, &out));
    assert_string_equal(ka_buf_str(&out), "line 1 of the backward part, `x = fp8`: bwd does not compile: "
                                          "TypeError('no fp8')\nin x.py");
    json_auto_t *none =
        json_loads("{\"kernels\":[{\"name\":\"bwd\",\"pass\":\"backward\",\"ok\":true}]}", 0, NULL);
    assert_false(ka_describe_uncompiled(none, &place, &out));
}

static void describe__raise__is_told_where_every_case_has_it_at_one_line(void **state)
{
    (void)state;
    static const char *const some[] = {
        "{}",
        "{\"cases\":[]}",
        "{\"cases\":[{\"everywhere\":true}]}",
        "{\"cases\":[{\"everywhere\":false,\"error\":{\"line\":5}}]}",
        "{\"cases\":[{\"everywhere\":true,\"error\":{\"line\":5}},{\"ok\":true}]}",
        "{\"cases\":[{\"everywhere\":true,\"error\":{\"line\":5}},{\"everywhere\":true,\"error\":{\"line\":6}"
        "}]}",
    };
    static const char all[] =
        "{\"cases\":[{\"everywhere\":true,\"error\":{\"line\":5,\"message\":\"NameError: "
        "y\"}},{\"everywhere\":true,\"error\":{\"line\":5}}]}";
    const struct ka_place place = {.pair = "import a\n\n# ---- backward ----\n\nx = y\n"};
    KA_AUTO_BUF struct ka_buf out = {0};
    for (size_t i = 0; i < KA_COUNT(some); i++) {
        json_auto_t *doc = json_loads(some[i], 0, NULL);
        assert_non_null(doc);
        assert_false(ka_describe_raised(doc, &place, &out));
    }
    assert_int_equal(out.len, 0);
    json_auto_t *doc = json_loads(all, 0, NULL);
    assert_true(ka_describe_raised(doc, &place, &out));
    assert_non_null(strstr(ka_buf_str(&out), "NameError: y"));
}

static void describe__sum__takes_the_worst_kernel(void **state)
{
    (void)state;
    struct ka_describe_sums sums;
    json_t *facts = json_loads(FACTS, 0, NULL);
    ka_describe_sum(facts, &sums);
    json_decref(facts);
    assert_true(sums.launches == 3 && sums.bytes_read == 3072 && sums.bytes_written == 101 &&
                sums.atomics == 8);
    assert_true(sums.registers == 40 && sums.spills == 7 && sums.shared == 4096 && sums.kernels == 2);
    ka_describe_sum(NULL, &sums);
    assert_true(sums.launches == -1 && sums.registers == -1 && sums.kernels == -1);
}

static int describe_kernels(const json_t *times, struct ka_buf *out)
{
    ka_describe_kernels(times, out);
    return 0;
}

static void describe__kernels__says_where_the_time_goes(void **state)
{
    (void)state;
    assert_describes(
        describe_kernels,
        "{\"shapes\":[{\"dims\":{\"M\":1},\"ms\":1},{\"dims\":{\"M\":8192},\"ms\":2}],\"kernels\":["
        "{\"pass\":\"fwd\",\"name\":\"norm\",\"launches\":1,\"ms\":0.0431},"
        "{\"pass\":\"bwd\",\"name\":\"norm_bwd\",\"launches\":2,\"ms\":0.06}],\"floor\":{\"fwd\":"
        "{\"floor_ms\":0.03,\"floor_of\":\"bytes\",\"bytes\":1.34e8,\"bytes_per_s\":4.3e12},\"bwd\":"
        "{\"floor_ms\":2,\"floor_of\":\"flops\",\"flops\":1.4e12,\"flops_per_s\":7e14}}}",
        "Each kernel by itself, in plain calls on M=8192: `norm` (forward) 0.0431 ms; `norm_bwd` (backward) "
        "0.06 ms in 2 launches. At what a copy and a product of matrices reach on this GPU, forward 0.03 ms "
        "(its bytes, 134 MB at 4.3 TB/s) and backward 2 ms (its products, 1400 GFLOP at 700 TFLOP/s) are the "
        "least.");
    assert_describes(describe_kernels, "{\"shapes\":[],\"ms\":1}", "");
}

static void describe__attempt__is_one_line(void **state)
{
    (void)state;
    assert_describes(
        ka_describe_attempt,
        "{\"phase\":\"fix\",\"origin\":\"llm\",\"note\":\"mask the tail\\nand more\",\"verified\":false,"
        "\"required\":2,\"passed\":1,\"hidden\":5,\"hidden_passed\":3,\"cost\":null,\"kept\":false,"
        "\"facts\":\"dx is off by 2.\\nOn M=3.\"}",
        "fix by llm (mask the tail): not verified, 1 of 2 shapes, 3 of 5 hidden ones, rolled back; dx is off "
        "by 2.");
    assert_describes(
        ka_describe_attempt,
        "{\"phase\":\"optimise\",\"origin\":\"tuner\",\"note\":\"\",\"verified\":true,\"required\":2,"
        "\"passed\":2,\"cost\":123456.7,\"kept\":true,\"facts\":\"\"}",
        "optimise by tuner: verified, cost 1.235e+05, kept");
    assert_describes(
        ka_describe_attempt,
        "{\"phase\":\"draft\",\"origin\":\"llm\",\"direction\":\"two passes\",\"verified\":true,\"cost\":5,"
        "\"kept\":false}",
        "draft by llm, direction \"two passes\": verified, cost 5, not kept");
    assert_describes(ka_describe_attempt,
                     "{\"phase\":\"optimise\",\"origin\":\"llm\",\"verified\":true,\"cost\":null,"
                     "\"untimed\":\"no room\\nat all\",\"kept\":false}",
                     "optimise by llm: verified, not timed (no room), rolled back");
    assert_describes(
        ka_describe_attempt,
        "{\"phase\":\"optimise\",\"origin\":\"llm\",\"verified\":true,\"kept\":false,\"times\":"
        "{\"ratio\":1.2,\"low\":1.1,\"high\":1.3,\"kernels\":[{\"pass\":\"bwd\",\"name\":\"walk\","
        "\"launches\":1,\"ms\":0.5}]}}",
        "optimise by llm: verified, 1.200 of the best's time (1.100 to 1.300), rolled back; its "
        "kernels: `walk` (backward) 0.5 ms");
    assert_describes(ka_describe_attempt,
                     "{\"phase\":\"draft\",\"origin\":\"llm\",\"direction\":\"two passes\",\"unusable\":\"no "
                     "code\\nat all\"}",
                     "draft by llm, direction \"two passes\": the answer was no use: no code");
}

static void describe__failed_attempt__names_its_first_finding(void **state)
{
    (void)state;
    assert_describes(ka_describe_attempt,
                     "{\"phase\":\"draft\",\"origin\":\"llm\",\"verified\":false,\"facts\":"
                     "\"On shape M=3, 2 of 3 cases fail:\\n- (normal upstream) dx is zero.\\n- more\\n\"}",
                     "draft by llm: not verified; (normal upstream) dx is zero.");
}

static void describe__shapes__shows_what_is_checked_and_nothing_hidden(void **state)
{
    (void)state;
    assert_describes(
        ka_describe_shapes,
        "[{\"dims\":{\"M\":3,\"N\":7},\"class\":\"required\"},{\"dims\":{\"M\":31},\"class\":\"hidden\"},"
        "{\"dims\":{\"M\":9},\"class\":\"optional\"},{\"dims\":{\"M\":1}}]",
        "- checked on: M=3, N=7; M=9 (optional); and on hidden shapes near these\n");
    assert_describes(ka_describe_shapes, "[{\"dims\":{\"M\":31},\"class\":\"hidden\"}]", "");
    assert_describes(
        ka_describe_shapes,
        "[{\"dims\":{\"M\":31},\"class\":\"hidden\",\"tensors\":[{\"name\":\"y\",\"shape\":[31]}]},"
        "{\"dims\":{\"M\":8},\"class\":\"required\",\"tensors\":[{\"name\":\"x\",\"shape\":[8,4],"
        "\"dtype\":\"float32\"},{\"name\":\"at\",\"shape\":[8],\"dtype\":\"int64\"}]},"
        "{\"dims\":{\"M\":9},\"class\":\"required\",\"tensors\":[{\"name\":\"x\",\"shape\":[9]}]}]",
        "- checked on: M=8; M=9; and on hidden shapes near these\n"
        "- tensors on the first of these: `x` [8,4] float32; `at` [8] int64\n");
}

static void describe__nothing__is_silent(void **state)
{
    (void)state;
    static const char *const docs[] = {"null", "{}",    "[]",
                                       "7",    "\"x\"", "{\"report\":3,\"refusals\":{},\"kernels\":7}"};
    static const describe_fn all[] = {ka_describe_inspect, ka_describe_shapes, ka_describe_draft,
                                      ka_describe_facts};
    KA_AUTO_BUF struct ka_buf out = {0};
    for (size_t i = 0; i < KA_COUNT(all); i++) {
        assert_int_equal(all[i](NULL, &out), 0);
        for (size_t k = 0; k < KA_COUNT(docs) - 1; k++)
            assert_describes(all[i], docs[k], "");
    }
    assert_int_equal(out.len, 0);
    assert_describes(ka_describe_draft, docs[5], "");
}

static void assert_bytes(double bytes, const char *want)
{
    char text[40];
    ka_describe_bytes(bytes, text, sizeof(text));
    assert_string_equal(text, want);
}

static void describe__bytes__use_binary_units(void **state)
{
    (void)state;
    assert_bytes(0, "0 B");
    assert_bytes(1023, "1023 B");
    assert_bytes(1536, "1.5 KiB");
    assert_bytes(200.0 * 1024 * 1024, "200 MiB");
    assert_bytes(5e15, "4547 TiB");
}

static void describe__dims__are_short(void **state)
{
    (void)state;
    assert_describes(ka_describe_dims, "{\"M\":8,\"lens\":[1,2],\"causal\":true,\"act\":\"silu\"}",
                     "M=8, lens=[1,2], causal=true, act=\"silu\"");
    assert_describes(ka_describe_dims, "\"hidden\"", "hidden");
    assert_describes(ka_describe_dims, "{\"gamma\":0.1,\"eps\":1e-6,\"p\":0.30000000000000004}",
                     "gamma=0.1, eps=1e-6, p=0.30000000000000004");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(describe__inspect__tells_signature_kernels_and_sweep),
        cmocka_unit_test(describe__draft__tells_tape_schedule_and_lines),
        cmocka_unit_test(describe__draft__says_the_same_advice_once),
        cmocka_unit_test(describe__refused_draft__tells_the_construct_and_speaks_of_no_draft),
        cmocka_unit_test(describe__facts__sum_cases_and_list_each_kernel_once),
        cmocka_unit_test(describe__uncompiled_kernel__has_line_type_and_message),
        cmocka_unit_test(describe__raise__is_told_where_every_case_has_it_at_one_line),
        cmocka_unit_test(describe__sum__takes_the_worst_kernel),
        cmocka_unit_test(describe__kernels__says_where_the_time_goes),
        cmocka_unit_test(describe__attempt__is_one_line),
        cmocka_unit_test(describe__failed_attempt__names_its_first_finding),
        cmocka_unit_test(describe__shapes__shows_what_is_checked_and_nothing_hidden),
        cmocka_unit_test(describe__nothing__is_silent),
        cmocka_unit_test(describe__bytes__use_binary_units),
        cmocka_unit_test(describe__dims__are_short),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
