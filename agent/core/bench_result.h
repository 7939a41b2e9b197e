/* What a benchmark says: the samples of operation bench, held against the ceilings that another process has
 * measured, and against the clock of this one. Pure.
 *
 * A floor is what the bytes of a pass (inputs, outputs and gradients once each) take at the measured
 * bandwidth, or its operations at the measured rate of products, whichever is longer. A backward that does
 * not need all inputs may be below it; that is said. What is refused, and has no time in the result, is
 *
 *   - what is less than writing the results alone takes: what the L2 holds of them is let off with an eighth;
 *   - what the device went on with after the call's stream had ended, by more than a tenth;
 *   - everything, where all times together are more than the time for which the process ran.
 *
 * The result, which is also what bench.json holds beside file, stub, versions and clocks:
 *
 *   {"device": {...}, "ceilings": {"bytes_per_s", "flops_per_s", "dtype"}, "wall_seconds",
 *    "claimed_seconds", "refused": null | "sentence",
 *    "shapes": [{"dims", "error"?: {...}, "rounds", "passes": {"bwd": {"floor_ms",
 *      "floor_of": "bytes" | "flops", "least_ms", "subjects": {"ours": {"alone": TIME, "graph": TIME}}}},
 *      "memory": {"ours": {"saved_bytes", "peak_bytes"}}, "missing": {"baseline": "why"},
 *      "no_graph": {"ours": "why"}, "difference": {"ours": 1e-7}}],
 *    "geomean": {"bwd": {"alone": {"eager": {"ratio", "shapes", "faster", "slower"}}}}}
 *   TIME = {"median_ms", "low_ms", "high_ms", "samples", "bytes_per_s", "flops_per_s"?, "below_floor"?}
 *        | {"refused": "sentence"}
 *
 * A ratio is the other's time over ours: above 1, ours is faster. "faster" and "slower" are how many of the
 * shapes are so by ka_times_faster(). */
#ifndef KA_BENCH_RESULT_H
#define KA_BENCH_RESULT_H

#include <jansson.h>

struct ka_bench_facts {
    const json_t *shapes;   /* [{"id", "dims"}], what was asked for */
    const json_t *ceilings; /* result of operation ceilings */
    const json_t *timed;    /* result of operation bench */
    double wall_seconds;    /* for which the child ran that timed, by the daemon's clock */
    double min_rel_impr;
};

/* A new reference. */
json_t *ka_bench_result(const struct ka_bench_facts *facts);

/* What a pass takes at least, of one result that has both ceilings and what the shape asks of them:
 * {"floor_ms", "floor_of", "bytes", "bytes_per_s", "flops", "flops_per_s"} (new reference), 0 where unknown.
 */
json_t *ka_bench_floor(const json_t *roof, const char *pass);

/* Passes and subjects in the order in which they are shown; NULL past the last. */
const char *ka_bench_pass(size_t i);
const char *ka_bench_subject(size_t i); /* the first is ours */

#endif
