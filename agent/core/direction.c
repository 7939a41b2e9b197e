/* Directions: a schedule, and past the last one a schedule with an emphasis. The names are those of
 * prompts/system.md. */
#include "direction.h"

static const char *const schedules[] = {
    "one program owns each row or block of a gradient, loops over all that adds to it and stores once "
    "(`swap_owner`, `row_reduce_correct`)",
    "each program takes several rows and sums them in registers, stores one partial sum, and a second kernel "
    "adds these up (`partials_then_reduce`)",
    "the reduction is split over more programs, which meet in float32 atomics (`atomic_accumulate`)",
    "a kernel for each gradient, with the grid and the tiles that suit that gradient",
    "one kernel for all gradients, which reads every tile of the inputs and the upstream once",
    "two passes: the first reduces what the second needs, the second computes element by element",
    "small statistics are saved and all else is recomputed tile by tile (`recompute_from_stats`)",
    "a program walks the long axis in blocks, backwards where there is a recurrence, and carries its sums in "
    "registers (`reverse_scan`, `chunk_state_pass`)",
};
static const char *const emphases[] = {
    "",
    ", with small tiles and many programs",
    ", with large tiles and few programs",
    ", and with the fewest launches",
};
_Static_assert(KA_COUNT(schedules) * KA_COUNT(emphases) >= KA_JOB_SLOTS, "each slot has its own");

void ka_direction(enum ka_job_phase phase, int turn, int slot, struct ka_buf *out)
{
    size_t at = (size_t)slot;
    if (phase == KA_PHASE_OPTIMISE && turn > 0)
        at += (size_t)turn * 3;
    if (phase == KA_PHASE_FIX && slot == 0) {
        ka_buf_puts(out, "keep the schedule that there is, and repair it by the smallest change");
        return;
    }
    ka_buf_puts(out, schedules[at % KA_COUNT(schedules)]);
    ka_buf_puts(out, emphases[at / KA_COUNT(schedules) % KA_COUNT(emphases)]);
}
