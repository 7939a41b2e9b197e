/* How fast the search is against what memory allows. scripts/bench.py drives it.
 *
 *     bench_search --rows N [--threads T]    a matrix of N rows; each line "KIND SECONDS" on stdin is
 * answered by the seconds of the least disturbed call within that time bench_search embedding and memory, as
 * one JSON object on stdout
 *
 * KIND is `search` (product, heap, rules), `product` (the product alone) or `read` (a loop that only reads
 * the same matrix, with as many threads). Being asked in short turns, they meet the same disturbances as each
 * other and as NumPy, which is asked in between. */
#include <cblas.h>
#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include <wchar.h>

#include "base/files.h"
#include "rag/build.h"
#include "rag/search.h"

#define DIM KA_EMBED_DIM
#define THREADS_MAX 64

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Seconds of the least disturbed call of `work`, repeated for `seconds`, at least three times. */
static double measure(void (*work)(void *), void *arg, double seconds)
{
    double best = INFINITY, first = now(), start = first;
    for (int i = 0; i < 3 || start - first < seconds; i++) {
        work(arg);
        double end = now();
        best = fmin(best, end - start);
        start = now();
    }
    return best;
}

/* ---- the search and its bound ---- */

struct subject {
    struct ka_index *index;
    struct ka_index_query query;
    float *matrix; /* the index's vectors */
    size_t rows;
    float *scores;
    int threads;
};

static void do_search(void *arg)
{
    struct subject *s = arg;
    struct ka_hits hits = {0};
    if (ka_index_search(s->index, &s->query, &hits, NULL))
        abort();
    ka_hits_free(&hits);
}

static void do_product(void *arg)
{
    struct subject *s = arg;
    cblas_sgemv(CblasRowMajor, CblasNoTrans, (int)s->rows, DIM, 1, s->matrix, DIM, s->query.vector, 1, 0,
                s->scores, 1);
}

struct span {
    const float *from;
    size_t count;
    bool found;
};

/* Every byte once: libc's widest loop, looking for a word that no unit vector holds (a NaN). */
static void *read_span(void *arg)
{
    struct span *span = arg;
    span->found = wmemchr((const wchar_t *)(const void *)span->from, 0x7fc12345, span->count) != NULL;
    return NULL;
}

static void do_read(void *arg)
{
    struct subject *s = arg;
    struct span spans[THREADS_MAX];
    pthread_t threads[THREADS_MAX];
    size_t rows = s->rows, n = rows < 10000 ? 1 : (size_t)s->threads, done = 0;
    for (size_t i = 0; i < n; i++) {
        size_t end = rows * (i + 1) / n;
        spans[i] = (struct span){s->matrix + done * DIM, (end - done) * DIM, false};
        done = end;
        if (i > 0 && pthread_create(&threads[i], NULL, read_span, &spans[i]))
            abort();
    }
    read_span(&spans[0]);
    for (size_t i = 1; i < n; i++)
        pthread_join(threads[i], NULL);
    for (size_t i = 0; i < n; i++)
        if (spans[i].found)
            abort();
}

static void random_unit(uint64_t seed, float *vector)
{
    for (size_t i = 0; i < DIM; i++)
        vector[i] = (float)((double)(int64_t)ka_mix64(seed * DIM + i) / 0x1p63);
    ka_embed_normalise(vector, DIM);
}

static struct ka_index *random_index(size_t rows, float *matrix)
{
    struct ka_index *index = ka_index_new(DIM, rows);
    struct ka_index_row row = {"id", "dataset/family/id.py", "op", "owner", 1};
    for (size_t i = 0; index && i < rows; i++) {
        random_unit(i + 1, matrix + i * DIM);
        if (ka_index_add(index, &row, matrix + i * DIM))
            abort();
    }
    return index;
}

