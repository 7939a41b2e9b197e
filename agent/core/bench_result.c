/* Samples to medians, floors and ratios; what cannot be a time is refused. Knows nothing of children. */
#include "bench_result.h"

#include <math.h>
#include <string.h>

#include "base/each.h"
#include "fields.h"
#include "times.h"

#define L2_FASTER 8.0  /* than memory, at most */
#define LATE_MS 0.1    /* that waiting for an idle device may take */
#define LATE_SHARE 0.1 /* of the time itself */

static const char *const passes[] = {"bwd", "fwd", "both"};
static const char *const subjects[] = {"ours", "eager", "compile", "baseline"};
static const char *const ways[] = {"alone", "graph"};

const char *ka_bench_pass(size_t i)
{
    return i < KA_COUNT(passes) ? passes[i] : NULL;
}

const char *ka_bench_subject(size_t i)
{
    return i < KA_COUNT(subjects) ? subjects[i] : NULL;
}

/* JSON has no infinity; what is so large is no figure. */
static double told(double value)
{
    return isfinite(value) ? value : 0.0;
}

/* What the device gives, and what one pass of one shape asks of it. */
struct need {
    double bandwidth, rate; /* bytes and operations a millisecond; 0: unknown */
    double l2;
    double bytes, flops, floor_ms, least_ms;
    bool by_flops;
};

/* The best of some runs of one thing: a ceiling is what was once reached. */
static double best_rate(const json_t *measured, const char *amount)
{
    double least = INFINITY;
    KA_EACH(json_object_get(measured, "ms"), i, item) {
        double ms = json_is_number(item) ? json_number_value(item) : 0.0;
        if (isfinite(ms) && ms > 0.0 && ms < least)
            least = ms;
    }
    double all = ka_number_of(measured, amount, 0.0);
    return isfinite(least) && all > 0.0 ? told(all / least) : 0.0;
}

static const json_t *case_of(const json_t *result, const json_t *shape)
{
    KA_EACH(json_object_get(result, "cases"), i, entry) {
        if (json_equal(json_object_get(entry, "id"), json_object_get(shape, "id")))
            return entry;
    }
    return NULL;
}

static struct need need_of(const json_t *ceilings, const json_t *needed, const char *pass)
{
    struct need need = {
        .bandwidth = best_rate(json_object_get(ceilings, "copy"), "bytes"),
        .rate = best_rate(json_object_get(ceilings, "matmul"), "flops"),
        .l2 = ka_number_of(json_object_get(ceilings, "device"), "l2_bytes", 0.0),
        .bytes = ka_number_of(json_object_get(needed, "bytes"), pass, 0.0),
        .flops = ka_number_of(json_object_get(needed, "flops"), pass, 0.0),
    };
    double least = ka_number_of(json_object_get(needed, "least_bytes"), pass, 0.0);
    if (need.bandwidth > 0.0) {
        need.floor_ms = told(need.bytes / need.bandwidth);
        need.least_ms = told(fmax(least - need.l2, least / L2_FASTER) / need.bandwidth);
    }
    double products = need.rate > 0.0 ? told(need.flops / need.rate) : 0.0;
    need.by_flops = products > need.floor_ms;
    need.floor_ms = fmax(need.floor_ms, products);
    return need;
}

json_t *ka_bench_floor(const json_t *roof, const char *pass)
{
    struct need need = need_of(roof, roof, pass);
    return json_pack("{s:f, s:s, s:f, s:f, s:f, s:f}", "floor_ms", need.floor_ms, "floor_of",
                     need.by_flops ? "flops" : "bytes", "bytes", told(need.bytes), "bytes_per_s",
                     told(need.bandwidth * 1e3), "flops", told(need.flops), "flops_per_s",
                     told(need.rate * 1e3));
}

static json_t *refused(json_t *why)
{
    return json_pack("{s:o}", "refused", why);
}

static json_t *time_of(const json_t *samples, const struct need *need, double late_ms)
{
    struct ka_times times;
    if (ka_times_of(samples, &times))
        return refused(json_string("not all samples are times"));
    if (times.median < need->least_ms)
        return refused(json_sprintf("%.4g ms is less than the %.4g ms that writing the results alone takes",
                                    times.median, need->least_ms));
    if (late_ms > LATE_MS + LATE_SHARE * times.median)
        return refused(json_sprintf("the device went on for %.4g ms after the call", late_ms));
    json_t *made = json_pack("{s:f, s:f, s:f, s:I, s:f}", "median_ms", times.median, "low_ms", times.low,
                             "high_ms", times.high, "samples", (json_int_t)times.count, "bytes_per_s",
                             told(need->bytes / times.median * 1e3));
    if (need->flops > 0.0)
        json_object_set_new(made, "flops_per_s", json_real(told(need->flops / times.median * 1e3)));
    if (times.median < need->floor_ms)
        json_object_set_new(made, "below_floor", json_true());
    return made;
}

