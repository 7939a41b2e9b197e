/* The machine's commands into action. Knows no detail of any phase. */
#include "commands.h"

#include "ask.h"
#include "check.h"
#include "draft.h"
#include "expected.h"
#include "finish.h"
#include "inspect.h"
#include "operations.h"
#include "preflight.h"
#include "retrieve.h"
#include "tuner.h"

static void execute(struct ka_run *run, const struct ka_command *command)
{
    switch (command->type) {
    case KA_CMD_NONE:
        return;
    case KA_CMD_INSPECT:
        ka_run_inspect(run);
        return;
    case KA_CMD_PREFLIGHT:
        ka_run_preflight(run);
        return;
    case KA_CMD_RETRIEVE:
        ka_run_retrieve(run);
        return;
    case KA_CMD_DIFFERENTIATE:
        ka_run_differentiate(run);
        return;
    case KA_CMD_ASK:
    case KA_CMD_AWAIT:
        ka_run_ask(run);
        ka_run_await(run);
        return;
    case KA_CMD_TUNE:
        ka_run_tune(run, command->snapshot);
        return;
    case KA_CMD_CHECK:
        ka_run_ask(run); /* of a resumed run, what went with its process */
        if (run->job.op == command->op)
            ka_run_check(run, command->snapshot);
        return;
    case KA_CMD_FINISH:
        ka_run_finish(run);
        return;
    }
}

/* Whatever is in flight: nobody waits for it any more. */
static void stop_all(struct ka_run *run)
{
    ka_run_preflight_free(run);
    ka_run_draft_ahead_cancel(run);
    ka_run_check_free(run);
    ka_expected_discard(run);
    ka_expected_withdraw(run);
    ka_run_op_cancel(run);
    ka_run_ask_cancel(run);
}

const struct ka_run_actions ka_run_commands = {.execute = execute, .stop_all = stop_all};
