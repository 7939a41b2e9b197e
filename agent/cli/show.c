/* Text for people. Knows the documents of docs/protocol.md and the result object. */
#include "show.h"

#include <stdio.h>
#include <string.h>

#include "agent/core/compose.h"
#include "agent/core/fields.h"
#include "base/each.h"
#include "base/files.h"

#define PAIR_MAX ((size_t)16 << 20)

void ka_show_json(const json_t *doc, size_t flags)
{
    json_dumpf(doc, stdout, flags);
    putchar('\n');
}

int ka_show_problem(const struct ka_err *err, int code)
{
    fprintf(stderr, "kernel-agent: %s\n", err->msg);
    return code;
}

static long long int_of(const json_t *object, const char *name)
{
    return (long long)json_integer_value(json_object_get(object, name));
}

/* "M=8 N=100" */
static void print_dims(const json_t *dims)
{
    KA_EACH_MEMBER(dims, name, value) {
        KA_AUTO_FREE char *text = ka_text_of_value(value, JSON_COMPACT);
        printf(" %s=%s", name, text ? text : "?");
    }
}

static void print_number(const json_t *value)
{
    if (json_is_number(value))
        printf(" %12.3g", json_number_value(value));
    else
        printf(" %12s", "-");
}

static void print_gradients(const json_t *gradients)
{
    if (!json_array_size(gradients))
        return;
    printf("\n  %-16s %12s %12s   %s\n", "gradient", "error", "eager error", "worst shape");
    KA_EACH(gradients, i, gradient) {
        printf("  %-16s", ka_text_of(gradient, "name", "?"));
        print_number(json_object_get(gradient, "error"));
        print_number(json_object_get(gradient, "baseline_error"));
        printf("  ");
        if (json_is_object(json_object_get(gradient, "worst_shape")))
            print_dims(json_object_get(gradient, "worst_shape"));
        else
            printf(" a hidden shape");
        putchar('\n');
    }
}

static void print_shapes(const json_t *shapes)
{
    printf("  shapes: %lld of %lld required passed, %lld of %lld hidden passed", int_of(shapes, "passed"),
           int_of(shapes, "required"), int_of(shapes, "hidden_passed"), int_of(shapes, "hidden"));
    const json_t *skipped = json_object_get(shapes, "skipped");
    if (json_array_size(skipped))
        printf(", %zu skipped", json_array_size(skipped));
    putchar('\n');
    KA_EACH(skipped, i, entry) {
        const json_t *shape = json_object_get(entry, "shape");
        printf("  skipped");
        if (json_is_object(shape)) {
            putchar(' ');
            print_dims(shape);
        }
        printf(": %s\n", ka_text_of(entry, "reason", "?"));
    }
}

static void print_not_checked(const json_t *result)
{
    const json_t *error = json_object_get(result, "error");
    printf("%s: %s\n", ka_text_of(result, "stub", "?"), ka_text_of(error, "message", "not checked"));
    if (ka_text_of(error, "remedy", NULL))
        printf("  remedy: %s\n", ka_text_of(error, "remedy", ""));
}

void ka_show_result(const json_t *result)
{
    const char *verdict = ka_text_of(result, "verdict", "error");
    if (strcmp(verdict, "not_checked") == 0) {
        print_not_checked(result);
        return;
    }
    printf("%s: %s on %s\n", ka_text_of(result, "stub", ka_text_of(result, "file", "?")), verdict,
           ka_text_of(result, "device", "?"));
    if (int_of(result, "attempts"))
        print_shapes(json_object_get(result, "shapes"));
    print_gradients(json_object_get(result, "gradients"));
    KA_EACH(json_object_get(json_object_get(result, "checked"), "remarks"), i, remark)
        printf("%s  note: %s\n", i ? "" : "\n", json_is_string(remark) ? json_string_value(remark) : "?");
    const char *failures = ka_text_of(result, "failures", "");
    if (failures[0])
        printf("\n%s\n", failures);
    if (int_of(result, "attempts"))
        printf("\n  attempts %lld, snapshots %lld, roll-backs %lld, draft by %s, %.1f s\n",
               int_of(result, "attempts"), int_of(result, "snapshots"), int_of(result, "rollbacks"),
               ka_text_of(result, "draft", "nobody"), json_number_value(json_object_get(result, "seconds")));
    const char *pair = ka_text_of(result, "pair", NULL), *best = ka_text_of(result, "best", NULL);
    if (pair)
        printf("  pair:   %s\n", pair);
    else if (best)
        printf("  best so far (not verified): %s\n", best);
    if (ka_text_of(result, "request", NULL))
        printf("  waiting for an answer to: %s\n", ka_text_of(result, "request", ""));
    if (json_is_string(json_object_get(result, "run_dir"))) /* a check keeps no folder */
        printf("  run:    %s\n", ka_text_of(result, "run_dir", ""));
    if (json_is_object(json_object_get(result, "error")))
        ka_show_error(json_object_get(result, "error"), ka_text_of(result, "file", "?"));
}

