/* The device nodes, and what the driver tells of them. */
#include "gpus.h"

#include <glob.h>
#include <stdlib.h>
#include <string.h>

#include "base/files.h"

#define UNNAMED "NVIDIA GPU"
#define INFORMATION_MAX ((size_t)64 << 10)

/* "Model:   NVIDIA H100" among the lines of one GPU. */
static json_t *read_model(const char *path)
{
    static const char label[] = "Model:";
    KA_AUTO_BUF struct ka_buf text = {0};
    const char *at =
        ka_file_read(path, INFORMATION_MAX, &text, NULL) == 0 ? strstr(ka_buf_str(&text), label) : NULL;
    at = at ? at + strlen(label) + strspn(at + strlen(label), " \t") : "";
    json_t *model = *at && *at != '\n' ? json_stringn(at, strcspn(at, "\n")) : NULL;
    return model ? model : json_string(UNNAMED);
}

/* In a container there may be devices without the driver's folder. */
json_t *ka_gpus_find(void)
{
    json_t *gpus = json_array();
    glob_t devices = {0}, told = {0};
    glob("/dev/nvidia[0-9]*", 0, NULL, &devices);
    glob("/proc/driver/nvidia/gpus/*/information", 0, NULL, &told);
    for (size_t i = 0; i < devices.gl_pathc; i++)
        json_array_append_new(gpus, i < told.gl_pathc ? read_model(told.gl_pathv[i]) : json_string(UNNAMED));
    globfree(&devices);
    globfree(&told);
    return gpus;
}

/* What CUDA makes of its variable: it stops before what is no device. */
static char *visible(const char *value)
{
    KA_AUTO_BUF struct ka_buf names = {0};
    value += strspn(value, " ");
    while (*value && *value != '-') {
        size_t len = strcspn(value, ", ");
        ka_buf_puts(&names, names.len ? "," : "");
        ka_buf_add(&names, value, len);
        value += len;
        value += strspn(value, ", ");
    }
    return ka_strdup(ka_buf_str(&names));
}

/* Numbers are CUDA's, which counts those that it can open: not those of the nodes. */
char *ka_gpus_names(const char *asked)
{
    const char *value = getenv("CUDA_VISIBLE_DEVICES");
    KA_AUTO_BUF struct ka_buf names = {0};
    if (asked || value)
        return asked ? ka_strdup(asked) : visible(value);
    json_auto_t *gpus = ka_gpus_find();
    for (size_t i = 0; i < json_array_size(gpus); i++)
        ka_buf_printf(&names, "%s%zu", i ? "," : "", i);
    return ka_strdup(ka_buf_str(&names));
}
