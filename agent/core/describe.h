/* JSON results of the children (docs/protocol.md) and of the run, told in Markdown: for the model's prompt
 * and for people.
 *
 * All functions append to `out` and are tolerant: what is missing or of the wrong type is left out, NULL is
 * nothing. They return 0, -EFBIG or -ENOMEM. None prints dims of hidden shapes. Pure. */
#ifndef KA_DESCRIBE_H
#define KA_DESCRIBE_H

#include <jansson.h>

#include "base/base.h"
#include "place.h"

/* Operation inspect: the stub's signature, gradients, kernels, operations, sweep. */
int ka_describe_inspect(const json_t *inspect, struct ka_buf *out);

/* The shapes of a run (plan.h) that its user knows of: required and optional ones, never hidden ones; and
 * shape and dtype of each tensor on the first of them. */
int ka_describe_shapes(const json_t *shapes, struct ka_buf *out);

/* Operation differentiate: tape, atomics, schedule and its alternatives, how each line was handled; or what
 * was refused. */
int ka_describe_draft(const json_t *draft, struct ka_buf *out);

/* The first kernel of the backward that the target's compiler refuses, with the line and the reason, as a
 * sentence without a full stop; false, and nothing is added, where it takes all of them. Reads a result of
 * operation facts, whose lines are those of `place`. */
bool ka_describe_uncompiled(const json_t *facts, const struct ka_place *place, struct ka_buf *out);

/* What the candidate raised in every case of operation facts, at one line, and would in any other case: as
 * ka_place_error() has it. False, and nothing is added, where that is not known. */
bool ka_describe_raised(const json_t *facts, const struct ka_place *place, struct ka_buf *out);

/* The times of a race ("times" of a candidate's facts, agent/run/racing.h) in a sentence; nothing where there
 * are none. */
void ka_describe_times(const json_t *times, struct ka_buf *out);
/* Where the time goes: of each kernel by itself, and what the passes take at least; nothing where the race
 * did not measure it. */
void ka_describe_kernels(const json_t *times, struct ka_buf *out);

/* Operation facts: those times, traffic of forward and backward, and a table of the compiled kernels. Says
 * that what was counted is no time. */
int ka_describe_facts(const json_t *facts, struct ka_buf *out);

/* One attempt of a run's history in one line: phase, origin, direction, note, verdict, cost, and the first
 * sentence of what failed; or why the answer was no use. */
int ka_describe_attempt(const json_t *entry, struct ka_buf *out);

/* Append what of a verdict's facts says most in one line: its first finding, else its first line. */
void ka_describe_finding(const char *facts, struct ka_buf *out);

/* "M=8, N=100" of a dims object; a text as it is; anything else as JSON. */
int ka_describe_dims(const json_t *dims, struct ka_buf *out);

/* The sums over all cases and the worst kernel of a facts result, for comparing two of them. -1 for what is
 * not there. */
struct ka_describe_sums {
    double launches, bytes_read, bytes_written, atomics, programs;
    double registers, spills, shared; /* maxima over the kernels */
    double kernels;
};
void ka_describe_sum(const json_t *facts, struct ka_describe_sums *sums);

/* "12.5 KiB"; free of locale. */
void ka_describe_bytes(double bytes, char *out, size_t size);

#endif
