/* Children that come from the real zygote, with a child module that runs the request in a shell; and cards
 * for them. */
#ifndef KA_TEST_ZYGOTE_FIXTURE_H
#define KA_TEST_ZYGOTE_FIXTURE_H

#include "child_fixture.h"

static inline void write_into(const char *folder, const char *name, const char *text, size_t len)
{
    char *path = ka_path_join(folder, name);
    assert_int_equal(ka_file_write(path, text, len, NULL), 0);
    free(path);
}

static inline void fill_package(const struct fixture *f)
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

static inline struct fixture *need_zygotes(void **state)
{
    struct fixture *f = need_jail(state);
    char *jail = ka_strdup(ka_children_jail(f->children)), *folder = ka_strdup(jail);
    *strrchr(folder, '/') = '\0';
    char *library = ka_path_join(folder, "libka_jail.so");
    bool here = access(library, R_OK) == 0 && access(".venv/bin/python", X_OK) == 0;
    if (here) {
        struct ka_children_conf conf = {
            .jail = jail, .base = f->base, .max_running = 2, .reap_ms = 300, .cards = f->cards};
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

/* Two lists of cards stand for two processes; their locks are below the test's folder. */
static inline struct fixture *with_cards(void **state, struct ka_cards **others)
{
    struct fixture *f = need_jail(state);
    assert_int_equal(setenv("XDG_RUNTIME_DIR", f->dir, 1), 0);
    assert_int_equal(ka_cards_new("0", 4, &f->cards, NULL), 0);
    assert_int_equal(ka_cards_new("0", 4, others, NULL), 0);
    return need_zygotes(state);
}

#define UNTIL_GO "while ! test -e \"$PYTHONPATH/go\"; do sleep 0.05; done"

static inline void go(const struct fixture *f)
{
    write_into(f->package, "go", "", 0);
}

static inline void run_until_it_runs(struct fixture *f)
{
    while (!ka_children_running(f->children))
        uv_run(ka_loop_uv(f->loop), UV_RUN_ONCE);
}

static inline void run_for(struct fixture *f, uint64_t ms)
{
    for (uint64_t until = uv_hrtime() + ms * 1000000; uv_hrtime() < until;) {
        uv_run(ka_loop_uv(f->loop), UV_RUN_NOWAIT);
        uv_sleep(5);
    }
}

#endif
