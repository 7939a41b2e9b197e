/* What is left of a child for those who keep it. Knows no process. */
#include <signal.h>
#include <stdlib.h>

#include "base/files.h"
#include "child_internal.h"
#include "work.h"

static struct result *result_of(const struct ka_child_result *result)
{
    return (struct result *)result;
}

const struct ka_child_result *ka_child_result_keep(const struct ka_child_result *result)
{
    result_of(result)->holders++;
    return result;
}

/* On a thread: giving gigabytes of a scratch back takes a second. */
static void remove_files(void *arg)
{
    const struct result *r = arg;
    ka_close_at(&r->pub.scratch_fd);
    if (r->scratch)
        ka_rmtree(r->scratch, NULL);
}

static void free_result(void *arg)
{
    struct result *r = arg;
    free(r->scratch);
    ka_buf_free(&r->out);
    ka_buf_free(&r->err);
    ka_buf_free(&r->layers);
    free(r);
}

void ka_child_result_free(const struct ka_child_result *result)
{
    if (!result)
        return;
    struct result *r = result_of(result);
    if (--r->holders == 0)
        ka_work_start(r->loop, remove_files, free_result, r);
}

int ka_child_signal(const struct ka_child_result *result)
{
    if (result->term_signal)
        return result->term_signal;
    return result->exit_status > 128 && result->exit_status < 128 + NSIG ? result->exit_status - 128 : 0;
}