static void (*find_work(const char *kind))(void *)
{
    return strcmp(kind, "search") == 0    ? do_search
           : strcmp(kind, "product") == 0 ? do_product
           : strcmp(kind, "read") == 0    ? do_read
                                          : NULL;
}

static int serve(size_t rows, int threads)
{
    float vector[DIM];
    char line[64], kind[16];
    double seconds;
    random_unit(0, vector);
    struct subject s = {.matrix = calloc(rows * DIM, sizeof(float)),
                        .rows = rows,
                        .scores = calloc(rows, sizeof(float)),
                        .threads = threads};
    s.index = s.matrix ? random_index(rows, s.matrix) : NULL;
    if (!s.index || !s.scores)
        abort();
    s.query = (struct ka_index_query){.vector = vector, .topk = 4, .min_sim = -1};
    printf("ready\n");
    fflush(stdout);
    while (fgets(line, sizeof(line), stdin)) {
        void (*work)(void *) =
            sscanf(line, "%15s %lf", kind, &seconds) == 2 && seconds <= 10 ? find_work(kind) : NULL;
        if (!work)
            return 2;
        printf("%.9f\n", measure(work, &s, seconds));
        fflush(stdout);
    }
    ka_index_free(s.index);
    free(s.matrix);
    free(s.scores);
    return 0;
}

/* ---- embedding ---- */

/* A forward file of 300 lines: kernels of three loops each. */
static char *long_source(void)
{
    struct ka_buf source = {0};
    ka_buf_puts(&source, "import torch\nimport triton\nimport triton.language as tl\n\n");
    for (int k = 0; k < 16; k++) {
        ka_buf_printf(&source,
                      "@triton.jit\ndef kernel_%d(x_ptr, y_ptr, N, BLOCK: tl.constexpr):\n    row = "
                      "tl.program_id(%d)\n",
                      k, k % 3);
        for (int loop = 0; loop < 3; loop++)
            ka_buf_printf(&source,
                          "    acc = tl.zeros([BLOCK], dtype=tl.float32)\n"
                          "    for start in range(0, N, BLOCK):\n"
                          "        cols = start + tl.arange(0, BLOCK)\n"
                          "        x = tl.load(x_ptr + row * N + cols, mask=cols < N, other=0.0)\n"
                          "        acc += tl.exp2(x * %d.5) if start > %d else x\n",
                          loop, k);
    }
    ka_buf_puts(&source, "\n@autodiff(inputs_require_grad=(0,))\ndef run(x):\n    y = torch.empty_like(x)\n"
                         "    kernel_0[(x.shape[0],)](x, y, x.shape[1], BLOCK=64)\n    return y\n");
    return ka_buf_steal(&source);
}

static void do_embed(void *source)
{
    static struct ka_measures measures; /* as they are before anything is measured */
    float vector[DIM];
    struct ka_features features;
    if (ka_features_of(source, strlen(source), &features, NULL) ||
        ka_embed(&features, &measures, vector, NULL))
        abort();
    ka_features_free(&features);
}

static json_t *bench_embed(void)
{
    char *source = long_source();
    size_t lines = 0;
    for (const char *c = source; *c; c++)
        lines += *c == '\n';
    double seconds = measure(do_embed, source, 0.5);
    free(source);
    return json_pack("{s:I, s:f}", "lines", (json_int_t)lines, "ms", seconds * 1e3);
}

/* ---- resident memory ---- */

static long resident_kb(void)
{
    FILE *file = fopen("/proc/self/status", "r");
    char line[256];
    long kb = -1;
    while (file && fgets(line, sizeof(line), file))
        if (sscanf(line, "VmRSS: %ld", &kb) == 1)
            break;
    if (file)
        fclose(file);
    return kb;
}

