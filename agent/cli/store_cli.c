/* The command line of the store. Knows no SQL and no vector. */
#include "store_cli.h"

#include <errno.h>
#include <getopt.h>
#include <jansson.h>
#include <limits.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "agent/app/app.h"
#include "agent/app/python.h"
#include "agent/core/fields.h"
#include "base/each.h"
#include "base/files.h"
#include "base/lines.h"
#include "base/utf8.h"
#include "rag/build.h"
#include "rag/gather.h"
#include "rag/lessons.h"
#include "rag/package.h"
#include "rag/search.h"
#include "show.h"

extern char **environ;

enum { EXIT_OK = 0, EXIT_INTERNAL = 1, EXIT_USE = 2, EXIT_FILE = 3, EXIT_UNVERIFIED = 4 };

struct command_line {
    const char *command;
    char *store; /* resolved path */
    struct ka_store *db;
    const char *store_option;
    bool json, help;
    double topk, min_sim;
    const char *exclude, *license, *python;
    char **words; /* after the command */
    int word_count;
    ka_verify_pair_fn verify;
    void *verify_arg;
};

static const char USAGE[] =
    "kernel-agent store: the pairs of forward and backward that drafts learn from.\n"
    "\n"
    "Usage:\n"
    "  kernel-agent store build DIR         a new store from the pair files below DIR (<family>/<id>.py)\n"
    "  kernel-agent store add FILE          add a finished pair, or replace the one of that name\n"
    "  kernel-agent store list              what is in the store\n"
    "  kernel-agent store show ID           one pair's source\n"
    "  kernel-agent store search FILE       the pairs most like a forward file\n"
    "  kernel-agent store verify [ID...]    check the store, then do the verdict on these pairs, or on all\n"
    "  kernel-agent store import WHAT...    autograd functions with Triton kernels of other people's files,\n"
    "                                       folders or installed packages (read, never imported)\n"
    "  kernel-agent store export DIR        write every pair to DIR/<family>/<id>.py\n"
    "  kernel-agent store lessons           what runs learned from their mistakes (of this user; no part of "
    "a\n"
    "                                       pair store)\n"
    "  kernel-agent store lessons forget ID...|all\n"
    "                                       forget these lessons, or all of them\n"
    "\n"
    "Options:\n"
    "  --store PATH          the store (default: KA_STORE, $XDG_DATA_HOME/kernel-agent/pairs.db, or the "
    "program's)\n"
    "  --json                results as JSON on stdout\n"
    "  --topk N              search: at most N pairs (default 4)\n"
    "  --min-sim X           search: only pairs of similarity X or more (default 0; from 0.6 half help)\n"
    "  --rag-exclude A,B     search: leave out pairs whose path holds A or B\n"
    "  --license NAME        import: the licence of files that name none; without it they are not taken\n"
    "  --python PATH         import: the interpreter whose packages to look for, before those found\n"
    "  --help                this text\n"
    "\n"
    "Examples:\n"
    "  kernel-agent store build dataset\n"
    "  kernel-agent store search examples/softmax.py --topk 3 --rag-exclude softmax\n"
    "  kernel-agent store add generated/attn/attn.py && kernel-agent store show attn\n"
    "  kernel-agent store import ~/src/some-repository --json\n"
    "  kernel-agent store verify layer_norm_affine_rowgroup_partials\n"
    "  kernel-agent store lessons --json\n"
    "  kernel-agent store lessons forget 3 7\n"
    "\n"
    "Exit codes: 0 done, 1 internal error, 2 usage or no usable store, 3 a file cannot be used, 4 a pair is "
    "not verified.\n";

/* ---- helpers ---- */

static int report(const struct ka_err *err, int code)
{
    fprintf(stderr, "kernel-agent store: %s\n", err->msg);
    return code;
}

/* Exit code of a failed store operation, with its message printed. */
static int report_store(const struct ka_err *err, int rc)
{
    return report(err, rc == -ENOMEM || rc == -EIO ? EXIT_INTERNAL : EXIT_USE);
}

/* Steals `value`; what could not be written is found at the end. */
static int print_json(json_t *value)
{
    ka_show_json(value, JSON_INDENT(2) | JSON_PRESERVE_ORDER);
    json_decref(value);
    return EXIT_OK;
}

