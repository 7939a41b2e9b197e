/* Preflight's order as a table. */
#include "stages.h"

#include <errno.h>

#define AFTER(stage) (1u << (stage))

static const unsigned after[KA_STAGE_COUNT] = {
    [KA_STAGE_SWEEP] = 0,
    [KA_STAGE_DRAFT] = AFTER(KA_STAGE_SWEEP),
    [KA_STAGE_HIDDEN] = AFTER(KA_STAGE_SWEEP),
    [KA_STAGE_LONG] = AFTER(KA_STAGE_HIDDEN),
    [KA_STAGE_DIFFERENCES] = AFTER(KA_STAGE_SWEEP),
    [KA_STAGE_INPUTS] = AFTER(KA_STAGE_SWEEP),
    [KA_STAGE_SCALARS] = AFTER(KA_STAGE_SWEEP),
};

enum ka_stage ka_stages_next(struct ka_stages *stages)
{
    unsigned stage = 0;
    while (stage < KA_STAGE_COUNT && (stages->begun & 1u << stage || (after[stage] & ~stages->ended)))
        stage++;
    if (stage < KA_STAGE_COUNT)
        stages->begun |= 1u << stage;
    return (enum ka_stage)stage;
}

int ka_stages_end(struct ka_stages *stages, enum ka_stage stage)
{
    unsigned bit = 1u << stage;
    if (stage >= KA_STAGE_COUNT || !(stages->begun & bit) || stages->ended & bit)
        return -EINVAL;
    stages->ended |= bit;
    return 0;
}

bool ka_stages_through(const struct ka_stages *stages)
{
    return stages->ended == (1u << KA_STAGE_COUNT) - 1;
}
