/* Requests as values, and the command line of ka-jail that follows from one. Knows no process and no loop. */
#include "child_internal.h"

#include <stdlib.h>
#include <string.h>

void ka_child_args_jail(struct ka_args *args, const struct ka_child_req *req, const char *scratch,
                        const char *card)
{
    bool gpu = ka_child_req_is_gpu(req);
    ka_args_option(args, "--scratch", scratch);
    ka_args_option(args, "--profile", gpu ? "gpu" : "cpu");
    ka_args_number(args, "--mem-mb", req->limits.mem_mb);
    ka_args_number(args, "--cpu-s", req->limits.cpu_s);
    ka_args_number(args, "--fsize-mb", req->limits.fsize_mb);
    ka_args_number(args, "--nproc", req->limits.nproc);
    ka_args_number(args, "--scratch-mb", req->limits.scratch_mb);
    if (req->local_sockets)
        ka_args_add(args, "--local-sockets");
    if (req->require)
        ka_args_option(args, "--require", req->require);
    ka_args_option(args, "--ro", req->package_dir);
    ka_args_variable(args, "PYTHONPATH", req->package_dir);
    for (size_t i = 0; i < req->ro_count; i++)
        ka_args_option(args, "--ro", req->ro[i]);
    for (size_t i = 0; i < req->env_count; i++)
        ka_args_option(args, "--env", req->env[i]);
    if (gpu)
        ka_args_gpu(args, card);
    ka_args_add(args, "--");
    ka_args_add(args, req->python);
}

/* ---- requests ---- */

static bool is_complete(const struct ka_child_req *req)
{
    return req->request && req->python && req->package_dir && req->ro_count <= KA_ARGS_LIST_MAX &&
           req->env_count <= KA_ARGS_LIST_MAX &&
           (!req->device || strcmp(req->device, "cpu") == 0 || strcmp(req->device, "cuda") == 0);
}

static const char *const *copy_list(const char *const *list, size_t count)
{
    char **copy = ka_calloc(count + 1, sizeof(*copy));
    for (size_t i = 0; i < count; i++)
        copy[i] = ka_strdup(list[i]);
    return (const char *const *)copy;
}

static void free_list(const char *const *list)
{
    for (size_t i = 0; list && list[i]; i++)
        free((char *)list[i]);
    free((void *)list);
}

struct ka_child_req *ka_child_req_copy(const struct ka_child_req *req)
{
    if (!is_complete(req))
        return NULL;
    struct ka_child_req *copy = ka_calloc(1, sizeof(*copy));
    *copy = *req;
    copy->request = ka_strdup(req->request);
    copy->python = ka_strdup(req->python);
    copy->package_dir = ka_strdup(req->package_dir);
    copy->device = ka_strdup(req->device);
    copy->require = ka_strdup(req->require);
    copy->ro = copy_list(req->ro, req->ro_count);
    copy->env = copy_list(req->env, req->env_count);
    return copy;
}

void ka_child_req_free(struct ka_child_req *req)
{
    if (!req)
        return;
    free((char *)req->request);
    free((char *)req->python);
    free((char *)req->package_dir);
    free((char *)req->device);
    free((char *)req->require);
    free_list(req->ro);
    free_list(req->env);
    free(req);
}

bool ka_child_req_is_gpu(const struct ka_child_req *req)
{
    return req->device && strcmp(req->device, "cuda") == 0;
}