static const json_t *subject_of(const json_t *entry, const char *name)
{
    KA_EACH(json_object_get(entry, "subjects"), i, item) {
        if (ka_is_text(item, "name", name))
            return item;
    }
    return NULL;
}

static json_t *pass_of(const json_t *entry, const struct need *need, const char *pass)
{
    json_t *all = json_object();
    for (size_t i = 0; i < KA_COUNT(subjects); i++) {
        const json_t *subject = subject_of(entry, subjects[i]);
        const json_t *times = json_object_get(json_object_get(subject, "times"), pass);
        json_t *made = json_object();
        struct ka_times late = {0};
        ka_times_of(json_object_get(subject, "late"), &late);
        for (size_t k = 0; k < KA_COUNT(ways); k++) {
            const json_t *samples = json_object_get(times, ways[k]);
            if (samples)
                json_object_set_new(made, ways[k], time_of(samples, need, late.median));
        }
        if (json_object_size(made))
            json_object_set_new(all, subjects[i], made);
        else
            json_decref(made);
    }
    return json_pack("{s:f, s:s, s:f, s:o}", "floor_ms", need->floor_ms, "floor_of",
                     need->by_flops ? "flops" : "bytes", "least_ms", need->least_ms, "subjects", all);
}

static void add_text(json_t *into, const char *name, const json_t *subject, const char *member)
{
    const char *text = ka_text_of(subject, member, NULL);
    KA_AUTO_BUF struct ka_buf cut = {0};
    if (!text)
        return;
    ka_buf_printf(&cut, "%.600s", text);
    json_object_set_new(into, name, json_string(ka_buf_str(&cut)));
}

/* What is known of each subject apart from its times. */
static void add_subjects(json_t *shape, const json_t *entry)
{
    json_t *memory = json_object(), *missing = json_object(), *no_graph = json_object();
    json_t *difference = json_object();
    for (size_t i = 0; i < KA_COUNT(subjects); i++) {
        const json_t *subject = subject_of(entry, subjects[i]);
        double gap = ka_number_of(subject, "difference", -1.0);
        add_text(missing, subjects[i], subject, "missing");
        add_text(no_graph, subjects[i], subject, "no_graph");
        if (gap >= 0.0)
            json_object_set_new(difference, subjects[i], json_real(gap));
        if (json_object_get(subject, "times"))
            json_object_set_new(memory, subjects[i],
                                json_pack("{s:f, s:f}", "saved_bytes",
                                          ka_number_of(subject, "saved_bytes", 0.0), "peak_bytes",
                                          ka_number_of(subject, "peak_bytes", 0.0)));
    }
    json_object_set_new(shape, "memory", memory);
    json_object_set_new(shape, "missing", missing);
    json_object_set_new(shape, "no_graph", no_graph);
    json_object_set_new(shape, "difference", difference);
}

static json_t *shape_of(const struct ka_bench_facts *facts, const json_t *asked)
{
    const json_t *entry = case_of(facts->timed, asked), *needed = case_of(facts->ceilings, asked);
    json_t *shape = json_pack("{s:O, s:{}}", "dims", json_object_get(asked, "dims"), "passes");
    const json_t *failed = !json_is_true(json_object_get(needed, "ok")) ? needed : entry;
    if (!json_is_true(json_object_get(failed, "ok"))) {
        json_t *error = json_object_get(failed, "error");
        json_object_set_new(shape, "error",
                            json_is_object(error) ? json_incref(error)
                                                  : json_pack("{s:s}", "message", "no result"));
        return shape;
    }
    json_object_set_new(shape, "rounds", json_integer(json_integer_value(json_object_get(entry, "rounds"))));
    for (size_t i = 0; i < KA_COUNT(passes); i++) {
        struct need need = need_of(facts->ceilings, needed, passes[i]);
        json_t *made = pass_of(entry, &need, passes[i]);
        if (json_object_size(json_object_get(made, "subjects")))
            json_object_set(json_object_get(shape, "passes"), passes[i], made);
        json_decref(made);
    }
    add_subjects(shape, entry);
    return shape;
}