/* A path relative to the program's own folder; free() it. */
static char *beside_program(const char *name)
{
    KA_AUTO_FREE char *folder = ka_program_folder();
    return ka_path_join(folder ? folder : ".", name);
}

/* Where the store is, or is to be made: as told, else the user's own folder if there is one, else what was
 * built or installed with the program. */
static char *find_store(const struct command_line *c, bool create)
{
    static const char *const places[] = {"pairs.db", "../pairs.db", "../share/kernel-agent/pairs.db"};
    const char *told = c->store_option ? c->store_option : getenv("KA_STORE");
    if (told && *told)
        return ka_strdup(told);
    const char *data = getenv("XDG_DATA_HOME");
    char *personal = data && *data ? ka_path_join(data, "kernel-agent/pairs.db") : NULL;
    if (personal && (create || access(personal, F_OK) == 0))
        return personal;
    free(personal);
    for (size_t i = 0; !create && i < KA_COUNT(places); i++) {
        char *path = beside_program(places[i]);
        if (access(path, F_OK) == 0)
            return path;
        free(path);
    }
    return beside_program(places[0]);
}

/* ---- build, add ---- */

static void show_progress(size_t done, size_t total, const char *path, void *arg)
{
    (void)path;
    (void)arg;
    if (isatty(STDERR_FILENO))
        fprintf(stderr, "\rreading %zu of %zu%s", done, total, done == total ? "\n" : "");
}

static int run_build(struct command_line *c)
{
    struct ka_err err;
    struct ka_build_report done;
    int rc = ka_build(c->words[0], c->store, show_progress, NULL, &done, &err);
    if (rc)
        return report(&err, rc == -EINVAL || rc == -EEXIST || rc == -EFBIG ? EXIT_FILE
                            : rc == -ENOMEM || rc == -EIO                  ? EXIT_INTERNAL
                                                                           : EXIT_USE);
    if (c->json)
        return print_json(json_pack("{s:s, s:I, s:I, s:s, s:i}", "store", c->store, "pairs",
                                    (json_int_t)done.pairs, "families", (json_int_t)done.folders, "embedder",
                                    KA_EMBED_NAME, "version", KA_EMBED_VERSION));
    printf("%zu pairs of %zu families in %s\n", done.pairs, done.folders, c->store);
    return EXIT_OK;
}

static int run_add(struct command_line *c)
{
    struct ka_err err;
    int rc = ka_build_add(c->db, c->words[0], &err);
    if (rc)
        return report(&err,
                      rc == -EBUSY || rc == -EROFS || rc == -EILSEQ || rc == -ENOSPC ? EXIT_USE : EXIT_FILE);
    if (c->json)
        return print_json(json_pack("{s:s, s:s}", "store", c->store, "added", c->words[0]));
    printf("added %s to %s\n", c->words[0], c->store);
    return EXIT_OK;
}

/* ---- import ---- */

static void print_imported(const json_t *report)
{
    KA_EACH(json_object_get(report, "taken"), i, entry) {
        printf("taken      %s:%lld: %s (%s), as %s\n", ka_text_of(entry, "path", ""),
               (long long)json_integer_value(json_object_get(entry, "line")), ka_text_of(entry, "class", ""),
               ka_text_of(entry, "license", ""), ka_text_of(entry, "id", ""));
    }
    KA_EACH(json_object_get(report, "not_taken"), i, entry) {
        const char *class = ka_text_of(entry, "class", "");
        printf("not taken  %s:%lld: %s%s%s\n", ka_text_of(entry, "path", ""),
               (long long)json_integer_value(json_object_get(entry, "line")), class, *class ? ": " : "",
               ka_text_of(entry, "why", ""));
    }
    printf("%zu pairs taken, %zu not, of %lld Python files\n",
           json_array_size(json_object_get(report, "taken")),
           json_array_size(json_object_get(report, "not_taken")),
           (long long)json_integer_value(json_object_get(report, "files")));
}

/* The folders of every interpreter that a run would choose from; none of them is started. */
static void find_sites(const struct command_line *c, struct ka_sites *sites)
{
    KA_AUTO_FREE char *share = ka_app_find_share(NULL);
    const struct ka_python_where where = {.wanted = c->python,
                                          .virtual_env = getenv("VIRTUAL_ENV"),
                                          .conda_prefix = getenv("CONDA_PREFIX"),
                                          .path = getenv("PATH"),
                                          .share = share};
    struct ka_pythons pythons;
    ka_pythons_list(&where, &pythons);
    for (size_t i = 0; i < pythons.count; i++)
        ka_sites_add(sites, pythons.list[i].place);
    ka_pythons_free(&pythons);
}