/* In a process of its own: open the store, search it once, and say how much memory that takes. */
static int print_resident(const char *path)
{
    struct ka_store *store = NULL;
    struct ka_search *search = NULL;
    struct ka_search_result found = {0};
    struct ka_err err;
    char *source = long_source();
    struct ka_search_query query = {.forward = source, .topk = 4, .min_sim = -1};
    int rc = ka_store_open(path, KA_STORE_READ, &store, &err);
    if (rc == 0)
        rc = ka_search_open(store, &search, &err);
    if (rc == 0)
        rc = ka_search_run(search, &query, &found, &err);
    if (rc)
        fprintf(stderr, "%s\n", err.msg);
    else
        printf("%ld\n", resident_kb());
    ka_search_result_free(&found);
    ka_search_close(search);
    ka_store_close(store);
    free(source);
    return rc != 0;
}

/* Output of a command, as JSON; NULL when there is none. */
static json_t *command_json(const char *command)
{
    FILE *pipe = popen(command, "r");
    if (!pipe)
        return NULL;
    json_t *value = json_loadf(pipe, JSON_DECODE_ANY, NULL);
    pclose(pipe);
    return value;
}

static int write_pairs(const char *dir, int count, struct ka_err *err)
{
    char *source = long_source();
    int rc = 0;
    for (int i = 0; i < count && rc == 0; i++) {
        struct ka_buf text = {0}, path = {0};
        ka_buf_printf(&path, "%s/pair_%03d.py", dir, i);
        ka_buf_printf(&text, "%s\n\ndef helper(x):\n    return x * %d\n\n\n" KA_MARKER "\n", source, i);
        rc = ka_file_write(path.data, text.data, text.len, err);
        ka_buf_free(&text);
        ka_buf_free(&path);
    }
    free(source);
    return rc;
}

static json_t *bench_memory(void)
{
    char dir[] = "/tmp/kernel-agent-bench-XXXXXX", command[512];
    struct ka_err err;
    struct ka_build_report built;
    if (!mkdtemp(dir))
        return json_null();
    char *store = ka_path_join(dir, "pairs.db");
    json_t *kb = NULL;
    double start = now();
    if (write_pairs(dir, 500, &err) == 0 && ka_build(dir, store, NULL, NULL, &built, &err) == 0) {
        double seconds = now() - start;
        char self[256] = {0};
        if (readlink("/proc/self/exe", self, sizeof(self) - 1) < 0)
            abort();
        snprintf(command, sizeof(command), "'%s' --resident '%s'", self, store);
        json_t *answer = command_json(command);
        kb = json_pack("{s:i, s:f, s:f}", "pairs", 500, "build_s", seconds, "resident_mb",
                       (double)json_integer_value(answer) / 1024);
        json_decref(answer);
    }
    free(store);
    ka_rmtree(dir, NULL);
    return kb ? kb : json_null();
}

/* ---- the command line ---- */

static int usage(void)
{
    fputs("usage: bench_search [--rows N [--threads T]]\n", stderr);
    return 2;
}

int main(int argc, char **argv)
{
    size_t rows = 0;
    int threads = 1;
    if (argc == 3 && strcmp(argv[1], "--resident") == 0)
        return print_resident(argv[2]);
    for (int i = 1; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--rows") == 0)
            rows = strtoul(argv[i + 1], NULL, 10);
        else if (strcmp(argv[i], "--threads") == 0)
            threads = atoi(argv[i + 1]);
        else
            return usage();
    }
    if (argc % 2 == 0 || (argc > 1 && rows == 0) || rows > 10000000 || threads < 1 || threads > THREADS_MAX)
        return usage();
    openblas_set_num_threads(threads);
    if (rows)
        return serve(rows, threads);
    json_t *out = json_pack("{s:s+, s:i, s:o, s:o}", "product", "OpenBLAS ", openblas_get_corename(), "dim",
                            DIM, "embed", bench_embed(), "memory", bench_memory());
    json_dumpf(out, stdout, JSON_INDENT(2) | JSON_PRESERVE_ORDER | JSON_REAL_PRECISION(4));
    putchar('\n');
    json_decref(out);
    return 0;
}
