/* Any bytes as a configuration file: settings are well formed, failures have a message. */
#include <stdlib.h>
#include <string.h>

#include "agent/app/conf.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static int take(void *arg, const char *key, const struct ka_conf_value *value, int line, struct ka_err *err)
{
    (void)arg;
    (void)err;
    if (!*key || strstr(key, "-") || line < 1 || (value->type == KA_CONF_STRING) != (value->string != NULL))
        abort();
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct ka_err err = {{0}};
    if (ka_conf_parse((const char *)data, size, "fuzz", take, NULL, &err) != 0 && !err.msg[0])
        abort();
    return 0;
}