/* A file or folder, or else the name of an installed package. */
static int import_word(struct command_line *c, const char *word, json_t **report, struct ka_err *err)
{
    struct ka_gather_req req = {.path = word, .license = c->license};
    struct ka_sites sites = {0};
    struct ka_package package = {0};
    int rc = 0;
    if (access(word, F_OK) != 0) {
        find_sites(c, &sites);
        rc = ka_package_find(&sites, word, &package, err);
        req.path = package.path;
        req.top = package.top;
        req.info = package.info;
        req.version = package.version;
    }
    if (rc == 0)
        rc = ka_gather(c->db, &req, report, err);
    ka_package_free(&package);
    ka_sites_free(&sites);
    return rc;
}

/* The store is made if there is none; *made says so. */
static int open_for_import(struct command_line *c, bool *made, struct ka_err *err)
{
    *made = access(c->store, F_OK) != 0;
    if (!*made)
        return ka_store_open(c->store, KA_STORE_WRITE, &c->db, err);
    free(c->store);
    c->store = find_store(c, true);
    KA_AUTO_FREE char *folder = ka_path_parent(c->store);
    int rc = ka_mkdirs(folder, err);
    return rc ? rc : ka_store_open(c->store, KA_STORE_CREATE, &c->db, err);
}

/* A new store in which nothing came is none; in one with pairs, words weigh by how rare they are. */
static int finish_import(struct command_line *c, bool made, size_t taken, struct ka_err *err)
{
    int rc = made && taken ? ka_build_weigh(c->db, err) : 0;
    if (!made || taken)
        return rc;
    ka_store_close(c->db);
    c->db = NULL;
    unlink(c->store);
    return 0;
}

/* Nothing taken at all is exit code 3: a script wants to know. */
static int run_import(struct command_line *c)
{
    struct ka_err err;
    json_auto_t *all = json_array();
    size_t taken = 0;
    bool made = false;
    int rc = open_for_import(c, &made, &err);
    if (rc)
        return report_store(&err, rc);
    for (int i = 0; i < c->word_count && rc == 0; i++) {
        json_t *found = NULL;
        rc = import_word(c, c->words[i], &found, &err);
        if (rc == 0) {
            taken += json_array_size(json_object_get(found, "taken"));
            if (!c->json)
                print_imported(found);
            json_array_append_new(all, found);
        }
    }
    struct ka_err late;
    int finished = finish_import(c, made, taken, &late);
    if (rc)
        return rc == -ENOENT || rc == -EINVAL ? report(&err, EXIT_FILE) : report_store(&err, rc);
    if (finished)
        return report_store(&late, finished);
    if (c->json)
        ka_show_json(all, JSON_INDENT(2) | JSON_PRESERVE_ORDER);
    else if (made && taken)
        printf("made %s\n", c->store);
    return taken ? EXIT_OK : EXIT_FILE;
}

/* ---- list, show ---- */

static json_t *row_json(const struct ka_store_row *row)
{
    return json_pack("{s:s, s:s, s:s, s:s, s:o, s:o, s:i, s:s, s:s, s:s}", "id", row->id, "family",
                     row->family, "op", row->op, "path", row->path, "schedule",
                     ka_search_split_json(row->schedule), "dtypes", ka_search_split_json(row->dtypes),
                     "difficulty", row->difficulty, "license", row->license, "title", row->title, "hash",
                     row->hash);
}

static int collect_row(const struct ka_store_row *row, void *arg)
{
    return json_array_append_new(arg, row_json(row));
}

static int print_row(const struct ka_store_row *row, void *arg)
{
    (void)arg;
    printf("%-44s %-20s %d  %s\n", row->id, row->family, row->difficulty, row->schedule);
    return 0;
}

static int run_list(struct command_line *c)
{
    struct ka_err err;
    json_auto_t *rows = c->json ? json_array() : NULL;
    int rc = ka_store_each(c->db, c->json ? collect_row : print_row, rows, &err);
    if (rc)
        return report_store(&err, rc);
    return c->json ? print_json(json_incref(rows)) : EXIT_OK;
}