void ka_show_backward(const char *pair)
{
    KA_AUTO_BUF struct ka_buf text = {0}, forward = {0}, backward = {0};
    struct ka_err err;
    if (pair && ka_file_read(pair, PAIR_MAX, &text, &err) == 0 &&
        ka_compose_split(ka_buf_str(&text), &forward, &backward, &err) == 0)
        printf("\n%s", ka_buf_str(&backward));
}

static void print_names(const char *title, const json_t *list)
{
    printf("%-9s", title);
    KA_EACH(list, i, item)
        printf("%s%s", i ? ", " : "",
               json_is_string(item) ? json_string_value(item) : ka_text_of(item, "name", "?"));
    puts(json_array_size(list) ? "" : "none");
}

static void print_kernel(const json_t *kernel)
{
    printf("kernel   %s, line %lld%s%s%s\n", ka_text_of(kernel, "name", "?"), int_of(kernel, "line"),
           json_is_true(json_object_get(kernel, "autotuned")) ? ", autotuned" : "",
           json_is_true(json_object_get(kernel, "heuristics")) ? ", heuristics" : "",
           json_is_true(json_object_get(kernel, "helper")) ? ", helper" : "");
}

void ka_show_inspect(const json_t *inspect, const char *path)
{
    const json_t *stub = json_object_get(inspect, "stub"), *has = json_object_get(inspect, "has");
    printf("file     %s\nstub     %s, line %lld\n", path, ka_text_of(stub, "name", "?"),
           int_of(stub, "line"));
    print_names("params", json_object_get(stub, "params"));
    print_names("grads", json_object_get(inspect, "grads"));
    if (json_array_size(json_object_get(inspect, "functions")) > 1)
        print_names("of", json_object_get(inspect, "functions"));
    KA_EACH(json_object_get(inspect, "kernels"), i, item)
        print_kernel(item);
    print_names("ops", json_object_get(inspect, "ops"));
    KA_EACH(json_object_get(inspect, "sweep"), i, item) {
        printf("shape   ");
        print_dims(json_object_get(item, "dims"));
        puts(json_is_false(json_object_get(item, "required")) ? "  (not required)" : "");
    }
    printf("dtype    %s\n", ka_text_of(inspect, "dtype", "?"));
    printf("has      reference %s, flops %s, setup %s\n",
           json_is_true(json_object_get(has, "reference")) ? "yes" : "no",
           json_is_true(json_object_get(has, "flops")) ? "yes" : "no",
           json_is_true(json_object_get(has, "setup")) ? "yes" : "no");
    KA_EACH(json_object_get(inspect, "device_answers"), i, item)
        printf("answered line %lld: %s = %s\n", int_of(item, "line"), ka_text_of(item, "asked", "?"),
               ka_text_of(item, "answer", "?"));
}

void ka_show_error(const json_t *error, const char *path)
{
    const char *file = ka_text_of(error, "file", path), *remedy = ka_text_of(error, "remedy", NULL);
    const char *trace = ka_text_of(error, "traceback", NULL);
    fflush(stdout);
    fprintf(stderr, "kernel-agent: %s", file);
    if (int_of(error, "line"))
        fprintf(stderr, ":%lld", int_of(error, "line"));
    fprintf(stderr, ": %s (%s)\n", ka_text_of(error, "message", "unknown error"),
            ka_text_of(error, "kind", "error"));
    if (json_is_object(json_object_get(error, "dims"))) {
        KA_AUTO_FREE char *dims = ka_text_of_value(json_object_get(error, "dims"), JSON_COMPACT);
        fprintf(stderr, "  shape: %s\n", dims);
    }
    if (remedy)
        fprintf(stderr, "  remedy: %s\n", remedy);
    if (trace && trace[0])
        fprintf(stderr, "%s\n", trace);
}
