/* Cases to children and back. Knows what a case costs and where its result lies, not what it means. */
#include "fan.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/core/deal.h"
#include "agent/core/plan.h"
#include "agent/io/work.h"
#include "base/each.h"
#include "base/log.h"
#include "base/threads.h"
#include "cases.h"
#include "operations.h"
#include "result.h"
#include "sizes.h"

/* Seconds that any case costs: loading, compiling, launching. On a GPU a context and libraries for a child
 * take less than half of one; more where many programs want one. */
#define START 0.1
#define CHILD_GPU 0.4
#define ANEW_GPU 0.5 /* kernels are compiled for each kind of sizes, if nothing more is known */
#define RATE 1e7     /* products of sizes a second, */
#define RATE_GPU 2e8 /* by the interpreter and by a GPU */

struct agreed {
    json_int_t id;
    int rc;
    struct ka_err why;
};

struct part {
    struct ka_fan *fan;
    struct ka_run_child *child; /* NULL: it has ended */
    json_t *cases;
    bool ended;
    struct ka_op_result result; /* child and doc are ours */
    struct agreed *agreed;      /* one a case, with `agree` */
    size_t released;            /* cases */
};

struct ka_fan {
    struct ka_run *run;
    ka_fan_fn changed;
    void *arg;
    char *operation;
    bool agree;
    unsigned holders, working; /* threads that read what was found */
    bool orphan;               /* nobody holds it; the last thread's end frees */
    size_t count, ended;
    struct part *parts; /* and room for one more, and for one a case */
    json_t *crowded;    /* cases for which the GPU's memory ran out while others used it */
    json_t *not_run;    /* cases behind one that left a child's GPU unusable */
    char *file;
    json_t *extra; /* of every request; NULL once there was the one more */
};

/* ---- the end */

static void free_part(struct part *part)
{
    json_decref(part->cases);
    json_decref(part->result.doc);
    ka_child_result_free(part->result.child);
    free(part->agreed);
}

static void free_fan(struct ka_fan *fan)
{
    for (size_t i = 0; i < fan->count; i++)
        free_part(&fan->parts[i]);
    free(fan->parts);
    free(fan->operation);
    free(fan->file);
    json_decref(fan->crowded);
    json_decref(fan->not_run);
    json_decref(fan->extra);
    free(fan);
}

struct ka_fan *ka_fan_hold(struct ka_fan *fan)
{
    fan->holders++;
    return fan;
}

void ka_fan_stop(struct ka_fan *fan)
{
    for (size_t i = 0; i < fan->count; i++) {
        if (fan->parts[i].child)
            ka_run_child_cancel(fan->parts[i].child);
        fan->parts[i].child = NULL;
    }
    fan->changed = NULL;
}

void ka_fan_free(struct ka_fan *fan)
{
    if (!fan || --fan->holders)
        return;
    ka_fan_stop(fan);
    fan->orphan = true;
    if (!fan->working)
        free_fan(fan);
}

void ka_fan_listen(struct ka_fan *fan, ka_fan_fn changed, void *arg)
{
    fan->changed = changed;
    fan->arg = arg;
}

/* ---- a part has ended */

static void run_the_rest(struct ka_fan *fan);
static void try_alone(struct ka_fan *fan);

static void end_part(struct part *part)
{
    struct ka_fan *fan = part->fan;
    part->ended = true;
    fan->ended++;
    if (fan->ended == fan->count && json_array_size(fan->not_run))
        run_the_rest(fan);
    else if (fan->ended == fan->count && json_array_size(fan->crowded))
        try_alone(fan);
    if (fan->changed)
        fan->changed(fan->run, fan, fan->arg);
}

static void compare_case(void *arg, size_t i)
{
    struct part *part = arg;
    struct agreed *one = &part->agreed[i];
    const json_t *entry = ka_case_find(part->result.doc, one->id);
    struct ka_tensors *tensors = NULL;
    one->rc = -ENODATA;
    if (!json_is_true(json_object_get(entry, "ok"))) {
        ka_case_error(entry, &one->why);
        return;
    }
    one->rc = ka_case_open(part->result.child, one->id, &tensors, &one->why);
    if (one->rc == 0)
        one->rc = ka_case_agrees(tensors, entry, json_array_get(part->cases, i), &one->why);
    ka_tensors_free(tensors);
}