static int run_show(struct command_line *c)
{
    struct ka_err err;
    struct ka_pair pair;
    int rc = ka_store_get(c->db, c->words[0], &pair, &err);
    if (rc)
        return report_store(&err, rc);
    int code = EXIT_OK;
    if (c->json)
        code = print_json(json_pack("{s:s, s:s, s:s, s:s, s:s, s:o, s:o, s:i, s:s, s:s, s:s}", "id", pair.id,
                                    "family", pair.family, "op", pair.op, "path", pair.path, "stub",
                                    pair.stub, "kernels", ka_search_split_json(pair.kernels), "schedule",
                                    ka_search_split_json(pair.schedule), "difficulty", pair.difficulty,
                                    "license", pair.license, "hash", pair.hash, "source", pair.source));
    else
        fputs(pair.source, stdout);
    ka_pair_free(&pair);
    return code;
}

/* ---- search ---- */

static int search_store(struct command_line *c, const char *forward, struct ka_search_result *found,
                        struct ka_err *err)
{
    struct ka_store *store = NULL;
    struct ka_search *search = NULL;
    int rc = ka_store_open(c->store, KA_STORE_READ, &store, err);
    if (rc == 0)
        rc = ka_search_open(store, &search, err);
    struct ka_search_query query = {
        .forward = forward, .topk = (size_t)c->topk, .min_sim = c->min_sim, .exclude = c->exclude};
    if (rc == 0)
        rc = ka_search_run(search, &query, found, err);
    ka_search_close(search);
    ka_store_close(store);
    return rc;
}

static int run_search(struct command_line *c)
{
    struct ka_err err;
    KA_AUTO_BUF struct ka_buf forward = {0};
    struct ka_search_result found = {0};
    if (ka_file_read(c->words[0], KA_PAIR_MAX, &forward, &err))
        return report(&err, EXIT_FILE);
    int rc = search_store(c, ka_buf_str(&forward), &found, &err);
    if (rc)
        return rc == -EINVAL || rc == -EFBIG ? report(&err, EXIT_FILE) : report_store(&err, rc);
    if (c->json)
        print_json(ka_search_json(&found));
    for (size_t i = 0; i < found.count && !c->json; i++) {
        const struct ka_search_hit *hit = &found.hits[i];
        printf("%.3f  %-44s %s\n       %s%s\n", hit->similarity, hit->id, hit->schedule,
               *hit->common ? "both have " : "alike in structure alone", hit->common);
    }
    for (size_t i = 0; i < found.excluded_count; i++)
        fprintf(stderr, "left out: %s: %s\n", found.excluded[i].id, found.excluded[i].why);
    ka_search_result_free(&found);
    return EXIT_OK;
}

/* ---- verify, export ---- */

struct id_list {
    char **ids;
    size_t count;
    bool own_only; /* leave imported pairs out: they have no shapes to be verified on */
};

static int collect_id(const struct ka_store_row *row, void *arg)
{
    struct id_list *list = arg;
    if (list->own_only && strcmp(row->family, KA_GATHER_FAMILY) == 0)
        return 0;
    *KA_APPEND(list->ids, list->count) = ka_strdup(row->id);
    return 0;
}

/* A stored name becomes a path only when it is a plain name. */
static bool plain_name(const char *name)
{
    return *name && *name != '.' && !strchr(name, '/');
}

/* Write the pair below `dir` as <family>/<id>.py; *path is to be freed. */
static int write_pair(struct ka_store *store, const char *id, const char *dir, char **path,
                      struct ka_err *err)
{
    struct ka_pair pair;
    int rc = ka_store_get(store, id, &pair, err);
    if (rc)
        return rc;
    KA_AUTO_FREE char *folder = ka_path_join(dir, *pair.family ? pair.family : ".");
    *path = ka_format("%s/%s.py", folder, pair.id);
    if (!plain_name(pair.id) || (*pair.family && !plain_name(pair.family)))
        rc = ka_fail(err, -EINVAL, "%s: not a usable file name", id);
    if (rc == 0)
        rc = ka_mkdirs(folder, err);
    if (rc == 0)
        rc = ka_file_write(*path, pair.source, strlen(pair.source), err);
    ka_pair_free(&pair);
    return rc;
}

