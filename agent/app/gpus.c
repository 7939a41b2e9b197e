/* The device nodes, and what the driver tells of them. */
#include "gpus.h"

#include <glob.h>
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