/* On threads: nobody else looks at the part's documents and files before it has ended. */
static void compare(void *arg)
{
    struct part *part = arg;
    ka_threads_run(part->agreed ? json_array_size(part->cases) : 0, compare_case, part);
}

static void on_compared(void *arg)
{
    struct part *part = arg;
    struct ka_fan *fan = part->fan;
    fan->working--;
    if (!fan->orphan)
        end_part(part);
    else if (!fan->working)
        free_fan(fan);
}

static void begin_work(struct part *part)
{
    part->fan->working++;
    ka_work_start(part->fan->run->app->loop, compare, on_compared, part);
}

static void compare_part(struct part *part)
{
    size_t count = json_array_size(part->cases);
    part->agreed = ka_calloc(count, sizeof(*part->agreed));
    KA_EACH(part->cases, i, item)
        part->agreed[i].id = json_integer_value(json_object_get(item, "id"));
    begin_work(part);
}

/* Whether a case ended with an error that is `how`. */
static bool ended_by(const struct part *part, const json_t *item, const char *how)
{
    const json_t *entry = ka_case_find(part->result.doc, json_integer_value(json_object_get(item, "id")));
    return json_is_true(json_object_get(json_object_get(entry, "error"), how));
}

static void take(struct part *part, const char *how, json_t *list)
{
    for (size_t i = json_array_size(part->cases); i-- > 0;) {
        json_t *item = json_array_get(part->cases, i);
        if (!ended_by(part, item, how))
            continue;
        json_array_insert(list, 0, item);
        json_array_remove(part->cases, i);
    }
}

static bool has_another(const struct part *part, const char *how)
{
    KA_EACH(part->cases, i, item)
        if (!ended_by(part, item, how))
            return true;
    return false;
}

/* Several children share the GPU's memory. A case that found none left is not judged by that: it is tried
 * once more, when the others are through, of this operation and of other programs. Nor is a case by one
 * before it that left the GPU unusable for the child: at least that one is never asked again. */
static void take_back(struct part *part)
{
    struct ka_fan *fan = part->fan;
    if (!fan->extra)
        return;
    if (has_another(part, "not_run"))
        take(part, "not_run", fan->not_run);
    take(part, "out_of_memory", fan->crowded);
}

static void on_child(struct ka_run *run, void *arg, const struct ka_op_result *result)
{
    struct part *part = arg;
    part->child = NULL;
    part->result = *result;
    part->result.operation = part->fan->operation;
    part->result.doc = json_incref(result->doc);
    part->result.child = ka_child_result_keep(result->child);
    if (result->status == KA_OP_OK && ka_run_on_gpu(run))
        take_back(part);
    if (part->fan->agree && result->status == KA_OP_OK)
        compare_part(part);
    else
        end_part(part);
}

/* ---- the start */

/* A child that cannot be started: the part has ended with that reason, as if it had died at once. */
static void start_part(struct part *part, const char *label, bool emptied)
{
    struct ka_fan *fan = part->fan;
    struct ka_err err;
    struct ka_run_child_req req = {.operation = fan->operation,
                                   .file = fan->file,
                                   .extra = json_copy(fan->extra),
                                   .part = label,
                                   .emptied = emptied};
    json_object_set(req.extra, "cases", part->cases);
    part->child = ka_run_child_start(fan->run, &req, on_child, part, &err);
    if (!part->child) {
        part->result = (struct ka_op_result){.operation = fan->operation, .status = KA_OP_DIED};
        snprintf(part->result.message, sizeof(part->result.message), "%.1000s", err.msg);
        begin_work(part);
    }
}

static void run_the_rest(struct ka_fan *fan)
{
    struct part *part = &fan->parts[fan->count++];
    part->fan = fan;
    part->cases = fan->not_run;
    fan->not_run = json_array();
    start_part(part, "after one that left the GPU unusable", false);
}

/* One more part, the last, when nobody else is on the card: nothing of it is tried again. */
static void try_alone(struct ka_fan *fan)
{
    struct part *part = &fan->parts[fan->count++];
    part->fan = fan;
    part->cases = fan->crowded;
    fan->crowded = NULL;
    ka_log(KA_LOG_INFO, "%s: %zu cases once more, alone: the GPU had no room for them", ka_run_name(fan->run),
           json_array_size(part->cases));
    start_part(part, "once more, alone", true);
    json_decref(fan->extra);
    fan->extra = NULL;
}