/* `kernel-agent check FILE`, which prints its own findings. */
static int verify_by_check(const char *path, void *arg)
{
    (void)arg;
    char *argv[] = {(char *)"kernel-agent", (char *)"check", (char *)path, NULL};
    pid_t child;
    int status = 0, rc = posix_spawn(&child, "/proc/self/exe", NULL, NULL, argv, environ);
    while (rc == 0 && waitpid(child, &status, 0) < 0 && errno == EINTR)
        continue;
    if (rc)
        fprintf(stderr, "kernel-agent store: cannot start the check: %s\n", strerror(rc));
    return rc == 0 && WIFEXITED(status) ? WEXITSTATUS(status) : EXIT_INTERNAL;
}

static int verify_list(struct command_line *c, const struct id_list *list, const char *scratch)
{
    json_auto_t *failed = json_array();
    for (size_t i = 0; i < list->count; i++) {
        struct ka_err err;
        KA_AUTO_FREE char *path = NULL;
        int rc = write_pair(c->db, list->ids[i], scratch, &path, &err);
        if (rc)
            return report_store(&err, rc);
        bool verified = c->verify(path, c->verify_arg) == 0;
        fprintf(stderr, "%zu of %zu: %s %s\n", i + 1, list->count, list->ids[i],
                verified ? "verified" : "NOT verified");
        if (!verified)
            json_array_append_new(failed, json_string(list->ids[i]));
    }
    size_t failures = json_array_size(failed);
    if (c->json)
        print_json(json_pack("{s:I, s:O}", "pairs", (json_int_t)list->count, "failed", failed));
    else
        printf("%zu of %zu pairs verified\n", list->count - failures, list->count);
    return failures ? EXIT_UNVERIFIED : EXIT_OK;
}

static void free_ids(struct id_list *list)
{
    for (size_t i = 0; i < list->count; i++)
        free(list->ids[i]);
    free(list->ids);
}

static int run_verify(struct command_line *c)
{
    struct ka_err err = {{0}};
    struct id_list all = {.own_only = true}, named = {c->words, (size_t)c->word_count, false};
    char scratch[] = "/tmp/kernel-agent-verify-XXXXXX";
    int rc = ka_store_check(c->db, &err);
    if (rc == 0 && !named.count)
        rc = ka_store_each(c->db, collect_id, &all, &err);
    if (rc == 0 && !mkdtemp(scratch))
        rc = ka_fail(&err, -errno, "%s: %s", scratch, strerror(errno));
    int code = EXIT_OK;
    if (rc) {
        code = report_store(&err, rc);
    } else {
        code = verify_list(c, named.count ? &named : &all, scratch);
        ka_rmtree(scratch, NULL);
    }
    free_ids(&all);
    return code;
}

static int run_export(struct command_line *c)
{
    struct ka_err err = {{0}};
    struct id_list all = {0};
    int rc = ka_store_each(c->db, collect_id, &all, &err);
    for (size_t i = 0; i < all.count && rc == 0; i++) {
        KA_AUTO_FREE char *path = NULL;
        rc = write_pair(c->db, all.ids[i], c->words[0], &path, &err);
    }
    int code = rc ? report_store(&err, rc) : EXIT_OK;
    if (code == EXIT_OK && c->json)
        code = print_json(json_pack("{s:I, s:s}", "pairs", (json_int_t)all.count, "folder", c->words[0]));
    else if (code == EXIT_OK)
        printf("%zu pairs written to %s\n", all.count, c->words[0]);
    free_ids(&all);
    return code;
}

/* ---- lessons ---- */

/* Made by runs, of code that a model wrote: made fit for a terminal. */
static void print_text(const char *indent, const char *text)
{
    const char *cursor = text, *end = text + strlen(text);
    struct ka_line line;
    char clean[512];
    while (ka_line_next(&cursor, end, &line)) {
        size_t blanks = line.len ? ka_line_indent((struct ka_line){line.at + 1, line.len - 1}) + 1 : 0;
        ka_utf8_line(line.at + blanks, line.len - blanks, clean, sizeof(clean));
        printf("%s%.*s%s\n", indent, (int)blanks, line.at, clean);
    }
}

