/* Ranking candidates where no time can be measured: a modelled cost from counted facts. Pure.
 *
 * The model, in bytes of memory traffic per case: bytes read + bytes written + 32 per atomic element (a
 * read-modify-write in the L2, serialised on contention) + 8 per spilled byte of each thread that runs +
 * 4096 per launch. The bytes are those of kernels and of torch operations. They count more where a
 * multiprocessor cannot hold the 16 warps that hide the latency of memory, by registers (65536) or shared
 * memory (227 KiB): 16 / warps times as much. What kernels take is that of the user's own sizes where these
 * are known to be larger than the counted ones. A kernel that does not fit at all costs INFINITY. The cost of
 * a candidate is the geometric mean over its cases. It orders schedules of one backward on one
 * machine-independent scale; it is no time, and no time is ever derived from it. */
#ifndef KA_RANK_H
#define KA_RANK_H

#include <jansson.h>

#include "base/base.h"

/* From a result of the operation `facts` (docs/protocol.md). INFINITY when it holds no usable case, or when a
 * kernel did not compile for the target. */
double ka_rank_cost(const json_t *facts);

/* How many programs of a kernel a multiprocessor of sm_90 holds at once, by their registers, shared memory
 * and warps; 0: not even one. */
double ka_rank_programs(const json_t *kernel);

/* Whether a candidate gives up what the model has no price for, beside another one: a case without atomic
 * adds has some, or one has fewer programs in its widest launch, and not for the sake of adding without
 * atomics. The tuner takes no modelled gain for that. */
bool ka_rank_gives_up(const json_t *facts, const json_t *other);

/* Whether a kernel of a candidate did not compile for some size, or spills for each more than 512 bytes of a
 * thread, and twice what any of the other one's does: there no time need be taken. */
bool ka_rank_is_hopeless(const json_t *facts, const json_t *other);

/* Whether a candidate has fewer than 32 programs in its widest launch on the user's own sizes, and fewer
 * than the other one, and not for the sake of adding without atomics: what moves least is one program that
 * does all, and nothing is slower. No modelled gain is worth that, whoever made the move. False where these
 * sizes are not known. */
bool ka_rank_ends_parallelism(const json_t *facts, const json_t *other);

#endif