static size_t width(const struct ka_run *run)
{
    size_t most = ka_run_on_gpu(run) ? run->app->gpu_fan_width : run->app->fan_width;
    return most ? most : 1;
}

static json_t *deal(const struct ka_run *run, const struct ka_fan_req *req)
{
    struct ka_deal_of of = {
        .most = width(run), .start = START, .rate = RATE, .together = req->together, .known = req->shapes};
    if (ka_run_on_gpu(run)) { /* compiling is most of it, and no shape's own */
        double known = ka_plan_seconds(req->shapes);
        double start = run->app->gpu_start;
        of.child = start > CHILD_GPU ? start : CHILD_GPU;
        of.anew = known > ANEW_GPU ? known : ANEW_GPU;
        of.rate = RATE_GPU;
        of.known = NULL;
    }
    return ka_deal(req->cases, &of);
}

struct ka_fan *ka_fan_start(struct ka_run *run, struct ka_fan_req *req, ka_fan_fn changed, void *arg)
{
    struct ka_fan *fan = ka_calloc(1, sizeof(*fan));
    *fan = (struct ka_fan){.run = run, .changed = changed, .arg = arg, .agree = req->agree, .holders = 1};
    fan->operation = ka_strdup(req->operation);
    fan->file = ka_strdup(req->file);
    fan->crowded = json_array();
    fan->not_run = json_array();
    fan->extra = req->extra ? req->extra : json_object();
    req->extra = NULL;
    json_t *dealt = deal(run, req);
    fan->count = json_array_size(dealt);
    fan->parts = ka_calloc(fan->count + 1 + json_array_size(req->cases), sizeof(*fan->parts));
    for (size_t i = 0; i < fan->count; i++) {
        char label[96];
        snprintf(label, sizeof(label), "%s%s%zu of %zu", req->what ? req->what : "", req->what ? ", " : "",
                 i + 1, fan->count);
        fan->parts[i].fan = fan;
        fan->parts[i].cases = json_copy(json_array_get(dealt, i));
        start_part(&fan->parts[i], label, false);
    }
    json_decref(dealt);
    return fan;
}

/* ---- looking things up */

static bool holds(const struct part *part, json_int_t id, size_t *at)
{
    KA_EACH(part->cases, i, item) {
        if (json_integer_value(json_object_get(item, "id")) == id) {
            *at = i;
            return true;
        }
    }
    return false;
}

bool ka_fan_find(const struct ka_fan *fan, json_int_t id, struct ka_fan_found *found)
{
    size_t at = 0, i = 0;
    while (i < fan->count && !holds(&fan->parts[i], id, &at))
        i++;
    if (i == fan->count || !fan->parts[i].ended)
        return false;
    const struct part *part = &fan->parts[i];
    *found = (struct ka_fan_found){
        .status = part->result.status,
        .message = part->result.message,
        .doc = part->result.doc,
        .files = part->result.child,
    };
    if (part->result.status == KA_OP_OK)
        found->entry = ka_case_find(part->result.doc, id);
    if (part->agreed) {
        found->agrees = part->agreed[at].rc;
        found->why = &part->agreed[at].why;
    }
    return true;
}

void ka_fan_release(struct ka_fan *fan, json_int_t id)
{
    size_t at = 0;
    for (size_t i = 0; i < fan->count; i++) {
        struct part *part = &fan->parts[i];
        if (!holds(part, id, &at) || ++part->released < json_array_size(part->cases))
            continue;
        ka_child_result_free(part->result.child);
        part->result.child = NULL;
    }
}

void ka_fan_count(const struct ka_fan *fan, size_t *done, size_t *all)
{
    *done = *all = 0;
    for (size_t i = 0; i < fan->count; i++) {
        *all += json_array_size(fan->parts[i].cases);
        *done += fan->parts[i].ended ? json_array_size(fan->parts[i].cases) : 0;
    }
}

bool ka_fan_ended(const struct ka_fan *fan)
{
    return fan->ended == fan->count;
}

const struct ka_op_result *ka_fan_failed(const struct ka_fan *fan, enum ka_op_status status)
{
    for (size_t i = 0; i < fan->count; i++)
        if (fan->parts[i].ended && fan->parts[i].result.status == status)
            return &fan->parts[i].result;
    return NULL;
}
