/* Children on a real loop, below the real jail, each started alone. */
#include "child_fixture.h"

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
        cmocka_unit_test(memory__of_a_small_machine__goes_by_parts),
        cmocka_unit_test(memory__of_a_large_machine__goes_by_gigabytes),
        cmocka_unit_test(memory__that_cannot_be_told__is_enough),
        cmocka_unit_test(args__of_a_request__are_the_options_of_the_jail),
        cmocka_unit_test(args__of_a_child_on_a_gpu__name_its_card),
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
        WITH_JAIL(children__folder_of_a_killed_daemon__is_removed_by_the_next),
        WITH_JAIL(children__base_that_others_can_write__is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
