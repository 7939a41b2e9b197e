/* Command lines. Knows no process and no loop. */
#include "args.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void ka_args_add(struct ka_args *args, const char *text)
{
    if (args->count + 1 < KA_ARGS_MAX)
        args->argv[args->count++] = ka_strdup(text);
}

void ka_args_option(struct ka_args *args, const char *name, const char *value)
{
    ka_args_add(args, name);
    ka_args_add(args, value);
}

void ka_args_number(struct ka_args *args, const char *name, unsigned value)
{
    char text[16];
    snprintf(text, sizeof(text), "%u", value);
    if (value)
        ka_args_option(args, name, text);
}

void ka_args_variable(struct ka_args *args, const char *name, const char *value)
{
    KA_AUTO_FREE char *text = ka_format("%s=%s", name, value);
    ka_args_option(args, "--env", text);
}

void ka_args_gpu(struct ka_args *args, const char *card)
{
    static const char *const passed[] = {"LD_LIBRARY_PATH", "CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES"};
    for (size_t i = 0; i < KA_COUNT(passed); i++) {
        const char *value = card && i + 1 == KA_COUNT(passed) ? card : getenv(passed[i]);
        if (value)
            ka_args_variable(args, passed[i], value);
    }
}

void ka_args_clear(struct ka_args *args)
{
    for (size_t i = 0; i < args->count; i++)
        free(args->argv[i]);
    memset(args, 0, sizeof(*args));
}