static void print_lesson(const json_t *lesson)
{
    printf("%lld  %s; shown in %lld runs, helped in %lld, in vain since %lld\n",
           (long long)json_integer_value(json_object_get(lesson, "id")), ka_text_of(lesson, "kind", ""),
           (long long)json_integer_value(json_object_get(lesson, "shown")),
           (long long)json_integer_value(json_object_get(lesson, "helped")),
           (long long)json_integer_value(json_object_get(lesson, "vain")));
    printf("   proved by %s, on %s (%s)\n", ka_text_of(lesson, "run", ""), ka_text_of(lesson, "device", ""),
           ka_text_of(lesson, "words", ""));
    print_text("   ", ka_text_of(lesson, "finding", ""));
    print_text("     ", ka_text_of(lesson, "change", ""));
}

static int list_lessons(struct command_line *c, const char *path, struct ka_err *err)
{
    json_t *list = NULL;
    int rc = ka_lessons_list(path, &list, err);
    if (rc && rc != -ENOENT)
        return rc;
    list = list ? list : json_array();
    KA_EACH(list, i, lesson) {
        if (!c->json)
            print_lesson(lesson);
    }
    if (c->json)
        print_json(list);
    else
        json_decref(list);
    return 0;
}

/* A whole number of a lesson, or 0 for all; -EINVAL. */
static int lesson_id(const char *word, int64_t *id, struct ka_err *err)
{
    char *end;
    errno = 0;
    long long value = strcmp(word, "all") == 0 ? 0 : strtoll(word, &end, 10);
    if (strcmp(word, "all") != 0 && (errno || end == word || *end || value < 1))
        return ka_fail(err, -EINVAL,
                       "'%s' is no number of a lesson, nor all; `kernel-agent store lessons` lists them",
                       word);
    *id = value;
    return 0;
}

static int forget_lessons(struct command_line *c, const char *path, struct ka_err *err)
{
    size_t gone = 0;
    int64_t id = 0;
    int rc = 0;
    for (int i = 1; i < c->word_count && rc == 0; i++) /* all are right before one goes */
        rc = lesson_id(c->words[i], &id, err);
    for (int i = 1; i < c->word_count && rc == 0; i++) {
        size_t now = 0;
        lesson_id(c->words[i], &id, NULL);
        rc = ka_lessons_forget(path, id, &now, err);
        rc = rc == -ENOENT && id == 0 ? 0 : rc;
        gone += now;
    }
    if (rc == 0 && c->json)
        print_json(json_pack("{s:I}", "forgotten", (json_int_t)gone));
    else if (rc == 0)
        printf("%zu lesson%s forgotten\n", gone, gone == 1 ? "" : "s");
    return rc;
}

static int run_lessons(struct command_line *c)
{
    struct ka_err err;
    KA_AUTO_FREE char *path = ka_user_data(KA_LESSONS_NAME);
    bool forget = c->word_count && strcmp(c->words[0], "forget") == 0;
    int rc = 0;
    if (!path)
        rc = ka_fail(&err, -EINVAL, "neither XDG_DATA_HOME nor HOME says where this user's lessons are");
    else if (forget ? c->word_count < 2 : c->word_count > 0)
        rc = ka_fail(&err, -EINVAL, "usage: kernel-agent store lessons [forget ID...|all] (see --help)");
    else
        rc = forget ? forget_lessons(c, path, &err) : list_lessons(c, path, &err);
    return rc ? report_store(&err, rc) : EXIT_OK;
}

/* ---- the command line ---- */

static const struct {
    const char *name;
    int least, most; /* words after the command */
    const char *wants;
    enum ka_store_mode mode; /* as which it finds c->db open; CREATE: it opens none, or its own */
    int (*run)(struct command_line *c);
} COMMANDS[] = {
    {"build", 1, 1, "build DIR", KA_STORE_CREATE, run_build},
    {"add", 1, 1, "add FILE", KA_STORE_WRITE, run_add},
    {"list", 0, 0, "list", KA_STORE_READ, run_list},
    {"show", 1, 1, "show ID", KA_STORE_READ, run_show},
    {"search", 1, 1, "search FILE", KA_STORE_CREATE, run_search},
    {"verify", 0, INT_MAX, "verify [ID...]", KA_STORE_READ, run_verify},
    {"import", 1, INT_MAX, "import WHAT...", KA_STORE_CREATE, run_import},
    {"export", 1, 1, "export DIR", KA_STORE_READ, run_export},
    {"lessons", 0, INT_MAX, "lessons [forget ID...|all]", KA_STORE_CREATE, run_lessons},
};