static bool read_time(const json_t *shape, const char *pass, const char *subject, const char *way,
                      struct ka_times *out)
{
    const json_t *found =
        json_object_get(json_object_get(json_object_get(shape, "passes"), pass), "subjects");
    found = json_object_get(json_object_get(found, subject), way);
    *out = (struct ka_times){.median = ka_number_of(found, "median_ms", 0.0),
                             .low = ka_number_of(found, "low_ms", 0.0),
                             .high = ka_number_of(found, "high_ms", 0.0)};
    return out->median > 0.0;
}

/* One subject beside ours over all shapes on which both have a time; NULL where there is none. */
static json_t *mean_of(const json_t *shapes, const char *pass, const char *way, const char *subject,
                       double min_rel)
{
    double sum = 0.0;
    json_int_t count = 0, faster = 0, slower = 0;
    KA_EACH(shapes, i, shape) {
        struct ka_times ours, other;
        if (!read_time(shape, pass, subjects[0], way, &ours) || !read_time(shape, pass, subject, way, &other))
            continue;
        sum += log(other.median / ours.median);
        faster += ka_times_faster(&ours, &other, min_rel);
        slower += ka_times_faster(&other, &ours, min_rel);
        count++;
    }
    return count ? json_pack("{s:f, s:I, s:I, s:I}", "ratio", told(exp(sum / (double)count)), "shapes", count,
                             "faster", faster, "slower", slower)
                 : NULL;
}

static json_t *geomean_of(const json_t *shapes, double min_rel)
{
    json_t *all = json_object();
    for (size_t i = 0; i < KA_COUNT(passes); i++) {
        json_t *pass = json_pack("{s:{}, s:{}}", ways[0], ways[1]);
        bool any = false;
        for (size_t k = 0; k < KA_COUNT(ways); k++) {
            for (size_t s = 1; s < KA_COUNT(subjects); s++) {
                json_t *mean = mean_of(shapes, passes[i], ways[k], subjects[s], min_rel);
                any = any || mean;
                if (mean)
                    json_object_set_new(json_object_get(pass, ways[k]), subjects[s], mean);
            }
        }
        if (any)
            json_object_set(all, passes[i], pass);
        json_decref(pass);
    }
    return all;
}

/* Milliseconds of all samples, whoever's they are. */
static double claimed_ms(const json_t *value)
{
    double sum = 0.0;
    KA_EACH(value, i, item)
        sum += json_is_number(item) ? json_number_value(item) : claimed_ms(item);
    KA_EACH_MEMBER(value, name, item) {
        if (json_is_array(item) || json_is_object(item))
            sum += claimed_ms(item);
    }
    return sum;
}

static double claimed_by(const json_t *timed)
{
    double sum = 0.0;
    KA_EACH(json_object_get(timed, "cases"), i, entry) {
        KA_EACH(json_object_get(entry, "subjects"), k, subject)
            sum += claimed_ms(json_object_get(subject, "times"));
    }
    return sum / 1e3;
}

json_t *ka_bench_result(const struct ka_bench_facts *facts)
{
    json_t *shapes = json_array();
    const json_t *matmul = json_object_get(facts->ceilings, "matmul");
    double claimed = claimed_by(facts->timed);
    json_t *refusal = json_null();
    if (!(claimed <= facts->wall_seconds))
        refusal = json_sprintf("the times together are %.1f s, and the process ran for %.1f s", claimed,
                               facts->wall_seconds);
    else
        KA_EACH(facts->shapes, i, asked)
            json_array_append_new(shapes, shape_of(facts, asked));
    json_t *device = json_object_get(facts->ceilings, "device");
    return json_pack("{s:O?, s:{s:f, s:f, s:s*}, s:f, s:f, s:o, s:o, s:o}", "device", device, "ceilings",
                     "bytes_per_s", told(best_rate(json_object_get(facts->ceilings, "copy"), "bytes") * 1e3),
                     "flops_per_s", told(best_rate(matmul, "flops") * 1e3), "dtype",
                     ka_text_of(matmul, "dtype", NULL), "wall_seconds", facts->wall_seconds,
                     "claimed_seconds", told(claimed), "refused", refusal, "geomean",
                     geomean_of(shapes, facts->min_rel_impr), "shapes", shapes);
}