/* A whole number or any other of the range. */
static int parse_number(const char *name, bool whole, double low, double high, double *out,
                        struct ka_err *err)
{
    char *end;
    double value = whole ? (double)strtol(optarg, &end, 10) : strtod(optarg, &end);
    if (end == optarg || *end || !(value >= low && value <= high))
        return ka_fail(err, -EINVAL, "%s: '%s' is not a number from %g to %g", name, optarg, low, high);
    *out = value;
    return 0;
}

static int parse_options(struct command_line *c, int argc, char **argv, struct ka_err *err)
{
    static const struct option known[] = {{"store", required_argument, NULL, 's'},
                                          {"json", no_argument, NULL, 'j'},
                                          {"topk", required_argument, NULL, 'k'},
                                          {"min-sim", required_argument, NULL, 'm'},
                                          {"rag-exclude", required_argument, NULL, 'x'},
                                          {"license", required_argument, NULL, 'l'},
                                          {"python", required_argument, NULL, 'p'},
                                          {"help", no_argument, NULL, 'h'},
                                          {NULL, 0, NULL, 0}};
    int got, rc = 0;
    optind = 0; /* start afresh, also after another parser */
    opterr = 0;
    while (rc == 0 && (got = getopt_long(argc, argv, ":h", known, NULL)) != -1) {
        if (got == 's')
            c->store_option = optarg;
        else if (got == 'j')
            c->json = true;
        else if (got == 'k')
            rc = parse_number("--topk", true, 1, KA_INDEX_TOPK_MAX, &c->topk, err);
        else if (got == 'm')
            rc = parse_number("--min-sim", false, -1, 1, &c->min_sim, err);
        else if (got == 'x')
            c->exclude = optarg;
        else if (got == 'l')
            c->license = optarg;
        else if (got == 'p')
            c->python = optarg;
        else if (got == 'h')
            c->help = true;
        else
            rc = ka_fail(err, -EINVAL, got == ':' ? "%s wants a value" : "%s is not an option; see --help",
                         argv[optind - 1]);
    }
    c->command = optind < argc ? argv[optind] : NULL;
    c->words = argv + optind + (c->command != NULL);
    c->word_count = argc - optind - (c->command != NULL);
    return rc;
}

static int run_command(struct command_line *c)
{
    struct ka_err err;
    for (size_t i = 0; i < KA_COUNT(COMMANDS); i++) {
        if (strcmp(c->command, COMMANDS[i].name) != 0)
            continue;
        if (c->word_count < COMMANDS[i].least || c->word_count > COMMANDS[i].most) {
            ka_fail(&err, 0, "usage: kernel-agent store %s (see --help)", COMMANDS[i].wants);
            return report(&err, EXIT_USE);
        }
        c->store = find_store(c, COMMANDS[i].run == run_build);
        int rc = 0;
        if (COMMANDS[i].mode != KA_STORE_CREATE)
            rc = ka_store_open(c->store, COMMANDS[i].mode, &c->db, &err);
        int code = rc ? report_store(&err, rc) : COMMANDS[i].run(c);
        ka_store_close(c->db);
        free(c->store);
        return code;
    }
    ka_fail(&err, 0, "unknown command '%s'; see kernel-agent store --help", c->command);
    return report(&err, EXIT_USE);
}

int ka_store_main_with(int argc, char **argv, ka_verify_pair_fn verify, void *arg)
{
    struct command_line c = {.topk = 4, .verify = verify, .verify_arg = arg};
    struct ka_err err;
    if (parse_options(&c, argc, argv, &err))
        return report(&err, EXIT_USE);
    int code = c.help ? EXIT_OK : EXIT_USE;
    if (c.help || !c.command)
        fputs(USAGE, c.help ? stdout : stderr);
    else
        code = run_command(&c);
    return fflush(stdout) == 0 && !ferror(stdout) ? code : EXIT_INTERNAL;
}

int ka_store_main(int argc, char **argv)
{
    return ka_store_main_with(argc, argv, verify_by_check, NULL);
}
